"""Filters that a route leaves out."""

from __future__ import annotations

from envoy_data_plane.envoy.config.route.v3 import FilterConfig
from envoy_data_plane.google.protobuf import Any


def build_filters_off(*names: str) -> dict[str, Any]:
    """Return the per-route configuration that leaves out the filters of these *names*."""
    return {name: Any.pack(FilterConfig(disabled=True)) for name in names}
