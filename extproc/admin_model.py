"""Workers as the admin API shows them: values made from the registry.

An entry stands for one worker as policies see it: an engine, or one rank of it. An engine that has no
address yet is shown too, though no policy sees it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from extproc.address import WorkerUrl
from extproc.discovery.updates import WorkerType
from extproc.engine import Engine, State
from extproc.models import Load
from extproc.registry import Registry
from policies.base import Worker

SUSPENDED = "a connection to it has just failed; others are preferred for a while"


class WorkerEntry(msgspec.Struct, kw_only=True):
    """A worker, or one data-parallel rank of it."""

    url: Annotated[str, Meta(description="Identity; with `@rank` one rank of the engine.")]
    model_id: Annotated[
        str, Meta(description="The one name that stands for its models, `unknown` without any.")
    ]
    models: Annotated[list[str], Meta(description="Names of its base model, sorted.")]
    adapters: Annotated[list[str], Meta(description="LoRA adapters that it has loaded, sorted.")]
    worker_type: Annotated[WorkerType, Meta(description="Its role.")]
    is_healthy: Annotated[bool, Meta(description="Whether `state` is `healthy`.")]
    state: Annotated[
        State,
        Meta(description="Healthy workers are picked, half-open ones for one request at a time."),
    ]
    reason: Annotated[str, Meta(description="Why it is in that state; empty when all is well.")]
    since: Annotated[str, Meta(description="When the state began: ISO 8601, UTC.")]
    load: Annotated[
        int, Meta(description="Requests that this router has sent it and that have not ended.")
    ]
    running: Annotated[
        int | None, Meta(description="Requests that it works on, as its metrics said last.")
    ]
    waiting: Annotated[int | None, Meta(description="Requests in its queue, likewise.")]
    kv_usage: Annotated[
        float | None, Meta(description="Share of its KV cache in use, 0 to 1, likewise.")
    ]
    dp_rank: Annotated[
        int | None, Meta(description="Data-parallel rank; null for an engine as a whole.")
    ]
    weight: Annotated[float, Meta(description="Share of the traffic relative to others.")]
    labels: Annotated[dict[str, str], Meta(description="Free text of whoever added it.")]
    source: Annotated[
        str, Meta(description="Who named it: `admin`, or the source that discovered it.")
    ]
    endpoint: Annotated[
        str | None,
        Meta(description="Its address, `ip:port`; null while its name is not resolved."),
    ]
    pool: Annotated[
        str | None, Meta(description="The workers it shares its models with; null in none.")
    ]
    bootstrap_port: Annotated[
        int | UnsetType, Meta(description="Of a prefill worker, when it has one.")
    ] = UNSET
    connection_mode: Annotated[str, Meta(description="Always `http`.")]
    priority: Annotated[int, Meta(description="Without a meaning here; as in vLLM Router.")]
    cost: Annotated[float, Meta(description="Without a meaning here; as in vLLM Router.")]
    ranks: Annotated[
        list[WorkerEntry] | UnsetType,
        Meta(
            description="The entries of its ranks. Only where an engine with several is named as a whole;"
            " loads are then their sums, `kv_usage` their highest."
        ),
    ] = UNSET


class WorkerStats(msgspec.Struct):
    """Workers by their role."""

    prefill_count: int
    decode_count: int
    regular_count: int


class WorkerList(msgspec.Struct):
    """All workers, in the order in which they joined."""

    workers: list[WorkerEntry]
    total: int
    stats: WorkerStats


class RankOfEngineError(Exception):
    """One rank was named of an engine that comes and goes as a whole."""


def list_entries(registry: Registry) -> list[WorkerEntry]:
    """Return an entry for each worker, in the order in which they joined."""
    pools = _pools(registry)
    return [
        _entry(engine, worker, pools) for engine in registry.engines for worker in _parts(engine)
    ]


def list_workers(registry: Registry) -> WorkerList:
    """Return all workers, counted by their role."""
    entries = list_entries(registry)
    types = [entry.worker_type for entry in entries]
    stats = WorkerStats(
        types.count(WorkerType.PREFILL),
        types.count(WorkerType.DECODE),
        types.count(WorkerType.REGULAR),
    )
    return WorkerList(entries, len(entries), stats)


def find_entry(registry: Registry, url: WorkerUrl) -> WorkerEntry | None:
    """Return the entry of the worker *url*; of an engine with several ranks one for all of them."""
    found = [
        (engine, worker)
        for engine in registry.engines
        if engine.spec.url.url == url.url
        for worker in _parts(engine)
        if url.rank is None or url.rank == _rank(engine, worker)
    ]
    pools = _pools(registry)
    entries = [_entry(engine, worker, pools) for engine, worker in found]
    if len(entries) < 2:
        return entries[0] if entries else None
    return _summary(url, entries)


def find_engines(registry: Registry, url: WorkerUrl) -> list[Engine]:
    """Return the engines that *url* names: itself, or all that were added as ranks of it.

    ``RankOfEngineError`` when it names a rank of an engine that was added as a whole.
    """
    engine = registry.get(str(url))
    if engine is not None:
        return [engine]
    if url.rank is None:
        return [engine for engine in registry.engines if engine.spec.url.url == url.url]
    whole = registry.get(url.url)
    if whole is not None and any(url.rank == _rank(whole, part) for part in _parts(whole)):
        raise RankOfEngineError(
            f"{url} is a rank of {url.url}, which was added with all its ranks: name it without @{url.rank}"
        )
    return []


def _parts(engine: Engine) -> Sequence[Worker | None]:
    """Return the workers of *engine*; None for one that has no address yet."""
    return engine.workers or (None,)


def _pools(registry: Registry) -> dict[int, str]:
    """Return the names of pools by the ``order`` of their members."""
    return {worker.order: pool.name for pool in registry.all_pools() for worker in pool.members}


def _rank(engine: Engine, worker: Worker | None) -> int | None:
    return engine.spec.url.rank if worker is None else worker.rank


def _reason(engine: Engine) -> str:
    if engine.reason:
        return engine.reason
    if engine.kv_engine_ids_unread and not engine.kv_engine_ids:
        return f"gets no prompts: its bootstrap server does not say the engine id: {engine.kv_engine_ids_unread}"
    return SUSPENDED if engine.suspended else ""


def _entry(engine: Engine, worker: Worker | None, pools: dict[int, str]) -> WorkerEntry:
    spec, state = engine.spec, engine.state
    rank = _rank(engine, worker)
    load = _load(engine, rank)
    return WorkerEntry(
        url=engine.key if worker is None else worker.url,
        model_id=engine.model_id,
        models=sorted(engine.base_models or ()),
        adapters=sorted(engine.adapters),
        worker_type=spec.worker_type,
        is_healthy=state is State.HEALTHY,
        state=state,
        reason=_reason(engine),
        since=_timestamp(engine.since),
        load=0 if worker is None else worker.in_flight,
        running=None if load is None else load.running,
        waiting=None if load is None else load.waiting,
        kv_usage=None if load is None else load.kv_usage_ratio,
        dp_rank=rank,
        weight=spec.weight,
        labels=dict(spec.labels),
        source=engine.source,
        endpoint=engine.endpoint or None,
        pool=None if worker is None else pools.get(worker.order),
        bootstrap_port=UNSET if spec.bootstrap_port is None else spec.bootstrap_port,
        connection_mode="http",
        priority=0,
        cost=1.0,
    )


def _load(engine: Engine, rank: int | None) -> Load | None:
    """Return what is known of the load of *rank*; of an engine as a whole all that its metrics show."""
    loads = engine.loads
    if rank is not None:
        return loads.get(rank) or loads.get(None)
    if not loads:
        return None
    return Load(
        sum(load.running for load in loads.values()),
        sum(load.waiting for load in loads.values()),
        max(load.kv_usage_ratio for load in loads.values()),
    )


def _summary(url: WorkerUrl, entries: list[WorkerEntry]) -> WorkerEntry:
    """Return one entry for several ranks of one engine: as healthy as the best of them."""
    best = next((entry for entry in entries if entry.is_healthy), entries[0])
    usages = [entry.kv_usage for entry in entries if entry.kv_usage is not None]
    return msgspec.structs.replace(
        best,
        url=url.url,
        dp_rank=None,
        load=sum(entry.load for entry in entries),
        running=_sum([entry.running for entry in entries]),
        waiting=_sum([entry.waiting for entry in entries]),
        kv_usage=max(usages, default=None),
        ranks=entries,
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _timestamp(unix_s: float) -> str:
    moment = dt.datetime.fromtimestamp(unix_s, dt.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
