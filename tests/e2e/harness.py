"""Programs that the end-to-end tests start: the router, simulated workers, an Envoy by hand.

Each runs as a subprocess with its output in files, which are shown when a test fails (``conftest``).
Every wait is bounded, ports are reserved across processes, and whatever is started here ends with
pytest, even when pytest is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

START_LIMIT_S = 40.0
STOP_LIMIT_S = 20.0
WORKERS_LIMIT_S = 20.0
POLL_S = 0.01
HTTP_LIMIT_S = 10.0
OUTPUT_SHOWN_CHARS = 6000

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_reserved: dict[int, int] = {}
_serial = itertools.count(1)

programs: list[Program] = []
"""Started by the test that runs at the moment, or still running; a failure report shows them."""


refused_when_ready: list[str] = []
"""Routers that refused connections right after they had said that they are ready."""


def free_port() -> int:
    """Return a port that nobody uses and that no other test process will be given.

    It lies below the range from which the kernel takes the ports of outgoing connections, of which
    the load tests open thousands. An abstract Unix socket, held until this process ends, reserves it.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000, low) if low > 12_000 else range(5_000, 65_000)
    chooser = random.Random()
    for _ in range(1000):
        port = chooser.choice(ports)
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            reservation.bind(f"\0vllm-extproc-e2e-{port}")
        except OSError:
            reservation.close()
            continue
        if _can_bind(port):
            _reserved[port] = reservation.detach()  # else a warning about each at the end
            return port
        reservation.close()
    raise AssertionError("no free port found")


def _can_bind(port: int) -> bool:
    families = [(socket.AF_INET, "0.0.0.0"), *([(socket.AF_INET6, "::")] if has_ipv6() else [])]
    try:
        for family, host in families:
            with socket.socket(family) as probe:
                probe.bind((host, port))
    except OSError:
        return False
    return True


def has_ipv6() -> bool:
    """Tell whether ``::1`` can be listened on."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def refusing_url() -> str:
    """Return the URL of a worker that refuses every connection, as long as the tests run."""
    return f"http://127.0.0.1:{free_port()}"


def alive(pid: int) -> bool:
    """Tell whether process *pid* runs; one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def children(pid: int) -> list[int]:
    """Return the running processes whose parent is *pid*."""
    return [child for child, parent, _ in _processes() if parent == pid]


def session(pid: int) -> list[int]:
    """Return the running processes of the session that *pid* leads or led."""
    return [member for member, _, leader in _processes() if leader == pid]


def _processes() -> Iterator[tuple[int, int, int]]:
    """Yield pid, parent and session of every running process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, _, leader = path.read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                yield int(path.parent.name), int(parent), int(leader)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of process *pid*."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no VmRSS for {pid}")


def wait_until(condition: Callable[[], Any], limit_s: float, what: str) -> float:
    """Poll *condition* until it holds; return the seconds that took."""
    started = time.monotonic()
    while not condition():
        took = time.monotonic() - started
        assert took < limit_s, f"{what}: not within {limit_s} s"
        time.sleep(POLL_S)
    return time.monotonic() - started


async def until(condition: Callable[[], Any], limit_s: float, what: str) -> float:
    """Poll *condition* until it holds; return the seconds that took."""
    started = time.monotonic()
    while not condition():
        took = time.monotonic() - started
        assert took < limit_s, f"{what}: not within {limit_s} s"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - started


def http_get(url: str) -> tuple[int, str]:
    """Return status and text of a GET."""
    try:
        with _opener.open(url, timeout=HTTP_LIMIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class Program:
    """One subprocess with its output in files of *directory*."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        *,
        env: Mapping[str, str] | None = None,
        soft_file_limit: int | None = None,
        hard_file_limit: int | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._out = directory / f"{name}.out"
        self._err = directory / f"{name}.err"
        self._temporary = Path(tempfile.mkdtemp(prefix="e2e-"))  # short: Unix sockets live in it
        parent = os.getpid()

        def prepare() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)
            if hard_file_limit is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard_file_limit, hard_file_limit))
            if soft_file_limit is not None:
                _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft_file_limit, hard))

        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **(env or {}), "TMPDIR": str(self._temporary)},
                cwd=self._temporary,  # nothing may depend on where it is started
                preexec_fn=prepare,  # noqa: PLW1509  only async-signal-safe calls
                start_new_session=True,
            )
        programs.append(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def describe(self) -> str:
        """Return the end of its output, for a failure report."""
        status = "running" if self.running else f"ended with {self._process.returncode}"
        out, err = self.stdout[-OUTPUT_SHOWN_CHARS:], self.stderr[-OUTPUT_SHOWN_CHARS:]
        return f"{status}\n--- stdout\n{out}\n--- stderr\n{err}"

    def temporary_files(self) -> list[str]:
        """Return what it has left in its temporary directory."""
        return sorted(path.name for path in self._temporary.iterdir())

    @property
    def temporary(self) -> Path:
        """Its temporary directory."""
        return self._temporary

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        """Wait for its end and return the exit status."""
        return self._process.wait(limit_s)

    def check_nothing_left(self) -> None:
        """Check that it has left neither a process nor a file."""
        left = session(self.pid)
        assert not left, f"processes left behind: {left}"
        assert self.temporary_files() == []

    def end(self) -> None:
        """Make sure that it has ended and leave nothing behind."""
        if self.running:
            self.send_signal(signal.SIGTERM)
            try:
                self.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_LIMIT_S)
        for pid in session(self.pid):
            kill(pid, signal.SIGKILL)
        shutil.rmtree(self._temporary, ignore_errors=True)


def kill(pid: int, number: int) -> None:
    """Send a signal to a process of ours that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Metrics:
    """One reading of the Prometheus endpoint."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def __call__(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of ``vllm_extproc_<name>`` that carry *labels*."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == f"vllm_extproc_{name}"
            and labels.items() <= dict(sample.labels).items()
        )

    def names(self) -> set[str]:
        return {sample.name for sample in self._samples}


class Router(Program):
    """``vllm-extproc launch`` on ports of its own."""

    def __init__(
        self,
        worker_urls: Sequence[str],
        directory: Path,
        *flags: str,
        host: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        soft_file_limit: int | None = None,
        hard_file_limit: int | None = None,
        ports: tuple[int, int] | None = None,
    ) -> None:
        self.host = host
        self._workers = len(worker_urls)
        self.port, self.metrics_port = ports or (free_port(), free_port())
        super().__init__(
            f"router-{self.port}-{next(_serial)}",
            [
                *(sys.executable, "-m", "extproc", "launch"),
                *("--host", host, "--port", str(self.port)),
                *("--prometheus-port", str(self.metrics_port)),
                *("--shutdown-delay-s", "0"),  # a second for each of hundreds of routers adds up
                *(("--worker-urls", *worker_urls) if worker_urls else ()),
                *flags,
            ],
            directory,
            env=env,
            soft_file_limit=soft_file_limit,
            hard_file_limit=hard_file_limit,
        )

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def grpc_socket(self) -> str:
        """The Unix socket of the service, as gRPC names it."""
        (directory,) = self.temporary.glob("vllm-extproc-*")
        return f"unix:{directory / 'extproc.sock'}"

    def events(self) -> list[dict[str, Any]]:
        """Return the log entries of launcher and service so far."""
        found = []
        for line in self.stderr.splitlines():
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def logged(self, event: str, **keys: object) -> list[dict[str, Any]]:
        """Return the log entries *event* that have these keys."""
        return [
            entry
            for entry in self.events()
            if entry.get("event") == event and keys.items() <= entry.items()
        ]

    def until_ready(self, *, healthy: bool = True, workers: int | None = None) -> Router:
        """Wait until the router says that it is ready, and until *workers* of its workers may be picked.

        *healthy*: False when no worker is going to be healthy; then the router need only listen.
        *workers*: None means all that were named by flags; 0: as many as the router itself waits for.
        """
        said = "router ready" if healthy else "router listening"

        def ready() -> bool:
            assert self.running, f"the router ended\n{self.describe()}"
            return bool(self.logged(said))

        wait_until(ready, START_LIMIT_S, said)
        if not self._accepts():
            refused_when_ready.append(self.name)
            wait_until(self._accepts, 5, "the router accepts connections")
        wanted = self._workers if workers is None else workers
        if healthy and wanted:
            self.until_workers(wanted)
        return self

    def until_workers(self, count: int, limit_s: float = WORKERS_LIMIT_S) -> float:
        """Wait until *count* workers may be picked; return the seconds that took."""

        def there() -> bool:
            metrics = self.serving_metrics()
            return metrics is not None and metrics("workers") == count

        return wait_until(there, limit_s, f"{count} workers that may be picked")

    def _accepts(self) -> bool:
        host = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1"}.get(self.host, self.host)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.settimeout(HTTP_LIMIT_S)
            return probe.connect_ex((host, self.port)) == 0

    def child_pid(self, name: str) -> int:
        """Return the process id of ``service`` or ``envoy``, the latest one."""
        pid = 0
        for entry in self.events():
            if entry.get("event") == "router ready":
                pid = entry[name]
            elif entry.get("event") == "child started" and entry.get("child") == name:
                pid = entry["pid"]
        assert pid, f"{name} was not started"
        return pid

    @property
    def service_pid(self) -> int:
        return self.child_pid("service")

    @property
    def envoy_pid(self) -> int:
        return self.child_pid("envoy")

    def kill_service(self) -> None:
        """Kill the service with -9."""
        os.kill(self.service_pid, signal.SIGKILL)

    def kill_envoy(self) -> None:
        """Kill Envoy with -9."""
        os.kill(self.envoy_pid, signal.SIGKILL)

    @contextlib.contextmanager
    def service_stopped(self) -> Iterator[None]:
        """Let the service hang."""
        pid = self.service_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            kill(pid, signal.SIGCONT)

    def metrics(self) -> Metrics:
        """Read the metrics."""
        status, text = http_get(f"http://127.0.0.1:{self.metrics_port}/metrics")
        assert status == 200
        return Metrics(text)

    def serving_metrics(self) -> Metrics | None:
        """Read the metrics, None while the service is away."""
        try:
            return self.metrics()
        except OSError:
            return None

    def in_flight(self) -> float:
        """Return the requests under way; the workers' own figures must add up to it."""
        metrics = self.metrics()
        total = metrics("in_flight")
        assert metrics("worker_in_flight") == total
        return total

    def decisions(self) -> float:
        """Return the picks made since the service started."""
        return self.metrics()("decisions_total", result="routed")

    async def until_serving(self, limit_s: float = 10.0) -> None:
        """Wait until clients can connect and the router calls itself ready."""

        def serving() -> bool:
            try:
                return http_get(f"{self.base_url}/readiness")[0] == 200
            except OSError:
                return False

        await until(serving, limit_s, "router serving")

    async def until_idle(self, limit_s: float = 5.0) -> float:
        """Wait until nothing is in flight; return the seconds that took."""
        return await until(lambda: self.in_flight() == 0, limit_s, "in-flight back to 0")

    def stop(self, number: int = signal.SIGTERM, limit_s: float = STOP_LIMIT_S) -> None:
        """End it as a user does, and check that it leaves nothing."""
        if self.running:
            self.send_signal(number)
        status = self.wait(limit_s)
        assert status == 0, f"the router ended with {status}"
        self.check_nothing_left()


class Sim(Program):
    """``vllm-extproc sim-worker``."""

    def __init__(
        self, directory: Path, *flags: str, host: str = "127.0.0.1", port: int | None = None
    ) -> None:
        self.port = free_port() if port is None else port
        self.host = host
        super().__init__(
            f"sim-{self.port}-{next(_serial)}",
            [
                *(sys.executable, "-m", "extproc", "sim-worker"),
                *("--host", host, "--port", str(self.port), "--name", self.worker_name),
                *flags,
            ],
            directory,
        )

    @property
    def worker_name(self) -> str:
        """What it calls itself in its answers."""
        return f"sim-{self.port}"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def until_ready(self) -> Sim:
        def ready() -> bool:
            assert self.running, f"the simulated worker ended\n{self.describe()}"
            return "ready on" in self.stdout

        wait_until(ready, START_LIMIT_S, "simulated worker ready")
        return self

    def state(self) -> dict[str, Any]:
        """Return what the worker says of itself."""
        return json.loads(http_get(f"{self.url}/_sim/state")[1])

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests that arrived."""
        return json.loads(http_get(f"{self.url}/_sim/requests")[1])["requests"]
