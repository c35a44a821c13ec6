"""Two thousand Pods, and versions that are gone, without a router around."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from extproc.config import Config
from extproc.discovery import kubernetes, kubernetes_client, pod_watch
from extproc.discovery.pod_watch import Sync
from extproc.discovery.updates import Add, Remove, Reset, WorkerSpec
from tests.e2e.harness import rss_bytes
from tests.k8s.api_server import ApiServer
from tests.k8s.proxy import Proxy

pytestmark = pytest.mark.slow

PODS = 2000
LIMIT_S = 60.0
TICK_S = 0.002
FILLER = {f"example.com/filler-{n}": "x" * 1000 for n in range(8)}
"""Real Pods are written with 10 KB and more."""


class Followed:
    """What a router would know; how long others had to wait meanwhile."""

    def __init__(self, options: Config) -> None:
        self.sync = Sync()
        self.workers: dict[str, WorkerSpec] = {}
        self.updates: list[Any] = []
        self.lag_s = 0.0
        self._options = options

    async def run(self) -> None:
        source = kubernetes.watch(
            self._options,
            sync=self.sync,
            report=lambda *_: None,
            report_pod=lambda *_: None,
            clock=time.time,
        )
        async for update in source:
            self.updates.append(update)
            match update:
                case Reset(workers):
                    self.workers = {spec.key: spec for spec in workers}
                case Add(worker):
                    self.workers[worker.key] = worker
                case Remove(key):
                    self.workers.pop(key, None)

    async def tick(self) -> None:
        """Measure by how much a short sleep is longer than it should."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.lag_s = max(self.lag_s, time.perf_counter() - began - TICK_S)

    async def until(self, count: int) -> float:
        """Wait until there are *count* workers; return the seconds that took."""
        began = time.perf_counter()
        async with asyncio.timeout(LIMIT_S):
            while len(self.workers) != count or not self.updates:  # noqa: ASYNC110  a test's wait
                await asyncio.sleep(TICK_S)
        return time.perf_counter() - began


def address(number: int) -> str:
    return f"10.1.{number // 250}.{number % 250 + 1}"


def in_parallel(count: int, do) -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(do, range(count)):
            pass


async def test_two_thousand_pods(server: ApiServer, namespace: str, kubeconfig: Path) -> None:
    """They are there within seconds and a few megabytes, and nobody waits long meanwhile."""
    template = {"apiVersion": "v1", "kind": "Pod"}
    path = f"/api/v1/namespaces/{namespace}/pods"

    def make(number: int) -> None:
        name = f"p{number}"
        metadata = {"name": name, "labels": {"app": "vllm"}, "annotations": FILLER}
        spec = {"containers": [{"name": "vllm", "image": "vllm"}], "nodeName": "n"}
        server.do("POST", path, {**template, "metadata": metadata, "spec": spec})
        status = {
            "phase": "Running",
            "podIP": address(number),
            "podIPs": [{"ip": address(number)}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        server.do("PATCH", f"{path}/{name}/status", {"status": status}, kind="application/merge-patch+json")  # fmt: skip

    began = time.monotonic()
    await asyncio.to_thread(in_parallel, PODS, make)
    print(f"{PODS} Pods made in {time.monotonic() - began:.0f} s")
    options = Config(
        service_discovery=True,
        selector=("app=vllm",),
        service_discovery_namespace=namespace,
        kubeconfig=str(kubeconfig),
        service_discovery_list_interval_secs=5,
    )
    client = await kubernetes_client.make_client(
        str(kubeconfig)
    )  # what it needs itself does not count
    await client.close()
    gc.collect()
    gc.freeze()  # as the service does: what pytest has imported is not what is measured
    rss = rss_bytes(_pid())
    followed = Followed(options)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(followed.run()), tasks.create_task(followed.tick())]
        cpu = time.process_time()
        took_s = await followed.until(PODS)
        print(
            f"list: {took_s:.2f} s, CPU {time.process_time() - cpu:.2f} s, lag {followed.lag_s * 1000:.0f} ms,"
            f" memory {(rss_bytes(_pid()) - rss) / 2**20:.0f} MB"
        )
        assert took_s < 10
        assert followed.lag_s < 0.1
        assert (rss_bytes(_pid()) - rss) < 60 * 2**20
        assert len(followed.updates) == 1

        followed.lag_s = 0
        lists = followed.sync.requests["list", "ok"]
        cpu = time.process_time()
        async with asyncio.timeout(LIMIT_S):
            while followed.sync.requests["list", "ok"] < lists + PODS / kubernetes.PAGE_PODS:  # noqa: ASYNC110
                await asyncio.sleep(TICK_S)
        print(
            f"another list: CPU {time.process_time() - cpu:.2f} s, lag {followed.lag_s * 1000:.0f} ms"
        )
        assert len(followed.updates) == 1  # it told nothing new
        assert followed.lag_s < 0.1

        followed.lag_s = 0
        cpu = time.process_time()
        began = time.monotonic()
        body = {"gracePeriodSeconds": 0}
        deleting = asyncio.to_thread(
            in_parallel, PODS // 2, lambda n: server.do("DELETE", f"{path}/p{n}", body)
        )
        _, _ = await asyncio.gather(deleting, followed.until(PODS // 2))
        print(
            f"{PODS // 2} deleted: {time.monotonic() - began:.1f} s with those who deleted, lag"
            f" {followed.lag_s * 1000:.0f} ms"
        )
        for task in running:
            task.cancel()


async def test_a_version_that_is_gone_is_said_by_the_stream(
    server: ApiServer, namespace: str, tmp_path: Path, monkeypatch
) -> None:
    """410 Gone, as a server says it that has been started anew: the list tells what was missed."""
    monkeypatch.setattr(pod_watch, "MAX_BACKOFF_S", 0.5)
    pods = [server.add_pod(namespace, f"p{n}", address(n)) for n in range(2)]
    with Proxy(server.port) as proxy:
        options = Config(
            service_discovery=True,
            selector=("app=vllm",),
            service_discovery_namespace=namespace,
            kubeconfig=str(server.kubeconfig(tmp_path / "kubeconfig", port=proxy.port)),
        )
        followed = Followed(options)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(followed.run())
            await followed.until(2)
            proxy.cut()
            pods[1].delete()
            server.add_pod(namespace, "p2", address(2))
            await asyncio.to_thread(server.stop)
            server.start()
            proxy.open()
            keys = {f"http://{address(n)}" for n in (0, 2)}
            async with asyncio.timeout(LIMIT_S):
                while followed.workers.keys() != keys:  # noqa: ASYNC110  a test's wait
                    await asyncio.sleep(TICK_S)
            assert followed.sync.requests["watch", "gone"] == 1
            assert followed.sync.requests["list", "ok"] == 2
            running.cancel()


async def test_events_that_come_twice(
    server: ApiServer, namespace: str, kubeconfig: Path, monkeypatch
) -> None:
    """A watch from an earlier version repeats what the list has told already: nothing follows from it."""
    take = pod_watch.Follower.on_page

    def earlier(follower, page, now):
        listed = take(follower, page, now)
        follower._version = versions[0]
        return listed

    monkeypatch.setattr(pod_watch.Follower, "on_page", earlier)
    body = server.do("GET", f"/api/v1/namespaces/{namespace}/pods")
    versions = [body["metadata"]["resourceVersion"]]
    for n in range(3):
        server.add_pod(namespace, f"p{n}", address(n))
    gone = server.add_pod(namespace, "gone", address(9))
    gone.delete()
    options = Config(
        service_discovery=True,
        selector=("app=vllm",),
        service_discovery_namespace=namespace,
        kubeconfig=str(kubeconfig),
        service_discovery_watch_timeout_secs=1,
    )
    followed = Followed(options)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(followed.run())
        async with asyncio.timeout(LIMIT_S):
            while followed.sync.requests["watch", "ok"] < 1:  # noqa: ASYNC110  a test's wait
                await asyncio.sleep(TICK_S)
        running.cancel()

    assert followed.workers.keys() == {f"http://{address(n)}" for n in range(3)}


def _pid() -> int:
    return int(Path("/proc/self/stat").read_text().split()[0])


def test_the_filler_makes_pods_as_large_as_real_ones() -> None:
    """Else the figures mean nothing."""
    assert len(json.dumps(FILLER)) > 8000
