"""``top``: the workers of a router, live."""

from __future__ import annotations

import asyncio
import datetime as dt
import io
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from extproc import cli
from extproc.admin_client import ListedWorker, Listing, RouterError, RouterUnreachableError
from extproc.config import Config
from extproc.top import Screen
from tests.extproc.admin_api import A, B, serve

AWAY = "http://127.0.0.1:9"
NOW = dt.datetime(2026, 1, 31, 12, 3, 5, tzinfo=dt.UTC)
ROUTER = "http://router"


class Router:
    """Stands for the client: gives what it is told to, one after the other."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def list_workers(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def listing_of(count):
    return Listing(
        tuple(ListedWorker(url=f"http://10.0.0.{n}:8000", state="healthy", load=n) for n in range(count)),
        NOW,
        b"",
    )  # fmt: skip


def rendered(screen, height=24):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=120)
    console.print(screen.render(height))
    return file.getvalue()


@pytest.fixture
def clock():
    """Return a clock that goes on by a minute each time it is read."""
    times = iter(NOW + dt.timedelta(minutes=n) for n in range(9))
    return lambda: next(times)


@pytest.fixture
def screen(clock):
    return Screen(ROUTER, clock)


async def test_totals_stand_above_the_table(screen):
    """Then one line per worker."""
    assert screen.header() == "http://router: asking"
    await screen.refresh(Router(listing_of(3)))

    shown = rendered(screen)
    assert "http://router: 3/3 workers healthy, 3 requests in flight" in shown
    assert re.findall(r"http://10\S+", shown) == [f"http://10.0.0.{n}:8000" for n in range(3)]
    assert screen.text().splitlines()[1].startswith("WORKER")


async def test_router_that_goes_away_and_comes_back(screen):
    """Since when it is away, with the last table; then as before."""
    router = Router(
        listing_of(1),
        RouterUnreachableError("it is away"),
        RouterUnreachableError("it is still away"),
        listing_of(2),
        RouterUnreachableError("again"),
    )
    headers = []
    for _ in range(5):
        await screen.refresh(router)
        headers.append(screen.header())
        assert "http://10.0.0.0:8000" in rendered(screen)

    assert headers == [
        "http://router: 1/1 workers healthy, 0 requests in flight",
        "router unreachable since 12:03:05: it is away",
        "router unreachable since 12:03:05: it is still away",
        "http://router: 2/2 workers healthy, 1 requests in flight",
        "router unreachable since 12:04:05: again",
    ]
    assert "WORKER" not in screen.text()


async def test_router_that_was_never_there_has_no_table(screen):
    """Only the line that says so."""
    await screen.refresh(Router(RouterUnreachableError("it is away")))

    assert rendered(screen).strip() == "router unreachable since 12:03:05: it is away"


async def test_refusal_ends_it(screen):
    """Trying again would not help."""
    with pytest.raises(RouterError, match="the key"):
        await screen.refresh(Router(RouterError("the key")))


async def test_table_fits_on_the_screen(screen):
    """What is left out is counted."""
    await screen.refresh(Router(listing_of(100)))

    for height in (1, 10, 24, 200):
        shown = rendered(screen, height)
        rows = shown.count("http://10.")
        assert rows == max(1, min(100, height - 6))
        assert (f"{100 - rows} more" in shown) == (rows < 100)
        assert len(shown.splitlines()) <= max(height, 8)


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    async def run(*arguments):
        status = await asyncio.to_thread(cli.main, ["top", *arguments])
        shown = capsys.readouterr()
        lines = [line for line in shown.out.splitlines() if "[info" not in line]
        return status, lines, shown.err

    return run


async def test_once_prints_the_table_and_ends(run):
    """Totals, head, a line per worker."""
    async with serve() as api:
        api.add(A, B)
        status, lines, errors = await run("--once", "--router-url", api.url)

        assert (status, errors) == (0, "")
        assert lines[0] == f"{api.url}: 2/2 workers healthy, 0 requests in flight"
    assert [line.split()[0] for line in lines[1:]] == ["WORKER", A, B]


async def test_once_without_a_router_is_an_error(run):
    """One line, status 1."""
    status, lines, errors = await run("--once", "--router-url", AWAY)

    assert (status, lines) == (1, [])
    assert errors.startswith(f"vllm-extproc: the router at {AWAY} cannot be reached")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "x"])
def test_interval_out_of_range_is_refused(capsys, interval):
    """A router must not be asked without a pause."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", "--interval", interval])

    assert ended.value.code == 2
    assert "--interval: expected seconds from 0.05" in capsys.readouterr().err


async def start(api_url, *, stdout):
    """Start ``top`` as a process of its own: it handles signals."""
    command = [sys.executable, "-m", "extproc", "top", "--router-url", api_url, "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    return await asyncio.create_subprocess_exec(
        *command, stdout=stdout, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment
    )


async def read_until(read, *wanted):
    """Read until all of *wanted* have come, in this order."""
    text = ""
    async with asyncio.timeout(20):
        for expected in wanted:
            while expected not in text:
                text += (await read()).decode()
            text = text.partition(expected)[2]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_on_a_terminal_it_leaves_the_screen_as_it_was(signum):
    """It follows changes, and Ctrl-C ends it with status 0."""
    ours, theirs = pty.openpty()
    loop = asyncio.get_running_loop()
    async with serve() as api:
        api.add(A)
        process = await start(api.url, stdout=theirs)
        os.close(theirs)
        try:

            async def read():
                return await loop.run_in_executor(None, os.read, ours, 65536)

            await read_until(read, "\x1b[?1049h", "1/1 workers healthy", A)
            api.add(B)
            await read_until(read, "2/2 workers healthy", B)
            process.send_signal(signum)
            await read_until(read, "\x1b[?1049l")
            status = await process.wait()
            errors = await process.stderr.read()
        finally:
            os.close(ours)
    assert (status, errors) == (0, b"")


@pytest.mark.slow
async def test_elsewhere_it_prints_one_table_after_the_other():
    """Plain, also while the router is away; Ctrl-C ends it with status 0."""
    async with serve() as api:
        api.add(A)
        process = await start(api.url, stdout=subprocess.PIPE)

        async def read():
            return await process.stdout.read(65536)

        await read_until(read, "1/1 workers healthy", "WORKER", A, "1/1 workers healthy")
    await read_until(read, "router unreachable since ", "router unreachable since ")
    process.send_signal(signal.SIGINT)
    text, errors = await process.communicate()

    assert (process.returncode, errors) == (0, b"")
    assert b"\x1b" not in text


@pytest.mark.slow
async def test_refused_key_ends_it_with_status_1():
    """One line."""
    async with serve(config=Config(admin_api_key="s3cret")) as api:
        process = await start(api.url, stdout=subprocess.PIPE)
        _, errors = await process.communicate()

    assert process.returncode == 1
    assert errors.startswith(b"vllm-extproc: the admin API needs its key")
    assert errors.count(b"\n") == 1
