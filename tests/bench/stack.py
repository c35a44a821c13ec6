"""What is measured: an Envoy, alone or with the service, before the bench's own workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extproc.address import Address
from extproc.child import Child
from extproc.config import Config
from extproc.envoy_binary import find_envoy
from extproc.xds.bootstrap import build_bootstrap, to_yaml
from tests.bench.envoy_config import build_alone, build_upstream
from tests.bench.payload import HEADERS, PATH, chat_body
from tests.bench.processes import STOP_TIMEOUT_S, free_ports, until

WORKERS = 4
PROBE = chat_body(200)


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """One running Envoy; ``service`` is None when it is alone."""

    port: int
    envoy: Child
    service: Child | None = None
    metrics_port: int = 0
    start_s: float = 0.0
    """From the first process to the first 200."""

    async def metric(self, name: str) -> float:
        """Return the sum over all labels of a metric of the service."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            text = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )


@contextlib.asynccontextmanager
async def upstream(directory: Path) -> AsyncIterator[tuple[list[int], Child]]:
    """Run the workers of the load: one Envoy that answers by itself, on several ports."""
    ports = free_ports(WORKERS)
    config = build_upstream(ports, directory / "upstream-admin.sock")
    child = await _start_envoy(directory, "upstream", config)
    try:
        await until(lambda: _answers(ports[-1]), {"upstream": child}, directory)
        yield ports, child
    finally:
        await child.stop(STOP_TIMEOUT_S)


@contextlib.asynccontextmanager
async def sse_upstream(directory: Path) -> AsyncIterator[tuple[list[int], Child]]:
    """Run the workers of the open streams."""
    ports = free_ports(WORKERS)
    command = [sys.executable, "-m", "tests.bench.sse_server", *map(str, ports)]
    child = await Child.start("sse", command)
    try:
        await until(lambda: _answers(ports[-1]), {"sse": child}, directory)
        yield ports, child
    finally:
        await child.stop(STOP_TIMEOUT_S)


@contextlib.asynccontextmanager
async def alone(directory: Path, workers: Sequence[int]) -> AsyncIterator[Stack]:
    """Run Envoy with the same configuration, without the service."""
    (port,) = free_ports(1)
    endpoints = [f"127.0.0.1:{worker}" for worker in workers]
    config = build_alone(Config(port=port), endpoints, directory / "alone-admin.sock")
    started = time.monotonic()
    child = await _start_envoy(directory, "alone", config)
    try:
        await until(lambda: _answers(port), {"envoy": child}, directory)
        yield Stack(port, child, start_s=time.monotonic() - started)
    finally:
        await child.stop(STOP_TIMEOUT_S)


@contextlib.asynccontextmanager
async def routed(directory: Path, workers: Sequence[int], policy: str) -> AsyncIterator[Stack]:
    """Run the service and an Envoy that gets its configuration from it."""
    port, metrics_port = free_ports(2)
    grpc_socket, admin_socket = directory / f"{policy}.sock", directory / f"{policy}-admin.sock"
    config = Config(
        port=port,
        worker_urls=tuple(f"http://127.0.0.1:{worker}" for worker in workers),
        policy=policy if policy != "bench_prompt" else "round_robin",
        prometheus_port=metrics_port,
        grpc_address=f"unix:{grpc_socket}",
        admin_address=f"unix:{admin_socket}",
        log_level="error",
        shutdown_grace_s=1,
    )
    file = directory / f"{policy}.yaml"
    file.write_text(yaml.safe_dump(msgspec.to_builtins(config) | {"policy": policy}))
    bootstrap = build_bootstrap(
        Address(path=str(grpc_socket)), Address(path=str(directory / f"{policy}-envoy.sock"))
    )
    children: dict[str, Child] = {}
    started = time.monotonic()
    try:
        command = [sys.executable, "-m", "tests.bench.serve", "serve", "--config", str(file)]
        children["service"] = await Child.start("service", command)
        await until(lambda: _listens(admin_socket), children, directory)
        children["envoy"] = await _start_envoy(directory, f"{policy}-envoy", bootstrap)
        await until(lambda: _answers(port), children, directory)
        start_s = time.monotonic() - started
        yield Stack(port, children["envoy"], children["service"], metrics_port, start_s)
    finally:
        for child in reversed(children.values()):
            await child.stop(STOP_TIMEOUT_S)


async def _start_envoy(directory: Path, name: str, config: dict[str, Any]) -> Child:
    file = directory / f"{name}-envoy.yaml"
    file.write_text(to_yaml(config))
    return await Child.start(
        name,
        [
            *(str(find_envoy()), "--config-path", str(file), "--concurrency", "1"),
            *("--disable-hot-restart", "--log-level", "error"),
            *("--log-path", str(directory / f"{name}-envoy.log")),
        ],
        quiet=True,
    )


async def _listens(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


async def _answers(port: int) -> bool:
    """Tell whether a chat request gets a 200; only the head of the answer is waited for."""
    timeout = aiohttp.ClientTimeout(total=2)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"http://127.0.0.1:{port}{PATH}", data=PROBE, headers=HEADERS) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
