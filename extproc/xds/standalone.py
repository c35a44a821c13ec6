"""A whole Envoy configuration without xDS, for people who run an Envoy of their own."""

from __future__ import annotations

import typing
from typing import Any

import betterproto2

from extproc.address import Address
from extproc.xds.bootstrap import build_bootstrap, extproc_cluster
from extproc.xds.cluster import build_clusters
from extproc.xds.listener import build_listener
from extproc.xds.model import EnvoyModel
from extproc.xds.prefill_listener import build_prefill_listener, build_prefill_routes
from extproc.xds.route import build_routes
from extproc.xds.worker_key import build_worker_key_secret


def build_standalone(model: EnvoyModel, grpc: Address, envoy_admin: Address) -> dict[str, Any]:
    """Return the bootstrap with listener, routes, clusters and workers inside."""
    config = build_bootstrap(grpc, envoy_admin, model.events_dir)
    del config["dynamic_resources"]
    listeners = [build_listener(model, build_routes(model))]
    if model.prefill_address is not None:
        listeners.append(build_prefill_listener(model, build_prefill_routes(model)))
    config["static_resources"] = {
        "listeners": [plain(listener) for listener in listeners],
        "clusters": [
            extproc_cluster(config),
            *(plain(cluster) for cluster in build_clusters(model, static=True)),
        ],
    }
    config["static_resources"]["secrets"] = [plain(build_worker_key_secret(model.access))]
    return config


def plain(message: betterproto2.Message) -> dict[str, Any]:
    """Return *message* under the names that Envoy's YAML has.

    Fields have those names already; ``Casing.SNAKE`` would make ``consecutive_5_xx`` of ``consecutive_5xx``.
    """
    return message.to_dict(casing=typing.cast(betterproto2.Casing, str))
