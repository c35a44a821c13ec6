"""RDS: what goes where.

Requests that carry a pick match the route that takes the cluster from the header; the header can only
come from ext_proc, since the listener removes a client's own. Requests without a pick (service away)
go to the default pool, or nowhere when failing closed.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.google.protobuf import Any

from extproc.exchange import CLUSTER_HEADER, ENDPOINT_KEY
from extproc.xds.ext_proc import build_disabled
from extproc.xds.model import ADMIN_CLUSTER, ROUTES_NAME, UNROUTED_CLUSTER, EnvoyModel
from extproc.xds.wire import seconds

ADMIN_PATHS = ("/health", "/liveness", "/readiness", "/finish_session")
ADMIN_TIMEOUT_S = 5.0
INTERNAL_HEADERS = (CLUSTER_HEADER, ENDPOINT_KEY, "x-envoy-external-address")
"""Ours and Envoy's own; of no use to a worker."""

MAX_RETRIES = 5
RETRY_ON = "connect-failure,refused-stream,reset"
"""Only what happens before response headers, so no client sees half of two answers. ``reset`` covers a
worker that dies after it got the request."""


def build_routes(model: EnvoyModel) -> RouteConfiguration:
    """Return the one route table."""
    to_pick = _action(model)
    to_pick.cluster_header = CLUSTER_HEADER
    has_pick = RouteMatch(
        prefix="/", headers=[HeaderMatcher(name=CLUSTER_HEADER, present_match=True)]
    )

    to_default = _action(model)
    to_default.cluster = UNROUTED_CLUSTER if model.fail_closed else model.pools[0].name

    routes = [
        *(_admin_route(path) for path in ADMIN_PATHS),
        _inference_route(model, "picked", has_pick, to_pick),
        _inference_route(model, "unpicked", RouteMatch(prefix="/"), to_default),
    ]
    return RouteConfiguration(
        name=ROUTES_NAME,
        virtual_hosts=[VirtualHost(name="all", domains=["*"], routes=routes)],
    )


def _admin_route(path: str) -> Route:
    return Route(
        name=f"admin {path}",
        match=RouteMatch(path=path),
        route=RouteAction(cluster=ADMIN_CLUSTER, timeout=seconds(ADMIN_TIMEOUT_S)),
        typed_per_filter_config=build_disabled(),
    )


def _inference_route(model: EnvoyModel, name: str, match: RouteMatch, action: RouteAction) -> Route:
    return Route(
        name=name,
        match=match,
        route=action,
        request_body_buffer_limit=model.max_payload_bytes,
        request_headers_to_remove=list(INTERNAL_HEADERS),
    )


def _action(model: EnvoyModel) -> RouteAction:
    return RouteAction(
        timeout=seconds(0),  # a healthy long stream is never cut
        idle_timeout=seconds(model.idle_timeout_s),
        retry_policy=RetryPolicy(
            retry_on=RETRY_ON,
            # The endpoints of the pick, then others of the pool that have not been tried.
            num_retries=MAX_RETRIES,
            retry_back_off=RetryPolicyRetryBackOff(
                base_interval=seconds(0.005), max_interval=seconds(0.05)
            ),
            # For the fallback balancing: the endpoint list never names a host twice.
            retry_host_predicate=[
                RetryPolicyRetryHostPredicate(
                    name="envoy.retry_host_predicates.previous_hosts",
                    typed_config=Any.pack(PreviousHostsPredicate()),
                )
            ],
            host_selection_retry_max_attempts=16,
        ),
    )
