"""From the configuration to the model of Envoy that the xDS builders take."""

from __future__ import annotations

from pathlib import Path

from extproc.address import Address
from extproc.admission import Limits
from extproc.circuit import CircuitRules
from extproc.clusters import ClusterView
from extproc.config import Config, bind_ip, build_policy
from extproc.discovery.updates import WorkerType
from extproc.pd.connector import Connector
from extproc.pd.mooncake import Mooncake
from extproc.pd.nccl import Nccl
from extproc.pd.nixl import Nixl
from extproc.pd.topology import Topology
from extproc.pool import NO_LIMIT
from extproc.registry import Registry, Settings
from extproc.resilience_options import ResilienceOptions
from extproc.router import SplitRules
from extproc.xds.model import (
    SYSTEM_CA_FILES,
    Access,
    Breaker,
    Certificates,
    ClientAuth,
    ClientTls,
    EnvoyModel,
    HealthChecks,
    NobodyYet,
    RateLimits,
    Retries,
    WorkerTls,
)

MAX_UNHEALTHY_INTERVAL_S = 5.0
"""A worker that comes back is found within this time, however long the interval for healthy ones is."""

MAX_GRACE_S = 3600.0
"""What Envoy is told to wait beyond the longest time in queues, at most."""


def envoy_model(
    config: Config,
    clusters: tuple[ClusterView, ...],
    certificates: Certificates | None = None,
    auth: ClientAuth = None,
) -> EnvoyModel:
    """Return what Envoy must be told, from the configuration and the workers known now.

    *certificates*: what SDS hands out; not needed where Envoy reads the files itself. *auth*: what was read of
    how clients prove who they are; nobody gets in when that is missing though the configuration asks for it.
    """
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
        fail_closed=config.fail_closed or not decodes_whole(config),
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
        stream_idle_timeout_s=config.stream_idle_timeout_secs,
        retries=Retries(
            count=retry_count(config),
            initial_backoff_s=config.retry_initial_backoff_ms / 1000,
            max_backoff_s=config.retry_max_backoff_ms / 1000,
            budget_ratio=config.retry_budget_ratio,
        ),
        breaker=Breaker(
            failures=0 if config.disable_circuit_breaker else config.cb_failure_threshold,
            open_s=config.cb_timeout_duration_secs,
            count_429=config.cb_count_429,
        ),
        rate_limits=RateLimits(
            config.rate_limit_tokens_per_second,
            config.rate_limit_per_key,
            config.rate_limit_burst,
        ),
        access=Access(
            auth=NobodyYet() if auth is None and asks_who(config) else auth,
            keep_authorization=config.keep_client_authorization,
            worker_api_key=config.worker_api_key,
            cors_origins=config.cors_allowed_origins,
        ),
        request_id_headers=tuple(name.lower() for name in config.request_id_headers),
        slow_start_s=config.slow_start_secs,
        client_tls=client_tls(config),
        certificates=certificates,
        prefill_address=(
            Address.parse(config.prefill_leg_address) if config.vllm_pd_disaggregation else None
        ),
        events_dir=config.envoy_events_dir,
    )


def decodes_whole(config: Config) -> bool:
    """Tell whether any worker may get a request that the service has not seen."""
    return not config.vllm_pd_disaggregation or connector(config.kv_connector).decodes_whole


def split_rules(config: Config) -> SplitRules | None:
    """Return which requests are split between prefill and decode workers; None: none."""
    if not config.vllm_pd_disaggregation:
        return None
    topology = Topology(config.pd_topology) if config.pd_topology_label else Topology.IGNORE
    found = connector(config.kv_connector)
    return SplitRules(
        connector=found,
        min_prefill_tokens=config.pd_min_prefill_tokens if found.decodes_whole else 0,
        topology=topology,
        label=config.pd_topology_label,
        fallback=config.pd_fallback == "local" and found.decodes_whole,
        needs_engine_id=config.kv_connector == "mooncake",
    )


def connector(name: str) -> Connector:
    """Return the KV connector called *name*."""
    match name:
        case "mooncake":
            return Mooncake()
        case "nccl":
            return Nccl()
        case _:
            return Nixl()


def asks_who(config: Config) -> bool:
    """Tell whether clients must prove who they are."""
    return bool(
        config.api_key
        or config.api_keys_file
        or config.htpasswd_file
        or config.jwt_issuer
        or config.api_key_validation_urls
    )


def client_tls(config: Config) -> ClientTls | None:
    """Return how clients are served over HTTPS, None when they are not."""
    if not config.tls_cert:
        return None
    return ClientTls(config.tls_cert, config.tls_key, config.tls_client_ca)


def system_ca_file() -> str:
    """Return the file of the certificates that this system trusts, "" when there is none."""
    return next((path for path in SYSTEM_CA_FILES if Path(path).exists()), "")


def admission_limits(config: Config) -> Limits:
    """Return how many requests go on and wait, and how long."""
    return Limits(
        concurrent=config.max_concurrent_requests,
        queue=config.queue_size,
        queue_s=config.queue_timeout_secs,
        no_worker_s=config.no_worker_timeout_secs,
        grace_s=min(config.decision_timeout_secs, MAX_GRACE_S),
    )


def build_registry(config: Config) -> Registry:
    """Return an empty registry with the policies of *config*."""
    main = WorkerType.DECODE if config.vllm_pd_disaggregation else WorkerType.REGULAR
    return Registry(
        lambda: build_policy(config, main),
        registry_settings(config),
        make_prefill_policy=lambda: build_policy(config, WorkerType.PREFILL),
    )


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
        prefill_ranks=_ranks(config, config.prefill_data_parallel_size),
        decode_ranks=_ranks(config, config.decode_data_parallel_size),
        splits=config.vllm_pd_disaggregation,
        global_ranks=config.dp_rank_offset == "global",
        is_router=config.is_own,
        circuits=circuit_rules(config),
        worker_limit=config.max_worker_concurrency or NO_LIMIT,
    )


def _ranks(config: Config, of_role: int | None) -> int:
    return config.intra_node_data_parallel_size if of_role is None else of_role


def circuit_rules(config: Config) -> CircuitRules:
    """Return when circuits open and close."""
    return CircuitRules(
        failures=0 if config.disable_circuit_breaker else config.cb_failure_threshold,
        successes=config.cb_success_threshold,
        open_s=config.cb_timeout_duration_secs,
        window_s=config.cb_window_duration_secs,
        count_429=config.cb_count_429,
    )


def retry_count(config: Config) -> int:
    """Return how many attempts follow the first one at most."""
    off = config.disable_retries or not config.retry_budget_ratio
    return 0 if off else config.retry_max_retries


def unheeded_options(config: Config) -> list[str]:
    """Return the options that ask for waits between retries that Envoy knows nothing of."""
    usual = ResilienceOptions()
    return [
        name
        for name in ("retry_backoff_multiplier", "retry_jitter_factor")
        if getattr(config, name) != getattr(usual, name)
    ]
