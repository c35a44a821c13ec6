"""Passwords: ``Authorization: Basic``, against a list of users."""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.extensions.filters.http.basic_auth.v3 import BasicAuth
from envoy_data_plane.google.protobuf import Any

from extproc.xds.model import CLIENT_HEADER, Passwords


def build_basic_auth(auth: Passwords) -> Any:
    """Return the filter. It leaves the password in the request; the route removes it."""
    config = BasicAuth(
        users=DataSource(inline_string=auth.users), forward_username_header=CLIENT_HEADER
    )
    return Any.pack(config)
