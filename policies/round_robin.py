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

    Inputs: the order in which workers joined; nothing stale. The cursor is the *order* of the last
    worker sent to, not an index, so workers that come, go or are ejected shift nobody's turn. With
    one candidate it is that one. Asked again without its first choice it names the next in line.
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = False

    _last: int = dataclasses.field(default=-1, init=False, repr=False)

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        position = bisect_right(workers, self._last, key=_order)
        return workers[position if position < len(workers) else 0]

    def on_sent(self, worker: Worker, request: Request, now: float) -> None:
        """Move the cursor."""
        self._last = worker.order

    def on_done(self, worker: Worker, now: float) -> None:
        """Nothing to learn from the end of a request."""
