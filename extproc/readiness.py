"""Whether requests can be served, and if not, why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from extproc.pool import Pool


@dataclasses.dataclass(frozen=True, slots=True)
class ReadinessState:
    """The answer to a readiness probe."""

    ready: bool
    workers: int
    reason: str = ""
    available: int = 0
    """Workers that may be picked."""

    def body(self) -> dict[str, str | int]:
        """Return the JSON body; keys as vLLM Router's."""
        if self.ready:
            return {
                "status": "ready",
                "healthy_workers": self.available,
                "total_workers": self.workers,
            }
        return {"status": "not_ready", "reason": self.reason, "total_workers": self.workers}


class Readiness:
    """Ready: not stopping, at least one worker, and an Envoy has accepted a configuration."""

    def __init__(self, pool: Pool, serving: Callable[[], bool]) -> None:
        self._pool = pool
        self._serving = serving
        self.stopping = False

    def state(self) -> ReadinessState:
        """Return the state at this moment."""
        workers = len(self._pool.members)
        available = len(self._pool.candidates)
        if self.stopping:
            return ReadinessState(False, workers, "shutting down")
        if workers == 0:
            return ReadinessState(False, workers, "no healthy workers available")
        if not self._serving():
            return ReadinessState(False, workers, "envoy has not accepted a configuration yet")
        return ReadinessState(True, workers, available=available)
