"""Ready or not, and why not."""

from __future__ import annotations

import dataclasses

import pytest

from extproc.address import WorkerUrl
from extproc.discovery.updates import WorkerSpec, WorkerType
from extproc.readiness import ReadinessState
from tests.extproc.admin_api import AT_ONCE, BY_ENVOY, A, B, unserved


@pytest.mark.parametrize("serving", [True, False])
@pytest.mark.parametrize("workers", [True, False])
@pytest.mark.parametrize("stopping", [True, False])
def test_ready_only_when_nothing_stands_against_it(serving, workers, stopping):
    """Of several reasons the most lasting one is told."""
    readiness = unserved(*[A, B] * workers, serving=serving).readiness
    readiness.stopping = stopping

    state = readiness.state()

    reason = (
        ("shutting down" * stopping)
        or ("no healthy workers available" * (not workers))
        or ("envoy has not accepted a configuration yet" * (not serving))
    )
    available = 0 if reason else 2 * workers
    assert state == ReadinessState(not reason, 2 * workers, reason, available)


def test_state_is_that_of_the_moment():
    """A worker that becomes healthy makes it ready, one that fails takes it back."""
    api = unserved(A, B, settings=BY_ENVOY)
    states = [api.readiness.state()]
    for event in (api.pass_check, api.fail_check):
        event(A)
        states.append(api.readiness.state())

    assert [state.ready for state in states] == [False, True, False]
    assert [(state.available, state.workers) for state in states] == [(0, 2), (1, 2), (0, 2)]


@pytest.mark.parametrize("tries", [True, False])
def test_worker_that_is_not_healthy_counts_when_it_would_be_tried(tries):
    """Unless it is being drained, or has no address."""
    settings = dataclasses.replace(BY_ENVOY, try_unhealthy=tries)
    api = unserved(A, B, "http://worker.example", settings=settings)
    api.fleet.drain(B, 60)

    state = api.readiness.state()

    assert (state.ready, state.available, state.workers) == (tries, int(tries), 3)


def test_ranks_are_counted_as_workers():
    """An engine whose name is not resolved counts as one."""
    settings = dataclasses.replace(AT_ONCE, ranks=4)
    api = unserved(A, "http://worker.example", settings=settings)

    assert api.readiness.state() == ReadinessState(True, 5, available=4)


@pytest.mark.parametrize(
    ("state", "body"),
    [
        (
            ReadinessState(True, 2, available=1),
            {"status": "ready", "healthy_workers": 1, "total_workers": 2},
        ),
        (
            ReadinessState(False, 2, "shutting down"),
            {"status": "not_ready", "reason": "shutting down", "total_workers": 2},
        ),
    ],
)
def test_body_has_the_keys_of_vllm_router(state, body):
    """Probes that parse it go on to work."""
    assert state.body() == body


def test_workers_of_other_roles_make_it_no_readier():
    """They take no whole requests, which the reason says."""
    api = unserved()
    for url, role in ((A, WorkerType.PREFILL), (B, WorkerType.DECODE)):
        api.fleet.add(WorkerSpec(WorkerUrl.parse(url), worker_type=role))

    state = api.readiness.state()

    assert (state.ready, state.workers, state.available) == (False, 2, 0)
    assert state.reason.endswith("prefill and decode workers take no whole requests")
