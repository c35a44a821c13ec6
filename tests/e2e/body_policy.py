"""A policy that reads the whole body: the worker follows from the body's CRC-32.

Copied into a directory that looks like an installed plug-in and is put on the router's PYTHONPATH.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Sequence
from typing import ClassVar

from policies.base import Request, Worker
from policies.registry import register


@register("e2e_body")
@dataclasses.dataclass(slots=True, kw_only=True)
class BodyPolicy:
    """Pick by the body; tells by the pick that every byte of it was seen."""

    name: ClassVar[str]
    needs_body: ClassVar[bool] = True

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        if request.body is None:
            raise ValueError("the body is missing")
        return workers[zlib.crc32(request.body) % len(workers)]
