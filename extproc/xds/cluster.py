"""CDS: one cluster per pool (and base path), and one for this service's own HTTP endpoints.

A pool's cluster takes the endpoint from the metadata that ext_proc sets, never from a header, so a
client cannot name one. Each retry takes the next endpoint of the list. Without metadata (service
away, or list used up) Envoy's own least-request balancing decides.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    CircuitBreakersThresholdsRetryBudget,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Http1ProtocolOptions,
    TcpKeepalive,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.core.v3 import (
    HttpProtocolOptions as CommonHttpProtocolOptions,
)
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec.v3 import UpstreamCodec
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.load_balancing_policies.common.v3 import SlowStartConfig
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
    HttpProtocolOptionsOutlierDetection,
)
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from extproc.clusters import ClusterView
from extproc.ext_proc_answers import ENDPOINT_KEY, METADATA_NAMESPACE
from extproc.xds.endpoint import build_endpoints
from extproc.xds.health_check import build_health_check
from extproc.xds.model import ADMIN_CLUSTER, UNROUTED_CLUSTER, EnvoyModel
from extproc.xds.next_attempt import build_next_attempt_filters
from extproc.xds.outlier_detection import build_error_matcher, build_outlier_detection
from extproc.xds.rank_header import build_rank_filters
from extproc.xds.wire import from_ads, load_assignment, seconds
from extproc.xds.worker_tls import build_socket_matches, tls_addresses

CONNECT_TIMEOUT_S = 1.0
WORKER_IDLE_TIMEOUT_S = 4.0
"""Below the 5 s after which uvicorn, and so vLLM, closes an idle connection: Envoy must close first,
or a request now and then meets a connection that is just being closed."""

KEEPALIVE_TIME_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3

UNLIMITED = 2**31
"""Envoy's default of 1024 connections and requests is far below what workers hold open."""

MIN_RETRY_CONCURRENCY = 100
"""Retries under way that Envoy allows however few requests are: it only sees the moment. What they come to
over time the service bounds, request by request (``retry_budget``)."""

TRY_PANIC_PERCENT = 1.0
"""Share of healthy workers below which health is ignored: none at all."""

MERGE_WINDOW_S = 0.01
"""How long Envoy's own balancing may lag behind its verdicts. With the default of 1 s it would refuse
requests without a pick although workers have just been found healthy."""

SERVED_KEY = "x-gateway-destination-endpoint-served"
CODEC_FILTER = "envoy.filters.http.upstream_codec"
"""The last of upstream filters: it sends the request."""

HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def build_clusters(model: EnvoyModel, *, static: bool = False) -> list[Cluster]:
    """Return all clusters; with *static*, endpoints stand inside instead of coming from EDS."""
    clusters = [build_worker_cluster(model, view, static=static) for view in model.clusters]
    return clusters + build_fixed_clusters(model)


def build_fixed_clusters(model: EnvoyModel) -> list[Cluster]:
    """Return the clusters that have nothing to do with workers."""
    clusters = [
        Cluster(
            name=ADMIN_CLUSTER,
            type=ClusterDiscoveryType.STATIC,
            connect_timeout=seconds(CONNECT_TIMEOUT_S),
            load_assignment=load_assignment(ADMIN_CLUSTER, [model.admin_address]),
            # Tokens that are known are asked about here, too, while others wait for an auth service that hangs.
            circuit_breakers=CircuitBreakers(
                thresholds=[
                    CircuitBreakersThresholds(
                        max_connections=UNLIMITED,
                        max_pending_requests=UNLIMITED,
                        max_requests=UNLIMITED,
                    )
                ]
            ),
        )
    ]
    if model.fail_closed:
        clusters.append(
            Cluster(
                name=UNROUTED_CLUSTER,
                type=ClusterDiscoveryType.STATIC,
                connect_timeout=seconds(CONNECT_TIMEOUT_S),
                load_assignment=load_assignment(UNROUTED_CLUSTER, []),
            )
        )
    return clusters


def build_worker_cluster(model: EnvoyModel, view: ClusterView, *, static: bool = False) -> Cluster:
    """Return the cluster of the workers in *view*; of its endpoints only those matter whose TLS goes by address."""
    cluster = Cluster(
        name=view.name,
        connect_timeout=seconds(CONNECT_TIMEOUT_S),
        load_balancing_policy=LoadBalancingPolicy(
            policies=[_policy("override_host", _by_metadata(model.slow_start_s))]
        ),
        circuit_breakers=CircuitBreakers(
            thresholds=[
                CircuitBreakersThresholds(
                    max_connections=UNLIMITED,
                    max_pending_requests=UNLIMITED,
                    max_requests=UNLIMITED,
                    retry_budget=CircuitBreakersThresholdsRetryBudget(
                        budget_percent=Percent(value=100 * model.retries.budget_ratio),
                        min_retry_concurrency=MIN_RETRY_CONCURRENCY,
                    ),
                )
            ]
        ),
        common_lb_config=ClusterCommonLbConfig(
            # Envoy's own balancing must not take to unhealthy workers when few are healthy.
            healthy_panic_threshold=Percent(value=TRY_PANIC_PERCENT if model.try_unhealthy else 0),
            update_merge_window=seconds(MERGE_WINDOW_S),
        ),
        health_checks=[build_health_check(model.health, view.path, model.events_dir)],
        outlier_detection=_outlier_detection(model),
        # Else Envoy keeps a worker that was removed until a check of it fails.
        ignore_health_on_host_removal=True,
        transport_socket_matches=build_socket_matches(model.tls, tls_addresses(view)),
        typed_extension_protocol_options={
            HTTP_OPTIONS: Any.pack(_http_options(model, ranks=view.ranked))
        },
        upstream_connection_options=UpstreamConnectionOptions(
            # A host that vanishes says nothing: without this its streams hang until the idle timeout.
            tcp_keepalive=TcpKeepalive(
                keepalive_time=KEEPALIVE_TIME_S,
                keepalive_interval=KEEPALIVE_INTERVAL_S,
                keepalive_probes=KEEPALIVE_PROBES,
            )
        ),
    )
    if static:
        cluster.type = ClusterDiscoveryType.STATIC
        cluster.load_assignment = ClusterLoadAssignment.parse(build_endpoints(view))
    else:
        cluster.type = ClusterDiscoveryType.EDS
        cluster.eds_cluster_config = ClusterEdsClusterConfig(eds_config=from_ads())
    return cluster


def _by_metadata(slow_start_s: float) -> OverrideHost:
    fallback = LeastRequest()
    if slow_start_s:
        fallback.slow_start_config = SlowStartConfig(slow_start_window=seconds(slow_start_s))
    return OverrideHost(
        override_host_sources=[
            OverrideHostOverrideHostSource(metadata=_metadata_key(ENDPOINT_KEY))
        ],
        selected_host_key=_metadata_key(SERVED_KEY),
        fallback_policy=LoadBalancingPolicy(policies=[_policy("least_request", fallback)]),
    )


def _outlier_detection(model: EnvoyModel) -> OutlierDetection | None:
    # An error may be that blocks are gone which another worker had: Envoy cannot tell, the service can.
    return None if model.prefill_address else build_outlier_detection(model.breaker)


def _metadata_key(key: str) -> MetadataKey:
    return MetadataKey(key=METADATA_NAMESPACE, path=[MetadataKeyPathSegment(key=key)])


def _policy(name: str, config: OverrideHost | LeastRequest) -> LoadBalancingPolicyPolicy:
    return LoadBalancingPolicyPolicy(
        typed_extension_config=TypedExtensionConfig(
            name=f"envoy.load_balancing_policies.{name}", typed_config=Any.pack(config)
        )
    )


def _http_options(model: EnvoyModel, *, ranks: bool) -> HttpProtocolOptions:
    options = HttpProtocolOptions(
        common_http_protocol_options=CommonHttpProtocolOptions(
            idle_timeout=seconds(WORKER_IDLE_TIMEOUT_S)
        ),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=Http1ProtocolOptions()
        ),
    )
    filters = build_next_attempt_filters(model) + (build_rank_filters() if ranks else [])
    if filters:
        codec = HttpFilter(name=CODEC_FILTER, typed_config=Any.pack(UpstreamCodec()))
        options.http_filters = [*filters, codec]
    matcher = None if model.prefill_address else build_error_matcher(model.breaker)
    if matcher is not None:
        options.outlier_detection = HttpProtocolOptionsOutlierDetection(error_matcher=matcher)
    return options
