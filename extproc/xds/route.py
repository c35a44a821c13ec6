"""RDS: what goes where.

Requests that carry a pick match the route that takes the cluster from the header; the header can only
come from ext_proc, since the listener removes a client's own. Requests without a pick (service away)
go to the default pool, or nowhere when failing closed.
"""

from __future__ import annotations

from collections.abc import Iterator

from envoy_data_plane.envoy.config.core.v3 import RuntimeFractionalPercent
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
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType
from envoy_data_plane.google.protobuf import Any

from extproc.exchange import CLUSTER_HEADER, ENDPOINT_KEY
from extproc.xds.ext_proc import build_disabled
from extproc.xds.model import ADMIN_CLUSTER, PROBE_PATHS, ROUTES_NAME, UNROUTED_CLUSTER, EnvoyModel
from extproc.xds.wire import seconds

ADMIN_PATHS = (
    "/finish_session",
    "/health_generate",
    "/add_worker",
    "/remove_worker",
    "/list_workers",
    "/get_loads",
    "/flush_cache",
    "/get_server_info",
    "/get_model_info",
    "/config",
)
ADMIN_PREFIXES = ("/workers", "/v1/models")
"""Alone, or followed by ``/`` and a name."""

PROBE_TIMEOUT_S = 5.0
INTERNAL_HEADERS = (CLUSTER_HEADER, ENDPOINT_KEY, "x-envoy-external-address")
"""Ours and Envoy's own; of no use to a worker."""

MAX_RETRIES = 5
RETRY_ON = "connect-failure,refused-stream,reset"
"""Only what happens before response headers, so no client sees half of two answers. ``reset`` covers a
worker that dies after it got the request."""


def build_routes(model: EnvoyModel) -> RouteConfiguration:
    """Return the one route table."""
    routes = [
        *(_admin_route(RouteMatch(path=path), path, PROBE_TIMEOUT_S) for path in PROBE_PATHS),
        *(_admin_route(RouteMatch(path=path), path, 0) for path in ADMIN_PATHS),
        *(
            _admin_route(RouteMatch(path_separated_prefix=prefix), prefix, 0)
            for prefix in ADMIN_PREFIXES
        ),
        *_picked_routes(model),
        *_unpicked_routes(model),
    ]
    return RouteConfiguration(
        name=ROUTES_NAME,
        virtual_hosts=[VirtualHost(name="all", domains=["*"], routes=routes)],
    )


def _picked_routes(model: EnvoyModel) -> Iterator[Route]:
    """Yield where requests go that carry a pick: first those whose workers have a base path."""
    for view in model.clusters:
        if view.path:
            header = HeaderMatcher(name=CLUSTER_HEADER, string_match=StringMatcher(exact=view.name))
            action = _action(model)
            action.cluster = view.name
            action.prefix_rewrite = f"{view.path}/"
            match = RouteMatch(prefix="/", headers=[header])
            yield _inference_route(model, f"picked {view.name}", match, action)
    header = HeaderMatcher(name=CLUSTER_HEADER, present_match=True)
    action = _action(model)
    action.cluster_header = CLUSTER_HEADER
    match = RouteMatch(prefix="/", headers=[header])
    yield _inference_route(model, "picked", match, action)


def _unpicked_routes(model: EnvoyModel) -> Iterator[Route]:
    """Yield where requests go without a pick: to the default pool, each base path getting its share."""
    if model.fail_closed:
        action = _action(model)
        action.cluster = UNROUTED_CLUSTER
        yield _inference_route(model, "unpicked", RouteMatch(prefix="/"), action)
        return
    clusters = model.default_clusters
    for index, view in enumerate(clusters):
        action = _action(model)
        action.cluster = view.name
        if view.path:
            action.prefix_rewrite = f"{view.path}/"
        match = RouteMatch(prefix="/")
        left = len(clusters) - index
        if left > 1:
            match.runtime_fraction = RuntimeFractionalPercent(
                default_value=FractionalPercent(
                    numerator=1_000_000 // left,
                    denominator=FractionalPercentDenominatorType.MILLION,
                )
            )
        name = "unpicked" if index == 0 else f"unpicked {view.name}"
        yield _inference_route(model, name, match, action)


def _admin_route(match: RouteMatch, name: str, timeout_s: float) -> Route:
    return Route(
        name=f"admin {name}",
        match=match,
        route=RouteAction(cluster=ADMIN_CLUSTER, timeout=seconds(timeout_s)),
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
        # Only a worker that was given by name has one: it is asked under its own.
        auto_host_rewrite=True,
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
