"""Tokens of which only other services know whether they are good: Envoy asks this service, which asks them.

Envoy sends the request's method, its ``Authorization`` header and the client's IP address, and nothing else:
neither path nor body.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import ApiVersion, HeaderValue, HttpUri
from envoy_data_plane.envoy.extensions.filters.http.ext_authz.v3 import (
    AuthorizationRequest,
    AuthorizationResponse,
    ExtAuthz,
    HttpService,
)
from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, StringMatcher
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any

from extproc.xds.model import ADMIN_CLUSTER, CLIENT_HEADER, AskedTokens
from extproc.xds.wire import seconds

AUTHORIZE_PATH = "/authorize"
ADDRESS_HEADER = "x-router-client-address"


def build_ext_authz(auth: AskedTokens) -> Any:
    """Return the filter. It leaves the token in the request; the route removes it."""
    service = HttpService(
        server_uri=HttpUri(
            uri="http://extproc", cluster=ADMIN_CLUSTER, timeout=seconds(auth.timeout_s)
        ),
        path_override=AUTHORIZE_PATH,
        authorization_request=AuthorizationRequest(
            headers_to_add=[
                HeaderValue(key=ADDRESS_HEADER, value="%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%")
            ]
        ),
        authorization_response=AuthorizationResponse(
            allowed_upstream_headers=_only(CLIENT_HEADER),
            # Without a list clients would get every header of the answer.
            allowed_client_headers=_only("www-authenticate"),
        ),
    )
    config = ExtAuthz(
        http_service=service,
        transport_api_version=ApiVersion.V3,
        allowed_headers=_only("authorization"),
        failure_mode_allow=False,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )
    return Any.pack(config)


def _only(name: str) -> ListStringMatcher:
    return ListStringMatcher(patterns=[StringMatcher(exact=name)])
