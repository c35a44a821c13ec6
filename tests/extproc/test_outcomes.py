"""What follows from how attempts ended."""

from __future__ import annotations

import asyncio

import pytest

from extproc.attempt import Attempt, Outcome
from extproc.circuit import WARY_S, CircuitRules
from extproc.engine import State
from extproc.fleet import Fleet
from extproc.outcomes import SUSPEND_S, Outcomes
from extproc.retry_budget import RetryBudget
from tests.fleets import registry_of

pytestmark = pytest.mark.looptime

A, AT_A = "http://10.0.0.1:8000", "10.0.0.1:8000"
B = "http://10.0.0.2:8000"


class World:
    def __init__(self):
        rules = CircuitRules(failures=2, successes=1, open_s=60.0)
        self.registry = registry_of(A, B, circuits=rules)
        loop = asyncio.get_running_loop()
        self.fleet = Fleet(self.registry, lambda: 1000.0 + loop.time())
        self.budget = RetryBudget(ratio=0.2, most=5)
        self.looks = 0
        self.outcomes = Outcomes(self.fleet, self.budget, self.look)

    def look(self):
        self.looks += 1

    def fail(self, outcome=Outcome.FAILED, status=500):
        self.outcomes.on_failed(Attempt(AT_A, outcome, status, 1000.0))

    async def check(self, takes_s=0.0, *, passed=True):
        """Let worker A answer a check that begins now."""
        began = self.fleet.now()
        await asyncio.sleep(takes_s)
        engine = self.registry.get(A)
        self.fleet.on_answer(engine, began=began, passed=passed)
        await asyncio.sleep(0.1)

    def candidates(self):
        return [worker.url for worker in self.registry.pools[0].candidates]


@pytest.fixture
async def world():
    return World()


async def test_failures_open_the_circuit_and_waiting_requests_look_again(world):
    """At once, in the call that says so."""
    world.fail()
    assert world.looks == 0

    world.fail()

    assert world.registry.get(A).state is State.EJECTED
    assert (world.candidates(), world.looks) == ([B], 1)


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.UNREACHABLE])
async def test_worker_that_was_asked_in_vain_is_left_alone_for_a_while(world, outcome):
    """And then tried again."""
    world.fail(outcome, 0)
    world.fail(Outcome.UNREACHABLE, 0)
    assert world.candidates() == [B]

    await asyncio.sleep(SUSPEND_S + 0.1)

    assert world.candidates() == [A, B]


@pytest.mark.parametrize(
    ("outcome", "status"), [(Outcome.LOST, 200), (Outcome.FAILED, 503), (Outcome.REFUSED, 429)]
)
async def test_worker_that_answered_is_not(world, outcome, status):
    """It is there: the circuit judges."""
    world.fail(outcome, status)

    assert world.candidates() == [A, B]


async def test_check_that_began_after_the_failure_ends_the_suspension(world):
    """At once, not after ten seconds."""
    world.fail(Outcome.UNREACHABLE, 0)
    await asyncio.sleep(1)
    await world.check()

    assert world.candidates() == [A, B]


async def test_check_that_began_before_or_does_not_pass_ends_no_suspension(world):
    """It says nothing of what has happened since."""
    under_way = asyncio.ensure_future(world.check(takes_s=1))
    await asyncio.sleep(0.5)
    world.fail(Outcome.UNREACHABLE, 0)
    await under_way
    await world.check(passed=False)
    assert world.candidates() == [B]

    under_way = asyncio.ensure_future(world.check(takes_s=1))
    await asyncio.sleep(0.5)
    world.fail(Outcome.UNREACHABLE, 0)
    await under_way
    assert world.candidates() == [B]


async def test_check_says_nothing_of_a_worker_that_broke_off(world):
    """It answers checks, perhaps, and no requests."""
    world.fail(Outcome.LOST, 0)
    await asyncio.sleep(1)
    await world.check()

    assert world.candidates() == [B]


async def test_worker_that_fails_again_is_left_alone_for_the_full_time(world):
    """Checks reach it and requests do not; nor does the end of the first suspension count for the second."""
    world.fail(Outcome.UNREACHABLE, 0)
    await asyncio.sleep(4)
    await world.check()
    assert world.candidates() == [A, B]

    world.fail(Outcome.UNREACHABLE, 0)
    for _ in range(9):
        await asyncio.sleep(0.9)
        await world.check()
        assert world.candidates() == [B]
    await asyncio.sleep(1.1)
    assert world.candidates() == [A, B]

    world.fail(Outcome.UNREACHABLE, 0)  # longer ago than that by now
    await world.check()
    assert world.candidates() == [A, B]


async def test_attempts_are_paid_for(world):
    """Each failed one in advance, what was retried in the end."""
    world.fail()
    world.fail()
    world.outcomes.on_ended(None, retries=2, failed=False)

    assert world.budget.balance == 18


async def test_attempts_at_unknown_endpoints_do_no_harm(world):
    """A worker that was removed meanwhile."""
    for outcome in Outcome:
        world.outcomes.on_failed(Attempt("10.9.9.9:1", outcome, 0, 1000.0))
        last = Attempt("10.9.9.9:1", outcome, 0, 1000.0)
        world.outcomes.on_ended(last, retries=0, failed=False)

    assert world.candidates() == [A, B]


async def test_others_are_preferred_for_a_second_after_failures_in_a_row():
    """Then it is forgotten, by a timer of its own."""
    world = World()
    registry = world.registry = registry_of(A, B, circuits=CircuitRules(failures=5))
    world.fleet.registry = registry
    world.fail()
    assert not registry.breakers.wary
    await asyncio.sleep(0.5)
    world.fail()
    assert list(registry.breakers.wary) == [AT_A]
    await asyncio.sleep(WARY_S / 2)
    world.fail()

    await asyncio.sleep(WARY_S - 0.01)
    assert registry.breakers.wary
    await asyncio.sleep(WARY_S / 2)
    assert not registry.breakers.wary
