"""The circuit breaker of one endpoint.

::

    CLOSED ── failures in a row within the window, or Envoy ejects ──▶ OPEN
    OPEN ── its time is over, or Envoy takes it back ──▶ HALF_OPEN
    HALF_OPEN ── successes in a row, one request at a time ──▶ CLOSED
        └────── one failure ──▶ OPEN, for the full time

What counts: an answer of status 500, 502, 503 or 504 counts each time (429 too if so configured). Others do
not, 501 and 505 included: any client can bring them about. A request that broke off counts too, but those that
one loss took along count once: a worker that dies with 40 streams has failed once. A worker that cannot be
connected to is not judged here: it is not there, which health checks and ``Registry.suspend`` see to, and it
comes back as a new one. A WebSocket that the worker closes and a client that leaves are no failures.

Envoy's own ejections come from the same answers. It knows no window: what it ejects for failures of which some
are too old to count stays closed here.

From the second failure in a row on, others are preferred to a worker with so many requests under way that
their failures would exceed the threshold by more than one. That is over with a success, with the circuit's
change and a moment after the last failure.

Reports may arrive out of order by a moment, and late ones are about requests that were sent before the circuit
opened: in HALF_OPEN only those count that were sent since. A probe is over when its outcome is known; when none
becomes known, a moment after nothing is under way any more. Pure: times are arguments, Unix time in seconds.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import deque
from enum import StrEnum

from extproc.attempt import Attempt, Outcome

REPORT_LAG_S = 0.25
"""How much later than a failure an earlier success may be reported."""

LOST_REPORT_S = 1.0
"""How long after the end of a probe its report may take."""

WARY_S = 1.0
"""How long after failures in a row others are preferred."""

WARY_FAILURES = 2
"""From so many in a row on."""


class CircuitState(StrEnum):
    """Whether requests may go to a worker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CircuitRules:
    """When circuits open and close."""

    failures: int = 10
    """In a row; 0: no circuit ever opens."""

    successes: int = 3
    """In a row, one request at a time, until a half-open circuit closes."""

    open_s: float = 60.0
    window_s: float = 120.0
    """Failures count for so long."""

    count_429: bool = False


class Circuit:
    """The circuit of one endpoint."""

    __slots__ = (
        "_aged",
        "_by_envoy",
        "_cause",
        "_down",
        "_ejected",
        "_failures",
        "_fresh_after",
        "_idle_since",
        "_lost_at",
        "_older",
        "_opened_at",
        "_successes",
        "_wary_in_flight",
        "failing",
        "open_until",
        "probing",
        "rules",
        "state",
    )

    def __init__(self, rules: CircuitRules) -> None:
        self.rules = rules
        self.state = CircuitState.CLOSED
        self.open_until = 0.0
        """When an open circuit is tried again."""
        self.probing = False
        """Whether a half-open circuit has its one request under way."""
        self.failing = False
        """Whether the latest attempt came to nothing, for whatever reason."""
        self._failures: deque[float] = deque()
        """Times of the failures in a row that count."""
        self._wary_in_flight: int | None = None
        """At most so many requests under way have not failed, as of the last failure in a row; None: whatever
        is under way may go on growing."""
        self._aged = False
        """Whether failures in a row have become too old to count."""
        self._lost_at = 0.0
        self._cause = ""
        self._opened_at = 0.0
        self._fresh_after = 0.0
        """What was sent before is none of the probes."""
        self._successes = 0
        self._older = 0
        """Requests that were under way when the probe was sent."""
        self._idle_since: float | None = None
        self._ejected: set[str] = set()
        """The Envoy clusters in which it is ejected."""
        self._by_envoy = False
        """Whether Envoy has ejected it, too, since the circuit opened."""
        self._down = False
        """Whether its health check fails."""

    @property
    def reason(self) -> str:
        """Why requests may not go there as they please; empty when they may."""
        match self.state:
            case CircuitState.CLOSED:
                return ""
            case CircuitState.OPEN:
                until = dt.datetime.fromtimestamp(self.open_until, dt.UTC)
                return f"{self._cause}; it is tried again at {until:%Y-%m-%dT%H:%M:%SZ}"
            case CircuitState.HALF_OPEN:
                wanted = self.rules.successes
                return f"it is tried with one request at a time: {self._successes} of {wanted} succeeded"

    @property
    def wary_limit(self) -> int | None:
        """From how many requests under way on others are preferred; None: never."""
        failures = len(self._failures)
        if self._wary_in_flight is None or failures < WARY_FAILURES:
            return None
        return max(self._wary_in_flight, self.rules.failures + 1 - failures)

    @property
    def resumes_at(self) -> float:
        """When an open or half-open circuit was or will be tried, for the next run; 0 when it is closed."""
        return 0.0 if self.state is CircuitState.CLOSED else self.open_until

    def configure(self, rules: CircuitRules) -> None:
        """Go by other *rules*."""
        self.rules = rules
        if not rules.failures:
            self._close()

    def restore(self, resumes_at: float, now: float) -> None:
        """Go on as an earlier run left off (``resumes_at``)."""
        if not resumes_at or not self.rules.failures:
            return
        self._open("errors in a row, before the service was started again", now)
        self.open_until = min(resumes_at, now + self.rules.open_s)
        self.advance(now, 0)

    def on_sent(self, in_flight: int = 1) -> None:
        """Learn that a request has been sent there: for a half-open circuit, its probe.

        *in_flight*: requests under way there, this one included; the others are older.
        """
        if self.state is CircuitState.HALF_OPEN:
            self.probing = True
            self._older = in_flight - 1
            self._idle_since = None

    def on_attempt(self, attempt: Attempt, now: float, in_flight: int = 0) -> bool:
        """Take in a report; tell whether anybody may want to know: the state, or room for a probe.

        *in_flight*: requests under way there, those included that have failed and are tried elsewhere.
        """
        outcome = attempt.outcome
        if outcome is Outcome.REFUSED and self.rules.count_429 and attempt.status == 429:
            outcome = Outcome.FAILED
        if outcome is not Outcome.UNKNOWN:
            self.failing = outcome is not Outcome.SUCCEEDED
        match self.state:
            case CircuitState.CLOSED:
                return self._judge(outcome, attempt, now, in_flight)
            case CircuitState.OPEN:
                return False
            case CircuitState.HALF_OPEN:
                return attempt.started >= self._fresh_after and self._judge_probe(
                    outcome, attempt, now
                )

    def follow_envoy(
        self, cluster: str, now: float, *, ejected: bool, cause: str, passing: bool | None
    ) -> None:
        """Learn what Envoy thinks of it in *cluster*."""
        if not self.rules.failures:
            return
        if ejected and cluster not in self._ejected:
            self._ejected.add(cluster)
            if self.state is CircuitState.HALF_OPEN or (
                self.state is CircuitState.CLOSED and not self._aged
            ):
                self._open(cause, now)
            self._by_envoy = self.state is CircuitState.OPEN
        elif not ejected and cluster in self._ejected:
            self._ejected.discard(cluster)
            if self.state is CircuitState.OPEN and self._by_envoy:
                self._half_open(now)
        if passing is False:
            self._down = True
        elif passing and self._down:
            self._down = False
            if self.state is CircuitState.OPEN:  # it may have been started anew
                self._half_open(now)

    def advance(self, now: float, in_flight: int) -> bool:
        """Let time have its effect, *in_flight* requests being under way there; tell as ``on_attempt`` does."""
        if self.state is CircuitState.OPEN and now >= self.open_until:
            self._half_open(now)
            return True
        if not self.probing or in_flight > self._older:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < LOST_REPORT_S:
            return False
        return self._end_probe()

    def calm_down(self, now: float) -> bool:
        """Let time have its effect on ``wary_limit``; tell whether there is none."""
        if self._failures and now - self._failures[-1] >= WARY_S:
            self._wary_in_flight = None
        return self.wary_limit is None

    def _judge(self, outcome: Outcome, attempt: Attempt, now: float, in_flight: int) -> bool:
        failures = self._failures
        if outcome is Outcome.SUCCEEDED:
            if failures or self._aged:
                ended = min(now, max(attempt.ended, now - REPORT_LAG_S))
                while failures and failures[0] <= ended:
                    failures.popleft()
                self._aged = False
            return False
        if outcome is Outcome.LOST:
            if attempt.started < self._lost_at:
                return False
            self._lost_at = now
        elif outcome is not Outcome.FAILED:
            return False
        while failures and now - failures[0] > self.rules.window_s:
            failures.popleft()
            self._aged = True
        if not self.rules.failures:
            return False
        failures.append(now)
        # Any of those that failed may still be under way, elsewhere.
        self._wary_in_flight = in_flight - len(failures)
        if len(failures) < self.rules.failures:
            return False
        what = "failure" if len(failures) == 1 else "failures in a row"
        self._open(f"{len(failures)} {what}, the last one: {attempt.failure}", now)
        return True

    def _judge_probe(self, outcome: Outcome, attempt: Attempt, now: float) -> bool:
        match outcome:
            case Outcome.SUCCEEDED:
                self._successes += 1
                if self._successes >= self.rules.successes:
                    self._close()
                else:
                    self._end_probe()
                return True
            case Outcome.FAILED | Outcome.LOST | Outcome.UNREACHABLE:
                self._open(f"it failed when it was tried again: {attempt.failure}", now)
                return True
            case Outcome.REFUSED | Outcome.UNKNOWN:
                return self._end_probe()

    def _end_probe(self) -> bool:
        ended, self.probing = self.probing, False
        self._idle_since = None
        return ended

    def _open(self, cause: str, now: float) -> None:
        self.state = CircuitState.OPEN
        self.open_until = now + self.rules.open_s
        self._opened_at = now
        self._cause = cause
        self._by_envoy = False
        self._forget()

    def _half_open(self, now: float) -> None:
        self.state = CircuitState.HALF_OPEN
        self.open_until = min(self.open_until, now)
        # Clocks may differ: half of the pause is a safe distance from what was sent before it.
        self._fresh_after = (self._opened_at + now) / 2
        self._forget()

    def _close(self) -> None:
        self.state = CircuitState.CLOSED
        self.failing = False
        self._forget()

    def _forget(self) -> None:
        self._failures.clear()
        self._wary_in_flight = None
        self._aged = False
        self._successes = 0
        self._end_probe()
