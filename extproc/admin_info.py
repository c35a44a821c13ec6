"""The endpoints that ask workers, or tell what is known of them and of this router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from extproc import __version__
from extproc.admin_endpoint import Admin, Endpoint, Reply, json_answer
from extproc.admin_model import list_entries
from extproc.config import SECRETS
from extproc.engine import Engine
from extproc.worker_client import Answer, WorkerUnreachableError
from policies.base import CacheKeeper

MAX_ASKED_AT_ONCE = 64
LOAD_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 10.0
INFO_TIMEOUT_S = 5.0
MAX_INFO_BYTES = 2**20

NO_FLUSH = (
    "the worker has no /reset_prefix_cache: vLLM has it in dev mode only (VLLM_SERVER_DEV_MODE=1)"
)

T = TypeVar("T")


class WorkerLoad(msgspec.Struct):
    """The load of one worker."""

    worker: Annotated[str, Meta(description="Its URL, with `@rank` when it is one of several.")]
    load: Annotated[
        int, Meta(description="Requests that this router has sent it and that have not ended.")
    ]
    worker_load: Annotated[
        int | None,
        Meta(
            description="What its own `/load` says, of all ranks together and from all routers; null"
            " when it does not answer."
        ),
    ]


class Loads(msgspec.Struct):
    """The loads of all workers."""

    workers: list[WorkerLoad]


class FlushResult(msgspec.Struct, kw_only=True):
    """What became of the cache of one worker."""

    worker: str
    status: Annotated[int | UnsetType, Meta(description="Status of its answer, if any.")] = UNSET
    ok: bool
    error: Annotated[str | UnsetType, Meta(description="Why it failed.")] = UNSET


class Flushed(msgspec.Struct):
    """What became of the caches."""

    results: list[FlushResult]
    router_index: Annotated[
        str,
        Meta(description="`flushed`, or `none` when the policy keeps no index of prompts."),
    ]


class ModelInfo(msgspec.Struct):
    """What is known of the models of one worker."""

    model_id: str
    models: list[str]
    adapters: list[str]
    max_model_len: Annotated[
        int | None, Meta(description="Longest prompt and output together, in tokens, if known.")
    ]


class ModelInfos(msgspec.Struct):
    """The models of all workers, by URL."""

    workers: dict[str, ModelInfo]
    version: Annotated[str, Meta(description="Version of this router.")]
    policy: Annotated[str, Meta(description="Policy that picks workers.")]


class ServerInfos(msgspec.Struct):
    """What the workers say of themselves, by URL."""

    workers: Annotated[
        dict[str, Any],
        Meta(description='The worker\'s own answer, or `{"error": ...}` when it has none.'),
    ]
    version: Annotated[str, Meta(description="Version of this router.")]
    policy: Annotated[str, Meta(description="Policy that picks workers.")]


async def _loads(admin: Admin, _request: web.Request) -> web.Response:
    registry = admin.fleet.registry
    engines = _one_per_url(registry.engines)

    async def ask(engine: Engine) -> int | None:
        try:
            answer = await admin.client.request(engine, "GET", "/load", timeout_s=LOAD_TIMEOUT_S)
        except WorkerUnreachableError:
            return None
        return _server_load(answer)

    loads = dict(zip(engines, await _ask_all(list(engines.values()), ask), strict=True))
    return json_answer(
        Loads(
            [
                WorkerLoad(
                    entry.url, entry.load, loads.get(_without_rank(entry.url, entry.dp_rank))
                )
                for entry in list_entries(registry)
            ]
        )
    )


async def _flush(admin: Admin, _request: web.Request) -> web.Response:
    async def ask(engine: Engine) -> FlushResult:
        worker = engine.spec.url.url
        try:
            answer = await admin.client.request(
                engine, "POST", "/reset_prefix_cache", timeout_s=FLUSH_TIMEOUT_S
            )
        except WorkerUnreachableError as error:
            return FlushResult(worker=worker, ok=False, error=str(error))
        if answer.ok:
            return FlushResult(worker=worker, status=answer.status, ok=True)
        reason = NO_FLUSH if answer.status == 404 else f"it answered {answer.status}"
        return FlushResult(worker=worker, status=answer.status, ok=False, error=reason)

    engines = _one_per_url(admin.fleet.registry.engines)
    results = await _ask_all(list(engines.values()), ask)
    index = "none"
    for policy in admin.policies():
        if isinstance(policy, CacheKeeper):
            policy.flush()
            index = "flushed"
    done = sum(result.ok for result in results)
    status = 200 if done == len(results) else 207 if done else 502
    return json_answer(Flushed(results, index), status)


async def _model_info(admin: Admin, _request: web.Request) -> web.Response:
    workers = {
        engine.key: ModelInfo(
            engine.model_id,
            sorted(engine.base_models or ()),
            sorted(engine.adapters),
            _max_model_len(engine),
        )
        for engine in admin.fleet.registry.engines
    }
    return json_answer(ModelInfos(workers, __version__, _policy_name(admin)))


async def _server_info(admin: Admin, _request: web.Request) -> web.Response:
    async def ask(engine: Engine) -> Any:
        try:
            answer = await admin.client.request(
                engine, "GET", "/server_info?config_format=json", timeout_s=INFO_TIMEOUT_S
            )
            if answer.status == 404:  # vLLM has it in dev mode only
                answer = await admin.client.request(
                    engine, "GET", "/version", timeout_s=INFO_TIMEOUT_S
                )
        except WorkerUnreachableError as error:
            return {"error": str(error)}
        return _passed_on(answer)

    engines = _one_per_url(admin.fleet.registry.engines)
    answers = await _ask_all(list(engines.values()), ask)
    workers = dict(zip(engines, answers, strict=True))
    return json_answer(ServerInfos(workers, __version__, _policy_name(admin)))


async def _config(admin: Admin, _request: web.Request) -> web.Response:
    shown = msgspec.to_builtins(admin.config)
    for name in SECRETS:
        if shown[name]:
            shown[name] = "***"
    # Paths come from the command line and may be no text at all, which msgspec would not write.
    return web.json_response(shown)


async def _ask_all(engines: Sequence[Engine], ask: Callable[[Engine], Awaitable[T]]) -> list[T]:
    """Ask all *engines* at once, within bounds; the answers are parallel to them."""
    places = asyncio.Semaphore(MAX_ASKED_AT_ONCE)

    async def in_place(engine: Engine) -> T:
        async with places:
            return await ask(engine)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(in_place(engine)) for engine in engines]
    return [task.result() for task in asked]


def _one_per_url(engines: Iterable[Engine]) -> dict[str, Engine]:
    """Return one engine for each URL: ranks that were added one by one have one server."""
    found: dict[str, Engine] = {}
    for engine in engines:
        found.setdefault(engine.spec.url.url, engine)
    return found


def _without_rank(url: str, rank: int | None) -> str:
    return url if rank is None else url.removesuffix(f"@{rank}")


def _server_load(answer: Answer) -> int | None:
    try:
        value = msgspec.json.decode(answer.body)["server_load"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None
    return value if answer.ok and type(value) is int else None


def _passed_on(answer: Answer) -> Any:
    """Return the JSON of *answer* as it is, or what is wrong with it."""
    if not answer.ok:
        return {"error": f"it answered {answer.status}"}
    if len(answer.body) > MAX_INFO_BYTES:
        return {"error": "its answer is too large"}
    try:
        answer.body.decode()
        return msgspec.json.decode(answer.body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"error": "its answer is not JSON"}


def _max_model_len(engine: Engine) -> int | None:
    for entry in engine.models.entries if engine.models is not None else ():
        value = entry.get("max_model_len")
        if type(value) is int:
            return value
    return None


def _policy_name(admin: Admin) -> str:
    return next((policy.name for policy in admin.policies()), "")


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/get_loads",
        handler=_loads,
        summary="The loads of all workers",
        notes="What this router has in flight, and what each worker's own `/load` says. All are asked at"
        " once.",
        replies=(Reply(200, "The loads.", Loads),),
        curl="$ROUTER/get_loads",
        sample='{"workers": [{"worker": "http://10.0.0.5:8000", "load": 3, "worker_load": 5}]}',
    ),
    Endpoint(
        method="POST",
        path="/flush_cache",
        handler=_flush,
        summary="Empty all prefix caches",
        notes="vLLM's `/reset_prefix_cache` on every worker at once, and this router's own index of prompts."
        " vLLM has that endpoint only in dev mode (`VLLM_SERVER_DEV_MODE=1`).",
        replies=(
            Reply(200, "All were emptied.", Flushed),
            Reply(207, "Some failed; `results` says which and why.", Flushed),
            Reply(502, "All workers failed.", Flushed),
        ),
        curl="-X POST $ROUTER/flush_cache",
        sample="""\
{"results": [{"worker": "http://10.0.0.5:8000", "status": 200, "ok": true},
             {"worker": "http://10.0.0.6:8000", "ok": false, "error": "no answer within 10 s"}],
 "router_index": "flushed"}""",
    ),
    Endpoint(
        method="GET",
        path="/get_server_info",
        handler=_server_info,
        summary="What the workers say of themselves",
        notes="Each worker's `/server_info` (which vLLM has in dev mode only), else its `/version`.",
        replies=(Reply(200, "The answers.", ServerInfos),),
        curl="$ROUTER/get_server_info",
        sample="""\
{"workers": {"http://10.0.0.5:8000": {"version": "0.11.0"},
             "http://10.0.0.6:8000": {"error": "no answer within 5 s"}},
 "version": "0.1.0", "policy": "cache_aware"}""",
    ),
    Endpoint(
        method="GET",
        path="/get_model_info",
        handler=_model_info,
        summary="The models of the workers",
        notes="As read last; no worker is asked.",
        replies=(Reply(200, "The models.", ModelInfos),),
        curl="$ROUTER/get_model_info",
        sample="""\
{"workers": {"http://10.0.0.5:8000": {"model_id": "Qwen/Qwen3-8B", "models": ["Qwen/Qwen3-8B"],
                                      "adapters": [], "max_model_len": 40960}},
 "version": "0.1.0", "policy": "cache_aware"}""",
    ),
    Endpoint(
        method="GET",
        path="/config",
        handler=_config,
        summary="The running configuration",
        notes="Keys and values of the configuration file, defaults included. Secrets that are set are shown"
        " as `***`.",
        replies=(Reply(200, "The configuration.", dict[str, Any]),),
        curl="$ROUTER/config",
    ),
)
