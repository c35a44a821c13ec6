"""The client's answer to a split request: what only the prefill worker knows of the prompt is put in."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.pd import logprobs
from extproc.pd.logprobs import Wanted
from extproc.pd.paths import Endpoint
from extproc.pd.usage import (
    MAX_ANSWER_BYTES,
    PrefillUsage,
    StreamRewriter,
    needs_rewrite,
    parse_usage,
    rewrite_answer,
)

OK = 200


class AnswerMerge:
    """Changes one answer, chunk by chunk."""

    __slots__ = ("_events", "_held", "_prefill", "_size", "_usage", "_wanted")

    def __init__(self, usage: PrefillUsage | None, wanted: Wanted | None, prefill: bytes) -> None:
        """*prefill*: the answer of the prefill worker. See ``plan_merge``."""
        self._usage = usage
        self._wanted = wanted
        self._prefill = prefill
        self._events: StreamRewriter | None = None
        self._held: list[bytes] | None = []
        """The chunks so far of an answer that is one object; None: it is too large to be changed."""
        self._size = 0

    def begin(self, headers: Mapping[str, str]) -> bool:
        """Tell whether an answer with these *headers* is to be changed."""
        if (
            headers.get(":status") != str(OK)
            or headers.get("content-encoding", "identity") != "identity"
        ):
            return False
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/event-stream":
            if self._usage is not None:
                self._events = StreamRewriter(self._usage)
            return self._events is not None
        length = headers.get("content-length", "")
        small = not length.isdecimal() or int(length) <= MAX_ANSWER_BYTES
        return kind == "application/json" and small

    def feed(self, chunk: bytes, *, last: bool) -> bytes:
        """Return what goes out for *chunk*; *last*: none follows."""
        if self._events is not None:
            out = self._events.feed(chunk)
            return out + self._events.finish() if last else out
        if self._held is None:
            return chunk
        self._held.append(chunk)
        self._size += len(chunk)
        if not last and self._size <= MAX_ANSWER_BYTES:
            return b""
        whole, self._held = b"".join(self._held), None
        if not last or len(whole) > MAX_ANSWER_BYTES:
            return whole
        if self._usage is not None:
            whole = rewrite_answer(whole, self._usage)
        if self._wanted is not None:
            whole = logprobs.merge(self._prefill, whole, self._wanted)
        return whole


def plan_merge(body: bytes, endpoint: Endpoint, prefill: bytes) -> AnswerMerge | None:
    """Return what is to be done with the answer to a client's *body*; None: nothing.

    *prefill*: the answer of the prefill worker.
    """
    usage = parse_usage(prefill)
    told = usage if needs_rewrite(usage) else None
    wanted = logprobs.wanted(body, endpoint)
    return AnswerMerge(told, wanted, prefill) if told is not None or wanted is not None else None
