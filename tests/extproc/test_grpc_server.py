"""The gRPC server on real sockets: before grpcio's clients, before ``h2``, before rude peers.

The server runs on a loop of its own in a thread, asyncio's or uvloop's; the clients block with limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import random
import socket
import struct
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
import structlog
import uvloop

from extproc import grpc_server
from extproc.address import Address
from extproc.grpc_server import GrpcServer
from extproc.h2 import frames as f
from extproc.h2.connection import ServerConnection
from extproc.h2.grpc import Call, Method, Status
from extproc.metrics import Metrics
from extproc.registry import Registry
from extproc.router import Router
from extproc.service import PROCESS, ExtProcService
from tests.extproc.envoy_messages import BUFFERED, announce, request_headers
from tests.extproc.h2.peer import BLOCK, data, goaway, grpc_message, hello, names, read, request
from tests.extproc.recorder import Recorder

LIMIT_S = 30
MAX_MESSAGE_BYTES = 2**27
MB = 2**20
ECHO, SUM, FAIL, HANG, FAULT = (
    f"/test.Service/{name}" for name in ("Echo", "Sum", "Fail", "Hang", "Fault")
)
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

pytestmark = pytest.mark.timeout(120)


class Handler:
    """What all methods of the tests have in common; ``kind`` says what this one does."""

    def __init__(self, call: Call, service: Service, kind: str) -> None:
        self.call = call
        self.service = service
        self.kind = kind
        self.total = 0
        service.alive.add(self)

    def on_message(self, message: bytes) -> None:
        self.total += len(message)
        match self.kind:
            case "echo":
                self.call.send(message)
            case "fail":
                self.call.finish(Status.RESOURCE_EXHAUSTED, message.decode())
            case "fault":
                raise ZeroDivisionError("secret detail")
            case "hang":
                self.service.taken.put(message)

    def on_end(self) -> None:
        if self.kind == "sum":
            self.call.send(str(self.total).encode())
        if self.kind != "hang":
            self.call.finish()

    def on_close(self) -> None:
        self.service.closed.put(self.kind)


class Service:
    """The methods."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Handler] = weakref.WeakSet()
        self.closed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.taken: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def method(self, kind: str) -> Method:
        return lambda call: Handler(call, self, kind)

    def methods(self) -> dict[str, Method]:
        paths = {"echo": ECHO, "sum": SUM, "fail": FAIL, "hang": HANG, "fault": FAULT}
        return {path: self.method(kind) for kind, path in paths.items()}

    def until_closed(self, count: int) -> list[str]:
        """Wait for *count* ends of calls; there are no more."""
        kinds = [self.closed.get(timeout=LIMIT_S) for _ in range(count)]
        assert self.closed.empty()
        return kinds


class Running:
    """A server in a thread."""

    def __init__(self, methods: dict[str, Method], address: Address, *, uv: bool) -> None:
        self.address = address
        self.faults: list[dict[str, Any]] = []
        self.server = GrpcServer(methods, max_message_bytes=MAX_MESSAGE_BYTES)
        self._loop = uvloop.new_event_loop() if uv else asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _loop, context: self.faults.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.call(self.server.start(address))

    @property
    def target(self) -> str:
        """Its name in gRPC."""
        return str(self.address)

    def call(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Run *what* on the server's loop."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(LIMIT_S)

    def do(self, what: Callable[[], Any]) -> Any:
        """Call *what* on the server's loop."""

        async def wrapped() -> Any:
            return what()

        return self.call(wrapped())

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait until *condition* holds, asked between whatever the server does."""

        async def poll() -> None:
            async with asyncio.timeout(LIMIT_S):
                while not condition():  # noqa: ASYNC110 - the server tells nobody of a socket's end
                    await asyncio.sleep(0)

        self.call(poll())

    def close(self) -> None:
        try:
            self.call(self.server.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LIMIT_S)
            self._loop.close()

    def socket(self) -> socket.socket:
        """Return a socket that is connected to it."""
        if self.address.path:
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(LIMIT_S)
            client.connect(self.address.path)
        else:
            client = socket.socket()
            client.settimeout(LIMIT_S)
            client.connect((self.address.host, self.address.port))
        return client


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


KINDS = {"uvloop, unix": (True, True), "asyncio, unix": (False, True), "uvloop, tcp": (True, False)}


Logs = list[Any]


@pytest.fixture(autouse=True)
def logs() -> Iterator[Logs]:
    """Keep what is logged; a traceback for people would take longer than the test."""
    with structlog.testing.capture_logs() as entries:
        yield entries


@pytest.fixture
def service() -> Service:
    return Service()


@contextlib.contextmanager
def run(methods: dict[str, Method], directory: Path, *, uv: bool, unix: bool) -> Iterator[Running]:
    """Run a server for a while; nothing may have gone wrong on its loop."""
    address = Address(path=str(directory / "s")) if unix else Address("127.0.0.1", free_port())
    running = Running(methods, address, uv=uv)
    try:
        yield running
    finally:
        running.close()
    assert running.faults == []
    assert running.server.peers == set()


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def any_server(
    request: pytest.FixtureRequest, service: Service, tmp_path: Path
) -> Iterator[Running]:
    """Serve on each kind of loop and socket."""
    uv, unix = request.param
    with run(service.methods(), tmp_path, uv=uv, unix=unix) as running:
        yield running


@pytest.fixture
def server(service: Service, tmp_path: Path) -> Iterator[Running]:
    """Serve as in production: uvloop, a Unix socket."""
    with run(service.methods(), tmp_path, uv=True, unix=True) as running:
        yield running


@contextlib.contextmanager
def channel(running: Running, *options: tuple[str, Any]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(running.target, options=[*OPTIONS, *options]) as opened:
        yield opened


def ask(opened: grpc.Channel, path: str, *messages: bytes, timeout: float = LIMIT_S) -> list[bytes]:
    return list(opened.stream_stream(path)(iter(messages), timeout=timeout))


def failure(
    opened: grpc.Channel, path: str, *messages: bytes, timeout: float = LIMIT_S
) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        ask(opened, path, *messages, timeout=timeout)
    return caught.value.code().name, caught.value.details()


class Script:
    """The requests of a call, given one at a time."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.send = self._messages.put

    def __iter__(self) -> Script:
        return self

    def __next__(self) -> bytes:
        message = self._messages.get(timeout=LIMIT_S)
        if message is None:
            raise StopIteration
        return message

    def end(self) -> None:
        self._messages.put(None)


# grpcio's clients.


def test_messages_are_echoed_in_order(any_server, service):
    """Both ways at once, one after the other, empty ones too."""
    script = Script()
    with channel(any_server) as opened:
        answers = opened.stream_stream(ECHO)(script, timeout=LIMIT_S)
        for message in (b"a", b"", b"c" * 100_000):
            script.send(message)
            assert next(answers) == message
        script.end()
        assert list(answers) == []
        assert answers.code() is grpc.StatusCode.OK

    assert service.until_closed(1) == ["echo"]


def test_client_may_stream_and_be_answered_once(any_server, service):
    """A thousand messages, one sum."""
    with channel(any_server) as opened:
        answer = opened.stream_unary(SUM)((bytes(100) for _ in range(1000)), timeout=LIMIT_S)

    assert answer == b"100000"
    assert service.until_closed(1) == ["sum"]


@pytest.mark.parametrize("text", ["plain", '100% "quoted" \\ \n\t', "é 😀", "x" * 400])
def test_error_arrives_with_its_details(server, text):
    """Code and text, any letters."""
    with channel(server) as opened:
        assert failure(opened, FAIL, text.encode()) == ("RESOURCE_EXHAUSTED", text)


@pytest.mark.slow
def test_faults_are_errors_and_the_connection_lives(any_server, service):
    """Unknown methods, broken handlers, messages that are too large; then all is well."""
    with channel(any_server) as opened:
        assert failure(opened, "/test.Service/Nobody", b"x")[0] == "UNIMPLEMENTED"
        assert failure(opened, FAULT, b"x") == ("INTERNAL", "internal error")
        assert failure(opened, ECHO, bytes(MAX_MESSAGE_BYTES + 1))[0] == "RESOURCE_EXHAUSTED"
        assert ask(opened, ECHO, b"x") == [b"x"]

    assert service.until_closed(3) == ["fault", "echo", "echo"]


def test_compressed_messages_are_refused(server):
    """None are offered in the headers, none are taken."""
    with channel(server, ("grpc.default_compression_algorithm", 2)) as opened:
        code, text = failure(opened, ECHO, b"x" * 10_000)

    assert (code, text) == ("UNIMPLEMENTED", "compressed messages are not supported")


def test_deadline_in_the_middle_releases_the_handler(any_server, service):
    """The client resets the stream; the connection lives."""
    with channel(any_server) as opened:
        assert failure(opened, HANG, b"x", timeout=0.1)[0] == "DEADLINE_EXCEEDED"
        assert service.until_closed(1) == ["hang"]
        assert ask(opened, ECHO, b"x") == [b"x"]


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_client_that_leaves_in_the_middle_releases_the_handlers(any_server, service, how):
    """By a reset of each stream or with the connection."""
    with channel(any_server) as opened:
        scripts = [Script() for _ in range(5)]
        calls = [opened.stream_stream(HANG)(script, timeout=LIMIT_S) for script in scripts]
        for script in scripts:
            script.send(b"x")
            service.taken.get(timeout=LIMIT_S)

        if how == "cancel":
            for call in calls:
                call.cancel()
        else:
            opened.close()
        assert service.until_closed(5) == ["hang"] * 5
        for script in scripts:
            script.end()
    any_server.until(lambda: not service.alive)


@pytest.mark.parametrize(
    "size", [5 * MB, pytest.param(64 * MB, marks=pytest.mark.slow)], ids=["5 MB", "64 MB"]
)
@pytest.mark.slow
def test_large_messages_go_both_ways(any_server, size):
    """Whole, and in a time that grows with their size."""
    message = random.Random(4).randbytes(size)
    with channel(any_server) as opened:
        (answer,) = ask(opened, ECHO, message)
        assert answer == message
        assert ask(opened, ECHO, b"x", b"y") == [b"x", b"y"]


@pytest.mark.slow
@pytest.mark.parametrize("uv", [True, False], ids=["uvloop", "asyncio"])
async def test_1000_calls_at_once_do_not_mix(service, tmp_path, uv):
    """All are open at the same time on one connection, each gets its own answers."""
    with run(service.methods(), tmp_path, uv=uv, unix=True) as running:
        async with (
            asyncio.timeout(LIMIT_S),
            grpc.aio.insecure_channel(running.target, options=OPTIONS) as opened,
        ):
            calls = [opened.stream_stream(ECHO)(timeout=LIMIT_S) for _ in range(1000)]
            for number, call in enumerate(calls):
                await call.write(b"%d" % number)
            for number, call in enumerate(calls):
                assert await call.read() == b"%d" % number
            assert len(service.alive) == 1000
            assert len(running.server.peers) == 1
            for call in calls:
                await call.done_writing()
            codes = {await call.code() for call in calls}

        assert codes == {grpc.StatusCode.OK}
        assert service.until_closed(1000) == ["echo"] * 1000
        running.until(lambda: not service.alive)


@pytest.mark.slow
async def test_clients_that_come_and_go_at_random_leave_nothing(service, tmp_path, logs):
    """400 calls that end well, are cancelled, time out or fail, in any order."""
    rng = random.Random(5)

    async def one(opened: grpc.aio.Channel, how: int) -> None:
        path = [ECHO, HANG, HANG, FAULT][how]
        call = opened.stream_stream(path)(timeout=0.05 if how == 2 else LIMIT_S)
        with contextlib.suppress(
            grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError
        ):
            await call.write(bytes(rng.randrange(40_000)))
            if how == 1:
                call.cancel()
            elif how == 0:
                await call.read()
                await call.done_writing()
            await call.code()

    with run(service.methods(), tmp_path, uv=True, unix=True) as running:
        async with (
            asyncio.timeout(LIMIT_S),
            grpc.aio.insecure_channel(running.target, options=OPTIONS) as opened,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(400):
                tasks.create_task(one(opened, rng.randrange(4)))
        logs.clear()  # their tracebacks refer to handlers
        running.until(lambda: not running.server.peers and not service.alive)


@pytest.mark.slow
def test_keepalive_pings_are_answered(server, monkeypatch):
    """A client that pings an idle connection keeps it."""
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()
    original = ServerConnection._on_ping

    def noted(self: ServerConnection, flags: int, stream: int, payload: bytes) -> None:
        seen.put(flags)
        original(self, flags, stream, payload)

    monkeypatch.setattr(ServerConnection, "_on_ping", noted)
    options = (
        ("grpc.keepalive_time_ms", 50),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    with channel(server, *options) as opened:
        assert ask(opened, ECHO, b"x") == [b"x"]
        for _ in range(4):
            assert seen.get(timeout=LIMIT_S) == 0
        (peer,) = server.server.peers
        assert ask(opened, ECHO, b"x") == [b"x"]
        assert server.server.peers == {peer}


# The end of the server.


def test_drain_lets_calls_finish_and_takes_no_new_ones(any_server, service):
    """The open call goes on as long as it wants."""
    script = Script()
    with channel(any_server, ("grpc.enable_retries", 0)) as opened:
        answers = opened.stream_stream(ECHO)(script, timeout=LIMIT_S)
        script.send(b"before")
        assert next(answers) == b"before"

        any_server.do(any_server.server.drain)

        assert failure(opened, ECHO, b"new")[0] == "UNAVAILABLE"
        script.send(b"after")
        assert next(answers) == b"after"
        script.end()
        assert list(answers) == []
        assert answers.code() is grpc.StatusCode.OK
    assert service.until_closed(1) == ["echo"]


def test_stop_ends_calls_with_unavailable(any_server, service):
    """At once, with a reason; each handler is closed."""
    scripts = [Script() for _ in range(3)]
    with channel(any_server, ("grpc.enable_retries", 0)) as opened:
        calls = [opened.stream_stream(HANG)(script, timeout=LIMIT_S) for script in scripts]
        for script in scripts:
            script.send(b"x")
            service.taken.get(timeout=LIMIT_S)

        any_server.call(any_server.server.stop())

        for call, script in zip(calls, scripts, strict=True):
            with pytest.raises(grpc.RpcError):
                next(call)
            assert (call.code().name, call.details()) == ("UNAVAILABLE", "the service stops")
            script.end()
    assert service.until_closed(3) == ["hang"] * 3


@pytest.mark.parametrize("uv", [True, False], ids=["uvloop", "asyncio"])
def test_peer_that_does_not_read_is_cut_off_at_the_end(service, tmp_path, monkeypatch, logs, uv):
    """The server's end does not depend on it, and no socket is left behind."""
    monkeypatch.setattr(grpc_server, "CLOSE_TIMEOUT_S", 0.05)
    with run(service.methods(), tmp_path, uv=uv, unix=True) as running, running.socket() as client:
        client.sendall(
            hello({4: 2**30}) + f.window_update(0, 2**30) + request(1, block=echo_block())
        )
        message = grpc_message(bytes(8 * MB))
        for start in range(0, len(message), MB):
            client.sendall(data(1, message[start : start + MB]))
        running.until(lambda: buffered(running) > 0)

        running.call(running.server.stop())

        assert running.server.peers == set()
    assert [entry["event"] for entry in logs] == ["connections cut off at the end"]
    assert service.until_closed(1) == ["echo"]


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


async def test_connection_that_was_under_way_during_the_drain_is_told():
    """It was accepted before the listener closed, and is made after."""
    server = GrpcServer({}, max_message_bytes=100)
    server.drain()
    wire = Wire()
    peer = grpc_server._Peer(server)

    peer.connection_made(wire)

    assert goaway(wire.written)[0] == f.ErrorCode.NO_ERROR
    assert not wire.closing
    peer.connection_lost(None)
    assert server.all_gone.is_set()


async def test_connection_that_was_under_way_during_the_stop_is_closed():
    """Nobody waits for it any more."""
    server = GrpcServer({}, max_message_bytes=100)
    await server.stop()
    wire = Wire()
    peer = grpc_server._Peer(server)

    peer.connection_made(wire)

    assert goaway(wire.written)[0] == f.ErrorCode.NO_ERROR
    assert wire.closing
    peer.connection_lost(None)


async def test_output_after_the_end_of_a_connection_goes_nowhere():
    """A handler that is called later by others cannot know."""
    calls: list[Call] = []
    service = Service()

    def method(call: Call) -> Handler:
        calls.append(call)
        return Handler(call, service, "hang")

    server = GrpcServer({HANG: method}, max_message_bytes=100)
    wire, peer = Wire(), grpc_server._Peer(server)
    peer.connection_made(wire)
    peer.data_received(hello() + request(1, block=hang_block()))
    peer.connection_lost(ConnectionResetError())
    before = wire.written

    calls[0].send(b"x")
    calls[0].flush()
    peer.close()
    peer.abort()

    assert wire.written == before
    assert service.until_closed(1) == ["hang"]
    assert peer.grpc.http.output() == b""


# h2 as the client.


def hang_block() -> bytes:
    return path_block(HANG)


def echo_block() -> bytes:
    return path_block(ECHO)


def path_block(path: str) -> bytes:
    old = b"\x14/test.Service/Method"
    assert old in BLOCK
    return BLOCK.replace(old, bytes((len(path),)) + path.encode())


def buffered(running: Running) -> int:
    """Return what waits in the sockets' buffers of the server."""
    return sum(peer._transport.get_write_buffer_size() for peer in running.server.peers)


def test_h2_client_with_small_windows_gets_everything(any_server):
    """It gives 1,000 bytes of window per stream, frame by frame, to three large echoes at once."""
    messages = {stream: random.Random(stream).randbytes(50_000) for stream in (1, 3, 5)}
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    got = dict.fromkeys(messages, b"")
    trailers: dict[int, dict[str, str]] = {}
    with any_server.socket() as sock:
        sock.sendall(client.data_to_send())
        while client.outbound_flow_control_window < MB:  # the server's greeting has not come
            take(client, sock, got, trailers)
        for stream, message in messages.items():
            headers = [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", ECHO),
                (":authority", "x"),
                ("content-type", "application/grpc"),
            ]
            client.send_headers(stream, headers)
            sent = grpc_message(message)
            for start in range(0, len(sent), 8000):
                client.send_data(
                    stream, sent[start : start + 8000], end_stream=start + 8000 >= len(sent)
                )
                sock.sendall(client.data_to_send())
                take(client, sock, got, trailers, block=False)
        while len(trailers) < 3:
            take(client, sock, got, trailers)

    assert got == {stream: grpc_message(message) for stream, message in messages.items()}
    assert {t["grpc-status"] for t in trailers.values()} == {"0"}


def take(
    client: h2.connection.H2Connection,
    sock: socket.socket,
    got: dict[int, bytes],
    trailers: dict[int, dict[str, str]],
    *,
    block: bool = True,
) -> None:
    """Read once; give back what was received at once."""
    sock.setblocking(block)
    if block:
        sock.settimeout(LIMIT_S)
    try:
        received = sock.recv(65_536)
    except BlockingIOError:
        return
    finally:
        sock.settimeout(LIMIT_S)
    assert received
    for event in client.receive_data(received):
        if isinstance(event, h2.events.DataReceived):
            got[event.stream_id] += event.data
            client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            trailers[event.stream_id] = dict(event.headers)
        assert not isinstance(event, h2.events.ConnectionTerminated)
    sock.sendall(client.data_to_send())


def test_slow_reader_is_sent_no_more_than_its_windows(any_server):
    """What it does not take waits with its stream, and the socket's buffer stays bounded."""
    windows, size = 2 * MB, 16 * MB
    with any_server.socket() as sock:
        sock.sendall(hello({4: windows}) + f.window_update(0, windows - f.DEFAULT_WINDOW))
        sock.sendall(request(1, block=echo_block()))
        message = grpc_message(bytes(size))
        for start in range(0, len(message), MB):
            sock.sendall(data(1, message[start : start + MB]))
        sock.sendall(f.frame(f.PING, 0, 0, b"last one"))
        (peer,) = any_server.server.peers
        any_server.until(lambda: peer.grpc.http._streams[1].pending)

        assert buffered(any_server) < windows + 100_000
        assert buffered(any_server) > 0 or not any_server.address.path  # TCP's kernel takes it all
        connection = peer.grpc.http
        assert connection._window == 0
        output = receive_until(sock, b"last one")
        assert (
            sum(len(fr.data) for fr in read(output) if type(fr).__name__ == "DataFrame") == windows
        )


def receive_until(sock: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        piece = sock.recv(MB)
        assert piece, received[-100:]
        received += piece
    return received


# Rude peers.


def test_http1_client_is_told_off(any_server, logs):
    """GOAWAY and the end, with a line in the log."""
    with any_server.socket() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while piece := sock.recv(1000):
            received += piece

    assert goaway(received)[::2] == (f.ErrorCode.PROTOCOL_ERROR, b"not an HTTP/2 client")
    assert [entry["reason"] for entry in logs] == ["not an HTTP/2 client"]


@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_abrupt_disconnect_releases_the_handlers(any_server, service, how):
    """In the middle of a message, by FIN, by a half-close, by RST."""
    with any_server.socket() as sock:
        sock.sendall(hello() + b"".join(request(s, block=hang_block()) for s in (1, 3, 5)))
        for stream in (1, 3, 5):
            sock.sendall(data(stream, grpc_message(b"x") + b"\x00\x00"))
            service.taken.get(timeout=LIMIT_S)
        if how == "half":
            sock.shutdown(socket.SHUT_WR)
        elif how == "reset" and not any_server.address.path:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how != "half":
            sock.close()
        assert service.until_closed(3) == ["hang"] * 3

    any_server.until(lambda: not any_server.server.peers and not service.alive)


@pytest.mark.slow
def test_200_connections_opened_and_dropped_leave_nothing(any_server, service):
    """Some say nothing, some greet, some have a call."""
    rng = random.Random(6)
    socks = [any_server.socket() for _ in range(200)]
    called = 0
    for sock in socks:
        kind = rng.randrange(3)
        if kind:
            sock.sendall(hello())
        if kind == 2:
            called += 1
            sock.sendall(request(1, block=hang_block()) + data(1, grpc_message(b"x")))
            service.taken.get(timeout=LIMIT_S)
    rng.shuffle(socks)

    for sock in socks:
        sock.close()

    assert service.until_closed(called) == ["hang"] * called
    any_server.until(lambda: not any_server.server.peers and not service.alive)
    with channel(any_server) as opened:
        assert ask(opened, ECHO, b"x") == [b"x"]


def test_half_a_frame_waits_and_disturbs_nobody(any_server, service):
    """Others are served meanwhile; the rest of the frame may come at any time."""
    block = echo_block()
    message = data(1, grpc_message(b"late"), end=True)
    with any_server.socket() as sock, channel(any_server) as opened:
        sock.sendall(hello() + request(1, block=block) + message[:7])
        assert ask(opened, ECHO, b"x") == [b"x"]
        sock.sendall(message[7:12])
        assert ask(opened, ECHO, b"y") == [b"y"]

        sock.sendall(message[12:] + f.frame(f.PING, 0, 0, b"last one"))
        output = receive_until(sock, b"last one")

    assert names(output)[-4:] == ["HEADERS 1", "DATA 1", "HEADERS 1 END_STREAM", "PING ACK"]
    assert service.until_closed(3) == ["echo"] * 3


@pytest.mark.slow
def test_one_busy_connection_does_not_starve_the_others(server):
    """A peer that sends without end gets its share of the loop, no more."""
    stop = threading.Event()
    block = path_block(SUM)

    def flood() -> None:
        with server.socket() as sock:
            sock.sendall(hello() + request(1, block=block))
            sent = data(1, grpc_message(bytes(1000))) * 1000
            while not stop.is_set():
                sock.sendall(sent)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        with channel(server) as opened:
            for _ in range(20):
                assert ask(opened, ECHO, b"x", timeout=5) == [b"x"]
    finally:
        stop.set()
        thread.join(LIMIT_S)
    assert not thread.is_alive()


# The service over it.


@dataclasses.dataclass(slots=True)
class Exchanges:
    running: Running
    pool: Any
    metrics: Metrics
    policy: Recorder

    def in_flight(self) -> int:
        return self.running.do(lambda: self.pool.in_flight)


@pytest.fixture
def exchanges(
    registry: Registry, pool: Any, policy: Recorder, tmp_path: Path
) -> Iterator[Exchanges]:
    """Serve ext_proc before three workers."""
    metrics = Metrics("recorder", registry)
    router = Router(registry, random.Random(1))
    service = ExtProcService(router, metrics, ids=random.Random(2), max_body_bytes=1000)
    with run(service.methods(), tmp_path, uv=True, unix=True) as running:
        yield Exchanges(running, pool, metrics, policy)


async def each(count: int, what: Callable[[int], Awaitable[None]]) -> None:
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(what(number))


@contextlib.asynccontextmanager
async def aio_channel(running: Running) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(running.target, options=OPTIONS) as opened:
        yield opened


@pytest.mark.slow
async def test_leases_return_to_zero_however_exchanges_end(exchanges):
    """300 at once: well, cancelled, refused, with a partial message, with their connection."""
    first = announce(request_headers(), BUFFERED).SerializeToString()
    half = data(1, grpc_message(first) + b"\x00")
    opening = hello() + request(1, block=path_block(PROCESS))

    async with aio_channel(exchanges.running) as opened:

        async def one(number: int) -> None:
            call = opened.stream_stream(PROCESS)(timeout=LIMIT_S)
            await call.write(first)
            await call.read()
            with contextlib.suppress(
                grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError
            ):
                match number % 3:
                    case 0:
                        await call.done_writing()
                        assert await call.code() is grpc.StatusCode.OK
                    case 1:
                        call.cancel()
                    case 2:
                        await call.write(b"\xff")
                        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

        await each(300, one)

    socks = []
    for _ in range(20):
        sock = exchanges.running.socket()
        sock.sendall(opening + half)
        socks.append(sock)
    exchanges.running.until(lambda: exchanges.pool.in_flight == 20)
    for number, sock in enumerate(socks):
        if number % 2:
            sock.sendall(data(1, b"", end=True))
            while b"the last message is cut off" not in (piece := sock.recv(MB)):
                assert piece
        sock.close()

    exchanges.running.until(lambda: not exchanges.running.server.peers)
    assert exchanges.in_flight() == 0
    assert len(exchanges.policy.done) == len(exchanges.policy.sent) == 320
    assert [worker.in_flight for worker in exchanges.pool.candidates] == [0, 0, 0]
