"""Processes of the bench: free ports, file limits, CPU and memory as the kernel counts them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from extproc.child import Child

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.02
_LOOPS = 200_000


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; processes started later inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def free_ports(count: int) -> list[int]:
    """Return *count* different loopback ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, user and system, all threads, ended ones included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def machine_busy_s() -> float:
    """Return the CPU time spent on the whole machine, stolen time included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def loop_ms() -> float:
    """Return the CPU time of a fixed loop: how fast this machine is at this moment."""
    started = time.thread_time()
    total = 0
    for number in range(_LOOPS):
        total += number
    return (time.thread_time() - started) * 1e3


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one process, in MB (10^6 bytes)."""

    rss_mb: float
    pss_mb: float
    """Pages shared with other processes count in proportion: what one more such process costs."""


def memory(pid: int) -> Memory:
    """Read the memory of a process."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0])
    return Memory(rss_mb=found["Rss"] * 1024 / 1e6, pss_mb=found["Pss"] * 1024 / 1e6)


async def until(up: Callable[[], Awaitable[bool]], children: dict[str, Child], logs: Path) -> None:
    """Wait until *up* says so; fail with the end of the logs when a child ends first."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await up():
                for child in children.values():
                    if not child.running:
                        status = await child.wait()
                        raise RuntimeError(
                            f"{child.name} ended with status {status}\n{_tails(logs)}"
                        )
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        names = ", ".join(children)
        raise RuntimeError(
            f"{names} not up after {START_TIMEOUT_S:.0f} s\n{_tails(logs)}"
        ) from None


def _tails(logs: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted(logs.glob("*.log")))
