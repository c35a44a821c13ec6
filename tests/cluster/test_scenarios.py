"""What the scenarios make of what they see: a fault must be a problem."""

from __future__ import annotations

import asyncio

import pytest
import yaml

from tests.cluster import runner, scenarios
from tests.cluster.cluster import VALUES, Change, Cluster, Programs
from tests.cluster.load import Load, Result
from tests.cluster.scenarios import DELAY_S, GRACE_S, Outcome

NOBODY = Cluster(Programs("kubectl", "helm"))


def result(
    started: float, ended: float = 0.0, *, worker: str = "a", status: int = 200, whole: bool = True
) -> Result:
    return Result(started, True, ended, status, worker, complete=whole)


def pod(name: str, *, ready: bool, ending: bool = False) -> dict:
    metadata = {"name": name, **({"deletionTimestamp": "2026-01-01"} if ending else {})}
    status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": metadata, "status": status}


BUSY = [result(10 + n / 10, worker="other") for n in range(40)]
"""Requests on another worker, ten each second."""


@pytest.mark.parametrize(
    ("last", "problem"), [(9.9, ""), (10.05, ""), (10.2, "the last request came too late")]
)
def test_requests_long_after_the_deletion_are_a_problem(last, problem):
    """A tenth of a second is not long."""
    outcome = Outcome()

    scenarios._last_requests(outcome, [result(5), result(last), *BUSY], {"a": 10.0}, "seen")

    assert outcome.problems == ([problem] if problem else [])


def test_silence_after_the_deletion_proves_nothing():
    """Neither when nobody asked, nor when the Pod was never used."""
    silent, unused = Outcome(), Outcome()

    scenarios._last_requests(silent, [result(5)], {"a": 10.0}, "seen")
    scenarios._last_requests(unused, BUSY, {"a": 10.0}, "seen")

    assert silent.problems == ["too few requests afterwards to tell"]
    assert unused.problems == ["a was never used"]


@pytest.mark.parametrize(
    ("first", "problem"), [(10.9, ""), (11.1, "the first request came too late")]
)
def test_worker_that_is_used_late_is_a_problem(first, problem):
    """A second after it was ready."""
    outcome = Outcome()

    scenarios._first_requests(outcome, [result(first), result(12)], {"a": 10.0})

    assert outcome.problems == ([problem] if problem else [])


def test_worker_that_is_never_used_is_a_problem():
    """By its name."""
    outcome = Outcome()

    scenarios._first_requests(outcome, BUSY, {"a": 10.0})

    assert outcome.problems == ["a was never used"]


@pytest.mark.parametrize(("after_s", "good"), [(5, False), (0.2, True), (-2, False)])
def test_streams_may_be_cut_only_when_the_grace_time_is_over(after_s, good):
    """Of the Pod that ended first or of the other one."""
    ends = [100.0, 130.0]
    for end in ends:
        outcome = Outcome()
        cut = [result(90, end + DELAY_S + GRACE_S + after_s, whole=False)]
        scenarios._cut_after_grace(outcome, cut, ends)
        assert (outcome.problems == []) is good


def test_deletion_is_when_the_end_of_a_pod_is_first_seen():
    """With its timestamp, or by force without one."""
    changes = [
        Change(1.0, "ADDED", pod("a", ready=True)),
        Change(2.0, "MODIFIED", pod("a", ready=True, ending=True)),
        Change(3.0, "DELETED", pod("a", ready=False, ending=True)),
        Change(4.0, "DELETED", pod("b", ready=True)),
    ]

    assert scenarios._deletions(changes) == {"a": 2.0, "b": 4.0}
    assert [change.ready for change in changes] == [True, False, False, True]


def test_failed_and_cut_requests_are_counted_apart_and_are_problems():
    """What was complete is not."""
    load = Load("", [])
    load.results = [result(1), result(1, status=503, whole=False), result(1, whole=False)]
    outcome = Outcome()

    outcome.count(load)
    outcome.check_none_failed(load)

    assert (outcome.requests, outcome.failed, outcome.cut) == (3, 1, 1)
    assert outcome.problems[0].startswith("2 requests failed or were cut")


async def test_scenario_that_breaks_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    """And so is one that never ends; the next one is tried."""
    monkeypatch.setattr(runner, "SCENARIO_S", 0.01)

    async def breaks(_cluster: Cluster) -> Outcome:
        raise ValueError("no")

    async def hangs(_cluster: Cluster) -> Outcome:
        await asyncio.sleep(60)
        return Outcome()

    assert (await runner.attempt(NOBODY, breaks)).problems == ["ValueError: no"]
    assert (await runner.attempt(NOBODY, hangs)).problems == ["TimeoutError: "]


def test_scenarios_are_chosen_by_how_their_names_begin():
    """None is an error."""
    assert list(runner.choose([])) == list(scenarios.ALL)
    assert list(runner.choose(["uninstall", "chat"])) == ["chat through the Service", "uninstall"]
    with pytest.raises(ValueError, match="no scenario begins with 'x'"):
        runner.choose(["x"])


def test_times_of_the_values_are_those_that_are_checked():
    """They are written down twice."""
    shutdown = yaml.safe_load(VALUES.read_text())["shutdown"]
    assert (shutdown["delaySeconds"], shutdown["graceSeconds"]) == (DELAY_S, GRACE_S)
