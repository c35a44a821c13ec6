"""The contract between the router and a policy.

A policy chooses one worker for one request. It is a pure function of its own state, the request and
the workers: no await, no clock, no logging, no global randomness, no change to a worker. The same
seed and the same calls give the same picks.

``pick`` is a question, not an event: it may be asked several times for one request (the router asks
again without the first choice to fill the list of fallbacks) and must not change what a later pick
answers. What really happened comes through events, which a policy may or may not have:

* ``MembershipObserver.on_workers``: who belongs to the pool, available or not, whenever that changes;
* ``Observer.on_sent``: once per request, for the worker that was put first; ``on_done`` when its lease
  ends.

A policy that keeps state changes it there.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable


@dataclasses.dataclass(slots=True, eq=False)
class Worker:
    """One vLLM engine, or one of its ranks, as policies see it. Read only for them."""

    url: str
    """Identity, for example ``http://10.0.0.5:8000``, with a rank ``http://10.0.0.5:8000@0``."""

    endpoint: str
    """The address as Envoy knows it, ``ip:port``, IPv6 in brackets."""

    order: int
    """Position in order of joining, never used twice; candidates are always sorted by it."""

    in_flight: int = 0
    """Requests sent by this router whose end has not been seen. Exact and local."""

    weight: float = 1.0
    """Share of the traffic relative to others; positive."""

    rank: int | None = None
    """Data-parallel rank of the engine, when each of its ranks is a worker; else None."""

    limit: int = sys.maxsize
    """Requests that it may have in flight; the router offers it to policies only while it has fewer."""

    probation: bool = False
    """Whether its circuit is half-open: it serves one request at a time and no retries of others."""

    cluster: str = ""
    """The Envoy cluster that holds the endpoint. The picks for one request stay within one."""

    host: str = dataclasses.field(init=False)
    """The address without the port: workers on one host tend to fail together."""

    def __post_init__(self) -> None:
        self.host = self.endpoint.rpartition(":")[0]

    @property
    def load(self) -> float:
        """In-flight requests per unit of weight."""
        return self.in_flight / self.weight

    def __repr__(self) -> str:
        return f"<Worker {self.url} in_flight={self.in_flight}>"


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What routing can use of a request body."""

    model: str = ""
    """The ``model`` that was asked for; empty when there is none."""

    session: str = ""
    """First non-empty of ``session_params.session_id``, ``user``, ``session_id``, ``user_id``."""

    prompts: tuple[str, ...] = ()
    """The text that the model will read, one per prompt of a batch; chats flattened with their roles,
    images and audio by content hash. A prompt of token ids is one character per id."""

    tokens: bool = False
    """Whether ``prompts`` are token ids."""

    replies: tuple[tuple[int, int], ...] = ()
    """Where in a chat's prompt each message of the assistant begins and ends, in characters."""

    opening: str = ""
    """The part of the first prompt that later turns of the same conversation repeat."""


@dataclasses.dataclass(slots=True)
class Request:
    """What a policy may know of a request."""

    method: str
    path: str
    """Path with query string, as the client sent it."""

    headers: Mapping[str, str]
    """Lower-case names; of a repeated header the first value."""

    body: bytes | None = None
    """The whole body, or None when the policy did not want it."""

    content: Content | None = None
    """The parsed body; None when there is no body, or none that can be read as JSON."""


@runtime_checkable
class Policy(Protocol):
    """Chooses a worker. Fields are its parameters; see ``policies.registry.register``."""

    name: ClassVar[str]
    needs_body: ClassVar[bool]
    """Whether the policy can use the body. False saves a round trip and all body bytes."""

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        """Choose one of *workers*: never empty, already filtered, sorted by ``order``.

        *now* is in seconds on a monotonic clock. Must not change any state.
        """
        ...


@runtime_checkable
class BodyChooser(Protocol):
    """A policy with ``needs_body`` that can do without the body of some requests."""

    def wants_body(self, headers: Mapping[str, str]) -> bool:
        """Tell whether the body of a request with these *headers* would matter."""
        ...


@runtime_checkable
class MembershipObserver(Protocol):
    """A policy that keeps something per worker."""

    def on_workers(self, workers: Sequence[Worker]) -> None:
        """Learn who belongs to the pool, available or not, sorted by ``order``.

        State of workers that are not among them must go.
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


@runtime_checkable
class SessionKeeper(Protocol):
    """A policy that remembers sessions."""

    def finish_session(self, session: str) -> bool:
        """Forget *session*; tell whether it was known."""
        ...


@runtime_checkable
class CacheKeeper(Protocol):
    """A policy that remembers what the workers' prefix caches hold."""

    def flush(self) -> None:
        """Forget it: the caches have been emptied. The workers stay."""
        ...
