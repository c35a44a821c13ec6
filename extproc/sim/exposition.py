"""``/metrics``: an engine's figures under the names, labels and buckets of vLLM."""

from collections.abc import Iterable, Iterator

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
from extproc.sim.statistics import Histogram

LABELS = ("engine", "model_name")


class EngineCollector(Collector):
    """Reads *engine* at each scrape; one engine, so the label ``engine`` is always 0."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = ("0", model_name)

    def collect(self) -> Iterable[Metric]:
        """Return all metric families."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield self._cache_config()

    def _gauges(self) -> Iterator[Metric]:
        engine = self._engine
        for name, text, value in (
            (
                "num_requests_running",
                "Number of requests in model execution batches.",
                engine.running,
            ),
            ("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting),
            (
                "kv_cache_usage_perc",
                "KV-cache usage. 1 means 100 percent usage.",
                engine.kv_usage_ratio,
            ),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        cache, statistics = self._engine.cache, self._engine.statistics
        for name, text, value in (
            (
                "prefix_cache_queries",
                "Prefix cache queries, in number of tokens.",
                cache.query_tokens,
            ),
            ("prefix_cache_hits", "Prefix cache hits, in number of tokens.", cache.hit_tokens),
            ("num_preemptions", "Number of preemptions.", statistics.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", statistics.prompt_tokens),
            (
                "generation_tokens",
                "Number of generation tokens processed.",
                statistics.generation_tokens,
            ),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success",
            "Count of processed requests, by the reason they ended.",
            labels=(*LABELS, "finished_reason"),
        )
        for reason, count in statistics.finished.items():
            success.add_metric((*self._labels, reason.value), count)
        yield success

    def _histograms(self) -> Iterator[Metric]:
        statistics = self._engine.statistics
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Time to first token.", statistics.ttft),
            ("inter_token_latency_seconds", "Time between tokens.", statistics.itl),
            ("e2e_request_latency_seconds", "End to end request latency.", statistics.e2e),
            ("request_queue_time_seconds", "Time spent waiting for admission.", statistics.queue),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", f"{text} In seconds.", labels=LABELS)
            family.add_metric(self._labels, _buckets(histogram), histogram.total)
            yield family

    def _cache_config(self) -> Metric:
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Configuration of the KV cache.",
            labels=("engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens"),
        )
        blocks = self._engine.cache.capacity_blocks
        family.add_metric(("0", str(BLOCK_TOKENS), str(blocks), str(blocks * BLOCK_TOKENS)), 1)
        return family


class Exposition:
    """Renders the metrics of one engine as Prometheus text."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(engine, model_name))

    def render(self) -> bytes:
        """Return the current figures."""
        return generate_latest(self._registry)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, histogram.cumulative(), strict=True))
