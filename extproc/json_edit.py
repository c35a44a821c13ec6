"""Change members of a JSON object and leave every other byte as the client wrote it.

A body is edited, not written again: number formats, order, duplicates, white space and escapes are the
client's, and some of them would not survive a decoder.

msgspec reads the body at the speed of C, proves that it is JSON, and tells of each member the key and
the bytes of the value. What is left to do is to step over the keys: a value begins after the colon and
is as long as its bytes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

MAX_MEMBERS = 10_000
"""Members that an object may have at its top level. No endpoint knows a hundred; the bound is on the
time and memory that a body of nothing but members costs."""

_KEY = re.compile(rb'[\s,]*+("[^"\\]*+(?:\\.[^"\\]*+)*+"\s*+:\s*+)')
"""All that is between a value, or the opening brace, and the next value; the group begins at the key."""

_BETWEEN = re.compile(rb"[\s,]*+")
"""All that is between two elements of an array."""


@dataclasses.dataclass(frozen=True, slots=True)
class Set:
    """Give a member a value, every time it occurs; add it when it is missing."""

    path: tuple[str, ...]
    """Its key; before that the keys of the objects that it is in, from the outside in."""

    value: bytes
    """JSON, without white space around it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """Give a member a value, every time it occurs; a missing one stays missing."""

    path: tuple[str, ...]
    value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Remove:
    """Take a member out, every time it occurs, with the comma that it no longer needs."""

    path: tuple[str, ...]


Edit = Set | Replace | Remove


class _Member(NamedTuple):
    """Where in a body a member is."""

    key: str
    key_at: int
    begin: int
    """Where its value begins."""

    end: int


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
    return splice(body, [(*span, value) for span in spans]) if spans else None


def set_top_level(body: bytes, key: str, value: bytes) -> bytes | None:
    """Do as `replace_top_level`, but add a missing member, before all others.

    None when *body* is no JSON object.
    """
    return edit_members(body, (Set((key,), value),))


def edit_members(body: bytes, edits: Sequence[Edit]) -> bytes | None:
    """Return *body* with all *edits* made, in one pass over the members of every object involved.

    Added members come first, in the order of *edits*. What lies in a member that is missing, or null,
    is added together with it; a member that should hold others and is no object stays as it is. Of
    several edits of one path the last counts, and none of what lies within it does.

    *body* itself when there is nothing to change; None when it is no JSON object, as `top_level_span`.
    """
    members = _walk(body)
    if members is None:
        return None
    wanted: dict[str, list[Edit]] = {}
    for edit in edits:
        wanted.setdefault(edit.path[0], []).append(edit)
    values: list[bytes | None] = []
    for member in members:
        new: bytes | None = None
        if member.key in wanted:
            old = body[member.begin : member.end]
            new = _edited(old, wanted[member.key])
            if new is None:
                return None
            new = None if new == old else new
        values.append(new)
    present = {member.key for member in members}
    added = b",".join(
        b"%b:%b" % (msgspec.json.encode(key), value)
        for key, todo in wanted.items()
        if key not in present and (value := _added(todo))
    )
    pieces = _changes(members, values)
    if added:
        inside = body.index(b"{") + 1
        comma = b"," if any(value != b"" for value in values) else b""
        pieces.insert(0, (inside, inside, added + comma))
    return splice(body, pieces)


def _changes(
    members: Sequence[_Member], values: Sequence[bytes | None]
) -> list[tuple[int, int, bytes]]:
    """Return the pieces that give *members* their *values*, parallel: None stays, an empty one goes."""
    first = next((at for at, value in enumerate(values) if value != b""), len(values))
    pieces: list[tuple[int, int, bytes]] = []
    # A run of removed members at the beginning goes with the comma after it, others with that before.
    if 0 < first < len(members):
        pieces.append((members[0].key_at, members[first].key_at, b""))
    elif first and members:
        pieces.append((members[0].key_at, members[-1].end, b""))
    for at in range(first, len(members)):
        value = values[at]
        if value is not None:
            begin = members[at].begin if value else members[at - 1].end
            pieces.append((begin, members[at].end, value))
    return pieces


def _edited(value: bytes, edits: Sequence[Edit]) -> bytes | None:
    """Return what a member that has *value* gets: nothing when it goes, None when it is unreadable."""
    whole = [edit for edit in edits if len(edit.path) == 1]
    if whole:
        return b"" if isinstance(whole[-1], Remove) else whole[-1].value
    if value == b"null":
        return _added(edits) or value
    return edit_members(value, _within(edits)) if value.startswith(b"{") else value


def _added(edits: Sequence[Edit]) -> bytes:
    """Return the value that a missing member gets; nothing when it stays missing."""
    whole = [edit for edit in edits if len(edit.path) == 1]
    if whole:
        return whole[-1].value if isinstance(whole[-1], Set) else b""
    sets = [edit for edit in edits if isinstance(edit, Set)]
    return (edit_members(b"{}", _within(sets)) or b"") if sets else b""


def _within(edits: Sequence[Edit]) -> list[Edit]:
    """Return *edits* as those of the object that their paths begin with."""
    return [dataclasses.replace(edit, path=edit.path[1:]) for edit in edits]


def top_level_value(body: bytes, key: str) -> bytes | None:
    """Return the value of *key*, the last one if it occurs several times; None when there is none."""
    spans = top_level_span(body, key)
    return body[slice(*spans[-1])] if spans else None


def top_level_span(body: bytes, key: str) -> list[tuple[int, int]] | None:
    """Return where in *body* the values of *key* begin and end, in their order.

    None when *body* is no JSON object, has more than `MAX_MEMBERS`, or is nested deeper than msgspec
    reads (about a thousand levels).
    """
    members = _walk(body)
    if members is None:
        return None
    return [(member.begin, member.end) for member in members if member.key == key]


def element_spans(array: bytes) -> list[tuple[int, int]] | None:
    """Return where in *array* its elements begin and end; None when it is no JSON array."""
    try:
        elements = msgspec.json.decode(array, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    spans: list[tuple[int, int]] = []
    end = array.index(b"[") + 1
    for element in elements:
        between = _BETWEEN.match(array, end)
        begin = between.end() if between else end
        end = begin + len(element)
        spans.append((begin, end))
    return spans


def splice(text: bytes, pieces: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Return *text* with ``new`` for each span of *pieces*, ``(begin, end, new)`` in ascending order."""
    if not pieces:
        return text
    whole = memoryview(text)
    parts: list[bytes | memoryview] = []
    at = 0
    for begin, end, new in pieces:
        parts += (whole[at:begin], new)
        at = end
    parts.append(whole[at:])
    return b"".join(parts)


def _walk(body: bytes) -> list[_Member] | None:
    """Return every member in its order, duplicates among them; None when *body* is unreadable."""
    members = _members(body)
    if members is None:
        return None
    found: list[_Member] = []
    following = iter(members.items())
    at = body.index(b"{") + 1
    while match := _KEY.match(body, at):
        name, value = next(following)
        begin, at = match.end(), match.end() + len(value)
        found.append(_Member(name.text, match.start(1), begin, at))
    return found


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
