"""What is remembered of tokens, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.token_cache import (
    MAX_REJECTED_S,
    TokenCache,
    Verdict,
    identity,
    token_digest,
)

A, B, C = (token_digest(name) for name in "abc")


@pytest.mark.parametrize(
    ("verdict", "kept_s"), [(Verdict.ACCEPTED, 60.0), (Verdict.REJECTED, MAX_REJECTED_S)]
)
def test_answer_counts_for_its_time(verdict, kept_s):
    """Not a moment longer."""
    cache = TokenCache(60)
    cache.put(A, verdict, now=5)

    assert cache.get(A, 5 + kept_s - 0.01) is verdict
    assert cache.get(A, 5 + kept_s) is None
    assert len(cache) == 0


def test_failure_is_not_remembered():
    """The next request asks again, and what was known stays known."""
    cache = TokenCache(60)
    cache.put(A, Verdict.UNKNOWN, 0)
    cache.put(B, Verdict.ACCEPTED, 0)
    cache.put(B, Verdict.UNKNOWN, 1)

    assert cache.get(A, 0) is None
    assert cache.get(B, 2) is Verdict.ACCEPTED


def test_short_time_holds_for_rejections_too():
    """Whoever wants to be asked every second is."""
    cache = TokenCache(1)
    cache.put(A, Verdict.REJECTED, 0)

    assert cache.get(A, 1) is None


def test_of_too_many_the_one_goes_that_was_not_asked_for():
    """However many tokens an attacker invents."""
    cache = TokenCache(60, max_tokens=2)
    cache.put(A, Verdict.ACCEPTED, 0)
    cache.put(B, Verdict.ACCEPTED, 0)
    cache.get(A, 1)
    cache.put(C, Verdict.REJECTED, 1)

    assert (cache.get(A, 2), cache.get(B, 2)) == (Verdict.ACCEPTED, None)


@given(st.lists(st.tuples(st.text(max_size=3), st.sampled_from(Verdict)), max_size=30))
def test_size_is_bounded(tokens):
    """Whatever comes."""
    cache = TokenCache(60, max_tokens=5)
    for token, verdict in tokens:
        cache.put(token_digest(token), verdict, 0)

    assert len(cache) <= 5


def test_name_tells_clients_apart_and_not_their_tokens():
    """It is the same each time, and nobody gets back from it."""
    assert identity(A) == identity(token_digest("a")) != identity(B)
    assert identity(token_digest("CANARY")).startswith("key-")
    assert "CANARY" not in identity(token_digest("CANARY"))
