"""Memory with many open streams: before, while they are open, and after they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time

from extproc.child import Child
from tests.bench.payload import raw_request
from tests.bench.processes import Memory, memory
from tests.bench.stack import Stack

DESCRIPTORS_PER_STREAM = 2
"""In Envoy: the client's connection and the worker's. ext_proc streams share one."""

SPARE_DESCRIPTORS = 500
OPENING_AT_ONCE = 64
TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Memory of the processes of one stack."""

    policy: str
    """Empty: Envoy alone."""

    streams: int
    open_s: float
    """Until each had its first event, 64 at a time."""

    start_s: float
    """From the first process to the first 200."""

    envoy_idle: Memory
    envoy_open: Memory
    envoy_after: Memory
    service_idle: Memory | None = None
    service_open: Memory | None = None
    service_after: Memory | None = None
    leases_open: int = 0
    leases_after: int = 0


def fitting(streams: int, file_limit: int) -> int:
    """Return how many of *streams* fit in *file_limit* open files per process."""
    return min(streams, (file_limit - SPARE_DESCRIPTORS) // DESCRIPTORS_PER_STREAM)


async def hold(policy: str, stack: Stack, sse: Child, streams: int, body: bytes) -> Held:
    """Open *streams* streams through *stack*, look, and end them."""
    request = raw_request(f"127.0.0.1:{stack.port}", body)
    idle = _memories(stack)
    writers: list[asyncio.StreamWriter] = []
    turn = asyncio.Semaphore(OPENING_AT_ONCE)

    async def open_one() -> None:
        async with turn:
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
            writers.append(writer)
            writer.write(request)
            await reader.readuntil(b"\n\n")

    started = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            for _ in range(streams):
                tasks.create_task(open_one())
        open_s = time.monotonic() - started
        await asyncio.sleep(0.5)
        opened, leases_open = _memories(stack), await _leases(stack)
        os.kill(sse.pid, signal.SIGUSR1)
        await _until_ended(stack)
    finally:
        for writer in writers:
            writer.close()
    await asyncio.sleep(0.5)
    after = _memories(stack)
    return Held(
        policy=policy,
        streams=streams,
        open_s=open_s,
        start_s=stack.start_s,
        envoy_idle=idle[0],
        envoy_open=opened[0],
        envoy_after=after[0],
        service_idle=idle[1],
        service_open=opened[1],
        service_after=after[1],
        leases_open=leases_open,
        leases_after=await _leases(stack),
    )


def _memories(stack: Stack) -> tuple[Memory, Memory | None]:
    return memory(stack.envoy.pid), memory(stack.service.pid) if stack.service else None


async def _leases(stack: Stack) -> int:
    return int(await stack.metric("vllm_extproc_in_flight")) if stack.service else 0


async def _until_ended(stack: Stack) -> None:
    with contextlib.suppress(TimeoutError):  # leases that stay show up in the figures
        async with asyncio.timeout(10):
            while await _leases(stack):  # noqa: ASYNC110 - another process knows
                await asyncio.sleep(0.1)
