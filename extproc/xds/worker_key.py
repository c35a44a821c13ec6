"""``Authorization: Bearer KEY`` for workers.

The key is a secret (SDS), which Envoy shows nowhere. Two filters show it to workers, one in place of what the
client sent and one where it sent nothing; routes (RDS) leave out both or one of them. Both stand in the listener
itself and are there when no key is: a filter that came by ECDS later would wait for its secret for ever,
since Envoy 1.40 subscribes to secrets of a listener only while that starts.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import DataSource, TypedExtensionConfig
from envoy_data_plane.envoy.extensions.filters.http.credential_injector.v3 import CredentialInjector
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.http.injected_credentials.generic.v3 import Generic
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    GenericSecret,
    SdsSecretConfig,
    Secret,
)
from envoy_data_plane.google.protobuf import Any

from extproc.xds.filter_off import build_filters_off
from extproc.xds.model import Access
from extproc.xds.wire import from_ads

WORKER_KEY_SECRET = "worker_api_key"  # noqa: S105  a name
NO_KEY = "none"
"""Stands in the secret when there is no key; no route lets it be shown."""

REPLACING_FILTER = "worker-key-replacing"
ADDING_FILTER = "worker-key-adding"


def build_worker_key_filters(*, static: bool) -> list[HttpFilter]:
    """Return the filters that show workers the key; *static*: the secret stands in the same file."""
    secret = SdsSecretConfig(name=WORKER_KEY_SECRET)
    if not static:
        secret.sds_config = from_ads()
    credential = TypedExtensionConfig(
        name="envoy.http.injected_credentials.generic",
        typed_config=Any.pack(Generic(credential=secret, header="authorization")),
    )
    return [
        HttpFilter(
            name=name,
            typed_config=Any.pack(CredentialInjector(overwrite=overwrite, credential=credential)),
        )
        for name, overwrite in ((REPLACING_FILTER, True), (ADDING_FILTER, False))
    ]


def build_worker_key_off(access: Access | None = None) -> dict[str, Any]:
    """Return the per-route configuration that leaves out what *access* does not ask for; None: both filters."""
    if access is None or not access.worker_api_key:
        return build_filters_off(REPLACING_FILTER, ADDING_FILTER)
    return build_filters_off(REPLACING_FILTER if access.keep_authorization else ADDING_FILTER)


def build_worker_key_secret(access: Access) -> Secret:
    """Return the key as Envoy sends it."""
    value = DataSource(inline_string=f"Bearer {access.worker_api_key or NO_KEY}")
    return Secret(name=WORKER_KEY_SECRET, generic_secret=GenericSecret(secret=value))
