"""The HTTP shell: probes, reached through Envoy, and Prometheus metrics on a port of their own."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, exposition

from extproc.errors import error_body
from extproc.readiness import Readiness
from policies.base import Policy, SessionKeeper

READINESS: web.AppKey[Readiness] = web.AppKey("readiness", Readiness)
POLICY: web.AppKey[Policy] = web.AppKey("policy", Policy)
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry", CollectorRegistry)


def build_admin_app(readiness: Readiness, policy: Policy) -> web.Application:
    """Return ``/liveness``, ``/readiness``, ``/health`` and ``/finish_session``."""
    app = web.Application()
    app[READINESS] = readiness
    app[POLICY] = policy
    app.router.add_get("/liveness", _liveness)
    app.router.add_get("/readiness", _readiness)
    app.router.add_get("/health", _health)
    app.router.add_post("/finish_session", _finish_session)
    app.on_response_prepare.append(_without_server)
    return app


def build_metrics_app(registry: CollectorRegistry) -> web.Application:
    """Return ``/metrics``."""
    app = web.Application()
    app[REGISTRY] = registry
    app.router.add_get("/metrics", _metrics)
    return app


async def _without_server(_request: web.Request, response: web.StreamResponse) -> None:
    """Tell clients nothing of the software behind Envoy."""
    response.headers.pop("Server", None)


async def _liveness(_request: web.Request) -> web.Response:
    return web.Response(text="OK")


async def _readiness(request: web.Request) -> web.Response:
    state = request.app[READINESS].state()
    return web.json_response(state.body(), status=200 if state.ready else 503)


async def _health(request: web.Request) -> web.Response:
    state = request.app[READINESS].state()
    if state.ready:
        return web.Response(text="OK")
    return web.Response(status=503, text=state.reason)


async def _finish_session(request: web.Request) -> web.Response:
    """End a session for policies that remember them; answers as vLLM Router does."""
    session = request.query.get("session_id", "")
    if not session:
        body = error_body(
            400, "missing_session_id", "Name the session: /finish_session?session_id=..."
        )
        return web.Response(status=400, text=body, content_type="application/json")
    policy = request.app[POLICY]
    if isinstance(policy, SessionKeeper):
        policy.finish_session(session)
    # Not whether it was known: clients must not learn who else is here.
    return web.json_response({"status": "ok", "session_id": session})


async def _metrics(request: web.Request) -> web.Response:
    encode, content_type = exposition.choose_encoder(request.headers.get("Accept", ""))
    response = web.Response(body=encode(request.app[REGISTRY]))
    response.headers["Content-Type"] = content_type
    return response
