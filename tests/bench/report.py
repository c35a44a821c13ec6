"""The figures as tables: for a terminal, in Markdown, and next to the budgets of DESIGN section 5."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tests.bench.measure import Plan, Row
from tests.bench.processes import Memory
from tests.bench.streams import Held

ADDED_P50_MS = 0.7
ADDED_P99_MS = 3.0
SERVICE_RSS_MB = 200.0
BUDGET_STREAMS = 5000
START_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """One budget and what was measured."""

    what: str
    measured: float
    limit: float
    unit: str

    @property
    def mark(self) -> str:
        """``ok`` or ``over``."""
        return "ok" if self.measured <= self.limit else "over"


def budgets(plan: Plan, rows: Sequence[Row], held: Sequence[Held]) -> list[Budget]:
    """Compare; CPU is that of the number of clients at which it is highest."""
    found: list[Budget] = []
    for scenario in plan.scenarios:
        if scenario.budget_us is not None:
            worst = max(
                (row for row in rows if row.scenario == scenario.name),
                key=lambda row: row.service_us,
            )
            what = f"service CPU per request: {scenario.title} ({worst.clients} clients)"
            found.append(Budget(what, worst.service_us, scenario.budget_us, "µs"))
    for scenario in plan.scenarios:
        for row in rows:
            if row.scenario == scenario.name and row.clients == 1:
                what = f"added latency, 1 client: {scenario.title}"
                found.append(Budget(f"{what}, p50", row.added_p50_ms, ADDED_P50_MS, "ms"))
                found.append(Budget(f"{what}, p99", row.added_p99_ms, ADDED_P99_MS, "ms"))
    for one in held:
        if one.service_open is not None:
            what = f"service RSS, {one.streams} open streams: {one.policy}"
            found.append(Budget(what, one.service_open.rss_mb, SERVICE_RSS_MB, "MB"))
            found.append(Budget(f"start to the first 200: {one.policy}", one.start_s, START_S, "s"))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Sheet:
    """One table, independent of how it is shown."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sheets(
    plan: Plan, rows: Sequence[Row], held: Sequence[Held], found: Sequence[Budget]
) -> list[Sheet]:
    """Return all tables."""
    titles = {scenario.name: scenario for scenario in plan.scenarios}
    return [
        Sheet(
            "Rate and latency: Envoy alone → Envoy and the service",
            ("request", "clients", "req/s", "ratio", "p50 ms", "added", "p99 ms", "added"),
            [
                (
                    titles[row.scenario].title,
                    str(row.clients),
                    f"{row.alone_rate:,.0f} → {row.routed_rate:,.0f}",
                    f"{row.rate_ratio:.2f}",
                    f"{row.alone_p50_ms:.2f} → {row.routed_p50_ms:.2f}",
                    f"{row.added_p50_ms:+.2f}",
                    f"{row.alone_p99_ms:.2f} → {row.routed_p99_ms:.2f}",
                    f"{row.added_p99_ms:+.2f}",
                )
                for row in rows
            ],
        ),
        Sheet(
            "CPU per request, µs",
            (
                "request",
                "clients",
                "Envoy",
                "ratio",
                "service",
                "least to most",
                "to Envoy alone",
                "picked",
                "budget",
            ),
            [
                (
                    titles[row.scenario].title,
                    str(row.clients),
                    f"{row.alone_envoy_us:.0f} → {row.routed_envoy_us:.0f}",
                    f"{row.envoy_ratio:.2f}",
                    f"{row.service_us:.0f}",
                    f"{row.service_us_min:.0f} to {row.service_us_max:.0f}",
                    f"{row.service_ratio:.2f}",
                    f"{row.picked_ratio:.1%}",
                    _against(row.service_us, titles[row.scenario].budget_us),
                )
                for row in rows
            ],
        ),
        Sheet(
            "Memory, MB: RSS (PSS)",
            ("streams", "process", "idle", "open", "after", "KB per stream", "opened in s"),
            [line for one in held for line in _memory_lines(one)],
        ),
        Sheet(
            "Budgets",
            ("what", "measured", "budget", ""),
            [
                (
                    one.what,
                    f"{one.measured:.{_digits(one)}f} {one.unit}",
                    f"{one.limit:g} {one.unit}",
                    one.mark,
                )
                for one in found
            ],
        ),
    ]


def notes(plan: Plan, rows: Sequence[Row], held: Sequence[Held]) -> list[str]:
    """Say how it was measured, and what makes the figures doubtful."""
    others = statistics.median(row.others_cores for row in rows)
    spread = statistics.median(
        (row.service_us_max - row.service_us_min) / row.service_us for row in rows if row.service_us
    )
    found = [
        (
            f"Medians of {plan.rounds} rounds of {plan.seconds:g} s, the variants in turn;"
            f" client: {plan.client}; Envoy with one worker thread."
        ),
        "Headers-only requests carry the 4 KB body too; it does not pass through the service.",
        (
            f"Noise: other programs used {others:.2f} cores (median); the service's CPU differs by"
            f" {spread:.0%} between rounds (median)."
        ),
        (
            "Speed of the machine: the same loop took"
            f" {min(row.loop_ms_min for row in rows):.1f} to"
            f" {max(row.loop_ms_max for row in rows):.1f} ms of CPU at different moments; microseconds"
            " scale with it, ratios hardly."
        ),
    ]
    if plan.client == "asyncio":
        found.append(
            "The bundled client costs more CPU than Envoy: rates and latencies of many clients are its"
            " own; get wrk with: apt-get install wrk"
        )
    if errors := sum(row.errors for row in rows):
        found.append(f"{errors} requests failed: the figures are not to be trusted.")
    if any(row.picked_ratio < 0.99 for row in rows):
        found.append("Not all requests were picked by the service: look at the column picked.")
    found += [
        f"{one.leases_after} leases were left after all streams had ended ({one.policy})."
        for one in held
        if one.leases_after
    ]
    found += [
        f"Only {one.leases_open} of {one.streams} streams held a lease ({one.policy})."
        for one in held
        if one.policy and one.leases_open != one.streams
    ]
    if any(one.streams != BUDGET_STREAMS for one in held):
        found.append(f"The memory budget is meant for {BUDGET_STREAMS} streams.")
    return found


def show(console: Console, tables: Iterable[Sheet], remarks: Iterable[str]) -> None:
    """Print for people."""
    for sheet in tables:
        table = Table(title=sheet.title, title_justify="left", title_style="bold")
        for number, column in enumerate(sheet.columns):
            table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
        for row in sheet.rows:
            style = "red" if "over" in row[-1] else None
            table.add_row(*row, style=style)
        console.print(table)
    for remark in remarks:
        console.print(remark, soft_wrap=True)


def markdown(tables: Iterable[Sheet], remarks: Iterable[str]) -> str:
    """Return the same for ``docs/performance.md``."""
    parts: list[str] = []
    for sheet in tables:
        lines = [
            f"### {sheet.title}\n",
            f"| {' | '.join(sheet.columns)} |",
            f"|---|{'---:|' * (len(sheet.columns) - 1)}",
            *(f"| {' | '.join(row)} |" for row in sheet.rows),
            "",
        ]
        parts.append("\n".join(lines))
    return "\n".join([*parts, *(f"- {remark}" for remark in remarks), ""])


def _against(measured: float, limit: float | None) -> str:
    if limit is None:
        return ""
    return f"{limit:.0f} {'ok' if measured <= limit else 'over'}"


def _digits(budget: Budget) -> int:
    return {"µs": 0, "MB": 0}.get(budget.unit, 2)


def _memory_lines(held: Held) -> Iterable[tuple[str, ...]]:
    name = f"{held.streams} ({held.policy or 'Envoy alone'})"
    processes: list[tuple[str, Memory | None, Memory | None, Memory | None]] = [
        ("Envoy", held.envoy_idle, held.envoy_open, held.envoy_after),
        ("service", held.service_idle, held.service_open, held.service_after),
    ]
    for process, idle, opened, after in processes:
        if idle is not None and opened is not None and after is not None:
            grown = (opened.rss_mb - idle.rss_mb) * 1e3 / held.streams
            yield (
                name,
                process,
                *(f"{one.rss_mb:.0f} ({one.pss_mb:.0f})" for one in (idle, opened, after)),
                f"{grown:.1f}",
                f"{held.open_s:.1f}",
            )
