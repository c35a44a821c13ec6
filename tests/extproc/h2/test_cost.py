"""What large messages, many streams and closed ones cost in time and memory."""

from __future__ import annotations

import gc
import time
import tracemalloc
import weakref

import pytest

from extproc.h2 import frames as f
from extproc.h2.grpc import Call, GrpcConnection
from tests.extproc.h2.peer import METHOD, connect, data, hello, request

MB = 2**20
LARGE = 48 * MB
"""Copied as a whole with every frame of 16 KB it would take half a minute."""

CPU_LIMIT_S = 5.0


class Handler:
    """Keeps sizes; can be referred to weakly."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.sizes: list[int] = []

    def on_message(self, message: bytes) -> None:
        self.sizes.append(len(message))
        if len(message) < 1000:
            self.call.send(message)

    def on_end(self) -> None:
        self.call.finish()

    def on_close(self) -> None:
        pass


def serve(handlers: list[Handler] | weakref.WeakSet[Handler]) -> GrpcConnection:
    """Return a connection whose handlers are added to *handlers*."""

    def method(call: Call) -> Handler:
        handler = Handler(call)
        if isinstance(handlers, list):
            handlers.append(handler)
        else:
            handlers.add(handler)
        return handler

    def report(_path: str, error: Exception) -> None:
        raise AssertionError from error

    connection = GrpcConnection(
        {METHOD: method}, max_message_bytes=2**30, report=report, flush=lambda: None
    )
    connection.http.receive(hello({4: 2**31 - 1}) + f.window_update(0, 2**30))
    connection.http.output()
    return connection


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "frame", "piece"),
    [
        (LARGE, 16_384, MB),
        (LARGE, MB, 65_536),
        (MB, 64, MB),
        (MB, MB, 50),
    ],
    ids=["small frames", "large frames in pieces", "tiny frames", "large frame in tiny pieces"],
)
def test_large_message_costs_in_proportion_to_its_size(size, frame, piece):
    """However it is cut: nothing is copied again and again."""
    handlers: list[Handler] = []
    connection = serve(handlers)
    connection.http.receive(request(1))
    body = b"\x00" + size.to_bytes(4, "big") + bytes(size)
    started = time.process_time()

    for at in range(0, len(body), frame):
        sent = data(1, body[at : at + frame])
        for start in range(0, len(sent), piece):
            connection.http.receive(sent[start : start + piece])

    assert time.process_time() - started < CPU_LIMIT_S
    assert handlers[0].sizes == [size]


@pytest.mark.slow
def test_large_answer_through_a_small_window_costs_in_proportion_to_its_size():
    """Whatever the peer's frame size, what waits is not copied with each update."""
    connection, _ = connect({4: 0, 5: 2**24 - 1})
    connection.receive(request(1, end=True) + f.window_update(0, 2**30))
    connection.send_data(1, bytes(16 * MB))
    started, got = time.process_time(), 0

    while got < 16 * MB:
        connection.receive(f.window_update(1, 1024))
        got += len(connection.output()) - f.HEADER_BYTES

    assert time.process_time() - started < CPU_LIMIT_S


@pytest.mark.slow
def test_updates_do_not_visit_streams_that_wait_for_their_own_window():
    """5,000 streams whose clients do not read cost the others nothing."""
    connection, _ = connect({4: 0})
    for stream in range(1, 10_001, 2):
        connection.receive(request(stream, end=True))
        connection.send_data(stream, b"x")
    started = time.process_time()

    for _ in range(5_000):
        connection.receive(f.window_update(0, 1))

    assert time.process_time() - started < 1.0


def test_message_under_way_is_held_once():
    """No more than a fifth above what has come, and no space for what may never come."""
    connection = serve([])
    connection.http.receive(request(1))
    sent = data(1, bytes(16_384))
    tracemalloc.start()
    try:
        connection.http.receive(data(1, b"\x00" + (2**29).to_bytes(4, "big")))
        announced, _ = tracemalloc.get_traced_memory()
        for _ in range(8 * MB // 16_384):
            connection.http.receive(sent)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert announced < 100_000
    assert 8 * MB < held < 1.2 * 8 * MB


@pytest.mark.slow
def test_streams_that_are_over_leave_no_memory():
    """Nothing is kept of a thousand calls, however they end."""
    connection = serve(weakref.WeakSet())

    def calls(first: int) -> None:
        for stream in range(first, first + 2000, 8):
            connection.http.receive(request(stream) + data(stream, b"\0\0\0\0\1x", end=True))
            connection.http.receive(request(stream + 2) + f.rst_stream(stream + 2, 8))
            connection.http.receive(request(stream + 4) + data(stream + 4, b"\1\0\0\0\1"))
            connection.http.receive(request(stream + 6, block=b"\x82"))
            connection.http.output()

    calls(1)
    tracemalloc.start()
    try:
        calls(2001)
        before, _ = tracemalloc.get_traced_memory()
        calls(4001)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # The smallest object is 28 bytes, so a thousand of them show; other threads of the process make some noise.
    assert after - before < 20_000
    assert len(connection) == 0


@pytest.mark.slow
def test_idle_stream_is_small():
    """Two KB at most, handler included."""
    handlers: list[Handler] = []
    connection = serve(handlers)
    connection.http.receive(request(1) + data(1, b"\0\0\0\0\1x"))
    tracemalloc.start()
    try:
        for stream in range(3, 1003, 2):
            connection.http.receive(request(stream) + data(stream, b"\0\0\0\0\1x"))
            connection.http.output()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held / 500 < 2000


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "reset", "finish", "lost", "fault"])
def test_handlers_need_no_garbage_collection(how):
    """Call and handler know each other only while the call runs: no cycles for gc to find."""
    handlers: weakref.WeakSet[Handler] = weakref.WeakSet()
    connection = serve(handlers)
    gc.collect()
    gc.disable()
    try:
        for stream in range(1, 21, 2):
            connection.http.receive(request(stream) + data(stream, b"\0\0\0\0\1x\0\0"))
        assert len(handlers) == 10

        match how:
            case "end":
                for stream in range(1, 21, 2):
                    connection.http.receive(data(stream, b"\0\0\0", end=True))
            case "reset":
                for stream in range(1, 21, 2):
                    connection.http.receive(f.rst_stream(stream, 8))
            case "finish":
                connection.abort_all()
            case "lost":
                connection.lost()
            case "fault":
                connection.http.receive(f.window_update(0, 0))
        connection.http.output()

        assert len(handlers) == 0
    finally:
        gc.enable()
