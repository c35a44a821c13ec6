"""Log probabilities of the prompt: only the prefill worker has computed them.

A client gets them with ``prompt_logprobs``, or with ``echo`` and ``logprobs`` of plain completions, where
those of prompt and answer stand in one list. The prompt's part is taken from the prefill answer, the
rest from the decode answer. Streams have none. Numbers and texts are copied as they are written.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from extproc.json_edit import Edit, Set, edit_members, element_spans, splice, top_level_value
from extproc.pd.paths import Endpoint

MAX_ANSWER_BYTES = 64 * 2**20
"""Larger answers stay as they are; vllm-router buffers no more."""

_LISTS = ("token_logprobs", "tokens", "top_logprobs")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What a client wants to know of the prompt."""

    echo: bool = False
    """Whether the lists of log probabilities begin with the prompt."""


class _Body(msgspec.Struct):
    stream: Any = None
    echo: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    sampling_params: Any = None


def wanted(body: bytes, endpoint: Endpoint) -> Wanted | None:
    """Return what the client's *body* wants of the prompt; None when there is nothing to merge."""
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if fields.stream or endpoint is Endpoint.RESPONSES:
        return None
    asked = fields.prompt_logprobs
    if endpoint is Endpoint.GENERATE:
        params = fields.sampling_params
        asked = params.get("prompt_logprobs") if isinstance(params, dict) else None
    echo = endpoint is Endpoint.COMPLETIONS and fields.echo is True and fields.logprobs is not None
    return Wanted(echo) if echo or asked is not None else None


def merge(prefill: bytes, decode: bytes, wanted: Wanted) -> bytes:
    """Return the *decode* answer with the prompt's part of the *prefill* answer.

    *decode* itself when either tells nothing of the kind, cannot be read, or is too large.
    """
    if max(len(prefill), len(decode)) > MAX_ANSWER_BYTES:
        return decode
    edits: list[Edit] = []
    prompt = top_level_value(prefill, "prompt_logprobs")
    if prompt is not None and prompt != b"null":
        edits.append(Set(("prompt_logprobs",), prompt))
    choices = _choices(
        top_level_value(prefill, "choices"), top_level_value(decode, "choices"), wanted
    )
    if choices is not None:
        edits.append(Set(("choices",), choices))
    return (edit_members(decode, edits) or decode) if edits else decode


def _choices(prefill: bytes | None, decode: bytes | None, wanted: Wanted) -> bytes | None:
    """Return the array of choices, each with its prompt's part; None when nothing changes.

    The prefill leg had one choice per prompt, the decode leg ``n`` in a row.
    """
    if prefill is None or decode is None:
        return None
    sources, targets = element_spans(prefill), element_spans(decode)
    if not sources or not targets or len(targets) % len(sources):
        return None
    per_prompt = len(targets) // len(sources)
    pieces: list[tuple[int, int, bytes]] = []
    for position, (begin, end) in enumerate(targets):
        source = prefill[slice(*sources[position // per_prompt])]
        choice = decode[begin:end]
        merged = _choice(source, choice, wanted)
        if merged != choice:
            pieces.append((begin, end, merged))
    return splice(decode, pieces) if pieces else None


def _choice(prefill: bytes, decode: bytes, wanted: Wanted) -> bytes:
    edits: list[Edit] = []
    prompt = top_level_value(prefill, "prompt_logprobs")
    if prompt is not None and prompt != b"null":
        edits.append(Set(("prompt_logprobs",), prompt))
    if wanted.echo:
        head = top_level_value(prefill, "logprobs")
        tail = top_level_value(decode, "logprobs")
        if head is not None and tail is not None and head != b"null" and tail != b"null":
            edits += _lists(head, tail, prompt)
    return (edit_members(decode, edits) or decode) if edits else decode


def _lists(prefill: bytes, decode: bytes, prompt_logprobs: bytes | None) -> list[Edit]:
    """Return what makes the lists of *decode* begin with the prompt's part of those of *prefill*."""
    tokens, answer_tokens = _elements(prefill, "tokens"), _elements(decode, "tokens")
    if not tokens or answer_tokens is None:
        return []
    # The prefill leg generated one token, the last of its lists.
    counted = element_spans(prompt_logprobs) if prompt_logprobs else None
    count = min(len(counted) if counted else len(tokens) - 1, len(tokens))
    # A decode worker may repeat the prompt: then its own part begins after it.
    skip = count if answer_tokens[:count] == tokens[:count] else 0
    edits: list[Edit] = []
    for name in _LISTS:
        head, tail = _elements(prefill, name), _elements(decode, name)
        if head is not None and tail is not None:
            edits.append(_joined(name, head[:count] + _own(tail, skip, len(answer_tokens))))
    offsets, answer_offsets = _elements(prefill, "text_offset"), _elements(decode, "text_offset")
    if offsets is not None and answer_offsets is not None:
        own = _own(answer_offsets, skip, len(answer_tokens))
        base = 0 if skip else _end(tokens[:count], offsets[:count])
        edits.append(_joined("text_offset", offsets[:count] + [_shifted(at, base) for at in own]))
    return edits


def _own(values: list[bytes], skip: int, count: int) -> list[bytes]:
    """Return what *values* has for the answer: the last ones, as many as tokens after the prompt."""
    return values[max(len(values) - (count - skip), 0) :] if count > skip else []


def _joined(name: str, values: list[bytes]) -> Edit:
    return Set(("logprobs", name), b"[%b]" % b",".join(values))


def _elements(lists: bytes, name: str) -> list[bytes] | None:
    array = top_level_value(lists, name)
    spans = None if array is None else element_spans(array)
    return None if array is None or spans is None else [array[slice(*span)] for span in spans]


def _end(tokens: list[bytes], offsets: list[bytes]) -> int:
    """Return where in the text the last of *tokens* ends, in characters as vLLM counts."""
    try:
        return int(offsets[-1]) + len(msgspec.json.decode(tokens[-1], type=str))
    except (IndexError, ValueError):
        return 0


def _shifted(offset: bytes, base: int) -> bytes:
    try:
        return b"%d" % (int(offset) + base)
    except ValueError:
        return offset
