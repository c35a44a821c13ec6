"""``python -m tests.cluster.local`` (``make e2e-local``): the scenarios on a cluster of one node, made here.

Everything that is needed besides Debian packages is built first, in this machine's own surroundings. Then the same
program runs once more inside namespaces, where it starts the cluster and runs the scenarios.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster import image, needs, runner, sandbox
from tests.cluster.cluster import ROOT, CommandError, Programs
from tests.cluster.node import Node, StartError

CACHE = ROOT / ".cache"
KUBERNETES = CACHE / "k8s"
IMAGES = CACHE / "e2e"
HELM = CACHE / "helm" / "helm4"
LOGS = IMAGES / "logs"


def main() -> int:
    """Return the status: 0 when every scenario holds, 1 when one does not, 2 when it could not be tried."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.local", description=__doc__)
    parser.add_argument("scenario", nargs="*", help="how its name begins; all without one")
    parser.add_argument(
        "--install", action="store_true", help="install the Debian packages that are missing"
    )
    parser.add_argument(
        "--helm", metavar="PROGRAM", type=Path, default=HELM, help="another Helm than %(default)s"
    )
    parser.add_argument("--inside", metavar="DIRECTORY", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        runner.choose(arguments.scenario)
        if arguments.inside is not None:
            return inside(arguments.inside, arguments.scenario, arguments.helm)
        return outside(arguments.scenario, arguments.helm.resolve(), install=arguments.install)
    except (ValueError, CommandError, StartError, image.BuildError, sandbox.LeftoverError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        return 130


def outside(scenarios: list[str], helm: Path, *, install: bool) -> int:
    """Build what is missing, and run the scenarios in namespaces."""
    sentences, packages = needs.local(KUBERNETES / "bin")
    if install and packages and not sentences:
        command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
        subprocess.run(command, check=True)
        sentences, packages = needs.local(KUBERNETES / "bin")
    if lacking := needs.tell(sentences, packages):
        print(lacking, file=sys.stderr)
        return 2
    build = [str(ROOT / "tests" / "k8s" / "build.sh"), str(KUBERNETES), *needs.KUBERNETES]
    if subprocess.run(build, check=False).returncode != 0:
        return 2
    if not helm.exists():
        fetch = [sys.executable, str(ROOT / "tests" / "helm" / "fetch.py"), str(HELM.parent)]
        subprocess.run(fetch, check=True)
    IMAGES.mkdir(parents=True, exist_ok=True)
    lock = (IMAGES / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError("another run from this checkout is under way") from None
    with lock:
        return _run(scenarios, helm)


def _run(scenarios: list[str], helm: Path) -> int:
    image.build(IMAGES)
    with tempfile.TemporaryDirectory(prefix="cluster-e2e-") as directory:
        again = [sys.executable, "-m", "tests.cluster.local", "--inside", directory]
        again += [f"--helm={helm}", *scenarios]
        try:
            return sandbox.run(again, environment={"HOME": directory, "PYTHONPATH": str(ROOT)})
        finally:
            _keep_logs(Path(directory))


def inside(directory: Path, scenarios: list[str], helm: Path) -> int:
    """Start the cluster and run the scenarios; whoever ends this process ends the cluster."""
    begun = time.monotonic()
    node = Node(directory, KUBERNETES / "bin")
    node.start([IMAGES / "router.tar", IMAGES / "engine.tar"])
    print(f"the cluster is up after {time.monotonic() - begun:.1f} s", flush=True)
    kubectl = shutil.which("kubectl")
    assert kubectl is not None
    programs = Programs(kubectl, str(helm), {"KUBECONFIG": str(node.kubeconfig)})
    hold = asyncio.run(runner.run(programs, scenarios))
    node.check()
    return 0 if hold else 1


def _keep_logs(directory: Path) -> None:
    """Keep what the programs of the cluster have written, of the last run."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    for log in directory.glob("*.log"):
        shutil.copy2(log, LOGS)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
