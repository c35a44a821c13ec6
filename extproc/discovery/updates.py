"""What a discovery source may say. The pool does not know which source spoke."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to send to."""

    url: str
    """Identity."""

    endpoint: str
    """``ip:port``; Envoy's endpoint discovery takes no host names."""

    weight: float = 1.0
    """Share of the traffic relative to others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reset:
    """These are all the workers; forget the others."""

    workers: tuple[WorkerSpec, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Add:
    """One more worker, or a known one at another endpoint."""

    worker: WorkerSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Remove:
    """No new requests for this worker; those under way finish."""

    url: str


Update = Reset | Add | Remove
