"""The least loaded worker."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import ClassVar

from policies.base import Request, Worker
from policies.registry import register
from policies.selection import least_loaded


@register("least_load")
@dataclasses.dataclass(slots=True, kw_only=True)
class LeastLoad:
    """Pick the worker with the fewest requests in flight per unit of weight.

    In-flight counts are local and exact, not stale, but each router knows only its own: with several
    routers prefer ``power_of_two``. Ties are broken at random, so an idle pool is used evenly. The cost
    grows with the number of workers.
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = False

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        return least_loaded(workers, rng)
