"""What Prometheus reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.discovery.updates import Remove
from extproc.errors import Refusal
from extproc.metrics import Metrics
from extproc.pool import Pool


@pytest.fixture
def metrics(pool):
    return Metrics("round_robin", [pool])


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
        ("vllm_extproc_client_aborts", "counter", set()),
        ("vllm_extproc_request_duration_seconds", "histogram", {"le"}),
        ("vllm_extproc_time_to_first_byte_seconds", "histogram", {"le"}),
        ("vllm_extproc_xds_nacks", "counter", set()),
        ("vllm_extproc_envoys_connected", "gauge", set()),
        ("vllm_extproc_worker_in_flight", "gauge", {"pool", "worker"}),
        ("vllm_extproc_workers", "gauge", {"pool"}),
        ("vllm_extproc_in_flight", "gauge", {"pool"}),
    ],
)
def test_metric_is_there_under_its_documented_name(metrics, name, kind, labels):
    """Name, type and labels are an interface; the help is a sentence."""
    metrics.requests.labels("http://a", "200").inc()

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


def test_in_flight_is_read_when_asked(metrics, pool):
    """Exact at every scrape; a removed worker's requests stay in the sum, its own series ends."""
    first, second, _ = pool.candidates
    pool.acquire(first)
    pool.acquire(second)
    assert value(metrics, "vllm_extproc_worker_in_flight", pool="default", worker=first.url) == 1

    pool.apply(Remove(first.url))

    name = "vllm_extproc_worker_in_flight"
    assert value(metrics, name, pool="default", worker=first.url) is None
    assert value(metrics, name, pool="default", worker=second.url) == 1
    assert value(metrics, "vllm_extproc_in_flight", pool="default") == 2
    assert value(metrics, "vllm_extproc_workers", pool="default") == 2


def test_two_services_in_one_process_do_not_share_metrics(metrics):
    """Each has a registry of its own, and may be made twice."""
    other = Metrics("random", [Pool("default")])

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
