"""Usage as the client should see it: the prompt as the prefill worker counted it.

The decode worker finds the whole prompt in its cache, fetched a moment before, and says so. What was
cached for the client is what the prefill worker had. Of an answer only these numbers change: tokens of
the prompt, cached tokens among them, and the total. Everything else stays, byte for byte.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import msgspec

from extproc.json_edit import Edit, Replace, Set, edit_members

MAX_ANSWER_BYTES = 8 * 2**20
"""Larger whole answers stay as they are; vllm-router's bound."""

MAX_LINE_BYTES = 2**20
"""Longer lines of a stream stay as they are, and are not held back; vllm-router's bound."""

_LINE_END = re.compile(rb"[\r\n]")


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillUsage:
    """What the prefill worker said of the prompt."""

    prompt_tokens: int
    cached_tokens: int | None = None
    """None when it does not tell (vLLM's ``--enable-prompt-tokens-details`` is off)."""


class _Usage(msgspec.Struct):
    """Fields of an unexpected shape count as absent."""

    prompt_tokens: Any = None
    input_tokens: Any = None
    completion_tokens: Any = None
    output_tokens: Any = None
    prompt_tokens_details: Any = None
    input_tokens_details: Any = None


class _Answer(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw()
    response: msgspec.Raw = msgspec.Raw()
    """In events of a response: the answer so far."""


def parse_usage(answer: bytes) -> PrefillUsage | None:
    """Return the usage in the *answer* of a prefill leg; None when there is none."""
    fields = _usage(_answer(answer))
    if fields is None:
        return None
    tokens = _count(fields.prompt_tokens, fields.input_tokens)
    if tokens is None:
        return None
    details = (fields.prompt_tokens_details, fields.input_tokens_details)
    cached = (part.get("cached_tokens") for part in details if isinstance(part, dict))
    return PrefillUsage(tokens, _count(*cached))


def needs_rewrite(usage: PrefillUsage | None) -> bool:
    """Tell whether the decode worker's usage would be wrong: only the cached tokens are."""
    return usage is not None and usage.cached_tokens is not None


def rewrite_answer(answer: bytes, usage: PrefillUsage) -> bytes:
    """Return *answer*, one JSON object, with *usage* for the prompt.

    *answer* itself when it tells no usage, is too large, or cannot be read.
    """
    # The name of a count occurs in whatever tells one; most events of a stream do not.
    if b'_tokens"' not in answer or len(answer) > MAX_ANSWER_BYTES:
        return answer
    parts = _answer(answer)
    if parts is None:
        return answer
    edits = _edits(_usage(parts), usage, ())
    if parts.response:
        edits += _edits(_usage(_answer(bytes(parts.response))), usage, ("response",))
    return (edit_members(answer, edits) or answer) if edits else answer


@dataclasses.dataclass(slots=True)
class StreamRewriter:
    """Rewrites the events of one stream, whose chunks may end anywhere.

    Every line goes out with the chunk that ends it. An event of vLLM has its JSON on one line.
    """

    usage: PrefillUsage
    _held: bytearray = dataclasses.field(default_factory=bytearray)
    _passing: bool = False
    """Whether the line under way is too long and its beginning is out."""

    def feed(self, chunk: bytes) -> bytes:
        """Return what can go out after *chunk* has come in."""
        out: list[bytes] = []
        at = 0
        for end in _LINE_END.finditer(chunk):
            out.append(self._line(chunk[at : end.end()]))
            at = end.end()
        self._held += chunk[at:]
        if self._passing or len(self._held) > MAX_LINE_BYTES:
            self._passing = True
            out.append(self.finish())
        return b"".join(out)

    def finish(self) -> bytes:
        """Return what is held back, at the end of the stream: an unfinished line stays as it is."""
        held = bytes(self._held)
        self._held.clear()
        return held

    def _line(self, rest: bytes) -> bytes:
        line = self.finish() + rest
        if self._passing:
            self._passing = False
            return line
        if len(line) > MAX_LINE_BYTES or not line.startswith(b"data:"):
            return line
        return b"data:" + rewrite_answer(line.removeprefix(b"data:"), self.usage)


def _answer(answer: bytes) -> _Answer | None:
    try:
        return msgspec.json.decode(answer, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _usage(answer: _Answer | None) -> _Usage | None:
    if answer is None or not answer.usage:
        return None
    try:
        return msgspec.json.decode(answer.usage, type=_Usage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _edits(told: _Usage | None, usage: PrefillUsage, outer: tuple[str, ...]) -> list[Edit]:
    """Return what has to change in the usage that the decode worker *told*, in the object *outer*."""
    if told is None or _count(told.prompt_tokens, told.input_tokens) is None:
        return []
    path = (*outer, "usage")
    prompt = b"%d" % usage.prompt_tokens
    kind = "prompt_tokens" if told.input_tokens is None else "input_tokens"
    edits: list[Edit] = [Replace((*path, kind), prompt)]
    generated = _count(told.completion_tokens, told.output_tokens)
    if generated is not None:
        edits.append(Replace((*path, "total_tokens"), b"%d" % (usage.prompt_tokens + generated)))
    if usage.cached_tokens is not None:
        cached = b"%d" % usage.cached_tokens
        edits.append(Set((*path, f"{kind}_details", "cached_tokens"), cached))
    return edits


def _count(*values: Any) -> int | None:
    """Return the first of *values* that is a count."""
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None
