"""LDS: the socket that clients connect to, and what every request passes through."""

from __future__ import annotations

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import (
    HeaderMutation as HeaderMutationRule,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    TypedExtensionConfig,
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
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from extproc.address import Address
from extproc.xds.access_log import build_access_log
from extproc.xds.body_size_limit import build_body_size_limit
from extproc.xds.ext_proc import build_ext_proc
from extproc.xds.local_reply import build_local_replies
from extproc.xds.model import LISTENER_NAME, ROUTES_NAME, EnvoyModel
from extproc.xds.wire import envoy_address, from_ads, seconds

ROUTING_HEADER_PREFIXES = ("x-router-", "x-gateway-", "x-envoy-")
"""Removed from a client's request before anything reads it."""

REQUEST_HEADERS_TIMEOUT_S = 10.0
CONNECTION_IDLE_TIMEOUT_S = 3600.0
BACKLOG = 4096


def build_listener(model: EnvoyModel, routes: RouteConfiguration | None = None) -> Listener:
    """Return the listener; *routes* are put inside instead of coming from RDS."""
    manager = HttpConnectionManager(
        stat_prefix=LISTENER_NAME,
        codec_type=HttpConnectionManagerCodecType.AUTO,
        http_filters=[
            build_body_size_limit(model.max_payload_bytes),
            build_ext_proc(model),
            _router(),
        ],
        upgrade_configs=[
            HttpConnectionManagerUpgradeConfig(
                upgrade_type="websocket",
                # A filter that buffers the body hangs an upgrade (Envoy issue 47081).
                filters=[build_ext_proc(model, read_body=False), _router()],
            )
        ],
        early_header_mutation_extensions=[_remove_routing_headers()],
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
    return Listener(
        name=LISTENER_NAME,
        address=envoy_address(Address(host=model.host, port=model.port)),
        filter_chains=[chain],
        tcp_backlog_size=BACKLOG,
    )


def _router() -> HttpFilter:
    # Keeps x-envoy-* headers, which tell timings and attempts, from workers and clients.
    config = Router(suppress_envoy_headers=True)
    return HttpFilter(name="envoy.filters.http.router", typed_config=Any.pack(config))


def _remove_routing_headers() -> TypedExtensionConfig:
    config = HeaderMutation(
        mutations=[
            HeaderMutationRule(
                remove_on_match=HeaderMutationRemoveOnMatch(
                    key_matcher=StringMatcher(prefix=prefix)
                )
            )
            for prefix in ROUTING_HEADER_PREFIXES
        ]
    )
    return TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation", typed_config=Any.pack(config)
    )
