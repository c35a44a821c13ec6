"""What follows from how attempts ended: circuits, retries that are left, and whom to leave alone for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from extproc.attempt import Attempt, Outcome
from extproc.circuit import WARY_S
from extproc.fleet import Fleet
from extproc.retry_budget import RetryBudget

SUSPEND_S = 10.0
"""How long a worker is left alone that was asked in vain, as long as there are others. Requests that find
it still away are retried elsewhere, so a short time costs little."""

log = structlog.get_logger(__name__)


class Outcomes:
    """Takes in what Envoy reports (``access_log.Listener``)."""

    def __init__(self, fleet: Fleet, budget: RetryBudget, look_again: Callable[[], None]) -> None:
        """*look_again*: called when requests that wait may find a worker with room."""
        self._fleet = fleet
        self._budget = budget
        self._look_again = look_again
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """What ends suspensions, by endpoint."""
        self._calming: asyncio.TimerHandle | None = None
        """What ends the preference for others to workers that have failed in a row."""

    def on_failed(self, attempt: Attempt) -> None:
        """Learn that *attempt* failed; its request may still be tried elsewhere."""
        self._budget.on_failed()
        if attempt.unanswered:
            self._suspend(attempt)
        self._judge(attempt)

    def on_doubtful(self) -> None:
        """Learn that an attempt failed, perhaps since there were no KV blocks to fetch."""
        self._budget.on_failed()

    def on_blamed(self, attempt: Attempt) -> None:
        """Learn that there were."""
        self._judge(attempt)

    def on_ended(self, last: Attempt | None, *, retries: int, failed: bool) -> None:
        """Learn that a request is over; see ``access_log.Listener``."""
        self._budget.on_ended(retries, failed=failed)
        if last is not None:
            self._judge(last)

    def _judge(self, attempt: Attempt) -> None:
        registry = self._fleet.registry
        if registry.on_attempt(attempt, self._fleet.now()):
            self._fleet.commit()
            self._look_again()
        if registry.breakers.wary and self._calming is None:
            self._calming = asyncio.get_running_loop().call_later(WARY_S, self._calm_down)

    def _calm_down(self) -> None:
        self._calming = None
        if not self._fleet.registry.breakers.calm_down(self._fleet.now()):
            self._calming = asyncio.get_running_loop().call_later(WARY_S / 4, self._calm_down)

    def _suspend(self, attempt: Attempt) -> None:
        """Prefer others to a worker that was asked in vain."""
        registry = self._fleet.registry
        endpoint = attempt.endpoint
        away = attempt.outcome is Outcome.UNREACHABLE
        unreached_at = self._fleet.now() if away else 0.0
        if registry.suspend(endpoint, suspended=True, unreached_at=unreached_at):
            worker = registry.url_of(endpoint)
            log.warning("worker suspended: it cannot be reached", worker=worker, seconds=SUSPEND_S)
            self._fleet.commit()
            self._cancel_timer(endpoint)  # a check may have ended an earlier suspension
            loop = asyncio.get_running_loop()
            self._timers[endpoint] = loop.call_later(SUSPEND_S, self._resume, endpoint)

    def _cancel_timer(self, endpoint: str) -> None:
        timer = self._timers.pop(endpoint, None)
        if timer is not None:
            timer.cancel()

    def _resume(self, endpoint: str) -> None:
        del self._timers[endpoint]
        registry = self._fleet.registry
        if registry.suspend(endpoint, suspended=False):
            self._fleet.commit()
            log.info("worker tried again", worker=registry.url_of(endpoint))
