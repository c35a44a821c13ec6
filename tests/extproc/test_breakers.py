"""Circuits and what follows from them for the workers of the registry."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.attempt import Attempt, Outcome
from extproc.circuit import CircuitRules, CircuitState
from extproc.engine import Memory, State
from extproc.errors import Refusal
from extproc.registry import Change, Registry, Settings
from extproc.retry_budget import RetryBudget
from extproc.router import Held, Refused, Routed, Router
from policies.base import Request
from policies.round_robin import RoundRobin
from tests.extproc.recorder import Recorder
from tests.fleets import STATIC, registry_of, reset, say

NOW = 1000.0
A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
AT_A, AT_B = "10.0.0.1:8000", "10.0.0.2:8000"
RULES = CircuitRules(failures=2, successes=2, open_s=60.0)


@pytest.fixture
def registry():
    return registry_of(A, B, policy=RoundRobin(), circuits=RULES)


def report(registry, endpoint, outcome, now, started=None):
    """Let Envoy report an attempt; return whether anything followed."""
    status = {Outcome.FAILED: 500, Outcome.SUCCEEDED: 200}.get(outcome, 0)
    started = now if started is None else started
    attempt = Attempt(endpoint, outcome, status, started, now)
    said = registry.breakers.on_attempt(attempt, now)
    registry.commit(now)
    return said


def fail(registry, endpoint=AT_A, now=NOW, times=2):
    for _ in range(times):
        report(registry, endpoint, Outcome.FAILED, now)


def half_open(registry, endpoint=AT_A, now=NOW):
    """Let a circuit be half-open since *now*."""
    fail(registry, endpoint, now - RULES.open_s)
    registry.commit(now)


def state(registry, key=A):
    return registry.get(key).state


def workers(registry, key=A):
    return registry.get(key).workers


def test_open_circuit_takes_the_worker_out(registry):
    """It is ejected, with the reason; time alone brings it back, for one request at a time."""
    fail(registry)
    assert (state(registry), state(registry, B)) == (State.EJECTED, State.HEALTHY)
    assert registry.get(A).reason.startswith("2 failures in a row, the last one: status 500; ")
    assert [w.url for w in registry.pools[0].candidates] == [B]
    assert registry.waits

    change = registry.commit(NOW + 60)

    assert change.circuits == ((A, CircuitState.HALF_OPEN),)
    assert state(registry) is State.HALF_OPEN
    assert [w.url for w in registry.pools[0].candidates] == [A, B]
    assert registry.pools[0].limited
    (worker,) = workers(registry)
    assert (worker.limit, worker.probation) == (1, True)
    assert registry.commit(NOW + 60) == Change()


def test_transitions_are_told_once(registry):
    """With the worker's URL, in the commit that follows."""
    fail(registry, times=1)
    registry.breakers.on_attempt(Attempt(AT_A, Outcome.FAILED, 500, NOW), NOW)

    change = registry.commit(NOW)

    assert change.circuits == ((A, CircuitState.OPEN),)
    assert [engine.key for engine in change.states] == [A]
    assert registry.commit(NOW).circuits == ()


def test_probe_holds_all_others_back(registry):
    """From the pick to its report; then the next one may go, and at last everybody."""
    half_open(registry)
    (worker,) = workers(registry)
    pool = registry.pools[0]
    lease = pool.acquire(worker)

    registry.on_probe(worker)
    assert (worker.limit, worker.in_flight) == (0, 1)
    lease.release(NOW)
    registry.commit(NOW + 0.5)
    assert worker.limit == 0, "its report is on the way"
    report(registry, AT_A, Outcome.SUCCEEDED, NOW + 1)
    assert (worker.limit, worker.probation) == (1, True)
    registry.on_probe(worker)
    report(registry, AT_A, Outcome.SUCCEEDED, NOW + 2)

    assert (worker.limit, worker.probation) == (sys.maxsize, False)
    assert state(registry) is State.HEALTHY
    assert not registry.pools[0].limited
    assert not registry.waits


def test_what_is_still_under_way_leaves_room_for_the_probe(registry):
    """Streams from before the circuit opened."""
    (worker,) = workers(registry)
    leases = [registry.pools[0].acquire(worker) for _ in range(5)]
    half_open(registry)

    assert worker.limit == 6
    registry.on_probe(worker)
    leases[0].release(NOW)
    assert worker.limit == 0


def test_ranks_of_an_engine_are_on_probation_together():
    """They are one process: one request at a time over all of them."""
    registry = registry_of(A, B, policy=RoundRobin(), circuits=RULES, ranks=2)
    half_open(registry)
    first, second = workers(registry)
    assert (first.limit, second.limit) == (1, 1)

    registry.on_probe(second)

    assert (first.limit, second.limit) == (0, 0)
    assert {w.limit for w in workers(registry, B)} == {sys.maxsize}
    fail(registry, now=NOW + 1, times=1)
    assert state(registry) is State.EJECTED
    assert {w.probation for w in workers(registry)} == {False}


@pytest.mark.parametrize(("limit", "expected"), [(sys.maxsize, sys.maxsize), (7, 7), (1, 1)])
def test_worker_limit_is_that_of_every_worker(limit, expected):
    """Of each rank; a changed one applies with the next commit."""
    registry = registry_of(A, ranks=2, worker_limit=limit)
    assert [w.limit for w in workers(registry)] == [expected] * 2
    assert registry.pools[0].limited is (limit < sys.maxsize)

    registry.configure(Settings(follows_envoy=False, asks_models=False, ranks=2, worker_limit=3))
    registry.commit(NOW)

    assert [w.limit for w in workers(registry)] == [3, 3]
    assert registry.pools[0].limited


def test_worker_does_not_get_out_of_it_by_changing_models(registry):
    """The circuit goes with it into another pool."""
    say(registry, A, "x")
    say(registry, B, "x")
    fail(registry)

    say(registry, A, "y")
    registry.commit(NOW)

    assert registry.pool_of("y").members == workers(registry)
    assert state(registry) is State.EJECTED
    assert registry.pool_of("y").candidates == ()


def test_worker_that_is_named_again_later_is_another(registry):
    """Its address may be a new worker's."""
    fail(registry)
    reset(registry, B)

    reset(registry, A, B)

    assert state(registry) is State.HEALTHY


def test_circuits_outlive_a_restart(registry):
    """Open until the same time, half-open if that is over, closed ones closed."""
    fail(registry)
    memory = registry.memory()
    known = {k.spec.key: k.resumes_at for k in memory.engines}
    assert known == {A: NOW + 60, B: 0.0}

    for now, expected in ((NOW + 10, State.EJECTED), (NOW + 70, State.HALF_OPEN)):
        again = Registry(Recorder, Settings(follows_envoy=False, asks_models=False, circuits=RULES))
        again.restore(Memory(memory.engines), now, sources=[STATIC])
        again.commit(now)
        assert (state(again), state(again, B)) == (expected, State.HEALTHY)


def test_switching_the_circuit_breaker_off_closes_all(registry):
    """At the next commit."""
    fail(registry)

    registry.configure(
        Settings(follows_envoy=False, asks_models=False, circuits=CircuitRules(failures=0))
    )
    registry.commit(NOW)

    assert state(registry) is State.HEALTHY


def test_open_circuit_of_the_only_worker_refuses_at_once(get, rng):
    """Also when requests may wait for workers; half-open, they wait for their turn."""
    registry = registry_of(A, policy=RoundRobin(), circuits=RULES)
    router = Router(registry, rng, no_worker_s=60.0)
    fail(registry)
    assert router.decide(get, NOW) == Refused(Refusal.NO_WORKER)

    registry.commit(NOW + 60)
    routed = router.decide(get, NOW + 60)
    assert isinstance(routed, Routed)
    routed.pool.acquire(routed.workers[0])
    router.grant_retries(routed, NOW + 60)

    assert isinstance(router.decide(get, NOW + 60), Held)


def test_soundness_is_that_of_the_latest_attempt(registry):
    """A worker on probation is not sound yet, one of which nothing is known is."""
    everybody = [*workers(registry), *workers(registry, B)]
    breakers = registry.breakers
    assert breakers.any_sound(everybody)
    for endpoint in (AT_A, AT_B):
        report(registry, endpoint, Outcome.UNREACHABLE, NOW)
    assert not breakers.any_sound(everybody)
    report(registry, AT_B, Outcome.SUCCEEDED, NOW)
    assert breakers.any_sound(everybody)
    assert not breakers.any_sound(workers(registry))


@pytest.mark.parametrize(("most", "advance", "granted"), [(5, 0, None), (2, 0, None), (5, 30, 0)])
def test_router_says_how_many_retries_only_when_there_are_fewer(
    registry, get, most, advance, granted
):
    """Envoy has been told the usual number."""
    budget = RetryBudget(ratio=0.2, most=most)
    router = Router(registry, random.Random(1), budget=budget)
    for _ in range(advance):
        budget.on_failed()
    decision = router.decide(get, NOW)
    decision.pool.acquire(decision.workers[0])

    assert router.grant_retries(decision, NOW) == granted


def test_router_without_a_budget_says_nothing(registry, get):
    """Envoy's own suffices."""
    router = Router(registry, random.Random(1))

    assert router.grant_retries(router.decide(get, NOW), NOW) is None


# --- workers that have failed several times in a row


C = "http://10.0.0.3:8000"


def take(router, request, now=NOW):
    """Route *request*; return its lease."""
    routed = router.decide(request, now)
    assert isinstance(routed, Routed)
    return routed.pool.acquire(routed.workers[0])


def test_others_are_preferred_to_a_worker_that_fails(rng, get):
    """As many as its failures leave may be under way there; when nobody else is left, more."""
    rules = CircuitRules(failures=4)
    registry = registry_of(A, B, policy=RoundRobin(), circuits=rules)
    router = Router(registry, rng)
    for _ in range(3):
        registry.on_attempt(Attempt(AT_A, Outcome.FAILED, 500, NOW), NOW)

    leases = [take(router, get) for _ in range(8)]
    assert [lease.worker.url for lease in leases].count(A) == 2

    for _ in range(3):
        registry.on_attempt(Attempt(AT_B, Outcome.FAILED, 500, NOW), NOW)
    assert {take(router, get).worker.url for _ in range(4)} == {A, B}, "both fail, nobody waits"

    assert registry.breakers.calm_down(NOW + 2)
    assert {take(router, get).worker.url for _ in range(4)} == {A, B}


def test_room_for_requests_counts_beside_the_preference(rng, get):
    """A limit of the worker itself holds whatever is preferred, and who is preferred may be full."""
    registry = registry_of(
        A, B, policy=RoundRobin(), circuits=CircuitRules(failures=3), worker_limit=3
    )
    router = Router(registry, rng)
    for _ in range(2):
        registry.on_attempt(Attempt(AT_A, Outcome.FAILED, 500, NOW), NOW)

    leases = [take(router, get) for _ in range(6)]

    assert [worker.in_flight for worker in registry.pools[0].members] == [3, 3]
    assert isinstance(router.decide(get, NOW), Held)
    leases[0].release(NOW)
    assert isinstance(router.decide(get, NOW), Routed)


def test_ranks_share_what_their_engine_may_have_under_way(rng, get):
    """They are one process."""
    registry = registry_of(A, B, policy=RoundRobin(), circuits=CircuitRules(failures=5), ranks=2)
    router = Router(registry, rng)
    for _ in range(3):
        registry.on_attempt(Attempt(AT_A, Outcome.FAILED, 500, NOW), NOW)

    leases = [take(router, get) for _ in range(20)]

    assert [lease.worker.endpoint for lease in leases].count(AT_A) == 3


def test_worker_that_is_gone_is_preferred_to_nobody():
    """Its circuit goes with it."""
    registry = registry_of(A, B, circuits=CircuitRules(failures=5))
    for _ in range(3):
        registry.on_attempt(Attempt(AT_A, Outcome.FAILED, 500, NOW), NOW)

    reset(registry, B)

    assert not registry.breakers.wary


@given(data=st.data())
def test_worker_that_always_fails_gets_no_more_than_the_threshold_and_one(data):
    """However the failures of up to ten requests at once fall between those that follow."""
    threshold = data.draw(st.integers(2, 12), "threshold")
    at_once = data.draw(st.integers(1, min(10, threshold)), "most under way at once")
    registry = registry_of(
        A,
        B,
        C,
        policy=RoundRobin(),
        circuits=CircuitRules(failures=threshold),
        worker_limit=at_once,
    )
    router = Router(registry, random.Random(data.draw(st.integers(0, 9))))
    request = Request("POST", "/", {})
    asked, elsewhere, served = [], [], []  # at A; from A, now tried elsewhere; at B and C
    sent, now = 0, NOW
    for _ in range(data.draw(st.integers(1, 120), "steps")):
        now += data.draw(st.sampled_from([0.0, 0.001, 0.02]), "passed")
        registry.breakers.calm_down(now)
        match data.draw(st.sampled_from(["ask", "ask", "fail", "fail", "end", "end elsewhere"])):
            case "ask":
                routed = router.decide(request, now)
                if isinstance(routed, Routed):
                    lease = routed.pool.acquire(routed.workers[0])
                    (asked if lease.worker.url == A else served).append(lease)
                    sent += lease.worker.url == A
            case "fail" if asked:  # its request is under way still when Envoy tells of it
                elsewhere.append(asked.pop(0))
                registry.on_attempt(Attempt(AT_A, Outcome.FAILED, 500, now), now)
                registry.commit(now)
            case "end" if served:
                served.pop(0).release(now)
            case "end elsewhere" if elsewhere:
                elsewhere.pop(0).release(now)
            case _:
                pass
    assert sent <= threshold + 1
