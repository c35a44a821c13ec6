"""What runs in namespaces of its own leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import needs, sandbox
from tests.cluster.cluster import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

WAIT_S = 20.0
PROGRAM = "import sys; from tests.cluster import sandbox; sys.exit(sandbox.run(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def _possible(tmp_path: Path) -> None:
    sentences, packages = needs.local(tmp_path)
    if "util-linux" in packages or sentences:
        pytest.skip(needs.tell(sentences, packages))


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def groups_of(pid: int) -> list[Path]:
    return [g for h in sandbox.hierarchies() for g in h.glob(f"{sandbox.PREFIX}{pid}")]


def processes_with(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text in (entry / "cmdline").read_bytes().decode().split("\0"):
                found.append(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def test_status_is_the_commands_and_what_it_started_ends_with_it():
    """Its background processes too, and groups that it made."""
    mark = f"300.{os.getpid()}"
    script = f"mkdir /sys/fs/cgroup/memory/$G/inner; sleep {mark} & exit 3"
    group = f"{sandbox.PREFIX}{os.getpid()}"

    assert sandbox.run(["sh", "-c", script], environment={"G": group}) == 3

    assert groups_of(os.getpid()) == []
    assert processes_with(mark) == []


def test_mounts_and_network_are_its_own():
    """Neither is seen outside, and the outside's network not inside."""
    script = (
        "mount -t tmpfs mark-of-a-test /mnt && ip link add mark0 type bridge && ! ip route | grep ."
    )

    assert sandbox.run(["sh", "-c", script]) == 0

    assert "mark-of-a-test" not in Path("/proc/self/mounts").read_text()
    assert not Path("/sys/class/net/mark0").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_everything_ends_when_the_program_is_told_to(number: signal.Signals):
    """Killed it cannot clean up: the next run does."""
    mark = f"301.{os.getpid()}{number:d}"
    command = [sys.executable, "-c", PROGRAM, "sh", "-c", f"sleep {mark} & wait"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as program:
        try:
            until(lambda: processes_with(mark))
            assert len(groups_of(program.pid)) > 3
        finally:
            program.send_signal(number)
        program.wait(WAIT_S)

    until(lambda: not processes_with(mark))
    if number == signal.SIGKILL:
        until(lambda: not any((g / "cgroup.procs").read_text() for g in groups_of(program.pid)))
        sandbox.remove_stale_groups()
    assert groups_of(program.pid) == []
