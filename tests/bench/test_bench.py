"""The bench runs, and every figure is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench import client
from tests.bench.payload import chat_body

BODY = chat_body(300)
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def bench(module: str, *arguments: str) -> str:
    """Run a module of the bench to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def numbers(value: Any) -> list[float]:
    """Return every number in a JSON document."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.envoy
@pytest.mark.heavy
def test_bench_reports_every_figure(tmp_path: Path) -> None:
    """Both variants answer without errors, the service picks, and all streams give their lease back."""
    file = tmp_path / "figures.json"
    quick = ["--quick", "--seconds", "0.3", "--streams", "20", "--clients", "1"]

    printed = bench("run", *quick, "--markdown", "--json", str(file))

    figures = json.loads(file.read_text())
    assert all(map(math.isfinite, numbers(figures)))
    assert [row["scenario"] for row in figures["rows"]] == ["headers", "body_4k", "body_64k"]
    for row in figures["rows"]:
        assert row["errors"] == 0
        assert row["picked_ratio"] > 0.9
        for name in ("alone_rate", "routed_rate", "alone_p50_ms", "routed_p99_ms", "service_us"):
            assert row[name] > 0, name
    assert [one["policy"] for one in figures["streams"]] == ["", "round_robin"]
    for one in figures["streams"]:
        assert one["envoy_open"]["rss_mb"] > 0
        if one["policy"]:
            assert one["leases_open"] == 20
            assert one["leases_after"] == 0
            assert one["service_open"]["pss_mb"] > 0
    assert {one["mark"] for one in figures["budgets"]} <= {"ok", "over"}
    assert "| headers only, round_robin | 1 |" in printed


def test_pick_bench_covers_every_policy(tmp_path: Path) -> None:
    """Each registered policy has its figures."""
    file = tmp_path / "figures.json"

    bench("pick", "--seconds", "0.005", "--json", str(file))

    figures = json.loads(file.read_text())
    assert {"round_robin", "bench_prompt"} <= figures.keys()
    assert all(number > 0 for number in numbers([one["pick_ns"] for one in figures.values()]))


async def test_bundled_client_counts_answers() -> None:
    """Every answer is counted with its latency; keep-alive holds one connection per client."""
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(EOFError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
                assert await reader.readexactly(len(BODY)) == BODY
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        figures = await client.run("127.0.0.1", port, 3, 0.1, BODY)

    assert connections == 3
    assert figures["errors"] == 0
    assert figures["requests"] > 3
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
