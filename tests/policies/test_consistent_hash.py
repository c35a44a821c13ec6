"""Consistent hashing: sessions stay, move as little as possible, and come back."""

from __future__ import annotations

import collections
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import Request, Worker
from policies.consistent_hash import ConsistentHash
from tests.policies.fleets import Fleet, chat, completion, fleet, named

SESSIONS = [f"session-{number}" for number in range(600)]


def where(pool, *, without=()):
    """Return the worker of each session."""
    return {session: pool.pick(named(session), without=without) for session in SESSIONS}


def test_session_always_has_the_same_worker():
    """Whatever the load, the path or the order of asking."""
    pool = Fleet(ConsistentHash(), fleet(7))
    before = where(pool)
    for worker in pool.members:
        worker.in_flight = worker.order * 50

    assert where(pool) == before


def test_another_router_sends_sessions_to_the_same_place():
    """It saw the workers join in another order and has another seed."""
    workers = fleet(9)
    ours = Fleet(ConsistentHash(), workers, seed=1)
    theirs = Fleet(
        ConsistentHash(),
        [Worker(w.url, w.endpoint, order) for order, w in enumerate(reversed(workers))],
        seed=2,
    )

    assert {s: w.url for s, w in where(ours).items()} == {
        s: w.url for s, w in where(theirs).items()
    }


@pytest.mark.parametrize("count", [2, 5, 12])
def test_unavailable_worker_lends_its_sessions_to_others(count):
    """Nobody else's move, they are spread over more than one neighbour, and all come back."""
    pool = Fleet(ConsistentHash(), fleet(count))
    before = where(pool)
    away = pool.members[1]

    during = where(pool, without=(away,))

    assert all(during[s] is before[s] for s in SESSIONS if before[s] is not away)
    lent = collections.Counter(during[s].url for s in SESSIONS if before[s] is away)
    assert away.url not in lent
    assert len(lent) >= min(count - 1, 3)
    assert where(pool) == before


def test_second_choice_is_where_the_session_goes_when_the_first_is_away():
    """So a retry lands where the cache will be if the worker stays away."""
    pool = Fleet(ConsistentHash(), fleet(6))

    for session in SESSIONS[:50]:
        first = pool.pick(named(session))
        second = pool.pick(named(session), without=(first,))
        third = pool.pick(named(session), without=(first, second))
        assert len({first, second, third}) == 3
        assert pool.pick(named(session), without=(second,)) is first


def test_everybody_away_but_one():
    """It gets everything."""
    pool = Fleet(ConsistentHash(), fleet(5))

    assert set(where(pool, without=pool.members[:4]).values()) == {pool.members[4]}


def test_request_without_anything_to_go_by_goes_anywhere():
    """Not all to one worker."""
    pool = Fleet(ConsistentHash(), fleet(3))
    bare = Request("GET", "/v1/models", {}, b"")

    assert {pool.pick(bare) for _ in range(60)} == set(pool.members)


@pytest.mark.parametrize("fallback", ["prompt_prefix", "body"])
def test_conversation_without_id_goes_by_its_text(fallback):
    """The opening keeps later turns together; the whole body only equal requests."""
    pool = Fleet(ConsistentHash(hash_fallback=fallback), fleet(50))
    stayed = 0
    for number in range(30):
        turns = [("system", "be brief"), ("user", f"question {number}")]
        first = pool.pick(chat(*turns))
        assert pool.pick(chat(*turns)) is first
        later = pool.pick(chat(*turns, ("assistant", "answer"), ("user", "more")))
        stayed += later is first

    assert stayed == 30 if fallback == "prompt_prefix" else stayed < 5


def test_body_is_asked_for_only_when_no_header_names_the_session():
    """The usual six and the operator's own."""
    policy = ConsistentHash(session_headers=("x-chat",))

    assert policy.needs_body
    assert not policy.wants_body({"x-chat": "1"})
    assert not policy.wants_body({"x-trace-id": "1"})
    assert policy.wants_body({"x-chat": "", "x-session-id": ""})
    assert policy.wants_body({})


def test_session_of_the_body_and_of_the_header_are_one():
    """It is the id that counts, not where it stood."""
    pool = Fleet(ConsistentHash(), fleet(40))

    for session in SESSIONS[:20]:
        by_header = pool.pick(named(session))
        assert pool.pick(completion("whatever", user=session)) is by_header


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
@pytest.mark.parametrize("count", [2, 5, 16])
@pytest.mark.parametrize("skew", ["one session", "few sessions", "many sessions"])
def test_bounded_load_is_never_exceeded(factor, count, skew):
    """No worker over ceil(c * (in flight) / workers) after any pick, however hot one session is."""
    pool = Fleet(ConsistentHash(balance_factor=factor), fleet(count))
    distinct = {"one session": 1, "few sessions": 5, "many sessions": 600}[skew]
    for number in range(200):
        worker = pool.send(named(SESSIONS[number % distinct]))
        worker.in_flight += 1
        total = sum(w.in_flight for w in pool.members)
        assert worker.in_flight <= math.ceil(factor * total / count)
        if number % 3 == 2:
            busiest = max(pool.members, key=lambda w: w.in_flight)
            busiest.in_flight -= 1


@given(
    in_flight=st.lists(st.integers(0, 30), min_size=2, max_size=8),
    factor=st.sampled_from([1.0, 1.25, 3.0]),
    session=st.sampled_from(SESSIONS),
)
def test_bound_holds_from_any_state(in_flight, factor, session):
    """Also where loads came about otherwise: the one picked is within the bound."""
    pool = Fleet(ConsistentHash(virtual_nodes=4, balance_factor=factor), fleet(len(in_flight)))
    for worker, load in zip(pool.members, in_flight, strict=True):
        worker.in_flight = load

    worker = pool.pick(named(session))

    assert worker.in_flight + 1 <= math.ceil(factor * (sum(in_flight) + 1) / len(in_flight))


@settings(max_examples=40)
@given(
    weights=st.lists(st.sampled_from([0.1, 0.25, 1.0, 3.0]), min_size=2, max_size=6),
    sends=st.integers(1, 20),
    session=st.sampled_from(SESSIONS),
)
def test_bound_is_a_share_of_the_weight(weights, sends, session):
    """With weights: no worker over ceil(c * requests in flight * its share of the weight)."""
    pool = Fleet(
        ConsistentHash(virtual_nodes=8, balance_factor=1.25), fleet(len(weights), weights=weights)
    )
    for _ in range(sends):
        pool.send(named(session)).in_flight += 1

    total = sum(weights)
    for worker in pool.members:
        assert worker.in_flight <= math.ceil(1.25 * sends * worker.weight / total)


def test_bound_leaves_sessions_in_place_while_there_is_room():
    """An idle pool is routed as without it."""
    workers = fleet(8)
    bounded = Fleet(ConsistentHash(balance_factor=1.25), workers)

    assert where(bounded) == where(Fleet(ConsistentHash(), workers))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"virtual_nodes": 0}, "virtual_nodes must be from 1 to 10000, got 0"),
        ({"balance_factor": 0.99}, "balance_factor must be >= 1, got 0.99"),
    ],
)
def test_parameters_out_of_range_are_refused(parameters, message):
    """With the value in the message."""
    with pytest.raises(ValueError, match=message):
        ConsistentHash(**parameters)
