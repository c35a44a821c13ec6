"""Workers that say themselves that they are there, again and again: what follows from their messages.

One message is a msgpack map, ``{"type": "P" or "D", "http_address": "host:port", "zmq_address":
"host:port"}``, and may say more, which is ignored. Who has said nothing for ``EXPIRY_S`` is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from extproc.address import WorkerUrl
from extproc.discovery.updates import WorkerSpec, WorkerType

EXPIRY_S = 5.0
"""As long as vLLM Router waits; vLLM sends a message every three seconds."""

MAX_WORKERS = 10_000
MAX_FRAME_BYTES = 4096
FRAMES = 2
"""Who sent it, as ZMQ tells, and the map."""

COMPLAINT_S = 10.0
"""Between two complaints about messages that are refused, at least."""

_ROLES = {"P": WorkerType.PREFILL, "D": WorkerType.DECODE}
_PORT = re.compile(r".*:[0-9]{1,5}")


class _Message(msgspec.Struct):
    type: Literal["P", "D"]
    http_address: str
    zmq_address: str


class Announcements:
    """The workers that announce themselves. Times are of any one clock, in seconds."""

    def __init__(self, known: Iterable[WorkerSpec] = (), now: float = 0.0) -> None:
        """Begin with *known*, as if they had spoken *now*."""
        self._heard = {spec.key: (now, spec) for spec in known}
        """By key, who spoke longest ago first."""

        self.refused = 0
        """Messages refused so far."""

        self._complained = (float("-inf"), 0)
        self._reason = ""

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        """Return who is there."""
        return tuple(spec for _, spec in self._heard.values())

    @property
    def next_expiry(self) -> float | None:
        """When the next worker will be gone if it does not speak; None: there is none."""
        first = next(iter(self._heard.values()), None)
        return None if first is None else first[0] + EXPIRY_S

    def take(self, frames: Sequence[bytes], now: float) -> WorkerSpec | None:
        """Take in a message; return the worker if it is new, or another than before."""
        try:
            spec = parse(frames)
        except ValueError as error:
            self._refuse(str(error))
            return None
        _, known = self._heard.pop(spec.key, (0.0, None))
        if known is None and len(self._heard) >= MAX_WORKERS:
            self._refuse(f"there are {MAX_WORKERS} workers already")
            return None
        self._heard[spec.key] = now, spec
        return None if spec == known else spec

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        self._reason = reason

    def expire(self, now: float) -> list[str]:
        """Forget who has not spoken for too long; return their keys."""
        gone: list[str] = []
        for key, (heard_at, _) in self._heard.items():
            if now - heard_at < EXPIRY_S:
                break
            gone.append(key)
        for key in gone:
            del self._heard[key]
        return gone

    def complaint(self, now: float) -> tuple[int, str] | None:
        """Return how many messages were refused since the last complaint, and why the last of them.

        None: none were, or it is too early to complain again.
        """
        at, count = self._complained
        if self.refused == count or now - at < COMPLAINT_S:
            return None
        self._complained = now, self.refused
        return self.refused - count, self._reason


def parse(frames: Sequence[bytes]) -> WorkerSpec:
    """Read one message. ``ValueError`` says what is wrong with it."""
    if len(frames) != FRAMES:
        raise ValueError(f"expected a message of one part, got {len(frames) - 1}")
    if any(len(frame) > MAX_FRAME_BYTES for frame in frames):
        raise ValueError(f"a part is larger than {MAX_FRAME_BYTES} bytes")
    try:
        message = msgspec.msgpack.decode(frames[1], type=_Message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected a map with type and addresses: {error}") from error
    address = message.http_address
    url = WorkerUrl.parse(address if "://" in address else f"http://{address}")
    if url.rank is not None:
        raise ValueError("http_address names a rank; expected host:port")
    _check_zmq_address(message.zmq_address)
    return WorkerSpec(url, worker_type=_ROLES[message.type], zmq_address=message.zmq_address)


def _check_zmq_address(text: str) -> None:
    """Refuse what is no ``host:port``: it becomes a part of request ids, for workers to connect to."""
    try:
        url = WorkerUrl.parse(f"http://{text}")
    except ValueError as error:
        raise ValueError(f"zmq_address: {str(error).replace('http://', '')}") from error
    if url.path or url.rank is not None or text.endswith("/") or not _PORT.fullmatch(text):
        raise ValueError(f"zmq_address: expected host:port, got {text!a}")
