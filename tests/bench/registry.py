"""``make bench-registry``: what a change of workers costs, and whether picks notice.

    python -m tests.bench.registry                      all of it, about two minutes
    python -m tests.bench.registry --no-envoy           only the computation, in this process

First table: CPU time of one change in the service, from the call to the bytes for Envoy, and of a
decision beside it. Second table: the whole router with a real Envoy before that many workers (one
process that answers on many loopback addresses): from ``POST /workers`` to the first pick, and
what requests notice of changes that go on all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from extproc.address import WorkerUrl
from extproc.child import Child
from extproc.config import Config, build_policy
from extproc.discovery.updates import Reset, WorkerSpec
from extproc.engine import State
from extproc.envoy_settings import envoy_model
from extproc.models import ModelList
from extproc.registry import Registry, Settings
from extproc.router import Routed, Router
from extproc.xds.snapshot import build_snapshot
from policies import registry as policy_registry
from policies.base import Request
from tests.bench.processes import cpu_s, free_ports, raise_file_limit, until

COUNTS = (10, 100, 1000)
POLICIES = ("round_robin", "cache_aware", "consistent_hash")
BUDGET_MS = 50.0
REPEATS = 20
REQUESTS_AT_ONCE = 4
MODELS = ModelList(frozenset({"model"}), frozenset(), ({"id": "model"},))
ANSWER = b'{"object":"list","data":[{"id":"model","object":"model"}]}'


def specs(count: int) -> tuple[WorkerSpec, ...]:
    """Return *count* workers at addresses of their own."""
    return tuple(
        WorkerSpec(WorkerUrl.parse(f"http://10.{n >> 8}.{n & 255}.1:8000")) for n in range(count)
    )


class Subject:
    """A registry with *count* healthy workers, and what the service does after a change."""

    def __init__(self, policy: str, count: int) -> None:
        self.config = Config(policy=policy, envoy_admin_address="unix:/none")
        self.registry = Registry(lambda: build_policy(self.config), Settings())
        self.registry.apply("static", Reset(specs(count)), 0)
        self.registry.commit(0)
        for engine in self.registry.engines:
            self.registry.on_models(engine, MODELS)
            self.pass_check(engine.endpoint)
        self.publish()
        self._fresh = itertools.count(1)

    def pass_check(self, endpoint: str, *, passes: bool = True) -> None:
        """Let Envoy say that a worker is healthy, or is not."""
        host, _, port = endpoint.rpartition(":")
        event = "add_healthy_event" if passes else "eject_unhealthy_event"
        line = {
            "cluster_name": "default",
            "host": {"socket_address": {"address": host, "port_value": int(port)}},
            event: {},
        }
        key = self.registry.verdicts.on_line(json.dumps(line).encode())
        if key is not None:
            self.registry.on_events([key])

    def publish(self) -> None:
        """Commit, and build what Envoy is told."""
        change = self.registry.commit(0)
        if change.clusters:
            build_snapshot(envoy_model(self.config, self.registry.clusters))

    def add(self) -> None:
        n = next(self._fresh)
        self.registry.add(WorkerSpec(WorkerUrl.parse(f"http://10.200.{n >> 8}.{n & 255}:1")), 0)
        self.publish()

    def remove(self) -> None:
        self.registry.remove(next(iter(self.registry.engines)).key, 0)
        self.publish()

    def flip(self) -> None:
        """Let another worker fail than last time."""
        engine = next(e for e in self.registry.engines if e.state is State.HEALTHY)
        self.pass_check(engine.endpoint, passes=False)
        self.publish()
        assert engine.state is State.UNHEALTHY


def cpu_ms(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median CPU time of *call*."""
    taken = []
    for _ in range(repeats):
        started = time.thread_time()
        call()
        taken.append(time.thread_time() - started)
    return statistics.median(taken) * 1e3


def decide_us(subject: Subject, disturb: Callable[[], object] | None) -> float:
    """Return the median time of a decision; *disturb* is called between them."""
    router = Router(subject.registry, random.Random(0))
    headers = {":method": "POST", ":path": "/v1/completions", "x-session-id": "bench"}
    request = Request(method="POST", path="/v1/completions", headers=headers)
    taken = []
    for number in range(2000):
        if disturb is not None and number % 100 == 0:
            disturb()
        started = time.perf_counter()
        decision = router.decide(request, 1.0)
        taken.append(time.perf_counter() - started)
        assert isinstance(decision, Routed)
        decision.pool.acquire(decision.workers[0]).release(1.0)
    return statistics.median(taken) * 1e6


def computation(console: Console) -> bool:
    """Print the first table; tell whether every change is within the budget."""
    table = Table(title="One change in the service, ms of CPU", title_justify="left")
    table.add_column("policy")
    for name in ("workers", "add", "remove", "health"):
        table.add_column(name, justify="right")
    table.add_column("decision, µs", justify="right")
    table.add_column("amid changes, µs", justify="right")
    within = True
    for policy in POLICIES:
        for count in COUNTS:
            subject = Subject(policy, count)
            quiet = decide_us(subject, None)
            amid = decide_us(subject, subject.add)
            flip = cpu_ms(subject.flip, 3)
            figures = [cpu_ms(subject.add), cpu_ms(subject.remove), flip]
            within &= max(figures) < BUDGET_MS
            shown = [f"{figure:.2f}" for figure in figures]
            table.add_row(policy, str(count), *shown, f"{quiet:.1f}", f"{amid:.1f}")
    console.print(table)
    console.print(f"budget of a change: {BUDGET_MS:.0f} ms: {'kept' if within else 'MISSED'}")
    return within


async def serve_workers(port: int) -> asyncio.Server:
    """Answer every request on every loopback address at *port*."""

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
        answer = head + str(len(ANSWER)).encode() + b"\r\n\r\n" + ANSWER
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    return await asyncio.start_server(on_connect, "0.0.0.0", port, backlog=4096)


def addresses() -> Iterator[str]:
    """Yield loopback addresses that nobody has."""
    for n in itertools.count(1):
        yield f"127.{1 + (n >> 16)}.{n >> 8 & 255}.{n & 255}"


async def timed_requests(
    session: aiohttp.ClientSession, base: str, stop: asyncio.Event
) -> list[float]:
    """Send requests one after the other until *stop*; return the seconds each took."""
    taken = []
    while not stop.is_set():
        started = time.perf_counter()
        async with session.get(f"{base}/version") as response:
            await response.read()
            assert response.status == 200, response.status
        taken.append(time.perf_counter() - started)
    return taken


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return sorted(seconds)[int(share * (len(seconds) - 1))] * 1e3


class Stack:
    """A router before many workers."""

    def __init__(self, directory: Path, count: int) -> None:
        self.port, self.worker_port = free_ports(2)
        self.base = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._fresh = addresses()
        urls = [self.next_url() for _ in range(count)]
        (directory / "workers.json").write_text(json.dumps(urls))
        self.count = count
        self.children: dict[str, Child] = {}

    def next_url(self) -> str:
        """Return a worker that is not there yet."""
        return f"http://{next(self._fresh)}:{self.worker_port}"

    async def start(self) -> float:
        """Start the router; return the seconds until all workers may be picked."""
        command = [sys.executable, "-P", "-m", "extproc", "launch", "--prometheus-port", "0"]
        command += ["--port", str(self.port), "--policy", "round_robin", "--log-level", "error"]
        command += ["--worker-file", str(self._directory / "workers.json")]
        started = time.perf_counter()
        self.children["router"] = await Child.start("router", command, quiet=True)
        async with aiohttp.ClientSession() as session:

            async def up() -> bool:
                try:
                    async with session.get(f"{self.base}/readiness") as response:
                        state = await response.json()
                        return bool(state.get("healthy_workers") == self.count)
                except aiohttp.ClientError:
                    return False

            await until(up, self.children, self._directory)
        return time.perf_counter() - started

    def service_pid(self) -> int:
        """Return the process of the service."""
        router = self.children["router"].pid
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == router and b"serve" in command:
                return int(path.name)
        raise RuntimeError("the service is not running")

    async def stop(self) -> None:
        """Stop the router."""
        await self.children["router"].stop(20.0)


async def with_envoy(console: Console) -> None:
    """Print the second table."""
    table = Table(title="The router with a real Envoy, round_robin", title_justify="left")
    for name in (
        "workers",
        "start, s",
        "add to pick, ms",
        "CPU of add + remove, ms",
        "request p50 / p99, ms",
        "amid changes, ms",
    ):
        table.add_column(name, justify="right")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("with Envoy", total=len(COUNTS))
        for count in COUNTS:
            with tempfile.TemporaryDirectory(prefix="bench-registry-") as directory:
                table.add_row(str(count), *await one_size(Path(directory), count))
            progress.advance(task)
    console.print(table)


async def one_size(directory: Path, count: int) -> list[str]:
    """Measure a router before *count* workers."""
    stack = Stack(directory, count)
    server = await serve_workers(stack.worker_port)
    try:
        start_s = await stack.start()
        limit = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=limit) as session:
            quiet = await under_requests(session, stack.base, asyncio.sleep(3))
            pid = stack.service_pid()
            adds: list[float] = []

            async def change() -> None:
                for _ in range(REPEATS):
                    url = stack.next_url()
                    started = time.perf_counter()
                    async with session.post(
                        f"{stack.base}/workers?wait=1", json={"url": url}
                    ) as response:
                        assert response.status == 200, await response.text()
                    adds.append(time.perf_counter() - started)
                    async with session.delete(f"{stack.base}/workers/{url}") as response:
                        assert response.status == 200, await response.text()

            before = cpu_s(pid)
            await change()
            cpu = (cpu_s(pid) - before) / REPEATS
            amid = await under_requests(session, stack.base, change())
        return [
            f"{start_s:.1f}",
            f"{statistics.median(adds) * 1e3:.0f}",
            f"{cpu * 1e3:.0f}",
            f"{percentile_ms(quiet, 0.5):.2f} / {percentile_ms(quiet, 0.99):.2f}",
            f"{percentile_ms(amid, 0.5):.2f} / {percentile_ms(amid, 0.99):.2f}",
        ]
    finally:
        await stack.stop()
        server.close()


async def under_requests(
    session: aiohttp.ClientSession, base: str, work: Coroutine[None, None, None]
) -> list[float]:
    """Send requests while *work* runs; return the seconds each took."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        senders = [
            tasks.create_task(timed_requests(session, base, stop)) for _ in range(REQUESTS_AT_ONCE)
        ]
        await work
        stop.set()
    return [taken for sender in senders for taken in sender.result()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.registry", description="What a change of workers costs."
    )
    parser.add_argument("--no-envoy", action="store_true", help="only the computation")
    options = parser.parse_args(arguments)
    policy_registry.load_builtin()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    computation(console)
    if not options.no_envoy:
        raise_file_limit()
        asyncio.run(with_envoy(console))
    return 0


if __name__ == "__main__":
    sys.exit(main())
