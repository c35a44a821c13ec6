"""Limits of the operating system that a router must not run into."""

from __future__ import annotations

import os
import resource
from pathlib import Path

BACKLOG = 4096
"""Connections that wait to be accepted; on a Unix socket Envoy's next one fails at once."""

OWN_FILES = 200
"""What Envoy opens for itself: sockets of each of its threads, logs, connections to the service."""

UNLIMITED_CONNECTIONS = 1_000_000


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, for this process and its children.

    Every stream takes two in Envoy; the usual soft limit of 1024 would fail the 500th.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def max_connections() -> int:
    """Return how many clients may be connected so that open files are left for their streams to workers.

    Not each of them has one: connections wait for their next request, HTTP/2 carries many, and some are held
    open by an attacker. Streams for which no file is left get 503.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return UNLIMITED_CONNECTIONS
    return max(1, (limit - OWN_FILES) * 3 // 4)


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may use: of the machine, or of its container when that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> list[int]:
    """Return the memory limits of our control group and of those around it."""
    cgroups = root / "sys/fs/cgroup"
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that of the host, and the mount our own group already.
        group = mount / path.lstrip("/")
        groups = [group, *group.parents]
        for place in groups[: groups.index(mount) + 1] if mount in groups else [mount]:
            text = _read(place / name).strip()
            if text.isdigit():  # "max" is no limit
                found.append(int(text))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
