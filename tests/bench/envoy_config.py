"""Envoy configurations of the bench: the upstream, and this project's own without the service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extproc.address import Address
from extproc.clusters import ClusterView, EndpointView
from extproc.config import Config
from extproc.envoy_settings import envoy_model
from extproc.registry import DEFAULT_POOL
from extproc.xds.ext_proc import FILTER_NAME
from extproc.xds.standalone import build_standalone

_TYPES = "type.googleapis.com/envoy.extensions"
_ANSWER = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "bench-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "It sends each request to a worker."},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 8, "total_tokens": 1008},
    }
)


def build_alone(config: Config, endpoints: Sequence[str], admin: Path) -> dict[str, Any]:
    """Return the configuration of *config* with all taken out that has to do with the service.

    What is left is the same listener, route and pool, balanced by Envoy's least request.
    """
    workers = tuple(map(EndpointView, endpoints))
    model = envoy_model(config, (ClusterView(DEFAULT_POOL, "", workers, is_default=True),))
    static = build_standalone(model, Address(path="/none"), Address(path=str(admin)))
    (listener,) = static["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [f for f in manager["http_filters"] if f["name"] != FILTER_NAME]
    del manager["access_log"], manager["upgrade_configs"]
    (host,) = manager["route_config"]["virtual_hosts"]
    host["routes"] = [route for route in host["routes"] if route["name"] == "unpicked"]
    clusters = static["static_resources"]["clusters"]
    (pool,) = [cluster for cluster in clusters if cluster["name"] == DEFAULT_POOL]
    (override,) = pool["load_balancing_policy"]["policies"]
    pool["load_balancing_policy"] = override["typed_extension_config"]["typed_config"][
        "fallback_policy"
    ]
    static["static_resources"]["clusters"] = [pool]
    return static


def build_upstream(ports: Sequence[int], admin: Path) -> dict[str, Any]:
    """Return an Envoy that takes in each request with its body and answers at once."""
    return {
        "admin": {"address": {"pipe": {"path": str(admin), "mode": 0o600}}},
        "static_resources": {"listeners": [_answering(port) for port in ports]},
    }


def _answering(port: int) -> dict[str, Any]:
    route = {
        "match": {"prefix": "/"},
        "direct_response": {"status": 200, "body": {"inline_string": _ANSWER}},
        "response_headers_to_add": [
            {
                "header": {"key": "content-type", "value": "application/json"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
    }
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "upstream",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            # Waits for the body: an answer before its end would close the connection.
            {
                "name": "envoy.filters.http.buffer",
                "typed_config": {
                    "@type": f"{_TYPES}.filters.http.buffer.v3.Buffer",
                    "max_request_bytes": 1 << 24,
                },
            },
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
            },
        ],
    }
    return {
        "name": f"upstream-{port}",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }
