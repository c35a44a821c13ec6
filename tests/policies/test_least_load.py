"""Least load: the idlest, by chance among equals."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import Request
from policies.least_load import LeastLoad
from tests.policies.fleets import Fleet, fleet

GET = Request("GET", "/", {}, b"")


@given(loads=st.lists(st.integers(0, 9), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_nobody_is_idler_than_the_pick(loads, seed):
    """Whatever the loads."""
    pool = Fleet(LeastLoad(), fleet(len(loads)), seed=seed)
    for worker, load in zip(pool.members, loads, strict=True):
        worker.in_flight = load

    assert pool.pick(GET).in_flight == min(loads)


@pytest.mark.parametrize("tied", [2, 3, 6])
def test_ties_are_broken_by_chance(tied):
    """All that tie get the same share; within five standard deviations."""
    pool = Fleet(LeastLoad(), fleet(8))
    for worker in pool.members[tied:]:
        worker.in_flight = 1

    got = collections.Counter(pool.pick(GET).order for _ in range(1200))

    share = 1200 / tied
    assert sorted(got) == list(range(tied))
    assert all(abs(n - share) < 5 * (share * (1 - 1 / tied)) ** 0.5 for n in got.values())


def test_pool_fills_evenly():
    """No worker is ever two requests ahead."""
    pool = Fleet(LeastLoad(), fleet(7))
    for _ in range(100):
        pool.pick(GET).in_flight += 1
        loads = [worker.in_flight for worker in pool.members]
        assert max(loads) - min(loads) <= 1


def test_weights_share_the_load():
    """In flight in proportion to 1 : 2 : 5."""
    pool = Fleet(LeastLoad(), fleet(3, weights=[1.0, 2.0, 5.0]))

    for _ in range(80):
        pool.pick(GET).in_flight += 1

    for worker, expected in zip(pool.members, (10, 20, 50), strict=True):
        assert abs(worker.in_flight - expected) <= worker.weight


def test_body_is_not_wanted():
    """Loads are all it knows."""
    assert not LeastLoad.needs_body
