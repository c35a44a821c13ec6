"""Round robin: each in turn, whoever comes and goes."""

from __future__ import annotations

import collections

import pytest

from policies.base import Worker
from policies.round_robin import RoundRobin


def fleet(*orders, weights=()):
    return tuple(
        Worker(
            url=f"http://w{n}",
            endpoint=f"10.0.0.{n}:80",
            order=n,
            weight=weights[n] if weights else 1.0,
        )
        for n in orders
    )


@pytest.fixture
def policy():
    return RoundRobin()


@pytest.fixture
def send(policy, get, rng):
    """Route one request as the router does; return the order of the worker that got it."""

    def send(workers, *, fallbacks=0):
        first = policy.pick(get, workers, now=0.0, rng=rng)
        rest, previous = workers, first
        for _ in range(fallbacks):
            rest = tuple(worker for worker in rest if worker is not previous)
            previous = policy.pick(get, rest, now=0.0, rng=rng)
        policy.on_sent(first, get, 0.0)
        return first.order

    return send


@pytest.mark.parametrize("count", [1, 2, 3, 10])
@pytest.mark.parametrize("fallbacks", [0, 1, 2])
def test_each_worker_in_turn(send, count, fallbacks):
    """Exactly fair over every round, also when fallbacks are asked for in between."""
    workers = fleet(*range(count))

    got = [send(workers, fallbacks=min(fallbacks, count - 1)) for _ in range(4 * count)]

    assert got == [*range(count)] * 4


def test_fallbacks_are_the_next_in_line(policy, get, rng):
    """Without the first choice the one after it is named, and so on around."""
    workers = fleet(0, 1, 2)
    policy.on_sent(workers[1], get, 0.0)

    first = policy.pick(get, workers, now=0.0, rng=rng)
    second = policy.pick(get, workers[:2], now=0.0, rng=rng)
    third = policy.pick(get, (workers[1],), now=0.0, rng=rng)

    assert [first.order, second.order, third.order] == [2, 0, 1]


def test_worker_that_joins_waits_for_its_turn(send):
    """It stands at the end of the line; nobody is skipped or served twice."""
    assert [send(fleet(0, 1, 2)) for _ in range(2)] == [0, 1]

    assert [send(fleet(0, 1, 2, 3)) for _ in range(6)] == [2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("gone", "expected"),
    [(0, [2, 3, 1, 2]), (1, [2, 3, 0, 2]), (2, [3, 0, 1, 3]), (3, [2, 0, 1, 2])],
)
def test_worker_that_leaves_shifts_nobody(send, gone, expected):
    """Before the cursor, under it, next in line or behind it: the turn goes on where it was."""
    assert [send(fleet(0, 1, 2, 3)) for _ in range(2)] == [0, 1]

    left = fleet(*(order for order in range(4) if order != gone))

    assert [send(left) for _ in range(4)] == expected


def test_worker_ejected_for_a_while_takes_its_old_place(send):
    """Ejected and back: the same order as before."""
    everybody, others = fleet(0, 1, 2), fleet(0, 2)

    got = [send(everybody), send(others), send(others), send(everybody), send(everybody)]

    assert got == [0, 2, 0, 1, 2]


def test_one_candidate_is_picked_again_and_again(send):
    """There is nobody else, also where the cursor is far beyond."""
    assert [send(fleet(7)) for _ in range(3)] == [7, 7, 7]
    assert send(fleet(3)) == 3


def test_picks_without_send_do_not_move_the_cursor(policy, get, rng):
    """Asking is not sending."""
    workers = fleet(0, 1, 2)

    assert {policy.pick(get, workers, now=0.0, rng=rng).order for _ in range(5)} == {0}


def test_end_of_a_request_moves_nothing(policy, send):
    """Only what is sent counts."""
    workers = fleet(0, 1, 2)
    send(workers)

    policy.on_done(workers[2], 1.0)

    assert send(workers) == 1


def test_shares_stay_exact_while_workers_come_and_go(send):
    """Who was there all the time got the same number of requests, give or take one a change."""
    got = collections.Counter()
    changes = 0
    for step in range(60):
        orders = [0, 1, 2, *([5] if step % 2 else []), *([6, 7] if step % 3 else [])]
        changes += 1
        for _ in range(len(orders)):
            got[send(fleet(*orders))] += 1

    stayed = [got[order] for order in (0, 1, 2)]
    assert max(stayed) - min(stayed) <= 1
    assert abs(stayed[0] - changes) <= 1


@pytest.mark.parametrize("weights", [(1.0, 3.0, 2.0), (0.5, 0.25, 0.25), (2.0, 2.0, 1.0)], ids=str)
@pytest.mark.parametrize("fallbacks", [0, 2])
def test_unequal_weights_give_exact_shares(policy, send, weights, fallbacks):
    """Over whole rounds each gets its share, spread out, also when fallbacks are asked for."""
    workers = fleet(0, 1, 2, weights=weights)
    policy.on_workers(workers)
    unit = min(weights)
    rounds = round(sum(weights) / unit)

    got = [send(workers, fallbacks=fallbacks) for _ in range(4 * rounds)]

    counts = collections.Counter(got)
    assert {n: counts[n] for n in range(3)} == {n: round(4 * weights[n] / unit) for n in range(3)}


def test_worker_that_joins_a_weighted_pool_is_not_flooded(policy, send):
    """It starts where the others are, and does not catch up on what it never missed."""
    before = fleet(0, 1, weights=(1.0, 2.0))
    policy.on_workers(before)
    for _ in range(30):
        send(before)
    after = (*before, Worker(url="http://w2", endpoint="10.0.0.2:80", order=2))
    policy.on_workers(after)

    counts = collections.Counter(send(after) for _ in range(8))

    assert counts == {0: 2, 1: 4, 2: 2}


def test_worker_away_from_a_weighted_pool_does_not_catch_up(policy, send):
    """Ejected for a while: on its return it gets its share, not all the turns it missed."""
    workers = fleet(0, 1, 2, weights=(1.0, 1.0, 2.0))
    policy.on_workers(workers)
    for _ in range(40):
        send(workers[1:])

    got = [send(workers) for _ in range(8)]

    assert 1 <= got.count(0) <= 3


def test_equal_weights_again_is_the_plain_order_again(policy, send):
    """The worker that made the difference has left."""
    workers = fleet(0, 1, 2, weights=(1.0, 1.0, 2.0))
    policy.on_workers(workers)
    send(workers)
    policy.on_workers(workers[:2])

    got = [send(workers[:2]) for _ in range(4)]

    assert got in ([0, 1, 0, 1], [1, 0, 1, 0])
