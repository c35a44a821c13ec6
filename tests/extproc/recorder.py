"""A policy that remembers what it was shown."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import ClassVar

from policies.base import Request, Worker


@dataclasses.dataclass(slots=True)
class Recorder:
    """Picks the first candidate; keeps the requests, what was sent and what ended."""

    name: ClassVar[str] = "recorder"
    needs_body: bool = False
    requests: list[Request] = dataclasses.field(default_factory=list)
    sent: list[tuple[Worker, float]] = dataclasses.field(default_factory=list)
    done: list[tuple[Worker, float]] = dataclasses.field(default_factory=list)

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        return workers[0]

    def on_sent(self, worker: Worker, request: Request, now: float) -> None:
        self.requests.append(request)
        self.sent.append((worker, now))

    def on_done(self, worker: Worker, now: float) -> None:
        self.done.append((worker, now))
