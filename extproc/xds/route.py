"""RDS: what goes where.

Requests that carry a pick match the route that takes the cluster from the header; the header can only
come from ext_proc, since the listener removes a client's own. Requests without a pick (service away)
go to the default pool, or nowhere when failing closed.
"""

from __future__ import annotations

from collections.abc import Iterator

from envoy_data_plane.envoy.config.core.v3 import RuntimeFractionalPercent
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType

from extproc.ext_proc_answers import CLUSTER_HEADER, ENDPOINT_KEY
from extproc.xds.client_auth import credentials_to_remove
from extproc.xds.cors import build_cors_policy, headers_of_workers_to_remove
from extproc.xds.ext_proc import build_disabled
from extproc.xds.filter_off import build_filters_off
from extproc.xds.model import ADMIN_CLUSTER, PROBE_PATHS, ROUTES_NAME, UNROUTED_CLUSTER, EnvoyModel
from extproc.xds.retry import build_retry_policy
from extproc.xds.slots import AUTH_SLOT, RATE_SLOT
from extproc.xds.wire import seconds
from extproc.xds.worker_address import build_note
from extproc.xds.worker_key import build_worker_key_off

OPEN_PATHS = ("/finish_session", "/health_generate")
OPEN_PREFIXES = ("/v1/models",)
"""What clients may ask of this service. Prefixes: alone, or followed by ``/`` and a name."""

GUARDED_PATHS = (
    "/add_worker",
    "/remove_worker",
    "/list_workers",
    "/get_loads",
    "/flush_cache",
    "/get_server_info",
    "/get_model_info",
    "/config",
)
GUARDED_PREFIXES = ("/workers",)
"""What administrators may ask: the service itself looks who asks, by a key of its own."""

UPGRADE_CONNECTION = r"(?i)[ \t,]*(upgrade|keep-alive)([ \t]*,[ \t]*(upgrade|keep-alive)?)*[ \t]*"
"""What ``Connection`` of a request for an upgrade may say."""

PROBE_TIMEOUT_S = 2.0
"""Kubernetes gives a probe up after 5 s as the chart sets it: when the service hangs Envoy must answer before that."""
INTERNAL_HEADERS = (CLUSTER_HEADER, ENDPOINT_KEY, "x-envoy-external-address")
"""Ours and Envoy's own; of no use to a worker."""


def build_routes(model: EnvoyModel) -> RouteConfiguration:
    """Return the one route table."""
    routes = [
        *_refused_routes(),
        *(_admin_route(RouteMatch(path=path), path, PROBE_TIMEOUT_S) for path in PROBE_PATHS),
        *_service_routes(model),
        *build_picked_routes(model),
        *_unpicked_routes(model),
    ]
    return RouteConfiguration(
        name=ROUTES_NAME,
        virtual_hosts=[VirtualHost(name="all", domains=["*"], routes=routes)],
    )


def build_picked_routes(model: EnvoyModel) -> Iterator[Route]:
    """Yield where requests go that carry a pick: first those whose workers have a base path."""
    for view in model.clusters:
        if view.path:
            header = HeaderMatcher(name=CLUSTER_HEADER, string_match=StringMatcher(exact=view.name))
            action = _action(model)
            action.cluster = view.name
            action.prefix_rewrite = f"{view.path}/"
            match = RouteMatch(prefix="/", headers=[header])
            yield _inference_route(model, f"picked {view.name}", match, action, view.path)
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
        yield _inference_route(model, name, match, action, view.path)


def _refused_routes() -> Iterator[Route]:
    """Yield what no worker must see, because it might take it for something else than Envoy does."""
    several_hosts = HeaderMatcher(name=":authority", string_match=StringMatcher(contains=","))
    # Envoy removes headers that Connection names, but not from requests for an upgrade.
    upgrade = HeaderMatcher(name="upgrade", present_match=True)
    names_more = HeaderMatcher(
        name="connection",
        string_match=StringMatcher(safe_regex=RegexMatcher(regex=UPGRADE_CONNECTION)),
        invert_match=True,
    )
    for name, headers in (
        ("several hosts", [several_hosts]),
        ("upgrade of more", [upgrade, names_more]),
    ):
        yield Route(
            name=f"refused {name}",
            match=RouteMatch(prefix="/", headers=headers),
            direct_response=DirectResponseAction(status=400),
            typed_per_filter_config={**build_disabled(), **build_worker_key_off()},
        )


def _service_routes(model: EnvoyModel) -> Iterator[Route]:
    """Yield what this service answers, but for the probes."""
    for path in OPEN_PATHS:
        yield _open_route(model, RouteMatch(path=path), path)
    for prefix in OPEN_PREFIXES:
        yield _open_route(model, RouteMatch(path_separated_prefix=prefix), prefix)
    for path in GUARDED_PATHS:
        yield _admin_route(RouteMatch(path=path), path, 0)
    for prefix in GUARDED_PREFIXES:
        yield _admin_route(RouteMatch(path_separated_prefix=prefix), prefix, 0)


def _open_route(model: EnvoyModel, match: RouteMatch, name: str) -> Route:
    return Route(
        name=f"open {name}",
        match=match,
        route=RouteAction(cluster=ADMIN_CLUSTER, timeout=seconds(0)),
        request_headers_to_remove=credentials_to_remove(model.access),
        typed_per_filter_config={
            **build_disabled(),
            **build_filters_off(RATE_SLOT),
            **build_worker_key_off(),
            **build_cors_policy(model.access.cors_origins),
        },
    )


def _admin_route(match: RouteMatch, name: str, timeout_s: float) -> Route:
    return Route(
        name=f"admin {name}",
        match=match,
        route=RouteAction(cluster=ADMIN_CLUSTER, timeout=seconds(timeout_s)),
        typed_per_filter_config={
            **build_disabled(),
            **build_filters_off(AUTH_SLOT, RATE_SLOT),
            **build_worker_key_off(),
        },
    )


def _inference_route(
    model: EnvoyModel, name: str, match: RouteMatch, action: RouteAction, base_path: str = ""
) -> Route:
    return Route(
        name=name,
        match=match,
        route=action,
        request_body_buffer_limit=model.max_payload_bytes,
        request_headers_to_remove=[*INTERNAL_HEADERS, *credentials_to_remove(model.access)],
        response_headers_to_add=[build_note(base_path)],
        response_headers_to_remove=headers_of_workers_to_remove(model.access.cors_origins),
        typed_per_filter_config={
            **build_worker_key_off(model.access),
            **build_cors_policy(model.access.cors_origins),
        },
    )


def _action(model: EnvoyModel) -> RouteAction:
    return RouteAction(
        # Only a worker that was given by name has one: it is asked under its own.
        auto_host_rewrite=True,
        timeout=seconds(0),  # a healthy long stream is never cut
        idle_timeout=seconds(model.idle_timeout_s),
        retry_policy=build_retry_policy(model),
    )
