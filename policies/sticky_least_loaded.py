"""Sessions that stay where they began."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import ClassVar

from policies.base import Request, Worker
from policies.hashing import hash64
from policies.registry import register
from policies.selection import contains, uniform
from policies.session import header_session, lower_case, named_session

MAX_KEY_CHARS = 64


@dataclasses.dataclass(slots=True)
class _Session:
    worker: Worker
    last_used: float
    """Seconds on the monotonic clock."""


@register("sticky_least_loaded")
@dataclasses.dataclass(slots=True, kw_only=True)
class StickyLeastLoaded:
    """Send a new session to the worker with the fewest sessions, and all its requests there.

    Sessions, not requests, are balanced: right for agents and reinforcement learning, where a session is
    long and its KV cache large. Ties are broken at random. A session ends after *ttl_s* without a request,
    by ``POST /finish_session?session_id=``, or when its worker leaves; one whose worker is unavailable
    moves and stays at the new place. A request that names no session goes to the worker with the
    fewest sessions and is not remembered: the opening of a prompt is no id to count by.

    Inputs: the session id of header or body (see ``policies/session.py``); session counts, local and exact.
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = True

    ttl_s: float = 7200
    """Seconds without a request after which a session ends. The peer's default."""

    max_sessions: int = 1_000_000
    """Sessions remembered at most; beyond it the least recently used ends. A client that sends a fresh id
    with each request must not fill the memory (some 250 bytes each)."""

    session_headers: tuple[str, ...] = ()
    """Headers to look at before the usual ones."""

    _sessions: OrderedDict[str, _Session] = dataclasses.field(
        default_factory=OrderedDict, init=False, repr=False
    )
    """Least recently used first."""

    _counts: dict[int, int] = dataclasses.field(default_factory=dict, init=False, repr=False)
    """Sessions by the worker's ``order``."""

    def __post_init__(self) -> None:
        self.session_headers = lower_case(self.session_headers)
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions must be >= 1, got {self.max_sessions}")
        if self.ttl_s <= 0:
            raise ValueError(f"ttl_s must be > 0, got {self.ttl_s}")

    def wants_body(self, headers: Mapping[str, str]) -> bool:
        """Only when no header names the session."""
        return not header_session(headers, self.session_headers)

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        session = self._sessions.get(_key(named_session(request, self.session_headers)))
        if (
            session is not None
            and now - session.last_used < self.ttl_s
            and contains(workers, session.worker)
        ):
            return session.worker
        sessions = self._live_counts(now)
        counts = [sessions.get(worker.order, 0) / worker.weight for worker in workers]
        fewest = min(counts)
        return uniform([w for w, n in zip(workers, counts, strict=True) if n == fewest], rng)

    def on_workers(self, workers: Sequence[Worker]) -> None:
        """End the sessions of workers that are gone."""
        members = {worker.order for worker in workers}
        gone = self._counts.keys() - members
        if gone:
            ended = [key for key, s in self._sessions.items() if s.worker.order in gone]
            for key in ended:
                self._end(key)

    def on_sent(self, worker: Worker, request: Request, now: float) -> None:
        """Remember the session, and end those that have been idle for too long."""
        self._expire(now)
        key = _key(named_session(request, self.session_headers))
        if not key:
            return
        session = self._sessions.get(key)
        if session is not None and session.worker is worker:
            session.last_used = now
            self._sessions.move_to_end(key)
            return
        if session is not None:
            self._end(key)
        if len(self._sessions) >= self.max_sessions:
            self._end(next(iter(self._sessions)))
        self._sessions[key] = _Session(worker, now)
        self._counts[worker.order] = self._counts.get(worker.order, 0) + 1

    def on_done(self, worker: Worker, now: float) -> None:
        """Nothing to learn from the end of a request: a session outlives it."""

    def finish_session(self, session: str) -> bool:
        """Forget *session*; tell whether it was known."""
        return self._end(_key(session))

    def _end(self, key: str) -> bool:
        ended = self._sessions.pop(key, None)
        if ended is None:
            return False
        order = ended.worker.order
        self._counts[order] -= 1
        if self._counts[order] == 0:
            del self._counts[order]
        return True

    def _live_counts(self, now: float) -> dict[int, int]:
        """Return the counts without the sessions that are over but not yet forgotten."""
        counts = self._counts
        for session in self._sessions.values():
            if now - session.last_used < self.ttl_s:
                break
            if counts is self._counts:
                counts = counts.copy()
            counts[session.worker.order] -= 1
        return counts

    def _expire(self, now: float) -> None:
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if now - session.last_used < self.ttl_s:
                return
            self._end(key)


def _key(session: str) -> str:
    """Return what stands for *session* in memory: a client may send megabytes."""
    return session if len(session) <= MAX_KEY_CHARS else f"{hash64(session):016x}"
