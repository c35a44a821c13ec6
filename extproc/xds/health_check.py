"""Active health checks of a cluster of workers.

Envoy judges; the service obeys: it reads Envoy's event logs and picks only what Envoy finds good (the
balancing by metadata, ``override_host``, would send requests to an unhealthy endpoint all the same).
"""

from __future__ import annotations

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
