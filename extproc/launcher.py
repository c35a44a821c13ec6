"""Envoy and the service as one program.

The launcher is a small supervisor with two children. The service starts first, then Envoy, which gets
its configuration from it. Whichever dies once the router was up is started again: while the service is
away Envoy balances by itself, while Envoy is away the service waits. A child that cannot even start
ends the program, since trying again would not help.

On SIGTERM or SIGINT ``/readiness`` fails first, so that load balancers look elsewhere; a moment later there are
no new connections, kept-alive ones are asked to close, streams under way finish within the grace time, then
both end. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog
import yaml

from extproc.address import MAX_UNIX_PATH_BYTES, Address, join_host_port
from extproc.child import Child
from extproc.config import Config, bind_ip
from extproc.envoy_admin import EnvoyAdmin
from extproc.envoy_binary import find_envoy
from extproc.envoy_drain import close_and_wait
from extproc.errors import ConfigError
from extproc.key_sources import KEY_OPTIONS
from extproc.limits import max_connections, memory_bytes, raise_open_files
from extproc.listening import check_free
from extproc.local_http import ask
from extproc.named_files import check_certificates, check_files, check_keys
from extproc.reload import plan
from extproc.reloading import Reloading
from extproc.stop import STEP_DOWN, stop_on_signals
from extproc.xds.bootstrap import EnvoyLimits, build_bootstrap, to_yaml

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.02
RESTART_DELAYS_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
EVENT_FLUSH_MS = 20
PROBE_TIMEOUT_S = 2.0
MAX_READINESS_POLL_S = 0.5
ENVOY_MEMORY_RATIO = 0.75
"""Share of the memory that Envoy may hold; the service and the system need some, too."""

STABLE_AFTER_S = 30.0
"""A child that ran this long is restarted without delay again."""

ENVOY_LOG_LEVELS = {
    "debug": "info",  # Envoy's debug log prints header values, credentials among them
    "info": "warning",  # Envoy's info tells of its own start-up, page after page
    "warning": "error",
    "error": "error",
    "critical": "critical",
}

log = structlog.get_logger(__name__)


class StartError(ConfigError):
    """A child ended before it was up; it has said why."""


class Launcher:
    """Runs Envoy and the service for one configuration."""

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config] | None = None,
        path: Path | None = None,
    ) -> None:
        """Prepare; with *load* the configuration is read again on SIGHUP and when the file *path* changes."""
        self._binary = find_envoy(config.envoy_path)
        self._config = config
        self._reloading = Reloading(load, path, self._reconfigure) if load is not None else None
        self._stopping = False

    @property
    def base_url(self) -> str:
        """Where clients connect."""
        scheme = "https" if self._config.tls_cert else "http"
        return f"{scheme}://{join_host_port(bind_ip(self._config.host), self._config.port)}"

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until *stop* is set. ``ConfigError`` when the router cannot start."""
        if self._config.ext_proc_only:
            raise ConfigError(
                "--ext-proc-only: Envoy could not start; it is for `serve`, beside a gateway"
            )
        self._check_ports()
        check_files(self._config)
        check_certificates(self._config)
        check_keys(self._config)
        directory = tempfile.mkdtemp(prefix="vllm-extproc-")
        try:
            self._write_files(Path(directory))
            await self._supervise(stop, on_ready)
        except OSError as error:
            raise StartError(f"a program cannot be started: {error}") from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def _supervise(self, stop: asyncio.Event, on_ready: Callable[[], None] | None) -> None:
        children: dict[str, Child] = {}
        stopped = asyncio.create_task(stop.wait())
        try:
            children["service"] = await self._start_service()
            await self._until(children, stopped, self._service_answers)
            children["envoy"] = await self._start_envoy()
            await self._until(children, stopped, self._admin.listening)
            if not stop.is_set():
                log.info("router listening", url=self.base_url)
                async with asyncio.TaskGroup() as tasks:
                    keepers = [
                        tasks.create_task(self._announce(children, on_ready)),
                        tasks.create_task(self._keep(children, "service", self._start_service)),
                        tasks.create_task(self._keep(children, "envoy", self._start_envoy)),
                    ]
                    if self._reloading is not None:
                        keepers.append(tasks.create_task(self._reloading.run()))
                    await stopped
                    self._stopping = True
                    stop.clear()  # set again by a second signal
                    await self._step_down(stop, children["service"])
                    await self._drain(stop, children["envoy"])
                    for keeper in keepers:
                        keeper.cancel()
        finally:
            self._stopping = True
            stopped.cancel()
            for name in ("envoy", "service"):
                if name in children:
                    await children[name].stop(STOP_TIMEOUT_S)

    async def _announce(
        self, children: dict[str, Child], on_ready: Callable[[], None] | None
    ) -> None:
        """Say that the router is ready once a worker is healthy, or none was named, or time is up."""
        limit_s = self._config.worker_startup_timeout_secs
        healthy = 0
        try:
            async with asyncio.timeout(limit_s):
                healthy = await self._healthy_workers()
        except TimeoutError:
            log.error("no worker became healthy in time", seconds=limit_s)
        log.info(
            "router ready",
            url=self.base_url,
            healthy_workers=healthy,
            **{name: child.pid for name, child in children.items()},
        )
        if on_ready is not None:
            on_ready()

    async def _keep(
        self, children: dict[str, Child], name: str, start: Callable[[], Awaitable[Child]]
    ) -> None:
        """Start child *name* again whenever it ends."""
        failures = 0
        while True:
            since = time.monotonic()
            status = await children[name].wait()
            if self._stopping:
                return
            if time.monotonic() - since >= STABLE_AFTER_S:
                failures = 0
            delay_s = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)]
            failures += 1
            log.error("child ended; starting it again", child=name, status=status, delay_s=delay_s)
            await asyncio.sleep(delay_s)
            try:
                children[name] = await start()
            except OSError as error:  # out of memory or processes: it may pass
                log.error("child cannot be started", child=name, reason=str(error))
                continue
            log.info("child started", child=name, pid=children[name].pid)

    async def _step_down(self, stop: asyncio.Event, service: Child) -> None:
        """Let ``/readiness`` fail while requests are still taken; skipped when asked to hurry."""
        config = self._config
        log.info(
            "router stopping", delay_s=config.shutdown_delay_s, grace_s=config.shutdown_grace_s
        )
        service.signal(STEP_DOWN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.shutdown_delay_s):
                await stop.wait()

    async def _drain(self, stop: asyncio.Event, envoy: Child) -> None:
        """Let requests under way finish, within the grace time or until asked to hurry."""
        deadline = time.monotonic() + self._config.shutdown_grace_s

        def in_time() -> bool:
            return envoy.running and time.monotonic() < deadline and not stop.is_set()

        active = await close_and_wait(self._admin, in_time)
        if active != 0 and envoy.running:
            log.warning("requests cut at the end of the grace time", active_requests=active)

    async def _until(
        self,
        children: dict[str, Child],
        stopped: asyncio.Task[Literal[True]],
        up: Callable[[], Awaitable[bool]],
    ) -> None:
        """Wait until *up* says so; fail when a child ends first."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not stopped.done() and not await up():
            for child in children.values():
                if not child.running:
                    status = await child.wait()
                    raise StartError(f"the {child.name} ended with status {status} while starting")
            if time.monotonic() > deadline:
                raise StartError(f"the router is not up after {START_TIMEOUT_S:.0f} s; see the log")
            await asyncio.sleep(POLL_S)

    async def _service_answers(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(str(self._directory / "admin.sock"))
        except OSError:
            return False
        writer.close()
        return True

    async def _healthy_workers(self) -> int:
        """Wait until a worker is healthy, or none is known that could be; return how many are."""
        pause_s = POLL_S
        while (healthy := await self._count_healthy()) is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_READINESS_POLL_S)
        return healthy

    async def _count_healthy(self) -> int | None:
        """Return how many workers are healthy, or None while the first of them is waited for."""
        address = Address.parse(self._config.admin_address)
        answer = await ask(address, "GET", "/readiness", timeout_s=PROBE_TIMEOUT_S)
        if answer is None:
            return None
        status, body = answer
        try:
            state = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError:
            return None
        if status == 200:
            return int(state.get("healthy_workers", 0))
        known = bool(state.get("total_workers")) or bool(self._config.worker_dns)
        return None if known else 0

    async def _start_service(self) -> Child:
        # The configuration travels in a file that only this user can read: a process list shows flags.
        path = str(self._directory / "config.yaml")
        return await Child.start(
            "service", [sys.executable, "-P", "-m", "extproc", "serve", "--config", path]
        )

    async def _start_envoy(self) -> Child:
        config = self._config
        command = [
            str(self._binary),
            "--config-path",
            str(self._directory / "envoy.yaml"),
            "--disable-hot-restart",
            "--log-level",
            ENVOY_LOG_LEVELS[config.log_level],
            "--drain-time-s",
            str(max(1, round(config.shutdown_grace_s))),
            # Event logs are read as they grow; Envoy would hold lines back for 10 s.
            "--file-flush-interval-msec",
            str(EVENT_FLUSH_MS),
            # One line per request while the service is away, and per refused body, helps nobody.
            "--component-log-level",
            # Nor does Envoy's calling the filter for API keys work in progress, at every change of one.
            "ext_proc:error,http:critical,misc:error",
        ]
        if config.envoy_concurrency:
            command += ["--concurrency", str(config.envoy_concurrency)]
        if config.log_dir:
            command += ["--log-path", f"{config.log_dir}/envoy.log"]
        return await Child.start("envoy", command, quiet=True)

    def _write_files(self, directory: Path) -> None:
        """Put the sockets' places and both configurations into *directory*, which only we can read."""
        self._directory = directory
        admin = str(directory / "envoy-admin.sock")
        if len(admin.encode()) > MAX_UNIX_PATH_BYTES:
            raise ConfigError(
                f"{admin} is longer than the {MAX_UNIX_PATH_BYTES} bytes of a socket's path;"
                " set TMPDIR to a shorter directory"
            )
        self._admin = EnvoyAdmin(Address(path=admin))
        self._config = self._placed(self._config)
        self._write_config(self._config)
        grpc = Address.parse(self._config.grpc_address)
        bootstrap = build_bootstrap(grpc, Address(path=admin), str(directory), self._limits())
        path = self._directory / "envoy.yaml"
        path.touch(mode=0o600)
        path.write_text(to_yaml(bootstrap))

    def _limits(self) -> EnvoyLimits:
        memory = self._config.envoy_max_memory or int(memory_bytes() * ENVOY_MEMORY_RATIO)
        return EnvoyLimits(memory, max_connections())

    def _placed(self, config: Config) -> Config:
        """Return *config* with the sockets in our directory."""
        return msgspec.structs.replace(
            config,
            grpc_address=f"unix:{self._directory / 'extproc.sock'}",
            admin_address=f"unix:{self._directory / 'admin.sock'}",
            envoy_admin_address=f"unix:{self._directory / 'envoy-admin.sock'}",
            prefill_leg_address=f"unix:{self._directory / 'prefill.sock'}",
            envoy_events_dir=str(self._directory),
        )

    def _write_config(self, config: Config) -> None:
        """Write the configuration that the service reads, and follows: whole, or not at all."""
        fresh = self._directory / "config.yaml.new"
        fresh.touch(mode=0o600)
        fresh.write_text(yaml.safe_dump(msgspec.to_builtins(config)))
        fresh.replace(self._directory / "config.yaml")

    def _reconfigure(self, wanted: Config) -> None:
        """Hand what of *wanted* can be applied to the service. ``ConfigError`` when it cannot be used."""
        try:
            change = plan(self._config, self._placed(wanted))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        check_files(change.config)
        if not KEY_OPTIONS.isdisjoint(change.changed):
            check_keys(change.config)
        if change.changed:
            # The classes of Envoy take a second to load.
            from extproc.check import check_buildable  # noqa: PLC0415

            check_buildable(change.config)
            try:
                self._write_config(change.config)
            except OSError as error:
                raise ConfigError(f"it cannot be handed on: {error}") from error
            self._config = change.config
        if change.held_back:
            log.warning("options changed that need a restart", options=list(change.held_back))

    def _check_ports(self) -> None:
        config = self._config
        check_free(bind_ip(config.host), config.port, "--host and --port")
        if config.prometheus_port:
            host = bind_ip(config.prometheus_host)
            hosts = {ipaddress.ip_address(host), ipaddress.ip_address(bind_ip(config.host))}
            overlap = len(hosts) == 1 or any(ip.is_unspecified for ip in hosts)
            if config.prometheus_port == config.port and overlap:
                raise ConfigError(
                    "--port and --prometheus-port are the same; choose another for one"
                )
            check_free(host, config.prometheus_port, "--prometheus-host and --prometheus-port")


def run(config: Config, load: Callable[[], Config] | None = None, path: Path | None = None) -> int:
    """Run the router in the foreground until SIGTERM or SIGINT; return the exit status.

    With *load* the configuration is read again on SIGHUP and when the file *path* changes.
    """
    raise_open_files()

    async def main() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        await Launcher(config, load, path).run(stop)

    status = 0
    try:
        asyncio.run(main())
    except* ConfigError as group:
        for error in group.exceptions:
            log.error("router cannot start", reason=str(error))
        status = 1
    return status
