"""What of a changed configuration can be applied while the router runs.

The rest shapes what cannot change under open connections: addresses, Envoy's listener and process, the
policy with all that it has learned, the sources of workers.
"""

from __future__ import annotations

import dataclasses

import msgspec

from extproc.config import Config

RELOADABLE = frozenset(
    {
        # workers
        "worker_urls",
        "prefill",
        "decode",
        "worker_weights",
        "worker_drain_timeout_secs",
        "worker_startup_timeout_secs",
        "when_none_healthy",
        "lora_any",
        # models
        "model_aliases",
        "default_model",
        # health checks: Envoy checks anew under the new rules
        "health_check_endpoint",
        "health_check_interval_secs",
        "health_check_timeout_secs",
        "health_failure_threshold",
        "health_success_threshold",
        # retries and circuit breakers
        "retry_max_retries",
        "retry_initial_backoff_ms",
        "retry_max_backoff_ms",
        "retry_backoff_multiplier",
        "retry_jitter_factor",
        "retry_budget_ratio",
        "disable_retries",
        "cb_failure_threshold",
        "cb_success_threshold",
        "cb_timeout_duration_secs",
        "cb_window_duration_secs",
        "cb_count_429",
        "disable_circuit_breaker",
        "slow_start_secs",
        "stream_idle_timeout_secs",
        # limits
        "max_concurrent_requests",
        "queue_size",
        "queue_timeout_secs",
        "max_worker_concurrency",
        "no_worker_timeout_secs",
        "rate_limit_tokens_per_second",
        "rate_limit_per_key",
        "rate_limit_burst",
        # who may ask
        "api_key",
        "api_keys_file",
        "htpasswd_file",
        "jwt_issuer",
        "jwt_jwks",
        "jwt_audiences",
        "api_key_validation_urls",
        "api_key_validation_cache_secs",
        "api_key_validation_timeout_secs",
        "keep_client_authorization",
        "admin_api_key",
        "worker_api_key",
        "cors_allowed_origins",
        # the end
        "shutdown_delay_s",
    }
)
"""Options that take effect at once. A test holds Envoy's listener to be the same whatever they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reload:
    """A new configuration as far as it can be applied."""

    config: Config
    changed: tuple[str, ...]
    """Options that have another value in ``config`` than before, sorted."""

    held_back: tuple[str, ...]
    """Options that take effect with the next start, sorted."""


def plan(running: Config, wanted: Config) -> Reload:
    """Return what becomes of *running* when *wanted* is asked for. ``ValueError`` when they do not go together."""
    different = {
        field.name
        for field in msgspec.structs.fields(Config)
        if getattr(running, field.name) != getattr(wanted, field.name)
    }
    changed = sorted(different & RELOADABLE)
    config = msgspec.structs.replace(running, **{name: getattr(wanted, name) for name in changed})
    return Reload(config, tuple(changed), tuple(sorted(different - RELOADABLE)))
