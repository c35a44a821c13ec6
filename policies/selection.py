"""Small choices that several policies make."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from policies.base import Worker

_order = attrgetter("order")


def contains(workers: Sequence[Worker], worker: Worker) -> bool:
    """Tell in O(log n) whether *worker* is among *workers*, which are sorted by ``order``."""
    at = bisect_left(workers, worker.order, key=_order)
    return at < len(workers) and workers[at] is worker


def absent(workers: Sequence[Worker], members: Sequence[Worker]) -> list[Worker]:
    """Return the *members* that are not among *workers*, in O(k log n) for k of them.

    Both are sorted by ``order`` and *workers* has nobody who is not a member: up to the first absent
    member both agree position by position, so bisecting finds it.
    """
    found: list[Worker] = []
    start = 0
    while len(workers) + len(found) < len(members):
        low, high = start, len(workers)
        while low < high:
            middle = (low + high) // 2
            if workers[middle] is members[middle + len(found)]:
                low = middle + 1
            else:
                high = middle
        found.append(members[low + len(found)])
        start = low
    return found


def uniform(workers: Sequence[Worker], rng: random.Random) -> Worker:
    """Return any of *workers*, each with the same probability."""
    # int(random() * n) is unbiased far beyond any number of workers, and twice as fast as choice
    return workers[int(rng.random() * len(workers))]


def least_loaded(workers: Sequence[Worker], rng: random.Random) -> Worker:
    """Return the worker with the lowest load; one of those that tie, at random."""
    loads = [worker.in_flight / worker.weight for worker in workers]
    lowest = min(loads)
    if loads.count(lowest) == 1:
        return workers[loads.index(lowest)]
    return uniform([w for w, load in zip(workers, loads, strict=True) if load == lowest], rng)
