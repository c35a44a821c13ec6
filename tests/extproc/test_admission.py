"""Who may go on, who waits and who is refused: counts and queues, then with exchanges and workers."""

from __future__ import annotations

import dataclasses
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission import GATE, Admission, Limits, Pace, Place, Wait, priority_of, tenant_of
from extproc.discovery.updates import Add, Remove
from extproc.errors import Refusal
from extproc.exchange import Exchange
from extproc.pool import Pool
from extproc.router import Router
from policies.base import Worker
from tests.extproc.envoy_messages import (
    BUFFERED,
    FULL_DUPLEX,
    announce,
    parse,
    request_body,
    request_headers,
)
from tests.extproc.recorder import Recorder
from tests.fleets import STATIC, registry_of, spec_of

NOBODY = Place(Wait.NO_WORKER)


def start(**limits):
    return Admission(Limits(**{"queue": 10, "queue_s": 60.0, "no_worker_s": 30.0, **limits}))


def wait(admission, place=GATE, now=0.0, **headers):
    """Begin to wait; return the ticket."""
    ticket = admission.ticket({name.replace("_", "-"): value for name, value in headers.items()})
    assert admission.wait(ticket, place, now) is None
    return ticket


def refusal(admission, place=GATE, now=0.0):
    ticket = admission.ticket({})
    found = admission.wait(ticket, place, now)
    assert ticket.place is None
    return found


def busy_pool(count=1, limit=1):
    """Return a pool of *count* workers, and the place of who waits for any."""
    pool = Pool("default", Recorder())
    workers = tuple(
        Worker(f"http://10.0.0.{n}:80", f"10.0.0.{n}:80", n, limit=limit) for n in range(count)
    )
    pool.set_members(workers)
    pool.set_candidates(workers)
    return pool, Place(Wait.BUSY, pool)


# --- what a request says of itself -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "priority"),
    [
        ("5", 5),
        ("-5", -5),
        (" 7 ", 7),
        ("100", 100),
        ("-100", -100),
        ("0", 0),
        ("101", 0),
        ("-101", 0),
        ("", 0),
        ("high", 0),
        ("1.5", 0),
        ("--5", 0),
        ("-", 0),
        ("5 5", 0),
        ("٣", 0),
        ("²", 0),
        ("1" * 5000, 0),
    ],
)
def test_priority_is_an_integer_within_bounds(text, priority):
    """Anything else is as good as nothing."""
    assert priority_of({"x-request-priority": text}) == priority


def test_priority_may_be_missing():
    """Most requests have none."""
    assert priority_of({}) == 0


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({}, ""),
        ({"x-tenant-id": "t"}, "t"),
        ({"x-router-client": "c"}, "c"),
        ({"x-router-client": "c", "x-tenant-id": "t"}, "c"),
        ({"x-router-client": "", "x-tenant-id": "t"}, "t"),
        ({"x-tenant-id": "x" * 1000}, "x" * 128),
    ],
)
def test_tenant_is_who_envoy_says_else_who_the_client_says(headers, tenant):
    """Cut to a length that costs little."""
    assert tenant_of(headers) == tenant


# --- the gate --------------------------------------------------------------------------------------


def test_gate_lets_in_as_many_as_may_be_under_way():
    """One more when one has left."""
    admission = start(concurrent=2)

    assert [admission.enter() for _ in range(4)] == [True, True, False, False]
    assert admission.admitted == 2
    admission.release()
    assert admission.enter()


def test_nobody_passes_the_gate_before_who_waits_there():
    """Though there is room: it is for the one whose turn it is."""
    admission = start(concurrent=1)
    admission.enter()
    ticket = wait(admission)
    admission.release()

    assert not admission.enter()
    assert admission.next() is ticket
    admission.pass_gate(ticket, 1.0)
    assert (admission.admitted, admission.waiting[Wait.LIMIT]) == (1, 0)
    assert admission.next() is None


def test_next_names_nobody_while_there_is_no_room():
    """And is not ready."""
    admission = start(concurrent=1)
    admission.enter()
    wait(admission)

    assert not admission.ready
    assert admission.next() is None


def test_full_queue_refuses():
    """As many wait as may; with none, nobody does."""
    admission = start(concurrent=1, queue=2)
    for _ in range(2):
        wait(admission)

    assert refusal(admission) is Refusal.QUEUE_FULL
    assert refusal(start(concurrent=1, queue=0)) is Refusal.QUEUE_FULL


def test_full_queue_makes_room_for_a_tenant_that_has_less():
    """The latest request of the greedy one is told that the queue is full."""
    admission = start(concurrent=1, queue=2)
    first, second = (wait(admission, x_tenant_id="greedy") for _ in range(2))

    modest = wait(admission, x_tenant_id="modest")

    assert admission.displaced == [second]
    assert admission.expired(second) is Refusal.QUEUE_FULL
    admission.leave(second, 0.0)
    assert set(admission.tickets()) == {first, modest}


def test_request_that_moves_is_not_turned_away():
    """It has waited for a worker; that the queue of those who wait for room is full is not its fault."""
    pool, busy = busy_pool()
    admission = start(queue=1)
    wait(admission, busy)
    moved = wait(admission, NOBODY)
    admission.leave(moved, 1.0)

    assert admission.wait(moved, busy, 1.0, moved=True) is None
    assert pool is busy.pool


def test_who_leaves_makes_room_in_the_queue():
    """At once."""
    admission = start(concurrent=1, queue=1)
    ticket = wait(admission)

    admission.leave(ticket, 1.0)

    assert ticket.place is None
    assert admission.places == {}
    wait(admission)


def test_leaving_twice_is_leaving_once():
    """A close may come after a timeout."""
    admission = start(concurrent=1)
    ticket = wait(admission)
    admission.leave(ticket, 1.0)
    admission.leave(ticket, 2.0)

    assert admission.waiting[Wait.LIMIT] == 0


def test_time_in_queues_adds_up():
    """What was used at the gate is not there for a worker with room."""
    admission = start(queue_s=10.0)
    _, place = busy_pool()
    ticket = wait(admission, now=0.0)
    assert ticket.deadline == 10.0
    admission.leave(ticket, 4.0)

    assert admission.wait(ticket, place, 5.0) is None

    assert ticket.deadline == 11.0
    admission.leave(ticket, 11.0)
    assert admission.wait(ticket, GATE, 11.0) is Refusal.QUEUE_TIMEOUT
    assert ticket.waited_s == 10.0


def test_time_without_workers_is_counted_by_itself():
    """Waiting for a worker to be there takes nothing from the time in queues."""
    admission = start(queue_s=10.0, no_worker_s=5.0)
    ticket = wait(admission, NOBODY, now=0.0)
    assert ticket.deadline == 5.0
    admission.leave(ticket, 5.0)

    assert admission.wait(ticket, NOBODY, 5.0) is Refusal.NO_WORKER
    assert admission.wait(ticket, GATE, 5.0) is None
    assert ticket.deadline == 15.0


def test_nobody_waits_for_a_worker_when_that_is_off():
    """Refused as ever."""
    assert refusal(start(no_worker_s=0), NOBODY) is Refusal.NO_WORKER


def test_waiting_for_a_worker_is_not_bounded_by_the_queue():
    """Only by how many may be under way, who have all been let in."""
    admission = start(queue=1)
    for _ in range(50):
        wait(admission, NOBODY)

    assert admission.waiting[Wait.NO_WORKER] == 50


def test_each_pool_has_a_queue_of_its_own():
    """One that is full says nothing of the other."""
    admission = start(queue=1)
    _, one = busy_pool()
    _, other = busy_pool()
    wait(admission, one)

    assert refusal(admission, one) is Refusal.QUEUE_FULL
    assert refusal(admission, one._replace(model="adapter")) is Refusal.QUEUE_FULL
    wait(admission, other)


def test_reason_of_a_refusal_at_the_end_of_the_wait():
    """408 for a queue, 503 for want of workers."""
    admission = start()
    _, busy = busy_pool()

    assert admission.expired(wait(admission)) is Refusal.QUEUE_TIMEOUT
    assert admission.expired(wait(admission, busy)) is Refusal.QUEUE_TIMEOUT
    assert admission.expired(wait(admission, NOBODY)) is Refusal.NO_WORKER


def test_service_that_stops_lets_nobody_wait():
    """Who waits is refused, as is who comes."""
    admission = start()
    ticket = wait(admission)
    admission.stopping = True

    assert admission.expired(ticket) is Refusal.NO_WORKER
    assert refusal(admission) is Refusal.NO_WORKER
    assert admission.tickets() == [ticket]


def test_higher_limit_lets_in_who_waits():
    """A changed configuration counts at once."""
    admission = start(concurrent=1)
    admission.enter()
    ticket = wait(admission)

    admission.configure(Limits(concurrent=2))

    assert admission.ready
    assert admission.next() is ticket


def test_gate_is_fair_to_tenants():
    """Through the headers that say who asks, and how urgently."""
    admission = start(concurrent=1, queue=100)
    many = [wait(admission, x_tenant_id="a") for _ in range(50)]
    one = wait(admission, x_tenant_id="b")
    urgent = wait(admission, x_tenant_id="a", x_request_priority="1")
    order = []
    for _ in range(3):
        order.append(admission.next())
        admission.pass_gate(order[-1], 0.0)
        admission.release()

    assert order == [urgent, many[0], one]


# --- Retry-After -----------------------------------------------------------------------------------


def test_retry_after_follows_the_rate_of_ends():
    """Ten waiting, two ends a second: try again in six seconds (the one that asks is the eleventh)."""
    admission = start(concurrent=1000)
    for _ in range(1000):
        admission.enter()
    for second in range(10):
        wait(admission, now=float(second))
        for _ in range(2):
            admission.release()

    assert admission.retry_after_s(None, 9.0) == pytest.approx(6, abs=1)


@pytest.mark.parametrize(("queue_s", "expected"), [(60.0, 60), (2.7, 2), (0.2, 1)])
def test_retry_after_is_the_whole_wait_while_nothing_ends(queue_s, expected):
    """Whole seconds, one at least."""
    admission = start(concurrent=1, queue_s=queue_s)
    wait(admission)

    assert admission.retry_after_s(None, 1.0) == expected
    assert admission.retry_after_s(busy_pool()[0], 1.0) == expected


def test_retry_after_is_one_second_at_least():
    """However fast requests end."""
    admission = start(concurrent=1000)
    wait(admission, now=0.0)
    for _ in range(900):
        admission.admitted += 1
        admission.release()

    assert admission.retry_after_s(None, 1.0) == 1


def test_pace_forgets_what_nobody_looked_at():
    """A quiet hour says nothing of now."""
    pace = Pace()
    assert pace.look(0.0) == 0.0
    pace.count += 100
    assert pace.look(3600.0) == 0.0
    pace.count += 10
    assert pace.look(3602.0) == 5.0
    pace.count += 20
    assert pace.look(3606.0) == 5.0


# --- waiting for a worker --------------------------------------------------------------------------


def test_room_stirs_who_waits_for_that_worker():
    """The pool's queue, and that of the model which the worker serves; no other."""
    pool, place = busy_pool(2)
    first, second = pool.members
    pool.set_candidates(pool.members, {"a": (first,), "b": (second,)})
    admission = start()
    for_any = wait(admission, place)
    for_a = wait(admission, place._replace(model="a"))
    for_b = wait(admission, place._replace(model="b"))
    elsewhere = wait(admission, busy_pool()[1])
    assert admission.next() is None

    admission.on_room(first)

    tried = []
    while (ticket := admission.next()) is not None:
        tried.append(ticket)
        admission.stuck(ticket)
    assert set(tried) == {for_any, for_a}
    assert {for_b, elsewhere}.isdisjoint(tried)


def test_room_of_a_worker_that_nobody_waits_for_stirs_nobody():
    """A stranger's end wakes no one."""
    admission = start()
    wait(admission, busy_pool()[1])

    admission.on_room(busy_pool(3)[0].members[2])

    assert not admission.ready


def test_stuck_place_is_not_tried_again_until_it_is_stirred():
    """The work is bounded by what happens."""
    pool, place = busy_pool()
    admission = start()
    ticket = wait(admission, place)
    admission.stir()
    assert admission.next() is ticket
    admission.stuck(ticket)

    assert not admission.ready
    admission.on_room(pool.members[0])
    assert admission.next() is ticket


def test_place_that_is_stuck_holds_up_no_other():
    """There is no head of the line across pools."""
    admission = start()
    stuck, goes_on = wait(admission, busy_pool()[1]), wait(admission, busy_pool()[1])
    admission.stir()
    first = admission.next()
    assert first is stuck
    admission.stuck(first)

    assert admission.next() is goes_on


def test_places_take_turns():
    """One that can go on and on does not keep the others waiting."""
    admission = start()
    _, one = busy_pool()
    _, other = busy_pool()
    first, second = wait(admission, one), wait(admission, one)
    third = wait(admission, other)
    admission.stir()

    order = []
    while (ticket := admission.next()) is not None:
        order.append(ticket)
        admission.leave(ticket, 0.0, served=True)

    assert order == [first, third, second]


def test_priority_counts_across_places():
    """The more urgent goes first wherever it waits."""
    admission = start()
    wait(admission, busy_pool()[1])
    urgent = wait(admission, busy_pool()[1], x_request_priority="9")
    admission.stir()

    assert admission.next() is urgent


def test_gate_comes_before_places():
    """Who is let in may be the one who takes the worker."""
    admission = start()
    wait(admission, busy_pool()[1])
    at_gate = wait(admission)
    admission.stir()

    assert admission.next() is at_gate


# --- all together ----------------------------------------------------------------------------------

A, B, NEW = (spec_of(f"http://10.0.0.{number}:8000") for number in (1, 2, 3))


class World:
    """Exchanges before workers, driven as the service drives them, without waiting for anything."""

    def __init__(self, *, cap, queue, limit, needs_body, mode):
        self.registry = registry_of(A, B, policy=Recorder(needs_body=needs_body))
        self.router = Router(self.registry, random.Random(1), no_worker_s=20.0)
        self.admission = Admission(
            Limits(concurrent=cap, queue=queue, queue_s=10.0, no_worker_s=20.0)
        )
        self.limit, self.cap, self.mode = limit, cap, mode
        self.open = []
        self.now = 0.0
        self.limit_workers()

    def limit_workers(self):
        for pool in self.registry.all_pools():
            for worker in pool.members:
                worker.limit = self.limit
            pool.look_at_limits()

    def begin(self, tenant, priority):
        exchange = Exchange(
            self.router, ids=random.Random(2), max_body_bytes=1000, admission=self.admission
        )
        headers = {":path": "/", "x-tenant-id": tenant, "x-request-priority": str(priority)}
        message = announce(request_headers(headers), self.mode)
        self.open.append(exchange)
        exchange.receive(message, self.now)
        if self.mode == FULL_DUPLEX:
            exchange.receive(request_body(b"{}"), self.now)

    def send_body(self, exchange):
        if not exchange.waiting and exchange.decision is None:
            exchange.receive(request_body(b"{}"), self.now)

    def close(self, exchange):
        self.open.remove(exchange)
        exchange.close(self.now)

    def change(self, update):
        self.registry.apply(STATIC, update, self.now)
        self.registry.commit(self.now)
        self.limit_workers()
        self.router.on_workers((), self.now)
        self.admission.stir()

    def take_turns(self):
        turns = 0
        while (ticket := self.admission.next()) is not None:
            (exchange,) = [e for e in self.open if e.ticket is ticket]
            exchange.resume(self.now)
            turns += 1
            assert turns < 1000, "it does not come to an end"

    def pass_time(self, seconds):
        self.now += seconds
        for exchange in list(self.open):
            if exchange.waiting and exchange.ticket.deadline <= self.now:
                exchange.give_up(self.now)
                assert not exchange.waiting

    def check(self):
        admission = self.admission
        waiting = [e for e in self.open if e.waiting]
        assert sum(admission.waiting.values()) == len(waiting)
        assert sum(len(queue) for queue in admission.places.values()) == len(waiting)
        assert all(len(queue) for queue in admission.places.values())
        assert 0 <= admission.admitted <= self.cap
        leases = [e for e in self.open if hasattr(e.decision, "workers")]
        assert sum(p.in_flight for p in self.registry.all_pools()) == len(leases)
        for pool in self.registry.pools:
            for worker in pool.members:
                assert 0 <= worker.in_flight <= worker.limit

    def check_settled(self):
        """When nobody has a turn, whoever waits has a reason to."""
        pool = self.registry.pools[0]
        room = any(w.in_flight < w.limit for w in pool.candidates)
        waiting = self.admission.waiting
        assert not waiting[Wait.LIMIT] or self.admission.admitted >= self.cap
        assert not waiting[Wait.BUSY] or not room
        assert not waiting[Wait.NO_WORKER] or not pool.candidates


events = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from("ab"), st.integers(-1, 1)),
    st.tuples(st.just("begin"), st.sampled_from("ab"), st.integers(-1, 1)),
    st.tuples(st.just("body"), st.integers(0, 30)),
    st.tuples(st.just("close"), st.integers(0, 30)),
    st.tuples(st.just("turns")),
    st.tuples(st.just("turns")),
    st.tuples(st.just("time"), st.sampled_from([1.0, 5.0, 11.0, 21.0])),
    st.builds(Add, st.sampled_from([A, B, NEW])),
    st.builds(Remove, st.sampled_from([A.key, B.key, NEW.key])),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    sequence=st.lists(events, min_size=20, max_size=60),
    cap=st.sampled_from([6, 4, 1]),
    queue=st.sampled_from([4, 2, 0]),
    limit=st.sampled_from([1, 2, sys.maxsize]),
    needs_body=st.booleans(),
    mode=st.sampled_from([BUFFERED, FULL_DUPLEX]),
)
def test_counts_are_exact_and_nobody_is_forgotten(sequence, cap, queue, limit, needs_body, mode):
    """After any ordering of beginning, letting in, leaving, giving up, workers that come and go.

    No limit is ever passed, who waits has a reason to when everybody has had a turn, and in the end
    all counts are zero.
    """
    world = World(cap=cap, queue=queue, limit=limit, needs_body=needs_body, mode=mode)
    for event in sequence:
        match event:
            case ("begin", tenant, priority):
                world.begin(tenant, priority)
            case ("body", index) if world.open:
                world.send_body(world.open[index % len(world.open)])
            case ("close", index) if world.open:
                world.close(world.open[index % len(world.open)])
            case ("turns",):
                world.take_turns()
                world.check_settled()
            case ("time", seconds):
                world.pass_time(seconds)
            case Add() | Remove():
                world.change(event)
        world.check()

    for exchange in list(world.open):
        world.close(exchange)
        world.take_turns()
        world.check()
    assert world.admission.admitted == 0
    assert world.admission.places == {}
    assert set(world.admission.waiting.values()) == {0}
    assert all(pool.in_flight == 0 for pool in world.registry.all_pools())


def test_everybody_is_served_in_the_end():
    """A hundred requests through a gate of three and workers of one each, nobody lost or refused."""
    world = World(cap=3, queue=100, limit=1, needs_body=False, mode=BUFFERED)
    for number in range(100):
        world.begin(str(number % 7), 0)
    world.take_turns()
    served = 0
    while world.open:
        routed = [e for e in world.open if e.decision is not None]
        assert routed, "everybody waits"
        for exchange in routed:
            served += 1
            world.close(exchange)
        world.take_turns()
        world.check()

    assert served == 100


def test_who_waits_for_room_waits_for_a_worker_when_all_are_gone_and_the_other_way_round():
    """Each wait has its own time, and its own reason at the end."""
    world = World(cap=10, queue=10, limit=1, needs_body=False, mode=BUFFERED)
    for _ in range(4):
        world.begin("a", 0)
    assert world.admission.waiting[Wait.BUSY] == 2

    world.change(Remove(A.key))
    world.change(Remove(B.key))
    world.take_turns()
    world.check()
    assert world.admission.waiting == {Wait.LIMIT: 0, Wait.BUSY: 0, Wait.NO_WORKER: 2}

    world.change(Add(NEW))
    world.take_turns()
    world.check()
    assert world.admission.waiting == {Wait.LIMIT: 0, Wait.BUSY: 1, Wait.NO_WORKER: 0}
    world.pass_time(10.0)
    (late,) = [e for e in world.open if not hasattr(e.decision, "workers")]
    assert late.decision.refusal is Refusal.QUEUE_TIMEOUT


def test_who_comes_later_does_not_take_a_worker_before_who_waits():
    """Though it is free at the moment: the other's turn is about to come."""
    world = World(cap=10, queue=10, limit=1, needs_body=False, mode=BUFFERED)
    for _ in range(3):
        world.begin("a", 0)
    first, _, waits = world.open
    world.close(first)

    world.begin("a", 0)

    late = world.open[-1]
    assert (waits.waiting, late.waiting) == (True, True)
    world.take_turns()
    assert (waits.waiting, late.waiting) == (False, True)


def test_answers_of_one_that_waited_are_those_of_one_that_did_not(registry):
    """The same pick for headers and body, but for the request to be patient."""
    router = Router(registry, random.Random(1))
    admission = Admission(Limits(concurrent=1, queue=1, queue_s=7.0, grace_s=1.0))
    admission.enter()

    def exchange(**options):
        return Exchange(router, ids=random.Random(2), max_body_bytes=1000, **options)

    waited, straight = exchange(admission=admission), exchange()
    (patience,) = parse(waited.receive(announce(request_headers(), BUFFERED), 0.0))
    admission.release()
    answers = waited.resume(2.0)

    assert patience.WhichOneof("response") is None
    assert patience.override_message_timeout.ToMilliseconds() == 8000
    assert answers == straight.receive(announce(request_headers(), BUFFERED), 0.0)


def test_ticket_is_small():
    """Ten thousand of them are nothing."""
    ticket = start().ticket({"x-tenant-id": "a"})

    assert not hasattr(ticket, "__dict__")
    assert sys.getsizeof(ticket) + len(dataclasses.fields(ticket)) * 32 < 1000
