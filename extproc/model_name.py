"""Which model a request asks for, wherever its endpoint has that: JSON, a form, or the query string.

Forms are those of uploads, ``multipart/form-data`` (RFC 7578): audio to transcribe, pictures to edit.
The body is searched in place; an upload is neither copied nor decoded. What looks like a field inside an
upload is none: only lines with the boundary, which the client chose so that it occurs nowhere else,
begin and end a field.

Whatever is malformed counts as absent: the worker judges requests, not the router. Of several names the
last one counts, as it does for the web framework of the workers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote_plus

MAX_FORM_MODEL_BYTES = 256
"""Length of a model's name in a form. A longer one counts as absent."""

MAX_BOUNDARIES = 1_000
"""Boundaries of a form that are looked at: as many fields as the web framework of the workers accepts."""

MAX_PART_HEADERS_BYTES = 4_096
"""Length of the headers of one part. A part with longer ones counts as absent."""

_FORM = b"multipart/form-data"

_BOUNDARY_END = re.compile(rb"--|[ \t]*+\r\n")
"""What follows a boundary: the end of the form, or of the line (RFC 2046, section 5.1.1)."""

_DISPOSITION = re.compile(
    rb"\r\ncontent-disposition[ \t]*+:[ \t]*+form-data([^\r\n]*+)(?:\r\n|\Z)", re.IGNORECASE
)

_PARAMETER = re.compile(
    rb'[ \t]*+;[ \t]*+([^\s=;"]++)[ \t]*+=[ \t]*+(?:"([^"\\]*+(?:\\.[^"\\]*+)*+)"|([^\s;"]++))'
)
_ESCAPE = re.compile(rb"\\(.)")

_QUERY_FIELD = "model="


def model_name(
    headers: Mapping[str, str], path: str, body: bytes | None, content_model: str
) -> str:
    """Return the model that a request asks for, empty when it does not tell.

    *content_model* is what the body says if it is JSON; names of *headers* are in lower case; *path*
    includes the query string.
    """
    if content_model:
        return content_model
    found = _in_form(headers.get("content-type", ""), body or b"") or _in_query(path)
    # Bytes that are not UTF-8 became surrogates, which nothing prints.
    return found if found.isprintable() else ""


def _in_query(path: str) -> str:
    query = path.partition("#")[0].partition("?")[2]
    fields = [field for field in query.split("&") if field.startswith(_QUERY_FIELD)]
    if not fields:
        return ""
    return unquote_plus(fields[-1][len(_QUERY_FIELD) :], errors="surrogateescape")


def _in_form(content_type: str, body: bytes) -> str:
    boundary = _boundary(content_type)
    if not boundary:
        return ""
    found = b""
    for begin, end in _parts(body, b"\r\n--" + boundary):
        # Two line breaks end the headers. The one before the headers is the first of them when there are
        # none, the one after them is the last when the value is missing.
        limit = min(end + 2, begin + MAX_PART_HEADERS_BYTES)
        headers_end = body.find(b"\r\n\r\n", begin - 2, limit)
        if headers_end >= 0 and _is_model(body[begin - 2 : headers_end]):
            value = headers_end + 4
            found = body[value:end] if end - value <= MAX_FORM_MODEL_BYTES else b""
    return found.decode("utf-8", "surrogateescape")


def _boundary(content_type: str) -> bytes:
    value = content_type.encode("latin-1", "replace")
    if value[: len(_FORM)].lower() != _FORM:
        return b""
    return _parameters(value[len(_FORM) :]).get(b"boundary", b"")


def _parts(body: bytes, delimiter: bytes) -> Iterator[tuple[int, int]]:
    """Yield where in *body* the parts between two delimiters begin and end."""
    # At the very beginning of a body the delimiter has no line break before it.
    at = -2 if body.startswith(delimiter[2:]) else body.find(delimiter)
    begin = 0
    for _ in range(MAX_BOUNDARIES):
        if at == -1:
            return
        rest = _BOUNDARY_END.match(body, at + len(delimiter))
        if rest is None:  # only begins like the boundary
            at = body.find(delimiter, at + len(delimiter))
            continue
        if begin:
            yield begin, at
        if rest[0] == b"--":
            return
        begin = rest.end()
        # The line break after one boundary may be the one before the next.
        at = body.find(delimiter, begin - 2)


def _is_model(part_headers: bytes) -> bool:
    """Tell whether a part is the field ``model``, and no file."""
    disposition = _DISPOSITION.search(part_headers)
    if disposition is None:
        return False
    parameters = _parameters(disposition[1])
    is_file = b"filename" in parameters or b"filename*" in parameters
    return parameters.get(b"name") == b"model" and not is_file


def _parameters(text: bytes) -> dict[bytes, bytes]:
    """Return the parameters of a header, names in lower case; none if anything is malformed."""
    found: dict[bytes, bytes] = {}
    at = 0
    while match := _PARAMETER.match(text, at):
        name, quoted, token = match.groups()
        found[name.lower()] = token if quoted is None else _ESCAPE.sub(rb"\1", quoted)
        at = match.end()
    return {} if text[at:].strip(b" \t;") else found
