"""The endpoints that show and change the workers."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
import structlog
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from extproc.address import WorkerUrl
from extproc.admin_endpoint import (
    TEXT,
    Admin,
    ApiError,
    Endpoint,
    ErrorAnswer,
    Parameter,
    Reply,
    is_on,
    json_answer,
    read_json,
    seconds,
)
from extproc.admin_model import (
    RankOfEngineError,
    WorkerEntry,
    WorkerList,
    find_engines,
    find_entry,
    list_entries,
    list_workers,
)
from extproc.config import Config
from extproc.discovery.spec import MAX_LABELS, MAX_WEIGHT, MIN_WEIGHT, parse_worker
from extproc.discovery.updates import WorkerSpec, WorkerType
from extproc.engine import Engine
from extproc.errors import WorkerExistsError

_ONE_SLASH_LOST = re.compile(r"^(https?):/+", re.IGNORECASE)

log = structlog.get_logger(__name__)


class NewWorker(msgspec.Struct, kw_only=True):
    """A worker to add. All but the URL may be left out."""

    url: Annotated[
        str, Meta(description="`http[s]://host[:port][/base/path]`, or one `@rank` of it.")
    ]
    weight: Annotated[
        float,
        Meta(
            description="Share of the traffic relative to others,"
            f" {MIN_WEIGHT:g} to {MAX_WEIGHT:g}."
        ),
    ] = 1.0
    model: Annotated[
        str | UnsetType, Meta(description="A model it serves, beside those that it says it does.")
    ] = UNSET
    model_id: Annotated[str | UnsetType, Meta(description="Another name for `model`.")] = UNSET
    labels: Annotated[
        dict[str, str], Meta(description=f"Free text for operators, at most {MAX_LABELS}.")
    ] = {}
    worker_type: Annotated[
        WorkerType,
        Meta(description="Its role; a prefill worker takes no whole requests."),
    ] = WorkerType.REGULAR
    bootstrap_port: Annotated[
        int | UnsetType, Meta(description="Of a prefill worker: the port of its KV connector.")
    ] = UNSET
    tls_name: Annotated[
        str | UnsetType,
        Meta(description="Name that the certificate of an https worker carries, if not its host."),
    ] = UNSET
    priority: Annotated[Any, Meta(description="Ignored.")] = UNSET
    cost: Annotated[Any, Meta(description="Ignored.")] = UNSET


class WorkerAnswer(msgspec.Struct):
    """What was done, and the worker after it."""

    success: bool
    message: str
    worker: WorkerEntry


class RemovedAnswer(msgspec.Struct):
    """What was done."""

    success: bool
    message: str


class NotHealthyAnswer(msgspec.Struct):
    """The worker was added but is not healthy."""

    error: str
    code: str
    worker: WorkerEntry


class WorkerUrls(msgspec.Struct):
    """The URLs of all workers."""

    urls: list[str]


async def _list(admin: Admin, _request: web.Request) -> web.Response:
    return json_answer(list_workers(admin.fleet.registry))


async def _list_urls(admin: Admin, _request: web.Request) -> web.Response:
    return json_answer(WorkerUrls([entry.url for entry in list_entries(admin.fleet.registry)]))


async def _get(admin: Admin, request: web.Request) -> web.Response:
    url = _url_in_path(request)
    entry = find_entry(admin.fleet.registry, url)
    if entry is None:
        raise _not_found(url)
    return json_answer(entry)


async def _add(admin: Admin, request: web.Request) -> web.Response:
    wait_s = _wait_s(admin, request)
    engine = _add_worker(admin, await read_json(request))
    await _wait_healthy(admin, engine, wait_s)
    return json_answer(WorkerAnswer(True, f"Worker {engine.key} added", _entry_of(admin, engine)))


async def _add_url(admin: Admin, request: web.Request) -> web.Response:
    try:
        wait_s = _wait_s(admin, request)
        engine = _add_worker(admin, request.query.get("url", ""))
        await _wait_healthy(admin, engine, wait_s)
    except ApiError as error:
        return web.Response(status=error.status, text=str(error))
    return web.Response(text=f"Successfully added worker: {engine.key}")


async def _remove(admin: Admin, request: web.Request) -> web.Response:
    if is_on(request, "drain"):
        return await _drain(admin, request)
    url = _url_in_path(request)
    _remove_engines(admin, url, _find(admin, url))
    return json_answer(RemovedAnswer(True, f"Worker {url} removed"))


async def _remove_url(admin: Admin, request: web.Request) -> web.Response:
    try:
        url = _parse(request.query.get("url", ""))
        _remove_engines(admin, url, _find(admin, url))
    except ApiError as error:
        return web.Response(status=error.status, text=str(error))
    return web.Response(text=f"Successfully removed worker: {url}")


async def _drain(admin: Admin, request: web.Request) -> web.Response:
    url = _url_in_path(request)
    timeout_s = seconds(request, "timeout", admin.config.worker_drain_timeout_secs)
    for engine in _find(admin, url):
        admin.fleet.drain(engine.key, timeout_s)
    entry = find_entry(admin.fleet.registry, url)
    if entry is None:  # pragma: no cover - it was there a moment ago, and nothing waits in between
        raise _not_found(url)
    return json_answer(WorkerAnswer(True, f"Worker {url} is draining", entry), 202)


def _add_worker(admin: Admin, described: object) -> Engine:
    """Add the worker that an administrator *described*."""
    try:
        engine = admin.fleet.add(_checked(parse_worker(described), admin.config))
    except (ValueError, WorkerExistsError) as error:
        raise ApiError(400, "ADD_WORKER_FAILED", str(error)) from error
    log.info("worker added by an administrator", worker=engine.key)
    return engine


def _checked(spec: WorkerSpec, config: Config) -> WorkerSpec:
    if config.is_own_address(spec.url):
        raise ValueError(f"worker URL {str(spec.url)!r} is this router itself")
    return spec


def _remove_engines(admin: Admin, url: WorkerUrl, engines: list[Engine]) -> None:
    for engine in engines:
        admin.fleet.remove(engine.key)
    log.info("worker removed by an administrator", worker=str(url))


def _wait_s(admin: Admin, request: web.Request) -> float | None:
    """Return how long to wait until a new worker is healthy; None: not at all."""
    timeout_s = seconds(request, "timeout", admin.config.worker_startup_timeout_secs)
    return timeout_s if is_on(request, "wait") else None


async def _wait_healthy(admin: Admin, engine: Engine, timeout_s: float | None) -> None:
    """Wait until *engine* is healthy; ``ApiError`` when it does not become so."""
    if timeout_s is None or await admin.fleet.wait_healthy(engine, timeout_s):
        return
    if admin.fleet.registry.get(engine.key) is not engine:
        raise ApiError(
            410, "WORKER_REMOVED", f"Worker {engine.key} was removed before it became healthy"
        )
    why = f"{engine.state}, {engine.reason}" if engine.reason else str(engine.state)
    raise ApiError(
        504,
        "WORKER_NOT_HEALTHY",
        f"Worker {engine.key} is not healthy after {timeout_s:g} s: {why}. It was added and stays",
        {"worker": _entry_of(admin, engine)},
    )


def _entry_of(admin: Admin, engine: Engine) -> WorkerEntry:
    entry = find_entry(admin.fleet.registry, engine.spec.url)
    if entry is None:  # removed by somebody else while this request waited
        raise _not_found(engine.spec.url)
    return entry


def _find(admin: Admin, url: WorkerUrl) -> list[Engine]:
    """Return the engines that *url* names, at least one."""
    try:
        engines = find_engines(admin.fleet.registry, url)
    except RankOfEngineError as error:
        raise ApiError(400, "INVALID_REQUEST", str(error)) from error
    if not engines:
        raise _not_found(url)
    return engines


def _url_in_path(request: web.Request) -> WorkerUrl:
    # Proxies merge slashes: http://host arrives as http:/host.
    return _parse(_ONE_SLASH_LOST.sub(r"\1://", request.match_info["url"]))


def _parse(text: str) -> WorkerUrl:
    try:
        return WorkerUrl.parse(text)
    except ValueError as error:
        raise ApiError(400, "INVALID_REQUEST", str(error)) from error


def _not_found(url: WorkerUrl) -> ApiError:
    return ApiError(404, "WORKER_NOT_FOUND", f"Worker {url} not found")


_URL_IN_PATH = Parameter(
    "url",
    "The worker's URL as it is (`/workers/http://10.0.0.5:8000`) or percent-encoded; with `@rank` one rank"
    " of it.",
    where="path",
    required=True,
)
_URL_IN_QUERY = Parameter("url", "The worker's URL.", required=True)
_WAIT = Parameter("wait", "`1`: answer when the worker is healthy.", "boolean")
_WAIT_TIMEOUT = Parameter(
    "timeout",
    "Seconds to wait at most. Default: `--worker-startup-timeout-secs`.",
    "number",
)
_DRAIN_TIMEOUT = Parameter(
    "timeout",
    "Seconds after which it is removed though requests are under way; they finish all the same."
    " Default: `--worker-drain-timeout-secs`.",
    "number",
)
_NOT_FOUND = Reply(404, "`WORKER_NOT_FOUND`: there is no such worker.", ErrorAnswer)
_BAD_URL = Reply(400, "`INVALID_REQUEST`: the URL is none; the text says why.", ErrorAnswer)
_BAD_TARGET = Reply(
    400,
    "`INVALID_REQUEST`: the URL is none, or it names one rank of an engine that was added as a whole,"
    " which comes and goes with all its ranks.",
    ErrorAnswer,
)
_SAMPLE_ENTRY = """\
{"url": "http://10.0.0.5:8000", "model_id": "Qwen/Qwen3-8B", "models": ["Qwen/Qwen3-8B"],
 "adapters": [], "worker_type": "regular", "is_healthy": true, "state": "healthy", "reason": "",
 "since": "2026-01-31T12:00:00.000Z", "load": 3, "running": 3, "waiting": 0, "kv_usage": 0.21,
 "dp_rank": null, "weight": 1.0, "labels": {"zone": "a"}, "source": "admin",
 "endpoint": "10.0.0.5:8000", "pool": "default", "connection_mode": "http", "priority": 0,
 "cost": 1.0}"""
_SAMPLE_NEW = """\
{"url": "http://10.0.0.5:8000", "model_id": "unknown", "models": [], "adapters": [],
 "worker_type": "regular", "is_healthy": false, "state": "starting",
 "reason": "its first health check is under way", "since": "2026-01-31T12:00:00.000Z",
 "load": 0, "running": null, "waiting": null, "kv_usage": null, "dp_rank": null, "weight": 1.0,
 "labels": {"zone": "a"}, "source": "admin", "endpoint": "10.0.0.5:8000", "pool": "default",
 "connection_mode": "http", "priority": 0, "cost": 1.0}"""


def _indent(sample: str, columns: int) -> str:
    return sample.replace("\n", "\n" + columns * " ")


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/workers",
        handler=_list,
        summary="All workers",
        notes="In the order in which they joined. Each data-parallel rank is a worker of its own.",
        replies=(Reply(200, "The workers.", WorkerList),),
        curl="$ROUTER/workers",
        sample=f"""\
{{"workers": [{_indent(_SAMPLE_ENTRY, 13)}],
 "total": 1, "stats": {{"prefill_count": 0, "decode_count": 0, "regular_count": 1}}}}""",
    ),
    Endpoint(
        method="POST",
        path="/workers",
        handler=_add,
        summary="Add a worker",
        notes="Answers at once, while the worker is still `starting`: it gets requests as soon as its first"
        " health check has passed. A worker that is being drained is taken back.",
        parameters=(_WAIT, _WAIT_TIMEOUT),
        body=NewWorker,
        replies=(
            Reply(200, "It was added, and with `wait` it is healthy.", WorkerAnswer),
            Reply(
                400,
                "`ADD_WORKER_FAILED`: it is there already, it is this router itself, or its description is"
                " wrong. `INVALID_REQUEST`: the body is not JSON. Nothing was changed.",
                ErrorAnswer,
            ),
            Reply(410, "`WORKER_REMOVED`: it was removed while this request waited.", ErrorAnswer),
            Reply(
                504,
                "`WORKER_NOT_HEALTHY`: it was added and stays, but is not healthy in time.",
                NotHealthyAnswer,
            ),
        ),
        curl="""-X POST $ROUTER/workers \\
  -d '{"url": "http://10.0.0.5:8000", "weight": 1, "labels": {"zone": "a"}}'""",
        sample=f"""\
{{"success": true, "message": "Worker http://10.0.0.5:8000 added",
 "worker": {_indent(_SAMPLE_NEW, 11)}}}""",
    ),
    Endpoint(
        method="GET",
        path="/workers/{url}",
        handler=_get,
        summary="One worker",
        notes="Of an engine with several ranks, named without `@rank`: one entry for all of them, with the"
        " entries of the ranks in `ranks`.",
        parameters=(_URL_IN_PATH,),
        replies=(Reply(200, "Its entry.", WorkerEntry), _BAD_URL, _NOT_FOUND),
        curl="$ROUTER/workers/http://10.0.0.5:8000",
        sample=_SAMPLE_ENTRY,
    ),
    Endpoint(
        method="DELETE",
        path="/workers/{url}",
        handler=_remove,
        summary="Remove a worker",
        notes="At once: it gets no new requests, and those under way finish. An engine goes with all its"
        " ranks. A worker that a discovery source names stays away until the source forgets it and names"
        " it again, or it is added here.",
        parameters=(
            _URL_IN_PATH,
            Parameter("drain", "`1`: drain it first, as below.", "boolean"),
            _DRAIN_TIMEOUT,
        ),
        replies=(
            Reply(200, "It is gone.", RemovedAnswer),
            Reply(202, "With `drain`: it is being drained.", WorkerAnswer),
            _BAD_TARGET,
            _NOT_FOUND,
        ),
        curl="-X DELETE $ROUTER/workers/http://10.0.0.5:8000",
        sample='{"success": true, "message": "Worker http://10.0.0.5:8000 removed"}',
    ),
    Endpoint(
        method="POST",
        path="/workers/{url}/drain",
        handler=_drain,
        summary="Drain a worker",
        notes="It gets no new requests, and is removed when the last one under way has ended or the time is"
        " up.",
        parameters=(_URL_IN_PATH, _DRAIN_TIMEOUT),
        replies=(
            Reply(202, "It is being drained; its state is `draining`.", WorkerAnswer),
            _BAD_TARGET,
            _NOT_FOUND,
        ),
        curl='-X POST "$ROUTER/workers/http://10.0.0.5:8000/drain?timeout=60"',
    ),
    Endpoint(
        method="POST",
        path="/add_worker",
        handler=_add_url,
        summary="Add a worker by its URL",
        notes="The old form of vLLM Router. Unlike there it does not wait for the worker unless asked to.",
        parameters=(_URL_IN_QUERY, _WAIT, _WAIT_TIMEOUT),
        replies=(
            Reply(200, "`Successfully added worker: URL`", media_type=TEXT),
            Reply(400, "`Worker URL already exists`, or what is wrong with it.", media_type=TEXT),
            Reply(410, "It was removed while this request waited.", media_type=TEXT),
            Reply(504, "It was added, but is not healthy in time.", media_type=TEXT),
        ),
        curl='-X POST "$ROUTER/add_worker?url=http://10.0.0.5:8000"',
        sample="Successfully added worker: http://10.0.0.5:8000",
    ),
    Endpoint(
        method="POST",
        path="/remove_worker",
        handler=_remove_url,
        summary="Remove a worker by its URL",
        notes="The old form of vLLM Router. Unlike there it is no success to remove what is not there.",
        parameters=(_URL_IN_QUERY,),
        replies=(
            Reply(200, "`Successfully removed worker: URL`", media_type=TEXT),
            Reply(400, "The URL is none, or a rank of a whole engine.", media_type=TEXT),
            Reply(404, "`Worker URL not found`", media_type=TEXT),
        ),
        curl='-X POST "$ROUTER/remove_worker?url=http://10.0.0.5:8000"',
        sample="Successfully removed worker: http://10.0.0.5:8000",
    ),
    Endpoint(
        method="GET",
        path="/list_workers",
        handler=_list_urls,
        summary="The URLs of all workers",
        notes="The old form of vLLM Router.",
        replies=(Reply(200, "The URLs.", WorkerUrls),),
        curl="$ROUTER/list_workers",
        sample='{"urls": ["http://10.0.0.5:8000", "http://10.0.0.6:8000"]}',
    ),
)
