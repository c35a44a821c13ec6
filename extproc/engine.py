"""One worker of the registry: what is known of it, and the state that follows."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from extproc.address import join_host_port
from extproc.circuit import Circuit, CircuitState
from extproc.discovery.updates import WorkerSpec
from extproc.models import Load, ModelList
from extproc.verdicts import Verdict
from policies.base import Worker


class State(StrEnum):
    """Where a worker stands. Healthy ones are picked, and half-open ones for one request at a time."""

    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"
    DRAINING = "draining"


PICKABLE = (State.HEALTHY, State.HALF_OPEN)
"""States of workers that may be picked; the router sees to it that half-open ones get one request at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What an earlier run of the service knew of a worker."""

    spec: WorkerSpec
    source: str
    address: str = ""
    """IP address of its host."""

    base: tuple[str, ...] = ()
    """Names of its base model."""

    adapters: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    pool: str = ""
    """Name of its pool; empty when it was in none."""

    cluster: str = ""
    """The Envoy cluster through which it was reached."""

    drain_deadline: float = 0.0
    """Unix time at which its drain ends; 0 when it is not being drained."""

    introduced: bool = False
    """Whether it was asked for its models, and may be picked whatever it answered."""

    resumes_at: float = 0.0
    """Unix time at which its circuit is or was tried again; 0 when it is closed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What an earlier run of the service knew."""

    engines: tuple[Known, ...] = ()
    removed: tuple[str, ...] = ()
    """Workers that an administrator removed though a discovery source names them."""


@dataclasses.dataclass(slots=True, eq=False)
class Engine:
    """One vLLM engine: one URL, one endpoint, one or more ranks."""

    spec: WorkerSpec
    source: str
    """Which discovery source named it."""

    added_at: float
    """Unix time, in seconds."""

    state: State = State.STARTING
    reason: str = ""
    """Why it is in that state; empty when it is healthy."""

    since: float = 0.0
    """When the state began, Unix time in seconds."""

    address: str = ""
    """IP address of its host; empty while the name is not resolved."""

    unresolved: str = ""
    """Why the name is not resolved."""

    models: ModelList | None = None
    """What it said last of its models; None when it never did."""

    models_unread: str = ""
    """Why its models could not be read last time; empty when they could."""

    introduced: bool = False
    """Whether it has been asked for its models since it came, or came back."""

    ranks: tuple[int, ...] = ()
    """The ranks that its metrics show; empty when they show none."""

    rank_slot: int = 0
    """Its place among nodes whose ranks are numbered throughout."""

    loads: dict[int | None, Load] = dataclasses.field(default_factory=dict)
    """By rank, from its metrics."""

    twin: str = ""
    """Another worker at the same address, which stands for both; empty when there is none."""

    is_router: bool = False
    """Whether it is this router itself: requests would go in circles."""

    draining: bool = False
    drain_deadline: float = 0.0
    """Unix time at which it is removed though requests are under way."""

    suspended: bool = False
    """Whether it has just been asked in vain: others are preferred for a while."""

    unreached_at: float = 0.0
    """When Envoy failed to connect to it last while it was suspended, Unix time in seconds; 0 when it did not,
    or when no check may end the suspension."""

    resumed_at: float = 0.0
    """When a check last ended a suspension, Unix time in seconds."""

    answered: bool = False
    """Whether this service has had an answer from it at this address."""

    refused: bool = False
    """Whether it refuses the connections of this service, which it has answered before: it is not there."""

    kv_engine_ids: dict[int, str] = dataclasses.field(default_factory=dict)
    """What its Mooncake connector calls the engine, by rank; empty while that is not known."""

    kv_engine_ids_unread: str = ""
    """Why that is not known, or no longer; empty when it is, or nobody asks."""

    cluster: str = ""
    """The Envoy cluster through which it is reached; empty before it is in one."""

    target: str = ""
    """The Envoy cluster where it belongs. When that is another one it moves as soon as Envoy is ready
    for it there."""

    workers: tuple[Worker, ...] = ()
    """As policies see it: one per rank."""

    circuit: Circuit | None = None
    """Its circuit breaker; None while it has no endpoint of its own."""

    @property
    def key(self) -> str:
        """Identity."""
        return self.spec.key

    @property
    def endpoint(self) -> str:
        """``ip:port``; empty while the name is not resolved."""
        return join_host_port(self.address, self.spec.url.port) if self.address else ""

    @property
    def in_flight(self) -> int:
        """Requests sent to any of its ranks whose end has not been seen."""
        return sum(worker.in_flight for worker in self.workers)

    @property
    def base_models(self) -> frozenset[str] | None:
        """Names of the base model; None when nothing is known."""
        said = self.models.base if self.models is not None else frozenset[str]()
        declared = {self.spec.model} if self.spec.model else set[str]()
        return (said | declared) or None

    @property
    def adapters(self) -> frozenset[str]:
        """LoRA adapters that it has loaded."""
        return self.models.adapters if self.models is not None else frozenset()

    @property
    def names(self) -> frozenset[str] | None:
        """Every name that it serves, adapters included; None when nothing is known."""
        base = self.base_models
        return None if base is None else base | self.adapters

    @property
    def model_id(self) -> str:
        """The one name that stands for its models in a list."""
        if self.spec.model:
            return self.spec.model
        if self.models is not None and self.models.entries:
            return str(self.models.entries[0]["id"])
        return "unknown"

    def known(self, pool: str) -> Known:
        """Return what the next run of the service should know; *pool* is the name of its pool."""
        models = self.models or ModelList(frozenset())
        return Known(
            self.spec,
            self.source,
            self.address,
            tuple(sorted(models.base)),
            tuple(sorted(models.adapters)),
            self.ranks,
            pool,
            self.cluster,
            self.drain_deadline if self.draining else 0.0,
            self.introduced,
            self.circuit.resumes_at if self.circuit is not None else 0.0,
        )

    def forget_contact(self) -> None:
        """Forget what was found when it was asked: there may be another machine now."""
        self.suspended = self.answered = self.refused = False
        self.unreached_at = self.resumed_at = 0.0

    def judge(self, verdict: Verdict | None, now: float, *, startup_s: float) -> bool:
        """Derive the state from *verdict* (None: nobody judges); tell whether it changed.

        A worker that never passed a check is starting for *startup_s* seconds, then unhealthy. Whether it is
        ejected is for its circuit to say.
        """
        state, reason = self._judged(verdict, now, startup_s)
        if (state, reason) == (self.state, self.reason):
            return False
        if state is not self.state:
            self.since = now
        self.state, self.reason = state, reason
        return True

    def _judged(  # noqa: C901, PLR0911  one line per reason
        self, verdict: Verdict | None, now: float, startup_s: float
    ) -> tuple[State, str]:
        if self.draining:
            return State.DRAINING, "it is being removed"
        overdue = now - self.added_at >= startup_s
        waiting = State.UNHEALTHY if overdue else State.STARTING
        if not self.address:
            return waiting, self.unresolved or "its name is being resolved"
        if self.is_router:
            return State.UNHEALTHY, "it is this router itself"
        if self.twin:
            return State.UNHEALTHY, f"it is at the same address as {self.twin}"
        circuit = CircuitState.CLOSED if self.circuit is None else self.circuit.state
        if self.circuit is not None and circuit is CircuitState.OPEN:
            return State.EJECTED, self.circuit.reason
        if verdict is not None and verdict.passing is not True:
            state = waiting if verdict.passing is None else State.UNHEALTHY
            if "certificate" in self.models_unread:  # which to Envoy is a connection that failed
                return state, self.models_unread
            return state, verdict.failure or "its first health check is under way"
        if self.refused:
            return State.UNHEALTHY, "it refuses connections"
        if not self.introduced:
            return State.STARTING, "it is being asked for its models"
        if self.circuit is not None and circuit is CircuitState.HALF_OPEN:
            return State.HALF_OPEN, self.circuit.reason
        return State.HEALTHY, ""
