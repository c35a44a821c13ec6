"""The contract between the router and a policy.

A policy chooses one worker for one request. It is a pure function of its own state, the request and
the workers: no await, no clock, no logging, no global randomness, no change to a worker. The same
seed and the same calls give the same picks.

``pick`` is a question, not an event: it may be asked several times for one request (the router asks
again without the first choice to fill the list of fallbacks) and must not change what a later pick
answers. What really happened comes through ``Observer``: ``on_sent`` once per request, for the
worker that was put first, and ``on_done`` when its lease ends. A policy that keeps state changes it
there.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable


@dataclasses.dataclass(slots=True, eq=False)
class Worker:
    """One vLLM engine as policies see it. Read only for them; the pool owns it."""

    url: str
    """Identity: the URL as it was given, for example ``http://10.0.0.5:8000``."""

    endpoint: str
    """The address as Envoy knows it, ``ip:port``, IPv6 in brackets."""

    order: int
    """Position in order of joining; candidates are always sorted by it."""

    in_flight: int = 0
    """Requests sent by this router whose end has not been seen. Exact and local."""

    def __repr__(self) -> str:
        return f"<Worker {self.url} in_flight={self.in_flight}>"


@dataclasses.dataclass(slots=True)
class Request:
    """What a policy may know of a request."""

    method: str
    path: str
    """Path with query string, as the client sent it."""

    headers: Mapping[str, str]
    """Lower-case names; of a repeated header the first value."""

    body: bytes | None = None
    """The whole body, or None when the policy in force does not need it."""


@runtime_checkable
class Policy(Protocol):
    """Chooses a worker. Fields are its parameters; see ``policies.registry.register``."""

    name: ClassVar[str]
    needs_body: ClassVar[bool]
    """Whether ``Request.body`` must be filled. False saves a round trip and all body bytes."""

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        """Choose one of *workers*: never empty, already filtered, sorted by ``order``.

        *now* is in seconds on a monotonic clock. Must not change any state.
        """
        ...


@runtime_checkable
class Observer(Protocol):
    """A policy that wants to know what became of its picks."""

    def on_sent(self, worker: Worker, request: Request, now: float) -> None:
        """Learn that *request* goes to *worker*: once per request, right after the pick."""
        ...

    def on_done(self, worker: Worker, now: float) -> None:
        """Learn that a lease on *worker* ended, for whatever reason."""
        ...
