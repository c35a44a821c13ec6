"""Round robin: each worker in turn."""

from __future__ import annotations

import dataclasses
import random
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

from policies.base import Request, Worker
from policies.registry import register

_order = attrgetter("order")


@register("round_robin")
@dataclasses.dataclass(slots=True, kw_only=True)
class RoundRobin:
    """Pick the next worker after the one that got the last request.

    The cursor is the ``order`` of the last worker sent to, not an index, so workers that come, go or
    are ejected shift nobody's turn. Asked again without its first choice it names the next in line.

    With unequal weights it is smooth: each worker has a next turn on a virtual clock, the earliest
    goes first (ties: the one that joined first), and a request moves its worker's turn on by
    1 / weight (earliest deadline first, as Envoy's weighted round robin). A worker that joins starts at
    the virtual time of the others, not at zero, so it is not flooded.

    Inputs: the order of joining and the weights; nothing stale.
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = False

    _last: int = dataclasses.field(default=-1, init=False, repr=False)
    _turns: dict[int, float] = dataclasses.field(default_factory=dict, init=False, repr=False)
    """Next turn of each worker by ``order``; empty while all weights are equal."""

    _clock: float = dataclasses.field(default=0.0, init=False, repr=False)

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        if self._turns:
            turns, clock = self._turns, self._clock
            return min(workers, key=lambda worker: turns.get(worker.order, clock))
        position = bisect_right(workers, self._last, key=_order)
        return workers[position if position < len(workers) else 0]

    def on_workers(self, workers: Sequence[Worker]) -> None:
        """Forget workers that are gone; keep turns only while weights differ."""
        if len({worker.weight for worker in workers}) <= 1:
            self._turns = {}
            return
        known = self._turns
        self._turns = {
            worker.order: known.get(worker.order, self._clock + 1 / worker.weight)
            for worker in workers
        }

    def on_sent(self, worker: Worker, request: Request, now: float) -> None:
        """Move the cursor."""
        self._last = worker.order
        turn = self._turns.get(worker.order)
        if turn is not None:
            # A worker that was away for a while must not catch up on what it missed.
            self._clock = max(self._clock, turn)
            self._turns[worker.order] = self._clock + 1 / worker.weight

    def on_done(self, worker: Worker, now: float) -> None:
        """Nothing to learn from the end of a request."""
