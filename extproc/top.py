"""``top``: the workers of a router, live."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import sys
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from extproc.admin_client import AdminClient, Listing, RouterError, RouterUnreachableError
from extproc.stop import stop_on_signals
from extproc.workers_command import client_of
from extproc.workers_table import build_table, format_plain, summarize

OTHER_LINES = 6
"""Lines of the screen that are no rows of the table: totals, its head and frame, what was left out."""


def run(parsed: argparse.Namespace) -> int:
    """Show the workers until Ctrl-C; return the exit status."""
    console = Console(highlight=False)
    status = 0
    try:
        asyncio.run(_show_once(parsed, console) if parsed.once else _show(parsed, console))
    except* KeyboardInterrupt:  # before the signals are ours
        pass
    except* RouterError as group:
        sys.stderr.write(f"vllm-extproc: {group.exceptions[0]}\n")
        status = 1
    return status


class Screen:
    """What is shown: the last listing, and since when there is no newer one."""

    def __init__(self, router_url: str, clock: Callable[[], dt.datetime]) -> None:
        self._router_url = router_url
        self._clock = clock
        self._listing: Listing | None = None
        self._lost: dt.datetime | None = None
        self._reason = ""

    async def refresh(self, client: AdminClient) -> None:
        """Read the workers anew. ``RouterError`` when trying again would be of no use."""
        try:
            self._listing = await client.list_workers()
        except RouterUnreachableError as error:
            self._lost = self._lost or self._clock()
            self._reason = str(error)
        else:
            self._lost = None

    def header(self) -> str:
        """Return the line above the table."""
        if self._lost is not None:
            return f"router unreachable since {self._lost:%H:%M:%S}: {self._reason}"
        if self._listing is None:
            return f"{self._router_url}: asking"
        return f"{self._router_url}: {summarize(self._listing.workers)}"

    def render(self, height: int) -> RenderableType:
        """Return what fits on a screen of *height* lines."""
        lost = self._lost is not None
        lines: list[RenderableType] = [Text(self.header(), style="bold red" if lost else "bold")]
        if self._listing is not None:
            rows = max(1, height - OTHER_LINES)
            lines.append(build_table(self._listing, rows=rows, dim=lost))
            if (more := len(self._listing.workers) - rows) > 0:
                lines.append(Text(f"{more} more", style="dim"))
        return Group(*lines)

    def text(self) -> str:
        """Return the same as plain text."""
        table = format_plain(self._listing) if self._listing is not None and not self._lost else ""
        return f"{self.header()}\n{table}"


async def _show_once(parsed: argparse.Namespace, console: Console) -> None:
    async with client_of(parsed) as client:
        listing = await client.list_workers()
    header = f"{client.url}: {summarize(listing.workers)}"
    if console.is_terminal:
        console.print(Text(header, style="bold"), build_table(listing))
    else:
        sys.stdout.write(f"{header}\n{format_plain(listing)}")


async def _show(parsed: argparse.Namespace, console: Console) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with client_of(parsed) as client, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(_follow(client, console, parsed.interval))
        stopping = tasks.create_task(stop.wait())
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        stopping.cancel()


async def _follow(client: AdminClient, console: Console, interval_s: float) -> None:
    """Show the workers each *interval_s* seconds."""
    screen = Screen(client.url, _now)
    with contextlib.ExitStack() as stack:
        live: Live | None = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False, screen=True))
        while True:
            await screen.refresh(client)
            if live is not None:
                live.update(screen.render(console.height), refresh=True)
            else:
                sys.stdout.write(f"{screen.text()}\n")
                sys.stdout.flush()
            await asyncio.sleep(interval_s)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC).astimezone()
