"""A bounded record of the requests that arrived, byte for byte."""

import base64
import dataclasses
import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

BODY_LIMIT_BYTES = 64 * 1024
"""Bodies up to this size are kept; of longer ones only length and digest."""


class Outcome(StrEnum):
    """How a request ended."""

    OPEN = "open"
    """It has not ended."""
    ENDED = "ended"
    """The response was sent to its end."""
    CANCELLED = "cancelled"
    """The client went away first."""
    BROKEN = "broken"
    """The worker cut it: it was stopped, crashed or reset the connection."""


@dataclasses.dataclass(slots=True)
class Arrival:
    """One request as it came in; ``feed`` takes its body piece by piece."""

    sequence: int
    """Counts from 1 over the life of the worker."""
    method: str
    raw_path: str
    """Path and query string as sent, not decoded."""
    raw_headers: Sequence[tuple[bytes, bytes]]
    """In the order sent, names in the letter case sent."""
    http_version: str
    outcome: Outcome = Outcome.OPEN
    status: int | None = None
    """HTTP status of the response, None before there is one."""
    body_bytes: int = 0
    complete: bool = False
    """Whether the whole body arrived."""
    _digest: Any = dataclasses.field(default_factory=hashlib.sha256)
    _kept: list[bytes] = dataclasses.field(default_factory=list)

    def feed(self, chunk: bytes) -> None:
        """Account for the next piece of the body."""
        self.body_bytes += len(chunk)
        self._digest.update(chunk)
        if self.body_bytes <= BODY_LIMIT_BYTES:
            self._kept.append(chunk)
        else:
            self._kept.clear()

    @property
    def body_sha256(self) -> str:
        """Hexadecimal digest of the body so far."""
        return str(self._digest.hexdigest())

    @property
    def body(self) -> bytes | None:
        """The body, None when it was too long to keep."""
        return b"".join(self._kept) if self.body_bytes <= BODY_LIMIT_BYTES else None

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Names and values as text (latin-1, so that no byte is lost)."""
        return [(n.decode("latin-1"), v.decode("latin-1")) for n, v in self.raw_headers]

    def header(self, name: str) -> str | None:
        """Return the first value of header *name* in any letter case, None when it did not come."""
        wanted = name.lower()
        return next((value for key, value in self.headers if key.lower() == wanted), None)

    def as_json(self) -> dict[str, Any]:
        """Return the form that ``GET /_sim/requests`` shows."""
        body = self.body
        return {
            "sequence": self.sequence,
            "method": self.method,
            "path": self.raw_path,
            "http_version": self.http_version,
            "headers": self.headers,
            "body_bytes": self.body_bytes,
            "body_sha256": self.body_sha256,
            "body_base64": None if body is None else base64.b64encode(body).decode(),
            "body_complete": self.complete,
            "status": self.status,
            "outcome": self.outcome,
        }


class Recorder:
    """The last *limit* arrivals, oldest first."""

    def __init__(self, limit: int) -> None:
        self._arrivals: deque[Arrival] = deque(maxlen=limit)
        self._serial = itertools.count(1)

    @property
    def enabled(self) -> bool:
        """Whether arrivals are kept at all."""
        return self._arrivals.maxlen != 0

    def open(
        self,
        *,
        method: str,
        raw_path: str,
        raw_headers: Sequence[tuple[bytes, bytes]],
        http_version: str,
    ) -> Arrival:
        """Start the record of one request."""
        arrival = Arrival(next(self._serial), method, raw_path, raw_headers, http_version)
        self._arrivals.append(arrival)
        return arrival

    def clear(self) -> None:
        """Forget all arrivals; those still open go on unseen."""
        self._arrivals.clear()

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Arrival]:
        return iter(list(self._arrivals))

    def __getitem__(self, index: int) -> Arrival:
        return self._arrivals[index]
