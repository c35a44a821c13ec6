"""Options that only the Envoy which takes its configuration from the service carries out.

With ``ext_proc_only`` no Envoy does: a gateway has a configuration of its own. An option that would then do nothing
is refused, above all those that keep somebody out.
"""

from __future__ import annotations

import msgspec

ENVOY_ONLY = frozenset(
    {
        # who gets in, and how much
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
        "cors_allowed_origins",
        "rate_limit_tokens_per_second",
        "rate_limit_per_key",
        "rate_limit_burst",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "fail_closed",
        # prompts are sent to prefill workers through Envoy
        "vllm_pd_disaggregation",
        # Envoy checks workers, tries again, and tells of the failures that circuits count
        "health_check_endpoint",
        "health_check_interval_secs",
        "health_check_timeout_secs",
        "health_failure_threshold",
        "health_success_threshold",
        "worker_startup_check_interval",
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
        "request_timeout_secs",
        "body_mode",
    }
)


def check_gateway(config: msgspec.Struct) -> None:
    """Refuse what nobody would carry out. ``ValueError`` names the option."""
    for field in msgspec.structs.fields(type(config)):
        if field.name in ENVOY_ONLY and getattr(config, field.name) != field.default:
            raise ValueError(
                f"{field.name}: ext_proc_only hands Envoy no configuration, and nobody would carry this out;"
                " it is the gateway's matter"
            )
