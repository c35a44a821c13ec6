"""LDS and RDS: where this service sends prefill legs.

Nobody else may connect: it is a Unix socket of this user, or a loopback address. Envoy asks the service for
each leg where it goes, as for any request, and does the same for it: retries, ejection, keys for workers. A leg
for which the service gives no pick goes nowhere.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    Route,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerServerHeaderTransformation,
    Rds,
)
from envoy_data_plane.google.protobuf import Any

from extproc.prefill_legs import LEG_HEADER, SERVED_HEADER
from extproc.xds.access_log import build_legs_log
from extproc.xds.ext_proc import build_ext_proc
from extproc.xds.listener import build_router
from extproc.xds.model import PREFILL_LISTENER_NAME, PREFILL_ROUTES_NAME, EnvoyModel
from extproc.xds.route import build_picked_routes
from extproc.xds.wire import envoy_address, from_ads, seconds
from extproc.xds.worker_key import build_worker_key_filters, build_worker_key_off


def build_prefill_listener(model: EnvoyModel, routes: RouteConfiguration | None = None) -> Listener:
    """Return the listener; with *routes*, they stand inside instead of coming over xDS."""
    if model.prefill_address is None:
        raise ValueError("no address for prefill legs")
    manager = HttpConnectionManager(
        stat_prefix=PREFILL_LISTENER_NAME,
        http_filters=[
            build_ext_proc(model, read_body=False),
            *build_worker_key_filters(static=routes is not None),
            build_router(),
        ],
        access_log=[build_legs_log()],
        generate_request_id=False,
        preserve_external_request_id=True,
        use_remote_address=False,
        skip_xff_append=True,
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH,
        stream_idle_timeout=seconds(model.idle_timeout_s),
    )
    if routes is None:
        manager.rds = Rds(config_source=from_ads(), route_config_name=PREFILL_ROUTES_NAME)
    else:
        manager.route_config = routes
    http = Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(manager)
    )
    return Listener(
        name=PREFILL_LISTENER_NAME,
        address=envoy_address(model.prefill_address, mode=0o600),
        filter_chains=[FilterChain(filters=[http])],
    )


def build_prefill_routes(model: EnvoyModel) -> RouteConfiguration:
    """Return where legs go: to their pick, and without one nowhere."""
    # Every leg is on this one until the service is asked, and with that the filters of its route are chosen.
    nowhere = Route(
        name="unpicked",
        match=RouteMatch(prefix="/"),
        direct_response=DirectResponseAction(status=503),
        typed_per_filter_config=build_worker_key_off(model.access),
    )
    routes = [*(_as_leg(route) for route in build_picked_routes(model)), nowhere]
    return RouteConfiguration(
        name=PREFILL_ROUTES_NAME,
        virtual_hosts=[VirtualHost(name="all", domains=["*"], routes=routes)],
    )


def _as_leg(route: Route) -> Route:
    route.request_headers_to_remove = [*route.request_headers_to_remove, LEG_HEADER]
    served = HeaderValue(key=SERVED_HEADER, value="%UPSTREAM_REMOTE_ADDRESS%")
    route.response_headers_to_add = [
        HeaderValueOption(
            header=served,
            append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )
    ]
    return route
