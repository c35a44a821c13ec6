"""Ready or not, and why not."""

from __future__ import annotations

import pytest

from extproc.discovery.updates import Reset
from extproc.readiness import Readiness, ReadinessState


@pytest.mark.parametrize("serving", [True, False])
@pytest.mark.parametrize("workers", [True, False])
@pytest.mark.parametrize("stopping", [True, False])
def test_ready_only_when_nothing_stands_against_it(pool, serving, workers, stopping):
    """Of several reasons the most lasting one is told."""
    if not workers:
        pool.apply(Reset(()))
    readiness = Readiness(pool, lambda: serving)
    readiness.stopping = stopping

    state = readiness.state()

    reason = (
        ("shutting down" * stopping)
        or ("no healthy workers available" * (not workers))
        or ("envoy has not accepted a configuration yet" * (not serving))
    )
    available = 0 if reason else 3 * workers
    assert state == ReadinessState(not reason, 3 * workers, reason, available)


def test_state_is_that_of_the_moment(pool, specs):
    """A worker that comes makes it ready, one that goes takes it back."""
    readiness = Readiness(pool, lambda: True)
    states = []
    for update in (Reset(()), Reset(specs[:1]), Reset(())):
        pool.apply(update)
        states.append(readiness.state().ready)

    assert states == [False, True, False]


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
