"""The HTTP shell: the admin API, reached through Envoy, and Prometheus metrics on a port of their own."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, exposition

from extproc import admin_info, admin_probes, admin_workers
from extproc.address import Address
from extproc.admin_endpoint import Admin, ApiError, Endpoint, error_answer, openai_error
from extproc.admin_guard import judge
from extproc.authorize import PATH as AUTHORIZE_PATH
from extproc.authorize import add_authorize
from extproc.config import Config
from extproc.fleet import Fleet
from extproc.generation_check import GenerationCheck
from extproc.log import cap
from extproc.readiness import Readiness
from extproc.token_validation import TokenValidator
from extproc.worker_client import WorkerClient
from policies.base import Policy

MAX_BODY_BYTES = 2**20

ENDPOINTS: tuple[Endpoint, ...] = (
    *admin_probes.ENDPOINTS,
    *admin_workers.ENDPOINTS,
    *admin_info.ENDPOINTS,
)
"""All of them, in the order of the documentation."""

ADMIN: web.AppKey[Admin] = web.AppKey("admin", Admin)
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry", CollectorRegistry)
READINESS: web.AppKey[Readiness] = web.AppKey("readiness", Readiness)

log = structlog.get_logger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_admin_app(
    *,
    readiness: Readiness,
    fleet: Fleet,
    client: WorkerClient,
    config: Callable[[], Config],
    policies: Callable[[], Iterable[Policy]],
    validator: TokenValidator | None = None,
) -> web.Application:
    """Return the probes and the admin API; *config* and *policies* return those in force.

    With *validator* Envoy's questions about tokens are answered, too.
    """
    app = web.Application(middlewares=[_errors, _guard], client_max_size=MAX_BODY_BYTES)
    admin = app[ADMIN] = Admin(
        readiness=readiness,
        fleet=fleet,
        client=client,
        running=config,
        policies=policies,
        generation=GenerationCheck(fleet.registry, client),
    )
    # Longer paths first: /workers/{url} matches those that end in /drain too.
    for endpoint in sorted(ENDPOINTS, key=lambda endpoint: -len(endpoint.path)):
        handler = functools.partial(endpoint.handler, admin)
        # A URL or a model's name has slashes.
        path = endpoint.path.replace("}", ":.+}")
        if endpoint.method == "GET":
            app.router.add_get(path, handler)
        else:
            app.router.add_route(endpoint.method, path, handler)
    if validator is not None:
        add_authorize(app, validator)
    app.on_response_prepare.append(_without_server)
    return app


def build_metrics_app(registry: CollectorRegistry, readiness: Readiness) -> web.Application:
    """Return ``/metrics``, and ``/readiness`` for those who cannot ask through Envoy."""
    app = web.Application()
    app[REGISTRY] = registry
    app[READINESS] = readiness
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/readiness", _readiness)
    return app


async def _without_server(_request: web.Request, response: web.StreamResponse) -> None:
    """Tell clients nothing of the software behind Envoy."""
    response.headers.pop("Server", None)


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer every error as JSON."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_answer(error.status, error.code, str(error), extra=error.extra)
    except web.HTTPException as error:
        return _http_error(request, error)
    except web.RequestPayloadError:
        return _error(request, 400, "INVALID_REQUEST", "the body cannot be read")
    except Exception:
        log.exception("admin request failed", method=request.method, path=cap(request.path))
        message = "the request failed; the router's log says why"
        return _error(request, 500, "INTERNAL_ERROR", message)


CLIENT_CODES = {
    "METHOD_NOT_ALLOWED": "method_not_allowed",
    "NOT_FOUND": "not_found",
    "PAYLOAD_TOO_LARGE": "payload_too_large",
    "INVALID_REQUEST": "bad_request",
    "INTERNAL_ERROR": "request_failed",
}
"""What the codes of the admin API are called where everybody may ask."""


def _error(
    request: web.Request,
    status: int,
    code: str,
    message: str,
    *,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Return an error in the shape that belongs to the path."""
    if _is_open(request):
        return openai_error(status, CLIENT_CODES[code], message, headers=headers)
    return error_answer(status, code, message, headers=headers)


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """Return the answer for what aiohttp finds wrong with a request."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{cap(request.method)} is not allowed here; allowed: {allowed}"
            return _error(request, 405, "METHOD_NOT_ALLOWED", message, headers={"Allow": allowed})
        case web.HTTPNotFound():
            return _error(request, 404, "NOT_FOUND", "there is nothing at this path")
        case web.HTTPRequestEntityTooLarge():
            message = f"the body is larger than {MAX_BODY_BYTES} bytes"
            return _error(request, 413, "PAYLOAD_TOO_LARGE", message)
        case _:
            return _error(request, error.status, "INVALID_REQUEST", error.reason)


@web.middleware
async def _guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Let only administrators through, but for what is open to everybody."""
    if not _is_open(request):
        config = request.app[ADMIN].config
        denial = judge(
            lambda name: request.headers.getall(name, []),
            admin_api_key=config.admin_api_key,
            listens_on=_hosts(config),
        )
        if denial is not None:
            log.info(
                "admin request denied",
                method=request.method,
                path=cap(request.path),
                reason=denial.message,
            )
            headers = {"WWW-Authenticate": "Bearer"} if denial.status == 401 else None
            return error_answer(denial.status, denial.code, denial.message, headers=headers)
    return await handler(request)


def _hosts(config: Config) -> list[str]:
    """Return the hosts on which the API can be reached."""
    own = Address.parse(config.admin_address)
    # A Unix socket is for this user alone.
    return [config.host] if own.path else [config.host, own.host]


_OPEN = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.is_open)
_OPEN_PREFIXES = tuple(path.partition("{")[0] for path in _OPEN if "{" in path)


def _is_open(request: web.Request) -> bool:
    path = request.path
    return path in _OPEN or path == AUTHORIZE_PATH or path.startswith(_OPEN_PREFIXES)


async def _metrics(request: web.Request) -> web.Response:
    encode, content_type = exposition.choose_encoder(request.headers.get("Accept", ""))
    response = web.Response(body=encode(request.app[REGISTRY]))
    response.headers["Content-Type"] = content_type
    return response


async def _readiness(request: web.Request) -> web.Response:
    return admin_probes.readiness_answer(request.app[READINESS])
