"""``make bench``: Envoy alone against Envoy with the service, in one run.

Prints request rate, latency, CPU per request of each process and memory with many open streams, next
to the budgets of DESIGN section 5. A budget that is missed is reported; it is no failure.

    make bench                                   about two and a half minutes
    make bench ARGS="--quick"                    a look, in half a minute
    make bench ARGS="--markdown --json f.json"   for docs/performance.md and for comparing runs

The load comes from ``wrk`` (apt-get install wrk), or else from a bundled client that costs more CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from policies import registry
from tests.bench import report
from tests.bench.load import GET_WRK, choose_client
from tests.bench.measure import Plan, Row, Scenario, measure
from tests.bench.payload import chat_body
from tests.bench.processes import raise_file_limit
from tests.bench.stack import alone, routed, sse_upstream, upstream
from tests.bench.streams import Held, fitting, hold

HEADERS_POLICY = "round_robin"
BODY_POLICY = "bench_prompt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    registry.load_builtin()
    options = _parser().parse_args(arguments)
    errors = Console(stderr=True)
    plan = Plan(
        scenarios=_scenarios(options.body_policy),
        clients=tuple(options.clients or ((1, 16) if options.quick else (1, 16, 64))),
        rounds=options.rounds or (1 if options.quick else 3),
        seconds=options.seconds or (0.5 if options.quick else 2.0),
        client=choose_client(options.client),
    )
    if plan.client == "asyncio":
        errors.print(f"wrk is not installed, using the bundled client; better: {GET_WRK}")
    limit = raise_file_limit()
    wanted = options.streams or (500 if options.quick else report.BUDGET_STREAMS)
    streams = fitting(wanted, limit)
    if streams < wanted:
        errors.print(f"{limit} open files per process are allowed: {streams} streams, not {wanted}")

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as progress:
        rows, held = asyncio.run(_run(plan, streams, progress, quick=options.quick))
    found = report.budgets(plan, rows, held)
    tables = report.sheets(plan, rows, held, found)
    remarks = report.notes(plan, rows, held)
    if options.json:
        document = {
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
            "plan": plan,
            "rows": rows,
            "streams": held,
            "budgets": [msgspec.to_builtins(one) | {"mark": one.mark} for one in found],
        }
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    if options.markdown:
        sys.stdout.write(report.markdown(tables, remarks))
    else:
        width = None if sys.stdout.isatty() else 140
        report.show(Console(width=width, highlight=False), tables, remarks)
    return 0


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.run",
        description=summary.replace("`", "") + rest.replace("`", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one short round, fewer streams")
    parser.add_argument("--seconds", type=float, metavar="S", help="length of one run (2)")
    parser.add_argument("--rounds", type=int, metavar="N", help="runs per figure (3)")
    parser.add_argument("--clients", type=int, nargs="+", metavar="N", help="(1 16 64)")
    parser.add_argument("--streams", type=int, metavar="N", help="open streams (5000)")
    parser.add_argument(
        "--body-policy", default=BODY_POLICY, metavar="NAME", help=f"reads the body ({BODY_POLICY})"
    )
    parser.add_argument(
        "--client", choices=("auto", "wrk", "asyncio"), default="auto", help="load generator"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    return parser


def _scenarios(body_policy: str) -> tuple[Scenario, ...]:
    return (
        Scenario("headers", f"headers only, {HEADERS_POLICY}", 4096, HEADERS_POLICY, 200.0),
        Scenario("body_4k", f"4 KB body, {body_policy}", 4096, body_policy, 300.0),
        Scenario("body_64k", f"64 KB body, {body_policy}", 65536, body_policy),
    )


async def _run(
    plan: Plan, streams: int, progress: Progress, *, quick: bool
) -> tuple[list[Row], list[Held]]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    policies = list(dict.fromkeys(scenario.policy for scenario in plan.scenarios))
    holding = policies[:1] if quick else policies
    bar = progress.add_task("starting", total=plan.runs + 1 + len(holding))

    def advance(what: str) -> None:
        progress.update(bar, advance=1, description=what)

    directory = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        rows = await _load(plan, policies, directory, advance)
        held = await _streams(holding, streams, directory, advance)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return rows, held


async def _load(
    plan: Plan, policies: Sequence[str], directory: Path, advance: Callable[[str], None]
) -> list[Row]:
    bodies = {size: directory / f"{size}.json" for _, size in plan.variants}
    for size, path in bodies.items():
        path.write_bytes(chat_body(size))
    async with contextlib.AsyncExitStack() as running:
        workers, upstream_envoy = await running.enter_async_context(upstream(directory))
        stacks = {"": await running.enter_async_context(alone(directory, workers))}
        for policy in policies:
            stacks[policy] = await running.enter_async_context(routed(directory, workers, policy))
        return await measure(plan, stacks, bodies, [upstream_envoy.pid], advance)


async def _streams(
    policies: Sequence[str], streams: int, directory: Path, advance: Callable[[str], None]
) -> list[Held]:
    """Measure the memory of fresh processes: those of the load have grown with it."""
    body = chat_body(4096)
    held: list[Held] = []
    async with sse_upstream(directory) as (workers, sse):
        for policy in ("", *policies):
            advance(f"{policy or 'Envoy alone'}, {streams} open streams")
            start = routed(directory, workers, policy) if policy else alone(directory, workers)
            async with start as stack:
                held.append(await hold(policy, stack, sse, streams, body))
    return held


if __name__ == "__main__":
    sys.exit(main())
