"""``Authorization: Bearer KEY`` for workers.

The key itself is a secret (SDS), which Envoy shows nowhere.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import DataSource, TypedExtensionConfig
from envoy_data_plane.envoy.extensions.filters.http.credential_injector.v3 import CredentialInjector
from envoy_data_plane.envoy.extensions.http.injected_credentials.generic.v3 import Generic
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    GenericSecret,
    SdsSecretConfig,
    Secret,
)
from envoy_data_plane.google.protobuf import Any

from extproc.xds.model import Access
from extproc.xds.slots import build_empty
from extproc.xds.wire import from_ads

WORKER_KEY_SECRET = "worker_api_key"  # noqa: S105  a name


def build_worker_key(access: Access, *, static: bool = False) -> Any:
    """Return the filter that shows workers the key; *static*: the secret stands in the same file."""
    if not access.worker_api_key:
        return build_empty()
    secret = SdsSecretConfig(name=WORKER_KEY_SECRET)
    if not static:
        secret.sds_config = from_ads()
    credential = TypedExtensionConfig(
        name="envoy.http.injected_credentials.generic",
        typed_config=Any.pack(Generic(credential=secret, header="authorization")),
    )
    # Not overwriting keeps what the client has sent.
    return Any.pack(
        CredentialInjector(overwrite=not access.keep_authorization, credential=credential)
    )


def build_worker_key_secrets(access: Access) -> list[Secret]:
    """Return the key, if there is one."""
    if not access.worker_api_key:
        return []
    value = DataSource(inline_string=f"Bearer {access.worker_api_key}")
    return [Secret(name=WORKER_KEY_SECRET, generic_secret=GenericSecret(secret=value))]
