"""Power of two choices."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import ClassVar

from policies.base import Request, Worker
from policies.registry import register


@register("power_of_two")
@dataclasses.dataclass(slots=True, kw_only=True)
class PowerOfTwo:
    """Draw *choices* different workers at random and keep the one with the lowest load.

    Load is in-flight requests per unit of weight: local, exact, not stale. Of equal loads the one drawn
    first wins, which is random. With one candidate it is that one. Unlike the least loaded of all, it
    does not send a burst to one worker when several routers, or late news, share the same view.

    Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (1996): the highest
    load of n balls in n bins falls from log n / log log n to log log n / log 2.
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = False

    choices: int = 2
    """Workers drawn per pick. More is closer to the least loaded of all."""

    def __post_init__(self) -> None:
        if self.choices < 2:
            raise ValueError(f"choices must be >= 2, got {self.choices}")

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        count = len(workers)
        if count == 1:
            return workers[0]
        if self.choices == 2:
            first = int(rng.random() * count)
            second = int(rng.random() * (count - 1))
            if second >= first:
                second += 1
            a, b = workers[first], workers[second]
            return b if b.in_flight / b.weight < a.in_flight / a.weight else a
        drawn = rng.sample(workers, min(self.choices, count))
        return min(drawn, key=lambda worker: worker.in_flight / worker.weight)
