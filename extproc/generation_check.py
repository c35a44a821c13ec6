"""Whether some worker really generates. That costs a GPU, so one check serves all who ask meanwhile."""

from __future__ import annotations

import asyncio

import structlog

from extproc.engine import Engine, State
from extproc.registry import Registry
from extproc.worker_client import WorkerClient, WorkerUnreachableError

TRIED_WORKERS = 3
WORKER_TIMEOUT_S = 10.0
GOOD_FOR_S = 1.0
"""How long a result holds."""

NOT_THERE = (404, 405)
"""What a worker answers that does not have the endpoint, such as vLLM's own server."""

log = structlog.get_logger(__name__)


class GenerationCheck:
    """Asks healthy workers for one token."""

    def __init__(self, registry: Registry, client: WorkerClient) -> None:
        self._registry = registry
        self._client = client
        self._turn = asyncio.Lock()
        self._reason = ""
        self._until = 0.0

    async def failure(self) -> str:
        """Return why nobody generates, empty when somebody does. Names no address: clients read it."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            if clock() >= self._until:
                self._reason = await self._check()
                self._until = clock() + GOOD_FOR_S
            return self._reason

    async def _check(self) -> str:
        engines = self._registry.engines
        # A half-open worker has one request at a time, those of clients. Asked directly, as here, none is judged.
        healthy = [engine for engine in engines if engine.state is State.HEALTHY] or [
            engine for engine in engines if engine.state is State.HALF_OPEN
        ]
        if not healthy:
            return "no healthy workers available"
        # Idle ones answer sooner, and one that has just been asked in vain may not be there.
        healthy.sort(key=lambda engine: (engine.suspended, engine.in_flight))
        reasons: list[str] = []
        for engine in healthy[:TRIED_WORKERS]:
            reason = await self._ask(engine)
            if not reason:
                return ""
            reasons.append(reason)
        return f"none of {len(reasons)} healthy workers generates: {'; '.join(reasons)}"

    async def _ask(self, engine: Engine) -> str:
        try:
            async with asyncio.timeout(WORKER_TIMEOUT_S):
                status = await self._status(engine)
        except (WorkerUnreachableError, TimeoutError) as error:
            log.warning("worker does not generate", worker=engine.key, reason=str(error))
            return "one did not answer"
        if 200 <= status < 300:
            return ""
        log.warning("worker does not generate", worker=engine.key, status=status)
        return f"one answered {status}"

    async def _status(self, engine: Engine) -> int:
        answer = await self._client.request(
            engine, "GET", "/health_generate", timeout_s=WORKER_TIMEOUT_S
        )
        if answer.status not in NOT_THERE:
            return answer.status
        wanted = {"prompt": "a", "max_tokens": 1}
        answer = await self._client.request(
            engine,
            "POST",
            "/v1/completions",
            timeout_s=WORKER_TIMEOUT_S,
            json=_model(engine) | wanted,
        )
        return answer.status


def _model(engine: Engine) -> dict[str, str]:
    """Return the model to ask for; a worker whose models are not known takes its own."""
    names = engine.base_models
    if not names:
        return {}
    return {"model": engine.model_id if engine.model_id in names else min(names)}
