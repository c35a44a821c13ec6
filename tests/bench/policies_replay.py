"""Policies on a recorded trace, offline: prefix hits of each worker's own LRU cache, and spread.

A trace has one JSON object a line with ``timestamp`` (ms), ``input_length``, ``output_length`` and
``hash_ids``: each id stands for one block of tokens after a certain prefix (the format of Mooncake, whose
blocks have 512 tokens). The policy sees a prompt of one token per block. A worker is busy with a request for
as long as its tokens that were not in its cache take to prefill, plus its output; requests in flight are
what the policy knows of load. There is no session id in such a trace: its first two blocks stand for one.
"""

from __future__ import annotations

import dataclasses
import gzip
import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from policies import registry
from policies.base import Content, Observer, Policy, Request
from policies.cache_aware import CacheAware
from policies.consistent_hash import ConsistentHash
from tests.bench.policies_work import fleet, join

WORKERS = 8
CACHE_BLOCKS = (1000, 4000)
"""Blocks of 512 tokens that a worker's cache holds: half a million tokens, and two million."""

PREFILL_TOKENS_PER_S = 8000.0
DECODE_TOKENS_PER_S = 50.0
BUCKET_MS = 3000
"""Time stamps of the Mooncake traces come in buckets; requests are spread within."""


class Line(msgspec.Struct):
    """One request of the trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of the trace."""

    policy: str
    cache_blocks: int
    hit_ratio: float
    """Input tokens that were in the cache of the worker that got the request."""

    requests_spread: float
    """Most requests of a worker / mean."""

    work_spread: float
    """Most tokens prefilled by a worker / mean."""

    in_flight_spread: float
    """Mean over all requests of: the most in flight on a worker / the mean in flight."""


def read(path: Path) -> list[Line]:
    """Read a trace, gzip'd or not, with time stamps spread within their buckets."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    lines = msgspec.json.Decoder(Line).decode_lines(raw)
    lines.sort(key=lambda line: line.timestamp)
    by_time = Counter(line.timestamp for line in lines)
    seen: Counter[int] = Counter()
    for line in lines:
        at = line.timestamp
        line.timestamp += BUCKET_MS * seen[at] // by_time[at]
        seen[at] += 1
    return lines


def contenders() -> dict[str, Callable[[], Policy]]:
    """Return what is compared, by the name that is shown."""
    return {
        "random": registry.policy_class("random"),
        "round_robin": registry.policy_class("round_robin"),
        "least_load": registry.policy_class("least_load"),
        "consistent_hash": ConsistentHash,
        "consistent_hash, bounded 1.25": lambda: ConsistentHash(balance_factor=1.25),
        "cache_aware": CacheAware,
        "cache_aware, no common property": lambda: CacheAware(shared_fan_out=1 << 30),
    }


def replay(
    name: str, policy: Policy, lines: Sequence[Line], cache_blocks: int, *, workers: int = WORKERS
) -> Outcome:
    """Play *lines* to *policy*."""
    members, rng = fleet(workers), random.Random(1)
    for worker in members:
        worker.in_flight = 0
    join(policy, members)
    observer = policy if isinstance(policy, Observer) else None
    caches = [_Cache(cache_blocks) for _ in members]
    ends: list[tuple[float, int]] = []
    sent, work, tokens, hits, spread = [0] * workers, [0] * workers, 0, 0, 0.0
    for line in lines:
        now = line.timestamp / 1000
        while ends and ends[0][0] <= now:
            worker = members[heapq.heappop(ends)[1]]
            worker.in_flight -= 1
            if observer:
                observer.on_done(worker, now)
        request = _request(line)
        worker = policy.pick(request, members, now=now, rng=rng)
        if observer:
            observer.on_sent(worker, request, now)
        at = worker.order
        known = min(line.input_length, caches[at].use(line.hash_ids) * 512)
        missed = line.input_length - known
        took_s = missed / PREFILL_TOKENS_PER_S + line.output_length / DECODE_TOKENS_PER_S
        worker.in_flight += 1
        heapq.heappush(ends, (now + took_s, at))
        sent[at] += 1
        work[at] += missed
        tokens += line.input_length
        hits += known
        in_flight = [member.in_flight for member in members]
        spread += max(in_flight) * workers / sum(in_flight)
    return Outcome(
        policy=name,
        cache_blocks=cache_blocks,
        hit_ratio=hits / tokens,
        requests_spread=_spread(sent),
        work_spread=_spread(work),
        in_flight_spread=spread / len(lines),
    )


def best_hit_ratio(lines: Iterable[Line]) -> float:
    """Return the ratio of one cache that never forgets."""
    cache, tokens, hits = _Cache(1 << 60), 0, 0
    for line in lines:
        tokens += line.input_length
        hits += min(line.input_length, cache.use(line.hash_ids) * 512)
    return hits / tokens


class _Cache:
    """Blocks of one worker, least recently used first; a block is known by its id alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, ids: Sequence[int]) -> int:
        """Take *ids* in; return how many of them, from the first on, were there."""
        blocks = self._blocks
        known = next((n for n, block in enumerate(ids) if block not in blocks), len(ids))
        for block in reversed(ids):  # the end of a prompt is forgotten before its beginning
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._size:
            blocks.popitem(last=False)
        return known


def _request(line: Line) -> Request:
    prompt = "".join(map(chr, line.hash_ids))
    session = "-".join(map(str, line.hash_ids[:2]))
    content = Content("trace", session, (prompt,), tokens=True, opening=prompt[:2])
    return Request("POST", "/v1/completions", {}, b"{}", content)


def _spread(values: Sequence[int]) -> float:
    return max(values) * len(values) / sum(values)
