"""What `make e2e` would do, with programs that only write down how they were called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import needs
from tests.cluster.cluster import ENGINE_IMAGE, IMAGE, ROOT

LIMIT_S = 60
NOTE = '#!/bin/sh\necho "$(basename "$0") $*" >> {calls}\n'


class Machine:
    """One whose PATH leads to such programs alone."""

    def __init__(self, directory: Path) -> None:
        self.programs = directory / "bin"
        self.programs.mkdir()
        self._calls = directory / "calls"
        self._calls.touch()
        for name in ("basename", "sh"):
            found = next(p for p in (Path("/bin", name), Path("/usr/bin", name)) if p.exists())
            (self.programs / name).symlink_to(found)
        for name in needs.KIND:
            self.add(name, "")

    def add(self, name: str, more: str) -> None:
        program = self.programs / name
        program.write_text(NOTE.format(calls=self._calls) + more)
        program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tests.cluster.kind", *arguments],
            cwd=ROOT,
            env={**os.environ, "PATH": str(self.programs)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
def test_missing_programs_are_named_and_nothing_is_run(machine: Machine):
    """Each with where it comes from."""
    (machine.programs / "kind").unlink()
    (machine.programs / "helm").unlink()

    done = machine.run()

    assert done.returncode == 2
    assert needs.KIND["kind"] in done.stderr
    assert needs.KIND["helm"] in done.stderr
    assert needs.KIND["docker"] not in done.stderr
    assert machine.calls == []


@pytest.mark.slow
def test_dry_run_prints_the_commands_and_runs_none(machine: Machine):
    """Images, cluster, images into the cluster, and the end."""
    done = machine.run("--dry-run")

    begins = [line.split()[:3] for line in done.stdout.splitlines()]
    assert begins == [
        ["docker", "build", "--tag"],
        ["docker", "build", "--tag"],
        ["kind", "create", "cluster"],
        ["kind", "load", "docker-image"],
        ["kind", "delete", "cluster"],
    ]
    assert IMAGE in done.stdout
    assert ENGINE_IMAGE in done.stdout
    assert (done.returncode, machine.calls) == (0, [])


@pytest.mark.slow
def test_cluster_is_deleted_when_a_step_fails(machine: Machine):
    """Of the same name, and the status says that nothing was tried."""
    machine.add("kind", '[ "$1" != load ] || exit 1\n')

    done = machine.run("chat")

    made, loaded, deleted = [call for call in machine.calls if call.startswith("kind")]
    name = made.split("--name ")[1].split()[0]
    assert loaded.startswith("kind load")
    assert deleted == f"kind delete cluster --name {name}"
    assert done.returncode == 2


@pytest.mark.slow
def test_cluster_is_deleted_when_the_scenarios_cannot_run(machine: Machine):
    """A kubectl that says nothing is an error, not a success."""
    done = machine.run("chat")

    assert machine.calls[-1].startswith("kind delete cluster")
    assert any(call.startswith("kubectl proxy") for call in machine.calls)
    assert "kubectl proxy says" in done.stderr
    assert done.returncode == 2


@pytest.mark.slow
def test_unknown_scenario_is_refused(machine: Machine):
    """With the ones there are."""
    done = machine.run("nonsense")

    assert done.returncode == 2
    assert "chat through the Service" in done.stderr
    assert machine.calls == []
