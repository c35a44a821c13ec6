"""Which session a request belongs to.

First non-empty of: the headers (the operator's own, then the usual six, in this order); the session
fields of the body (top-level JSON values only: a prompt that contains ``"user": "x"`` names nobody);
the opening of the prompt, so that a conversation without any id still stays together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from policies.base import Request

SESSION_HEADERS = (
    "x-session-id",
    "x-user-id",
    "x-tenant-id",
    "x-request-id",
    "x-correlation-id",
    "x-trace-id",
)

HashFallback = Literal["prompt_prefix", "body"]


def lower_case(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return header *names* as requests have them."""
    return tuple(name.lower() for name in names)


def header_session(headers: Mapping[str, str], extra: tuple[str, ...] = ()) -> str:
    """Return the session that the headers name; empty when none does. *extra* names come first."""
    for name in (*extra, *SESSION_HEADERS):
        value = headers.get(name)
        if value:
            return value
    return ""


def named_session(request: Request, extra: tuple[str, ...] = ()) -> str:
    """Return the session named by header or body; empty when none is."""
    named = header_session(request.headers, extra)
    if named or request.content is None:
        return named
    return request.content.session


def session_key(
    request: Request, extra: tuple[str, ...] = (), fallback: HashFallback = "prompt_prefix"
) -> str:
    """Return the key of the request's session; empty when there is nothing to tell it by."""
    named = named_session(request, extra)
    if named:
        return named
    if fallback == "prompt_prefix" and request.content is not None and request.content.opening:
        return request.content.opening
    return request.body.decode("latin-1") if request.body else ""
