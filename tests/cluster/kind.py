"""``python -m tests.cluster.kind`` (``make e2e``): the scenarios on a cluster that kind makes and that is deleted again.

Needs docker, kind, kubectl and helm on PATH, on Linux: elsewhere Docker's containers, which are the nodes, have
addresses that are not reached.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster import needs, runner
from tests.cluster.cluster import ENGINE_IMAGE, IMAGE, ROOT, CommandError, Programs

ENGINE = Path(__file__).parent / "engine"


def main() -> int:
    """Return the status: 0 when every scenario holds, 1 when one does not, 2 when it could not be tried."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.kind", description=__doc__)
    parser.add_argument("scenario", nargs="*", help="how its name begins; all without one")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    arguments = parser.parse_args()
    try:
        runner.choose(arguments.scenario)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    name = f"vllm-extproc-e2e-{os.getpid()}"
    if arguments.dry_run:
        for command in [*setup(name, Path("KUBECONFIG")), teardown(name)]:
            print(shlex.join(command))
        return 0
    if missing := needs.missing(needs.KIND):
        print("\n".join(["programs are missing:", *missing]), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return 0 if attempt(name, arguments.scenario) else 1
    except CommandError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the cluster is deleted", file=sys.stderr)
        return 130


def attempt(name: str, scenarios: list[str]) -> bool:
    """Run the scenarios on a cluster that is there only meanwhile; CommandError when one cannot be had."""
    with tempfile.TemporaryDirectory() as directory:
        kubeconfig = Path(directory, "kubeconfig")
        try:
            for command in setup(name, kubeconfig):
                print(shlex.join(command), flush=True)
                status = subprocess.run(command, check=False).returncode
                if status != 0:
                    raise CommandError(f"{shlex.join(command)} ended with {status}")
            return asyncio.run(runner.run(programs(kubeconfig), scenarios))
        finally:
            subprocess.run(teardown(name), check=False)


def setup(name: str, kubeconfig: Path) -> list[list[str]]:
    """Return the commands that make the images and a cluster *name* with them. Nobody's kubeconfig is touched."""
    return [
        ["docker", "build", "--tag", IMAGE, str(ROOT)],
        ["docker", "build", "--tag", ENGINE_IMAGE, f"--build-arg=ROUTER={IMAGE}", str(ENGINE)],
        ["kind", "create", "cluster", "--name", name, f"--kubeconfig={kubeconfig}", "--wait=180s"],
        ["kind", "load", "docker-image", "--name", name, IMAGE, ENGINE_IMAGE],
    ]


def teardown(name: str) -> list[str]:
    """Return the command that deletes the cluster *name*, and succeeds when there is none."""
    return ["kind", "delete", "cluster", "--name", name]


def programs(kubeconfig: Path) -> Programs:
    """Return what the scenarios speak to the cluster with."""
    kubectl, helm = shutil.which("kubectl"), shutil.which("helm")
    assert kubectl is not None
    assert helm is not None
    return Programs(kubectl, helm, {"KUBECONFIG": str(kubeconfig)})


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
