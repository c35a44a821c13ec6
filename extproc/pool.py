"""The workers of one pool, who of them may be picked, and the leases on them.

Invariants: ``members`` and ``candidates`` are immutable tuples sorted by ``order``, each swapped by one
assignment, so a reader never sees half an update; a worker's ``in_flight`` is the number of its
leases not yet released; a lease is released once, however often it is asked to; a worker that is
removed keeps its leases. Whoever releases a lease tells the admission stage, where others may wait for it.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Collection, Mapping
from operator import attrgetter

from policies.base import MembershipObserver, Observer, Policy, Request, Worker

NO_LIMIT = sys.maxsize

_order = attrgetter("order")


class Lease:
    """One in-flight unit of a worker."""

    __slots__ = ("_pool", "worker")

    def __init__(self, pool: Pool, worker: Worker) -> None:
        self._pool: Pool | None = pool
        self.worker = worker
        worker.in_flight += 1
        pool.in_flight += 1

    def release(self, now: float) -> bool:
        """Give the unit back and tell the policy; tell whether this call was the one that did."""
        pool, self._pool = self._pool, None
        if pool is None:
            return False
        self.worker.in_flight -= 1
        pool.in_flight -= 1
        pool.on_done(self.worker, now)
        return True


class Pool:
    """The workers that serve one model in one role, with the policy that picks among them."""

    __slots__ = (
        "_membership_observer",
        "_observer",
        "_serving",
        "_tripped",
        "candidates",
        "in_flight",
        "limited",
        "members",
        "name",
        "policy",
        "spread",
    )

    def __init__(self, name: str, policy: Policy) -> None:
        self.name = name
        self.policy = policy
        self.members: tuple[Worker, ...] = ()
        """All workers, sorted by ``order``."""
        self.candidates: tuple[Worker, ...] = ()
        """Those that may be picked."""
        self.spread = False
        """Whether the members are in several Envoy clusters."""
        self.limited = False
        """Whether any candidate may have only so many requests in flight."""
        self.in_flight = 0
        """Leases out, those on removed workers included."""
        self._serving: Mapping[str, tuple[Worker, ...]] = {}
        self._tripped: bool | Collection[str] = False
        self._observer = policy if isinstance(policy, Observer) else None
        self._membership_observer = policy if isinstance(policy, MembershipObserver) else None

    def set_members(self, members: tuple[Worker, ...]) -> None:
        """Make *members* all the workers, sorted by ``order``, and let the policy know."""
        self.members = members
        self.look_at_clusters()
        if self._membership_observer is not None:
            self._membership_observer.on_workers(members)

    def look_at_clusters(self) -> None:
        """Notice in which Envoy clusters the members are."""
        self.spread = len({worker.cluster for worker in self.members}) > 1

    def set_candidates(
        self,
        candidates: tuple[Worker, ...],
        serving: Mapping[str, tuple[Worker, ...]] | None = None,
        *,
        tripped: bool | Collection[str] = False,
    ) -> None:
        """Let only *candidates* be picked, all of them members and sorted.

        *serving*: candidates by model name, for the names that not every candidate serves.
        *tripped*: whether the circuits of all are open, or for which of these names they are.
        """
        self.candidates = candidates
        self._serving = serving or {}
        self._tripped = tripped
        self.look_at_limits()

    def look_at_limits(self) -> None:
        """Notice whether any candidate has a limit."""
        self.limited = any(worker.limit < NO_LIMIT for worker in self.candidates)

    def candidates_for(self, model: str) -> tuple[Worker, ...]:
        """Return the candidates that serve *model*; all of them for a name that makes no difference."""
        return self._serving.get(model, self.candidates)

    def distinguishes(self, model: str) -> bool:
        """Tell whether not every candidate serves *model*."""
        return model in self._serving

    def is_tripped(self, model: str = "") -> bool:
        """Tell whether the circuits of all who serve *model* are open: there is nothing to wait for."""
        tripped = self._tripped
        return tripped if isinstance(tripped, bool) else model in tripped

    def offers(self, worker: Worker, model: str = "") -> bool:
        """Tell whether *worker* is a candidate for *model*."""
        found = self.candidates_for(model)
        position = bisect_left(found, worker.order, key=_order)
        return position < len(found) and found[position] is worker

    def acquire(self, worker: Worker) -> Lease:
        """Count one more request on *worker*."""
        return Lease(self, worker)

    def on_sent(self, worker: Worker, request: Request, now: float) -> None:
        """Tell the policy that *request* goes to *worker*."""
        if self._observer is not None:
            self._observer.on_sent(worker, request, now)

    def on_done(self, worker: Worker, now: float) -> None:
        """Tell the policy that a lease on *worker* ended."""
        if self._observer is not None:
            self._observer.on_done(worker, now)
