"""What of the machine the router may use."""

from __future__ import annotations

import os
import resource

import pytest

from extproc import limits
from extproc.limits import OWN_FILES, UNLIMITED_CONNECTIONS, max_connections, memory_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MB = 2**20


def system(root, cgroup, files):
    """Make a system whose control groups are as in *files*."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"memory.max": f"{512 * MB}\n"}, 512 * MB),
        ("0::/\n", {"memory.max": "max\n"}, MACHINE),
        ("0::/\n", {"memory.max": f"{2 * MACHINE}\n"}, MACHINE),
        ("0::/\n", {}, MACHINE),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{64 * MB}\n"}, 64 * MB),
        ("0::/a\n", {"a/memory.max": f"{64 * MB}\n", "memory.max": f"{32 * MB}\n"}, 32 * MB),
        ("0::/host/path\n", {"memory.max": f"{64 * MB}\n"}, 64 * MB),
        ("0::/../x\n", {"memory.max": f"{64 * MB}\n"}, 64 * MB),
        (
            "4:memory:/a\n1:cpu:/\n0::/\n",
            {"memory/a/memory.limit_in_bytes": f"{128 * MB}\n"},
            128 * MB,
        ),
        (
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
            MACHINE,
        ),
        ("", {}, MACHINE),
    ],
)
def test_memory_is_that_of_the_container_or_the_machine(tmp_path, cgroup, files, expected):
    """Whichever is less, of all control groups around; both versions of them."""
    assert memory_bytes(system(tmp_path, cgroup, files)) == expected


def test_memory_where_there_are_no_control_groups(tmp_path):
    """As on other systems than Linux."""
    assert memory_bytes(tmp_path) == MACHINE
    assert 0 < memory_bytes() <= MACHINE


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (20_000, (20_000 - OWN_FILES) * 3 // 4),
        (OWN_FILES, 1),
        (10, 1),
        (resource.RLIM_INFINITY, UNLIMITED_CONNECTIONS),
    ],
)
def test_connections_leave_files_for_streams(monkeypatch, files, expected):
    """At least one client, however few there are."""
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (files, files))

    assert max_connections() == expected
