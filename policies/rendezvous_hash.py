"""Rendezvous hashing by session."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

from policies.base import Request, Worker
from policies.hashing import hash64
from policies.registry import register
from policies.selection import uniform
from policies.session import HashFallback, header_session, lower_case, session_key

PRIME = 2**61 - 1
"""A Mersenne prime: products modulo it stay cheap."""

BELOW_ONE = 1 - 2**-53


@register("rendezvous_hash")
@dataclasses.dataclass(slots=True, kw_only=True)
class RendezvousHash:
    """Send each session to the available worker with the highest hash of (session, worker).

    A worker that leaves gives its keys to all others evenly, and nobody else's move; there is no ring to
    build. Each pick looks at every worker: good up to some hundred, beyond that prefer
    ``consistent_hash``.

    hash(key, worker) = (a * h(key) + b) mod 2^61-1, with a and b from the worker's URL: one
    multiplication a worker. With unequal weights the score is -weight / ln(hash / 2^61) (weighted
    rendezvous hashing, Wang and Ravishankar 1998; Schindelhauer and Schomaker 2005).

    Inputs: the session key (see ``policies/session.py``). A request without one goes anywhere.
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = True

    hash_fallback: HashFallback = "prompt_prefix"
    """What stands in for a missing session id: the opening of the prompt, or the whole body."""

    session_headers: tuple[str, ...] = ()
    """Headers to look at before the usual ones."""

    _factors: dict[int, tuple[int, int]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    """a and b by the worker's ``order``."""

    _weighted: bool = dataclasses.field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self.session_headers = lower_case(self.session_headers)

    def wants_body(self, headers: Mapping[str, str]) -> bool:
        """Only when no header names the session."""
        return not header_session(headers, self.session_headers)

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        key = session_key(request, self.session_headers, self.hash_fallback)
        if not key:
            return uniform(workers, rng)
        hashed = hash64(key) % PRIME
        factors = self._factors
        best, highest = workers[0], -1.0
        for worker in workers:
            a, b = factors.get(worker.order) or _factors_of(worker)
            score: float = (a * hashed + b) % PRIME
            if self._weighted:
                score = -worker.weight / math.log(min((score + 1) / (PRIME + 1), BELOW_ONE))
            if score > highest:
                best, highest = worker, score
        return best

    def on_workers(self, workers: Sequence[Worker]) -> None:
        """Compute the factors of new members and forget those that are gone."""
        known = self._factors
        self._factors = {w.order: known.get(w.order) or _factors_of(w) for w in workers}
        self._weighted = len({worker.weight for worker in workers}) > 1


def _factors_of(worker: Worker) -> tuple[int, int]:
    return hash64(f"a:{worker.url}") % (PRIME - 1) + 1, hash64(f"b:{worker.url}") % PRIME
