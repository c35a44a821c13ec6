"""A whole Envoy configuration without xDS, for people who run an Envoy of their own."""

from __future__ import annotations

from typing import Any

import betterproto2

from extproc.address import Address
from extproc.xds.bootstrap import build_bootstrap, extproc_cluster
from extproc.xds.cluster import build_clusters
from extproc.xds.listener import build_listener
from extproc.xds.model import EnvoyModel
from extproc.xds.route import build_routes


def build_standalone(model: EnvoyModel, grpc: Address, envoy_admin: Address) -> dict[str, Any]:
    """Return the bootstrap with listener, routes, clusters and workers inside."""
    config = build_bootstrap(grpc, envoy_admin)
    del config["dynamic_resources"]
    listener = build_listener(model, build_routes(model))
    config["static_resources"] = {
        "listeners": [_plain(listener)],
        "clusters": [
            extproc_cluster(config),
            *(_plain(cluster) for cluster in build_clusters(model, static=True)),
        ],
    }
    return config


def _plain(message: betterproto2.Message) -> dict[str, Any]:
    return message.to_dict(casing=betterproto2.Casing.SNAKE)
