"""Runs the scenarios on a cluster, one after the other, and says what came of each."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from tests.cluster.cluster import Cluster, Programs
from tests.cluster.scenarios import ALL, Outcome, Scenario

SCENARIO_S = 300.0


async def run(programs: Programs, names: list[str]) -> bool:
    """Install the release, run the scenarios in *names* (all if empty), print the table; tell whether all hold."""
    chosen = choose(names)
    outcomes: dict[str, tuple[Outcome, float]] = {}
    async with Cluster(programs) as cluster:
        for name, scenario in {"install": install, **chosen}.items():
            begun = time.monotonic()
            outcome = await attempt(cluster, scenario)
            took = time.monotonic() - begun
            outcomes[name] = outcome, took
            print(f"{name}: {'; '.join(outcome.problems) or 'ok'} ({took:.0f} s)", flush=True)
            if scenario is install and outcome.problems:
                break
    print_table(outcomes)
    return not any(outcome.problems for outcome, _ in outcomes.values())


async def install(cluster: Cluster) -> Outcome:
    """Install the release; nothing can be tried without it."""
    await cluster.install()
    return Outcome()


def choose(names: list[str]) -> Mapping[str, Scenario]:
    """Return the scenarios whose name begins with one of *names*; ValueError when one has none."""
    for name in names:
        if not any(known.startswith(name) for known in ALL):
            raise ValueError(f"no scenario begins with {name!r}; there are: {', '.join(ALL)}")
    return {
        known: scenario
        for known, scenario in ALL.items()
        if not names or any(known.startswith(name) for name in names)
    }


async def attempt(cluster: Cluster, scenario: Scenario) -> Outcome:
    """Run one; what it raises is a problem like others, and the next one gets a settled release."""
    try:
        async with asyncio.timeout(SCENARIO_S):
            outcome = await scenario(cluster)
            await cluster.settle()
    except Exception as error:  # noqa: BLE001  # the others are still worth running
        traceback.print_exc()
        return Outcome(problems=[f"{type(error).__name__}: {error}"])
    return outcome


def print_table(outcomes: Mapping[str, tuple[Outcome, float]]) -> None:
    """Print what was seen, a scenario in each row."""
    table = Table()
    for column in ("scenario", "result", "requests", "failed", "cut", "s", "notes"):
        right = column in ("requests", "failed", "cut", "s")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for name, (outcome, took) in outcomes.items():
        table.add_row(
            name,
            "FAILED" if outcome.problems else "ok",
            *map(str, (outcome.requests, outcome.failed, outcome.cut)),
            f"{took:.0f}",
            "; ".join([*outcome.problems, *outcome.notes]),
        )
    Console(width=150).print(table)
