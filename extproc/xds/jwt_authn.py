"""Signed tokens (JWT): ``Authorization: Bearer TOKEN``.

The service hands Envoy the issuer's keys; Envoy itself fetches nothing. Tokens in a URL, which proxies and
browsers remember, are not looked at. A token that never expires could not be taken back and is refused.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.route.v3 import RouteMatch
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import (
    JwtAuthentication,
    JwtClaimToHeader,
    JwtHeader,
    JwtProvider,
    JwtRequirement,
    RequirementRule,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any

from extproc.xds.model import CLIENT_HEADER, SignedTokens

PROVIDER = "issuer"
SUBJECT = r"[^\x00-\x1f\x7f]+"


def build_jwt_authn(auth: SignedTokens, *, keep: bool) -> Any:
    """Return the filter; *keep*: workers get the token, too."""
    provider = JwtProvider(
        issuer=auth.issuer,
        audiences=list(auth.audiences),
        # Without a subject its owner would be nobody, with no rate and no place in a queue of its own. What a
        # header cannot hold would be refused later, as if the router were at fault.
        subjects=StringMatcher(safe_regex=RegexMatcher(regex=SUBJECT)),
        require_expiration=True,
        local_jwks=DataSource(inline_string=auth.jwks),
        from_headers=[JwtHeader(name="authorization", value_prefix="Bearer ")],
        forward=keep,
        claim_to_headers=[JwtClaimToHeader(header_name=CLIENT_HEADER, claim_name="sub")],
    )
    every_path = RequirementRule(
        match=RouteMatch(prefix="/"), requires=JwtRequirement(provider_name=PROVIDER)
    )
    return Any.pack(JwtAuthentication(providers={PROVIDER: provider}, rules=[every_path]))
