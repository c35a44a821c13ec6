"""Sending within the windows that the peer gives."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hpack import Decoder
from hyperframe.frame import DataFrame, HeadersFrame, RstStreamFrame
from hypothesis import given
from hypothesis import strategies as st

from extproc.h2 import frames as f
from extproc.h2.connection import ServerConnection
from extproc.h2.frames import ErrorCode
from tests.extproc.h2.peer import answers, bodies, connect, names, read, request

TRAILERS = b"\x00\x0bgrpc-status\x010"
BODY = random.Random(3).randbytes(200_000)


def sizes(output: bytes) -> list[tuple[int, int]]:
    return [(fr.stream_id, len(fr.data)) for fr in read(output) if isinstance(fr, DataFrame)]


def opened(*streams: int, window: int = f.DEFAULT_WINDOW) -> ServerConnection:
    connection, _ = connect({f.SETTINGS_INITIAL_WINDOW_SIZE: window})
    for stream in streams:
        connection.receive(request(stream, end=True))
    return connection


def test_small_message_is_sent_at_once():
    """In one frame."""
    connection = opened(1)

    connection.send_data(1, b"abc")

    assert sizes(connection.output()) == [(1, 3)]


def test_large_message_goes_in_frames_that_the_peer_takes():
    """16 KB unless it says otherwise, all of both windows, then the rest as they grow."""
    connection = opened(1)

    connection.send_data(1, BODY)
    connection.end(1, TRAILERS)
    output = connection.output()
    assert sizes(output) == [(1, 16_384)] * 3 + [(1, 16_383)]

    connection.receive(f.window_update(1, 2**20))
    assert connection.output() == b""
    connection.receive(f.window_update(0, 10))
    output += connection.output()
    connection.receive(f.window_update(0, 2**20))
    output += connection.output()
    assert names(output)[-1] == "HEADERS 1 END_STREAM"
    assert bodies(output) == {1: BODY}


@pytest.mark.parametrize("size", [2**14 + 1, 2**24 - 1])
def test_peer_may_take_larger_frames(size):
    """As large as it says."""
    connection, _ = connect({4: 2**31 - 1, 5: size})
    connection.receive(request(1) + f.window_update(0, 2**30))

    connection.send_data(1, BODY)

    assert max(sent for _, sent in sizes(connection.output())) == min(size, len(BODY))


def test_frames_that_wait_obey_a_limit_that_shrinks_meanwhile():
    """What was queued under a larger limit is cut again."""
    connection, _ = connect({4: 0, 5: 2**20})
    connection.receive(request(1) + f.window_update(0, 2**30))
    connection.send_data(1, BODY)

    connection.receive(f.settings({4: 2**20, 5: 2**14}))

    output = connection.output()
    assert max(sent for _, sent in sizes(output)) == 2**14
    assert bodies(output) == {1: BODY}


def test_settings_are_acknowledged_before_what_they_allow():
    """The peer then knows which limits a frame obeys."""
    connection = opened(1, window=0)
    connection.send_data(1, b"abc")

    connection.receive(f.settings({4: 3}))

    assert names(connection.output()) == ["SETTINGS ACK", "DATA 1"]


def test_window_that_shrinks_below_zero_must_grow_above_it():
    """6.9.2: nothing more is sent until it is positive."""
    connection = opened(1, window=100)
    connection.send_data(1, bytes(80))
    connection.send_data(1, bytes(80))
    assert sizes(connection.output()) == [(1, 80), (1, 20)]

    connection.receive(f.settings({4: 10}))  # now -90
    connection.receive(f.window_update(1, 90))
    assert sizes(connection.output()) == []
    connection.receive(f.window_update(1, 1))
    assert sizes(connection.output()) == [(1, 1)]
    connection.receive(f.settings({4: 100}))
    assert sizes(connection.output()) == [(1, 59)]


def test_settings_change_leaves_the_connection_window():
    """6.9.2: only WINDOW_UPDATE changes that."""
    connection = opened(1, window=2**20)
    connection.send_data(1, BODY)
    assert sum(sent for _, sent in sizes(connection.output())) == 65_535

    connection.receive(f.settings({4: 2**21}))

    assert sizes(connection.output()) == []


def test_new_streams_start_with_the_latest_window():
    """And old ones were changed with it."""
    connection = opened(1, window=10)
    connection.receive(f.settings({4: 7}) + request(3))

    for stream in (1, 3):
        connection.send_data(stream, bytes(20))

    assert sizes(connection.output()) == [(1, 7), (3, 7)]


def test_trailers_wait_for_the_data():
    """Not for a window: they have none; and nothing can be sent after them."""
    connection = opened(1, 3, window=0)
    connection.send_headers(1, b"\x88")
    connection.send_data(1, b"abc")
    connection.end(1, TRAILERS)
    connection.end(1, TRAILERS)
    connection.send_data(1, b"never")
    connection.end(3, TRAILERS)
    assert names(connection.output()) == ["HEADERS 1", "HEADERS 3 END_STREAM"]
    assert connection.open_streams() == [1]

    connection.receive(f.window_update(1, 2))
    assert names(connection.output()) == ["DATA 1"]
    connection.receive(f.window_update(1, 100))

    output = connection.output()
    assert names(output) == ["DATA 1", "HEADERS 1 END_STREAM"]
    assert bodies(output) == {1: b"c"}
    assert connection.open_streams() == []


def test_messages_that_wait_keep_their_order():
    """Each is sent whole before the next, whatever the window cuts off."""
    connection = opened(1, window=1)
    for body in (b"abc", b"de", b"f"):
        connection.send_data(1, body)

    output = connection.output()
    for increment in (1, 2, 5):
        connection.receive(f.window_update(1, increment))
        output += connection.output()

    assert sizes(output) == [(1, 1), (1, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert bodies(output) == {1: b"abcdef"}


def test_reset_drops_what_waits():
    """The others get the window."""
    connection = opened(1, 3, window=2**20)
    connection.send_data(1, BODY)
    connection.send_data(3, b"abc")
    connection.output()

    connection.receive(f.rst_stream(1, ErrorCode.CANCEL))
    connection.receive(f.window_update(0, 1000))

    assert sizes(connection.output()) == [(3, 3)]


def test_empty_data_needs_no_window():
    """And does not stand in the way of what comes after."""
    connection = opened(1, window=0)

    connection.send_data(1, b"")
    connection.receive(f.settings({4: 0}))
    connection.send_data(1, b"abc")
    connection.send_data(1, b"")
    connection.end(1, TRAILERS)
    connection.receive(f.window_update(1, 3))

    assert names(connection.output())[-2:] == ["DATA 1", "HEADERS 1 END_STREAM"]


def test_longest_waiting_stream_goes_first():
    """A stream that waits for its own window does not hold up the others."""
    connection = opened(1, 3, 5, 7, window=70_000)
    connection.send_data(1, bytes(70_000))  # uses up the connection's window
    connection.send_data(3, bytes(10))
    connection.send_data(5, bytes(10))
    connection.send_data(7, bytes(10))
    connection.output()

    connection.receive(f.window_update(0, 70_000 - 65_535 + 25))

    assert sizes(connection.output())[1:] == [(3, 10), (5, 10), (7, 5)]


def test_large_answers_share_the_window():
    """None starves while another takes all that the peer gives."""
    connection = opened(1, 3, 5, window=2**20)
    for stream in (1, 3, 5):
        connection.send_data(stream, BODY)
    connection.output()

    for _ in range(30):
        connection.receive(f.window_update(0, 1000))

    sent = {stream: len(body) for stream, body in bodies(connection.output()).items()}
    assert sent == {1: 10_000, 3: 10_000, 5: 10_000}


@pytest.mark.parametrize(
    ("values", "expected"),
    [({1: 0}, True), ({1: 4095}, True), ({1: 4096}, False), ({1: 2**16}, False), ({}, False)],
)
def test_smaller_header_table_of_the_peer_is_confirmed(values, expected):
    """Once, in the next header block (RFC 7541, 4.2): a strict decoder fails without it."""
    connection, _ = connect()
    decoder = Decoder()
    connection.receive(request(1) + request(3))
    connection.receive(f.settings(values))
    connection.output()
    decoder.max_allowed_table_size = values.get(1, 4096)

    connection.send_headers(1, b"\x88")
    connection.end(3, TRAILERS)

    output = connection.output()
    first, second, *_ = [fr.data for fr in read(output) if isinstance(fr, HeadersFrame)]
    assert (first, second) == (b"\x20\x88" if expected else b"\x88", TRAILERS)
    assert answers(output, decoder)[1].headers == {":status": "200"}


def test_confirmation_of_the_table_goes_with_trailers_that_waited():
    """The next block on the wire, not the next one that was made."""
    connection = opened(1, 3, window=0)
    connection.send_data(1, b"abc")
    connection.end(1, TRAILERS)

    connection.receive(f.settings({1: 0}))
    connection.send_headers(3, b"\x88")
    connection.receive(f.window_update(1, 3))

    blocks = [fr.data for fr in read(connection.output()) if isinstance(fr, HeadersFrame)]
    assert blocks == [b"\x20\x88", TRAILERS]


# Any order of sends, updates and settings.


@dataclasses.dataclass(slots=True)
class Mirror:
    """What the peer knows: its windows, and what it got."""

    window: int = f.DEFAULT_WINDOW
    initial: int = f.DEFAULT_WINDOW
    max_frame: int = f.DEFAULT_MAX_FRAME
    windows: dict[int, int] = dataclasses.field(default_factory=dict)
    got: dict[int, bytes] = dataclasses.field(default_factory=dict)
    ended: set[int] = dataclasses.field(default_factory=set)

    def take(self, output: bytes) -> None:
        for frame in read(output):
            stream = frame.stream_id
            if isinstance(frame, DataFrame):
                size = len(frame.data)
                assert stream not in self.ended
                assert size <= self.max_frame
                self.window -= size
                self.windows[stream] -= size
                assert self.window >= 0
                assert self.windows[stream] >= 0
                self.got[stream] += frame.data
            elif isinstance(frame, HeadersFrame):
                assert stream not in self.ended
                self.ended.add(stream)
            else:
                assert not isinstance(frame, RstStreamFrame)


STREAMS = (1, 3, 5)
SMALL = st.sampled_from([0, 1, 2, 7, 100, 16_384, 16_385, 40_000])
STEPS = st.one_of(
    st.tuples(st.just("send"), st.sampled_from(STREAMS), SMALL),
    st.tuples(st.just("end"), st.sampled_from(STREAMS), st.just(0)),
    st.tuples(st.just("update"), st.sampled_from((0, *STREAMS)), SMALL.filter(bool)),
    st.tuples(st.just("initial"), st.just(0), SMALL),
    st.tuples(st.just("frame"), st.just(0), st.sampled_from([16_384, 20_000, 2**20])),
)


@pytest.mark.slow
@given(st.lists(STEPS, max_size=40), st.randoms(use_true_random=False))
def test_windows_are_obeyed_and_used_whatever_happens(steps, rng):
    """Never more than they allow, never less than is there, all of it in order, the end last."""
    connection, _ = connect()
    peer, sent, ended = Mirror(), dict.fromkeys(STREAMS, b""), set()
    for stream in STREAMS:
        connection.receive(request(stream, end=True))
        peer.windows[stream], peer.got[stream] = peer.initial, b""

    for what, stream, number in steps:
        if what == "send":
            body = rng.randbytes(number)
            connection.send_data(stream, body)
            if stream not in ended:
                sent[stream] += body
        elif what == "end":
            ended.add(stream)
            connection.end(stream, TRAILERS)
        elif what == "update":
            if stream:
                peer.windows[stream] += number
            else:
                peer.window += number
            connection.receive(f.window_update(stream, number))
        elif what == "initial":
            for each in STREAMS:
                peer.windows[each] += number - peer.initial
            peer.initial = number
            connection.receive(f.settings({4: number}))
        else:
            peer.max_frame = number
            connection.receive(f.settings({5: number}))
        # A negative window is the peer's own doing: only what is sent now counts.
        peer.take(connection.output())
        for each in STREAMS:
            complete = peer.got[each] == sent[each]
            assert complete or peer.window <= 0 or peer.windows[each] <= 0
            assert not (complete and each in ended) or each in peer.ended

    for stream in (0, *STREAMS):
        connection.receive(f.window_update(stream, 2**30))
    peer.window = 2**31
    peer.windows = dict.fromkeys(STREAMS, 2**31)
    peer.take(connection.output())
    assert peer.got == sent
    assert peer.ended == ended
    assert not connection.closed
