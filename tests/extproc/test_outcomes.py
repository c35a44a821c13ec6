"""What follows from how attempts ended."""

from __future__ import annotations

import asyncio

import pytest

from extproc.attempt import Attempt, Outcome
from extproc.circuit import CircuitRules
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
        self.fleet = Fleet(self.registry, lambda: 1000.0)
        self.budget = RetryBudget(ratio=0.2, most=5)
        self.looks = 0
        self.outcomes = Outcomes(self.fleet, self.budget, self.look)

    def look(self):
        self.looks += 1

    def fail(self, outcome=Outcome.FAILED, status=500):
        self.outcomes.on_failed(Attempt(AT_A, outcome, status, 1000.0))

    def candidates(self):
        return [worker.url for worker in self.registry.pools[0].candidates]


@pytest.fixture
def world():
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
