"""CORS: which web pages browsers let use the router.

The filter stands in the listener; what it does, in routes, so that origins may change while requests are
under way. It stands before authentication: a browser's question (preflight) carries no key, and a page can
read a refusal.
"""

from __future__ import annotations

from envoy_data_plane.envoy.extensions.filters.http.cors.v3 import Cors, CorsPolicy
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any

FILTER_NAME = "envoy.filters.http.cors"

METHODS = "GET, POST, PUT, PATCH, DELETE, OPTIONS"
REQUEST_HEADERS = (
    "accept",
    "authorization",
    "content-type",
    "idempotency-key",
    "openai-beta",
    "openai-organization",
    "openai-project",
    "x-api-key",
    "x-request-id",
    "x-request-priority",
    "x-session-id",
    "x-tenant-id",
    "x-user-id",
    "x-stainless-arch",
    "x-stainless-async",
    "x-stainless-custom-poll-interval",
    "x-stainless-helper-method",
    "x-stainless-lang",
    "x-stainless-os",
    "x-stainless-package-version",
    "x-stainless-poll-helper",
    "x-stainless-raw-response",
    "x-stainless-read-timeout",
    "x-stainless-retry-count",
    "x-stainless-runtime",
    "x-stainless-runtime-version",
    "x-stainless-stream-helper",
    "x-stainless-timeout",
)
"""What pages may send. ``*`` would not do: it leaves out ``authorization``, by the standard."""

RESPONSE_HEADERS = (
    "x-request-id",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "retry-after",
)
"""What pages may read, beyond what they always may."""

ANSWER_HEADERS = (
    "access-control-allow-origin",
    "access-control-allow-credentials",
    "access-control-allow-headers",
    "access-control-allow-methods",
    "access-control-allow-private-network",
    "access-control-expose-headers",
    "access-control-max-age",
)
"""All that tell a browser what a page may do."""

MAX_AGE_S = 3600


def build_cors() -> HttpFilter:
    """Return the filter; without a policy of the route it does nothing."""
    return HttpFilter(name=FILTER_NAME, typed_config=Any.pack(Cors()))


def headers_of_workers_to_remove(origins: tuple[str, ...]) -> list[str]:
    """Return what a worker may not tell browsers when *origins* do; routes remove it before the filter adds its own."""
    return list(ANSWER_HEADERS) if origins else []


def build_cors_policy(origins: tuple[str, ...]) -> dict[str, Any]:
    """Return the per-route configuration that lets pages of *origins* in; ``*`` stands for all."""
    if not origins:
        return {}
    if "*" in origins:
        allowed = [StringMatcher(safe_regex=RegexMatcher(regex=".*"))]
    else:
        allowed = [StringMatcher(exact=origin) for origin in origins]
    policy = CorsPolicy(
        allow_origin_string_match=allowed,
        allow_methods=METHODS,
        allow_headers=", ".join(REQUEST_HEADERS),
        expose_headers=", ".join(RESPONSE_HEADERS),
        max_age=str(MAX_AGE_S),
        # A page of elsewhere asks in vain: the question is no worker's business.
        forward_not_matching_preflights=False,
    )
    return {FILTER_NAME: Any.pack(policy)}
