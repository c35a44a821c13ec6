"""Bytes that nobody would send, in any pieces."""

from __future__ import annotations

import dataclasses
import random
import struct
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.h2 import frames as f
from extproc.h2.connection import HeaderList, ServerConnection
from extproc.h2.frames import ErrorCode
from extproc.h2.grpc import Call, GrpcConnection, Status
from tests.extproc.h2.peer import BLOCK, METHOD, data, grpc_message, hello, read, request

pytestmark = pytest.mark.slow

TRAILERS = b"\x00\x0bgrpc-status\x010"
STREAM = st.sampled_from([1, 1, 1, 3, 3, 5, 7, 0, 2])
MANY = settings(max_examples=300)


def update(stream: int, increment: int) -> bytes:
    return f.frame(f.WINDOW_UPDATE, 0, stream, struct.pack("!I", increment))


GOOD = st.one_of(
    st.builds(lambda s, e: request(s, end=e), STREAM, st.booleans()),
    st.builds(
        lambda s, e, b: data(s, b, end=e),
        STREAM,
        st.booleans(),
        st.sampled_from([b"", b"\x00", grpc_message(b""), grpc_message(b"abc"), b"x" * 300]),
    ),
    st.builds(
        lambda s, at: (
            f.frame(f.HEADERS, 0, s, BLOCK[:at])
            + f.frame(f.CONTINUATION, f.END_HEADERS, s, BLOCK[at:])
        ),
        STREAM,
        st.integers(0, len(BLOCK)),
    ),
    st.builds(f.rst_stream, STREAM, st.just(ErrorCode.CANCEL)),
    st.builds(update, STREAM, st.sampled_from([1, 1000, 2**20])),
    st.builds(lambda value: f.settings({4: value}), st.sampled_from([0, 10, 65_535, 2**20])),
    st.just(f.frame(f.PING, 0, 0, b"12345678")),
    st.just(f.frame(f.DATA, f.PADDED, 1, b"\x01a\x00")),
    st.just(f.frame(f.PRIORITY, 0, 3, bytes(5))),
    st.just(request(9, block=b"\x40\x01a\x01b\xbe")),
)
WILD = st.builds(
    f.frame,
    st.integers(0, 12),
    st.sampled_from([0, 1, 4, 5, 8, 13, 32, 45, 255]),
    STREAM,
    st.binary(max_size=12),
)
FRAMES = st.lists(st.one_of(GOOD, GOOD, GOOD, GOOD, GOOD, WILD), max_size=25)


def mutate(parts: list[bytes], rng: random.Random) -> bytes:
    """Return the stream, sometimes with a byte changed, left out, doubled, or cut off."""
    sent = bytearray(hello() + b"".join(parts))
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        at = rng.randrange(len(sent))
        match rng.randrange(4):
            case 0:
                sent[at] ^= 1 << rng.randrange(8)
            case 1:
                del sent[at : at + rng.randrange(1, 12)]
            case 2:
                sent[at:at] = sent[at : at + 9]
            case _:
                del sent[at + 30 :]
        if not sent:
            break
    return bytes(sent)


SENT = st.builds(mutate, FRAMES, st.randoms(use_true_random=False))
SIZES = st.lists(st.sampled_from([1, 2, 5, 9, 10, 24, 40, 300]), max_size=30)


def cut(sent: bytes, sizes: list[int]) -> list[bytes]:
    pieces, position = [], 0
    for size in sizes:
        pieces.append(sent[position : position + size])
        position += size
    return [piece for piece in [*pieces, sent[position:]] if piece]


@dataclasses.dataclass(slots=True)
class Contract:
    """A listener that checks what it is promised, and answers as *rng* wants."""

    rng: random.Random
    connection: ServerConnection | None = None
    open: dict[int, bool] = dataclasses.field(default_factory=dict)
    """Streams that may still be told something, and whether the peer has ended its side."""
    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def on_request(self, stream: int, headers: HeaderList) -> None:
        assert all(stream > event[1] for event in self.events if event[0] == "request")
        self.open[stream] = False
        self._note("request", stream, list(headers))

    def on_data(self, stream: int, data: bytes) -> None:
        assert self.open[stream] is False
        assert type(data) is bytes
        assert data
        self._note("data", stream, data)

    def on_end(self, stream: int) -> None:
        assert self.open[stream] is False
        self.open[stream] = True
        self._note("end", stream)

    def on_reset(self, stream: int) -> None:
        del self.open[stream]
        self.events.append(("reset", stream))

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        for stream in list(self.open):
            match self.rng.randrange(12):
                case 0:
                    self.connection.send_headers(stream, b"\x88")
                case 1:
                    self.connection.send_data(stream, self.rng.randbytes(300))
                case 2 if stream == event[1] or self.rng.random() < 0.1:
                    self.connection.end(stream, TRAILERS)
                    del self.open[stream]


def drive(pieces: list[bytes], seed: int) -> tuple[list[tuple[Any, ...]], bytes, Contract]:
    """Return what a listener is told and what is written."""
    listener = Contract(random.Random(seed))
    connection = listener.connection = ServerConnection(listener)
    output = b""
    for piece in pieces:
        connection.receive(piece)
        output += connection.output()
    if connection.closed:
        assert listener.open == {}
    else:
        assert set(listener.open) <= set(connection.open_streams())
        assert len(connection._partial) <= 2**20 + 9
    read(output)  # whole frames
    connection.lost()
    assert listener.open == {}
    assert connection.output() == b""
    return listener.events, output, listener


@given(st.lists(st.binary(max_size=60), max_size=6), st.booleans())
@MANY
def test_noise_never_raises(pieces, with_preface):
    """From the first byte, or after a good start."""
    drive([hello()] * with_preface + pieces, 1)


@given(SENT, SIZES, st.integers(0, 3))
@example(b"PRI * HTTP/1.1\r\n", [3], 0)
@example(hello() + request(1) + b"\x00\x00", [], 0)
@MANY
def test_pieces_make_no_difference(sent, sizes, seed):
    """The same events in the same order, the same output; the listener's contract holds."""
    whole = drive([sent], seed)
    split = drive(cut(sent, sizes), seed)
    single = drive([bytes((byte,)) for byte in sent], seed)

    assert whole[:2] == split[:2] == single[:2]


class Random:
    """A handler that does anything it may, and raises."""

    def __init__(self, call: Call, world: World) -> None:
        self.world = world
        self.call = call
        self.closed = 0
        self.ended = False
        world.handlers.append(self)
        self.act()

    def act(self) -> None:
        match self.world.rng.randrange(10):
            case 0:
                raise ZeroDivisionError
            case 1:
                self.call.finish()
            case 2:
                self.call.finish(Status.INTERNAL, "é\ud800%\n")
            case 3 | 4:
                self.call.send(self.world.rng.randbytes(self.world.rng.choice([0, 5, 400])))
            case 5:
                self.call.flush()

    def on_message(self, message: bytes) -> None:
        assert not self.closed
        assert not self.ended
        assert type(message) is bytes
        self.act()

    def on_end(self) -> None:
        assert not self.closed
        assert not self.ended
        self.ended = True
        self.act()

    def on_close(self) -> None:
        self.closed += 1
        self.act()


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.handlers: list[Random] = []
        self.faults: list[Exception] = []


@given(SENT, SIZES, st.integers(0, 1000))
@MANY
def test_every_call_is_closed_exactly_once(sent, sizes, seed):
    """Whatever the peer sends and the handlers do; only their own faults are reported."""
    world = World(seed)
    connection = GrpcConnection(
        {METHOD: lambda call: Random(call, world)},
        max_message_bytes=200,
        report=lambda _path, error: world.faults.append(error),
        flush=lambda: None,
    )

    for piece in cut(sent, sizes):
        connection.http.receive(piece)
        read(connection.http.output())
        running = sum(not handler.closed for handler in world.handlers)
        # One whose factory has failed has no handler to close.
        assert len(connection) <= running
    connection.lost()

    assert len(connection) == 0
    raised_in_factory = sum(handler.closed == 0 for handler in world.handlers)
    assert {handler.closed for handler in world.handlers} <= {0, 1}
    assert {type(error) for error in world.faults} <= {ZeroDivisionError}
    assert raised_in_factory <= len(world.faults)
