"""Metrics of KV transfer: vLLM's names where it has one, ``sim_`` for what only a simulation knows."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from extproc.sim.kv_config import Connector
from extproc.sim.kv_connector import KvConnector
from extproc.sim.ranks import Rank, Ranks
from extproc.sim.statistics import bucket_counts

LABELS = ("engine", "model_name")


class KvCollector(Collector):
    """Reads *connector* and the engines of *ranks* at each scrape."""

    def __init__(
        self, connector: KvConnector, ranks: Ranks, *, model_name: Callable[[], str]
    ) -> None:
        self._connector = connector
        self._ranks = ranks
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Return all metric families."""
        series = [((str(rank.number), self._model_name()), rank) for rank in self._ranks]
        yield from self._prompt_tokens(series)
        if self._connector.config.connector == Connector.NIXL:
            yield from self._nixl(series)
        yield GaugeMetricFamily(
            "sim_kv_transfers_held",
            "Prompts whose blocks are kept for another worker.",
            value=len(self._connector.kept),
        )
        yield CounterMetricFamily(
            "sim_kv_mismatches",
            "Requests whose two legs do not fit together.",
            value=self._connector.mismatches,
        )

    def _prompt_tokens(self, series: list[tuple[tuple[str, str], Rank]]) -> Iterator[Metric]:
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            labels=(*LABELS, "source"),
        )
        queries = CounterMetricFamily(
            "vllm:external_prefix_cache_queries",
            "External prefix cache queries, in number of tokens.",
            labels=LABELS,
        )
        hits = CounterMetricFamily(
            "vllm:external_prefix_cache_hits",
            "External prefix cache hits, in number of tokens.",
            labels=LABELS,
        )
        for labels, rank in series:
            counts = rank.engine.statistics
            local, external = counts.cached_prompt_tokens, counts.received_prompt_tokens
            computed = counts.prompt_tokens - local - external
            sources.add_metric((*labels, "local_compute"), computed)
            sources.add_metric((*labels, "local_cache_hit"), local)
            sources.add_metric((*labels, "external_kv_transfer"), external)
            queries.add_metric(labels, counts.external_queries)
            hits.add_metric(labels, external)
        yield from (sources, queries, hits)

    def _nixl(self, series: list[tuple[tuple[str, str], Rank]]) -> Iterator[Metric]:
        size = HistogramMetricFamily(
            "vllm:nixl_bytes_transferred", "Bytes per NIXL transfer.", labels=LABELS
        )
        time = HistogramMetricFamily(
            "vllm:nixl_xfer_time_seconds", "Time per NIXL transfer, in seconds.", labels=LABELS
        )
        failed = CounterMetricFamily(
            "vllm:nixl_num_failed_transfers", "Number of failed NIXL transfers.", labels=LABELS
        )
        expired = CounterMetricFamily(
            "vllm:nixl_num_kv_expired_reqs",
            "Number of requests whose KV expired before it was pulled.",
            labels=LABELS,
        )
        connector = self._connector
        for labels, rank in series:
            counts = connector.statistics[rank.number]
            size.add_metric(
                labels, bucket_counts(counts.transferred_bytes), counts.transferred_bytes.total
            )
            time.add_metric(labels, bucket_counts(counts.transfer_s), counts.transfer_s.total)
            failed.add_metric(labels, counts.failed_transfers)
            expired.add_metric(labels, connector.kept.expired[connector.engine_ids[rank.number]])
        yield from (size, time, failed, expired)
