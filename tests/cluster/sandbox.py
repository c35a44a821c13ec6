"""Runs a command in network, mount, process and cgroup namespaces of its own, and leaves nothing of it behind.

All processes of the command live in one process namespace: when its first one is killed the kernel ends them all,
and with them go the mounts and the network. Only cgroups outlive that; they are removed here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "vllm-extproc-e2e-"
CGROUPS = Path("/sys/fs/cgroup")
END_S = 20.0
PR_SET_PDEATHSIG = 1


class LeftoverError(Exception):
    """Something of the command is still there."""


def run(command: list[str], *, environment: dict[str, str] | None = None) -> int:
    """Run *command* to its end and return its status; SIGTERM and Ctrl-C end it and all that it started."""
    remove_stale_groups()
    with _groups() as groups, _interruptible():
        sandboxed = [
            *("unshare", "--cgroup", "--net", "--mount", "--pid", "--ipc", "--uts"),
            *("--fork", "--kill-child", "--mount-proc", "--propagation", "private"),
            # The first process of the namespace must take in the orphans of containerd: a shell does.
            *("sh", "-c", '"$@"; exit $?', "sh", *command),
        ]
        process = subprocess.Popen(
            sandboxed,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: _enter(groups),  # noqa: PLW1509  # there are no threads here
        )
        try:
            return process.wait()
        finally:
            process.kill()
            process.wait()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGTERM into what Ctrl-C is; a shell's background jobs would not even hear that."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def hierarchies() -> list[Path]:
    """Return where the hierarchies of cgroups (version 1) are mounted, and the unified one beside them."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    fields = [line.split() for line in lines]
    return [Path(where) for _, where, kind, *_ in fields if kind in ("cgroup", "cgroup2")]


@contextmanager
def _groups() -> Iterator[list[Path]]:
    """Make a group in every hierarchy, and remove it with all below it."""
    groups = [hierarchy / f"{PREFIX}{os.getpid()}" for hierarchy in hierarchies()]
    try:
        for group in groups:
            group.mkdir()
            # A new group of cpusets has neither processors nor memory.
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (group / name).exists():
                    (group / name).write_text((group.parent / name).read_text())
        yield groups
    finally:
        remove_groups(groups)


def _enter(groups: list[Path]) -> None:
    """Between fork and exec: join *groups*, and end when the parent does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for group in groups:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def remove_groups(groups: list[Path]) -> None:
    """Remove *groups* with all below them; LeftoverError when processes stay in them."""
    end = time.monotonic() + END_S
    for group in groups:
        for found in [*sorted(group.rglob("*/"), reverse=True), group]:
            while found.exists():
                try:
                    found.rmdir()
                except OSError as error:
                    if time.monotonic() > end:
                        raise LeftoverError(f"{found} cannot be removed: {error}") from error
                    time.sleep(0.05)


def remove_stale_groups() -> None:
    """Remove the groups of a run that was killed."""
    for hierarchy in hierarchies():
        for group in hierarchy.glob(f"{PREFIX}*"):
            if not Path("/proc", group.name.removeprefix(PREFIX)).exists():
                remove_groups([group])
