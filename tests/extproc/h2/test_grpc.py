"""gRPC over one connection: messages, handlers and their faults, statuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import pytest

from extproc.h2 import frames as f
from extproc.h2.frames import ErrorCode
from extproc.h2.grpc import MAX_STATUS_MESSAGE_CHARS, Call, GrpcConnection, Status
from tests.extproc.h2.peer import (
    HEADERS,
    METHOD,
    Answer,
    answers,
    data,
    encode,
    grpc_message,
    hello,
    names,
    request,
)

MAX_MESSAGE_BYTES = 1000


@dataclasses.dataclass(slots=True)
class Service:
    """Makes handlers that do what the test says, and keeps what they are told."""

    seen: list[Any] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    faults: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    flushed: int = 0
    on_open: Callable[[Call], None] = lambda _call: None
    on_message: Callable[[Call, bytes], None] = lambda _call, _message: None
    on_end: Callable[[Call], None] = lambda call: call.finish()
    on_close: Callable[[Call], None] = lambda _call: None

    def open(self, call: Call) -> Handler:
        self.calls.append(call)
        self.on_open(call)
        return Handler(self, call)

    def report(self, path: str, error: Exception) -> None:
        self.faults.append((path, type(error).__name__))

    def flush(self) -> None:
        self.flushed += 1

    def connect(self, settings: dict[int, int] | None = None) -> GrpcConnection:
        connection = GrpcConnection(
            {METHOD: self.open},
            max_message_bytes=MAX_MESSAGE_BYTES,
            report=self.report,
            flush=self.flush,
        )
        connection.http.receive(hello(settings))
        connection.http.output()
        return connection


@dataclasses.dataclass(slots=True)
class Handler:
    service: Service
    call: Call

    def on_message(self, message: bytes) -> None:
        self.service.seen.append(message)
        self.service.on_message(self.call, message)

    def on_end(self) -> None:
        self.service.seen.append("end")
        self.service.on_end(self.call)

    def on_close(self) -> None:
        self.service.seen.append("close")
        self.service.on_close(self.call)


def ask(connection: GrpcConnection, stream: int, *pieces: bytes, end: bool = True) -> Answer:
    """Send a request with these DATA frames; return the answer so far."""
    connection.http.receive(request(stream))
    for number, piece in enumerate(pieces):
        connection.http.receive(data(stream, piece, end=end and number == len(pieces) - 1))
    if end and not pieces:
        connection.http.receive(data(stream, b"", end=True))
    return answers(connection.http.output()).get(stream, Answer())


def fail(*_: object) -> None:
    raise ZeroDivisionError("secret detail")


# Messages.


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 1000])
def test_messages_are_cut_out_of_any_frames(size):
    """Several in one frame, one over several, the prefix split, empty ones."""
    messages = [b"a", b"", b"bc" * 300, b"", b"d"]
    sent = b"".join(grpc_message(message) for message in messages)
    service = Service()

    answer = ask(service.connect(), 1, *(sent[at : at + size] for at in range(0, len(sent), size)))

    assert service.seen == [*messages, "end", "close"]
    assert answer.status == "0"


def test_answers_are_messages_behind_headers():
    """One header block, the messages, the trailers."""
    service = Service(on_message=lambda call, message: call.send(message * 2))

    answer = ask(service.connect(), 1, grpc_message(b"ab") + grpc_message(b""))

    assert answer.headers == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "0",
    }
    assert answer.messages == [b"abab", b""]
    assert answer.ended


def test_call_without_answers_has_one_header_block():
    """Trailers-Only, in the words of the specification."""
    connection = Service().connect()

    connection.http.receive(request(1, end=True))

    output = connection.http.output()
    assert names(output) == ["HEADERS 1 END_STREAM"]
    assert answers(output)[1].headers == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "0",
    }


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (grpc_message(b"x", compressed=1), "12", "compressed messages are not supported"),
        (grpc_message(bytes(1001)), "8", "message of 1001 bytes is larger than 1000"),
        (b"\x00\xff\xff\xff\xff", "8", "message of 4294967295 bytes is larger than 1000"),
    ],
    ids=["compressed", "too large", "far too large"],
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "bytes"])
def test_message_that_is_not_taken_ends_its_call(sent, status, message, split):
    """As soon as its prefix is there; what came before counts, what follows is dropped."""
    service = Service()
    connection = service.connect()
    before = grpc_message(b"good")
    pieces = [bytes((byte,)) for byte in before + sent] if split else [before + sent]

    answer = ask(connection, 1, *pieces, grpc_message(b"more"), end=False)

    assert (answer.status, answer.headers["grpc-message"]) == (status, message)
    assert service.seen == [b"good", "close"]
    assert len(connection) == 0


def test_largest_message_is_taken():
    """Its limit is the last size that fits."""
    service = Service()

    ask(service.connect(), 1, grpc_message(bytes(1000)))

    assert service.seen == [bytes(1000), "end", "close"]


@pytest.mark.parametrize("rest", [b"\x00", b"\x00\x00\x00\x00\x05", grpc_message(b"abc")[:-1]])
def test_message_that_is_cut_off_is_not_the_end(rest):
    """The call fails; to Envoy OK would mean "continue without me"."""
    service = Service()

    answer = ask(service.connect(), 1, grpc_message(b"good") + rest)

    assert (answer.status, answer.headers["grpc-message"]) == ("13", "the last message is cut off")
    assert service.seen == [b"good", "close"]


def test_unknown_method_is_unimplemented():
    """Whatever its name has in it; nothing is kept of the call."""
    connection = Service().connect()
    path = "/nobody/é%" + "x" * 500
    block = encode([(":method", "POST"), (":path", path)])

    connection.http.receive(request(1, block=block) + data(1, b"ignored", end=True))
    connection.http.receive(request(3, block=encode([("a", "b")]), end=True))

    found = answers(connection.http.output())
    assert [found[stream].status for stream in (1, 3)] == ["12", "12"]
    # RFC 9113 knows bytes only: each is shown as the letter of its number.
    shown = path.encode().decode("latin-1")[:100]
    assert unquote(found[1].headers["grpc-message"]) == f"unknown method {shown}"
    assert len(connection) == 0
    assert connection.http.open_streams() == []


# Handlers.


@pytest.mark.parametrize("where", ["on_open", "on_message", "on_end"])
def test_handler_that_fails_ends_its_call_with_internal(where):
    """Never with OK, without its text; the other calls of the connection live."""
    service = Service()
    connection = service.connect()
    connection.http.receive(request(1) + data(1, grpc_message(b"a")))
    connection.http.output()
    setattr(service, where, fail)

    answer = ask(connection, 3, grpc_message(b"b"))

    assert (answer.status, answer.headers["grpc-message"]) == ("13", "internal error")
    assert service.faults == [(METHOD, "ZeroDivisionError")]
    assert service.seen.count("close") == (0 if where == "on_open" else 1)
    assert len(connection) == 1
    setattr(service, where, Service.__dataclass_fields__[where].default)
    service.on_end = lambda call: call.finish()
    connection.http.receive(data(1, grpc_message(b"c"), end=True))
    assert answers(connection.http.output())[1].status == "0"
    assert service.seen[-3:] == [b"c", "end", "close"]


@pytest.mark.parametrize("how", ["finish", "reset", "lost", "fault"])
def test_handler_that_fails_to_close_takes_nobody_along(how):
    """All are told, however the calls end; their answers are sent."""
    service = Service(on_close=fail)
    connection = service.connect()
    connection.http.receive(request(1) + request(3))

    match how:
        case "finish":
            connection.http.receive(data(1, b"", end=True) + data(3, b"", end=True))
            found = answers(connection.http.output())
            assert [found[stream].status for stream in (1, 3)] == ["0", "0"]
        case "reset":
            for stream in (1, 3):
                connection.http.receive(f.rst_stream(stream, ErrorCode.CANCEL))
        case "lost":
            connection.lost()
        case "fault":
            connection.http.receive(f.window_update(0, 0))

    assert service.seen.count("close") == 2
    assert service.faults == [(METHOD, "ZeroDivisionError")] * 2
    assert len(connection) == 0


def test_failing_after_an_answer_keeps_the_answer():
    """The status follows what was sent."""

    def answer_and_fail(call: Call, message: bytes) -> None:
        call.send(message)
        fail()

    service = Service(on_message=answer_and_fail)

    answer = ask(service.connect(), 1, grpc_message(b"a") + grpc_message(b"b"))

    assert (answer.messages, answer.status) == ([b"a"], "13")
    assert service.seen == [b"a", "close"]


def test_failing_after_the_finish_changes_nothing():
    """The peer has its status; the fault is reported."""

    def finish_and_fail(call: Call) -> None:
        call.finish(Status.UNAVAILABLE, "later")
        fail()

    service = Service(on_end=finish_and_fail)

    answer = ask(service.connect(), 1)

    assert (answer.status, answer.headers["grpc-message"]) == ("14", "later")
    assert service.faults == [(METHOD, "ZeroDivisionError")]
    assert service.seen == ["end", "close"]


@pytest.mark.parametrize("failing", [False, True], ids=["well", "with a fault"])
def test_factory_may_finish_its_call(failing):
    """The handler that it returns, if it does, is closed at once and told nothing else."""

    def refuse(call: Call) -> None:
        call.finish(Status.UNAVAILABLE, "not now")
        if failing:
            fail()

    service = Service(on_open=refuse)
    connection = service.connect()

    answer = ask(connection, 1, grpc_message(b"a"))

    assert (answer.status, answer.headers["grpc-message"]) == ("14", "not now")
    assert service.seen == ([] if failing else ["close"])
    assert len(connection) == 0


def test_finish_while_messages_are_handed_over_drops_the_rest():
    """Those of the same frame too; the peer is told to stop."""
    service = Service(on_message=lambda call, _message: call.finish(Status.INVALID_ARGUMENT, "no"))
    connection = service.connect()

    connection.http.receive(request(1) + data(1, grpc_message(b"a") + grpc_message(b"b")))
    connection.http.receive(data(1, grpc_message(b"c"), end=True))

    output = connection.http.output()
    assert names(output) == ["HEADERS 1 END_STREAM", "RSTSTREAM 1"]
    assert answers(output)[1].status == "3"
    assert service.seen == [b"a", "close"]


@pytest.mark.parametrize("window", [65_535, 0], ids=["open window", "no window"])
def test_nothing_is_sent_after_the_finish(window):
    """A second status and late messages are dropped, waiting or not."""
    service = Service()
    connection = service.connect({4: window})
    connection.http.receive(request(1))
    call = service.calls[0]

    call.send(b"a")
    call.finish()
    call.send(b"b")
    call.finish(Status.INTERNAL, "too late")
    connection.http.receive(data(1, grpc_message(b"c"), end=True) + f.settings({4: 1000}))

    answer = answers(connection.http.output())[1]
    assert (answer.messages, answer.status) == ([b"a"], "0")
    assert service.seen == ["close"]
    call.flush()
    assert service.flushed == 1


def test_closing_handler_may_use_its_call():
    """It says nothing any more."""

    def last_words(call: Call) -> None:
        call.send(b"x")
        call.finish(Status.INTERNAL, "x")

    service = Service(on_close=last_words)
    connection = service.connect()
    connection.http.receive(request(1) + f.rst_stream(1, ErrorCode.CANCEL))

    assert connection.http.output() == b""
    assert service.seen == ["close"]


def test_one_handler_may_send_on_another_call():
    """As xDS does when a configuration changes."""
    service = Service()
    service.on_message = lambda _call, message: [call.send(message) for call in service.calls]
    connection = service.connect()
    connection.http.receive(request(1) + request(3))

    connection.http.receive(data(3, grpc_message(b"news")))

    found = answers(connection.http.output())
    assert [found[stream].messages for stream in (1, 3)] == [[b"news"]] * 2


def test_stop_ends_every_call_with_unavailable():
    """Each is closed once."""
    service = Service()
    connection = service.connect()
    connection.http.receive(request(1) + request(3) + data(3, grpc_message(b"a")))

    connection.abort_all()

    found = answers(connection.http.output())
    assert [found[stream].status for stream in (1, 3)] == ["14", "14"]
    assert service.seen == [b"a", "close", "close"]
    assert len(connection) == 0


# Statuses.


@pytest.mark.parametrize(
    ("message", "encoded"),
    [
        ("plain text, as it is: !~/[]{}'\"", "plain text, as it is: !~/[]{}'\""),
        ("100%", "100%25"),
        ("a\r\nb\tc\x7f\x00", "a%0D%0Ab%09c%7F%00"),
        ("é", "%C3%A9"),
        ("😀", "%F0%9F%98%80"),
        ("\ud800", "?"),
    ],
)
def test_status_message_is_percent_encoded(message, encoded):
    """0x20 to 0x7E except the percent sign go as they are; no text can break the answer."""
    service = Service(on_end=lambda call: call.finish(Status.INTERNAL, message))

    answer = ask(service.connect(), 1)

    assert answer.headers["grpc-message"] == encoded


@pytest.mark.parametrize("letter", ["x", "é", "😀", "\x00"])
@pytest.mark.parametrize("size", [1, 41, 42, 126, 127, 128, 254, 255, 511, 512, 513, 100_000])
def test_status_message_of_any_length_can_be_read(letter, size):
    """It is cut; the lengths of HPACK have more than one byte from 127 on."""
    service = Service(on_end=lambda call: call.finish(Status.INTERNAL, letter * size))

    answer = ask(service.connect(), 1)

    expected = letter * min(size, MAX_STATUS_MESSAGE_CHARS)
    assert unquote(answer.headers["grpc-message"]) == expected
    assert answer.status == "13"


def test_answer_fits_the_smallest_frame():
    """The longest status goes in one HEADERS frame of any peer."""
    service = Service(on_end=lambda call: call.finish(Status.INTERNAL, "😀" * 1000))
    connection = service.connect()

    connection.http.receive(request(1, end=True))

    assert len(connection.http.output()) <= 9 + f.DEFAULT_MAX_FRAME


def test_path_is_found_among_any_headers():
    """Where it stands does not matter."""
    service = Service()
    connection = service.connect()
    block = encode([*reversed(HEADERS), ("x-more", "1")])

    connection.http.receive(request(1, block=block, end=True))

    assert answers(connection.http.output())[1].status == "0"
