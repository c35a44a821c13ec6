"""The endpoints for everybody: probes, models, the end of a session."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from extproc.admin_endpoint import (
    TEXT,
    Admin,
    Endpoint,
    Parameter,
    Reply,
    json_answer,
    openai_error,
)
from extproc.engine import PICKABLE
from extproc.errors import Refusal, refusal_message, refusal_status
from extproc.model_list import list_models
from extproc.readiness import Readiness
from policies.base import SessionKeeper


class Ready(msgspec.Struct):
    """Requests can be served."""

    status: Annotated[str, Meta(description="`ready`")]
    healthy_workers: int
    total_workers: int


class NotReady(msgspec.Struct):
    """Requests cannot be served."""

    status: Annotated[str, Meta(description="`not_ready`")]
    reason: str
    total_workers: int


class Models(msgspec.Struct, kw_only=True):
    """Models, as OpenAI lists them."""

    object: Annotated[str, Meta(description="`list`")] = "list"
    data: list[dict[str, Any]]


class OpenAIErrorDetail(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(msgspec.Struct):
    """An error as OpenAI shapes it."""

    error: OpenAIErrorDetail


class SessionEnded(msgspec.Struct):
    """The session is forgotten."""

    status: Annotated[str, Meta(description="`ok`")]
    session_id: str


async def _liveness(_admin: Admin, _request: web.Request) -> web.Response:
    return web.Response(text="OK")


async def _readiness(admin: Admin, _request: web.Request) -> web.Response:
    return readiness_answer(admin.readiness)


def readiness_answer(readiness: Readiness) -> web.Response:
    """Return what a readiness probe is answered."""
    state = readiness.state()
    return json_answer(state.body(), 200 if state.ready else 503)


async def _health(admin: Admin, _request: web.Request) -> web.Response:
    state = admin.readiness.state()
    return web.Response(text="OK") if state.ready else web.Response(status=503, text=state.reason)


async def _health_generate(admin: Admin, _request: web.Request) -> web.Response:
    reason = await admin.generation.failure()
    return web.Response(status=503, text=reason) if reason else web.Response(text="OK")


async def _models(admin: Admin, _request: web.Request) -> web.Response:
    models = _served(admin)
    if models is None:
        return _refusal(Refusal.NO_WORKER, refusal_message(Refusal.NO_WORKER))
    return json_answer(Models(data=models))


async def _model(admin: Admin, request: web.Request) -> web.Response:
    models = _served(admin)
    if models is None:
        return _refusal(Refusal.NO_WORKER, refusal_message(Refusal.NO_WORKER))
    name = request.match_info["model"]
    for entry in models:
        if entry["id"] == name:
            return json_answer(entry)
    return _refusal(Refusal.MODEL_NOT_FOUND, f"The model {name!r} does not exist.")


async def _finish_session(admin: Admin, request: web.Request) -> web.Response:
    """End a session for policies that remember them; answers as vLLM Router does."""
    session = request.query.get("session_id", "")
    if not session:
        message = "Name the session: /finish_session?session_id=..."
        return openai_error(400, "missing_session_id", message)
    for policy in admin.policies():
        if isinstance(policy, SessionKeeper):
            policy.finish_session(session)
    # Not whether it was known: clients must not learn who else is here.
    return web.json_response({"status": "ok", "session_id": session})


def _served(admin: Admin) -> list[dict[str, Any]] | None:
    """Return the models of healthy workers; None when there is no such worker."""
    healthy = [
        engine
        for engine in admin.fleet.registry.engines
        if engine.state in PICKABLE and admin.fleet.registry.takes_whole(engine)
    ]
    return list_models(healthy, admin.config.aliases()) if healthy else None


def _refusal(refusal: Refusal, message: str) -> web.Response:
    return openai_error(refusal_status(refusal), refusal, message)


_LINE = "\n"
_SAMPLE_MODEL = """\
{"id": "Qwen/Qwen3-8B", "object": "model", "created": 1769860800, "owned_by": "vllm",
 "root": "Qwen/Qwen3-8B", "parent": null, "max_model_len": 40960}"""
_NO_WORKER = Reply(503, "`no_worker_available`: no worker is healthy.", OpenAIError)

ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/liveness",
        handler=_liveness,
        is_open=True,
        summary="Whether the service runs",
        replies=(Reply(200, "`OK`", media_type=TEXT),),
        curl="$ROUTER/liveness",
        sample="OK",
    ),
    Endpoint(
        method="GET",
        path="/readiness",
        handler=_readiness,
        is_open=True,
        summary="Whether requests can be served",
        notes="That is when at least one worker is healthy and Envoy has a configuration. Workers are counted by"
        " their ranks. With `--when-none-healthy try` any worker that is not being drained counts.",
        replies=(
            Reply(200, "They can.", Ready),
            Reply(503, "They cannot, or the service is stopping.", NotReady),
        ),
        curl="$ROUTER/readiness",
        sample='{"status": "ready", "healthy_workers": 2, "total_workers": 2}',
    ),
    Endpoint(
        method="GET",
        path="/health",
        handler=_health,
        is_open=True,
        summary="The same, as text",
        replies=(
            Reply(200, "`OK`", media_type=TEXT),
            Reply(503, "Why they cannot.", media_type=TEXT),
        ),
        curl="$ROUTER/health",
        sample="OK",
    ),
    Endpoint(
        method="GET",
        path="/health_generate",
        handler=_health_generate,
        is_open=True,
        summary="Whether a worker really generates",
        notes="Up to three healthy workers are asked for one token (their own `/health_generate` if they have"
        " it), 10 s each; half-open ones only if no other is healthy, and without effect on their circuits."
        " Requests share one check, and its result holds for 1 s.",
        replies=(
            Reply(200, "`OK`: one did.", media_type=TEXT),
            Reply(503, "None did, and why.", media_type=TEXT),
        ),
        curl="$ROUTER/health_generate",
        sample="OK",
    ),
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=_models,
        is_open=True,
        summary="The models of all healthy workers",
        notes="One entry per name, as the first worker that has it describes it. Aliases"
        " (`--model-alias`) are entries of their own.",
        replies=(Reply(200, "The models.", Models), _NO_WORKER),
        curl="$ROUTER/v1/models",
        sample=f"""\
{{"object": "list",
 "data": [{_SAMPLE_MODEL.replace(_LINE, _LINE + 10 * " ")}]}}""",
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{model}",
        handler=_model,
        is_open=True,
        summary="One model",
        parameters=(Parameter("model", "Its name.", where="path", required=True),),
        replies=(
            Reply(200, "Its entry.", dict[str, Any]),
            Reply(404, "`model_not_found`, as OpenAI shapes errors: no healthy worker has it."),
            _NO_WORKER,
        ),
        curl="$ROUTER/v1/models/Qwen/Qwen3-8B",
        sample=_SAMPLE_MODEL,
    ),
    Endpoint(
        method="POST",
        path="/finish_session",
        handler=_finish_session,
        is_open=True,
        summary="End a session",
        notes="For policies that remember sessions (`sticky_least_loaded`); others know none, which is no"
        " error.",
        parameters=(Parameter("session_id", "The session.", required=True),),
        replies=(
            Reply(200, "It is forgotten, if it was known.", SessionEnded),
            Reply(400, "`missing_session_id`", OpenAIError),
        ),
        curl='-X POST "$ROUTER/finish_session?session_id=abc"',
        sample='{"status": "ok", "session_id": "abc"}',
    ),
)
