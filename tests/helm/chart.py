"""Renders the chart with the real Helm, and finds things in what comes out."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "vllm-extproc"
CACHE = Path(os.environ.get("HELM_CACHE", ROOT / ".cache" / "helm"))
NEW, OLD = "1.34.0", "1.20.2"
"""Versions of Kubernetes that manifests are rendered for."""

NAMESPACE = "fleet"
LIMIT_S = 60
PRESETS = {
    "default": [],
    "cache-aware": ["-f", str(CHART / "values-cache-aware.yaml")],
    "dp": ["-f", str(CHART / "values-dp.yaml"), "--set", "vllm.enabled=true"],
    "pd": ["-f", str(CHART / "values-pd.yaml"), "--set", "vllm.enabled=true"],
    "sidecar-only": ["--set", "mode=sidecar-only"],
    "everything": ["-f", str(Path(__file__).parent / "cases" / "everything.yaml")],
    "try-out": ["--set", "simWorkers.enabled=true,envoy.fromWheel=true"],
}
"""Arguments of Helm by the name of the case."""


class Helm:
    """One Helm."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run it, with nothing of this user's."""
        home = "/nonexistent"
        return subprocess.run(
            [str(self._path), *arguments],
            env={"PATH": "/usr/bin:/bin", "HOME": home, "HELM_CACHE_HOME": home},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=check,
        )

    def render(self, *arguments: str, kube: str = NEW) -> list[dict[str, Any]]:
        """Return the objects of the release ``router``, in an order of their own."""
        done = self.run(
            *("template", "router", str(CHART), "--namespace", NAMESPACE),
            *("--kube-version", kube, "--api-versions", "gateway.networking.k8s.io/v1"),
            *arguments,
        )
        assert "warning" not in done.stderr.lower(), done.stderr
        objects = [found for found in yaml.safe_load_all(done.stdout) if found]
        return sorted(objects, key=lambda o: (o["kind"], o["metadata"]["name"]))

    def refusal(self, *arguments: str) -> str:
        """Return what it says against values."""
        done = self.run("template", "router", str(CHART), *arguments, check=False)
        assert done.returncode != 0, "the values were accepted"
        return done.stderr


def one(objects: list[dict[str, Any]], kind: str, suffix: str = "") -> dict[str, Any]:
    """Return the object of *kind* whose name is the release's with *suffix*."""
    name = f"router-vllm-extproc{suffix}"
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def pod_specs(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the specification of every Pod, by the name of what makes them."""
    for found in objects:
        if found["kind"] in ("Deployment", "StatefulSet"):
            yield found["metadata"]["name"], found["spec"]["template"]["spec"]


def container(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return a container of the router's Pods."""
    spec = one(objects, "Deployment")["spec"]["template"]["spec"]
    (found,) = [c for c in spec["containers"] if c["name"] == name]
    return found


def service_config(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the service's configuration file."""
    return yaml.safe_load(one(objects, "ConfigMap")["data"]["config.yaml"])


def flags(objects: list[dict[str, Any]]) -> list[str]:
    """Return the service's flags as Kubernetes hands them over, without the file's."""
    found = [a for a in container(objects, "extproc")["args"][1:] if not a.startswith("--config=")]
    return [flag.replace("$(POD_NAMESPACE)", NAMESPACE) for flag in found]


def dotted(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings by its path, mappings with content included."""
    for name, value in values.items():
        here = f"{path}.{name}" if path else name
        yield here, value
        if isinstance(value, dict):
            yield from dotted(value, here)
