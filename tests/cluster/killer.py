"""Kills containers from outside: what runs in a container cannot kill its own first process."""

from __future__ import annotations

import json
import time
from typing import Any, Self

from tests.cluster.cluster import IMAGE, Cluster, until

POD = "killer"
# Processes of a container are in a group that bears its id, in any version of cgroups.
SCRIPT = """
import os, pathlib, signal, sys
killed = 0
for entry in pathlib.Path("/proc").iterdir():
    try:
        if entry.name.isdigit() and sys.argv[1] in (entry / "cgroup").read_text():
            os.kill(int(entry.name), signal.SIGKILL)
            killed += 1
    except (FileNotFoundError, ProcessLookupError):
        pass
sys.exit(not killed)
"""


class Killer:
    """A Pod that sees the processes of its node. Use ``async with``."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def __aenter__(self) -> Self:
        container = {
            "name": POD,
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["sleep", "3600"],
            "securityContext": {"runAsUser": 0},
        }
        spec = {"hostPID": True, "terminationGracePeriodSeconds": 0, "containers": [container]}
        await self._cluster.kubectl(
            *("run", POD, f"--image={IMAGE}", "--restart=Never"),
            f"--overrides={json.dumps({'apiVersion': 'v1', 'spec': spec})}",
        )

        async def running() -> bool:
            phase = await self._cluster.kubectl("get", "pod", POD, "-o=jsonpath={.status.phase}")
            return phase == "Running"

        await until(running, 60, "the killer is there")
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._cluster.kubectl("delete", "pod", POD, "--now", "--wait")

    async def kill(self, pod: dict[str, Any], container: str) -> float:
        """Kill all processes of a container; return when that began, on the clock of ``time.monotonic``."""
        (status,) = [s for s in pod["status"]["containerStatuses"] if s["name"] == container]
        identifier = status["containerID"].rsplit("/", 1)[1]
        at = time.monotonic()
        await self._cluster.kubectl("exec", POD, "--", "python3", "-c", SCRIPT, identifier)
        return at
