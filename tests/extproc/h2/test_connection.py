"""One HTTP/2 connection: what the peer may do, what it may not, and what it is answered."""

from __future__ import annotations

import struct

import pytest
from hpack import Encoder

from extproc.h2 import connection as module
from extproc.h2 import frames as f
from extproc.h2.connection import ServerConnection
from extproc.h2.frames import ErrorCode
from tests.extproc.h2.peer import (
    BLOCK,
    HEADERS,
    Events,
    connect,
    data,
    encode,
    goaway,
    hello,
    names,
    read,
    request,
    resets,
)

TRAILERS = b"\x00\x0bgrpc-status\x010"
RAW = [(name.encode(), value.encode()) for name, value in HEADERS]


def fails(connection: ServerConnection, code: ErrorCode) -> None:
    """Check that the connection has ended because of the peer."""
    assert connection.closed
    assert connection.fault is not None
    found, _, reason = goaway(connection.output())
    assert ErrorCode(found) is code
    assert reason.decode() == str(connection.fault)


# The preface.


def test_server_speaks_first():
    """Its settings and the connection's window do not wait for the client."""
    connection = ServerConnection(Events())

    settings, window = read(connection.output())

    assert settings.settings == {4: f.MAX_WINDOW, 5: module.MAX_FRAME_BYTES}
    assert (window.stream_id, window.window_increment) == (0, f.MAX_WINDOW - f.DEFAULT_WINDOW)
    assert connection.output() == b""


def test_preface_may_come_byte_by_byte():
    """Nothing is said until the settings are there, which are then acknowledged."""
    connection = ServerConnection(Events())
    connection.output()
    *first, last = hello()

    for byte in first:
        connection.receive(bytes((byte,)))
        assert connection.output() == b""
    connection.receive(bytes((last,)))

    assert names(connection.output()) == ["SETTINGS ACK"]
    assert not connection.closed


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"X",
        b"PRI * HTTP/1",
        b"\x16\x03\x01\x02\x00",
        f.PREFACE[:-1] + b"x",
        f.PREFACE + f.frame(f.PING, 0, 0, bytes(8)),
        f.PREFACE + f.frame(f.SETTINGS, f.ACK, 0),
        f.PREFACE + request(1),
    ],
    ids=["HTTP/1.1", "one byte", "another version", "TLS", "last byte", "PING", "ACK", "HEADERS"],
)
def test_wrong_preface_ends_the_connection(start):
    """As soon as it differs, also when its first frame is no SETTINGS (3.4)."""
    connection = ServerConnection(Events())
    connection.output()

    connection.receive(start)

    fails(connection, ErrorCode.PROTOCOL_ERROR)


# Requests.


def test_request_with_body_is_told_in_order():
    """Headers, data, end."""
    connection, events = connect()

    connection.receive(request(1) + data(1, b"ab") + data(1, b"") + data(1, b"c", end=True))

    assert events.seen == [
        ("request", 1, RAW),
        ("data", 1, b"ab"),
        ("data", 1, b"c"),
        ("end", 1),
    ]
    assert connection.output() == b""


def test_request_may_end_with_its_headers():
    """END_STREAM on HEADERS."""
    connection, events = connect()

    connection.receive(request(1, end=True))

    assert events.kinds() == [("request", 1), ("end", 1)]


@pytest.mark.parametrize("split", [False, True], ids=["one frame", "continued"])
def test_trailers_end_a_request(split):
    """They are dropped, but end the stream."""
    connection, events = connect()
    block = encode([("a", "b")])
    frames = request(1, end=True, block=block)
    if split:
        frames = f.frame(f.HEADERS, f.END_STREAM, 1, block[:1]) + f.frame(
            f.CONTINUATION, f.END_HEADERS, 1, block[1:]
        )

    connection.receive(request(1) + data(1, b"x") + frames)

    assert events.kinds() == [("request", 1), ("data", 1), ("end", 1)]


def test_padding_and_priority_are_taken_off():
    """Of HEADERS and of DATA."""
    connection, events = connect()
    flags = f.END_HEADERS | f.PADDED | f.PRIORITIZED

    connection.receive(f.frame(f.HEADERS, flags, 1, b"\x03" + bytes(5) + BLOCK + bytes(3)))
    connection.receive(f.frame(f.DATA, f.PADDED, 1, b"\x02ab\x00\x00"))
    connection.receive(f.frame(f.DATA, f.PADDED, 1, b"\x00c"))
    connection.receive(f.frame(f.DATA, f.PADDED, 1, b"\x02\x00\x00"))

    assert events.seen == [("request", 1, RAW), ("data", 1, b"ab"), ("data", 1, b"c")]


def test_headers_may_be_continued():
    """In pieces of any size, empty ones too."""
    connection, events = connect()
    pieces = [b"", BLOCK[:1], b"", BLOCK[1:20], BLOCK[20:]]

    connection.receive(f.frame(f.HEADERS, f.END_STREAM, 1, b""))
    for piece in pieces:
        connection.receive(f.frame(f.CONTINUATION, 0, 1, piece))
    connection.receive(f.frame(f.CONTINUATION, f.END_HEADERS, 1, b""))

    assert events.seen == [("request", 1, RAW), ("end", 1)]


def test_reserved_bits_are_ignored():
    """Of the stream's number and of a window's increment."""
    connection, events = connect()
    reserved = bytearray(request(1))
    reserved[5] |= 0x80

    connection.receive(bytes(reserved))
    connection.receive(f.frame(f.WINDOW_UPDATE, 0, 1, struct.pack("!I", 2**31 + 5)))

    assert events.kinds() == [("request", 1)]
    assert not connection.closed


@pytest.mark.parametrize(
    "frame",
    [
        f.frame(f.PRIORITY, 0, 1, bytes(5)),
        f.frame(f.PRIORITY, 0, 9, bytes(5)),
        f.frame(f.GOAWAY, 0, 0, bytes(8) + b"bye"),
        f.frame(f.PING, f.ACK, 0, bytes(8)),
        f.frame(f.SETTINGS, f.ACK, 0),
        f.frame(0x10, 0xFF, 1, b"of a later RFC"),
        f.frame(0xFF, 0, 0, b""),
        f.frame(f.RST_STREAM, 0, 3, bytes(4)),
        f.frame(f.WINDOW_UPDATE, 0, 3, b"\x00\x00\x00\x01"),
        data(3, b"late"),
        request(3, end=True),
        f.frame(f.RST_STREAM, 0xFF, 3, bytes(4)),
    ],
    ids=lambda frame: f"kind {frame[3]} {frame[4]:x} {frame[8]}",
)
def test_frame_that_changes_nothing(frame):
    """Old, unknown, or crossed with our end of the stream: the connection goes on."""
    connection, events = connect()
    connection.receive(request(1) + request(3, end=True))
    connection.end(3, TRAILERS)
    connection.output()
    before = list(events.seen)

    connection.receive(frame)

    assert connection.output() == b""
    assert events.seen == before
    connection.receive(data(1, b"x", end=True) + request(5))
    assert events.kinds()[-3:] == [("data", 1), ("end", 1), ("request", 5)]


def test_headers_of_a_stream_that_is_over_still_change_the_table():
    """Trailers that crossed with our end add entries which later requests refer to."""
    connection, events = connect()
    encoder = Encoder()
    connection.receive(request(1, block=encode(HEADERS, encoder)))
    connection.end(1, TRAILERS)

    connection.receive(request(1, end=True, block=encode([("x-new", "entry")], encoder)))
    connection.receive(request(3, block=encode([*HEADERS, ("x-new", "entry")], encoder)))

    assert events.seen[-1] == ("request", 3, [*RAW, (b"x-new", b"entry")])


def test_ping_is_answered_with_its_data():
    """Whatever else goes on."""
    connection, _ = connect()

    connection.receive(f.frame(f.PING, 0, 0, b"12345678"))

    (ping,) = read(connection.output())
    assert (ping.opaque_data, "ACK" in ping.flags) == (b"12345678", True)


def test_reset_is_told_once():
    """Later frames of that stream are dropped."""
    connection, events = connect()
    connection.receive(request(1) + f.rst_stream(1, ErrorCode.CANCEL))

    connection.receive(data(1, b"x") + f.rst_stream(1, ErrorCode.CANCEL) + f.window_update(1, 1))
    connection.send_headers(1, b"\x88")
    connection.send_data(1, b"x")
    connection.end(1, TRAILERS)

    assert events.kinds() == [("request", 1), ("reset", 1)]
    assert connection.output() == b""
    assert connection.open_streams() == []


# What the peer may not do. Stream 1 is open, 3 is half closed by the peer, 5 is over.

BIG = f.frame(f.HEADERS, 0, 7, bytes(40_000))
FAULTS = {
    "DATA on stream 0": (data(0, b"x"), "PROTOCOL_ERROR"),
    "DATA on an idle stream": (data(7, b"x"), "PROTOCOL_ERROR"),
    "DATA on an even stream": (data(2, b"x"), "PROTOCOL_ERROR"),
    "DATA after the end": (data(3, b"x"), "STREAM_CLOSED"),
    "empty DATA after the end": (data(3, b"", end=True), "STREAM_CLOSED"),
    "DATA padding too long": (f.frame(f.DATA, f.PADDED, 1, b"\x03xx"), "PROTOCOL_ERROR"),
    "DATA padding without length": (f.frame(f.DATA, f.PADDED, 1), "PROTOCOL_ERROR"),
    "HEADERS on stream 0": (request(0), "PROTOCOL_ERROR"),
    "HEADERS on an even stream": (request(8), "PROTOCOL_ERROR"),
    "HEADERS padding too long": (
        f.frame(f.HEADERS, f.PADDED | f.END_HEADERS, 7, b"\x0a" + bytes(9)),
        "PROTOCOL_ERROR",
    ),
    "HEADERS without priority": (
        f.frame(f.HEADERS, f.PRIORITIZED | f.END_HEADERS, 7, bytes(4)),
        "FRAME_SIZE_ERROR",
    ),
    "HEADERS twice": (request(1), "PROTOCOL_ERROR"),
    "trailers after the end": (request(3, end=True), "STREAM_CLOSED"),
    "headers after the end": (request(3), "STREAM_CLOSED"),
    "headers too large": (request(7, block=bytes(65_537)), "ENHANCE_YOUR_CALM"),
    "headers too large in pieces": (
        BIG + f.frame(f.CONTINUATION, 0, 7, bytes(25_537)),
        "ENHANCE_YOUR_CALM",
    ),
    "headers that become too large": (
        request(7, block=b"\x40\x01a\x7f\x80\x10" + bytes(2175) + b"\xbe" * 40),
        "COMPRESSION_ERROR",
    ),
    "headers with a wrong index": (request(7, block=b"\xff\x80\x01"), "COMPRESSION_ERROR"),
    "headers cut off": (request(7, block=b"\x00\x05ab"), "COMPRESSION_ERROR"),
    "headers with index 0": (request(7, block=b"\x80"), "COMPRESSION_ERROR"),
    "headers with a table too large": (request(7, block=b"\x3f\xe2\x1f"), "COMPRESSION_ERROR"),
    "headers with a late table size": (request(7, block=b"\x82\x20"), "COMPRESSION_ERROR"),
    "headers with wrong Huffman": (request(7, block=b"\x00\x81\xff\x00"), "COMPRESSION_ERROR"),
    "headers with an endless number": (
        request(7, block=b"\x00\x7f" + b"\xff" * 2000),
        "COMPRESSION_ERROR",
    ),
    "DATA inside of headers": (f.frame(f.HEADERS, 0, 7) + data(1, b"x"), "PROTOCOL_ERROR"),
    "PING inside of headers": (
        f.frame(f.HEADERS, 0, 7) + f.frame(f.PING, 0, 0, bytes(8)),
        "PROTOCOL_ERROR",
    ),
    "unknown kind inside of headers": (
        f.frame(f.HEADERS, 0, 7) + f.frame(0x99, 0, 0),
        "PROTOCOL_ERROR",
    ),
    "HEADERS inside of headers": (f.frame(f.HEADERS, 0, 7) + request(9), "PROTOCOL_ERROR"),
    "CONTINUATION of another stream": (
        f.frame(f.HEADERS, 0, 7) + f.frame(f.CONTINUATION, 4, 9),
        "PROTOCOL_ERROR",
    ),
    "CONTINUATION of nothing": (f.frame(f.CONTINUATION, 4, 1), "PROTOCOL_ERROR"),
    "CONTINUATION after the end": (
        request(7) + f.frame(f.CONTINUATION, 4, 7),
        "PROTOCOL_ERROR",
    ),
    "CONTINUATION without end": (
        f.frame(f.HEADERS, 0, 7) + f.frame(f.CONTINUATION, 0, 7) * 64,
        "ENHANCE_YOUR_CALM",
    ),
    "PRIORITY on stream 0": (f.frame(f.PRIORITY, 0, 0, bytes(5)), "PROTOCOL_ERROR"),
    "PRIORITY of a wrong size": (f.frame(f.PRIORITY, 0, 1, bytes(4)), "FRAME_SIZE_ERROR"),
    "RST_STREAM on stream 0": (f.rst_stream(0, ErrorCode.CANCEL), "PROTOCOL_ERROR"),
    "RST_STREAM on an idle stream": (f.rst_stream(7, ErrorCode.CANCEL), "PROTOCOL_ERROR"),
    "RST_STREAM of a wrong size": (f.frame(f.RST_STREAM, 0, 1, bytes(3)), "FRAME_SIZE_ERROR"),
    "SETTINGS on a stream": (f.frame(f.SETTINGS, 0, 1), "PROTOCOL_ERROR"),
    "SETTINGS of a wrong size": (f.frame(f.SETTINGS, 0, 0, bytes(5)), "FRAME_SIZE_ERROR"),
    "SETTINGS ACK with settings": (f.frame(f.SETTINGS, 1, 0, bytes(6)), "FRAME_SIZE_ERROR"),
    "SETTINGS ACK on a stream": (f.frame(f.SETTINGS, 1, 1), "PROTOCOL_ERROR"),
    "window too large": (f.settings({4: 2**31}), "FLOW_CONTROL_ERROR"),
    "frames too small": (f.settings({5: 16_383}), "PROTOCOL_ERROR"),
    "frames too large": (f.settings({5: 2**24}), "PROTOCOL_ERROR"),
    "push neither on nor off": (f.settings({2: 2}), "PROTOCOL_ERROR"),
    "window that overflows by settings": (
        f.window_update(1, 2**31 - 1 - 65_535) + f.settings({4: 65_536}),
        "FLOW_CONTROL_ERROR",
    ),
    "PUSH_PROMISE": (f.frame(f.PUSH_PROMISE, 4, 1, bytes(4)), "PROTOCOL_ERROR"),
    "PING on a stream": (f.frame(f.PING, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
    "PING of a wrong size": (f.frame(f.PING, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
    "GOAWAY on a stream": (f.frame(f.GOAWAY, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
    "GOAWAY of a wrong size": (f.frame(f.GOAWAY, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
    "WINDOW_UPDATE of 0": (f.window_update(0, 0), "PROTOCOL_ERROR"),
    "WINDOW_UPDATE of 0 of a stream": (f.window_update(1, 0), "PROTOCOL_ERROR"),
    "WINDOW_UPDATE of a wrong size": (f.frame(f.WINDOW_UPDATE, 0, 0, bytes(3)), "FRAME_SIZE_ERROR"),
    "WINDOW_UPDATE on an idle stream": (f.window_update(7, 1), "PROTOCOL_ERROR"),
    "WINDOW_UPDATE too large": (f.window_update(0, 2**31 - 65_535), "FLOW_CONTROL_ERROR"),
    "WINDOW_UPDATE too large of a stream": (f.window_update(1, 2**31 - 65_535), "FLOW_CONTROL_ERROR"),
    "frame too large": (
        (module.MAX_FRAME_BYTES + 1).to_bytes(3, "big") + bytes((f.DATA, 0, 0, 0, 0, 1)),
        "FRAME_SIZE_ERROR",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "code"), FAULTS.values(), ids=FAULTS.keys())
def test_fault_of_the_peer_ends_the_connection_with_its_reason(sent, code):
    """Open streams are reset, stream 5 is the last that was seen, and nothing is taken or said later."""
    connection, events = connect()
    connection.receive(request(1) + request(3, end=True) + request(5, end=True))
    connection.end(5, TRAILERS)
    connection.output()
    del events.seen[:]

    connection.receive(sent)

    told = events.kinds()
    assert [told.count(("reset", stream)) for stream in (1, 3, 5)] == [1, 1, 0]
    assert [event for event in events.seen if event[0] == "data"] == []
    assert connection.open_streams() == []
    fails(connection, ErrorCode[code])
    seen = list(events.seen)
    connection.receive(f.frame(f.PING, 0, 0, bytes(8)) + request(11))
    connection.send_headers(1, b"\x88")
    connection.send_data(1, b"x")
    connection.end(1, TRAILERS)
    connection.drain()
    connection.lost()
    assert events.seen == seen
    assert connection.output() == b""


def test_streams_may_not_go_back():
    """A number below the highest is of a stream that is over: nothing opens."""
    connection, events = connect()

    connection.receive(request(7) + request(5) + data(5, b"x"))

    assert events.kinds() == [("request", 7)]
    assert not connection.closed


# Limits.


def test_largest_frame_is_taken():
    """MAX_FRAME_BYTES of data at once, in pieces as sockets give them."""
    connection, events = connect()
    body = bytes(range(256)) * (module.MAX_FRAME_BYTES // 256)
    sent = request(1) + data(1, body) + f.frame(f.PING, 0, 0, bytes(8))

    for start in range(0, len(sent), 65_536):
        connection.receive(sent[start : start + 65_536])

    assert events.data(1) == body
    assert names(connection.output()) == ["PING ACK"]


def test_largest_header_block_is_taken():
    """64 KB, in frames of 16 KB."""
    connection, events = connect()
    entry = b"\x00\x01a\x00"
    block = BLOCK + entry * 1800

    connection.receive(f.frame(f.HEADERS, 0, 1, block[:4000]))
    connection.receive(f.frame(f.CONTINUATION, f.END_HEADERS, 1, block[4000:]))

    assert len(events.seen[0][2]) == len(HEADERS) + 1800


def test_received_bytes_are_given_back():
    """Windows of stream and connection, padding included; not of a stream that has ended."""
    connection, _ = connect()
    padded = f.frame(f.DATA, f.PADDED, 1, b"\xff" + bytes(module.MAX_FRAME_BYTES - 1))
    connection.receive(request(1) + request(3))

    for _ in range(15):
        connection.receive(padded)
    assert connection.output() == b""
    connection.receive(padded)
    updates = {fr.stream_id: fr.window_increment for fr in read(connection.output())}
    assert updates == {0: 2**24, 1: 2**24}

    for _ in range(15):
        connection.receive(data(3, bytes(module.MAX_FRAME_BYTES)))
    connection.receive(data(3, bytes(module.MAX_FRAME_BYTES), end=True))
    updates = {fr.stream_id: fr.window_increment for fr in read(connection.output())}
    assert updates == {0: 2**24}


def test_bytes_of_a_stream_that_is_over_are_given_back_to_the_connection():
    """A peer that has not heard of the end yet must not use up the window of the others."""
    connection, _ = connect()
    connection.receive(request(1))
    connection.end(1, TRAILERS)
    connection.output()

    for _ in range(16):
        connection.receive(data(1, bytes(module.MAX_FRAME_BYTES)))

    assert [fr.stream_id for fr in read(connection.output())] == [0]


# The listener.


@pytest.mark.parametrize("kind", ["request", "data"])
@pytest.mark.parametrize("window", [f.DEFAULT_WINDOW, 0], ids=["sent", "end waits for the window"])
def test_nothing_is_told_after_the_layer_above_has_ended_a_stream(kind, window):
    """Even when it does so while it is told something."""
    events = Events()
    connection, _ = connect({f.SETTINGS_INITIAL_WINDOW_SIZE: window}, events)

    def finish(event: str, stream: int) -> None:
        if event == kind:
            connection.send_data(stream, b"x")
            connection.end(stream, TRAILERS)

    events.when = finish
    connection.receive(request(1) + data(1, b"a", end=True))
    connection.receive(
        request(3) + data(3, b"a") + data(3, b"b") + f.rst_stream(3, ErrorCode.CANCEL)
    )
    connection.receive(f.frame(f.PUSH_PROMISE, 0, 1))

    told = [("request", 1), ("request", 3)]
    if kind == "data":
        told = [("request", 1), ("data", 1), ("request", 3), ("data", 3)]
    assert events.kinds() == told


@pytest.mark.parametrize("last", ["headers", "data", "trailers"])
def test_answer_to_the_end_of_a_request_needs_no_reset(last):
    """The peer has ended its side with the very frame that is answered."""
    events = Events()
    connection, _ = connect(None, events)
    kind = {"headers": "request", "data": "data", "trailers": "end"}[last]
    events.when = lambda event, stream: event == kind and connection.end(stream, TRAILERS)

    connection.receive(request(1, end=last == "headers"))
    if last != "headers":
        connection.receive(data(1, b"x", end=last == "data"))
    if last == "trailers":
        connection.receive(request(1, end=True))

    assert names(connection.output()) == ["HEADERS 1 END_STREAM"]


def test_answer_before_the_end_of_a_request_tells_the_peer_to_stop():
    """RST_STREAM with NO_ERROR after the whole answer (8.1)."""
    connection, _ = connect()
    connection.receive(request(1))

    connection.end(1, TRAILERS)

    output = connection.output()
    assert names(output) == ["HEADERS 1 END_STREAM", "RSTSTREAM 1"]
    assert resets(output) == {1: ErrorCode.NO_ERROR}


# Drain.


def test_drain_refuses_new_streams_and_lets_open_ones_go_on():
    """GOAWAY once; a refused stream may be tried elsewhere, its frames are dropped."""
    connection, events = connect()
    connection.receive(request(1))

    connection.drain()
    connection.drain()
    assert goaway(connection.output()) == (ErrorCode.NO_ERROR, 1, b"shutting down")

    connection.receive(request(3) + data(3, b"x", end=True) + data(1, b"y", end=True))
    assert resets(connection.output()) == {3: ErrorCode.REFUSED_STREAM}
    assert events.kinds() == [("request", 1), ("data", 1), ("end", 1)]
    connection.send_headers(1, b"\x88")
    connection.end(1, TRAILERS)
    assert names(connection.output()) == ["HEADERS 1", "HEADERS 1 END_STREAM"]
    assert not connection.closed


def test_refused_streams_still_change_the_header_table():
    """The open ones depend on it."""
    connection, events = connect()
    encoder = Encoder()
    connection.receive(request(1, block=encode(HEADERS, encoder)))
    connection.drain()

    connection.receive(request(3, block=encode([("x-new", "entry")], encoder)))
    connection.receive(request(1, end=True, block=encode([("x-new", "entry")], encoder)))

    assert not connection.closed
    assert events.kinds() == [("request", 1), ("end", 1)]


def test_lost_peer_resets_what_is_open_and_leaves_no_output():
    """Streams whose end only waits to be sent are not told again."""
    connection, events = connect({f.SETTINGS_INITIAL_WINDOW_SIZE: 0})
    connection.receive(request(1) + request(3) + f.frame(f.PING, 0, 0, bytes(8)))
    connection.send_data(3, b"x")
    connection.end(3, TRAILERS)

    connection.lost()

    assert events.kinds()[2:] == [("reset", 1)]
    assert connection.output() == b""
    assert connection.open_streams() == []
