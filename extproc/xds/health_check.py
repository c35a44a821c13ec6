"""Active health checks and outlier detection of a cluster of workers.

Envoy judges; the service obeys: it reads Envoy's event logs and picks only what Envoy finds good (the
balancing by metadata, ``override_host``, would send requests to an unhealthy endpoint all the same).
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.cluster.v3 import OutlierDetection
from envoy_data_plane.envoy.config.core.v3 import (
    HealthCheck,
    HealthCheckHttpHealthCheck,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.extensions.health_check.event_sinks.file.v3 import (
    HealthCheckEventFileSink,
)
from envoy_data_plane.envoy.type.v3 import Int64Range
from envoy_data_plane.google.protobuf import Any

from extproc.xds.model import HEALTH_LOG, HealthChecks
from extproc.xds.wire import seconds

HEALTH_CHECK_HOST = "vllm-extproc-health-check"
"""Host of a check where the worker has no name; Envoy would take the cluster's name."""

CONSECUTIVE_5XX = 5
CONSECUTIVE_GATEWAY_FAILURES = 5

EJECTION_S = 30.0
MAX_EJECTION_S = 300.0
OUTLIER_INTERVAL_S = 1.0
"""How often Envoy looks whether an ejection is over."""


def build_health_check(health: HealthChecks, base_path: str, events_dir: str) -> HealthCheck:
    """Return the check of workers under *base_path*; with *events_dir* its verdicts are logged there."""
    check = HealthCheck(
        timeout=seconds(health.timeout_s),
        interval=seconds(health.interval_s),
        # Envoy asks less often as long as a cluster has had no traffic; workers would be found late.
        no_traffic_interval=seconds(health.unhealthy_interval_s),
        no_traffic_healthy_interval=seconds(health.interval_s),
        unhealthy_interval=seconds(health.unhealthy_interval_s),
        unhealthy_threshold=health.failures,
        healthy_threshold=health.successes,
        http_health_check=HealthCheckHttpHealthCheck(
            host=HEALTH_CHECK_HOST,
            path=f"{base_path}{health.path}",
            # Else one answer other than 200 is enough, whatever the threshold.
            retriable_statuses=[Int64Range(start=100, end=600)],
        ),
    )
    if events_dir:
        sink = HealthCheckEventFileSink(event_log_path=f"{events_dir}/{HEALTH_LOG}")
        check.event_logger = [
            TypedExtensionConfig(
                name="envoy.health_check.event_sinks.file", typed_config=Any.pack(sink)
            )
        ]
    return check


def build_outlier_detection() -> OutlierDetection:
    """Return when Envoy ejects a worker: for errors in a row, never for being slower than others."""
    return OutlierDetection(
        consecutive_5xx=CONSECUTIVE_5XX,
        consecutive_gateway_failure=CONSECUTIVE_GATEWAY_FAILURES,
        enforcing_consecutive_gateway_failure=100,
        split_external_local_origin_errors=True,
        # To Envoy a WebSocket that the worker closes is a failed connection too: three that end one after the
        # other would take a sound worker out. Failed connections are for ``Registry.suspend`` and the checks.
        enforcing_consecutive_local_origin_failure=0,
        enforcing_success_rate=0,
        enforcing_local_origin_success_rate=0,
        interval=seconds(OUTLIER_INTERVAL_S),
        base_ejection_time=seconds(EJECTION_S),
        max_ejection_time=seconds(MAX_EJECTION_S),
        max_ejection_percent=100,
        # /health says nothing of inference: a worker that answers 500 stays out for its time.
        successful_active_health_check_uneject_host=False,
    )
