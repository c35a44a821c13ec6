"""What vLLM counts per engine, in the units and buckets of its ``/metrics``."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from enum import StrEnum

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

# vLLM's of its NIXL connector
TRANSFER_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TRANSFER_BUCKETS_BYTES = tuple(float(2 << exponent) for exponent in range(11, 35, 2))


class FinishReason(StrEnum):
    """Why a sequence ended; the values are vLLM's label values."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Histogram:
    """Counts per bucket, where a bucket holds values up to and including its bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count *value*; a negative one, possible when clocks disagree, counts as zero."""
        value = max(value, 0.0)
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Return the running sums, one per bound and one for infinity."""
        return list(itertools.accumulate(self.counts))


@dataclasses.dataclass(slots=True)
class Statistics:
    """Counters and histograms since the engine was made; times in seconds of engine time."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    """Of these, the ones found in the engine's own cache."""
    received_prompt_tokens: int = 0
    """Of these, the ones whose KV came from another engine."""
    external_queries: int = 0
    """Prompt tokens that were asked of another engine."""
    generation_tokens: int = 0
    preemptions: int = 0
    finished: dict[FinishReason, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    ttft: Histogram = dataclasses.field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    itl: Histogram = dataclasses.field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    e2e: Histogram = dataclasses.field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    queue: Histogram = dataclasses.field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))


@dataclasses.dataclass(slots=True)
class KvStatistics:
    """What one rank received from other workers; times in seconds of engine time."""

    failed_transfers: int = 0
    transferred_bytes: Histogram = dataclasses.field(
        default_factory=lambda: Histogram(TRANSFER_BUCKETS_BYTES)
    )
    transfer_s: Histogram = dataclasses.field(default_factory=lambda: Histogram(TRANSFER_BUCKETS_S))


def bucket_counts(histogram: Histogram) -> list[tuple[str, float]]:
    """Return bound and running sum of each bucket, as Prometheus wants them."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, histogram.cumulative(), strict=True))
