"""What became of one attempt to have a worker serve a request."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class Outcome(StrEnum):
    """How an attempt ended; the value says it in words."""

    SUCCEEDED = "it answered"
    FAILED = "it answered with an error"
    REFUSED = "it had too much to do"
    """Status 429 or 408: no sign of a fault, unless configured to be one."""

    LOST = "it broke off"
    """The connection ended or nothing came over it, before the head of an answer or after."""

    UNREACHABLE = "it could not be reached"
    UNKNOWN = "nothing is known"
    """The client left first, or another report tells."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt. Times are Unix times in seconds, by Envoy's clock."""

    endpoint: str
    """``ip:port``."""

    outcome: Outcome
    status: int = 0
    """HTTP status; 0 when there was none."""

    started: float = 0.0
    """When Envoy began to send the request to the worker, or a little before."""

    ended: float = 0.0
    """When the answer was over; 0: just now."""

    @property
    def unanswered(self) -> bool:
        """Whether the worker was asked in vain."""
        return not self.status and self.outcome in (Outcome.LOST, Outcome.UNREACHABLE)

    @property
    def failure(self) -> str:
        """What went wrong, in words."""
        return f"status {self.status}" if self.outcome is Outcome.FAILED else str(self.outcome)
