"""What routing needs out of a request body, whichever OpenAI-like endpoint it is for.

Only the fields below are decoded; the body itself is never changed and never written again. A field of
an unexpected shape counts as absent: the worker judges requests, not the router.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from typing import Any

import msgspec

from policies.base import Content

MAX_PROMPTS = 16
"""Prompts of a batch that are looked at: every one costs a match per endpoint and an insert."""

MAX_PROMPT_CHARS = 2**20
"""How much of each prompt is looked at. Prompts that agree for that long count as the same: it bounds what one request
can cost the others."""

OPENING_CHARS = 256
"""How much of a plain prompt counts as its opening. Long enough to tell prompts apart, short enough to
lie within the first turn of a conversation that is sent as one text."""


class _Body(msgspec.Struct):
    """The fields that are looked at.

    Those of chat and plain completions, responses, messages, embeddings, rerank and generate.
    """

    model: Any = None
    messages: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    system: Any = None
    instructions: Any = None
    prompt: Any = None
    input: Any = None
    input_ids: Any = None
    token_ids: Any = None
    text: Any = None
    query: Any = None
    session_params: Any = None
    user: Any = None
    session_id: Any = None
    user_id: Any = None


_UTF_32 = f"utf-32-{sys.byteorder[0]}e"

_decoder = msgspec.json.Decoder(_Body)


def parse_content(body: bytes) -> Content | None:
    """Return what *body* tells, or None when it is no JSON object (or nested beyond reason)."""
    try:
        return _content(_decoder.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _content(fields: _Body) -> Content:
    model, session = _text(fields.model), _session(fields)
    chat = _chat(fields)
    if chat is not None:
        text, opening, replies = chat
        return Content(model, session, (text,), replies=replies, opening=opening)
    prompts, tokens = _prompts(fields)
    opening = prompts[0][:OPENING_CHARS] if prompts else ""
    return Content(model, session, prompts, tokens=tokens, opening=opening)


def _session(fields: _Body) -> str:
    params = fields.session_params
    nested = params.get("session_id") if isinstance(params, dict) else None
    for value in (nested, fields.user, fields.session_id, fields.user_id):
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
    return ""


def _prompts(fields: _Body) -> tuple[tuple[str, ...], bool]:
    """Return the prompts of a request that is no chat, and whether they are token ids."""
    instructions = _flatten(fields.instructions)
    for value in (
        fields.input,
        fields.prompt,
        fields.input_ids,
        fields.token_ids,
        fields.text,
        fields.query,
    ):
        prompts, tokens = _plain(value)
        if prompts:
            if instructions and not tokens:
                prompts = (f"{instructions}\x1f{prompts[0]}", *prompts[1:])
            return prompts, tokens
    return (), False


def _chat(fields: _Body) -> tuple[str, str, tuple[tuple[int, int], ...]] | None:
    """Return a chat as one text, its opening, and where the assistant's messages are.

    The opening ends with the first message of the user.
    """
    if _is_messages(fields.messages):
        messages, head = fields.messages, _flatten(fields.system)
    elif _is_messages(fields.input):
        messages, head = fields.input, _flatten(fields.instructions)
    elif isinstance(fields.input, str) and fields.input:
        # As the message that it becomes in the list of later turns.
        messages = [{"role": "user", "content": fields.input}]
        head = _flatten(fields.instructions)
    else:
        return None
    # Chat templates print the tools before everything else.
    text = bytes(fields.tools).decode("utf-8", "replace") + head
    parts = [text]
    length, opening_length = len(text), 0
    replies: list[tuple[int, int]] = []
    for message in messages:
        if length >= MAX_PROMPT_CHARS:
            break
        part = _message(message)
        parts.append(part)
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            replies.append((length, length + len(part)))
        length += len(part)
        if role == "user" and not opening_length:
            opening_length = length
    text = "".join(parts)[:MAX_PROMPT_CHARS]
    return text, text[: opening_length or OPENING_CHARS], tuple(replies)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _message(message: Any) -> str:
    """Return one message as ``RS role US content`` and whatever else a template prints of it."""
    if not isinstance(message, dict):
        return _flatten(message)
    text = f"\x1e{_text(message.get('role'))}\x1f{_flatten(message.get('content'))}"
    for key in ("reasoning_content", "tool_calls", "tool_call_id", "name", "arguments", "output"):
        value = message.get(key)
        if value:
            text += f"\x1f{_flatten(value)}"
    return text


def _flatten(value: Any) -> str:
    """Return the text of a message's content: text as it is, media by content hash."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list):
        text = ""
        for part in value:
            text += _part(part)
            if len(text) >= MAX_PROMPT_CHARS:
                break
        return text
    return msgspec.json.encode(value).decode()


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("text")
        if isinstance(text, str):
            return text
        return f"\x1c{part.get('type')}:{_fingerprint(part):x}\x1d"
    return _flatten(part)


def _fingerprint(value: Any) -> int:
    """Return a hash of media data: equal data, equal number."""
    return zlib.crc32(msgspec.json.encode(value))


def _plain(value: Any) -> tuple[tuple[str, ...], bool]:
    """Return the prompts of ``prompt`` or ``input``: text, token ids, or a list of either."""
    if isinstance(value, str):
        return ((value[:MAX_PROMPT_CHARS],), False) if value else ((), False)
    if not isinstance(value, list) or not value:
        return (), False
    if isinstance(value[0], int):
        text = _token_text(value)
        return ((text,), True) if text else ((), False)
    if isinstance(value[0], list):
        found = tuple(text for text in map(_token_text, value[:MAX_PROMPTS]) if text)
        return found, True
    texts = (item for item in value[:MAX_PROMPTS] if isinstance(item, str) and item)
    return tuple(text[:MAX_PROMPT_CHARS] for text in texts), False


def _token_text(ids: Any) -> str:
    """Return token ids as text, one character per id: the tree then works on tokens."""
    try:
        # Through UTF-32 without a byte order mark: several times faster than chr for each.
        return array("I", ids[:MAX_PROMPT_CHARS]).tobytes().decode(_UTF_32, "surrogatepass")
    except (TypeError, ValueError, OverflowError):
        return ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
