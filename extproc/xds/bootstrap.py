"""``envoy/bootstrap.yaml`` with its addresses: what Envoy needs before it can ask for the rest.

Plain YAML work, without the xDS classes: the launcher starts fast.
"""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from extproc.address import Address

OUTLIER_LOG = "outlier.jsonl"
"""Envoy's log of ejections, in the directory for events."""

EXTPROC_CLUSTER = "extproc"
"""Envoy's cluster for this service's gRPC: xDS, ext_proc and access log. Stands in the bootstrap."""


def read_shipped(name: str) -> str:
    """Return the text of a file of ``envoy/``: from the wheel, or from a checkout."""
    packed = resources.files("extproc") / "_data" / name
    if packed.is_file():
        return packed.read_text()
    return (Path(__file__).parents[2] / "envoy" / name).read_text()


@dataclasses.dataclass(frozen=True, slots=True)
class EnvoyLimits:
    """What Envoy may use of its machine."""

    memory_bytes: int
    connections: int
    """Of clients; each stream takes one to a worker besides."""


def build_bootstrap(
    grpc: Address, envoy_admin: Address, events_dir: str = "", limits: EnvoyLimits | None = None
) -> dict[str, Any]:
    """Return the shipped bootstrap with the service's and Envoy's own admin address put in.

    *events_dir*: where Envoy logs ejections; empty: nowhere. *limits*: None leaves those of the file.
    """
    bootstrap: dict[str, Any] = yaml.safe_load(read_shipped("bootstrap.yaml"))
    shipped_admin = bootstrap["admin"]["address"]
    bootstrap["admin"]["address"] = plain_address(envoy_admin)
    if envoy_admin.path:
        bootstrap["admin"]["address"]["pipe"]["mode"] = shipped_admin["pipe"]["mode"]
    if events_dir:
        log = bootstrap["cluster_manager"]["outlier_detection"]
        log["event_log_path"] = f"{events_dir}/{OUTLIER_LOG}"
    else:
        del bootstrap["cluster_manager"]
    if limits is not None:
        memory, connections = bootstrap["overload_manager"]["resource_monitors"]
        memory["typed_config"]["max_heap_size_bytes"] = limits.memory_bytes
        connections["typed_config"]["max_active_downstream_connections"] = limits.connections
    assignment = extproc_cluster(bootstrap)["load_assignment"]
    assignment["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"] = plain_address(grpc)
    return bootstrap


def extproc_cluster(config: dict[str, Any]) -> dict[str, Any]:
    """Return the cluster of this service in a bootstrap."""
    clusters = config["static_resources"]["clusters"]
    found: dict[str, Any] = next(c for c in clusters if c["name"] == EXTPROC_CLUSTER)
    return found


def plain_address(address: Address) -> dict[str, Any]:
    """Return *address* as Envoy's YAML has it."""
    if address.path:
        return {"pipe": {"path": address.path}}
    return {"socket_address": {"address": address.host, "port_value": address.port}}


def to_yaml(config: dict[str, Any]) -> str:
    """Write *config* so that a person can read it."""
    return yaml.safe_dump(config, sort_keys=False, default_flow_style=False, width=100)
