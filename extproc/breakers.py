"""The circuits of all endpoints, and what follows for the workers there.

The workers of one engine, its ranks, share a circuit: they are one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from extproc.attempt import Attempt
from extproc.circuit import Circuit, CircuitRules, CircuitState
from extproc.engine import Engine
from extproc.verdicts import Verdict
from policies.base import Worker

_CLOSED = CircuitState.CLOSED


class Breakers:
    """The circuits by endpoint."""

    def __init__(self, rules: CircuitRules) -> None:
        self._rules = rules
        self._circuits: dict[str, Circuit] = {}
        self._known: dict[str, CircuitState] = {}
        """States as ``transitions`` told them last, of circuits that were not closed."""
        self.wary: dict[str, Circuit] = {}
        """Circuits that may have a ``wary_limit``, by endpoint; no others do."""

    def configure(self, rules: CircuitRules) -> None:
        """Go by other *rules*."""
        if rules != self._rules:
            self._rules = rules
            for circuit in self._circuits.values():
                circuit.configure(rules)

    def circuit(self, endpoint: str) -> Circuit:
        """Return the circuit of *endpoint*, a closed one if there was none."""
        found = self._circuits.get(endpoint)
        if found is None:
            found = self._circuits[endpoint] = Circuit(self._rules)
        return found

    def keep(self, endpoints: Collection[str]) -> None:
        """Forget the circuits of all others: who comes back later is another worker."""
        for endpoint in self._circuits.keys() - endpoints:
            del self._circuits[endpoint]
            self._known.pop(endpoint, None)
            self.wary.pop(endpoint, None)

    def on_attempt(self, attempt: Attempt, now: float, in_flight: int = 0) -> bool:
        """Take in a report; tell whether anything follows from it at once. See ``Circuit.on_attempt``."""
        circuit = self._circuits.get(attempt.endpoint)
        if circuit is None:
            return False
        follows = circuit.on_attempt(attempt, now, in_flight)
        if circuit.wary_limit is not None:
            self.wary[attempt.endpoint] = circuit
        return follows

    def calm_down(self, now: float) -> bool:
        """Let time have its effect on ``wary``; tell whether there is none left."""
        self.wary = {e: circuit for e, circuit in self.wary.items() if not circuit.calm_down(now)}
        return not self.wary

    def any_sound(self, workers: Iterable[Worker]) -> bool:
        """Tell whether any of *workers* served what it was asked last."""
        circuits = self._circuits
        for worker in workers:
            circuit = circuits.get(worker.endpoint)
            if circuit is None or not (circuit.failing or worker.probation):
                return True
        return False

    def transitions(self) -> list[tuple[str, CircuitState]]:
        """Return the endpoints whose circuits have changed since the last call, and what they are."""
        states = {e: c.state for e, c in self._circuits.items() if c.state is not _CLOSED}
        known, self._known = self._known, states
        if states == known:
            return []
        changed = [(e, state) for e, state in states.items() if known.get(e) is not state]
        return changed + [(e, _CLOSED) for e in known if e not in states]


def follow(engine: Engine, verdict: Verdict | None, now: float, worker_limit: int) -> bool:
    """Bring the circuit of *engine* and the limits of its workers up to date; tell whether it is not closed.

    *verdict*: Envoy's; None: nobody judges.
    """
    circuit = engine.circuit
    if circuit is None:
        return False
    if verdict is not None:
        circuit.follow_envoy(
            engine.cluster,
            now,
            ejected=verdict.ejected,
            cause=verdict.ejection,
            passing=verdict.passing,
        )
    circuit.advance(now, engine.in_flight)
    set_limits(engine, worker_limit)
    return circuit.state is not _CLOSED


def send_probe(engine: Engine, worker_limit: int) -> None:
    """Learn that a request goes to *engine*, whose circuit is half-open: no other may, to any of its ranks."""
    if engine.circuit is not None:
        engine.circuit.on_sent(engine.in_flight)
        set_limits(engine, worker_limit)


def set_limits(engine: Engine, worker_limit: int) -> None:
    """Let the workers of *engine* have as many requests in flight as its circuit allows."""
    circuit = engine.circuit
    probation = circuit is not None and circuit.state is CircuitState.HALF_OPEN
    for worker in engine.workers:
        limit = worker_limit
        if probation:
            # Beside what was under way before the circuit opened.
            held = circuit is not None and circuit.probing
            limit = 0 if held else min(worker.in_flight + 1, worker_limit)
        if worker.limit != limit:
            worker.limit = limit
        if worker.probation is not probation:
            worker.probation = probation
