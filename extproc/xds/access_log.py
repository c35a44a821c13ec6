"""Envoy's report of every finished request, in batches, to this service."""

from __future__ import annotations

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.core.v3 import ApiVersion, GrpcService, GrpcServiceEnvoyGrpc
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from envoy_data_plane.google.protobuf import Any

from extproc.xds.bootstrap import EXTPROC_CLUSTER
from extproc.xds.wire import seconds

FLUSH_INTERVAL_S = 0.25
BUFFER_BYTES = 16384


def build_access_log() -> AccessLog:
    """Return the gRPC access log; nothing of a body or a header value is in its entries."""
    config = HttpGrpcAccessLogConfig(
        common_config=CommonGrpcAccessLogConfig(
            log_name="vllm-extproc",
            transport_api_version=ApiVersion.V3,
            buffer_flush_interval=seconds(FLUSH_INTERVAL_S),
            buffer_size_bytes=BUFFER_BYTES,
            grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER)),
        )
    )
    return AccessLog(name="envoy.access_loggers.http_grpc", typed_config=Any.pack(config))
