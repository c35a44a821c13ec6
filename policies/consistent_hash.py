"""Consistent hashing by session."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

from policies.base import Request, Worker
from policies.hash_ring import HashRing
from policies.hashing import hash32
from policies.registry import register
from policies.selection import contains, uniform
from policies.session import HashFallback, header_session, lower_case, session_key

MAX_VIRTUAL_NODES = 10_000
"""More makes nothing more even, and changes of a large pool slow."""


@register("consistent_hash")
@dataclasses.dataclass(slots=True, kw_only=True)
class ConsistentHash:
    """Send each session to the owner of its place on a ring of 2^32 positions.

    The ring holds all members of the pool, not only those available: keys of an unavailable worker
    go to its next neighbours, spread over many, and come back with it. One member more or less moves
    about 1/N of the keys. A request without anything to tell its session by goes anywhere.

    With *balance_factor* c no worker gets more than ceil(c * (all in flight + 1) * its share of the
    weights): a key whose
    owner is full goes on to the next position (bounded loads). That costs a sum over all workers.

    Inputs: the session key (see ``policies/session.py``); with bounded loads the in-flight counts, local
    and exact. Ties cannot be. Sources: Karger et al. (1997); Mirrokni, Thorup, Zadimoghaddam,
    "Consistent Hashing with Bounded Loads" (2018).
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = True

    virtual_nodes: int = 160
    """Virtual nodes of a worker of weight 1, each at four positions. More is more even and slower to
    change; 160 is the peers' figure."""

    balance_factor: float | None = None
    """Most load of one worker relative to the mean; at least 1. None: no bound. 1.25 is usual."""

    hash_fallback: HashFallback = "prompt_prefix"
    """What stands in for a missing session id: the opening of the prompt, or the whole body."""

    session_headers: tuple[str, ...] = ()
    """Headers to look at before the usual ones."""

    _ring: HashRing = dataclasses.field(default_factory=HashRing, init=False, repr=False)

    def __post_init__(self) -> None:
        self.session_headers = lower_case(self.session_headers)
        if not 1 <= self.virtual_nodes <= MAX_VIRTUAL_NODES:
            raise ValueError(
                f"virtual_nodes must be from 1 to {MAX_VIRTUAL_NODES}, got {self.virtual_nodes}"
            )
        if self.balance_factor is not None and self.balance_factor < 1:
            raise ValueError(f"balance_factor must be >= 1, got {self.balance_factor}")
        self._ring = HashRing(self.virtual_nodes)

    def wants_body(self, headers: Mapping[str, str]) -> bool:
        """Only when no header names the session."""
        return not header_session(headers, self.session_headers)

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        key = session_key(request, self.session_headers, self.hash_fallback)
        if not key or len(workers) == 1:
            return uniform(workers, rng)
        position = hash32(key)
        owner = self._ring.owner(position)
        share = self._share(workers)
        if owner is not None and contains(workers, owner) and _has_room(owner, share):
            return owner
        return self._next_after(position, workers, share) or uniform(workers, rng)

    def _next_after(
        self, position: int, workers: Sequence[Worker], share: float | None
    ) -> Worker | None:
        """Return the first of *workers* clockwise that has room, or else the first of them."""
        orders = {worker.order for worker in workers}
        nearest = None
        for worker in self._ring.walk(position):
            if worker.order in orders:
                if _has_room(worker, share):
                    return worker
                nearest = nearest or worker
        return nearest

    def on_workers(self, workers: Sequence[Worker]) -> None:
        """Put new members on the ring and take those that are gone off it."""
        self._ring.set_members(workers)

    def _share(self, workers: Sequence[Worker]) -> float | None:
        """Return the bound per unit of weight, None when there is none."""
        if self.balance_factor is None:
            return None
        in_flight = sum(worker.in_flight for worker in workers)
        weight = sum(worker.weight for worker in workers)
        return self.balance_factor * (in_flight + 1) / weight


def _has_room(worker: Worker, share: float | None) -> bool:
    return share is None or worker.in_flight < math.ceil(share * worker.weight)
