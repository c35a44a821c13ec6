"""Builds the images of the scenarios where no registry is reached: from Debian packages and wheels, without a daemon.

What is fetched comes from where this machine's own apt and pip look. Everything is kept in the cache: a second run
takes up only what has changed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.cluster.cluster import ENGINE_IMAGE, IMAGE, ROOT

SUITE = "bookworm"
PYTHON = "3.11"
"""That of the suite: wheels are for it."""

BASE = "localhost/debian-python:e2e"
PACKAGES = "python3,python3-venv,ca-certificates"
ENGINE = Path(__file__).parent / "engine"


class BuildError(Exception):
    """An image cannot be built; the text says what to do."""


def build(cache: Path) -> list[Path]:
    """Return archives of the router's image and of the engine's, made from the checkout as it is."""
    context = cache / "context"
    archives = [cache / "router.tar", cache / "engine.tar"]
    _checkout(context)
    wheels = _wheels(cache)
    state = cache / "images.state"
    digest = _digest([*wheels.iterdir(), *context.rglob("*"), *ENGINE.iterdir()])
    if state.exists() and state.read_text() == digest and all(map(Path.exists, archives)):
        return archives
    state.unlink(missing_ok=True)
    shutil.copytree(wheels, context / "wheels")
    store = _Store(cache / "store")
    if not store.has(BASE):
        print("building the base from Debian packages ...", flush=True)
        store.import_base(_base(cache))
    print("building the images ...", flush=True)
    store.build(
        context,
        IMAGE,
        {"BASE": BASE, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"},
    )
    store.build(ENGINE, ENGINE_IMAGE, {"ROUTER": IMAGE})
    for archive, name in zip(archives, (IMAGE, ENGINE_IMAGE), strict=True):
        store.save(name, archive)
    state.write_text(digest)
    return archives


class _Store:
    """Images of buildah, in a place of their own."""

    def __init__(self, directory: Path) -> None:
        self._buildah = [
            *("buildah", "--storage-driver", "overlay"),
            *("--root", str(directory / "root"), "--runroot", str(directory / "run")),
        ]

    def has(self, name: str) -> bool:
        command = [*self._sandboxed(), "inspect", "--type", "image", name]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def import_base(self, root: Path) -> None:
        """Make BASE of the file system in the archive *root*."""
        recipe = f"FROM scratch\nADD {root.name} /\n"
        command = [*self._bud(), "--tag", BASE, "--file", "-", str(root.parent)]
        _run(command, stdin=recipe)

    def build(self, context: Path, name: str, arguments: dict[str, str]) -> None:
        flags = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        _run([*self._bud(), *flags, "--tag", name, str(context)])
        # Layers of what was built before under this name.
        _run([*self._sandboxed(), "rmi", "--prune"])

    def save(self, name: str, archive: Path) -> None:
        archive.unlink(missing_ok=True)
        _run([*self._sandboxed(), "push", "--quiet", name, f"docker-archive:{archive}:{name}"])

    def _bud(self) -> list[str]:
        # In a plain chroot, for which no right is needed that virtual machines may lack.
        return [
            *self._sandboxed(),
            *("bud", "--isolation", "chroot", "--format", "docker", "--quiet"),
        ]

    def _sandboxed(self) -> list[str]:
        # Without a network, and with mounts that end with it.
        return ["unshare", "--net", "--mount", "--propagation", "private", *self._buildah]


def _checkout(context: Path) -> None:
    """Copy what git knows, or does not ignore, to *context*, of that what .dockerignore lets in."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    wanted = [line.removeprefix("!") for line in lines if line.startswith("!")]
    shutil.rmtree(context, ignore_errors=True)
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "-z",
            "Dockerfile",
            ".dockerignore",
            *wanted,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, context / name)


def requirements() -> list[str]:
    """Return what the image is made of besides this project, as pyproject.toml asks for it."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = found["project"]
    extras = project["optional-dependencies"]
    build = found["build-system"]["requires"]
    return [*build, *project["dependencies"], *extras["envoy"], *extras["kubernetes"]]


def constraints() -> str:
    """Return the versions of requirements.lock without their digests, as the Dockerfile reads them."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [re.match(r"([A-Za-z0-9_.-]+==[^ ]+( *;.*[^ \\])?) *\\?$", line) for line in lines]
    return "".join(f"{pin[1]}\n" for pin in pins if pin)


def _wheels(cache: Path) -> Path:
    """Return a folder with the wheels that the image is made of."""
    wanted = "\n".join(requirements())
    pins = constraints()
    folder = cache / f"wheels-{hashlib.sha256((wanted + pins).encode()).hexdigest()[:12]}"
    if not folder.exists():
        print("fetching wheels ...", flush=True)
        for stale in cache.glob("wheels-*"):
            shutil.rmtree(stale)
        fresh = cache / "wheels.new"
        shutil.rmtree(fresh, ignore_errors=True)
        (cache / "constraints.txt").write_text(pins)
        (cache / "requirements.txt").write_text(wanted)
        command = [
            *(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"),
            *("--dest", str(fresh), "--python-version", PYTHON, "--only-binary", ":all:"),
            *("--constraint", str(cache / "constraints.txt")),
            *("--requirement", str(cache / "requirements.txt")),
        ]
        _run(command)
        fresh.rename(folder)
    return folder


def mirrors() -> list[str]:
    """Return the lines of a sources.list with the Debian of the suite as this machine's apt knows it."""
    command = [
        *("apt-get", "indextargets", "--format", "deb $(REPO_URI) $(RELEASE) $(COMPONENT)"),
        *("Created-By: Packages", f"Codename: {SUITE}", "Label: Debian"),
    ]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = sorted(set(listed.splitlines()))
    if not found:
        raise BuildError(
            f"apt knows no Debian {SUITE} here: add it to its sources and apt-get update"
        )
    return found


def _base(cache: Path) -> Path:
    archive = cache / "base.tar"
    if not archive.exists():
        fresh = cache / "base.new.tar"
        fresh.unlink(missing_ok=True)
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", SUITE]
        _run([*command, str(fresh), "-"], stdin="\n".join(mirrors()) + "\n")
        fresh.rename(archive)
    return archive


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        if path.is_file():
            digest.update(f"{path}\0{path.stat().st_mode}\0".encode())
            # A wheel's name says its content.
            digest.update(b"" if path.suffix == ".whl" else path.read_bytes())
    return digest.hexdigest()


def _run(command: list[str], *, stdin: str = "") -> None:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
