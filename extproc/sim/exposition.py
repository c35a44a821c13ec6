"""``/metrics``: the figures of all engines under the names, labels and buckets of vLLM."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from extproc.sim.engine import Engine
from extproc.sim.prefix_cache import BLOCK_TOKENS
from extproc.sim.statistics import Histogram, bucket_counts

LABELS = ("engine", "model_name")

GAUGES: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
    (
        "num_requests_running",
        "Number of requests in model execution batches.",
        lambda engine: engine.running,
    ),
    (
        "num_requests_waiting",
        "Number of requests waiting to be processed.",
        lambda engine: engine.waiting,
    ),
    (
        "kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        lambda engine: engine.kv_usage_ratio,
    ),
)

COUNTERS: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
    (
        "prefix_cache_queries",
        "Prefix cache queries, in number of tokens.",
        lambda engine: engine.cache.query_tokens,
    ),
    (
        "prefix_cache_hits",
        "Prefix cache hits, in number of tokens.",
        lambda engine: engine.cache.hit_tokens,
    ),
    ("num_preemptions", "Number of preemptions.", lambda engine: engine.statistics.preemptions),
    (
        "prompt_tokens",
        "Number of prefill tokens processed.",
        lambda engine: engine.statistics.prompt_tokens,
    ),
    (
        "generation_tokens",
        "Number of generation tokens processed.",
        lambda engine: engine.statistics.generation_tokens,
    ),
)

HISTOGRAMS: tuple[tuple[str, str, Callable[[Engine], Histogram]], ...] = (
    (
        "time_to_first_token_seconds",
        "Time to first token.",
        lambda engine: engine.statistics.ttft,
    ),
    (
        "inter_token_latency_seconds",
        "Time between tokens.",
        lambda engine: engine.statistics.itl,
    ),
    (
        "e2e_request_latency_seconds",
        "End to end request latency.",
        lambda engine: engine.statistics.e2e,
    ),
    (
        "request_queue_time_seconds",
        "Time spent waiting for admission.",
        lambda engine: engine.statistics.queue,
    ),
)


class EngineCollector(Collector):
    """Reads the *engines*, by their label, at each scrape."""

    def __init__(self, engines: Mapping[str, Engine], model_name: Callable[[], str]) -> None:
        self._engines = engines
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Return all metric families, each with a series per engine."""
        series = [((label, self._model_name()), engine) for label, engine in self._engines.items()]
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for labels, engine in series:
                gauge.add_metric(labels, read(engine))
            yield gauge
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for labels, engine in series:
                counter.add_metric(labels, read(engine))
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success",
            "Count of processed requests, by the reason they ended.",
            labels=(*LABELS, "finished_reason"),
        )
        for labels, engine in series:
            for reason, count in engine.statistics.finished.items():
                success.add_metric((*labels, reason.value), count)
        yield success
        yield from self._histograms(series)
        yield self._cache_config()

    def _histograms(self, series: list[tuple[tuple[str, str], Engine]]) -> Iterator[Metric]:
        for name, text, read in HISTOGRAMS:
            family = HistogramMetricFamily(f"vllm:{name}", f"{text} In seconds.", labels=LABELS)
            for labels, engine in series:
                histogram = read(engine)
                family.add_metric(labels, bucket_counts(histogram), histogram.total)
            yield family

    def _cache_config(self) -> Metric:
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Configuration of the KV cache.",
            labels=("engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens"),
        )
        for label, engine in self._engines.items():
            blocks = engine.cache.capacity_blocks
            family.add_metric(
                (label, str(BLOCK_TOKENS), str(blocks), str(blocks * BLOCK_TOKENS)), 1
            )
        return family


class Exposition:
    """Renders the metrics of the engines, and of *more*, as Prometheus text."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        model_name: Callable[[], str],
        more: Iterable[Collector] = (),
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(engines, model_name))
        for collector in more:
            self._registry.register(collector)

    def render(self) -> bytes:
        """Return the current figures."""
        return generate_latest(self._registry)
