"""Uniform random choice."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import ClassVar

from policies.base import Request, Worker
from policies.registry import register


@register("random")
@dataclasses.dataclass(slots=True, kw_only=True)
class Random:
    """Pick any worker, each with the same probability.

    Inputs: none. Keeps no state, so several routers need not agree on anything.
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = False

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        # int(random() * n) is unbiased far beyond any number of workers, and twice as fast as choice
        return workers[int(rng.random() * len(workers))]
