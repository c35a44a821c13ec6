"""What Envoy tries elsewhere, how often, and how long it waits in between.

Each retry goes to the next endpoint of the pick's list, which names none twice; when the list is used up,
to others of the cluster that have not been tried. Nothing is retried once the head of an answer has gone
to the client. Envoy's waits are drawn between zero and a bound that begins with the initial back-off and
doubles up to the largest; it knows no other factor and no smaller jitter.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.route.v3 import (
    RetryPolicy,
    RetryPolicyRateLimitedRetryBackOff,
    RetryPolicyResetHeader,
    RetryPolicyResetHeaderFormat,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.google.protobuf import Any

from extproc.ext_proc_answers import RETRY_AFTER_HEADER
from extproc.xds.model import EnvoyModel
from extproc.xds.wire import seconds

RETRY_ON = "connect-failure,refused-stream,reset,retriable-status-codes"
"""All of it happens before the head of an answer. ``reset`` covers a worker that dies after it got the
request, and one that is silent for longer than it may."""

RETRIABLE_STATUSES = (408, 429, 500, 502, 503, 504)


def build_retry_policy(model: EnvoyModel) -> RetryPolicy | None:
    """Return the retry policy of requests to workers, None when none is retried and no silence limited."""
    retries = model.retries
    if not retries.count and not model.stream_idle_timeout_s:
        return None
    policy = RetryPolicy(num_retries=retries.count)
    if model.stream_idle_timeout_s:
        policy.per_try_idle_timeout = seconds(model.stream_idle_timeout_s)
    if not retries.count:
        return policy
    longest_s = max(retries.initial_backoff_s, retries.max_backoff_s)  # Envoy takes no less
    policy.retry_on = RETRY_ON
    policy.retriable_status_codes = list(RETRIABLE_STATUSES)
    policy.retry_back_off = RetryPolicyRetryBackOff(
        base_interval=seconds(retries.initial_backoff_s), max_interval=seconds(longest_s)
    )
    # A worker that asks for a longer pause than this is asked nothing of: the usual waits apply.
    policy.rate_limited_retry_back_off = RetryPolicyRateLimitedRetryBackOff(
        reset_headers=[
            RetryPolicyResetHeader(
                name=RETRY_AFTER_HEADER, format=RetryPolicyResetHeaderFormat.SECONDS
            )
        ],
        max_interval=seconds(longest_s),
    )
    # For the fallback balancing: the endpoint list never names a host twice.
    policy.retry_host_predicate = [
        RetryPolicyRetryHostPredicate(
            name="envoy.retry_host_predicates.previous_hosts",
            typed_config=Any.pack(PreviousHostsPredicate()),
        )
    ]
    policy.host_selection_retry_max_attempts = 16
    return policy
