"""Load: one run of wrk, or of the bundled client, against one port."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import signal
import sys
from pathlib import Path

import msgspec

from tests.bench.payload import HEADERS, PATH

GET_WRK = "apt-get install wrk"
_SCRIPT = Path(__file__).with_name("wrk.lua")


class Load(msgspec.Struct, frozen=True):
    """What the clients saw."""

    requests: int
    duration_s: float
    p50_ms: float
    p99_ms: float
    errors: int

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.requests / self.duration_s


def choose_client(wanted: str) -> str:
    """Return ``wrk`` or ``asyncio`` for *wanted*, which may also be ``auto``."""
    if wanted == "auto":
        return "wrk" if shutil.which("wrk") else "asyncio"
    if wanted == "wrk" and not shutil.which("wrk"):
        raise SystemExit(f"wrk is not installed; get it with: {GET_WRK}")
    return wanted


async def run_load(client: str, port: int, *, clients: int, seconds: float, body: Path) -> Load:
    """Keep *clients* requests under way for *seconds*."""
    if client == "wrk":
        return await _run_wrk(port, clients, seconds, body)
    arguments = ["127.0.0.1", str(port), str(clients), str(seconds), str(body)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.client", *arguments, stdout=asyncio.subprocess.PIPE
    )
    return await _result(process)


async def _run_wrk(port: int, clients: int, seconds: float, body: Path) -> Load:
    # wrk takes whole seconds; an interrupt ends it at any time, with its figures.
    process = await asyncio.create_subprocess_exec(
        "wrk",
        *("--threads", "1", "--connections", str(clients)),
        *("--duration", f"{math.ceil(seconds) + 10}s", "--script", str(_SCRIPT)),
        f"http://127.0.0.1:{port}{PATH}",
        "--",
        str(body),
        *(f"{name}={value}" for name, value in HEADERS.items()),
        stdout=asyncio.subprocess.PIPE,
    )
    result = asyncio.ensure_future(_result(process))
    done, _ = await asyncio.wait({result}, timeout=seconds)
    if not done:
        process.send_signal(signal.SIGINT)
    return await result


async def _result(process: asyncio.subprocess.Process) -> Load:
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the load generator ended with status {process.returncode}")
    return msgspec.convert(json.loads(output.splitlines()[-1]), Load)
