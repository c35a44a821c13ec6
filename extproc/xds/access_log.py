"""Envoy's reports to this service: of every finished request, in batches, and of every attempt that failed.

An attempt that failed is reported at once, while its request may still be tried elsewhere. Nothing of a body
or a header value is in either.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
    AccessLogFilter,
    ComparisonFilter,
    ComparisonFilterOp,
    OrFilter,
    ResponseFlagFilter,
    StatusCodeFilter,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    RuntimeUInt32,
)
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from envoy_data_plane.google.protobuf import Any

from extproc.xds.bootstrap import EXTPROC_CLUSTER
from extproc.xds.model import ATTEMPTS_LOG, LEGS_LOG, REQUESTS_LOG
from extproc.xds.wire import seconds

FLUSH_INTERVAL_S = 0.05
"""A worker on probation gets its next request when the end of the last one has been reported."""

BUFFER_BYTES = 16384

REFUSALS = (408, 429)
"""Statuses below 500 that are tried elsewhere."""

LOST_FLAGS = ("UF", "UC", "UR", "LR", "UT", "UPE", "SI")
"""The worker could not be connected to, closed or reset the connection, spoke no HTTP or was silent. An
attempt whose client left has no flag."""


def build_access_log() -> AccessLog:
    """Return the log of finished requests."""
    return _grpc_log(REQUESTS_LOG, FLUSH_INTERVAL_S, BUFFER_BYTES)


def build_legs_log() -> AccessLog:
    """Return the log of prefill legs."""
    return _grpc_log(LEGS_LOG, FLUSH_INTERVAL_S, BUFFER_BYTES)


def build_attempts_log() -> AccessLog:
    """Return the log of failed attempts, for the router filter's ``upstream_log``."""
    log = _grpc_log(ATTEMPTS_LOG, FLUSH_INTERVAL_S, 0)
    statuses = [
        _status(ComparisonFilterOp.GE, 500),
        *(_status(ComparisonFilterOp.EQ, status) for status in REFUSALS),
    ]
    lost = AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(LOST_FLAGS)))
    log.filter = AccessLogFilter(or_filter=OrFilter(filters=[*statuses, lost]))
    return log


def _grpc_log(name: str, flush_s: float, buffer_bytes: int) -> AccessLog:
    config = HttpGrpcAccessLogConfig(
        common_config=CommonGrpcAccessLogConfig(
            log_name=name,
            transport_api_version=ApiVersion.V3,
            buffer_flush_interval=seconds(flush_s),
            buffer_size_bytes=buffer_bytes,
            grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER)),
        )
    )
    return AccessLog(name="envoy.access_loggers.http_grpc", typed_config=Any.pack(config))


def _status(op: ComparisonFilterOp, status: int) -> AccessLogFilter:
    value = RuntimeUInt32(default_value=status, runtime_key="vllm_extproc.never_set")
    comparison = ComparisonFilter(op=op, value=value)
    return AccessLogFilter(status_code_filter=StatusCodeFilter(comparison=comparison))
