"""The HTTP shell: probes, reached through Envoy, and Prometheus metrics on a port of their own."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, exposition

from extproc.readiness import Readiness

READINESS: web.AppKey[Readiness] = web.AppKey("readiness", Readiness)
REGISTRY: web.AppKey[CollectorRegistry] = web.AppKey("registry", CollectorRegistry)


def build_admin_app(readiness: Readiness) -> web.Application:
    """Return ``/liveness``, ``/readiness`` and ``/health``."""
    app = web.Application()
    app[READINESS] = readiness
    app.router.add_get("/liveness", _liveness)
    app.router.add_get("/readiness", _readiness)
    app.router.add_get("/health", _health)
    return app


def build_metrics_app(registry: CollectorRegistry) -> web.Application:
    """Return ``/metrics``."""
    app = web.Application()
    app[REGISTRY] = registry
    app.router.add_get("/metrics", _metrics)
    return app


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


async def _metrics(request: web.Request) -> web.Response:
    encode, content_type = exposition.choose_encoder(request.headers.get("Accept", ""))
    response = web.Response(body=encode(request.app[REGISTRY]))
    response.headers["Content-Type"] = content_type
    return response
