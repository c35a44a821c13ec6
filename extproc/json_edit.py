"""Change one member of a JSON object and leave every other byte as the client wrote it.

A body is edited, not written again: number formats, order, duplicates, white space and escapes are the
client's, and some of them would not survive a decoder.

msgspec reads the body at the speed of C, proves that it is JSON, and tells of each member the key and
the bytes of the value. What is left to do is to step over the keys: a value begins after the colon and
is as long as its bytes.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

MAX_MEMBERS = 10_000
"""Members that an object may have at its top level. No endpoint knows a hundred; the bound is on the
time and memory that a body of nothing but members costs."""

_KEY = re.compile(rb'[\s,]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*+:\s*+')
"""All that is between a value, or the opening brace, and the next value."""


class _Key:
    """One occurrence of a key, equal to no other: a dict with such keys keeps duplicates."""

    # No dataclass: msgspec would look for an object with the field ``text``.
    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def replace_top_level(body: bytes, key: str, value: bytes) -> bytes | None:
    """Return *body* with *value*, which is JSON, for what *key* has at the top level.

    A key that occurs several times gets it every time, since parsers differ in which one they take.
    None when there is no such member, or when *body* is no JSON object.
    """
    spans = top_level_span(body, key)
    return _replace(body, spans, value) if spans else None


def set_top_level(body: bytes, key: str, value: bytes) -> bytes | None:
    """Do as `replace_top_level`, but add a missing member, before all others.

    None when *body* is no JSON object.
    """
    spans = top_level_span(body, key)
    if spans is None:
        return None
    if spans:
        return _replace(body, spans, value)
    inside = body.index(b"{") + 1
    comma = b"," if _KEY.match(body, inside) else b""
    member = b"%b:%b%b" % (msgspec.json.encode(key), value, comma)
    return _replace(body, [(inside, inside)], member)


def top_level_span(body: bytes, key: str) -> list[tuple[int, int]] | None:
    """Return where in *body* the values of *key* begin and end, in their order.

    None when *body* is no JSON object, has more than `MAX_MEMBERS`, or is nested deeper than msgspec
    reads (about a thousand levels).
    """
    members = _members(body)
    if members is None:
        return None
    spans: list[tuple[int, int]] = []
    following = iter(members.items())
    at = body.index(b"{") + 1
    while match := _KEY.match(body, at):
        name, value = next(following)
        begin, at = match.end(), match.end() + len(value)
        if name.text == key:
            spans.append((begin, at))
    return spans


def _members(body: bytes) -> dict[_Key, msgspec.Raw] | None:
    """Return the members in their order, every duplicate among them."""
    count = 0

    def occurrence(_: type, text: Any) -> _Key:
        nonlocal count
        count += 1
        if count > MAX_MEMBERS:
            raise ValueError(f"more than {MAX_MEMBERS} members")
        return _Key(text)

    try:
        return msgspec.json.decode(body, type=dict[_Key, msgspec.Raw], dec_hook=occurrence)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _replace(body: bytes, spans: list[tuple[int, int]], value: bytes) -> bytes:
    whole = memoryview(body)
    pieces: list[bytes | memoryview] = []
    at = 0
    for begin, end in spans:
        pieces += (whole[at:begin], value)
        at = end
    pieces.append(whole[at:])
    return b"".join(pieces)
