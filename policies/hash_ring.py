"""A ring of hash positions, over all members of a pool.

Positions are 32-bit numbers. A worker stands at several; a key belongs to the first position clockwise
from its own hash. Who owns which position depends on the worker's URL alone, so routers agree without
talking, and a member that joins or leaves moves only the keys between its positions and the ones
before them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from policies.base import Worker
from policies.hashing import hash32, positions32

POINTS_PER_NODE = 4
"""Positions of one virtual node, as in ketama. With 160 virtual nodes the share of a worker deviates by
1 / sqrt(640), 4 % (one sigma); with one position each it would be 8 %, and of ten workers one would
often be 15 % off."""

_OWNER_BITS = 32
_OWNER_MASK = (1 << _OWNER_BITS) - 1


class HashRing:
    """Sorted positions with their owners."""

    __slots__ = ("_owners", "_points", "_virtual_nodes")

    def __init__(self, virtual_nodes: int = 160) -> None:
        self._virtual_nodes = virtual_nodes
        self._owners: dict[int, Worker] = {}
        # 32 bits of position, 32 of the URL's hash to break ties alike everywhere, and the order of the
        # owner: one list to sort and to search
        self._points: list[int] = []

    def __len__(self) -> int:
        return len(self._points)

    def members(self) -> Sequence[Worker]:
        """Return the workers on the ring."""
        return list(self._owners.values())

    def set_members(self, workers: Sequence[Worker]) -> None:
        """Make *workers* the members; those that stay keep their positions."""
        wanted = {worker.order: worker for worker in workers}
        gone = self._owners.keys() - wanted.keys()
        if gone:
            self._points = [point for point in self._points if point & _OWNER_MASK not in gone]
        fresh: list[int] = []
        for order in wanted.keys() - self._owners.keys():
            fresh.extend(self._positions(wanted[order]))
        self._owners = wanted
        if fresh:
            fresh.sort()
            # Two sorted runs: the sort merges them in linear time.
            self._points = sorted(self._points + fresh)

    def owner(self, position: int) -> Worker | None:
        """Return the first owner clockwise from *position*; None when the ring is empty."""
        points = self._points
        if not points:
            return None
        at = bisect_left(points, position << 2 * _OWNER_BITS)
        return self._owners[points[at if at < len(points) else 0] & _OWNER_MASK]

    def walk(self, position: int) -> Iterator[Worker]:
        """Yield the owners clockwise from *position*, once round; one may come several times."""
        points, owners = self._points, self._owners
        start = bisect_left(points, position << 2 * _OWNER_BITS)
        for index in range(start, len(points)):
            yield owners[points[index] & _OWNER_MASK]
        for index in range(start):
            yield owners[points[index] & _OWNER_MASK]

    def _positions(self, worker: Worker) -> list[int]:
        count = max(1, round(self._virtual_nodes * worker.weight)) * POINTS_PER_NODE
        tail = hash32(worker.url) << _OWNER_BITS | worker.order
        return [at << 2 * _OWNER_BITS | tail for at in positions32(worker.url, count)]
