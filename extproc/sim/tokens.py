"""Tokens without a vocabulary: one token is up to four bytes of UTF-8 text.

The id of a token is its bytes read as a little-endian 32-bit number, so tokenising is one C call,
every process agrees, and ``detokenize`` gives the text back (a trailing NUL excepted). Two texts with
a common prefix have a common token prefix, which is what a prefix cache needs.

Each part of a chat (role marks, message texts) starts on a token of its own. The tokens of an answer
are therefore the same when they are generated and when the next turn sends the answer back.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

TOKEN_BYTES = 4
"""UTF-8 bytes in one token; English text in a real vocabulary has about four characters a token."""

END_OF_MESSAGE = b"<|/|"
IMAGE_TOKENS = 64
"""Tokens that stand for one image, audio clip or other part that is not text."""

MAX_TOKENS = 1 << 21
"""Longest text that is tokenised, in tokens; beyond any context length, and it bounds memory."""


class TooManyTokensError(ValueError):
    """A text is longer than any context."""


def tokenize(text: str) -> tuple[int, ...]:
    """Return the token ids of *text*."""
    return _unpack(_pad(text.encode("utf-8", "surrogatepass")))


def detokenize(token_ids: Sequence[int]) -> str:
    """Return the text of *token_ids*; ``struct.error`` for an id that is not unsigned 32-bit."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    if b"\0" in packed:
        width = TOKEN_BYTES
        packed = b"".join(
            packed[start : start + width].rstrip(b"\0") for start in range(0, len(packed), width)
        )
    return packed.decode("utf-8", "replace")


def tokenize_chat(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
) -> tuple[int, ...]:
    """Return the token ids of a conversation, up to and including the mark that starts the answer.

    Args:
        messages: in the form of the chat completions API; a content may be text or a list of parts.
        tools: function descriptions; as in usual chat templates they come before the messages.

    """
    parts = [_pad(b"<|tools|>" + msgspec.json.encode(tools))] if tools else []
    for message in messages:
        parts.append(_role_mark(message.get("role")))
        parts.extend(_content_parts(message.get("content")))
        if message.get("tool_calls"):
            parts.append(_pad(msgspec.json.encode(message["tool_calls"])))
        parts.append(END_OF_MESSAGE)
    parts.append(_role_mark("assistant"))
    return _unpack(b"".join(parts))


def _content_parts(content: object) -> list[bytes]:
    if isinstance(content, str):
        return [_pad(content.encode("utf-8", "surrogatepass"))]
    if not isinstance(content, list):
        return []
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            parts.append(_pad(text.encode("utf-8", "surrogatepass")))
        else:
            parts.append(_media(msgspec.json.encode(part)))
    return parts


def _media(part: bytes) -> bytes:
    """Return a fixed number of tokens that depend on all of *part*."""
    seed = zlib.crc32(part)
    return struct.pack(
        f"<{IMAGE_TOKENS}I", *((seed + index) & 0xFFFFFFFF for index in range(IMAGE_TOKENS))
    )


def _role_mark(role: object) -> bytes:
    return _pad(f"<|{role}|>".encode("utf-8", "surrogatepass"))


def _pad(text: bytes) -> bytes:
    return text + b"\0" * (-len(text) % TOKEN_BYTES)


def _unpack(padded: bytes) -> tuple[int, ...]:
    tokens = len(padded) // TOKEN_BYTES
    if tokens > MAX_TOKENS:
        raise TooManyTokensError(f"the prompt has {tokens} tokens, more than any context length")
    return struct.unpack(f"<{tokens}I", padded)
