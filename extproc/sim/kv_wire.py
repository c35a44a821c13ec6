"""The side channel's wire: frames of a length (4 bytes, big-endian) and that much JSON.

The decode side asks with ``Pull``. The prefill side answers ``Answer``: with no error the blocks are
reserved for this connection. After the time of the transfer the decode side sends ``Done``, the
prefill side frees the blocks and answers again. A connection that ends before that gives the
reservation back. With ``wait`` the first answer comes when there is something to pull.
"""

import asyncio
from typing import TypeVar

import msgspec

FRAME_LIMIT_BYTES = 4 << 20
"""Longest frame; the block ids of two million tokens take about one megabyte."""

LENGTH_BYTES = 4


class WireError(Exception):
    """The other side does not speak this protocol."""


class Pull(msgspec.Struct, frozen=True, kw_only=True, tag="pull", tag_field="op"):
    """Ask for the blocks of one request."""

    engine_id: str | None
    """Engine that must have them; None for any (P2P-NCCL knows addresses only)."""
    address: str | None = None
    """Address that must be the prefill worker's own; None for any."""
    request_id: str
    """The transfer: remote_request_id, Mooncake's transfer_id, or the request id of P2P-NCCL."""
    block_ids: list[list[int]] | None
    """Must be those of the transfer; None when the asking side was not told."""
    prompt_tokens: int
    prompt_key: int
    """Hash of the full blocks of the prompt."""
    wait: bool = False
    """Whether a transfer that does not exist yet is waited for."""


class Done(msgspec.Struct, frozen=True, tag="done", tag_field="op"):
    """The blocks are read and may be freed."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of the last frame."""

    mismatch: str | None = None
    """What does not match, None when everything does."""


Frame = Pull | Done
T = TypeVar("T")
_FRAME: msgspec.json.Decoder[Frame] = msgspec.json.Decoder(Frame)
_ANSWER = msgspec.json.Decoder(Answer)


def encode(frame: Frame | Answer) -> bytes:
    """Return *frame* as bytes."""
    body = msgspec.json.encode(frame)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode(body: bytes) -> Frame:
    """Return the frame in *body*; WireError when it is none."""
    return _decode(body, _FRAME)


class FrameBuffer:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that are complete with *data*; WireError when one would be too long."""
        self._buffer += data
        bodies: list[bytes] = []
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + checked_length(bytes(self._buffer[:LENGTH_BYTES]))
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[LENGTH_BYTES:end]))
            del self._buffer[:end]
        return bodies


def checked_length(prefix: bytes) -> int:
    """Return the length that *prefix* says; WireError beyond the limit."""
    length = int.from_bytes(prefix, "big")
    if length > FRAME_LIMIT_BYTES:
        raise WireError(f"a frame of {length} bytes is longer than {FRAME_LIMIT_BYTES}")
    return length


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Read one answer; WireError or IncompleteReadError when there is none."""
    length = checked_length(await reader.readexactly(LENGTH_BYTES))
    return _decode(await reader.readexactly(length), _ANSWER)


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame is not understood: {error}") from error
