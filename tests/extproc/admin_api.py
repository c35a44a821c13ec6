"""An admin API to ask, with the registry behind it and fake workers to ask in turn."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from extproc.admin import build_admin_app
from extproc.config import Config
from extproc.discovery.spec import parse_worker
from extproc.fleet import Fleet
from extproc.models import Load, ModelList
from extproc.readiness import Readiness
from extproc.registry import Registry, Settings
from extproc.worker_client import WorkerClient
from policies.round_robin import RoundRobin

NOW = 1_769_860_800.0  # 2026-01-31T12:00:00Z
A, B, C = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3))

AT_ONCE = Settings(follows_envoy=False, asks_models=False)
"""Workers are healthy as soon as they are there."""

BY_ENVOY = Settings(asks_models=False)
"""Workers are healthy when Envoy says so."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self):
        return json.loads(self.text)


class Api:
    """The API over a loopback socket."""

    def __init__(self, fleet, readiness, client):
        self.fleet = fleet
        self.registry = fleet.registry
        self.readiness = readiness
        self.client = client
        self.now = NOW

    def add(self, *described):
        """Add workers as an administrator does; return their engines."""
        return [self.fleet.add(parse_worker(worker)) for worker in described]

    async def joined(self, url):
        """Wait until the worker *url* is there."""
        changed = asyncio.Event()
        self.fleet.subscribe(lambda _: changed.set())
        while self.registry.get(url) is None:
            await changed.wait()
            changed.clear()

    def judge(self, url, event, cluster="default"):
        """Let Envoy report *event* on the worker *url*."""
        spec = self.registry.get(url).spec.url
        address = {"address": spec.host, "port_value": spec.port}
        line = {"cluster_name": cluster, "host": {"socket_address": address}} | event
        key = self.registry.verdicts.on_line(json.dumps(line).encode())
        self.fleet.on_verdicts([] if key is None else [key])

    def pass_check(self, url):
        self.judge(url, {"add_healthy_event": {"first_check": True}})

    def fail_check(self, url):
        self.judge(url, {"eject_unhealthy_event": {"failure_type": "NETWORK"}})

    def tell_models(self, engine, *names, adapters=(), **fields):
        """Let *engine* say that it serves *names*."""
        entries = [{"id": name, "object": "model", **fields} for name in names]
        entries += [{"id": name, "object": "model", "parent": names[0]} for name in adapters]
        models = ModelList(frozenset(names), frozenset(adapters), tuple(entries))
        self.fleet.on_models(engine, models)

    def tell_loads(self, engine, loads, ranks=()):
        """Let the metrics of *engine* say its loads: (running, waiting, usage) by rank."""
        found = {rank: Load(*load) for rank, load in loads.items()}
        self.fleet.on_loads(engine, found, tuple(ranks))

    async def ask(self, method, path, **options):
        """Send a request; the path goes out as it is."""
        url = URL(f"{self.client.make_url('/').origin()}{path}", encoded=True)
        async with self.client.session.request(method, url, **options) as response:
            return Answer(response.status, dict(response.headers), await response.text())

    async def get(self, path, **options):
        return await self.ask("GET", path, **options)

    async def post(self, path, **options):
        return await self.ask("POST", path, **options)

    async def delete(self, path, **options):
        return await self.ask("DELETE", path, **options)

    @property
    def url(self):
        return str(self.client.make_url("")).rstrip("/")


def unserved(*urls, settings=AT_ONCE, policy=RoundRobin, serving=True):
    """Return what is behind the API, without a server."""
    registry = Registry(policy, settings)
    api = Api(Fleet(registry, lambda: api.now), Readiness(registry, lambda: serving), None)
    api.add(*urls)
    return api


@contextlib.asynccontextmanager
async def serve(settings=AT_ONCE, config=None, policy=RoundRobin):
    """Serve the API of a registry without workers."""
    api = unserved(settings=settings, policy=policy)
    async with WorkerClient() as workers:
        app = build_admin_app(
            readiness=api.readiness,
            fleet=api.fleet,
            client=workers,
            config=lambda: config or Config(),
            policies=lambda: [pool.policy for pool in api.registry.pools],
        )
        async with TestClient(TestServer(app)) as client:
            api.client = client
            yield api


class FakeWorker:
    """Answers with a status and JSON by method and path; 404 to the rest."""

    def __init__(self, answers=()):
        self.answers = dict(answers)
        """Status and body by ``METHOD /path``; a body of bytes goes out as it is."""
        self.asked = []
        """What came in: ``METHOD /path?query`` with the JSON of the body, or None."""
        self.released = asyncio.Event()
        self.released.set()

    def stall(self):
        """Answer nothing until ``released``."""
        self.released.clear()

    async def handle(self, request):
        body = await request.read()
        self.asked.append((f"{request.method} {request.path_qs}", json.loads(body or "null")))
        await self.released.wait()
        status, answer = self.answers.get(f"{request.method} {request.path}", (404, {}))
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return web.Response(status=status, body=raw, content_type="application/json")


@contextlib.asynccontextmanager
async def fake_worker(answers=()):
    """Run a fake worker; yield it and its URL."""
    worker = FakeWorker(answers)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", worker.handle)
    async with TestServer(app) as server:
        try:
            yield worker, f"http://127.0.0.1:{server.port}"
        finally:
            worker.released.set()
