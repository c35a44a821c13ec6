"""What Prometheus reads."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.circuit import CircuitState
from extproc.discovery.pod_watch import Sync
from extproc.errors import Refusal
from extproc.metrics import Metrics
from extproc.retry_budget import RetryBudget
from tests.fleets import registry_of, remove, reset, say


@pytest.fixture
def metrics(registry):
    metrics = Metrics("round_robin", registry)
    metrics.watch_retries(RetryBudget(ratio=0.2, most=5))
    metrics.watch_kubernetes(Sync(requests=Counter({("list", "ok"): 1})))
    return metrics


def families(metrics):
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("name", "kind", "labels"),
    [
        ("vllm_extproc_decisions", "counter", {"policy", "result"}),
        ("vllm_extproc_decision_duration_seconds", "histogram", {"le"}),
        ("vllm_extproc_stream_errors", "counter", {"kind"}),
        ("vllm_extproc_requests", "counter", {"worker", "code"}),
        ("vllm_extproc_retries", "counter", set()),
        ("vllm_extproc_retry_budget_exhausted", "counter", set()),
        ("vllm_extproc_retry_budget_tokens", "gauge", set()),
        ("vllm_extproc_circuit_state", "gauge", {"worker"}),
        ("vllm_extproc_circuit_transitions", "counter", {"worker", "to"}),
        ("vllm_extproc_client_aborts", "counter", set()),
        ("vllm_extproc_request_duration_seconds", "histogram", {"le"}),
        ("vllm_extproc_time_to_first_byte_seconds", "histogram", {"le"}),
        ("vllm_extproc_xds_nacks", "counter", set()),
        ("vllm_extproc_envoys_connected", "gauge", set()),
        ("vllm_extproc_worker_in_flight", "gauge", {"pool", "worker"}),
        ("vllm_extproc_workers", "gauge", {"pool"}),
        ("vllm_extproc_in_flight", "gauge", {"pool"}),
        ("vllm_extproc_worker_states", "gauge", {"state"}),
        ("vllm_extproc_worker_healthy", "gauge", {"worker"}),
    ],
)
def test_metric_is_there_under_its_documented_name(metrics, name, kind, labels):
    """Name, type and labels are an interface; the help is a sentence."""
    metrics.count_request("http://a", "200")
    metrics.count_transition("http://a", CircuitState.OPEN)

    family = families(metrics)[name]

    assert family.type == kind
    assert set().union(*(sample.labels for sample in family.samples)) == labels
    assert family.documentation.endswith(".")


def test_every_metric_is_documented_and_every_documented_one_is_there(metrics):
    """docs/interface.md lists what there is, under the names that Prometheus shows."""
    page = (Path(__file__).parents[2] / "docs" / "interface.md").read_text()
    documented = set(re.findall(r"^\| `(vllm_extproc_\w+)`", page, re.MULTILINE))

    there = {
        name + "_total" * (family.type == "counter")
        for name, family in families(metrics).items()
        if not name.endswith("_created")
    }

    assert there == documented


def test_results_are_there_before_they_happen(metrics):
    """Zeros, so that rates and alerts work from the first scrape on."""
    results = ["routed", *Refusal]
    counts = [
        value(metrics, "vllm_extproc_decisions_total", policy="round_robin", result=result)
        for result in results
    ]
    errors = [
        value(metrics, "vllm_extproc_stream_errors_total", kind=kind)
        for kind in ("protocol", "internal")
    ]

    assert counts == [0.0] * len(results)
    assert errors == [0.0, 0.0]


def test_in_flight_is_read_when_asked(metrics, registry, pool):
    """Exact at every scrape; a removed worker's requests stay in the sum, its own series ends."""
    first, second, _ = pool.candidates
    pool.acquire(first)
    pool.acquire(second)
    assert value(metrics, "vllm_extproc_worker_in_flight", pool="default", worker=first.url) == 1

    remove(registry, first.url)

    name = "vllm_extproc_worker_in_flight"
    assert value(metrics, name, pool="default", worker=first.url) is None
    assert value(metrics, name, pool="default", worker=second.url) == 1
    assert value(metrics, "vllm_extproc_in_flight", pool="default") == 2
    assert value(metrics, "vllm_extproc_workers", pool="default") == 2


def test_requests_on_a_pool_that_is_gone_are_counted_to_their_end():
    """All its workers went while it answered; the sum over all pools stays exact."""
    registry = registry_of("http://10.0.0.1", "http://10.0.0.2")
    metrics = Metrics("random", registry)
    say(registry, "http://10.0.0.1", "llama")
    say(registry, "http://10.0.0.2", "qwen")
    gone = registry.pools[1]
    lease = gone.acquire(gone.candidates[0])

    reset(registry, "http://10.0.0.1")

    assert value(metrics, "vllm_extproc_in_flight", pool=gone.name) == 1
    assert value(metrics, "vllm_extproc_in_flight", pool="default") == 0
    assert value(metrics, "vllm_extproc_workers", pool=gone.name) is None

    lease.release(1.0)
    registry.commit(1.0)

    assert value(metrics, "vllm_extproc_in_flight", pool=gone.name) is None


def test_states_of_workers_are_read_when_asked():
    """Every state has its number, none is left out; each worker says whether it is healthy."""
    registry = registry_of(
        "http://10.0.0.1", "http://10.0.0.2", "http://10.0.0.3", asks_models=True
    )
    metrics = Metrics("random", registry)
    say(registry, "http://10.0.0.1", "llama")
    say(registry, "http://10.0.0.2", "llama")
    registry.drain("http://10.0.0.2", 1.0)
    registry.commit(0.0)

    states = {
        sample.labels["state"]: sample.value
        for sample in families(metrics)["vllm_extproc_worker_states"].samples
    }
    healthy = {
        sample.labels["worker"]: sample.value
        for sample in families(metrics)["vllm_extproc_worker_healthy"].samples
    }

    assert states == {
        "starting": 1,
        "healthy": 1,
        "unhealthy": 0,
        "ejected": 0,
        "half_open": 0,
        "draining": 1,
    }
    assert healthy == {"http://10.0.0.1": 1, "http://10.0.0.2": 0, "http://10.0.0.3": 0}
    assert value(metrics, "vllm_extproc_workers", pool="default") == 1


def test_rank_has_a_series_of_its_own():
    """In flight is counted by rank, health by engine."""
    registry = registry_of("http://10.0.0.1", ranks=2)
    metrics = Metrics("random", registry)
    registry.pools[0].acquire(registry.pools[0].candidates[1])

    name = "vllm_extproc_worker_in_flight"
    assert value(metrics, name, pool="default", worker="http://10.0.0.1@0") == 0
    assert value(metrics, name, pool="default", worker="http://10.0.0.1@1") == 1
    assert value(metrics, "vllm_extproc_worker_healthy", worker="http://10.0.0.1") == 1


REQUESTS = "vllm_extproc_requests_total"


def workers_of(metrics):
    samples = families(metrics)["vllm_extproc_requests"].samples
    return {sample.labels["worker"] for sample in samples}


def test_series_of_a_worker_that_is_forgotten_end():
    """All its codes, under its URL and under its address; others stay, and it may come back."""
    metrics = Metrics("random", registry_of())
    for worker in ("http://10.0.0.1:8000", "10.0.0.1:8000", "http://10.0.0.2:8000", ""):
        for code in ("200", "503"):
            metrics.count_request(worker, code)

    metrics.forget_worker("http://10.0.0.1:8000")

    assert workers_of(metrics) == {"http://10.0.0.2:8000", ""}
    assert value(metrics, REQUESTS, worker="http://10.0.0.2:8000", code="503") == 1
    metrics.count_request("http://10.0.0.1:8000", "200")
    assert value(metrics, REQUESTS, worker="http://10.0.0.1:8000", code="200") == 1


@pytest.mark.parametrize(
    ("url", "labels"),
    [
        ("http://10.0.0.1:8000@3", ["http://10.0.0.1:8000", "10.0.0.1:8000"]),
        ("https://w1/llama", ["https://w1/llama"]),
        ("http://[2001:db8::1]:8000", ["http://[2001:db8::1]:8000", "[2001:db8::1]:8000"]),
        ("http://10.0.0.9", []),
    ],
)
def test_worker_is_forgotten_under_the_names_that_requests_have(url, labels):
    """A rank counts under its engine; who never served has nothing to forget."""
    metrics = Metrics("random", registry_of())
    for label in labels:
        metrics.count_request(label, "200")

    metrics.forget_worker(url)
    metrics.forget_worker(url)

    assert workers_of(metrics) == set()


def test_workers_beyond_the_bound_count_together(monkeypatch):
    """Memory is bounded, the sum is exact, and those that were known keep their series."""
    monkeypatch.setattr("extproc.metrics.MAX_WORKERS", 3)
    metrics = Metrics("random", registry_of())
    for worker in "abcdea":
        metrics.count_request(f"http://{worker}", "200")
    metrics.count_request("", "503")

    assert workers_of(metrics) == {"http://a", "http://b", "http://c", "other", ""}
    assert value(metrics, REQUESTS, worker="other", code="200") == 2
    assert value(metrics, REQUESTS, worker="http://a", code="200") == 2

    for worker in "abc":
        metrics.forget_worker(f"http://{worker}")
    metrics.count_request("http://d", "200")
    assert value(metrics, REQUESTS, worker="http://d", code="200") == 1


def test_two_services_in_one_process_do_not_share_metrics(metrics):
    """Each has a registry of its own, and may be made twice."""
    other = Metrics("random", registry_of())

    metrics.retries.inc(3)

    assert value(other, "vllm_extproc_retries_total") == 0


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("vllm_extproc_decision_duration_seconds", "decision_seconds"),
        ("vllm_extproc_request_duration_seconds", "request_seconds"),
        ("vllm_extproc_time_to_first_byte_seconds", "first_byte_seconds"),
    ],
)
def test_histogram_is_filled_through_its_attribute(metrics, name, metric):
    """The attribute and the name belong together; buckets go up and end with infinity."""
    getattr(metrics, metric).observe(0.02)

    samples = families(metrics)[name].samples
    bounds = [float(s.labels["le"]) for s in samples if s.name.endswith("_bucket")]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == float("inf")
    assert value(metrics, f"{name}_count") == 1
    assert value(metrics, f"{name}_sum") == 0.02
