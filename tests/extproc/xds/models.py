"""The models of the golden cases: ``golden/<case>.in.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from extproc.address import Address
from extproc.clusters import ClusterView, EndpointView
from extproc.xds.model import EnvoyModel, HealthChecks, WorkerTls

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name.removesuffix(".in.yaml") for path in GOLDEN.glob("*.in.yaml"))


def read_model(case: str) -> EnvoyModel:
    """Return the model of *case*."""
    values: dict[str, Any] = yaml.safe_load((GOLDEN / f"{case}.in.yaml").read_text())
    values["admin_address"] = Address.parse(values["admin_address"])
    default, ranked = values.pop("default_pool", "default"), values.pop("ranks", False)
    values["clusters"] = tuple(
        _cluster(value, default=default, ranked=ranked) for value in values["clusters"]
    )
    if "health" in values:
        values["health"] = HealthChecks(**values["health"])
    if "tls" in values:
        values["tls"] = WorkerTls(**values["tls"])
    return EnvoyModel(**values)


def _cluster(value: dict[str, Any], *, default: str, ranked: bool) -> ClusterView:
    name = value["name"]
    return ClusterView(
        name,
        value.get("path", ""),
        tuple(map(_endpoint, value["endpoints"])),
        is_default=name.partition("~")[0] == default,
        ranked=ranked,
    )


def _endpoint(value: str | dict[str, Any]) -> EndpointView:
    return EndpointView(value) if isinstance(value, str) else EndpointView(**value)
