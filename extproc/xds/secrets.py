"""SDS: private keys and tokens, which Envoy shows in no dump of its configuration."""

from __future__ import annotations

from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import Secret

from extproc.xds.client_tls import build_client_tls_secrets
from extproc.xds.model import EnvoyModel
from extproc.xds.worker_key import build_worker_key_secret


def build_secrets(model: EnvoyModel) -> list[Secret]:
    """Return the secrets that listener and filters refer to by name."""
    return [
        *build_client_tls_secrets(model.certificates),
        build_worker_key_secret(model.access),
    ]
