"""LDS: the socket that clients connect to, and what every request passes through."""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import (
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import RouteConfiguration
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
    HttpConnectionManagerServerHeaderTransformation,
    HttpConnectionManagerUpgradeConfig,
    HttpFilter,
    Rds,
)
from envoy_data_plane.google.protobuf import Any

from extproc.address import Address
from extproc.xds.access_log import build_access_log, build_attempts_log
from extproc.xds.body_size_limit import build_body_size_limit
from extproc.xds.client_tls import build_transport_socket
from extproc.xds.cors import build_cors
from extproc.xds.ext_proc import build_ext_proc
from extproc.xds.extensions import build_extensions
from extproc.xds.header_hygiene import build_early_hygiene, build_header_hygiene
from extproc.xds.local_reply import build_local_replies
from extproc.xds.model import LISTENER_NAME, ROUTES_NAME, EnvoyModel
from extproc.xds.slots import AUTH_SLOT, RATE_SLOT, build_slot
from extproc.xds.transfer_guard import build_transfer_guard
from extproc.xds.wire import envoy_address, from_ads, seconds
from extproc.xds.worker_address import build_worker_address_filter
from extproc.xds.worker_key import build_worker_key_filters

REQUEST_HEADERS_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 10.0
"""For TLS; Envoy would wait for ever for a client that says nothing."""

CONNECTION_IDLE_TIMEOUT_S = 300.0
"""For connections without a request; longer than load balancers and clients keep theirs."""

BACKLOG = 4096


def build_listener(model: EnvoyModel, routes: RouteConfiguration | None = None) -> Listener:
    """Return the listener; with *routes*, they and all filters stand inside instead of coming over xDS."""
    static = routes is not None
    manager = HttpConnectionManager(
        stat_prefix=LISTENER_NAME,
        codec_type=HttpConnectionManagerCodecType.AUTO,
        http_filters=_filters(model, static=static),
        upgrade_configs=[
            HttpConnectionManagerUpgradeConfig(
                upgrade_type="websocket",
                # A filter that buffers the body hangs an upgrade (Envoy issue 47081).
                filters=_filters(model, static=static, read_body=False),
            )
        ],
        early_header_mutation_extensions=[build_early_hygiene()],
        local_reply_config=build_local_replies(fail_closed=model.fail_closed),
        access_log=[build_access_log()],
        # An id that Envoy invents before the pick would be taken for a session key.
        generate_request_id=False,
        preserve_external_request_id=True,
        use_remote_address=True,
        skip_xff_append=True,
        normalize_path=True,
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH,
        request_headers_timeout=seconds(REQUEST_HEADERS_TIMEOUT_S),
        stream_idle_timeout=seconds(model.idle_timeout_s),
        common_http_protocol_options=HttpProtocolOptions(
            idle_timeout=seconds(CONNECTION_IDLE_TIMEOUT_S)
        ),
        http_protocol_options=Http1ProtocolOptions(
            accept_http_10=True, default_host_for_http_10="vllm-extproc"
        ),
        http2_protocol_options=Http2ProtocolOptions(max_concurrent_streams=2**31 - 1),
    )
    if routes is None:
        manager.rds = Rds(config_source=from_ads(), route_config_name=ROUTES_NAME)
    else:
        manager.route_config = routes
    chain = FilterChain(
        filters=[
            Filter(
                name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(manager)
            )
        ]
    )
    if model.client_tls is not None:
        chain.transport_socket = build_transport_socket(model.client_tls, static=static)
        chain.transport_socket_connect_timeout = seconds(HANDSHAKE_TIMEOUT_S)
    return Listener(
        name=LISTENER_NAME,
        address=envoy_address(Address(host=model.host, port=model.port)),
        filter_chains=[chain],
        tcp_backlog_size=BACKLOG,
    )


def _filters(model: EnvoyModel, *, static: bool, read_body: bool = True) -> list[HttpFilter]:
    """Return what a request passes, in order; without *read_body* (protocol upgrades) nothing waits for a body."""
    slots = {name: build_slot(name) for name in (AUTH_SLOT, RATE_SLOT)}
    if static:
        slots = {
            extension.name: HttpFilter(name=extension.name, typed_config=extension.typed_config)
            for extension in build_extensions(model)
        }
    return [
        build_header_hygiene(model.request_id_headers, hides_ids=model.prefill_address is not None),
        build_worker_address_filter(upgrades=not read_body),
        build_cors(),
        slots[AUTH_SLOT],
        slots[RATE_SLOT],
        *([build_body_size_limit(model.max_payload_bytes)] if read_body else []),
        build_ext_proc(model, read_body=read_body),
        *(build_transfer_guard(model) if read_body else []),
        *build_worker_key_filters(static=static),
        build_router(),
    ]


def build_router() -> HttpFilter:
    """Return the last filter, which sends requests to workers."""
    # Keeps x-envoy-* headers, which tell timings and attempts, from workers and clients.
    config = Router(suppress_envoy_headers=True, upstream_log=[build_attempts_log()])
    return HttpFilter(name="envoy.filters.http.router", typed_config=Any.pack(config))
