"""The client's side of a connection, made of bytes, and a reader of what the server says.

``hyperframe`` and ``hpack`` read the output: nothing of ours checks itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from extproc.h2 import frames as f
from extproc.h2.connection import HeaderList, ServerConnection

METHOD = "/test.Service/Method"
HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", METHOD),
    (":authority", "service"),
    ("te", "trailers"),  # codespell:ignore te
    ("content-type", "application/grpc"),
)
BLOCK = b"".join(
    b"\x00" + bytes((len(n),)) + n.encode() + bytes((len(v),)) + v.encode() for n, v in HEADERS
)
"""``HEADERS`` without the dynamic table: the same bytes at any time."""


@dataclasses.dataclass(slots=True)
class Events:
    """A listener that keeps what it is told; ``when`` is called with each event first."""

    seen: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    when: Callable[[str, int], None] = lambda _kind, _stream: None

    def on_request(self, stream: int, headers: HeaderList) -> None:
        self.seen.append(("request", stream, list(headers)))
        self.when("request", stream)

    def on_data(self, stream: int, data: bytes) -> None:
        self.seen.append(("data", stream, data))
        self.when("data", stream)

    def on_end(self, stream: int) -> None:
        self.seen.append(("end", stream))
        self.when("end", stream)

    def on_reset(self, stream: int) -> None:
        self.seen.append(("reset", stream))
        self.when("reset", stream)

    def kinds(self) -> list[tuple[str, int]]:
        return [(event[0], event[1]) for event in self.seen]

    def data(self, stream: int) -> bytes:
        return b"".join(e[2] for e in self.seen if e[0] == "data" and e[1] == stream)


def hello(values: Mapping[int, int] | None = None) -> bytes:
    """Return the preface with its settings."""
    return f.PREFACE + f.settings(dict(values or {}))


def connect(
    values: Mapping[int, int] | None = None, events: Events | None = None
) -> tuple[ServerConnection, Events]:
    """Return a connection after the preface, and its listener; what it said first is dropped."""
    events = events or Events()
    connection = ServerConnection(events)
    connection.receive(hello(values))
    connection.output()
    return connection, events


def request(stream: int, *, end: bool = False, block: bytes = BLOCK) -> bytes:
    """Return the headers of a request."""
    return f.frame(f.HEADERS, f.END_HEADERS | (f.END_STREAM if end else 0), stream, block)


def data(stream: int, body: bytes, *, end: bool = False) -> bytes:
    """Return a DATA frame."""
    return f.frame(f.DATA, f.END_STREAM if end else 0, stream, body)


def grpc_message(body: bytes, *, compressed: int = 0) -> bytes:
    """Return a message of gRPC."""
    return bytes((compressed,)) + len(body).to_bytes(4, "big") + body


def read(output: bytes) -> list[Frame]:
    """Return the frames in *output*, which holds whole ones."""
    found, view = [], memoryview(output)
    while view:
        frame, size = Frame.parse_frame_header(view[:9])
        assert len(view) >= 9 + size
        frame.parse_body(memoryview(bytes(view[9 : 9 + size])))
        found.append(frame)
        view = view[9 + size :]
    return found


def bodies(output: bytes) -> dict[int, bytes]:
    """Return the body bytes of each stream."""
    found: dict[int, bytes] = {}
    for frame in read(output):
        if isinstance(frame, DataFrame):
            found[frame.stream_id] = found.get(frame.stream_id, b"") + frame.data
    return found


def names(output: bytes) -> list[str]:
    """Return the kinds of the frames, ``DATA 1`` or ``SETTINGS ACK``."""
    found = []
    for frame in read(output):
        name = type(frame).__name__.removesuffix("Frame").upper()
        if frame.stream_id:
            name += f" {frame.stream_id}"
        found.append(
            name + "".join(f" {flag}" for flag in ("ACK", "END_STREAM") if flag in frame.flags)
        )
    return found


def goaway(output: bytes) -> tuple[int, int, bytes]:
    """Return error code, last stream and reason of the only GOAWAY, which comes last."""
    *before, last = read(output)
    assert isinstance(last, GoAwayFrame), last
    assert not any(isinstance(frame, GoAwayFrame) for frame in before)
    return last.error_code, last.last_stream_id, last.additional_data


def resets(output: bytes) -> dict[int, int]:
    """Return the error code of each stream that is reset."""
    return {fr.stream_id: fr.error_code for fr in read(output) if isinstance(fr, RstStreamFrame)}


def answers(output: bytes, decoder: Decoder | None = None) -> dict[int, Answer]:
    """Return what each stream was answered."""
    decoder = decoder or Decoder()
    found: dict[int, Answer] = {}
    for frame in read(output):
        answer = found.setdefault(frame.stream_id, Answer())
        if isinstance(frame, HeadersFrame):
            for name, value in decoder.decode(frame.data, raw=True):
                answer.headers[bytes(name).decode()] = bytes(value).decode()
            answer.ended = answer.ended or "END_STREAM" in frame.flags
        elif isinstance(frame, DataFrame):
            assert not answer.ended
            answer.body += frame.data
    found.pop(0, None)
    return found


@dataclasses.dataclass(slots=True)
class Answer:
    """A response."""

    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    ended: bool = False

    @property
    def status(self) -> str | None:
        return self.headers.get("grpc-status")

    @property
    def messages(self) -> list[bytes]:
        found, rest = [], self.body
        while rest:
            size = int.from_bytes(rest[1:5], "big")
            assert rest[0] == 0
            assert len(rest) >= 5 + size
            found.append(rest[5 : 5 + size])
            rest = rest[5 + size :]
        return found


def encode(headers: Sequence[tuple[str, str]], encoder: Encoder | None = None) -> bytes:
    """Compress *headers*."""
    return (encoder or Encoder()).encode(headers)
