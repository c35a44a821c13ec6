"""A Pod that ends, with the chart's own hooks: streams finish, new clients go elsewhere.

Both containers are processes here, on the files that the chart renders; what Kubernetes does is done by hand: the
hooks of both at the same moment, SIGTERM when a container's own hook is done.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.envoy_binary import find_envoy
from tests.e2e.client import Connection
from tests.e2e.harness import Program, free_port, http_get, until, wait_until
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, unique_path
from tests.helm.chart import Helm, container, one, service_config

pytestmark = [pytest.mark.helm, pytest.mark.envoy, pytest.mark.slow]

DELAY_S = 1
GRACE_S = 30
START_S = 40
END_S = 20


class Pod:
    """Both containers, in a directory that stands for the shared volume."""

    def __init__(self, helm: Helm, url: str, logs: Path) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        objects = helm.render(
            "--set",
            f"discovery.enabled=false,config.worker_urls={{{url}}},listenAddress=127.0.0.1,"
            f"ports.http={self.port},ports.metrics={self.metrics_port},"
            f"shutdown.delaySeconds={DELAY_S},shutdown.graceSeconds={GRACE_S}",
        )
        self.directory = Path(tempfile.mkdtemp(prefix="pod-"))  # short: sockets live in it
        self._logs = logs
        self.config = self.directory / "config.yaml"
        self.config.write_text(self._here(yaml.safe_dump(service_config(objects))))
        (self.directory / "envoy.yaml").write_text(
            self._here(one(objects, "ConfigMap")["data"]["envoy.yaml"])
        )
        self._containers = {name: container(objects, name) for name in ("extproc", "envoy")}
        self.programs = {name: self.start(name) for name in self._containers}

    def _here(self, text: str) -> str:
        """Return *text* with the paths and the programs of this machine instead of those of the Pod."""
        places = {
            "/var/run/vllm-extproc": str(self.directory),
            "/etc/vllm-extproc/config/config.yaml": str(self.config),
            "/etc/envoy/envoy.yaml": str(self.directory / "envoy.yaml"),
            "exec vllm-extproc": f"exec {sys.executable} -m extproc",
        }
        for there, here in places.items():
            text = text.replace(there, here)
        return text

    def start(self, name: str) -> Program:
        found = self._containers[name]
        command = {
            "extproc": [sys.executable, "-m", "extproc"],
            "envoy": [str(find_envoy())],
        }[name]
        arguments = [self._here(argument) for argument in found["args"]]
        return Program(name, [*command, *arguments], self._logs)

    def hook(self, name: str) -> Program:
        """Begin the ``preStop`` of a container."""
        command = [
            self._here(word)
            for word in self._containers[name]["lifecycle"]["preStop"]["exec"]["command"]
        ]
        # In its container the service is process 1.
        pid = self.programs["extproc"].pid
        command[-1] = command[-1].replace("--service-pid 1 ", f"--service-pid {pid} ")
        return Program(f"hook-{name}", command, self._logs)

    def container(self, name: str) -> dict[str, Any]:
        return self._containers[name]

    def files(self) -> set[str]:
        names = ("envoy-stops", "service-stops", "drained")
        return {name for name in names if (self.directory / name).exists()}

    def readiness(self) -> int | None:
        try:
            return http_get(f"http://127.0.0.1:{self.port}/readiness")[0]
        except OSError:
            return None

    def end(self) -> None:
        for program in self.programs.values():
            program.end()
        shutil.rmtree(self.directory)


@pytest.fixture
def worker() -> Iterator[RawWorker]:
    worker = RawWorker().start()
    yield worker
    worker.stop()


@pytest.fixture
def pod(helm: Helm, worker: RawWorker, tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(helm, worker.urls[0], tmp_path)
    try:
        wait_until(lambda: pod.readiness() == 200, START_S, "the Pod is ready")
        yield pod
    finally:
        pod.end()


NEXT_CONFIGS = {
    "the same": None,
    "an option that this version does not know": "option_of_the_next_version: 1\n",
    "that of another mode": "grpc_address: 0.0.0.0:9002\n",
    "one that is complete with the new Pod's flags only": "selector: [app=vllm]\n",
    "no YAML": "{\n",
}
"""What the ConfigMap holds when a Pod ends: in a rolling update it is that of the next Pods already."""


@pytest.mark.parametrize("config", NEXT_CONFIGS)
async def test_stream_under_way_finishes_before_the_pod_ends(
    pod: Pod, worker: RawWorker, config: str
):
    """`/readiness` fails first, then the listener is closed, and both hooks wait for the stream."""
    if NEXT_CONFIGS[config] is not None:
        pod.config.write_text(NEXT_CONFIGS[config])
    go_on = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nfirst")
        await go_on.wait()
        await stream.send(b"-last")

    path = worker.on(unique_path(), answer)
    async with Connection(pod.port) as busy:
        await busy.send("GET", path)
        head = await busy.head()
        hooks = {name: pod.hook(name) for name in ("envoy", "extproc")}
        await until(lambda: pod.readiness() == 503, END_S, "the probe fails")
        await until(lambda: pod.readiness() is None, END_S, "new connections are refused")

        assert all(hook.running for hook in hooks.values())
        assert all(program.running for program in pod.programs.values())
        go_on.set()
        body = await busy.body()

    assert (head.status, body) == (200, b"first-last")
    for name, hook in hooks.items():
        assert await asyncio.to_thread(hook.wait, END_S) == 0
        program = pod.programs[name]
        program.send_signal(15)
        assert await asyncio.to_thread(program.wait, END_S) in (0, -15)


@pytest.mark.parametrize("name", ["envoy", "extproc"])
async def test_container_that_is_restarted_alone_leaves_the_other_one_serving(pod: Pod, name: str):
    """A failed liveness probe runs the hook of one container; Envoy's listener must not be closed for that."""
    hook = pod.hook(name)

    assert await asyncio.to_thread(hook.wait, END_S) == 0
    assert pod.files() == set()
    assert pod.readiness() == 200


async def test_service_that_hangs_leaves_the_pod_ready(pod: Pod):
    """Envoy balances by itself then, and says so before the kubelet gives up; a fault of all Pods empties no Service."""
    probe_s = pod.container("envoy")["readinessProbe"]["timeoutSeconds"]
    pod.programs["extproc"].send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            started = time.monotonic()
            status = await asyncio.to_thread(pod.readiness)

            assert status == 200
            assert time.monotonic() - started < probe_s - 1
    finally:
        pod.programs["extproc"].send_signal(signal.SIGCONT)
