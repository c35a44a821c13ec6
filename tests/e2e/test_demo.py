"""``vllm-extproc demo``: the first thing that a new user runs."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.certificates import Maker
from tests.e2e.harness import (
    START_LIMIT_S,
    Program,
    children,
    free_port,
    http_get,
    wait_until,
)

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

StartDemo = Callable[..., Program]


def _start(directory: Path, *flags: str) -> Program:
    ports = ("--port", str(free_port()), "--prometheus-port", str(free_port()))
    return Program("demo", [sys.executable, "-m", "extproc", "demo", *ports, *flags], directory)


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[StartDemo]:
    programs: list[Program] = []

    def start(*flags: str) -> Program:
        programs.append(_start(tmp_path, *flags))
        return programs[-1]

    yield start
    for program in programs:
        program.end()


@pytest.fixture(scope="module")
def serving(logs: Path) -> Iterator[Program]:
    """Start a demo that serves."""
    demo = _start(logs, "--serve", "--workers", "3")
    try:
        wait_until(
            lambda: "Ctrl-C" in demo.stdout or not demo.running, START_LIMIT_S, "the demo is ready"
        )
        assert demo.running, demo.describe()
        yield demo
    finally:
        demo.end()


def pasted(text: str, start: str) -> str:
    """Return the command that begins with *start*, up to the empty line after it, as printed."""
    found = re.search(rf"^[^\n]*{start}.*?(?=^\s*$)", text, re.DOTALL | re.MULTILINE)
    assert found, text
    return found.group()


def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run *command* as a shell that it is pasted into does."""
    return subprocess.run(
        ["bash", "-e"],
        input=command,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=directory,
        check=False,
    )


def test_demo_chats_and_ends(start_demo: StartDemo) -> None:
    """It shows one chat, then who answered the others, and leaves nothing running."""
    demo = start_demo()

    status = demo.wait(60)

    assert status == 0, demo.describe()
    assert "user:" in demo.stdout
    assert "Hello from worker-" in demo.stdout
    assert len(re.findall(r"worker-[12] ", demo.stdout)) >= 4
    assert demo.stderr == ""
    demo.check_nothing_left()


def test_printed_curl_works_as_pasted(serving: Program, tmp_path: Path) -> None:
    """The command is copied with the mouse, spaces at the start of its lines and all."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    command = pasted(serving.stdout, "curl")

    done = run(command, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "200 OK" in done.stdout
    assert '"object":"chat.completion"' in done.stdout.replace(" ", "")


def test_printed_sdk_snippet_works_as_pasted(serving: Program, tmp_path: Path) -> None:
    """The same for the Python snippet."""
    command = pasted(serving.stdout, "python[^\n]* - <<")

    done = run(command, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "Hello from worker-" in done.stdout
    assert "warning" not in done.stderr, done.stderr


def test_printed_urls_work(serving: Program) -> None:
    """Workers and metrics are where the demo says."""
    workers = re.findall(r"worker-\d\s+(http://\S+)", serving.stdout)
    (metrics,) = re.findall(r"metrics\s+(http://\S+)", serving.stdout)

    assert len(workers) == 3
    for url in workers:
        assert http_get(f"{url}/health")[0] == 200
    assert "vllm_extproc_workers" in http_get(metrics)[1]


def test_ctrl_c_stops_all_of_it(start_demo: StartDemo) -> None:
    """Router, Envoy and workers end; the exit is clean and silent."""
    demo = start_demo("--serve")
    wait_until(lambda: "Ctrl-C" in demo.stdout, START_LIMIT_S, "the demo is ready")
    family = children(demo.pid)

    demo.send_signal(signal.SIGINT)
    status = demo.wait(20)

    assert status == 0
    assert len(family) == 4
    demo.check_nothing_left()
    assert "Traceback" not in demo.stderr
    assert "error" not in demo.stderr


@pytest.mark.heavy
def test_demo_over_https(start_demo: StartDemo, tmp_path: Path) -> None:
    """It chats, and what it prints to paste works with a certificate that nobody vouches for."""
    made = Maker(tmp_path).make("demo")
    flags = ("--tls-cert", str(made.cert), "--tls-key", str(made.key))

    chatting = start_demo(*flags)
    chatted, shown = chatting.wait(60), chatting.stdout
    serving = start_demo("--serve", *flags)
    wait_until(
        lambda: "Ctrl-C" in serving.stdout or not serving.running, START_LIMIT_S, "it is ready"
    )
    sdk = run(pasted(serving.stdout, "python[^\n]* - <<"), tmp_path)
    curl = run(pasted(serving.stdout, "curl"), tmp_path) if shutil.which("curl") else None

    assert chatted == 0, shown
    assert "answered by" in shown
    assert "Router ready on https://127.0.0.1:" in serving.stdout
    assert "Hello from worker-" in sdk.stdout, sdk
    assert curl is None or '"chat.completion"' in curl.stdout, curl


def test_demo_shows_no_certificate(start_demo: StartDemo, tmp_path: Path) -> None:
    """So it says that it cannot ask a router that wants one."""
    made = Maker(tmp_path).make("demo")
    flags = ("--tls-cert", str(made.cert), "--tls-key", str(made.key))

    demo = start_demo(*flags, "--tls-client-ca", str(made.cert))

    assert demo.wait(20) == 1
    assert "leave --tls-client-ca out" in demo.stderr
