"""Buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import MIN_RATE
from extproc.xds.model import RateLimits
from extproc.xds.rate_limit import build_bucket, build_rate_limit
from extproc.xds.slots import build_empty

RATES = st.floats(MIN_RATE, 10_000_000)


@given(RATES, st.integers(0, 10_000_000))
def test_bucket_fills_at_its_rate(rate, burst):
    """As exactly as Envoy can tell; it takes no interval below 50 ms."""
    bucket = build_bucket(rate, burst)

    interval_s = bucket.fill_interval.total_seconds()
    assert bucket.tokens_per_fill / interval_s == pytest.approx(rate, rel=1e-5)
    assert 0.05 <= interval_s <= 1 / MIN_RATE
    assert bucket.tokens_per_fill >= 1
    assert bucket.max_tokens >= 1


@pytest.mark.parametrize(
    ("rate", "burst", "at_once"),
    [(0.5, 0, 2), (10, 0, 2), (11, 0, 3), (1000, 0, 200), (5, 40, 40), (100, 1, 1)],
)
def test_burst_is_what_a_fifth_of_a_second_allows(rate, burst, at_once):
    """At least two, or what was said."""
    assert build_bucket(rate, burst).max_tokens == at_once


def test_without_rates_nothing_is_counted():
    """An empty place in the chain costs next to nothing."""
    assert build_rate_limit(RateLimits()) == build_empty()
    assert build_rate_limit(RateLimits(burst=7)) == build_empty()
