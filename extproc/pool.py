"""The workers of one pool and the leases on them.

Invariants: ``members`` and ``candidates`` are immutable tuples sorted by ``order``, each swapped by one
assignment, so a reader never sees half an update; a worker's ``in_flight`` is the number of its
leases not yet released; a lease is released once, however often it is asked to; a worker that is
removed keeps its leases, and one that comes back under the same URL is a new worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

from extproc.discovery.updates import Add, Remove, Reset, Update, WorkerSpec
from policies.base import Worker


class Lease:
    """One in-flight unit of a worker."""

    __slots__ = ("_pool", "worker")

    def __init__(self, pool: Pool, worker: Worker) -> None:
        self._pool: Pool | None = pool
        self.worker = worker
        worker.in_flight += 1
        pool.in_flight += 1

    def release(self) -> bool:
        """Give the unit back; tell whether this call was the one that did."""
        pool, self._pool = self._pool, None
        if pool is None:
            return False
        self.worker.in_flight -= 1
        pool.in_flight -= 1
        return True


class Pool:
    """The workers that serve one model in one role."""

    __slots__ = (
        "_by_url",
        "_next_order",
        "_subscribers",
        "_suspended",
        "_url_by_endpoint",
        "candidates",
        "in_flight",
        "members",
        "name",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: tuple[Worker, ...] = ()
        """All workers, sorted by ``order``."""
        self.candidates: tuple[Worker, ...] = ()
        """Those that may be picked."""
        self._suspended: set[str] = set()
        self.in_flight = 0
        """Leases out, those on removed workers included."""
        self._by_url: dict[str, Worker] = {}
        self._url_by_endpoint: dict[str, str] = {}
        self._next_order = 0
        self._subscribers: list[Callable[[Sequence[Worker]], None]] = []

    def subscribe(self, on_workers: Callable[[Sequence[Worker]], None]) -> None:
        """Call *on_workers* with all members, now and whenever they change."""
        self._subscribers.append(on_workers)
        on_workers(self.members)

    def suspend(self, endpoint: str) -> bool:
        """Pick the workers at *endpoint* no more until ``resume``; tell whether that changed anything."""
        if endpoint in self._suspended or endpoint not in self._url_by_endpoint:
            return False
        self._suspended.add(endpoint)
        self._choose_candidates()
        return True

    def resume(self, endpoint: str) -> None:
        """Pick the workers at *endpoint* again."""
        self._suspended.discard(endpoint)
        self._choose_candidates()

    def apply(self, update: Update) -> bool:
        """Take *update* in; tell whether the workers changed."""
        match update:
            case Reset(workers):
                return self._reset(workers)
            case Add(worker):
                return self._reset([*self._others(worker.url), worker])
            case Remove(url):
                return self._reset(self._others(url))
            case _:
                assert_never(update)

    def acquire(self, worker: Worker) -> Lease:
        """Count one more request on *worker*."""
        return Lease(self, worker)

    def get(self, url: str) -> Worker | None:
        """Return the worker known as *url*."""
        return self._by_url.get(url)

    def url_of(self, endpoint: str) -> str:
        """Return the URL of the worker at *endpoint*, or *endpoint* when it is not known."""
        return self._url_by_endpoint.get(endpoint, endpoint)

    def _choose_candidates(self) -> None:
        suspended = self._suspended
        available = tuple(w for w in self.members if w.endpoint not in suspended)
        # When all are suspended one of them must be tried.
        self.candidates = available or self.members

    def _others(self, url: str) -> list[WorkerSpec]:
        return [WorkerSpec(w.url, w.endpoint, w.weight) for w in self.members if w.url != url]

    def _reset(self, specs: Iterable[WorkerSpec]) -> bool:
        known = self._by_url
        workers: dict[str, Worker] = {}
        for spec in specs:
            worker = known.get(spec.url)
            if worker is None or (worker.endpoint, worker.weight) != (spec.endpoint, spec.weight):
                worker = Worker(spec.url, spec.endpoint, self._next_order, weight=spec.weight)
                self._next_order += 1
            workers[spec.url] = worker
        if workers == known:
            return False
        self._by_url = workers
        self._url_by_endpoint = {worker.endpoint: worker.url for worker in workers.values()}
        self._suspended &= self._url_by_endpoint.keys()
        self.members = tuple(sorted(workers.values(), key=lambda worker: worker.order))
        self._choose_candidates()
        for on_workers in self._subscribers:
            on_workers(self.members)
        return True
