"""What stands in the slot for client authentication, and what routes must do about it."""

from __future__ import annotations

from typing import assert_never

from envoy_data_plane.google.protobuf import Any

from extproc.xds.api_key_auth import build_api_key_auth
from extproc.xds.basic_auth import build_basic_auth
from extproc.xds.ext_authz import build_ext_authz
from extproc.xds.jwt_authn import build_jwt_authn
from extproc.xds.locked_out import build_locked_out
from extproc.xds.model import (
    Access,
    ApiKeys,
    AskedTokens,
    NobodyYet,
    Passwords,
    SignedTokens,
)
from extproc.xds.slots import build_empty


def build_client_auth(access: Access) -> Any:
    """Return the filter that lets the right clients in."""
    match access.auth:
        case None:
            return build_empty()
        case ApiKeys():
            return build_api_key_auth(access.auth, keep=access.keep_authorization)
        case Passwords():
            return build_basic_auth(access.auth)
        case SignedTokens():
            return build_jwt_authn(access.auth, keep=access.keep_authorization)
        case AskedTokens():
            return build_ext_authz(access.auth)
        case NobodyYet():
            return build_locked_out()
        case _:
            assert_never(access.auth)


def credentials_to_remove(access: Access) -> list[str]:
    """Return the headers that routes must remove so that workers see no credentials that were checked here.

    The filters for keys and signed tokens do that themselves, and a key for workers takes the place.
    """
    checked = isinstance(access.auth, Passwords | AskedTokens)
    replaced = bool(access.worker_api_key)
    return ["authorization"] if checked and not access.keep_authorization and not replaced else []
