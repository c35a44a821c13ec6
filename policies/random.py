"""Random choice."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import ClassVar

from policies.base import Request, Worker
from policies.registry import register
from policies.selection import uniform


@register("random")
@dataclasses.dataclass(slots=True, kw_only=True)
class Random:
    """Pick any worker, with a probability in proportion to its weight.

    Inputs: the weights. Keeps no state but whether weights differ, so several routers need not agree
    on anything.
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = False

    _weighted: bool = dataclasses.field(default=False, init=False, repr=False)

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        if self._weighted:
            return rng.choices(workers, [worker.weight for worker in workers])[0]
        return uniform(workers, rng)

    def on_workers(self, workers: Sequence[Worker]) -> None:
        """Note whether weights differ: the common case must not pay for the other."""
        self._weighted = len({worker.weight for worker in workers}) > 1
