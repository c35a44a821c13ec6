"""From a request to a decision: candidates, policy, ordered endpoints."""

from __future__ import annotations

import dataclasses
import random
from bisect import bisect_left
from collections.abc import Collection, Mapping
from operator import attrgetter

from extproc.errors import Refusal
from extproc.pool import Pool
from policies.base import BodyChooser, MembershipObserver, Observer, Policy, Request, Worker

_order = attrgetter("order")

MAX_ENDPOINTS = 3
"""The pick and its fallbacks: each of Envoy's retries takes the next one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """Send the request to ``workers[0]``; the others are for retries, in this order."""

    pool: Pool
    workers: tuple[Worker, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """Answer the client instead."""

    refusal: Refusal


Decision = Routed | Refused


class Router:
    """Applies one policy to one pool. Decides synchronously and does no I/O."""

    __slots__ = ("_chooser", "_observer", "_rng", "needs_body", "policy", "pool")

    def __init__(self, pool: Pool, policy: Policy, rng: random.Random) -> None:
        self.pool = pool
        self.policy = policy
        self.needs_body = policy.needs_body
        """Whether the body of any request can matter; when not, nothing else is asked."""
        self._chooser = policy if isinstance(policy, BodyChooser) else None
        self._observer = policy if isinstance(policy, Observer) else None
        self._rng = rng
        if isinstance(policy, MembershipObserver):
            pool.subscribe(policy.on_workers)

    def wants_body(self, headers: Mapping[str, str]) -> bool:
        """Tell whether the body of a request with these *headers* would change its pick."""
        if not self.needs_body:
            return False
        return self._chooser is None or self._chooser.wants_body(headers)

    def decide(
        self, request: Request, now: float, *, subset: Collection[str] | None = None
    ) -> Decision:
        """Pick a worker and its fallbacks for *request*.

        *subset*: the endpoints that a gateway allows for this request, as ``ip:port`` or ``ip``
        (any port); None allows all (Endpoint Picker Protocol 004, subset hint).
        """
        workers = self.pool.candidates
        if subset is not None:
            workers = tuple(w for w in workers if _allowed(w, subset))
        if not workers:
            return Refused(Refusal.NO_WORKER)

        first = self.policy.pick(request, workers, now=now, rng=self._rng)
        picked: tuple[Worker, ...] = (first,)
        workers = _without(workers, first)
        while workers and len(picked) < MAX_ENDPOINTS:
            fallback = self._fallback(request, workers, picked, now)
            workers = _without(workers, fallback)
            if all(fallback.endpoint != worker.endpoint for worker in picked):
                picked += (fallback,)
        if self._observer is not None:
            self._observer.on_sent(first, request, now)
        return Routed(self.pool, picked)

    def _fallback(
        self,
        request: Request,
        workers: tuple[Worker, ...],
        picked: tuple[Worker, ...],
        now: float,
    ) -> Worker:
        """Pick one of *workers*, on another host than *picked* where there is one."""
        fallback = self.policy.pick(request, workers, now=now, rng=self._rng)
        if any(fallback.host == worker.host for worker in picked):
            # What took the first worker down may have taken its host.
            elsewhere = _on_other_hosts(workers, picked)
            if elsewhere:
                return self.policy.pick(request, elsewhere, now=now, rng=self._rng)
        return fallback

    def on_done(self, worker: Worker, now: float) -> None:
        """Tell the policy that a request on *worker* ended."""
        if self._observer is not None:
            self._observer.on_done(worker, now)


def _allowed(worker: Worker, subset: Collection[str]) -> bool:
    host = worker.host
    return worker.endpoint in subset or host in subset or host.strip("[]") in subset


def _on_other_hosts(workers: tuple[Worker, ...], picked: tuple[Worker, ...]) -> tuple[Worker, ...]:
    hosts = {worker.host for worker in picked}
    return tuple(worker for worker in workers if worker.host not in hosts)


def _without(workers: tuple[Worker, ...], worker: Worker) -> tuple[Worker, ...]:
    position = bisect_left(workers, worker.order, key=_order)
    if position == len(workers) or workers[position] is not worker:
        raise LookupError(f"the policy picked {worker!r}, which is no candidate")
    return workers[:position] + workers[position + 1 :]
