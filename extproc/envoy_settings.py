"""From the configuration to the model of Envoy that the xDS builders take."""

from __future__ import annotations

from pathlib import Path

from extproc.address import Address
from extproc.clusters import ClusterView
from extproc.config import Config, bind_ip
from extproc.registry import Settings
from extproc.xds.model import SYSTEM_CA_FILES, EnvoyModel, HealthChecks, WorkerTls

MAX_UNHEALTHY_INTERVAL_S = 5.0
"""A worker that comes back is found within this time, however long the interval for healthy ones is."""


def envoy_model(config: Config, clusters: tuple[ClusterView, ...]) -> EnvoyModel:
    """Return what Envoy must be told, from the configuration and the workers known now."""
    unhealthy_interval_s = min(
        config.health_check_interval_secs,
        config.worker_startup_check_interval,
        MAX_UNHEALTHY_INTERVAL_S,
    )
    return EnvoyModel(
        host=bind_ip(config.host),
        port=config.port,
        admin_address=Address.parse(config.admin_address),
        clusters=clusters,
        max_payload_bytes=config.max_payload_size,
        idle_timeout_s=config.request_timeout_secs,
        decision_timeout_s=config.decision_timeout_secs,
        fail_closed=config.fail_closed,
        full_duplex=config.body_mode == "full_duplex",
        health=HealthChecks(
            path=config.health_check_endpoint,
            interval_s=config.health_check_interval_secs,
            unhealthy_interval_s=unhealthy_interval_s,
            timeout_s=config.health_check_timeout_secs,
            failures=config.health_failure_threshold,
            successes=config.health_success_threshold,
        ),
        tls=WorkerTls(
            ca_file=config.worker_ca_file or system_ca_file(), insecure=config.worker_tls_insecure
        ),
        try_unhealthy=config.when_none_healthy == "try",
        events_dir=config.envoy_events_dir,
    )


def system_ca_file() -> str:
    """Return the file of the certificates that this system trusts, "" when there is none."""
    return next((path for path in SYSTEM_CA_FILES if Path(path).exists()), "")


def registry_settings(config: Config) -> Settings:
    """Return how the registry judges and groups workers."""
    return Settings(
        follows_envoy=bool(config.envoy_admin_address),
        startup_s=config.worker_startup_timeout_secs,
        try_unhealthy=config.when_none_healthy == "try",
        lora_any=config.lora_any,
        tls_server_name=config.worker_tls_server_name,
        tls_insecure=config.worker_tls_insecure,
        ranks=config.intra_node_data_parallel_size,
        global_ranks=config.dp_rank_offset == "global",
        is_router=config.is_own,
    )
