"""Asks workers what they serve and how busy they are: ``/v1/models`` and ``/metrics``, again and again.

One task per worker, so that one that hangs delays no other. A worker that joins, or comes back, is asked
at once: it is not picked before it has said, or refused to say, what it serves. One that comes back, or whose
name has another address, may be another machine: its task starts anew, and an answer to the old one is lost.

One that a request could not reach is asked at once, too, and one that refuses the connection is asked every
second until it is there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable

import structlog

from extproc.discovery.updates import WorkerType
from extproc.engine import Engine
from extproc.fleet import Fleet
from extproc.log import cap
from extproc.models import (
    MAX_METRICS_BYTES,
    MAX_MODELS_BYTES,
    ModelList,
    parse_metrics,
    parse_models,
)
from extproc.pd.mooncake import DEFAULT_BOOTSTRAP_PORT, parse_query
from extproc.registry import Change
from extproc.worker_client import (
    Answer,
    WorkerClient,
    WorkerRefusedError,
    WorkerUnreachableError,
)

FIRST_TIMEOUT_S = 3.0
"""How long a new worker's answer is waited for; until then it is not picked."""

TIMEOUT_S = 5.0
FIRST_PAUSE = (0.5, 1.5)
"""In intervals. Workers that came together are then asked at times that are spread over an interval."""

PAUSE = (0.8, 1.2)
GONE_PAUSE_S = 1.0
"""Between two questions to a worker that is not there, at most."""

SERVER_ERROR = 500
MAX_QUERY_BYTES = 2**20

log = structlog.get_logger(__name__)


@dataclasses.dataclass(slots=True)
class _Followed:
    """A worker that is being asked."""

    address: str
    """Where it is asked."""

    task: asyncio.Task[None]
    in_doubt: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when it is to be asked at once."""

    asked: bool = False
    """Whether it has said, or refused to say, what it serves."""


class WorkerPoll:
    """Polls every worker of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        client: WorkerClient,
        *,
        interval_s: float,
        rng: random.Random,
        asks_engine_ids: bool = False,
    ) -> None:
        """Poll the workers of *fleet*; *asks_engine_ids*: prefill workers also for Mooncake's engine ids."""
        self._asks_engine_ids = asks_engine_ids
        self._fleet = fleet
        self._client = client
        self._interval_s = interval_s
        self._rng = rng
        self._followed: dict[Engine, _Followed] = {}
        self._start: Callable[[Engine], asyncio.Task[None]] | None = None
        fleet.subscribe(self._on_change)

    async def run(self) -> None:
        """Poll for ever."""
        async with asyncio.TaskGroup() as tasks:
            self._start = lambda engine: tasks.create_task(self._follow(engine))
            try:
                self._on_change(Change(members=True))
                await asyncio.get_running_loop().create_future()
            finally:
                self._start = None

    def _on_change(self, change: Change) -> None:
        if self._start is None:
            return
        current = {engine for engine in self._fleet.registry.engines if engine.address}
        for engine in [e for e, f in self._followed.items() if e not in current or _is_new(e, f)]:
            self._followed.pop(engine).task.cancel()
        for engine in current - self._followed.keys():
            self._followed[engine] = _Followed(engine.address, self._start(engine))
        for engine in change.suspended:
            if engine in self._followed:
                self._followed[engine].in_doubt.set()

    async def _follow(self, engine: Engine) -> None:
        bounds = FIRST_PAUSE
        engine.kv_engine_ids = {}
        engine.kv_engine_ids_unread = ""
        while True:
            followed = self._followed[engine]
            followed.address = engine.address
            followed.in_doubt.clear()
            if await self._ask(engine):
                pause_s = self._interval_s * self._rng.uniform(*bounds)
                bounds = PAUSE
                if engine.refused or (self._hands_over(engine) and not engine.kv_engine_ids):
                    pause_s = min(pause_s, GONE_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await followed.in_doubt.wait()

    async def _ask(self, engine: Engine) -> bool:
        """Ask for everything; tell whether *engine* was in one place meanwhile, so that its answers count."""
        # Who has not said how many ranks it has must not be picked.
        ranked = self._fleet.registry.settings.ranks != 1
        steps = [self._read_models, self._read_metrics]
        if ranked:
            steps.reverse()
        if self._hands_over(engine):
            steps.insert(0, self._read_engine_ids)  # nothing is split to it before they are known
        for read in steps:
            if not await read(engine):
                return False
        return True

    async def _read_metrics(self, engine: Engine) -> bool:
        answer: Answer | None = None
        with contextlib.suppress(WorkerUnreachableError):
            answer = await self._request(engine, "/metrics", MAX_METRICS_BYTES)
        if self._has_moved(engine):
            return False
        if answer is None:
            engine.loads = {}
        elif answer.ok:
            self._fleet.on_loads(engine, *parse_metrics(answer.body))
        return True

    def _hands_over(self, engine: Engine) -> bool:
        """Tell whether *engine* hands prompts over with Mooncake."""
        return self._asks_engine_ids and engine.spec.worker_type is WorkerType.PREFILL

    async def _read_engine_ids(self, engine: Engine) -> bool:
        port = engine.spec.bootstrap_port
        ids: dict[int, str] = {}
        reason = ""
        try:
            answer = await self._client.request(
                engine,
                "GET",
                "/query",
                timeout_s=TIMEOUT_S if engine.introduced else FIRST_TIMEOUT_S,
                max_bytes=MAX_QUERY_BYTES,
                side_port=DEFAULT_BOOTSTRAP_PORT if port is None else port,
            )
            reason = "" if answer.ok else f"it answers {answer.status}"
            if answer.ok:
                ids = parse_query(answer.body)
        except (WorkerUnreachableError, ValueError) as error:
            reason = cap(str(error))
            if isinstance(error, WorkerUnreachableError) and not isinstance(
                error, WorkerRefusedError
            ):
                ids = engine.kv_engine_ids  # it may only be slow
        if self._has_moved(engine):
            return False
        if reason and reason != engine.kv_engine_ids_unread:
            log.warning(
                "prefill worker does not say its engine id", worker=engine.key, reason=reason
            )
        engine.kv_engine_ids_unread = reason
        if ids != engine.kv_engine_ids:
            engine.kv_engine_ids = ids
            log.info("engine ids of prefill worker", worker=engine.key, ids=len(ids))
        return True

    async def _read_models(self, engine: Engine) -> bool:
        models: ModelList | None = None
        answer: Answer | None = None
        refused = False
        began = self._fleet.now()
        try:
            answer = await self._request(engine, "/v1/models", MAX_MODELS_BYTES)
            reason = "" if answer.ok else f"it answers {answer.status}"
            if answer.ok:
                models = parse_models(answer.body)
        except (WorkerUnreachableError, ValueError) as error:
            reason = cap(str(error))
            refused = isinstance(error, WorkerRefusedError)
        if self._has_moved(engine):
            return False
        if answer is not None:
            self._fleet.on_answer(engine, began=began, passed=answer.status < SERVER_ERROR)
        elif refused:
            self._fleet.on_refused(engine)
        if reason and not engine.models_unread:
            log.info("worker does not say what it serves", worker=engine.key, reason=reason)
        engine.models_unread = reason
        self._fleet.on_models(engine, models)
        self._followed[engine].asked = True
        return True

    def _has_moved(self, engine: Engine) -> bool:
        """Tell whether *engine* is no longer where it was asked, though no change was told yet."""
        return engine.address != self._followed[engine].address

    async def _request(self, engine: Engine, path: str, max_bytes: int) -> Answer:
        timeout_s = TIMEOUT_S if engine.introduced else FIRST_TIMEOUT_S
        return await self._client.request(
            engine, "GET", path, timeout_s=timeout_s, max_bytes=max_bytes
        )


def _is_new(engine: Engine, followed: _Followed) -> bool:
    """Tell whether *engine* must be asked anew: it has moved, or has come back."""
    return engine.address != followed.address or (followed.asked and not engine.introduced)
