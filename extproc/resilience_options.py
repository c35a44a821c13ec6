"""Options of retries, circuit breakers, limits and queues; a part of ``config.Config``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_SECONDS = 31_536_000  # a year: Envoy takes no infinite durations
MAX_WAIT_S = 3600

Milliseconds = Annotated[int, Meta(ge=1, le=3_600_000)]
Duration = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
Rate = Annotated[float, Meta(ge=0, le=10_000_000)]


class ResilienceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens when workers fail or too much is asked of them."""

    retry_max_retries: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="Attempts after the first one, each at the next worker of the pick's list, before"
            " the client sees the failure.",
        ),
    ] = 5
    retry_initial_backoff_ms: Annotated[
        Milliseconds,
        Meta(description="Milliseconds that the first retry waits at most; Envoy draws the wait."),
    ] = 50
    retry_max_backoff_ms: Annotated[
        Milliseconds,
        Meta(
            description="Milliseconds up to which the bound of the waits doubles; at least the first bound. A worker"
            " that asks for more with Retry-After is not heeded."
        ),
    ] = 30000
    retry_backoff_multiplier: Annotated[
        float,
        Meta(
            ge=1,
            le=100,
            description="Taken for the sake of other routers' command lines: Envoy always doubles.",
        ),
    ] = 1.5
    retry_jitter_factor: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Taken for the sake of other routers' command lines: Envoy draws each wait from"
            " zero up.",
        ),
    ] = 0.2
    retry_budget_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Retries relative to requests, at most, over time. 0: none."),
    ] = 0.2
    disable_retries: Annotated[
        bool, Meta(description="Hand every failure of a worker to the client.")
    ] = False
    cb_failure_threshold: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Failures in a row that open a worker's circuit."),
    ] = 10
    cb_success_threshold: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Successes in a row, one request at a time, that close a half-open circuit.",
        ),
    ] = 3
    cb_timeout_duration_secs: Annotated[
        Duration,
        Meta(description="Seconds that a circuit stays open before a worker is tried again."),
    ] = 60
    cb_window_duration_secs: Annotated[
        Duration,
        Meta(description="Seconds within which the failures must fall to open a circuit."),
    ] = 120
    cb_count_429: Annotated[
        bool, Meta(description="Count 429 (too many requests) of a worker as a failure.")
    ] = False
    disable_circuit_breaker: Annotated[
        bool,
        Meta(description="Never take a worker out for its answers, only for its health checks."),
    ] = False
    max_concurrent_requests: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Requests under way at the same time, open streams included; more wait in the"
            " queue.",
        ),
    ] = 32768
    queue_size: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000_000,
            description="Requests that may wait; more are answered 429. 0: none waits.",
        ),
    ] = 100
    queue_timeout_secs: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_WAIT_S)],
        Meta(description="Seconds after which a waiting request is answered 408."),
    ] = 60
    max_worker_concurrency: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000_000,
            description="Requests under way on one worker at the same time; more wait in the queue. 0: no"
            " limit.",
        ),
    ] = 0
    no_worker_timeout_secs: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_WAIT_S)],
        Meta(
            description="Seconds that requests wait while no worker is ready, as in a rolling update. 0:"
            " they are answered 503 at once."
        ),
    ] = 0
    rate_limit_tokens_per_second: Annotated[
        Rate, Meta(description="Requests per second over all clients; more get 429. 0: no limit.")
    ] = 0
    rate_limit_per_key: Annotated[
        Rate,
        Meta(
            description="Requests per second of each client, known by its key, token or x-tenant-id; more"
            " get 429. 0: no limit."
        ),
    ] = 0
    rate_limit_burst: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000_000,
            description="Requests that may come at once within the rate limits. 0: what a fifth of a second"
            " allows, at least 2.",
        ),
    ] = 0
    stream_idle_timeout_secs: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_SECONDS)],
        Meta(
            description="Seconds that a worker may be silent before or amid its answer; if nothing came of"
            " it, the request is tried elsewhere. 0: only --request-timeout-secs counts."
        ),
    ] = 0
    slow_start_secs: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_WAIT_S)],
        Meta(
            description="Seconds in which Envoy, balancing by itself, raises the share of a new or returning"
            " worker. 0: it gets its full share at once."
        ),
    ] = 10
    shutdown_delay_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_WAIT_S)],
        Meta(
            description="Seconds between /readiness failing and the end of new connections after SIGTERM, so"
            " that load balancers look elsewhere first."
        ),
    ] = 1
    envoy_max_memory: Annotated[
        int,
        Meta(
            ge=0,
            le=2**50,
            description="Bytes of memory that Envoy may hold before it refuses requests. 0: three quarters"
            " of what this machine or container has. For `launch`.",
        ),
    ] = 0
