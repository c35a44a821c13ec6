"""The composition root of the service: builds every part from the configuration and runs them."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import socket
import time
from pathlib import Path

import structlog
from aiohttp import web

from extproc.access_log import AccessLogService
from extproc.address import Address
from extproc.admin import build_admin_app, build_metrics_app
from extproc.config import Config, bind_ip, build_policy
from extproc.discovery import static
from extproc.discovery.last_known import LastKnown
from extproc.discovery.updates import Add, Remove, Reset, Update
from extproc.errors import ConfigError
from extproc.grpc_health import HealthService
from extproc.grpc_server import GrpcServer
from extproc.limits import raise_open_files
from extproc.metrics import Metrics
from extproc.pool import Pool
from extproc.readiness import Readiness
from extproc.router import Router
from extproc.service import ExtProcService
from extproc.xds.ads import AdsService
from extproc.xds.model import EnvoyModel, PoolModel
from extproc.xds.snapshot import build_snapshot

DEFAULT_POOL = "default"
DRAIN_POLL_S = 0.02
SUSPEND_S = 10.0
"""How long a worker is left alone whose connections failed. Requests that find it still away are retried
elsewhere, so a short time costs little."""

MESSAGE_OVERHEAD_BYTES = 2**20
"""What a message may have beside the body: headers, attributes, Envoy's description of itself."""

log = structlog.get_logger(__name__)


def envoy_model(config: Config, pools: tuple[PoolModel, ...]) -> EnvoyModel:
    """Return what Envoy must be told, from the configuration and the workers known now."""
    return EnvoyModel(
        host=bind_ip(config.host),
        port=config.port,
        admin_address=Address.parse(config.admin_address),
        pools=pools,
        max_payload_bytes=config.max_payload_size,
        idle_timeout_s=config.request_timeout_secs,
        decision_timeout_s=config.decision_timeout_secs,
        fail_closed=config.fail_closed,
        full_duplex=config.body_mode == "full_duplex",
    )


class Service:
    """The whole sidecar."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.pool = Pool(DEFAULT_POOL)
        policy = self._policy = build_policy(config)
        self.metrics = Metrics(policy.name, [self.pool])
        router = Router(self.pool, policy, random.Random())
        self._extproc = ExtProcService(
            router,
            self.metrics,
            ids=random.Random(),
            max_body_bytes=config.max_payload_size,
            max_routed_bytes=config.max_routed_body,
        )
        self._access_log = AccessLogService(self.metrics, self.pool.url_of, self._on_failed)
        self._ads = AdsService(build_snapshot(self._model()), self.metrics)
        self._discovered = asyncio.Event()
        self.readiness = Readiness(self.pool, self._ads.serving)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until *stop* is set, then let streams under way finish within the grace time."""
        config = self._config
        server = GrpcServer(
            self._extproc.methods()
            | self._ads.methods()
            | self._access_log.methods()
            | HealthService(lambda: self.readiness.state().ready).methods(),
            max_message_bytes=config.max_payload_size + MESSAGE_OVERHEAD_BYTES,
        )
        runners: list[web.AppRunner] = []
        async with asyncio.TaskGroup() as tasks:
            discovery = tasks.create_task(self._follow_discovery())
            # Envoy may still be serving for a service that died: tell it of no fewer workers.
            await self._discovered.wait()
            await _serve_grpc(server, Address.parse(config.grpc_address))
            admin = Address.parse(config.admin_address)
            app = build_admin_app(self.readiness, self._policy)
            runners.append(await _serve_http(app, admin, "--admin-address"))
            if config.prometheus_port:
                metrics = Address(host=bind_ip(config.prometheus_host), port=config.prometheus_port)
                app = build_metrics_app(self.metrics.registry)
                flags = "--prometheus-host and --prometheus-port"
                runners.append(await _serve_http(app, metrics, flags))
            log.info(
                "service ready",
                grpc=config.grpc_address,
                admin=config.admin_address,
                workers=len(self.pool.candidates),
            )
            # What lives now lives for ever: a full collection need not look at it, 80 ms each time.
            gc.collect()
            gc.freeze()
            await stop.wait()
            self.readiness.stopping = True
            log.info("service stopping", in_flight=self.pool.in_flight)
            discovery.cancel()
            await self._drain(server)
            for runner in runners:
                await runner.cleanup()

    def _on_failed(self, endpoint: str) -> None:
        """Leave a worker alone for a while that Envoy could not reach: it is Envoy that knows."""
        if self.pool.suspend(endpoint):
            worker = self.pool.url_of(endpoint)
            log.warning("worker suspended: it cannot be reached", worker=worker, seconds=SUSPEND_S)
            asyncio.get_running_loop().call_later(SUSPEND_S, self._resume, endpoint)

    def _resume(self, endpoint: str) -> None:
        self.pool.resume(endpoint)
        log.info("worker tried again", worker=self.pool.url_of(endpoint))

    async def _drain(self, server: GrpcServer) -> None:
        """Take no new streams; end when the last request has, or with the grace time.

        xDS and access-log streams last as long as Envoy: waiting for them would use up the grace time.
        """
        server.drain()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.shutdown_grace_s
        while self.pool.in_flight and loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        await server.stop()

    async def _follow_discovery(self) -> None:
        last_known = LastKnown(Address.parse(self._config.grpc_address))
        async for update in static.watch(
            self._config.workers(),
            report=_report_unresolved,
            last_known=last_known.load(),
            weights=self._config.weights(),
        ):
            if self.pool.apply(update):
                _log_update(update)
                self._ads.publish(build_snapshot(self._model()))
                try:
                    last_known.save(self.pool.members)
                except OSError as error:
                    log.warning("workers cannot be remembered", reason=str(error))
            self._discovered.set()

    def _model(self) -> EnvoyModel:
        endpoints = tuple(worker.endpoint for worker in self.pool.members)
        return envoy_model(self._config, (PoolModel(self.pool.name, endpoints),))


def run(config: Config) -> int:
    """Run the service in this process until SIGTERM or SIGINT."""
    import uvloop

    started = time.monotonic()
    raise_open_files()

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        service = Service(config)
        log.debug("service built", seconds=round(time.monotonic() - started, 3))
        await service.run(stop)

    status = 0
    try:
        uvloop.run(serve())
    except* ConfigError as group:
        for error in group.exceptions:
            log.error("service cannot start", reason=str(error))
        status = 1
    return status


async def _serve_grpc(server: GrpcServer, address: Address) -> None:
    _remove_stale_socket(address)
    try:
        await server.start(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address} (--grpc-address): {error.strerror}"
        ) from error
    _only_for_this_user(address)


async def _serve_http(app: web.Application, address: Address, flags: str) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    _remove_stale_socket(address)
    site: web.BaseSite
    if address.path:
        site = web.UnixSite(runner, address.path)
    else:
        site = web.TCPSite(runner, address.host, address.port)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"cannot listen on {address} ({flags}): {error.strerror}") from error
    _only_for_this_user(address)
    return runner


def _remove_stale_socket(address: Address) -> None:
    """Make binding possible after a service that was killed left its socket behind."""
    path = Path(address.path)
    if not address.path or not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"cannot listen on {address}: there is something else at that path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.path)
        except OSError:
            path.unlink()
            return
    raise ConfigError(f"cannot listen on {address}: another program listens there")


def _only_for_this_user(address: Address) -> None:
    if address.path:
        Path(address.path).chmod(0o600)


def _report_unresolved(url: str, reason: str) -> None:
    log.warning("worker name cannot be resolved", worker=url, reason=reason)


def _log_update(update: Update) -> None:
    match update:
        case Reset(workers):
            log.info("workers set", workers=[worker.url for worker in workers])
        case Add(worker):
            log.info("worker added", worker=worker.url, endpoint=worker.endpoint)
        case Remove(url):
            log.info("worker removed", worker=url)
