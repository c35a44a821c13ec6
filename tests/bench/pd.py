"""``make bench-pd``: prefill and decode apart, against the same workers whole, in one run.

Eight simulated workers prefill and eight decode (Llama-3.1-8B on H100, step by step; see
``extproc/sim/step_model.py``). The same sixteen take whole requests in turn for comparison, which is what a
Kubernetes Service does, and vLLM Router splits requests over the same eight and eight if ``VLLM_ROUTER``
names its program (``pip install vllm-router==0.1.17`` into an environment of its own).

Simulated time runs ``--speed`` times as fast as the clock, so that a small machine can keep up with
sixteen workers; every figure is of simulated time. A run during which the machine was busy is marked.
``--alone`` asks instead for one request at a time of workers that take no time: what is left is the router.

    make bench-pd                      some ten minutes
    make bench-pd ARGS="--quick"       a look, in two
    make bench-pd ARGS="--alone"       half a minute
    make bench-pd ARGS="--markdown"    for docs/performance.md
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from extproc.child import Child
from tests.bench.processes import STOP_TIMEOUT_S, free_ports, machine_busy_s, raise_file_limit

PER_ROLE = 8
MODEL = "sim-model"
PATH = "/v1/completions"
START_TIMEOUT_S = 60.0
BUSY_RATIO = 0.9
"""Above this share of the machine's time, workers may have been late."""

ROUTER = os.environ.get("VLLM_ROUTER", "")
WHOLE, SPLIT, PEER = "whole, round robin", "vllm-extproc", "vllm-router"
LARGEST_TOKEN = 100_000

ALONE_SPEED = 50.0
ALONE_PROMPTS = (500, 4000, 16_000)
ALONE_REQUESTS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests of random prompts."""

    name: str
    prompts: tuple[int, ...]
    """Lengths in tokens, taken in turn."""

    outputs: tuple[int, ...]
    requests: int
    at_once: int
    ramp_s: float
    """Simulated time over which the clients start, about what one request takes: with all of them in
    the same instant, a good part of the figures would be the queue of that one burst."""


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """One request, in seconds of simulated time."""

    first_s: float
    each_s: float
    """Between two tokens after the first one, on average."""

    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One load on one set-up."""

    setup: str
    load: str
    failures: int
    tokens_per_s: float
    first_mean_ms: float
    first_p99_ms: float
    each_mean_ms: float
    each_p99_ms: float
    busy_ratio: float
    """Share of the machine's time in use meanwhile."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench-pd", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument("--burst", action="store_true", help="all clients start at once")
    parser.add_argument("--alone", action="store_true", help="the router's own time")
    parser.add_argument("--speed", type=float, default=0.2, help="simulated time per time")
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    raise_file_limit()
    if options.alone:
        asyncio.run(_run_alone(markdown=options.markdown))
        return 0
    loads = _loads(quick=options.quick)
    if options.burst:
        loads = [dataclasses.replace(load, ramp_s=0.0) for load in loads]
    results = asyncio.run(_run(loads, options.speed))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    _print(results, markdown=options.markdown)
    return 0


def _loads(*, quick: bool) -> list[Load]:
    if quick:
        return [
            Load("random 1000/100", (1000,), (100,), 64, 32, 1.0),
            Load("long prompts", (8000, 500), (100,), 32, 16, 1.0),
        ]
    return [
        Load("random 1000/1000", (1000,), (1000,), 192, 96, 8.0),
        Load("long prompts", (16_000, 500, 4000, 500), (250,), 256, 64, 2.5),
    ]


async def _run(loads: list[Load], speed: float) -> list[Result]:
    setups = [WHOLE, SPLIT, *([PEER] if ROUTER else [])]
    results: list[Result] = []
    errors = Console(stderr=True)
    if not ROUTER:
        errors.print("VLLM_ROUTER names no program: vLLM Router is left out")
    with Progress(console=errors, transient=True) as progress:
        whole = progress.add_task(
            "requests", total=sum(one.requests for one in loads) * len(setups)
        )
        for load in loads:
            for setup in setups:
                progress.update(whole, description=f"{load.name}: {setup}")
                with tempfile.TemporaryDirectory(prefix="bench-pd-") as directory:
                    async with _serving(setup, speed, Path(directory)) as port:
                        results.append(
                            await _measure(
                                setup, load, port, speed, lambda: progress.advance(whole)
                            )
                        )
    return results


async def _run_alone(*, markdown: bool) -> None:
    """Ask for one request after the other; print the time to the first token, of the clock."""
    rows = []
    for setup in [WHOLE, SPLIT, *([PEER] if ROUTER else [])]:
        rng = random.Random(setup)
        row = [setup]
        with tempfile.TemporaryDirectory(prefix="bench-pd-") as directory:
            async with (
                _serving(setup, ALONE_SPEED, Path(directory)) as port,
                aiohttp.ClientSession() as session,
            ):
                for length in (16, *ALONE_PROMPTS):
                    first = []
                    for _ in range(ALONE_REQUESTS):
                        tokens = [rng.randrange(LARGEST_TOKEN) for _ in range(length)]
                        served = await _ask(session, port, tokens, 2, ALONE_SPEED)
                        if served is None:
                            raise SystemExit(f"{setup}: a request failed")
                        first.append(served.first_s / ALONE_SPEED * 1e3)
                    if length in ALONE_PROMPTS:  # the shortest ones make the connections
                        row.append(f"{statistics.median(first):.1f} ms")
        rows.append(row)
    head = ("TTFT p50, one at a time", *(f"{length:,} tokens" for length in ALONE_PROMPTS))
    _print_table(head, rows, "Workers that take no time", markdown=markdown)


@contextlib.asynccontextmanager
async def _serving(setup: str, speed: float, directory: Path) -> AsyncIterator[int]:
    """Run fresh workers and *setup* before them; yield its port."""
    port, metrics_port, *ports = free_ports(2 + 2 * 2 * PER_ROLE)
    # Those of the transfers, too: a port taken at will could be one that another worker is to listen on.
    workers, side_channels = ports[: 2 * PER_ROLE], ports[2 * PER_ROLE :]
    urls = [f"http://127.0.0.1:{worker}" for worker in workers]
    split = setup != WHOLE
    roles = ["prefill"] * PER_ROLE + ["decode"] * PER_ROLE if split else ["both"] * len(urls)
    children: list[Child] = []
    try:
        for worker, side_channel, role in zip(workers, side_channels, roles, strict=True):
            flags = ["--port", str(worker), "--role", role, "--speed", str(speed), "--record", "0"]
            flags += ["--kv-port", str(side_channel)]
            command = [sys.executable, "-m", "extproc", "sim-worker", *flags, "--model", MODEL]
            children.append(await Child.start(f"worker {worker}", command, quiet=True))
        await asyncio.gather(*(_until_up(worker, "/health") for worker in workers))
        command = _command(setup, port, metrics_port, urls, directory)
        children.append(await Child.start(setup, command, quiet=True))
        await _until_up(port, "/v1/models" if setup != PEER else "/health")
        yield port
    finally:
        for child in reversed(children):
            await child.stop(STOP_TIMEOUT_S)


def _command(
    setup: str, port: int, metrics_port: int, urls: list[str], directory: Path
) -> list[str]:
    prefill, decode = urls[:PER_ROLE], urls[PER_ROLE:]
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    roles = ["--vllm-pd-disaggregation"]
    for url in prefill:
        roles += ["--prefill", url]
    for url in decode:
        roles += ["--decode", url]
    if setup == PEER:
        return [ROUTER, *where, *roles, "--log-dir", str(directory), "--log-level", "error"]
    own = [sys.executable, "-m", "extproc", "launch", *where, "--log-level", "error"]
    if setup == SPLIT:
        return [*own, *roles]
    return [*own, "--policy", "round_robin", "--worker-urls", *urls]


async def _until_up(port: int, path: str) -> None:
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


async def _measure(
    setup: str, load: Load, port: int, speed: float, advance: Callable[[], None]
) -> Result:
    rng = random.Random(load.name)
    waiting = iter(range(load.requests))
    served: list[Served] = []
    failures = 0

    async def client(session: aiohttp.ClientSession, after_s: float) -> None:
        nonlocal failures
        await asyncio.sleep(after_s)
        for number in waiting:
            prompt = load.prompts[number % len(load.prompts)]
            output = load.outputs[number % len(load.outputs)]
            tokens = [rng.randrange(LARGEST_TOKEN) for _ in range(prompt)]
            one = await _ask(session, port, tokens, output, speed)
            if one is None:
                failures += 1
            else:
                served.append(one)
            advance()

    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        # The first transfers shake hands; what is measured is the run after them.
        await asyncio.gather(*(_ask(session, port, [1] * 16, 2, speed) for _ in range(PER_ROLE)))
        busy, started = machine_busy_s(), time.monotonic()
        apart_s = load.ramp_s / speed / load.at_once
        await asyncio.gather(*(client(session, n * apart_s) for n in range(load.at_once)))
        took_s = time.monotonic() - started
        busy = machine_busy_s() - busy
    return _sum_up(
        setup, load, served, failures, took_s * speed, busy / took_s / (os.cpu_count() or 1)
    )


async def _ask(
    session: aiohttp.ClientSession, port: int, prompt: list[int], output: int, speed: float
) -> Served | None:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output,
        "ignore_eos": True,
        "stream": True,
    }
    started = time.monotonic()
    first = last = 0.0
    events = 0
    try:
        async with session.post(f"http://127.0.0.1:{port}{PATH}", json=body) as response:
            if response.status != 200:
                await response.read()
                return None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = time.monotonic()
                    first = first or last
                    events += 1
    except (aiohttp.ClientError, TimeoutError):
        return None
    if events < output:
        return None
    return Served((first - started) * speed, (last - first) * speed / max(1, events - 1), events)


def _sum_up(
    setup: str, load: Load, served: list[Served], failures: int, took_s: float, busy: float
) -> Result:
    first = sorted(one.first_s * 1e3 for one in served) or [0.0]
    each = sorted(one.each_s * 1e3 for one in served) or [0.0]
    return Result(
        setup=setup,
        load=load.name,
        failures=failures,
        tokens_per_s=sum(one.tokens for one in served) / took_s,
        first_mean_ms=statistics.fmean(first),
        first_p99_ms=first[int(0.99 * (len(first) - 1))],
        each_mean_ms=statistics.fmean(each),
        each_p99_ms=each[int(0.99 * (len(each) - 1))],
        busy_ratio=busy,
    )


def _print(results: list[Result], *, markdown: bool) -> None:
    head = (
        *("load", "set-up", "tokens/s", "TTFT mean", "TTFT p99", "TPOT mean", "TPOT p99"),
        *("failed", "machine busy"),
    )
    rows = [_row(result, results) for result in results]
    title = "Simulated time; in brackets: against whole, round robin"
    _print_table(head, rows, title, markdown=markdown)


def _print_table(head: Sequence[str], rows: list[list[str]], title: str, *, markdown: bool) -> None:
    if markdown:
        print("| " + " | ".join(head) + " |")
        print("|" + "---|" * len(head))
        for row in rows:
            print("| " + " | ".join(row) + " |")
        return
    table = Table(*head, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _row(result: Result, results: list[Result]) -> list[str]:
    base = next(one for one in results if one.load == result.load and one.setup == WHOLE)

    def shown(value: float, other: float, unit: str) -> str:
        ratio = f" ({value / other:.2f})" if other and result is not base else ""
        return f"{value:,.1f}{unit}{ratio}"

    busy = f"{result.busy_ratio:.0%}" + ("!" if result.busy_ratio > BUSY_RATIO else "")
    return [
        result.load,
        result.setup,
        shown(result.tokens_per_s, base.tokens_per_s, ""),
        shown(result.first_mean_ms, base.first_mean_ms, " ms"),
        shown(result.first_p99_ms, base.first_p99_ms, " ms"),
        shown(result.each_mean_ms, base.each_mean_ms, " ms"),
        shown(result.each_p99_ms, base.each_p99_ms, " ms"),
        str(result.failures),
        busy,
    ]


if __name__ == "__main__":
    sys.exit(main())
