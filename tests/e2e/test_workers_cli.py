"""``vllm-extproc workers`` and ``top`` against a router that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.harness import Router, free_port, wait_until
from tests.e2e.raw_worker import RawWorker
from tests.e2e.workers_support import (
    FAST,
    STREAM_BODY,
    AdminApi,
    hold_streams,
    rest_of,
    serve_models,
    stream_on,
)

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

LIMIT_S = 30
KEY = "e2e-admin-key"


@pytest.fixture(scope="module")
def worker() -> Iterator[RawWorker]:
    """Give the worker that the router keeps, and one that the tests add."""
    worker = RawWorker(2).start()
    serve_models(worker, {port: ["Qwen/Qwen3-8B"] for port in worker.ports})
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def router(worker: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router with a key."""
    router = Router(worker.urls[:1], logs, *FAST, "--admin-api-key", KEY)
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(router: Router, tmp_path: Path) -> Run:
    """Run a command against the router, with its key in the environment."""

    def run(
        *arguments: str, url: str = router.base_url, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", "NO_COLOR": "1"}
        environment |= {"VLLM_EXTPROC_ADMIN_API_KEY": KEY} if env is None else env
        return subprocess.run(
            [sys.executable, "-m", "extproc", *arguments, "--router-url", url],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=tmp_path,
            env=environment,
            check=False,
        )

    return run


def _done(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result
    assert result.stderr == ""
    return result.stdout


def _failed(result: subprocess.CompletedProcess[str]) -> str:
    """Check status 1 and one line on standard error; return it."""
    assert result.returncode == 1, result
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("vllm-extproc: ")
    assert KEY not in line
    return line


async def test_from_adding_to_draining(router: Router, worker: RawWorker, run: Run) -> None:
    """Each command does what it says, and the list shows it."""
    kept, url = worker.urls
    api = AdminApi(router, KEY)
    go_on = hold_streams(worker)

    added = _done(run("workers", "add", url, "--wait", "--label", "zone=a", "--weight", "2"))
    listed = _done(run("workers", "list")).splitlines()
    entry = api.worker(url)
    as_json = json.loads(_done(run("workers", "list", "--json")))
    top = _done(run("top", "--once"))
    async with stream_on(router, worker.ports[1]) as connection:
        drained = _done(run("workers", "drain", url, "--timeout", "30"))
        draining = _done(run("workers", "list"))
        go_on.set()
        assert await rest_of(connection) == STREAM_BODY
    wait_until(lambda: api.state(url) == "gone", 5, "drained")
    added_again = _done(run("workers", "add", url))
    removed = _done(run("workers", "remove", url))

    assert added == f"{url} is healthy\n"
    assert listed[0].split() == (
        ["WORKER", "STATE", "MODEL", "LOAD", "RUNNING", "WAITING", "KV", "SINCE", "REASON"]
    )
    rows = [line.split() for line in listed[1:]]
    assert [row[:4] for row in rows] == [
        [kept, "healthy", "Qwen/Qwen3-8B", "0"],
        [url, "healthy", "Qwen/Qwen3-8B", "0"],
    ]
    assert (entry["labels"], entry["weight"]) == ({"zone": "a"}, 2)
    assert [worker["url"] for worker in as_json["workers"]] == [kept, url]
    assert top.startswith(f"{router.base_url}: 2/2 workers healthy, 0 requests in flight\n")
    assert url in top
    assert drained == f"{url} is draining\n"
    assert "draining" in draining
    assert added_again == f"{url} added\n"
    assert removed == f"{url} removed\n"
    assert list(api.workers()) == [kept]


def test_what_the_router_refuses_is_said(worker: RawWorker, run: Run) -> None:
    """In its own words, with status 1."""
    unknown = "http://127.0.0.1:9"

    duplicate = _failed(run("workers", "add", worker.urls[0]))
    malformed = _failed(run("workers", "add", "ftp://x"))
    secret = _failed(run("workers", "add", "http://user:hunter2@127.0.0.1:1"))
    removed = _failed(run("workers", "remove", unknown))
    drained = _failed(run("workers", "drain", unknown))
    late = _failed(run("workers", "add", unknown, "--timeout", "0.2"))
    assert _done(run("workers", "remove", unknown)) == f"{unknown} removed\n"

    assert "exists" in duplicate
    assert "http://host:port" in malformed
    assert "password" in secret
    assert "hunter2" not in secret
    assert removed == drained == f"vllm-extproc: Worker {unknown} not found"
    assert "not healthy after 0.2 s" in late


@pytest.mark.parametrize("command", [("workers", "list"), ("top", "--once")])
def test_router_that_cannot_be_asked(run: Run, worker: RawWorker, command: tuple[str, ...]) -> None:
    """Nobody there, another program there, no key, a wrong one."""
    nobody = f"http://127.0.0.1:{free_port()}"

    assert "cannot be reached" in _failed(run(*command, url=nobody))
    assert "not a router" in _failed(run(*command, url=worker.urls[0]))
    assert "--admin-api-key" in _failed(run(*command, env={}))
    wrong = _failed(run(*command, "--admin-api-key", "s3cret"))
    assert "--admin-api-key" in wrong
    assert "s3cret" not in wrong
