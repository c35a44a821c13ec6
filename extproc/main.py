"""The composition root of the service: builds every part from the configuration and runs them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import structlog
from aiohttp import web

from extproc import reload
from extproc.access_log import AccessLogService
from extproc.address import Address, join_host_port
from extproc.admin import build_admin_app, build_metrics_app
from extproc.admission import Admission
from extproc.certificates import files_of, load_certificates
from extproc.check import check_buildable
from extproc.config import Config, bind_ip
from extproc.discovery import dns, file, static
from extproc.discovery.last_known import LastKnown
from extproc.discovery.names import Names
from extproc.discovery.updates import Reset, Update
from extproc.engine import Memory
from extproc.envoy_admin import EnvoyAdmin
from extproc.envoy_settings import (
    admission_limits,
    build_registry,
    client_tls,
    envoy_model,
    registry_settings,
    retry_count,
    split_rules,
    unheeded_options,
)
from extproc.errors import ConfigError
from extproc.fleet import Fleet
from extproc.grpc_health import HealthService
from extproc.grpc_server import GrpcServer
from extproc.h2.grpc import Method
from extproc.key_sources import KeySources
from extproc.leg_sender import LegSender
from extproc.limits import BACKLOG, raise_open_files
from extproc.log import cap
from extproc.metrics import Metrics
from extproc.named_files import check_files
from extproc.outcomes import Outcomes
from extproc.pd.nixl import Nixl
from extproc.prefill_legs import PrefillLegs
from extproc.readiness import Readiness
from extproc.registry import Change
from extproc.reloading import Reloading
from extproc.retry_budget import RetryBudget
from extproc.router import Router
from extproc.service import ExtProcService
from extproc.signals.envoy_events import EnvoyEvents
from extproc.signals.worker_poll import WorkerPoll
from extproc.stop import STEP_DOWN
from extproc.token_validation import TokenValidator
from extproc.watched_files import watch_files
from extproc.worker_client import WorkerClient
from extproc.xds.ads import AdsService
from extproc.xds.bootstrap import OUTLIER_LOG
from extproc.xds.endpoint import build_endpoints
from extproc.xds.model import HEALTH_LOG, EnvoyModel
from extproc.xds.snapshot import build_snapshot

DRAIN_POLL_S = 0.02
TICK_S = 0.25
STATIC_SOURCE = "static"
ZMQ_SOURCE = "zmq"
KUBERNETES_SOURCE = "kubernetes"
SOURCE_LIMIT_S = 2.0
"""How long a service that remembers nothing waits for its sources, before it tells Envoy that there are no
workers."""

NO_ADMIN = "127.0.0.1:0"
SAVE_S = 0.05
FORGET_S = 600.0
"""How long the metrics of a worker outlive it: scrapes in between must see its last figures."""

HTTP_SHUTDOWN_S = 2.0
MAX_HEADER_BYTES = 65536
MESSAGE_OVERHEAD_BYTES = 2**20
"""What a message may have beside the body: headers, attributes, Envoy's description of itself."""

log = structlog.get_logger(__name__)


class Service:
    """The whole sidecar."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.registry = build_registry(config)
        self.fleet = Fleet(self.registry, time.time)
        policy = self.registry.pools[0].policy
        self.metrics = Metrics(policy.name, self.registry)
        self._budget = RetryBudget(ratio=config.retry_budget_ratio, most=retry_count(config))
        self.metrics.watch_retries(self._budget)
        rules = split_rules(config)
        self._router = Router(
            self.registry,
            random.Random(),
            aliases=config.aliases(),
            default_model=config.default_model,
            no_worker_s=config.no_worker_timeout_secs,
            budget=self._budget,
            split_rules=rules,
        )
        self._sender: LegSender | None = None
        legs: PrefillLegs | None = None
        if config.vllm_pd_disaggregation:
            leg_s = config.request_timeout_secs
            legs = PrefillLegs(random.SystemRandom(), longest_s=leg_s)
            address = Address.parse(config.prefill_leg_address)
            self._sender = LegSender(address, idle_s=leg_s)
        self._extproc = ExtProcService(
            self._router,
            self.metrics,
            ids=random.Random(),
            max_body_bytes=config.max_payload_size,
            max_routed_bytes=config.max_routed_body,
            admission=Admission(admission_limits(config)),
            id_headers=[name.lower() for name in config.request_id_headers],
            legs=legs,
            sender=self._sender,
        )
        self._keys = KeySources(config)
        outcomes = Outcomes(self.fleet, self._budget, self._extproc.look_again)
        self._access_log = AccessLogService(self.metrics, self.registry.url_of, outcomes)
        if legs is not None:
            self._access_log = AccessLogService(
                *(self.metrics, self.registry.url_of, outcomes, self._fetches, legs.renewed)
            )
        self._last_known = LastKnown(_memory_path(config))
        self._tls = client_tls(config)
        self._certificates = None if self._tls is None else load_certificates(self._tls)
        self._save_due = False
        sources = self._sources()
        self._static, self._others = sources.pop(STATIC_SOURCE), sources
        self._ads = AdsService(build_snapshot(self._model()), self.metrics, self._first_endpoints)
        self.registry.accepts = self._ads.accepts
        self._ads.on_accepted = self.fleet.commit_soon
        self.readiness = Readiness(self.registry, self._ads.serving)
        self._client = WorkerClient(
            api_key=config.worker_api_key,
            ca_file=config.worker_ca_file,
            tls_server_name=config.worker_tls_server_name,
            tls_insecure=config.worker_tls_insecure,
        )
        self._validator = TokenValidator(
            config.api_key_validation_urls,
            cache_s=config.api_key_validation_cache_secs,
            timeout_s=config.api_key_validation_timeout_secs,
            count=self.metrics.count_validation,
        )
        self._names = Names(self.fleet.on_address, self.fleet.on_unresolved)
        self._poll = WorkerPoll(
            self.fleet,
            self._client,
            interval_s=config.worker_poll_interval_secs,
            rng=random.Random(),
            asks_engine_ids=rules is not None and rules.needs_engine_id,
        )
        self.fleet.subscribe(self._on_change)
        self.fleet.subscribe(self._let_look_again)
        if rules is not None and isinstance(rules.connector, Nixl):
            self.fleet.subscribe(functools.partial(self._keep_identities, rules.connector))
        self.fleet.persist = self._save

    def _methods(self) -> dict[str, Method]:
        """Return what Envoy may call; one that is not ours gets its configuration from elsewhere."""
        health = HealthService(lambda: self.readiness.state().ready)
        methods = self._extproc.methods() | health.methods()
        if not self._config.ext_proc_only:
            methods |= self._ads.methods() | self._access_log.methods()
        return methods

    async def run(self, stop: asyncio.Event, reloading: Reloading | None = None) -> None:
        """Serve until *stop* is set, then let streams under way finish within the grace time."""
        config = self._config
        server = GrpcServer(
            self._methods(),
            max_message_bytes=config.max_payload_size + MESSAGE_OVERHEAD_BYTES,
        )
        runners: list[web.AppRunner] = []
        async with (
            self._client,
            self._validator,
            self._sender or contextlib.nullcontext(),
            asyncio.TaskGroup() as tasks,
        ):
            background = [
                tasks.create_task(self._names.run()),
                tasks.create_task(self._poll.run()),
                tasks.create_task(self._keep_time()),
                tasks.create_task(self._keys.run(self._on_keys)),
            ]
            if self._tls is not None:
                watched = files_of(self._tls)
                self._on_certificates()  # it may have changed since it was read
                following = watch_files(lambda: watched, self._on_certificates)
                background.append(tasks.create_task(following))
            # Envoy may still be serving for a service that died: it must be told of no fewer workers.
            await self._restore()
            async for update in self._static:
                self.fleet.on_update(STATIC_SOURCE, update)
            if reloading is not None:
                background.append(tasks.create_task(reloading.run()))
            self._names.want(self.registry.hosts())
            heard = [asyncio.Event() for _ in self._others]
            background += [
                tasks.create_task(self._follow(name, source, event))
                for (name, source), event in zip(self._others.items(), heard, strict=True)
            ]
            if not self.registry.engines:  # nothing was remembered
                await _until_all(heard, SOURCE_LIMIT_S)
            if config.envoy_admin_address:
                events = self._envoy_events()
                await events.catch_up()
                background.append(tasks.create_task(events.run()))
            await self._keys.settle(SOURCE_LIMIT_S)
            await _serve_grpc(server, Address.parse(config.grpc_address))
            admin = Address.parse(config.admin_address)
            app = build_admin_app(
                readiness=self.readiness,
                fleet=self.fleet,
                client=self._client,
                config=lambda: self._config,
                policies=lambda: [pool.policy for pool in self.registry.all_pools()],
                validator=self._validator,
            )
            runners.append(await _serve_http(app, admin, "--admin-address"))
            if config.prometheus_port:
                metrics = Address(host=bind_ip(config.prometheus_host), port=config.prometheus_port)
                app = build_metrics_app(self.metrics.registry, self.readiness)
                flags = "--prometheus-host and --prometheus-port"
                runners.append(await _serve_http(app, metrics, flags))
            unheeded = unheeded_options(config)
            if unheeded:
                log.warning(
                    "options without effect: envoy doubles its waits and draws each from zero up",
                    options=unheeded,
                )
            log.info(
                "service ready",
                grpc=config.grpc_address,
                admin=config.admin_address,
                workers=len(self.registry.engines),
            )
            # What lives now lives for ever: a full collection need not look at it, 80 ms each time.
            gc.collect()
            gc.freeze()
            await stop.wait()
            await self._step_down()
            self._extproc.stop()
            log.info("service stopping", in_flight=self._in_flight)
            for task in background:
                task.cancel()
            await self._drain(server)
            for runner in runners:
                await runner.cleanup()

    def reconfigure(self, wanted: Config) -> None:
        """Apply what of *wanted* can be applied. ``ConfigError`` when none of it can be used."""
        try:
            change = reload.plan(self._config, wanted)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        config, workers = change.config, change.config.specs()
        check_files(config)
        check_buildable(config)
        self._keys.configure(config)
        self._config = config
        if change.held_back:
            log.warning("options changed that need a restart", options=list(change.held_back))
        if not change.changed:
            return
        self._client.set_api_key(config.worker_api_key)
        self._validator.configure(
            config.api_key_validation_urls,
            cache_s=config.api_key_validation_cache_secs,
            timeout_s=config.api_key_validation_timeout_secs,
        )
        self._router.configure(aliases=config.aliases(), default_model=config.default_model)
        self._router.wait_for_workers(config.no_worker_timeout_secs)
        self._budget.configure(ratio=config.retry_budget_ratio, most=retry_count(config))
        self._extproc.set_limits(admission_limits(config))
        self.registry.configure(registry_settings(config))
        self.fleet.on_update(STATIC_SOURCE, Reset(workers))
        self._ads.publish(build_snapshot(self._model()))
        log.info("configuration changed", options=list(change.changed))

    def step_down(self) -> None:
        """Call ourselves not ready, and serve on."""
        self.readiness.stopping = True

    async def _step_down(self) -> None:
        """Call ourselves not ready, and let load balancers notice, unless the launcher has seen to that."""
        if not self.readiness.stopping:
            self.step_down()
            await asyncio.sleep(self._config.shutdown_delay_s)

    @property
    def _in_flight(self) -> int:
        return sum(pool.in_flight for pool in self.registry.all_pools())

    def _sources(self) -> dict[str, AsyncIterator[Update]]:
        """Return the discovery sources by name."""
        config = self._config
        sources: dict[str, AsyncIterator[Update]] = {STATIC_SOURCE: static.watch(config.specs())}
        if config.worker_file:
            sources["file"] = file.watch(Path(config.worker_file), report=_report_file)
        for url in config.dns_names():
            sources[f"dns {url}"] = dns.watch(
                url,
                report=functools.partial(_report_dns, url.host),
                interval_s=config.worker_dns_interval_secs,
            )
        if address := config.discovery_address():
            from extproc.discovery import zmq

            sources[ZMQ_SOURCE] = zmq.watch(
                address,
                known=lambda: self.registry.named_by(ZMQ_SOURCE),
                count_refused=self.metrics.count_refused_announcements,
                report=_report_announcements,
            )
        if config.service_discovery:
            from extproc.discovery import kubernetes
            from extproc.discovery.pod_watch import Sync

            sync = Sync()
            self.metrics.watch_kubernetes(sync)
            sources[KUBERNETES_SOURCE] = kubernetes.watch(
                config,
                known=lambda: self.registry.named_by(KUBERNETES_SOURCE),
                sync=sync,
                report=_report_kubernetes,
                report_pod=_report_pod,
                clock=time.time,
            )
        return sources

    def _fetches(self, endpoint: str) -> bool:
        """Tell whether the worker at *endpoint* fetches KV blocks."""
        return self.registry.prefill_worker(endpoint, None) is None

    async def _restore(self) -> None:
        """Begin with what an earlier run of the service knew, if Envoy has outlived it."""
        config, memory = self._config, self._last_known.load()
        if memory.engines and not Address.parse(config.grpc_address).path:
            # A directory for events may be older than this router, unlike the place of its socket.
            admin = EnvoyAdmin(Address.parse(config.envoy_admin_address or NO_ADMIN))
            if await admin.clusters() is None:
                memory = Memory()
        if memory.engines:
            log.info(
                "workers remembered",
                workers=[known.spec.key for known in memory.engines],
                removed_by_administrators=list(memory.removed),
            )
        sources = (STATIC_SOURCE, *self._others)
        self.registry.restore(memory, self.fleet.now(), sources=sources)
        self.fleet.commit()

    async def _follow(self, name: str, source: AsyncIterator[Update], heard: asyncio.Event) -> None:
        async for update in source:
            self.fleet.on_update(name, update)
            heard.set()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.fleet.tick()

    def _envoy_events(self) -> EnvoyEvents:
        config = self._config
        admin = EnvoyAdmin(Address.parse(config.envoy_admin_address))
        directory = config.envoy_events_dir
        if directory:
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--envoy-events-dir: cannot make {directory}: {error.strerror}"
                ) from error
        logs = [Path(directory) / name for name in (HEALTH_LOG, OUTLIER_LOG)] if directory else []
        return EnvoyEvents(self.registry.verdicts, admin, logs, self.fleet.on_verdicts)

    def _on_change(self, change: Change) -> None:
        """Tell Envoy, and remember, what the workers are."""
        if change.clusters:
            self._ads.publish(build_snapshot(self._model()))
        if change.members:
            self._names.want(self.registry.hosts())
        for url, circuit in change.circuits:
            self.metrics.count_transition(url, circuit)
        for engine in change.removed:
            asyncio.get_running_loop().call_later(FORGET_S, self._forget, engine.spec.url.url)
        # Together with what else changes in this moment.
        if not self._save_due:
            self._save_due = True
            asyncio.get_running_loop().call_later(SAVE_S, self._save_later)

    def _let_look_again(self, change: Change) -> None:
        """Let requests that wait for a worker look who is there."""
        self._extproc.on_workers(name for engine in change.removed for name in engine.names or ())

    def _keep_identities(self, connector: Nixl, change: Change) -> None:
        """Forget what was learned of prefill workers that are gone."""
        if change.removed:
            urls = [engine.spec.url for engine in self.registry.engines]
            connector.identities.keep({join_host_port(url.host, url.port) for url in urls})

    def _save_later(self) -> None:
        self._save_due = False
        self._save()

    def _save(self) -> None:
        try:
            self._last_known.save(self.registry.memory())
        except OSError as error:
            log.warning("workers cannot be remembered", reason=str(error))

    def _forget(self, url: str) -> None:
        """Drop the metrics of a worker that is gone for good."""
        if all(engine.spec.url.url != url for engine in self.registry.engines):
            self.metrics.forget_worker(url)

    async def _drain(self, server: GrpcServer) -> None:
        """Take no new streams; end when the last request has, or with the grace time.

        xDS and access-log streams last as long as Envoy: waiting for them would use up the grace time.
        """
        server.drain()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.shutdown_grace_s
        while self._in_flight and loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        await server.stop()

    def _on_certificates(self) -> None:
        """Serve new connections with what the files hold, if it can be used."""
        if self._tls is None:
            return
        try:
            found = load_certificates(self._tls)
        except ConfigError as error:
            log.error("certificate refused; the one in use stays", reason=str(error))
            return
        if found != self._certificates:
            self._certificates = found
            self._ads.publish(build_snapshot(self._model()))
            log.info("certificate changed", file=self._tls.cert_file)

    def _on_keys(self) -> None:
        self._ads.publish(build_snapshot(self._model()))

    def _model(self) -> EnvoyModel:
        return envoy_model(
            self._config, self.registry.clusters, self._certificates, self._keys.auth
        )

    def _first_endpoints(self) -> dict[str, bytes]:
        """Return the endpoints that a cluster may start with; see ``xds.subscription``."""
        good = self.registry.good_endpoints()
        return {view.name: build_endpoints(view, only=good) for view in self.registry.clusters}


def _memory_path(config: Config) -> Path | None:
    """Return where the service remembers its workers: beside its socket, else with Envoy's event logs."""
    grpc = Address.parse(config.grpc_address)
    if grpc.path:
        return Path(f"{grpc.path}.workers")
    return Path(config.envoy_events_dir) / "workers.json" if config.envoy_events_dir else None


async def _until_all(events: list[asyncio.Event], limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            for event in events:
                await event.wait()


def run(config: Config, load: Callable[[], Config] | None = None, path: Path | None = None) -> int:
    """Run the service in this process until SIGTERM or SIGINT.

    With *load* the configuration is read again on SIGHUP and when the file *path* changes.
    """
    import uvloop

    started = time.monotonic()
    raise_open_files()

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        service = Service(config)
        loop.add_signal_handler(STEP_DOWN, service.step_down)
        log.debug("service built", seconds=round(time.monotonic() - started, 3))
        reloading = Reloading(load, path, service.reconfigure) if load is not None else None
        await service.run(stop, reloading)

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
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,  # whoever waits for a worker may go away
        shutdown_timeout=HTTP_SHUTDOWN_S,
        # As Envoy: it has refused what is longer.
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )
    await runner.setup()
    _remove_stale_socket(address)
    site: web.BaseSite
    if address.path:
        site = web.UnixSite(runner, address.path, backlog=BACKLOG)
    else:
        site = web.TCPSite(runner, address.host, address.port, backlog=BACKLOG)
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


def _report_file(reason: str) -> None:
    if reason:
        log.error("worker file cannot be used; the last good one stays", reason=reason)
    else:
        log.info("worker file can be used again")


def _report_dns(name: str, reason: str) -> None:
    if reason:
        log.warning(
            "worker name cannot be looked up; its last workers stay", name=name, reason=reason
        )
    else:
        log.info("worker name can be looked up again", name=name)


def _report_announcements(count: int, reason: str) -> None:
    log.warning("announcements of workers refused", count=count, last_reason=cap(reason))


def _report_kubernetes(what: str, reason: str) -> None:
    if what == "nodes":
        if reason:
            log.info(
                "zones of nodes cannot be read; those that Pods name count", reason=cap(reason)
            )
    elif reason:
        log.error(
            "kubernetes cannot be followed; the last known workers stay",
            option=what,
            reason=cap(reason),
        )
    else:
        log.info("kubernetes can be followed again", option=what)


def _report_pod(name: str, reason: str) -> None:
    log.warning("pod asks for what cannot be", pod=name, reason=cap(reason))
