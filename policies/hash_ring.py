"""A ring of hash positions, over all members of a pool.

Positions are 32-bit numbers. A worker stands at several; a key belongs to the first position clockwise
from its own hash. Who owns which position depends on the worker's URL alone, so routers agree without
talking, and a member that joins or leaves moves only the keys between its positions and the ones
before them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from policies.base import Worker
from policies.hashing import hash32, positions32

POINTS_PER_NODE = 4
"""Positions of one virtual node, as in ketama. With 160 virtual nodes the share of a worker deviates by
1 / sqrt(640), 4 % (one sigma); with one position each it would be 8 %, and of ten workers one would
often be 15 % off."""

FEW = 8
"""A change of less than one point in so many copies stretches instead of sorting."""

_TIE_BITS = 32
"""A point is 32 bits of position, and 32 of the URL's hash to break ties alike everywhere."""


class HashRing:
    """Sorted positions with their owners."""

    __slots__ = ("_orders", "_owners", "_points", "_virtual_nodes", "_weights")

    def __init__(self, virtual_nodes: int = 160) -> None:
        self._virtual_nodes = virtual_nodes
        self._owners: dict[int, Worker] = {}
        self._weights: dict[int, float] = {}
        """The weight that an owner had when it was put on the ring; it can change."""
        # Arrays of machine words: a large ring is copied at each change, at the speed of memory.
        self._points = array("Q")
        self._orders = array("Q")
        """The owner's ``order``, parallel to the points."""

    def __len__(self) -> int:
        return len(self._points)

    def set_members(self, workers: Sequence[Worker]) -> None:
        """Make *workers* the members; those that stay keep their positions."""
        wanted = {worker.order: worker for worker in workers}
        weights = {worker.order: worker.weight for worker in workers}
        owners, before = self._owners, self._weights
        gone = [
            (point, order)
            for order, weight in before.items() - weights.items()
            for point in self._positions(owners[order], weight)
        ]
        fresh = [
            (point, order)
            for order, weight in weights.items() - before.items()
            for point in self._positions(wanted[order], weight)
        ]
        self._owners, self._weights = wanted, weights
        if FEW * (len(gone) + len(fresh)) > len(self._points):
            self._sort(set(gone), fresh)
        else:
            self._splice(sorted(gone), sorted(fresh))

    def owner(self, position: int) -> Worker | None:
        """Return the first owner clockwise from *position*; None when the ring is empty."""
        points = self._points
        if not points:
            return None
        at = bisect_left(points, position << _TIE_BITS)
        return self._owners[self._orders[at if at < len(points) else 0]]

    def walk(self, position: int) -> Iterator[Worker]:
        """Yield the owners clockwise from *position*, once round; one may come several times."""
        orders, owners = self._orders, self._owners
        start = bisect_left(self._points, position << _TIE_BITS)
        for index in range(start, len(orders)):
            yield owners[orders[index]]
        for index in range(start):
            yield owners[orders[index]]

    def _positions(self, worker: Worker, weight: float) -> list[int]:
        count = max(1, round(self._virtual_nodes * weight)) * POINTS_PER_NODE
        tail = hash32(worker.url)
        return [at << _TIE_BITS | tail for at in positions32(worker.url, count)]

    def _sort(self, gone: set[tuple[int, int]], fresh: list[tuple[int, int]]) -> None:
        """Build the ring anew: for large changes."""
        pairs = [pair for pair in zip(self._points, self._orders, strict=True) if pair not in gone]
        pairs += fresh
        pairs.sort()
        self._points = array("Q", [point for point, _ in pairs])
        self._orders = array("Q", [order for _, order in pairs])

    def _splice(self, gone: list[tuple[int, int]], fresh: list[tuple[int, int]]) -> None:
        """Copy the ring by the stretches between what leaves and what comes."""
        if gone:
            points, orders = array("Q"), array("Q")
            start = 0
            for pair in gone:
                end = self._find(pair, start)
                points += self._points[start:end]
                orders += self._orders[start:end]
                start = end + 1
            self._points = points + self._points[start:]
            self._orders = orders + self._orders[start:]
        if fresh:
            points, orders = array("Q"), array("Q")
            start = 0
            for point, order in fresh:
                end = self._find((point, order), start)
                points += self._points[start:end]
                orders += self._orders[start:end]
                points.append(point)
                orders.append(order)
                start = end
            self._points = points + self._points[start:]
            self._orders = orders + self._orders[start:]

    def _find(self, pair: tuple[int, int], start: int) -> int:
        """Return where *pair* is or belongs, not before *start*."""
        point, order = pair
        at = bisect_left(self._points, point, start)
        while at < len(self._points) and self._points[at] == point and self._orders[at] < order:
            at += 1
        return at
