"""``workers list|add|remove|drain`` against a router's admin API."""

from __future__ import annotations

import asyncio
import datetime as dt
import io
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from extproc import cli
from extproc.admin_client import AdminClient, ListedWorker, Listing, RouterError, plain
from extproc.config import Config
from extproc.registry import Settings
from extproc.workers_table import build_table, cells, format_plain, summarize
from tests.extproc.admin_api import AT_ONCE, BY_ENVOY, A, B, serve

KEY = "s3cret"
NOW = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
EVIL = "m\x1b[2J\x07\x9b31m\u202e\r\n"


@pytest.fixture
async def api():
    async with serve() as api:
        yield api


@pytest.fixture
def run(capsys):
    """Return a function that runs the command; it returns status, output and errors."""

    async def run(*arguments, url):
        status = await asyncio.to_thread(cli.main, ["workers", *arguments, "--router-url", url])
        shown = capsys.readouterr()
        # the log of the API in this process
        lines = [line for line in shown.out.splitlines(keepends=True) if "[info" not in line]
        return status, "".join(lines), shown.err

    return run


def listed(**fields):
    return ListedWorker(**{"url": A, "state": "healthy", "model_id": "llama", **fields})


def listing_of(*workers):
    return Listing(workers, NOW, b"")


# --- what is shown ------------------------------------------------------------------------------


async def test_list_is_plain_columns_outside_a_terminal(api, run):
    """One line per worker, nothing cut, nothing coloured; empty cells are a dash."""
    first, _ = api.add(A, "http://worker.example:8000")
    api.tell_models(first, "Qwen/Qwen3-8B")
    api.tell_loads(first, {0: (3, 1, 0.256)})

    status, shown, errors = await run("list", url=api.url)

    lines = shown.splitlines()
    assert (status, errors, len(lines)) == (0, "", 3)
    assert lines[0].split() == ["WORKER", "STATE", "MODEL", "LOAD", "RUNNING", "WAITING", "KV", "SINCE", "REASON"]  # fmt: skip
    assert lines[1].split()[:7] == [A, "healthy", "Qwen/Qwen3-8B", "0", "3", "1", "26%"]
    assert lines[2].split()[:7] == ["http://worker.example:8000", "starting", "unknown", "0", "-", "-", "-"]  # fmt: skip
    assert lines[2].endswith("  its name is being resolved")


async def test_list_of_no_workers_is_its_head(api, run):
    """Scripts that skip one line go on to work."""
    assert (await run("list", url=api.url))[1].startswith("WORKER  STATE")


async def test_list_can_be_json(api, run):
    """As the API gives it, in ASCII: no terminal obeys it."""
    api.add({"url": A, "model": "modèle"})

    status, shown, _ = await run("list", "--json", url=api.url)

    assert status == 0
    assert shown.isascii()
    assert json.loads(shown) == (await api.get("/workers")).json


def test_columns_are_aligned():
    """Text to the left, numbers to the right; the last column is not padded."""
    text = format_plain(
        listing_of(
            listed(load=10, running=1, waiting=0, kv_usage=0.5, since=NOW),
            listed(url=B + "@10", state="unhealthy", reason="it is away"),
        )
    )

    assert text.splitlines() == [
        "WORKER                   STATE      MODEL  LOAD  RUNNING  WAITING   KV  SINCE  REASON",
        "http://10.0.0.1:8000     healthy    llama    10        1        0  50%     0s  -",
        "http://10.0.0.2:8000@10  unhealthy  llama     0        -        -    -      -  it is away",
    ]


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (0, "0s"),
        (-5, "0s"),
        (59.9, "59s"),
        (60, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (47 * 3600, "47h00m"),
        (48 * 3600, "2d00h"),
        (400 * 86400 + 3600, "400d01h"),
    ],
)
def test_age_is_shown_in_its_largest_units(seconds, age):
    """By the router's clock; one that is a little ahead makes nothing negative."""
    worker = listed(since=NOW - dt.timedelta(seconds=seconds))

    assert cells(worker, NOW)[7] == age
    assert cells(worker, None)[7] == "-"


def test_table_on_a_terminal_has_the_colour_of_the_state():
    """And brackets in a name are no markup."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=140)
    workers = [listed(state=state, model_id="[red]x[/red]") for state in ("healthy", "ejected")]

    console.print(build_table(listing_of(*workers, listed(state="new", model_id="y"))))

    shown = file.getvalue()
    assert "\x1b[32mhealthy\x1b[0m" in shown
    assert "\x1b[31mejected\x1b[0m" in shown
    assert shown.count("[red]x[/red]") == 2
    assert " new " in shown


@pytest.mark.parametrize("field", ["url", "state", "reason", "model_id"])
def test_text_of_workers_never_reaches_the_terminal_as_a_command(field):
    """No escape, no control character, no change of direction; in either form."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=200)
    listing = listing_of(listed(**{field: EVIL}))

    console.print(build_table(listing))

    for shown in (file.getvalue(), format_plain(listing), summarize(listing.workers)):
        assert all(char.isprintable() or char == "\n" for char in shown)


def test_foreign_text_is_capped():
    """A long reason does not fill the screen."""
    assert len(plain("x" * 10_000)) < 300


def test_summary_counts_by_state():
    """Healthy ones of all, the others by name, what is in flight."""
    workers = [listed(load=2), listed(load=3), listed(state="draining"), listed(state="ejected")]

    assert summarize(workers) == "2/4 workers healthy, 1 draining, 1 ejected, 5 requests in flight"
    assert summarize([]) == "0/0 workers healthy, 0 requests in flight"


# --- what is done -------------------------------------------------------------------------------


async def test_worker_is_added_with_all_that_is_said_of_it(api, run):
    """Labels may be several."""
    arguments = ["add", A, "--weight", "2.5", "--model", "llama", "--label", "zone=a", "--label"]
    arguments += ["note=x=y", "--worker-type", "prefill", "--bootstrap-port", "8998"]

    assert await run(*arguments, url=api.url) == (0, f"{A} added\n", "")

    spec = api.registry.get(A).spec
    assert (spec.weight, spec.model, spec.worker_type) == (2.5, "llama", "prefill")
    assert (spec.bootstrap_port, spec.labels) == (8998, (("note", "x=y"), ("zone", "a")))


async def test_https_worker_is_added_with_its_name(api, run):
    """The certificate's."""
    status, *_ = await run("add", "https://10.0.0.1", "--tls-name", "w.example", url=api.url)

    assert status == 0
    assert api.registry.get("https://10.0.0.1").spec.tls_name == "w.example"


async def test_adding_can_wait(run):
    """For the verdict; a worker that is not healthy in time is an error, and stays."""
    async with serve(BY_ENVOY) as api:
        late = await run("add", A, "--timeout", "0.02", url=api.url)
        assert api.registry.get(A) is not None
        adding = asyncio.ensure_future(run("add", B, "--wait", url=api.url))
        await api.joined(B)
        api.pass_check(B)
        done = await adding

    assert late[:2] == (1, "")
    assert "is not healthy after 0.02 s: starting, its first health check is under way" in late[2]
    assert done == (0, f"{B} is healthy\n", "")


async def test_worker_is_removed_and_drained(api, run):
    """Each says what was done."""
    api.add(A, B)
    (pool,) = api.registry.pools
    pool.acquire(pool.members[1])

    assert await run("remove", A, url=api.url) == (0, f"{A} removed\n", "")
    assert await run("drain", f"{B}/", "--timeout", "60", url=api.url) == (
        0,
        f"{B}/ is draining\n",
        "",
    )

    assert [engine.key for engine in api.registry.engines] == [B]
    assert api.registry.get(B).state == "draining"
    assert api.registry.get(B).drain_deadline == api.now + 60


@pytest.mark.parametrize("url", ["http://10.0.0.1/llama", "https://[2001:db8::1]:8443", f"{A}@3"])
async def test_any_url_can_be_removed(api, run, url):
    """Base path, IPv6, rank."""
    api.add(url)

    assert (await run("remove", url, url=api.url))[0] == 0
    assert not api.registry.engines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", A], f"Worker {A} already exists"),
        (
            ["add", "ftp://x"],
            "worker URL 'ftp://x': expected http://host:port or https://host:port",
        ),
        (["add", B, "--weight", "0"], "weight"),
        (["add", B, "--bootstrap-port", "1"], "bootstrap_port: expected only with"),
        (["remove", B], f"Worker {B} not found"),
        (["drain", B], f"Worker {B} not found"),
        (["remove", "x y"], "expected http://host:port"),
        (["remove", f"{A}@0"], "is a rank of"),
        (["remove", ""], "there is nothing at this path"),
    ],
    ids=str,
)
async def test_refusal_is_one_line_and_status_1(run, arguments, message):
    """The router's own words."""
    async with serve(Settings(follows_envoy=False, asks_models=False, ranks=2)) as api:
        api.add(A)
        status, shown, errors = await run(*arguments, url=api.url)

    assert (status, shown) == (1, "")
    assert errors.startswith("vllm-extproc: ")
    assert errors.count("\n") == 1
    assert message in errors


# --- who is asked -------------------------------------------------------------------------------


async def test_key_comes_from_flag_or_environment(run, monkeypatch):
    """The flag wins; a wrong or missing one is told how to give it."""
    monkeypatch.delenv("VLLM_EXTPROC_ADMIN_API_KEY", raising=False)
    async with serve(AT_ONCE, Config(admin_api_key=KEY)) as api:
        missing = await run("list", url=api.url)
        wrong = await run("list", "--admin-api-key", "x", url=api.url)
        flag = await run("list", "--admin-api-key", KEY, url=api.url)
        monkeypatch.setenv("VLLM_EXTPROC_ADMIN_API_KEY", KEY)
        environment = await run("list", url=api.url)
        both = await run("list", "--admin-api-key", "x", url=api.url)

    how = "give it with --admin-api-key or in VLLM_EXTPROC_ADMIN_API_KEY\n"
    assert missing == (1, "", f"vllm-extproc: the admin API needs its key: {how}")
    assert wrong == (1, "", f"vllm-extproc: this is not the admin API key: {how}")
    assert [flag[0], environment[0], both[0]] == [0, 0, 1]


async def test_closed_api_says_why(run):
    """403 with the router's reason."""
    async with serve(AT_ONCE, Config(host="0.0.0.0")) as api:
        status, _, errors = await run("list", url=api.url)

    assert status == 1
    assert "set --admin-api-key" in errors


async def test_router_that_is_away_is_said_so(run):
    """Without a traceback."""
    status, shown, errors = await run("list", url="http://127.0.0.1:9")

    assert (status, shown) == (1, "")
    assert errors == (
        "vllm-extproc: the router at http://127.0.0.1:9 cannot be reached: Connection refused\n"
    )


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"hello", "is not a router"),
        (200, b'{"workers": 5}', "is not a router"),
        (200, b'{"workers": [{"url": 5}]}', "is not a router"),
        (200, b"\xff", "is not a router"),
        (404, b"<html>", "answers 404: it is not a router, or"),
        (302, b"", "answers 302: it is not a router, or"),
        (503, b'{"error": {"message": "x"}}', "answers 503: it is not a router, or"),
        (400, b'{"error": "no\\u001b[2J", "code": "X"}', "no\N{REPLACEMENT CHARACTER}[2J\n"),
    ],
)
async def test_what_is_no_router_is_said_so(run, status, body, message):
    """Whatever it answers; its text is no command for the terminal."""

    async def answer(_):
        return web.Response(status=status, body=body, headers={"Location": "http://evil/"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        ended, _, errors = await run("list", url=f"http://127.0.0.1:{server.port}/")

    assert ended == 1
    assert message in errors
    assert "\x1b" not in errors


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:30000",
        "ftp://a",
        "http://",
        "http://a:x",
        "http://a?x",
        "http://[::1",
        "a\x1b",
        "",
    ],
)
async def test_router_url_that_is_none_is_refused(run, url):
    """With what is expected."""
    status, _, errors = await run("list", url=url)

    assert status == 1
    assert "--router-url: expected http://host:port" in errors
    assert "\x1b" not in errors


def test_credentials_in_urls_are_not_repeated():
    """Nor is a key that no header can carry."""
    with pytest.raises(RouterError, match="without user and password") as refused:
        AdminClient("http://me:secret@a")
    assert "secret" not in str(refused.value)
    with pytest.raises(RouterError, match="visible ASCII") as refused:
        AdminClient("http://a", "sécret\n")
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["add"],
        ["add", A, "--label", "x"],
        ["add", A, "--weight", "nan"],
        ["add", A, "--weight", "much"],
        ["add", A, "--timeout", "-1"],
        ["add", A, "--worker-type", "x"],
        ["drain", A, "--timeout", "inf"],
    ],
    ids=str,
)
def test_wrong_usage_ends_with_status_2(capsys, arguments):
    """As is the custom."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["workers", *arguments])

    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: vllm-extproc workers")


@pytest.mark.parametrize("action", ["", "list", "add", "remove", "drain"])
def test_help_explains_every_action(capsys, action):
    """With its arguments."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["workers", *action.split(), "--help"])

    assert ended.value.code == 0
    assert f"vllm-extproc workers {action}".rstrip() in capsys.readouterr().out
