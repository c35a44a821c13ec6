"""What a discovery source may say. The registry does not care which source spoke."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from extproc.address import WorkerUrl


class WorkerType(StrEnum):
    """The role of a worker."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to send to, as a user or a discovery source describes it."""

    url: WorkerUrl
    """Identity; with a rank, only that rank of the engine."""

    weight: float = 1.0
    """Share of the traffic relative to others."""

    model: str = ""
    """The model it is known to serve, whatever it says itself; empty: what it says."""

    worker_type: WorkerType = WorkerType.REGULAR
    bootstrap_port: int | None = None
    """Where a prefill worker's KV connector is asked for its address."""

    zmq_address: str = ""
    """``host:port`` where its P2P-NCCL connector listens, as it announces it."""

    labels: tuple[tuple[str, str], ...] = ()
    """Free text for operators, sorted by key."""

    tls_name: str = ""
    """The name that its certificate must carry when that is not the URL's host."""

    instance: str = ""
    """Which one it is of those that are at the URL one after the other, such as the uid of a Pod. A source
    that knows says ``Remove`` before it names another."""

    @property
    def key(self) -> str:
        """The URL, with its rank when it has one: what tells workers apart."""
        return str(self.url)


@dataclasses.dataclass(frozen=True, slots=True)
class Reset:
    """These are all the workers of this source; forget its others."""

    workers: tuple[WorkerSpec, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Add:
    """One more worker, or a known one with another description."""

    worker: WorkerSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Remove:
    """No new requests for this worker; those under way finish."""

    key: str


Update = Reset | Add | Remove
