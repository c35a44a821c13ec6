"""Prometheus metrics.

Figures of workers are read from the registry when Prometheus asks, so the hot path pays nothing for them.
Outcomes come from Envoy's access log, which knows the final status, the worker that really served and
the attempts. Durations are in seconds.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.address import WorkerUrl, join_host_port
from extproc.admission import Admission, Wait
from extproc.circuit import CircuitState
from extproc.discovery.pod_watch import Sync
from extproc.discovery.pods import PodState
from extproc.engine import State
from extproc.errors import Refusal
from extproc.registry import Registry
from extproc.retry_budget import RetryBudget

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

MAX_WORKERS = 20_000
"""Workers with series of their own; requests of any beyond count under ``OTHER_WORKERS``."""

OTHER_WORKERS = "other"

_CIRCUITS = (CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN)
"""In the order of their figures."""


class Metrics:
    """All metrics of one service, in a registry of their own."""

    def __init__(self, policy: str, workers: Registry) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        decisions = Counter(
            "vllm_extproc_decisions",
            "Decisions made, by policy and result (routed, or the reason of a refusal).",
            ["policy", "result"],
            registry=registry,
        )
        self.routed = decisions.labels(policy, "routed")
        self.relayed = decisions.labels(policy, "relayed")
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
        self._codes: dict[str, set[str]] = {}
        """By worker, for the series of ``requests``."""

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
        self.queue_wait_seconds = Histogram(
            "vllm_extproc_queue_wait_seconds",
            "How long requests waited that had to, for their turn or for a worker, whatever became of them.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.admitted = Gauge(
            "vllm_extproc_admitted",
            "Requests under way, from their headers to the end of their stream, those that wait for a worker"
            " included.",
            registry=registry,
        )
        self.queue_waiting = Gauge(
            "vllm_extproc_queue_waiting",
            "Requests that wait, by what for: to be let in (limit), a worker with room (busy), any worker"
            " (no_worker).",
            ["reason"],
            registry=registry,
        )
        self._validations = Counter(
            "vllm_extproc_token_validations",
            "Bearer tokens judged, by result; `_cached` when the answer was known already.",
            ["result"],
            registry=registry,
        )
        self._legs = Counter(
            "vllm_extproc_prefill_legs",
            "Prefill legs ended, by HTTP status (0: there was no answer).",
            ["code"],
            registry=registry,
        )
        self.prefills_unused = Counter(
            "vllm_extproc_prefills_unused",
            "Prefills that succeeded and handed nothing over, so that the prompt was computed twice.",
            registry=registry,
        )
        self.answered_elsewhere = Counter(
            "vllm_extproc_answered_elsewhere",
            "Split requests that a decode worker answered from the start, since the prefill worker that it"
            " waited for had failed.",
            registry=registry,
        )
        self._announcements_refused = Counter(
            "vllm_extproc_announcements_refused",
            "Messages to the discovery address that did not say who and where a worker is.",
            registry=registry,
        )
        self._leg_seconds = Histogram(
            "vllm_extproc_prefill_leg_duration_seconds",
            "From sending a prompt to a prefill worker to its answer.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._transitions = Counter(
            "vllm_extproc_circuit_transitions",
            "Changes of a worker's circuit, by what it became: open, half_open or closed.",
            ["worker", "to"],
            registry=registry,
        )
        registry.register(_WorkerCollector(workers))

    def watch_admission(self, admission: Admission) -> None:
        """Show who is under way and who waits."""
        self.admitted.set_function(lambda: admission.admitted)
        for reason in Wait:
            waiting = functools.partial(admission.waiting.__getitem__, reason)
            self.queue_waiting.labels(reason).set_function(waiting)

    def count_request(self, worker: str, code: str) -> None:
        """Count a request that *worker* served, empty when none did."""
        if worker and worker not in self._codes and len(self._codes) >= MAX_WORKERS:
            worker = OTHER_WORKERS
        self._codes.setdefault(worker, set()).add(code)
        self.requests.labels(worker, code).inc()

    def watch_retries(self, budget: RetryBudget) -> None:
        """Show what is left of the retry budget."""
        self.registry.register(_BudgetCollector(budget))

    def watch_kubernetes(self, sync: Sync) -> None:
        """Show how well the API server of Kubernetes is followed."""
        self.registry.register(_KubernetesCollector(sync))

    def count_transition(self, worker: str, circuit: CircuitState) -> None:
        """Count that the circuit of *worker* has become another."""
        self._transitions.labels(worker, circuit).inc()

    def count_validation(self, result: str) -> None:
        """Count a token that was judged."""
        self._validations.labels(result).inc()

    def count_refused_announcements(self, count: int) -> None:
        """Count messages to the discovery address that were refused."""
        self._announcements_refused.inc(count)

    def count_leg(self, status: int, seconds: float) -> None:
        """Count a prefill leg that took *seconds*; *status* 0: there was no answer."""
        self._legs.labels(str(status)).inc()
        self._leg_seconds.observe(seconds)

    def forget_worker(self, url: str) -> None:
        """Drop the series of a worker that is gone, also those under its address: it was gone by then."""
        worker = WorkerUrl.parse(url)
        for label in (worker.url, join_host_port(worker.host, worker.port)):
            for code in self._codes.pop(label, ()):
                self.requests.remove(label, code)
            for circuit in CircuitState:
                with contextlib.suppress(KeyError):
                    self._transitions.remove(label, circuit)


class _WorkerCollector(Collector):
    """Reads the registry when Prometheus asks."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        registry = self._registry
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
        for pool in (*registry.pools, *registry.role_pools):
            workers.add_metric([pool.name], len(pool.candidates))
            total.add_metric([pool.name], pool.in_flight)
            for worker in pool.members:
                in_flight.add_metric([pool.name, worker.url], worker.in_flight)
        for pool in registry.retired:
            total.add_metric([pool.name], pool.in_flight)
        yield in_flight
        yield workers
        yield total
        yield from self._by_engine()

    def _by_engine(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "vllm_extproc_worker_states", "Workers in each state.", labels=["state"]
        )
        counts = Counts(engine.state for engine in self._registry.engines)
        for state in State:
            states.add_metric([state], counts[state])
        healthy = GaugeMetricFamily(
            "vllm_extproc_worker_healthy",
            "1 for a worker that is healthy, else 0.",
            labels=["worker"],
        )
        for engine in self._registry.engines:
            healthy.add_metric([engine.key], engine.state is State.HEALTHY)
        circuits = GaugeMetricFamily(
            "vllm_extproc_circuit_state",
            "The worker's circuit: 0 closed, 1 open, 2 half-open.",
            labels=["worker"],
        )
        for engine in self._registry.engines:
            circuit = engine.circuit
            figure = 0 if circuit is None else _CIRCUITS.index(circuit.state)
            circuits.add_metric([engine.key], figure)
        yield states
        yield healthy
        yield circuits


class _BudgetCollector(Collector):
    """Reads the retry budget when Prometheus asks."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        exhausted = CounterMetricFamily(
            "vllm_extproc_retry_budget_exhausted",
            "Requests that were allowed no retry, the retry budget being used up.",
        )
        exhausted.add_metric([], self._budget.exhausted)
        left = GaugeMetricFamily(
            "vllm_extproc_retry_budget_tokens", "Retries that the budget allows; below 0: a debt."
        )
        left.add_metric([], self._budget.balance)
        yield exhausted
        yield left


class _KubernetesCollector(Collector):
    """Reads how the API server is followed when Prometheus asks."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync

    def collect(self) -> Iterator[Metric]:
        sync = self._sync
        yield GaugeMetricFamily(
            "vllm_extproc_kubernetes_up",
            "1 while the Pods of every selector are listed and watched without lasting trouble, else 0.",
            value=not sync.failing,
        )
        yield GaugeMetricFamily(
            "vllm_extproc_kubernetes_last_contact_timestamp_seconds",
            "When the API server last said something that was understood, Unix time; 0: never.",
            value=sync.in_touch_at,
        )
        pods = GaugeMetricFamily(
            "vllm_extproc_kubernetes_pods",
            "Pods of the selectors: workers, and those that are none since they are not ready, about to end, or"
            " unusable.",
            labels=["state"],
        )
        counts = sync.states()
        for state in PodState:
            pods.add_metric([state], counts.get(state, 0))
        yield pods
        requests = CounterMetricFamily(
            "vllm_extproc_kubernetes_requests",
            "Requests to the API server that have ended, by verb and result.",
            labels=["verb", "result"],
        )
        for (verb, result), count in sorted(sync.requests.items()):
            requests.add_metric([verb, result], count)
        yield requests
