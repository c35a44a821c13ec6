"""From a request to an ordered list of workers."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest

from extproc.discovery.updates import Add, Remove, Reset, WorkerSpec
from extproc.errors import Refusal
from extproc.pool import Pool
from extproc.router import MAX_ENDPOINTS, Refused, Routed, Router
from policies import registry
from policies.base import Worker
from policies.random import Random
from policies.round_robin import RoundRobin
from tests.extproc.recorder import Recorder

ENDPOINTS = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]


registry.load_builtin()  # names are collected before any fixture runs
POLICIES = sorted(registry.registered())


def pool_of(*endpoints):
    pool = Pool("default")
    pool.apply(
        Reset(tuple(WorkerSpec(f"http://worker-{n}", e) for n, e in enumerate(endpoints, start=1)))
    )
    return pool


def endpoints(decision):
    assert isinstance(decision, Routed)
    return [worker.endpoint for worker in decision.workers]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("policy", [Recorder, RoundRobin, Random])
def test_pick_comes_with_as_many_fallbacks_as_there_are(rng, get, policy, count):
    """Up to three workers of the pool, none twice."""
    pool = pool_of(*(f"10.0.0.{n}:8000" for n in range(count)))

    decision = Router(pool, policy(), rng).decide(get, 0.0)

    assert decision.pool is pool
    assert len(decision.workers) == min(count, MAX_ENDPOINTS)
    assert len(set(decision.workers)) == len(decision.workers)
    assert set(decision.workers) <= set(pool.candidates)


def test_fallbacks_are_asked_of_the_policy(pool, rng, get):
    """Each is what the policy picks when those before it are not there."""
    policy = RoundRobin()
    router = Router(pool, policy, rng)
    policy.on_sent(pool.candidates[1], get, 0.0)

    assert endpoints(router.decide(get, 0.0)) == [ENDPOINTS[2], ENDPOINTS[0], ENDPOINTS[1]]


def test_empty_pool_refuses(rng, get):
    """There is nobody to ask the policy about."""
    policy = Recorder()

    decision = Router(Pool("default"), policy, rng).decide(get, 0.0)

    assert decision == Refused(Refusal.NO_WORKER)
    assert policy.sent == []


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (None, ENDPOINTS),
        (["10.0.0.2:8000"], ["10.0.0.2:8000"]),
        (["10.0.0.2"], ["10.0.0.2:8000"]),
        (["10.0.0.3", "10.0.0.1:8000", "10.0.0.9"], ["10.0.0.1:8000", "10.0.0.3:8000"]),
        (["10.0.0.2:8001"], None),
        (["10.0.0"], None),
        ([""], None),
        ([], None),
    ],
    ids=str,
)
def test_subset_limits_who_is_asked_about(pool, rng, get, subset, expected):
    """``ip:port`` or ``ip``; who is in no entry is no candidate, and none at all is a refusal."""
    decision = Router(pool, Recorder(), rng).decide(get, 0.0, subset=subset)

    if expected is None:
        assert decision == Refused(Refusal.NO_WORKER)
    else:
        assert endpoints(decision) == expected


@pytest.mark.parametrize("entry", ["[2001:db8::1]:8000", "[2001:db8::1]", "2001:db8::1"])
def test_subset_may_name_ipv6_with_and_without_port(rng, get, entry):
    """Without a port there are no brackets needed."""
    pool = pool_of("[2001:db8::1]:8000", "[2001:db8::2]:8000")

    decision = Router(pool, Recorder(), rng).decide(get, 0.0, subset={entry})

    assert decision != Refused(Refusal.NO_WORKER)
    assert endpoints(decision) == ["[2001:db8::1]:8000"]


def test_workers_at_one_endpoint_are_named_once(rng, get):
    """Two names of one machine: a retry must not go where the first attempt failed."""
    pool = pool_of("10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.2:8000")

    decision = Router(pool, Recorder(), rng).decide(get, 0.0)

    assert endpoints(decision) == ["10.0.0.1:8000", "10.0.0.2:8000"]


def test_observer_hears_of_the_first_choice_only(pool, rng, get):
    """Once per request with its time; fallbacks and refusals are not sent to."""
    policy = Recorder()
    router = Router(pool, policy, rng)

    router.decide(get, 1.5)
    router.decide(get, 2.5, subset=())
    router.on_done(pool.candidates[0], 3.5)

    assert policy.sent == [(pool.candidates[0], 1.5)]
    assert policy.done == [(pool.candidates[0], 3.5)]


def test_policy_that_observes_nothing_is_not_told(pool, rng, get):
    """``on_sent`` and ``on_done`` are optional."""
    router = Router(pool, Random(), rng)

    router.decide(get, 0.0)

    router.on_done(pool.candidates[0], 1.0)


def test_fallbacks_go_to_other_hosts_first(rng, get):
    """What took the first worker down may have taken its host; then the rest, in the policy's order."""
    pool = pool_of("10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1", "10.0.0.2:2", "10.0.0.3:1")

    decision = Router(pool, Recorder(), rng).decide(get, 0.0)

    assert endpoints(decision) == ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]


def test_fallbacks_stay_on_the_host_when_there_is_no_other(rng, get):
    """One machine with several workers is better than no fallback."""
    pool = pool_of("10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3")

    decision = Router(pool, Recorder(), rng).decide(get, 0.0)

    assert endpoints(decision) == ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3"]


class Keeper(Recorder):
    """Knows its members; wants the body of every second request."""

    members = ()

    def on_workers(self, workers):
        self.members = tuple(workers)

    def wants_body(self, headers):
        return "x-session-id" not in headers


def test_policy_that_keeps_something_per_worker_hears_of_members(pool, rng):
    """From the start, and of every change."""
    policy = Keeper()
    Router(pool, policy, rng)
    assert policy.members == pool.candidates

    pool.apply(Remove(pool.candidates[0].url))

    assert policy.members == pool.candidates
    assert len(policy.members) == 2


@pytest.mark.parametrize(
    ("policy", "headers", "wanted"),
    [
        (Recorder(needs_body=False), {}, False),
        (Recorder(needs_body=True), {"x-session-id": "s"}, True),
        (Keeper(needs_body=True), {}, True),
        (Keeper(needs_body=True), {"x-session-id": "s"}, False),
        (Keeper(needs_body=False), {}, False),
    ],
    ids=["never", "always", "chosen", "not chosen", "never, though it could choose"],
)
def test_body_is_wanted_when_the_policy_can_use_it(pool, rng, policy, headers, wanted):
    """Asked by header only of a policy that needs bodies at all and can choose."""
    assert Router(pool, policy, rng).wants_body(headers) is wanted


@pytest.mark.parametrize("needs_body", [True, False])
def test_router_says_whether_the_policy_reads_bodies(pool, rng, needs_body):
    """The exchange asks the router, not the policy."""
    assert Router(pool, Recorder(needs_body=needs_body), rng).needs_body is needs_body


def test_pick_that_is_no_candidate_is_a_fault(pool, rng, get):
    """A policy that breaks its contract must not send a request outside of the pool."""

    class Astray(Recorder):
        def pick(self, request, workers, *, now, rng):
            return Worker(url="http://elsewhere", endpoint="192.168.0.1:1", order=99)

    with pytest.raises((ValueError, LookupError, RuntimeError)):
        Router(pool, Astray(), rng).decide(get, 0.0)


def test_time_and_randomness_are_handed_on(pool, get):
    """The policy gets the router's own generator and the caller's time."""
    seen = []

    @dataclasses.dataclass
    class Curious(Recorder):
        def pick(self, request, workers, *, now, rng):
            seen.append((request, now, rng))
            return workers[0]

    rng = random.Random(5)
    Router(pool, Curious(), rng).decide(get, 7.25)

    assert seen == [(get, 7.25, rng)] * 3


@pytest.mark.parametrize("rounds", [1, 5])
def test_round_robin_stays_exactly_fair_through_the_router(pool, rng, get, rounds):
    """Asking for fallbacks does not move anybody's turn."""
    router = Router(pool, RoundRobin(), rng)

    firsts = [endpoints(router.decide(get, 0.0))[0] for _ in range(3 * rounds)]

    assert firsts == ENDPOINTS * rounds


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_workers_that_come_and_go_never_break_a_decision(name, get):
    """Every decision names present workers only, and all of them get their share."""
    rng = random.Random(11)
    pool = Pool("default")
    router = Router(pool, registry.policy_class(name)(), rng)
    names = [f"10.0.0.{n}" for n in range(6)]
    sent = collections.Counter()
    leases = []
    for step in range(600):
        update = rng.choice([Add, Remove])
        url = f"http://{rng.choice(names)}"
        pool.apply(Add(WorkerSpec(url, f"{url[7:]}:80")) if update is Add else Remove(url))
        decision = router.decide(get, float(step))
        if not pool.candidates:
            assert decision == Refused(Refusal.NO_WORKER)
            continue
        assert set(decision.workers) <= set(pool.candidates)
        sent[decision.workers[0].url] += 1
        leases.append(pool.acquire(decision.workers[0]))
        if step % 3 == 0:
            leases.pop(rng.randrange(len(leases))).release()
    for lease in leases:
        lease.release()

    assert pool.in_flight == 0
    assert set(sent) == {f"http://{name}" for name in names}


def hosts(decision):
    return [worker.host for worker in decision.workers]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((8, 8, 8), 3),  # a third host is there
        ((8, 8), 2),
        ((8,), 1),
        ((1, 1, 1, 1), 3),
        ((8, 1), 2),
    ],
    ids=str,
)
def test_fallbacks_are_on_other_hosts_where_there_are_some(name, ranks, expected, get):
    """Data-parallel ranks share an address: what took the first down may have taken its neighbours."""
    pool = pool_of(
        *(f"10.0.0.{h}:{8000 + r}" for h, count in enumerate(ranks) for r in range(count))
    )
    router = Router(pool, registry.policy_class(name)(), random.Random(3))

    for number in range(20):
        get.headers = {"x-session-id": f"s{number}"}
        decision = router.decide(get, float(number))

        assert len(decision.workers) == len(set(decision.workers)) == min(3, sum(ranks))
        assert len(set(hosts(decision))) == expected
        assert set(decision.workers) <= set(pool.candidates)


def test_second_fallback_avoids_both_hosts_before_it(rng, get):
    """Not only that of the first choice."""
    pool = pool_of("10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1", "10.0.0.2:2", "10.0.0.3:1")

    decision = Router(pool, Recorder(), rng).decide(get, 0.0)

    assert endpoints(decision) == ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]


@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_round_robin_is_exactly_fair_with_fallbacks_on_other_hosts(rng, get, per_host, count):
    """Every worker once a round, in the order of joining."""
    listed = [f"10.0.0.{n // per_host}:{8000 + n % per_host}" for n in range(count)]
    router = Router(pool_of(*listed), RoundRobin(), rng)

    firsts = [endpoints(router.decide(get, 0.0))[0] for _ in range(3 * count)]

    assert firsts == listed * 3


def test_weighted_round_robin_is_exactly_fair_through_the_router(pool, rng, get):
    """Weights 5 : 2 : 1 over every eight requests, with two fallbacks each."""
    for worker, weight in zip(pool.candidates, (5.0, 2.0, 1.0), strict=True):
        worker.weight = weight
    router = Router(pool, RoundRobin(), rng)

    for _ in range(5):
        got = collections.Counter(endpoints(router.decide(get, 0.0))[0] for _ in range(8))
        assert got == dict(zip(ENDPOINTS, (5, 2, 1), strict=True))


@pytest.mark.parametrize("name", ["consistent_hash", "rendezvous_hash"])
def test_fallback_is_where_the_session_goes_when_its_worker_is_gone(name, get):
    """So that the retry already warms the right cache."""
    pool = pool_of(*(f"10.0.0.{n}:8000" for n in range(8)))
    router = Router(pool, registry.policy_class(name)(), random.Random(1))
    for number in range(20):
        get.headers = {"x-session-id": f"s{number}"}
        first, second, third = router.decide(get, 0.0).workers

        others = {w.endpoint for w in pool.candidates} - {first.endpoint}
        assert router.decide(get, 0.0, subset=others).workers[:2] == (second, third)


@pytest.mark.parametrize("name", POLICIES)
def test_subset_of_a_few_is_respected_by_every_policy(name, get):
    """First choice and fallbacks."""
    pool = pool_of(*(f"10.0.0.{n}:8000" for n in range(12)))
    router = Router(pool, registry.policy_class(name)(), random.Random(1))
    allowed = {"10.0.0.3", "10.0.0.9:8000"}

    for number in range(30):
        get.headers = {"x-session-id": f"s{number}"}
        decision = router.decide(get, 0.0, subset=allowed)
        assert sorted(hosts(decision)) == ["10.0.0.3", "10.0.0.9"]
