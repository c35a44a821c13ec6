"""Workers as a table: with colours on a terminal, as plain columns elsewhere."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from extproc.admin_client import ListedWorker, Listing, plain

COLUMNS = ("worker", "state", "model", "load", "running", "waiting", "kv", "since", "reason")
NUMBERS = frozenset({"load", "running", "waiting", "kv", "since"})
STYLES = {
    "healthy": "green",
    "starting": "cyan",
    "draining": "yellow",
    "ejected": "red",
    "half_open": "yellow",
    "unhealthy": "bold red",
}
"""By state."""

NOTHING = "-"


def cells(worker: ListedWorker, now: dt.datetime | None) -> tuple[str, ...]:
    """Return the cells of a row, parallel to ``COLUMNS``; safe for a terminal."""
    usage = worker.kv_usage
    return (
        plain(worker.url),
        plain(worker.state),
        plain(worker.model_id),
        str(worker.load),
        _number(worker.running),
        _number(worker.waiting),
        NOTHING if usage is None else f"{usage:.0%}",
        _age(worker.since, now),
        plain(worker.reason) or NOTHING,
    )


def build_table(listing: Listing, *, rows: int | None = None, dim: bool = False) -> Table:
    """Return a table for a terminal, of the first *rows* workers, or all."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, style="dim" if dim else "")
    for name in COLUMNS:
        table.add_column(
            name,
            justify="right" if name in NUMBERS else "left",
            no_wrap=name != "reason" or rows is not None,
            overflow="ellipsis" if rows is not None else "fold",
        )
    for worker in listing.workers[:rows]:
        style = "dim" if dim else STYLES.get(worker.state, "")
        # Text, not str: brackets in a model's name are no markup.
        row = [Text(cell) for cell in cells(worker, listing.at)]
        row[1].stylize(style)
        table.add_row(*row, style="dim" if dim else "")
    return table


def format_plain(listing: Listing) -> str:
    """Return the table as columns of text, for scripts and files."""
    table = [tuple(name.upper() for name in COLUMNS)]
    table += [cells(worker, listing.at) for worker in listing.workers]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "".join(f"{_columns(row, widths)}\n" for row in table)


def summarize(workers: Sequence[ListedWorker]) -> str:
    """Return the totals in one line: workers by state, requests in flight."""
    states = Counter(plain(worker.state) for worker in workers)
    in_flight = sum(worker.load for worker in workers)
    parts = [f"{states.pop('healthy', 0)}/{len(workers)} workers healthy"]
    parts += [f"{count} {state}" for state, count in sorted(states.items())]
    return ", ".join([*parts, f"{in_flight} requests in flight"])


def _columns(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if name in NUMBERS else cell.ljust(width)
        for name, cell, width in zip(COLUMNS, row, widths, strict=True)
    )
    return "  ".join(padded).rstrip()


def _number(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def _age(since: dt.datetime | None, now: dt.datetime | None) -> str:
    """Return how long ago *since* was, in its largest unit, or two."""
    if since is None or now is None:
        return NOTHING
    seconds = max(0, int((now - since).total_seconds()))
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02}m"
    return f"{hours // 24}d{hours % 24:02}h"
