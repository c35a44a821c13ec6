"""The load generator for machines without wrk: one process, keep-alive HTTP/1.1, closed loop.

``python -m tests.bench.client HOST PORT CLIENTS SECONDS BODY_FILE`` prints what ``wrk.lua`` prints.
It costs several times the CPU of wrk, so rates and latencies of many clients come out worse.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import uvloop

from tests.bench.payload import raw_request

_LENGTH = b"content-length:"


async def run(host: str, port: int, clients: int, seconds: float, body: bytes) -> dict[str, float]:
    """Keep *clients* requests under way for *seconds*; return the figures."""
    request = raw_request(f"{host}:{port}", body)
    latencies: list[float] = []
    errors = 0
    clock = time.perf_counter

    async def client(end: float) -> None:
        nonlocal errors
        while clock() < end:
            try:
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    while (started := clock()) < end:
                        writer.write(request)
                        if await read_response(reader) == 200:
                            latencies.append(clock() - started)
                        else:
                            errors += 1
                finally:
                    writer.close()
            except (OSError, EOFError):
                errors += 1

    started = clock()
    async with asyncio.timeout(seconds + 10), asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client(started + seconds))
    duration_s = clock() - started
    latencies.sort()
    return {
        "requests": len(latencies),
        "duration_s": duration_s,
        "p50_ms": percentile(latencies, 0.5) * 1e3,
        "p99_ms": percentile(latencies, 0.99) * 1e3,
        "errors": errors,
    }


def percentile(ordered: list[float], ratio: float) -> float:
    """Return the value below which *ratio* of *ordered* lies; 0 when there is none."""
    return ordered[min(int(len(ordered) * ratio), len(ordered) - 1)] if ordered else 0.0


async def read_response(reader: asyncio.StreamReader) -> int:
    """Read one response with a content length; return its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    position = head.index(_LENGTH) + len(_LENGTH)
    await reader.readexactly(int(head[position : head.index(b"\r\n", position)]))
    return int(head[9:12])


if __name__ == "__main__":
    host, port, clients, seconds, path = sys.argv[1:]
    figures = uvloop.run(
        run(host, int(port), int(clients), float(seconds), Path(path).read_bytes())
    )
    print(json.dumps(figures))
