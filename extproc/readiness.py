"""Whether requests can be served, and if not, why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from extproc.engine import PICKABLE, State
from extproc.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True)
class ReadinessState:
    """The answer to a readiness probe."""

    ready: bool
    workers: int
    """Workers that are known; each rank of an engine is one."""

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
    """Ready: not stopping, at least one worker that may be picked, and an Envoy has a configuration."""

    def __init__(self, registry: Registry, serving: Callable[[], bool]) -> None:
        self._registry = registry
        self._serving = serving
        self.stopping = False

    def state(self) -> ReadinessState:
        """Return the state at this moment."""
        workers, available = self._count()
        if self.stopping:
            return ReadinessState(False, workers, "shutting down")
        if not available:
            return ReadinessState(False, workers, self._none_available())
        if not self._serving():
            return ReadinessState(False, workers, "envoy has not accepted a configuration yet")
        return ReadinessState(True, workers, available=available)

    def _none_available(self) -> str:
        registry = self._registry
        if registry.engines and not any(map(registry.takes_whole, registry.engines)):
            if registry.settings.splits:
                return "no healthy workers available: there are prefill workers only"
            return "no healthy workers available: prefill and decode workers take no whole requests"
        return "no healthy workers available"

    def _count(self) -> tuple[int, int]:
        """Return how many workers there are, and how many of them may be picked."""
        anyone = self._registry.settings.try_unhealthy
        workers = available = 0
        for engine in self._registry.engines:
            workers += len(engine.workers) or 1  # one whose name is not resolved has none yet
            if not self._registry.takes_whole(engine):
                continue
            if engine.state in PICKABLE or (anyone and engine.state is not State.DRAINING):
                available += len(engine.workers)
        return workers, available
