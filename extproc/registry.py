"""All workers: who named them, what is known of them, and the pools that follow.

Discovery sources, administrators, Envoy's verdicts and the workers' own answers come in through
synchronous methods; ``commit`` then works out states, pools, candidates and Envoy's clusters, all at
once. Nothing here waits, so no reader ever sees half of an update.

A worker is in the registry while any source names it, unless an administrator has removed it: then it
stays out until its source forgets it and names it again, or an administrator adds it. Of several sources
that name one worker the administrator's description counts, then the others' in the order in which they
were started.

Workers that serve the same models are one pool; see ``model_groups``. A pool is one Envoy cluster, or one
for each base path that its workers have. Its name stays the same as long as it has workers in common
with what it was before; the first is called ``default``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import assert_never

from extproc.address import join_host_port
from extproc.attempt import Attempt
from extproc.breakers import Breakers, follow, send_probe
from extproc.candidates import Roster, choose, find_tripped, make_roster
from extproc.circuit import CircuitRules, CircuitState
from extproc.clusters import (
    RESERVED_NAMES,
    ClusterView,
    EndpointView,
    Lingering,
    cluster_name,
    pool_name,
    view_endpoint,
)
from extproc.discovery.updates import Add, Remove, Reset, Update, WorkerSpec, WorkerType
from extproc.engine import Engine, Known, Memory, State
from extproc.errors import WorkerExistsError
from extproc.model_groups import group_by_models
from extproc.models import Load, ModelList
from extproc.pd.connector import Peer
from extproc.pool import NO_LIMIT, Pool
from extproc.verdicts import Verdict, Verdicts
from policies.base import Policy, Worker

ADMIN_SOURCE = "admin"
DEFAULT_POOL = "default"

DISTRUST_S = 10.0
"""A worker that cannot be connected to so soon after a check has ended its suspension is not resumed by the
next one: Envoy may not reach it though this service does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What a commit changed."""

    members: bool = False
    """Workers came, went or moved."""

    clusters: bool = False
    """Envoy must be told."""

    states: tuple[Engine, ...] = ()
    """Workers whose state or its reason is another."""

    removed: tuple[Engine, ...] = ()
    """Workers that are no longer there."""

    drains: bool = False
    """A drain began or is over."""

    circuits: tuple[tuple[str, CircuitState], ...] = ()
    """URLs of workers whose circuit is another, and what it is."""

    suspended: tuple[Engine, ...] = ()
    """Workers that have just been asked in vain."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the registry judges and groups."""

    follows_envoy: bool = True
    """Whether Envoy's verdicts come in; without them every worker counts as healthy."""

    asks_models: bool = True
    """Whether workers are asked for their models; each is then asked once before it is picked."""

    startup_s: float = 600.0
    """How long a worker that never was healthy is called starting."""

    try_unhealthy: bool = False
    """Pick among all workers when none is healthy, rather than refuse."""

    lora_any: bool = False
    """A worker without an adapter may be asked for it when none that has it is there."""

    tls_server_name: str = ""
    """Name that the certificates of https workers carry, unless a worker's description has another."""

    tls_insecure: bool = False
    """Certificates of https workers are not looked at."""

    ranks: int = 1
    """Data-parallel ranks of each engine; 0: as many as its metrics show."""

    prefill_ranks: int = 1
    """The same of prefill workers."""

    decode_ranks: int = 1
    """The same of decode workers."""

    splits: bool = False
    """Prefill workers compute prompts for the others: decode workers then take whole requests, too."""

    global_ranks: bool = False
    """Ranks are numbered over all nodes, not on each."""

    circuits: CircuitRules = dataclasses.field(default_factory=CircuitRules)
    """When a worker is out for its answers."""

    worker_limit: int = NO_LIMIT
    """Requests that a worker may have in flight."""

    is_router: Callable[[str, int], bool] = lambda _address, _port: False
    """Tells whether clients connect to this router at an address and port."""

    def ranks_of(self, role: WorkerType) -> int:
        """Return the data-parallel ranks of each engine of *role*."""
        match role:
            case WorkerType.REGULAR:
                return self.ranks
            case WorkerType.PREFILL:
                return self.prefill_ranks
            case WorkerType.DECODE:
                return self.decode_ranks
            case _:
                assert_never(role)


class Registry:
    """The workers and their pools."""

    def __init__(  # noqa: PLR0915  one line per field
        self,
        make_policy: Callable[[], Policy],
        settings: Settings | None = None,
        *,
        make_prefill_policy: Callable[[], Policy] | None = None,
    ) -> None:
        """Make an empty registry.

        *make_policy* makes the policy of a new pool, *make_prefill_policy* that of one of prefill workers.
        """
        self.settings = settings or Settings()
        self.verdicts = Verdicts()
        self.breakers = Breakers(self.settings.circuits)
        self.pools: tuple[Pool, ...] = (Pool(DEFAULT_POOL, make_policy()),)
        """The pools; the first takes the requests that name no model."""

        self.role_pools: tuple[Pool, ...] = ()
        """Pools of workers that take no whole requests: prefill workers, and decode workers where requests
        are not split."""

        self.prefill_pools: tuple[Pool, ...] = ()
        """Those of prefill workers."""

        self.accepts: Callable[[str], bool] = lambda _cluster: True
        """Tells whether a connected Envoy has a cluster. The service sets it."""

        self.waits = False
        """Whether the mere passing of time can change anything."""

        self.retired: tuple[Pool, ...] = ()
        """Pools that are gone but for requests under way."""

        self.clusters: tuple[ClusterView, ...] = (
            ClusterView(DEFAULT_POOL, "", (), is_default=True),
        )
        self.uniform = True
        """Whether a request's model makes no difference."""

        self._make_policy = make_policy
        self._make_prefill_policy = make_prefill_policy or make_policy
        self._remembered: dict[str, Known] = {}
        self._resumes: dict[str, float] = {}
        """When the circuits of an earlier run are tried again, by key of a worker."""

        self._sources: dict[str, dict[str, WorkerSpec]] = {ADMIN_SOURCE: {}}
        self._masked: set[str] = set()
        self._drained: frozenset[str] = frozenset()
        """Workers that were being drained at the last commit."""

        self._engines: dict[str, Engine] = {}
        self._by_endpoint: dict[str, list[Engine]] = {}
        self._pool_of_model: dict[str, Pool] = {}
        self._prefill_pool_of_model: dict[str, Pool] = {}
        self._addresses: dict[str, str] = {}
        self._unresolved: dict[str, str] = {}
        self._seen: tuple[Engine, ...] = ()
        """The engines of the last commit."""

        self._settled: dict[str, tuple[Pool, WorkerType, frozenset[str] | None]] = {}
        """By key of a worker: its pool, and the role and the models that put it there."""

        self._by_order: dict[int, Engine] = {}
        self._rosters: dict[Pool, Roster] = {}
        self._ranked = any(self.settings.ranks_of(role) != 1 for role in WorkerType)
        """Whether any worker was a rank so far."""

        self._placed: list[Engine] = []
        """Engines that have an address of their own."""

        self._departed: dict[tuple[str, str, str], Worker] = {}
        """Workers that are gone but for requests under way, by URL, endpoint and instance."""
        self._suspended: list[Engine] = []
        """Engines that were suspended since the last commit."""

        self._next_order = 0
        self._members_changed = False
        self._stale = True
        """Whether the candidates must be chosen anew though no state changed."""

        self._lingering = Lingering()

    # --- what is there

    @property
    def engines(self) -> Collection[Engine]:
        """All workers, in the order in which they joined."""
        return self._engines.values()

    def get(self, key: str) -> Engine | None:
        """Return the worker known as *key*."""
        return self._engines.get(key)

    def named_by(self, source: str) -> Collection[WorkerSpec]:
        """Return the workers that a discovery source names."""
        return self._sources.get(source, {}).values()

    def hosts(self) -> set[str]:
        """Return the host names that must be resolved."""
        return {e.spec.url.host for e in self._engines.values() if e.spec.url.is_named}

    def url_of(self, endpoint: str) -> str:
        """Return the URL of the worker at *endpoint*, or *endpoint* when it is not known."""
        found = self._by_endpoint.get(endpoint)
        return found[0].spec.url.url if found else endpoint

    def pool_of(self, model: str) -> Pool | None:
        """Return the pool that serves *model*, or None when nobody is known to."""
        return self._pool_of_model.get(model)

    def prefill_pool_of(self, model: str) -> Pool | None:
        """Return the pool of prefill workers for *model* ("": any); None when there is none."""
        found = self._prefill_pool_of_model.get(model)
        if found is None and len(self.prefill_pools) == 1 and (not model or self.uniform):
            return self.prefill_pools[0]
        return found

    def label_of(self, worker: Worker, label: str) -> str:
        """Return what *label* of *worker* says, "" when it has none."""
        engine = self._by_order.get(worker.order)
        labels = engine.spec.labels if engine is not None else ()
        return next((text for key, text in labels if key == label), "")

    def peer(self, worker: Worker) -> Peer:
        """Return *worker* as the other end of a KV transfer."""
        engine = self._by_order.get(worker.order)
        if engine is None:  # it has just gone
            return Peer(worker.endpoint, worker.rank)
        spec = engine.spec
        return Peer(
            join_host_port(spec.url.host, spec.url.port),
            worker.rank,
            spec.zmq_address,
            spec.bootstrap_port,
            engine.kv_engine_ids.get(worker.rank or 0, ""),
        )

    def has_engine_id(self, worker: Worker) -> bool:
        """Tell whether it is known what Mooncake calls *worker*."""
        engine = self._by_order.get(worker.order)
        return engine is not None and (worker.rank or 0) in engine.kv_engine_ids

    def prefill_worker(self, endpoint: str, rank: int | None) -> Worker | None:
        """Return the prefill worker at *endpoint*, of its ranks that one."""
        found = [
            worker
            for engine in self._by_endpoint.get(endpoint, ())
            if self.role_of(engine) is WorkerType.PREFILL
            for worker in engine.workers
        ]
        return next((w for w in found if w.rank == rank), found[0] if found else None)

    def role_of(self, engine: Engine) -> WorkerType:
        """Return what *engine* does; where requests are split, who would take whole ones decodes."""
        role = engine.spec.worker_type
        return self._main_role if role is WorkerType.REGULAR else role

    def takes_whole(self, engine: Engine) -> bool:
        """Tell whether *engine* may be given whole requests."""
        return self.role_of(engine) is self._main_role

    @property
    def _main_role(self) -> WorkerType:
        return WorkerType.DECODE if self.settings.splits else WorkerType.REGULAR

    def unread_candidates(self) -> tuple[Worker, ...]:
        """Return the candidates of whose models nothing is known; they judge requests for any model."""
        unread = self._rosters[self.pools[0]].unread if self._rosters else frozenset[int]()
        return tuple(worker for worker in self.pools[0].candidates if worker.order in unread)

    def all_pools(self) -> tuple[Pool, ...]:
        """Return the pools of every role, and those that are gone but for requests under way."""
        return (*self.pools, *self.role_pools, *self.retired)

    def model_names(self) -> list[str]:
        """Return every model and adapter that some worker serves, sorted."""
        return sorted(self._pool_of_model)

    def memory(self) -> Memory:
        """Return what the next run of the service should know."""
        engines = tuple(
            engine.known(self._settled[key][0].name if key in self._settled else "")
            for key, engine in self._engines.items()
        )
        return Memory(engines, tuple(sorted(self._masked)))

    # --- what happens

    def configure(self, settings: Settings) -> None:
        """Judge and group by other *settings* from the next commit on."""
        self.settings = settings
        self.breakers.configure(settings.circuits)
        self._members_changed = True

    def restore(self, memory: Memory, now: float, *, sources: Collection[str]) -> None:
        """Begin with what an earlier run knew, until the *sources* of this one have spoken.

        A name that cannot be resolved now starts at its last address, pools start as they were, and what
        administrators did stays done.
        """
        self._remembered = {known.spec.key: known for known in memory.engines}
        self._masked = set(memory.removed)
        self._resumes = {known.spec.key: known.resumes_at for known in memory.engines}
        self._sources |= {source: {} for source in sources}
        pools = {pool.name: pool for pool in self.pools}
        for known in memory.engines:
            if known.source not in self._sources:
                continue
            key = known.spec.key
            self._sources[known.source][key] = known.spec
            engine = self._engines[key] = self._new_engine(known.spec, known.source, now)
            engine.cluster = known.cluster
            self._members_changed = True
            if known.pool:
                if known.pool not in pools:
                    prefills = self.role_of(engine) is WorkerType.PREFILL
                    make = self._make_prefill_policy if prefills else self._make_policy
                    pools[known.pool] = Pool(known.pool, make())
                models = frozenset(known.base) | ({known.spec.model} - {""})
                self._settled[key] = pools[known.pool], self.role_of(engine), models or None
        self.pools = tuple(pools.values())
        self._follow_sources(now)

    def apply(self, source: str, update: Update, now: float) -> None:
        """Take in what a discovery source says."""
        named = self._sources.setdefault(source, {})
        match update:
            case Reset(workers):
                fresh = {spec.key: spec for spec in workers}
                forgotten = named.keys() - fresh.keys()
                self._sources[source] = fresh
            case Add(worker):
                named[worker.key] = worker
                forgotten = set()
            case Remove(key):
                forgotten = {key} & named.keys()
                named.pop(key, None)
            case _:
                assert_never(update)
        for others in self._sources.values():
            forgotten -= others.keys()
        self._masked -= forgotten
        self._follow_sources(now)

    def add(self, spec: WorkerSpec, now: float) -> Engine:
        """Add a worker for an administrator. ``WorkerExistsError`` when it is there already.

        One that is being drained is taken back.
        """
        known = self._engines.get(spec.key)
        if known is not None and not known.draining:
            raise WorkerExistsError(f"Worker {spec.key} already exists")
        self._refuse_twins(spec)
        self._sources[ADMIN_SOURCE][spec.key] = spec
        self._masked.discard(spec.key)
        if known is not None:
            known.draining = False
        self._follow_sources(now)
        return self._engines[spec.key]

    def _refuse_twins(self, spec: WorkerSpec) -> None:
        """Raise when another worker is the same engine under another name."""
        url = spec.url
        address = self._addresses.get(url.host, url.host)
        for key, engine in self._engines.items():
            other = engine.spec.url
            if key == spec.key:
                continue
            if other.url == url.url and None in (other.rank, url.rank):
                raise WorkerExistsError(f"Worker {key} already exists and shares its ranks")
            place = (engine.address, other.port, other.path)
            if other.url != url.url and place == (address, url.port, url.path):
                raise WorkerExistsError(f"Worker {key} is at the same address as {spec.key}")

    def remove(self, key: str, now: float) -> bool:
        """Remove a worker whoever named it; tell whether it was there."""
        if key not in self._engines:
            return False
        self._sources[ADMIN_SOURCE].pop(key, None)
        if any(key in named for named in self._sources.values()):
            self._masked.add(key)
        self._follow_sources(now)
        return True

    def drain(self, key: str, deadline: float) -> bool:
        """Pick a worker no more and remove it once nothing is under way; tell whether it is there."""
        engine = self._engines.get(key)
        if engine is None:
            return False
        engine.draining = True
        engine.drain_deadline = deadline
        return True

    def end_drains(self, now: float) -> bool:
        """Remove drained workers that are idle or overdue; tell whether any is being drained."""
        draining = [engine for engine in self._engines.values() if engine.draining]
        for engine in draining:
            if engine.in_flight == 0 or now >= engine.drain_deadline:
                self.remove(engine.key, now)
        return bool(draining)

    def on_address(self, host: str, address: str) -> None:
        """Learn the address of a host name."""
        self._addresses[host] = address
        self._unresolved.pop(host, None)
        for engine in self._engines.values():
            if engine.spec.url.host == host and engine.address != address:
                if engine.address:  # there may be another machine now
                    engine.introduced = not self.settings.asks_models
                    engine.forget_contact()
                engine.address = address
                self._members_changed = True

    def on_unresolved(self, host: str, reason: str) -> None:
        """Learn why a host name has no address; the last one stays."""
        self._unresolved[host] = reason
        for engine in self._engines.values():
            if engine.spec.url.host == host:
                engine.unresolved = reason

    def on_models(self, engine: Engine, models: ModelList | None) -> None:
        """Learn the models of a worker; None when it would not say: what was known stays."""
        engine.introduced = True
        if models is not None:
            engine.models_unread = ""
        if models is not None and models != engine.models:
            changed = engine.models is None or (
                (models.base, models.adapters) != (engine.models.base, engine.models.adapters)
            )
            engine.models = models
            self._members_changed |= changed

    def on_loads(
        self, engine: Engine, loads: dict[int | None, Load], ranks: tuple[int, ...]
    ) -> None:
        """Learn what a worker's metrics say."""
        engine.loads = loads
        if ranks and ranks != engine.ranks:
            engine.ranks = ranks
            self._members_changed = True

    def on_events(self, changed: Iterable[tuple[str, str]]) -> None:
        """Learn that Envoy's verdict on these endpoints is another; a worker that returns is asked again."""
        for cluster, endpoint in changed:
            self._stale = True  # one that is ejected may be down now, too
            good = self.verdicts.get(cluster, endpoint).passing
            for engine in self._by_endpoint.get(endpoint, ()):
                if engine.cluster != cluster or not good or not self.settings.asks_models:
                    continue
                # It may have been started anew with other models, or it was asked before it could answer.
                returns = engine.state in (State.UNHEALTHY, State.EJECTED)
                if returns or (engine.state is State.STARTING and engine.models_unread):
                    engine.introduced = False

    def on_probe(self, worker: Worker) -> None:
        """Learn that a request goes to *worker*, which is on probation: no other may, to any of its ranks."""
        for engine in self._by_endpoint.get(worker.endpoint, ()):
            send_probe(engine, self.settings.worker_limit)

    def on_attempt(self, attempt: Attempt, now: float) -> bool:
        """Take in a report; tell whether anything follows from it at the next commit."""
        return self.breakers.on_attempt(attempt, now, self._in_flight_at(attempt.endpoint))

    def preferred(self, workers: tuple[Worker, ...]) -> tuple[Worker, ...]:
        """Return those of *workers* that have not just failed several times with as much under way as they may."""
        wary = self.breakers.wary
        if not wary:
            return workers
        limits = {endpoint: circuit.wary_limit for endpoint, circuit in wary.items()}
        brimful = {
            endpoint
            for endpoint, limit in limits.items()
            if limit is not None and self._in_flight_at(endpoint) >= limit
        }
        return tuple(w for w in workers if w.endpoint not in brimful) if brimful else workers

    def _in_flight_at(self, endpoint: str) -> int:
        return sum(engine.in_flight for engine in self._by_endpoint.get(endpoint, ()))

    def suspend(self, endpoint: str, *, suspended: bool, unreached_at: float = 0.0) -> bool:
        """Prefer others to the worker at *endpoint*, or no longer; tell whether that changed anything.

        *unreached_at*: when it could not be connected to; 0 when it broke off, of which checks know nothing.
        """
        changed = False
        for engine in self._by_endpoint.get(endpoint, ()):
            if not suspended or not unreached_at:
                engine.unreached_at = 0.0
            elif unreached_at - engine.resumed_at > DISTRUST_S:
                engine.unreached_at = unreached_at
            if suspended and not engine.suspended:
                self._suspended.append(engine)
            changed |= engine.suspended is not suspended
            engine.suspended = suspended
        self._stale |= changed
        return changed

    def on_answer(self, engine: Engine, *, began: float, now: float, passed: bool) -> bool:
        """Learn that *engine* has answered a check that *began* then; tell whether that changed anything.

        Any answer shows that it is there. One that *passed* ends the suspension for a connection that failed
        before the check, and any of a worker that was gone: another process is there now.
        """
        engine.answered = True
        changed, engine.refused = engine.refused, False
        newer = engine.unreached_at <= began if engine.unreached_at else changed
        if passed and engine.suspended and newer:
            for other in self._by_endpoint.get(engine.endpoint, ()):
                other.resumed_at = now
            changed |= self.suspend(engine.endpoint, suspended=False)
        return changed

    def on_refused(self, engine: Engine) -> bool:
        """Learn that *engine* refused the connection of a check; tell whether that changed anything.

        Only of one that has answered before this says that it is gone: others may not be for this service.
        """
        changed = engine.answered and not engine.refused
        engine.refused |= changed
        return changed

    # --- what follows

    def commit(self, now: float) -> Change:
        """Work out states, pools, candidates and clusters."""
        removed: list[Engine] = []
        members_changed = self._members_changed
        if members_changed:
            self._members_changed = False
            removed = self._rebuild(now)
            # What Envoy's log said late of an endpoint that has just come back is about its earlier life.
            self.verdicts.keep(_endpoints_in(self.clusters))
        open_circuits = self._tend_circuits(now)
        moved = self._move()
        states, drains = self._judge(now)
        self.waits |= open_circuits
        if members_changed or moved or states or drains or self._stale:
            self._stale = False
            self._choose_candidates()
        clusters = self.clusters
        if members_changed or moved or drains or self._lingering:
            clusters = self._lingering.extend(self._view_clusters(), self.clusters, now)
        clusters_changed = clusters != self.clusters
        if clusters_changed:
            self.verdicts.keep(_endpoints_in(self.clusters) & _endpoints_in(clusters))
            self.clusters = clusters
        self._let_go()
        circuits = tuple((self.url_of(e), state) for e, state in self.breakers.transitions())
        suspended = tuple(self._suspended)
        self._suspended.clear()
        return Change(
            members_changed,
            clusters_changed,
            tuple(states),
            tuple(removed),
            drains,
            circuits,
            suspended,
        )

    def good_endpoints(self) -> set[tuple[str, str]]:
        """Return cluster and endpoint of every worker that Envoy is known to find healthy."""
        return {
            (cluster, engine.endpoint)
            for engine in self._placed
            for cluster in {engine.cluster, engine.target}
            if self.verdicts.get(cluster, engine.endpoint).passing
        }

    def _follow_sources(self, now: float) -> None:
        """Make the engines those that the sources name."""
        wanted: dict[str, tuple[WorkerSpec, str]] = {}
        ranked: set[str] = set()
        for source, named in self._sources.items():
            for key, spec in named.items():
                url = spec.url.url
                # An engine is there as a whole or by its ranks: who named it first counts.
                overlaps = url in (ranked if spec.url.rank is None else wanted)
                if key in self._masked or key in wanted or overlaps:
                    continue
                wanted[key] = (spec, source)
                if spec.url.rank is not None:
                    ranked.add(url)
        engines = self._engines
        for key in engines.keys() - wanted.keys():
            del engines[key]
            self._members_changed = True
        for key, (spec, source) in wanted.items():
            known = engines.get(key)
            if known is None:
                engines[key] = self._new_engine(spec, source, now)
                self._members_changed = True
            else:
                known.source = source
                if known.spec != spec:
                    self._members_changed = True
                    known.spec = spec

    def _new_engine(self, spec: WorkerSpec, source: str, now: float) -> Engine:
        host = spec.url.host
        address = host
        before = self._remembered.pop(spec.key, None)
        if spec.url.is_named:
            address = self._addresses.get(host) or (before.address if before else "")
        engine = Engine(spec, source, now, since=now, address=address)
        engine.introduced = not self.settings.asks_models
        if before is not None:
            engine.ranks = before.ranks
            engine.draining = bool(before.drain_deadline)
            engine.drain_deadline = before.drain_deadline
            # One that serves already may not say its models: to ask again first would be to refuse requests.
            engine.introduced |= before.introduced
            if before.base:
                engine.models = ModelList(frozenset(before.base), frozenset(before.adapters))
        engine.unresolved = self._unresolved.get(host, "")
        if self.settings.global_ranks:
            taken = {other.rank_slot for other in self._engines.values()}
            engine.rank_slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        return engine

    def _rebuild(self, now: float) -> list[Engine]:
        """Make workers, pools and their members anew; return the engines that are gone."""
        known = {worker.url: worker for pool in self._live_pools() for worker in pool.members}
        instances = {order: engine.spec.instance for order, engine in self._by_order.items()}
        weights = {worker.url: worker.weight for worker in known.values()}
        self._placed = placed = self._place()
        for engine in placed:
            engine.workers = tuple(self._workers_of(engine, known))
            self._ranked |= engine.spec.url.rank is not None
        groups = self._grouped(placed)
        pools = self._pools_for(groups)
        before = self._live_pools()
        self._settled = {}
        group_roles = [self.role_of(group[0]) for group in groups]
        roles = Counter(group_roles)
        for pool, engines, role in zip(pools, groups, group_roles, strict=True):
            self._settle(pool, engines, weights, alone=roles[role] == 1)
        main = self._main_role
        regular = [p for p, role in zip(pools, group_roles, strict=True) if role is main]
        if not regular:
            kept = next((pool for pool in self.pools if pool not in pools), None)
            regular.append(kept or Pool(DEFAULT_POOL, self._make_policy()))
            regular[0].set_members(())
            self._rosters[regular[0]] = make_roster((), alone=True)
        self.pools = tuple(regular)
        self.role_pools = tuple(pool for pool in pools if pool not in regular)
        self.prefill_pools = tuple(
            pool
            for pool, role in zip(pools, group_roles, strict=True)
            if role is WorkerType.PREFILL
        )
        current = set(self._live_pools())
        self.retired = tuple(pool for pool in (*self.retired, *before) if pool not in current)
        self._rosters = {pool: self._rosters[pool] for pool in current}
        self._index()
        self._connect(now)
        for worker in known.values():
            if worker.in_flight and worker.order not in self._by_order:
                instance = instances.get(worker.order, "")
                self._departed[worker.url, worker.endpoint, instance] = worker
        self._forget_hosts()
        removed = [engine for engine in self._seen if self._engines.get(engine.key) is not engine]
        self._seen = tuple(self._engines.values())
        return removed

    def _grouped(self, engines: Sequence[Engine]) -> list[list[Engine]]:
        """Return *engines* by role and by the models that they share."""
        groups: list[list[Engine]] = []
        for role in WorkerType:
            having = [engine for engine in engines if self.role_of(engine) is role]
            numbers = group_by_models([engine.base_models for engine in having])
            by_number: dict[int, list[Engine]] = {}
            for engine, number in zip(having, numbers, strict=True):
                by_number.setdefault(number, []).append(engine)
            groups.extend(by_number[number] for number in sorted(by_number))
        return groups

    def _connect(self, now: float) -> None:
        """Give the engines their circuits."""
        self.breakers.keep(self._by_endpoint.keys())
        for engine in self._engines.values():
            engine.circuit = None
        for engine in self._placed:
            circuit = engine.circuit = self.breakers.circuit(engine.endpoint)
            circuit.restore(self._resumes.pop(engine.key, 0.0), now)

    def _live_pools(self) -> tuple[Pool, ...]:
        return (*self.pools, *self.role_pools)

    def _settle(
        self, pool: Pool, engines: Sequence[Engine], weights: Mapping[str, float], *, alone: bool
    ) -> None:
        """Make *engines* the members of *pool*; *alone*: no other pool has their role."""
        members: list[tuple[Worker, Engine]] = []
        for engine in engines:
            self._settled[engine.key] = pool, self.role_of(engine), engine.base_models
            engine.target = cluster_name(pool.name, engine.spec.url.path)
            engine.cluster = engine.cluster or engine.target
            for worker in engine.workers:
                worker.cluster = engine.cluster
                members.append((worker, engine))
        members.sort(key=lambda member: member[0].order)
        workers = tuple(worker for worker, _ in members)
        reweighted = any(weights.get(w.url, w.weight) != w.weight for w in workers)
        if workers != pool.members or reweighted:
            pool.set_members(workers)
        self._rosters[pool] = make_roster(members, alone=alone)

    def _forget_hosts(self) -> None:
        """Drop the addresses of names that no worker has any more."""
        if self._addresses or self._unresolved:
            hosts = self.hosts()
            for known_hosts in (self._addresses, self._unresolved):
                for host in known_hosts.keys() - hosts:
                    del known_hosts[host]

    def _place(self) -> list[Engine]:
        """Return the engines that have an address of their own."""
        placed: list[Engine] = []
        owners: dict[tuple[str, str], str] = {}
        for engine in self._engines.values():  # who serves is not displaced by another name for it
            if engine.workers and engine.workers[0].endpoint == engine.endpoint:
                url = engine.spec.url
                owners.setdefault((engine.endpoint, url.path), url.url)
        for engine in self._engines.values():
            engine.twin = ""
            url = engine.spec.url
            if engine.address:
                engine.is_router = self.settings.is_router(engine.address, url.port)
                owner = owners.setdefault((engine.endpoint, url.path), url.url)
                if owner == url.url and not engine.is_router:
                    placed.append(engine)
                    continue
                engine.twin = "" if engine.is_router else owner
            engine.workers, engine.cluster, engine.target = (), "", ""
            engine.forget_contact()
        return placed

    def _index(self) -> None:
        self._by_endpoint = {}
        self._by_order = {w.order: engine for engine in self._placed for w in engine.workers}
        self._pool_of_model = {}
        self._prefill_pool_of_model = {}
        self.uniform = len(self.pools) == 1
        names: frozenset[str] | None = None
        for engine in self._placed:
            self._by_endpoint.setdefault(engine.endpoint, []).append(engine)
            pool = self._settled[engine.key][0]
            own = engine.names
            if own is None:
                continue
            if pool in self.prefill_pools:
                for name in own:
                    self._prefill_pool_of_model.setdefault(name, pool)
            if pool not in self.pools:
                continue
            for name in own:
                self._pool_of_model.setdefault(name, pool)
            names = own if names is None else names
            self.uniform &= own == names

    def _workers_of(self, engine: Engine, known: Mapping[str, Worker]) -> Iterable[Worker]:
        spec = engine.spec
        for rank in self._ranks_of(engine):
            url = spec.url.url if rank is None else f"{spec.url.url}@{rank}"
            worker = known.get(url)
            if worker is None or (worker.endpoint, worker.rank) != (engine.endpoint, rank):
                # One that comes back still has the requests that were under way when it went.
                worker = self._departed.pop((url, engine.endpoint, spec.instance), None)
                if worker is None:
                    worker = Worker(url, engine.endpoint, self._next_order, rank=rank)
                worker.order = self._next_order
                self._next_order += 1
            worker.weight = spec.weight
            yield worker

    def _ranks_of(self, engine: Engine) -> Sequence[int | None]:
        settings = self.settings
        if engine.spec.url.rank is not None:
            return (engine.spec.url.rank,)
        ranks = settings.ranks_of(engine.spec.worker_type)
        if ranks == 1:
            return (None,)
        count = len(engine.ranks) or ranks
        if not count:
            return (None,)
        if not settings.global_ranks:
            return range(count)
        if engine.ranks:  # its own numbers, as its metrics show them
            return engine.ranks
        return range(engine.rank_slot * count, (engine.rank_slot + 1) * count)

    def _pools_for(self, groups: Sequence[Sequence[Engine]]) -> list[Pool]:
        """Return a pool for each of *groups*.

        A pool stays with those of its workers that serve what they served; when none does, with any.
        """
        chosen: dict[int, Pool] = {}
        taken: set[Pool] = set()
        for as_before in (True, False):
            for index, engines in enumerate(groups):
                found = (self._earlier_pool(engine, as_before=as_before) for engine in engines)
                pool = next((pool for pool in found if pool and pool not in taken), None)
                if pool is not None and index not in chosen:
                    chosen[index] = pool
                    taken.add(pool)
        for index, engines in enumerate(groups):
            if index not in chosen:
                chosen[index] = self._new_pool(engines, taken)
                taken.add(chosen[index])
        return [chosen[index] for index in range(len(groups))]

    def _earlier_pool(self, engine: Engine, *, as_before: bool) -> Pool | None:
        """Return the pool that *engine* was in; *as_before*: only if it serves one of its models still."""
        pool, role, models = self._settled.get(engine.key, (None, None, None))
        if role is not self.role_of(engine):
            return None
        shared = (models or frozenset()) & (engine.base_models or frozenset())
        return pool if shared or not as_before else None

    def _new_pool(self, engines: Sequence[Engine], taken: Collection[Pool]) -> Pool:
        role = self.role_of(engines[0])
        main = role is self._main_role
        if main and not any(pool in taken for pool in self.pools):
            return self.pools[0]  # all workers are new
        names = {pool.name for pool in (*taken, *self._live_pools())} | RESERVED_NAMES
        models = next(filter(None, (engine.base_models for engine in engines)), {DEFAULT_POOL})
        suffix = "" if main else f".{role}"
        name = pool_name(f"{min(models)}{suffix}", names)
        revived = next((pool for pool in self.retired if pool.name == name), None)
        if revived is not None:
            return revived
        prefills = role is WorkerType.PREFILL
        return Pool(name, self._make_prefill_policy() if prefills else self._make_policy())

    def _move(self) -> bool:
        """Let workers that belong into another cluster go there; tell whether any did.

        One that is healthy goes when Envoy has found it healthy there too, and one that is ejected
        when its time is over: nobody gets out of it by changing models.
        """
        moved = False
        for engine in self._placed:
            if engine.cluster == engine.target or not self.accepts(engine.target):
                continue
            if self.settings.follows_envoy:
                here = self.verdicts.get(engine.cluster, engine.endpoint)
                there = self.verdicts.get(engine.target, engine.endpoint)
                if here.ejected or (here.good and not there.good):
                    continue
            engine.cluster = engine.target
            for worker in engine.workers:
                worker.cluster = engine.target
            moved = True
        if moved:
            for pool in self._live_pools():
                pool.look_at_clusters()
        return moved

    def _verdict_on(self, engine: Engine) -> Verdict | None:
        if not self.settings.follows_envoy:
            return None
        return self.verdicts.get(engine.cluster, engine.endpoint)

    def _tend_circuits(self, now: float) -> bool:
        """Bring circuits up to date, before workers move; tell whether any is not closed."""
        limit = self.settings.worker_limit
        tended = [follow(e, self._verdict_on(e), now, limit) for e in self._placed]
        return any(tended)

    def _judge(self, now: float) -> tuple[list[Engine], bool]:
        """Derive all states; return whose changed, and whether a drain began or is over."""
        settings = self.settings
        changed = []
        drains = waits = False
        for engine in self._engines.values():
            verdict = self._verdict_on(engine)
            was_draining = engine.state is State.DRAINING
            if engine.judge(verdict, now, startup_s=settings.startup_s):
                changed.append(engine)
            state = engine.state
            drains |= was_draining is not (state is State.DRAINING)
            waits |= state in (State.STARTING, State.DRAINING) or engine.cluster != engine.target
        self.waits = waits or bool(self._lingering)
        return changed, drains

    def _choose_candidates(self) -> None:
        settings = self.settings
        for pool, roster in self._rosters.items():
            candidates, serving = choose(
                roster, try_unhealthy=settings.try_unhealthy, lora_any=settings.lora_any
            )
            tripped = find_tripped(roster, serving, self._is_down)
            pool.set_candidates(candidates, serving, tripped=tripped)

    def _is_down(self, engine: Engine) -> bool:
        return engine.refused or self.verdicts.get(engine.cluster, engine.endpoint).down

    def _view_clusters(self) -> tuple[ClusterView, ...]:
        settings = self.settings
        default = self.pools[0].name
        found: dict[str, tuple[str, dict[str, EndpointView]]] = {}
        for engine in self._placed:
            view = view_endpoint(
                engine,
                tls_server_name=settings.tls_server_name,
                tls_insecure=settings.tls_insecure,
            )
            for name in {engine.target, engine.cluster}:
                _, endpoints = found.setdefault(name, (engine.spec.url.path, {}))
                known = endpoints.get(view.endpoint)
                if known is None or (known.draining and not view.draining):
                    endpoints[view.endpoint] = view
        defaults = {
            name for name, (path, _) in found.items() if name == cluster_name(default, path)
        }
        if not defaults:  # Envoy needs one, and answers 503 there
            found[default] = ("", {})
            defaults = {default}
        names = sorted(found, key=lambda name: (name not in defaults, name))
        return tuple(
            ClusterView(
                name,
                found[name][0],
                tuple(view for _, view in sorted(found[name][1].items())),
                is_default=name in defaults,
                ranked=self._ranked,
            )
            for name in names
        )

    def _let_go(self) -> None:
        """Forget pools and workers that are gone and on which nothing is under way any more."""
        if self.retired:
            self.retired = tuple(pool for pool in self.retired if pool.in_flight)
        for key in [key for key, worker in self._departed.items() if not worker.in_flight]:
            del self._departed[key]


def _endpoints_in(clusters: Iterable[ClusterView]) -> set[tuple[str, str]]:
    return {(cluster.name, view.endpoint) for cluster in clusters for view in cluster.endpoints}
