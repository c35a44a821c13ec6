"""Prometheus metrics.

In-flight figures are read from the pool when Prometheus asks, so the hot path pays nothing for them.
Outcomes come from Envoy's access log, which knows the final status, the worker that really served and
the attempts. Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.errors import Refusal
from extproc.pool import Pool

DECISION_BUCKETS_S = (
    1e-5,
    2.5e-5,
    5e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    1e-2,
    5e-2,
    0.25,
    1.0,
)
REQUEST_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800,
)  # fmt: skip


class Metrics:
    """All metrics of one service, in a registry of their own."""

    def __init__(self, policy: str, pools: Iterable[Pool]) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        decisions = Counter(
            "vllm_extproc_decisions",
            "Decisions made, by policy and result (routed, or the reason of a refusal).",
            ["policy", "result"],
            registry=registry,
        )
        self.routed = decisions.labels(policy, "routed")
        self.refused = {refusal: decisions.labels(policy, refusal) for refusal in Refusal}
        self.decision_seconds = Histogram(
            "vllm_extproc_decision_duration_seconds",
            "Time in the service from Envoy's message to the decision.",
            buckets=DECISION_BUCKETS_S,
            registry=registry,
        )
        self.stream_errors = Counter(
            "vllm_extproc_stream_errors",
            "ext_proc streams ended by the service because of what Envoy sent or of a fault of its own.",
            ["kind"],
            registry=registry,
        )
        for kind in ("protocol", "internal"):
            self.stream_errors.labels(kind)
        self.requests = Counter(
            "vllm_extproc_requests",
            "Requests ended, by worker that served (empty: none) and HTTP status"
            " (0: the client left before there was one).",
            ["worker", "code"],
            registry=registry,
        )
        self.retries = Counter(
            "vllm_extproc_retries",
            "Attempts after the first one that Envoy made.",
            registry=registry,
        )
        self.client_aborts = Counter(
            "vllm_extproc_client_aborts",
            "Requests whose client left before the end of the response.",
            registry=registry,
        )
        self.request_seconds = Histogram(
            "vllm_extproc_request_duration_seconds",
            "From the first byte of the request to the last byte of the response.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.first_byte_seconds = Histogram(
            "vllm_extproc_time_to_first_byte_seconds",
            "From the first byte of the request to the first byte of the worker's response.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.xds_nacks = Counter(
            "vllm_extproc_xds_nacks",
            "Configurations that Envoy refused.",
            registry=registry,
        )
        self.envoys = Gauge(
            "vllm_extproc_envoys_connected",
            "Envoys that get their configuration from this service.",
            registry=registry,
        )
        registry.register(_PoolCollector(tuple(pools)))


class _PoolCollector(Collector):
    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "vllm_extproc_worker_in_flight",
            "Requests sent to the worker whose end has not been seen.",
            labels=["pool", "worker"],
        )
        workers = GaugeMetricFamily(
            "vllm_extproc_workers", "Workers that may be picked.", labels=["pool"]
        )
        total = GaugeMetricFamily(
            "vllm_extproc_in_flight",
            "Requests under way, those on removed workers included.",
            labels=["pool"],
        )
        for pool in self._pools:
            workers.add_metric([pool.name], len(pool.candidates))
            total.add_metric([pool.name], pool.in_flight)
            for worker in pool.members:
                in_flight.add_metric([pool.name, worker.url], worker.in_flight)
        yield in_flight
        yield workers
        yield total
