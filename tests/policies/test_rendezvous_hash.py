"""Rendezvous hashing: like a ring, without one."""

from __future__ import annotations

import collections

import pytest

from policies import rendezvous_hash
from policies.base import Request, Worker
from policies.rendezvous_hash import PRIME, RendezvousHash
from tests.policies.fleets import Fleet, chat, fleet, named

KEYS = [f"session-{number}" for number in range(2000)]


def where(pool, keys=KEYS, *, without=()):
    return {key: pool.pick(named(key), without=without) for key in keys}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5, 10])
def test_shares_are_even(count):
    """20,000 sessions, within 8 % of the mean (five standard deviations for ten workers: 11 %)."""
    keys = [f"user/{number}" for number in range(20_000)]

    got = collections.Counter(where(Fleet(RendezvousHash(), fleet(count)), keys).values())

    mean = len(keys) / count
    assert len(got) == count
    assert all(abs(number - mean) < 0.11 * mean for number in got.values())


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 10, 20])
def test_worker_that_leaves_gives_its_sessions_to_all_others_evenly(count):
    """Nobody else's move; each of the others gets a part; all come back."""
    pool = Fleet(RendezvousHash(), fleet(count))
    before = where(pool)
    gone = pool.members[count // 2]

    during = where(pool, without=(gone,))

    assert all(during[key] is before[key] for key in KEYS if before[key] is not gone)
    lent = collections.Counter(during[key] for key in KEYS if before[key] is gone)
    assert sum(lent.values()) <= 1.3 / count * len(KEYS)
    assert len(lent) >= 0.8 * (count - 1)
    assert where(pool) == before


def test_worker_that_joins_takes_from_everybody():
    """Only towards the new one, at most 1.3/N."""
    workers = fleet(11)
    pool = Fleet(RendezvousHash(), workers[:10])
    before = where(pool)

    pool.become(workers)
    after = where(pool)

    moved = [key for key in KEYS if after[key] is not before[key]]
    assert {after[key] for key in moved} == {workers[10]}
    assert 0 < len(moved) <= 1.3 / 11 * len(KEYS)
    assert len({before[key] for key in moved}) == 10


def test_routers_agree():
    """Whatever the order of joining."""
    workers = fleet(12)
    others = [Worker(w.url, w.endpoint, order) for order, w in enumerate(reversed(workers))]

    ours = where(Fleet(RendezvousHash(), workers), KEYS[:300])
    theirs = where(Fleet(RendezvousHash(), others), KEYS[:300])

    assert {k: w.url for k, w in ours.items()} == {k: w.url for k, w in theirs.items()}


def test_members_that_nobody_told_about_are_hashed_all_the_same():
    """A pick before the first news of the members answers as after it."""
    workers = fleet(5)
    told = Fleet(RendezvousHash(), workers)
    untold = RendezvousHash()

    for key in KEYS[:50]:
        picked = untold.pick(named(key), workers, now=0.0, rng=told.rng)
        assert picked is told.pick(named(key))


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "share"), [(3.0, 0.6), (0.5, 0.2)])
def test_share_follows_the_weight(weight, share):
    """Three workers, one of another weight; what it gains or loses moves nobody else."""
    workers = fleet(3, weights=[1.0, weight, 1.0])
    pool = Fleet(RendezvousHash(), workers)
    keys = [f"u{number}" for number in range(6000)]

    got = where(pool, keys)

    assert collections.Counter(got.values())[workers[1]] / len(keys) == pytest.approx(
        share, rel=0.08
    )
    during = where(pool, keys[:500], without=(workers[0],))
    assert all(during[k] is got[k] for k in keys[:500] if got[k] is not workers[0])


def test_highest_hash_does_not_break_weights(monkeypatch):
    """(hash + 1) / 2^61 of the largest hashes rounds to one, whose logarithm is zero."""
    monkeypatch.setattr(rendezvous_hash, "_factors_of", lambda _: (1, 0))
    monkeypatch.setattr(rendezvous_hash, "hash64", lambda _: PRIME - 1)
    pool = Fleet(RendezvousHash(), fleet(2, weights=[1.0, 2.0]))

    assert pool.pick(named("x")) in pool.members


def test_request_without_anything_to_go_by_goes_anywhere():
    """Not all to one worker."""
    pool = Fleet(RendezvousHash(), fleet(3))

    assert {pool.pick(Request("GET", "/", {}, b"")) for _ in range(60)} == set(pool.members)


@pytest.mark.parametrize("fallback", ["prompt_prefix", "body"])
def test_conversation_without_id_goes_by_its_text(fallback):
    """Later turns stay, or only equal bodies do."""
    pool = Fleet(RendezvousHash(hash_fallback=fallback), fleet(50))
    turns = [("user", "question")]
    later = [*turns, ("assistant", "answer"), ("user", "more")]

    same = pool.pick(chat(*turns)) is pool.pick(chat(*later))

    assert pool.pick(chat(*turns)) is pool.pick(chat(*turns))
    assert same is (fallback == "prompt_prefix")


def test_body_is_asked_for_only_when_no_header_names_the_session():
    """The operator's header is enough too."""
    policy = RendezvousHash(session_headers=("x-chat",))

    assert not policy.wants_body({"x-chat": "1"})
    assert not policy.wants_body({"x-user-id": "1"})
    assert policy.wants_body({"x-other": "1"})
