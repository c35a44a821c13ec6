"""A Kubernetes cluster as the scenarios see it: kubectl, helm, and HTTP to an address of a node."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "vllm-extproc"
VALUES = Path(__file__).parent / "values.yaml"
IMAGE = "localhost/vllm-extproc:e2e"
"""The router's image, as values.yaml names it."""

ENGINE_IMAGE = "localhost/vllm-engine:e2e"
"""The same with a program `vllm`, which is a simulated worker."""

NAMESPACE = "inference"
RELEASE = "router"
NAME = "router-vllm-extproc"
COMMAND_S = 180.0
WAIT_S = 120.0
HELM_WAIT = "120s"


class CommandError(Exception):
    """kubectl or helm refused."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """What a backend provides."""

    kubectl: str
    helm: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables besides this process's own, such as KUBECONFIG."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One event of a watch on Pods."""

    at: float
    """When it was read, on the clock of ``time.monotonic``."""

    kind: str
    pod: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def ready(self) -> bool:
        return is_ready(self.pod)


def is_ready(pod: dict[str, Any]) -> bool:
    """Tell whether a Pod is ready and not about to end."""
    conditions = pod["status"].get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


class Cluster:
    """Use ``async with``: the API server is reached through a `kubectl proxy` of its own."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._environment = {**os.environ, **programs.environment}
        self._api = ""
        self.url = ""
        """Where the release's Service answers, once it is installed."""

    async def __aenter__(self) -> Self:
        self._proxy = await asyncio.create_subprocess_exec(
            *(self._programs.kubectl, "proxy", "--port=0", "--address=127.0.0.1"),
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._proxy.stdout is not None
        line = await asyncio.wait_for(self._proxy.stdout.readline(), WAIT_S)
        found = re.search(rb"127\.0\.0\.1:\d+", line)
        if found is None:
            if self._proxy.returncode is None:
                self._proxy.kill()
            raise CommandError(f"kubectl proxy says {line!r}")
        self._api = f"http://{found.group().decode()}"
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=COMMAND_S), read_bufsize=1 << 22
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.close()
        self._proxy.terminate()
        await self._proxy.wait()

    async def kubectl(self, *arguments: str) -> str:
        """Run kubectl in the release's namespace and return what it prints."""
        return await self._run(self._programs.kubectl, f"--namespace={NAMESPACE}", *arguments)

    async def helm(self, *arguments: str) -> str:
        """Run helm in the release's namespace and return what it prints."""
        return await self._run(self._programs.helm, f"--namespace={NAMESPACE}", *arguments)

    async def _run(self, *command: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, error = await asyncio.wait_for(process.communicate(), COMMAND_S)
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            raise CommandError(f"{' '.join(command)}: {error.decode().strip()[-1000:]}")
        return out.decode()

    async def install(self, *arguments: str) -> None:
        """Install the chart, or change its values, and wait until everything is ready."""
        await self.helm(
            *("upgrade", "--install", RELEASE, str(CHART), "--create-namespace"),
            *("--values", str(VALUES), *arguments, "--wait", "--timeout", HELM_WAIT),
        )
        await self.settle()
        service = await self.get(f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}")
        nodes = await self.get("/api/v1/nodes")
        addresses = nodes["items"][0]["status"]["addresses"]
        address = next(a["address"] for a in addresses if a["type"] == "InternalIP")
        self.url = f"http://{address}:{service['spec']['ports'][0]['nodePort']}"

    async def get(self, path: str) -> Any:
        """Return what the API server says about *path*."""
        async with self._http.get(self._api + path) as response:
            if response.status != 200:
                raise CommandError(f"{path}: {response.status} {await response.text()}")
            return await response.json()

    async def pods(self, component: str = "") -> list[dict[str, Any]]:
        """Return the release's Pods of *component* that are not about to end, oldest first."""
        selector = f"app.kubernetes.io/instance={RELEASE}"
        if component:
            selector += f",app.kubernetes.io/component={component}"
        found = await self.get(
            f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector.replace('=', '%3D')}"
        )
        alive = [pod for pod in found["items"] if "deletionTimestamp" not in pod["metadata"]]
        return sorted(alive, key=lambda pod: (pod["metadata"]["creationTimestamp"], name_of(pod)))

    async def delete_pod(self, name: str, *, grace_s: int | None = None) -> float:
        """Delete a Pod; return when the request for it was sent, on the clock of ``time.monotonic``."""
        options = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        at = time.monotonic()
        path = f"{self._api}/api/v1/namespaces/{NAMESPACE}/pods/{name}"
        async with self._http.delete(path, json=options) as response:
            if response.status != 200:
                raise CommandError(f"DELETE {name}: {response.status} {await response.text()}")
        return at

    async def scale(self, deployment: str, replicas: int) -> None:
        """Set the number of Pods of a Deployment, and do not wait for it."""
        await self.kubectl("scale", "deployment", deployment, f"--replicas={replicas}")

    async def settle(self) -> None:
        """Wait until all Pods of the release are ready, as many as wanted, and none is about to end."""

        async def settled() -> bool:
            pods = await self.get(
                f"/api/v1/namespaces/{NAMESPACE}/pods"
                f"?labelSelector=app.kubernetes.io/instance%3D{RELEASE}"
            )
            wanted = 0
            for kind in ("deployments", "statefulsets"):
                found = await self.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/{kind}")
                for item in found["items"]:
                    if item["status"].get("observedGeneration") != item["metadata"]["generation"]:
                        return False
                    wanted += item["spec"]["replicas"]
            return len(pods["items"]) == wanted and all(map(is_ready, pods["items"]))

        await until(settled, WAIT_S, "all Pods are ready")

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[list[Change]]:
        """Collect what happens to the Pods of the namespace, beginning with what there is."""
        changes: list[Change] = []
        begun = asyncio.Event()

        async def read() -> None:
            path = f"{self._api}/api/v1/namespaces/{NAMESPACE}/pods?watch=true"
            no_limit = aiohttp.ClientTimeout(total=None)
            async with self._http.get(path, timeout=no_limit) as response:
                begun.set()
                async for line in response.content:
                    event = json.loads(line)
                    changes.append(Change(time.monotonic(), event["type"], event["object"]))

        async with asyncio.TaskGroup() as group:
            reader = group.create_task(read())
            try:
                await asyncio.wait_for(begun.wait(), WAIT_S)
                yield changes
            finally:
                reader.cancel()


def name_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


async def until(done: Callable[[], Any], timeout_s: float, what: str) -> None:
    """Wait until *done*, or what it returns when awaited, is true; TimeoutError names *what*."""
    end = time.monotonic() + timeout_s
    while True:
        result = done()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"not after {timeout_s:.0f} s: {what}")
        await asyncio.sleep(0.1)
