"""Pushes Envoy's messages in, compares the messages that come out."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission import Admission, Limits
from extproc.errors import ProtocolError
from extproc.exchange import Exchange
from extproc.ext_proc_answers import MAX_ECHO_BYTES, header_map
from extproc.router import Refused, Routed, Router
from policies.power_of_two import PowerOfTwo
from protos.ext_proc_pb2 import HttpBody, ProcessingMode, ProcessingRequest, ProcessingResponse
from tests.extproc.envoy_messages import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX,
    NONE,
    POST,
    STREAMED,
    announce,
    bare,
    common,
    echoed,
    endpoints,
    kinds,
    parse,
    request_body,
    request_headers,
    response_body,
    set_headers,
    with_subset,
)
from tests.extproc.recorder import Recorder
from tests.fleets import registry_of, remove, reset, say

LIMIT = 1_000_000
ALL = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
PICK_HEADERS = {"x-router-cluster": b"default"}
DUPLEX_HEADERS = {**PICK_HEADERS, "x-gateway-destination-endpoint": ",".join(ALL).encode()}

# request body mode, without waiting for the header answer
HELD_BACK = [(BUFFERED, False), (BUFFERED_PARTIAL, False)]
AT_ONCE = [(NONE, False), (STREAMED, False)]
COLLECTED = [(STREAMED, True), (FULL_DUPLEX, False)]


@pytest.fixture
def exchange(registry):
    return start(registry)


@pytest.fixture
def reading(registry, policy):
    """Begin an exchange whose policy needs the body."""
    policy.needs_body = True
    return start(registry)


def start(registry, *, limit=LIMIT, **options):
    router = Router(registry, random.Random(1), **options)
    return Exchange(router, ids=random.Random(2), max_body_bytes=limit)


def first(mode, message=None, *, without_waiting=False, **options):
    return announce(message or request_headers(), mode, without_waiting=without_waiting, **options)


# --- a policy that needs no body ---------------------------------------------------------------


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + AT_ONCE + COLLECTED)
def test_without_need_of_the_body_the_headers_are_answered_with_the_pick(
    exchange, policy, mode, without_waiting
):
    """In every mode: one answer, with cluster, ordered endpoints and a new route lookup."""
    (answer,) = parse(exchange.receive(first(mode, without_waiting=without_waiting), 5.0))

    assert answer.WhichOneof("response") == "request_headers"
    assert common(answer).clear_route_cache
    expected = DUPLEX_HEADERS if mode == FULL_DUPLEX else PICK_HEADERS
    assert set_headers(common(answer).header_mutation) == expected
    assert endpoints(answer) == ALL
    assert isinstance(exchange.decision, Routed)
    assert [request.body for request in policy.requests] == [None]


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + AT_ONCE + COLLECTED)
def test_only_a_body_that_envoy_would_buffer_is_switched_off(exchange, mode, without_waiting):
    """The mode is overridden in the buffered modes, and in no other."""
    (answer,) = parse(exchange.receive(first(mode, without_waiting=without_waiting), 0.0))

    assert answer.HasField("mode_override") == (mode in {BUFFERED, BUFFERED_PARTIAL})


def test_switching_the_body_off_keeps_the_stream_open_to_the_end(exchange):
    """The override asks for response trailers (they keep the stream open) and nothing else."""
    (answer,) = parse(exchange.receive(first(BUFFERED), 0.0))

    assert answer.mode_override == ProcessingMode(
        request_body_mode=ProcessingMode.NONE,
        response_header_mode=ProcessingMode.SKIP,
        response_trailer_mode=ProcessingMode.SEND,
    )


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + AT_ONCE + COLLECTED)
@pytest.mark.parametrize("needs_body", [False, True])
def test_headers_that_end_the_request_are_decided_at_once(
    registry, policy, mode, without_waiting, needs_body
):
    """No body will come: the policy sees an empty one, and there is no mode to override."""
    policy.needs_body = needs_body
    exchange = start(registry)

    message = first(mode, request_headers(end=True), without_waiting=without_waiting)
    (answer,) = parse(exchange.receive(message, 0.0))

    assert answer.WhichOneof("response") == "request_headers"
    assert endpoints(answer) == ALL
    assert not answer.HasField("mode_override")
    assert [request.body for request in policy.requests] == [b""]


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + AT_ONCE + COLLECTED)
def test_connect_is_decided_at_once(reading, policy, mode, without_waiting):
    """What follows it is no body: nobody waits for it, Envoy neither."""
    message = request_headers({":method": "CONNECT", ":authority": "a:80"})

    (answer,) = parse(reading.receive(first(mode, message, without_waiting=without_waiting), 0.0))

    assert answer.WhichOneof("response") == "request_headers"
    assert answer.HasField("mode_override") == (mode in {BUFFERED, BUFFERED_PARTIAL})
    assert [request.body for request in policy.requests] == [b""]


@pytest.mark.parametrize(("mode", "without_waiting"), [*HELD_BACK, *AT_ONCE, (STREAMED, True)])
def test_a_body_that_comes_after_the_pick_is_waved_through(exchange, mode, without_waiting):
    """Each piece gets a bare "continue"."""
    exchange.receive(first(mode, without_waiting=without_waiting), 0.0)

    answers = [
        *exchange.receive(request_body(b"one", end=False), 0.0),
        *exchange.receive(request_body(b"two"), 0.0),
    ]

    assert parse(answers) == [ProcessingResponse(request_body={})] * 2


def test_full_duplex_after_the_pick_echoes_each_chunk_as_it_comes(exchange):
    """Nothing is held back once the decision is made."""
    exchange.receive(first(FULL_DUPLEX), 0.0)

    begin = parse(exchange.receive(request_body(b"one", end=False), 0.0))
    end = parse(exchange.receive(request_body(b"two"), 0.0))

    assert echoed(begin) == [("request_body", b"one", False)]
    assert echoed(end) == [("request_body", b"two", True)]


# --- a policy that needs the body --------------------------------------------------------------


@pytest.mark.parametrize(("mode", "_without_waiting"), HELD_BACK)
@pytest.mark.parametrize("end", [True, False], ids=["whole", "begin only"])
def test_buffered_body_answer_carries_the_pick(reading, policy, mode, _without_waiting, end):
    """Headers are answered with "continue", the one body message with the pick, no byte echoed."""
    headers = reading.receive(first(mode), 0.0)
    assert parse(headers) == [ProcessingResponse(request_headers={})]
    assert reading.decision is None

    (answer,) = parse(reading.receive(request_body(b'{"model": "m"}', end=end), 1.0))

    assert answer.WhichOneof("response") == "request_body"
    assert common(answer).clear_route_cache
    assert not common(answer).HasField("body_mutation")
    assert set_headers(common(answer).header_mutation) == PICK_HEADERS
    assert endpoints(answer) == ALL
    assert not answer.HasField("mode_override")
    assert [request.body for request in policy.requests] == [b'{"model": "m"}']


def test_streamed_without_waiting_answers_headers_at_the_last_chunk(reading, policy):
    """Nothing is answered until the body is whole; then the pick, then one "continue" a chunk."""
    assert reading.receive(first(STREAMED, without_waiting=True), 0.0) == []
    assert reading.receive(request_body(b"one ", end=False), 0.0) == []
    assert reading.receive(request_body(b"two ", end=False), 0.0) == []

    pick, *rest = parse(reading.receive(request_body(b"three"), 0.0))

    assert pick.WhichOneof("response") == "request_headers"
    assert endpoints(pick) == ALL
    assert rest == [ProcessingResponse(request_body={})] * 3
    assert [request.body for request in policy.requests] == [b"one two three"]


@pytest.mark.parametrize("mode", [NONE, STREAMED])
def test_body_that_cannot_be_had_in_time_is_done_without(reading, policy, mode):
    """Envoy sends no body before the headers are answered: the policy finds an empty one."""
    (answer,) = parse(reading.receive(first(mode), 0.0))

    assert answer.WhichOneof("response") == "request_headers"
    assert endpoints(answer) == ALL
    assert [request.body for request in policy.requests] == [b""]


def test_full_duplex_holds_all_back_until_the_body_is_whole(reading, policy):
    """Then come the headers with the pick, then every byte in order, the end marked once."""
    assert reading.receive(first(FULL_DUPLEX), 0.0) == []
    assert reading.receive(request_body(b"one ", end=False), 0.0) == []

    pick, *chunks = parse(reading.receive(request_body(b"two"), 0.0))

    assert pick.WhichOneof("response") == "request_headers"
    assert set_headers(common(pick).header_mutation) == DUPLEX_HEADERS
    assert endpoints(pick) == ALL
    assert echoed(chunks) == [("request_body", b"one two", True)]
    assert [request.body for request in policy.requests] == [b"one two"]


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + COLLECTED)
def test_empty_last_chunk_makes_an_empty_body(reading, policy, mode, without_waiting):
    """A body of no bytes is a body: the policy gets it, the request is decided."""
    reading.receive(first(mode, without_waiting=without_waiting), 0.0)

    answers = parse(reading.receive(request_body(b""), 0.0))

    assert answers[0].WhichOneof("response") == (
        "request_body" if mode in {BUFFERED, BUFFERED_PARTIAL} else "request_headers"
    )
    assert endpoints(answers[0]) == ALL
    assert [request.body for request in policy.requests] == [b""]


@pytest.mark.parametrize("needs_body", [False, True])
def test_full_duplex_echoes_an_empty_last_chunk(registry, policy, needs_body):
    """The end of the stream stands in it, so it cannot be left out."""
    policy.needs_body = needs_body
    exchange = start(registry)
    exchange.receive(first(FULL_DUPLEX), 0.0)
    before = exchange.receive(request_body(b"all", end=False), 0.0)

    after = exchange.receive(request_body(b""), 0.0)

    chunks = [answer for answer in parse(before + after) if answer.HasField("request_body")]
    assert b"".join(body for _, body, _ in echoed(chunks)) == b"all"
    assert [end for _, _, end in echoed(chunks)].count(True) == 1
    assert echoed(chunks)[-1][2]


@pytest.mark.parametrize("needs_body", [False, True])
@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (MAX_ECHO_BYTES - 1, [MAX_ECHO_BYTES - 1]),
        (MAX_ECHO_BYTES, [MAX_ECHO_BYTES]),
        (MAX_ECHO_BYTES + 1, [MAX_ECHO_BYTES, 1]),
        (2 * MAX_ECHO_BYTES, [MAX_ECHO_BYTES] * 2),
        (200_000, [MAX_ECHO_BYTES] * 3 + [14_000]),
    ],
)
@pytest.mark.parametrize("end", [True, False], ids=["last", "not last"])
def test_full_duplex_cuts_echoes_below_envoys_limit(
    registry, policy, *, needs_body, size, parts, end
):
    """At most 62,000 bytes each, in order, nothing lost; only the very last may end the stream."""
    policy.needs_body = needs_body
    exchange = start(registry)
    body = random.Random(size).randbytes(size)
    answers = exchange.receive(first(FULL_DUPLEX), 0.0)
    answers += exchange.receive(request_body(body, end=end), 0.0)
    if not end:
        answers += exchange.receive(bare("request_trailers"), 0.0)

    chunks = echoed(answer for answer in parse(answers) if answer.HasField("request_body"))

    assert MAX_ECHO_BYTES == 62_000
    assert [len(data) for _, data, _ in chunks] == parts
    assert b"".join(data for _, data, _ in chunks) == body
    assert [last for _, _, last in chunks] == [False] * (len(parts) - 1) + [end]


@pytest.mark.parametrize("without_waiting", [True, False], ids=["streamed", "full duplex"])
def test_trailers_end_a_collected_body(reading, policy, without_waiting):
    """With trailers no chunk says it is the last: the trailers do, and are answered last."""
    mode = STREAMED if without_waiting else FULL_DUPLEX
    reading.receive(first(mode, without_waiting=without_waiting), 0.0)
    reading.receive(request_body(b"one", end=False), 0.0)
    reading.receive(request_body(b"two", end=False), 0.0)

    pick, *chunks, trailers = parse(reading.receive(bare("request_trailers"), 0.0))

    assert pick.WhichOneof("response") == "request_headers"
    assert endpoints(pick) == ALL
    assert trailers == ProcessingResponse(request_trailers={})
    if mode == FULL_DUPLEX:
        assert echoed(chunks) == [("request_body", b"onetwo", False)]
    else:
        assert chunks == [ProcessingResponse(request_body={})] * 2
    assert [request.body for request in policy.requests] == [b"onetwo"]


@pytest.mark.parametrize(("mode", "without_waiting"), COLLECTED)
def test_trailers_without_any_body_decide_with_an_empty_one(reading, policy, mode, without_waiting):
    """A request of headers and trailers alone is routed too."""
    reading.receive(first(mode, without_waiting=without_waiting), 0.0)

    answers = reading.receive(bare("request_trailers"), 0.0)

    assert kinds(answers)[0] == "request_headers"
    assert kinds(answers)[-1] == "request_trailers"
    assert not any(end for _, _, end in echoed(parse(answers)[1:-1]))
    assert [request.body for request in policy.requests] == [b""]


@pytest.mark.parametrize("mode", [BUFFERED, NONE, FULL_DUPLEX])
def test_trailers_after_the_pick_are_waved_through(exchange, mode):
    """They get a bare "continue"."""
    exchange.receive(first(mode), 0.0)

    answers = exchange.receive(bare("request_trailers"), 0.0)

    assert parse(answers) == [ProcessingResponse(request_trailers={})]


@pytest.mark.parametrize(("mode", "without_waiting"), COLLECTED)
@pytest.mark.parametrize(("size", "status"), [(10, None), (11, 413)])
def test_collected_body_above_the_limit_is_refused(
    registry, pool, policy, *, mode, without_waiting, size, status
):
    """One byte more than the limit is 413 before the whole body has come; the limit itself is fine."""
    policy.needs_body = True
    exchange = start(registry, limit=10)
    exchange.receive(first(mode, without_waiting=without_waiting), 0.0)
    exchange.receive(request_body(b"12345", end=False), 0.0)

    answers = exchange.receive(request_body(bytes(size - 5), end=False), 0.0)

    if status is None:
        assert answers == []
    else:
        (answer,) = parse(answers)
        assert answer.immediate_response.status.code == status
        assert json.loads(answer.immediate_response.body)["error"]["code"] == "payload_too_large"
        assert policy.sent == []
        assert pool.in_flight == 0


class Choosy(Recorder):
    """Wants the body only when no header says otherwise."""

    def wants_body(self, headers):
        return "x-session-id" not in headers


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + COLLECTED)
@pytest.mark.parametrize("session", [{"x-session-id": "s"}, {}], ids=["session", "none"])
def test_policy_may_do_without_the_body_of_some_requests(specs, mode, without_waiting, session):
    """The headers decide, request by request: then it is as if no body were ever needed."""
    exchange = start(registry_of(*specs, policy=Choosy(needs_body=True)))

    message = first(mode, request_headers({**POST, **session}), without_waiting=without_waiting)
    answers = exchange.receive(message, 0.0)

    assert (exchange.decision is not None) == bool(session)
    if session:
        assert endpoints(parse(answers)[0]) == ALL


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (b'{"model": "m", "user": "u"}', ("m", "u")),
        (b"{}", ("", "")),
        (b"{", None),
        (b"[]", None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_policy_sees_what_can_be_read_of_the_body(reading, policy, body, content):
    """A body that is no JSON object is no error: the worker judges requests."""
    reading.receive(first(BUFFERED), 0.0)

    reading.receive(request_body(body), 0.0)

    found = policy.requests[0].content
    assert (found and (found.model, found.session)) == content


# --- what the policy sees, what the worker gets ------------------------------------------------


def test_policy_sees_method_path_headers_and_time(pool, policy, exchange):
    """Method and path come out of the pseudo headers; the time is the one given."""
    headers = {":method": "PUT", ":path": "/v1/x?y=1", "x-user": "u"}

    exchange.receive(first(BUFFERED, request_headers(headers)), 12.5)

    (request,) = policy.requests
    assert (request.method, request.path) == ("PUT", "/v1/x?y=1")
    assert request.headers["x-user"] == "u"
    assert policy.sent == [(pool.candidates[0], 12.5)]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("café".encode(), "café"),
        ("café".encode("latin-1"), "café"),
        (b"\xff\x00", "ÿ\x00"),
        (b"", ""),
    ],
    ids=["utf-8", "latin-1", "binary", "empty"],
)
def test_header_values_are_read_from_their_bytes(exchange, policy, raw, text):
    """UTF-8 where it is UTF-8, one character a byte where it is not; never an error."""
    exchange.receive(first(BUFFERED, request_headers({**POST, "x-name": raw})), 0.0)

    assert policy.requests[0].headers["x-name"] == text


def test_header_values_in_the_text_field_are_read_too():
    """Envoys may be configured to send ``value`` instead of ``raw_value``."""
    message = ProcessingRequest()
    message.request_headers.headers.headers.add(key="x-user", value="u")

    assert header_map(message.request_headers.headers) == {"x-user": "u"}


def test_of_a_repeated_header_the_first_value_counts():
    """Later ones do not replace it, an empty first one included."""
    message = request_headers([("x-a", "1"), ("x-a", "2"), ("x-b", ""), ("x-b", "2")])

    assert header_map(message.request_headers.headers) == {"x-a": "1", "x-b": ""}


@pytest.mark.parametrize("needs_body", [False, True])
def test_request_id_of_the_client_is_kept(registry, policy, needs_body):
    """The answer does not touch it."""
    policy.needs_body = needs_body
    exchange = start(registry)

    answers = exchange.receive(first(BUFFERED, request_headers(POST)), 0.0)
    answers += exchange.receive(request_body(b"{}"), 0.0)

    assert "x-request-id" not in set_headers(common(parse(answers)[needs_body]).header_mutation)


@pytest.mark.parametrize("needs_body", [False, True])
@pytest.mark.parametrize("absent", [{}, {"x-request-id": ""}], ids=["none", "empty"])
def test_missing_request_id_is_added(registry, policy, needs_body, absent):
    """32 hexadecimal digits from the generator that was given, also with a body."""
    policy.needs_body = needs_body
    exchange = start(registry)
    headers = {":method": "POST", ":path": "/", **absent}

    answers = exchange.receive(first(BUFFERED, request_headers(headers)), 0.0)
    answers += exchange.receive(request_body(b"{}"), 0.0)

    added = set_headers(common(parse(answers)[needs_body]).header_mutation)["x-request-id"]
    assert added == f"{random.Random(2).getrandbits(128):032x}".encode()
    assert len(added) == 32


def test_two_requests_get_two_ids(registry):
    """The generator is shared by all exchanges, so ids do not repeat."""
    ids = random.Random(7)
    router = Router(registry, random.Random(1))
    exchanges = [Exchange(router, ids=ids, max_body_bytes=LIMIT) for _ in range(2)]

    answers = [parse(e.receive(first(BUFFERED, request_headers({})), 0.0))[0] for e in exchanges]

    found = {set_headers(common(a).header_mutation)["x-request-id"] for a in answers}
    assert len(found) == 2


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"x-job": "j"}, "j"),
        ({"x-task": "t", "x-job": "j"}, "j"),
        ({"x-task": "t"}, "t"),
        ({"x-job": "", "x-task": "t"}, "t"),
        ({"x-request-id": "kept"}, None),
        ({"x-request-id": "kept", "x-task": "t"}, None),
        ({"x-request-id": "other", "x-job": "j"}, "j"),
        ({"x-job": "j" * 256}, "j" * 256),
        ({"x-job": "j" * 257, "x-task": "t"}, "t"),
        ({"x-job": "sch\u00f6n", "x-task": "t"}, "t"),
        ({"x-job": "a\tb", "x-task": "t"}, "t"),
    ],
    ids=str,
)
def test_first_listed_header_that_was_sent_is_the_id(registry, sent, expected):
    """One that is too long or cannot be printed is none; the policy sees what the client sent."""
    router = Router(registry, random.Random(1))
    listed = ("x-job", "x-request-id", "x-task")
    exchange = Exchange(router, ids=random.Random(2), max_body_bytes=LIMIT, id_headers=listed)
    headers = {":path": "/", **sent}

    (answer,) = parse(exchange.receive(first(BUFFERED, request_headers(headers)), 0.0))

    added = set_headers(common(answer).header_mutation).get("x-request-id")
    assert added == (None if expected is None else expected.encode())
    assert exchange.decision.pool.policy.requests[0].headers == headers


def test_header_that_is_not_listed_is_no_id(registry):
    """It is replaced by one that was made."""
    router = Router(registry, random.Random(1))
    exchange = Exchange(router, ids=random.Random(2), max_body_bytes=LIMIT, id_headers=("x-job",))

    (answer,) = parse(exchange.receive(first(BUFFERED), 0.0))

    added = set_headers(common(answer).header_mutation)["x-request-id"]
    assert added == f"{random.Random(2).getrandbits(128):032x}".encode()


def test_set_headers_replace_what_was_there(exchange):
    """A header that a client or a filter put in before does not stay beside ours."""
    (answer,) = parse(exchange.receive(first(FULL_DUPLEX, request_headers({})), 0.0))

    actions = {option.append_action for option in common(answer).header_mutation.set_headers}
    assert actions == {2}, "OVERWRITE_IF_EXISTS_OR_ADD"


# --- models -------------------------------------------------------------------------------------

ALIASES = {"gpt-4": "meta/llama-3"}
ASKED = b'{ "model":"gpt-4", "n": 1.0 }'
RENAMED = b'{ "model":"meta/llama-3", "n": 1.0 }'


def with_length(body):
    return request_headers({**POST, "content-length": str(len(body))})


@pytest.mark.parametrize("mode", [BUFFERED, BUFFERED_PARTIAL])
@pytest.mark.parametrize("length", [True, False], ids=["content-length", "chunked"])
def test_alias_in_a_buffered_body_is_replaced(registry, mode, length):
    """The answer carries pick and new body; its length is told only where the client told one."""
    exchange = start(registry, aliases=ALIASES)
    message = with_length(ASKED) if length else request_headers()
    assert parse(exchange.receive(first(mode, message), 0.0)) == [
        ProcessingResponse(request_headers={})
    ]

    (answer,) = parse(exchange.receive(request_body(ASKED), 1.0))

    assert endpoints(answer) == ALL
    assert common(answer).body_mutation.WhichOneof("mutation") == "body"
    assert common(answer).body_mutation.body == RENAMED
    expected = {"content-length": str(len(RENAMED)).encode()} if length else {}
    assert set_headers(common(answer).header_mutation) == {**PICK_HEADERS, **expected}
    actions = {option.append_action for option in common(answer).header_mutation.set_headers}
    assert actions == {2}, "OVERWRITE_IF_EXISTS_OR_ADD"


@pytest.mark.parametrize("cut", [1, 7, 12])
def test_alias_in_a_full_duplex_body_is_replaced_in_the_echo(registry, cut):
    """Nothing is sent back before the body is whole; then it comes as one, with its end."""
    exchange = start(registry, aliases=ALIASES)
    assert exchange.receive(first(FULL_DUPLEX), 0.0) == []
    assert exchange.receive(request_body(ASKED[:cut], end=False), 0.0) == []

    pick, *chunks = parse(exchange.receive(request_body(ASKED[cut:]), 0.0))

    assert endpoints(pick) == ALL
    assert set_headers(common(pick).header_mutation) == DUPLEX_HEADERS
    assert echoed(chunks) == [("request_body", RENAMED, True)]


def test_large_body_with_an_alias_is_echoed_in_pieces(registry):
    """Below Envoy's limit each, the end marked once; with trailers they end it."""
    filler = b"x" * (2 * MAX_ECHO_BYTES)
    exchange = start(registry, aliases=ALIASES)
    exchange.receive(first(FULL_DUPLEX), 0.0)
    exchange.receive(request_body(b'{"model": "gpt-4", "p": "' + filler + b'"}', end=False), 0.0)

    _, *chunks, trailers = parse(exchange.receive(bare("request_trailers"), 0.0))

    found = echoed(chunks)
    assert trailers == ProcessingResponse(request_trailers={})
    assert b"".join(body for _, body, _ in found) == (
        b'{"model": "meta/llama-3", "p": "' + filler + b'"}'
    )
    assert [len(body) <= MAX_ECHO_BYTES and not end for _, body, end in found] == [True] * 3


def test_alias_in_a_streamed_body_is_replaced_in_its_first_chunk(registry):
    """The first chunk becomes the whole body, the others nothing: each chunk must be answered."""
    exchange = start(registry, aliases=ALIASES)
    exchange.receive(first(STREAMED, without_waiting=True), 0.0)
    exchange.receive(request_body(ASKED[:5], end=False), 0.0)
    exchange.receive(request_body(ASKED[5:9], end=False), 0.0)

    pick, *chunks = parse(exchange.receive(request_body(ASKED[9:]), 0.0))

    assert pick.WhichOneof("response") == "request_headers"
    mutations = [common(chunk).body_mutation for chunk in chunks]
    assert [mutation.WhichOneof("mutation") for mutation in mutations] == [
        "body",
        "clear_body",
        "clear_body",
    ]
    assert mutations[0].body == RENAMED
    assert all(mutation.clear_body for mutation in mutations[1:])


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + COLLECTED)
@pytest.mark.parametrize(
    "body", [b'{"model": "meta/llama-3"}', b'{"prompt": "gpt-4"}', b"gpt-4", b""], ids=repr
)
def test_body_without_an_alias_is_left_as_it_is(registry, mode, without_waiting, body):
    """Not one byte of it is sent back where Envoy has it, and every byte where Envoy has not."""
    exchange = start(registry, aliases=ALIASES)
    exchange.receive(first(mode, with_length(body), without_waiting=without_waiting), 0.0)

    answers = parse(exchange.receive(request_body(body), 0.0))

    if mode == FULL_DUPLEX:
        assert echoed(answers[1:]) == [("request_body", body, True)]
    else:
        assert not any(common(answer).HasField("body_mutation") for answer in answers)
    assert "content-length" not in set_headers(common(answers[0]).header_mutation)


@pytest.mark.parametrize("mode", [NONE, STREAMED])
def test_alias_cannot_be_replaced_where_no_body_is_had(registry, policy, mode):
    """The request is routed all the same, and the worker judges."""
    exchange = start(registry, aliases=ALIASES)

    (answer,) = parse(exchange.receive(first(mode), 0.0))

    assert endpoints(answer) == ALL
    assert [request.body for request in policy.requests] == [b""]


def test_body_too_large_to_be_read_goes_by_its_headers(registry, policy):
    """Also when models differ: reading it would take the time of all other requests."""
    say(registry, "http://10.0.0.1:8000", "llama")
    say(registry, "http://10.0.0.2:8000", "qwen")
    router = Router(registry, random.Random(1))
    exchange = Exchange(router, ids=random.Random(2), max_body_bytes=LIMIT, max_routed_bytes=10)

    (answer,) = parse(exchange.receive(first(BUFFERED, with_length(b"x" * 11)), 0.0))

    assert answer.mode_override.request_body_mode == NONE
    assert [request.body for request in policy.requests] == [None]


@pytest.fixture
def two_models(registry):
    """Let the workers serve two models."""
    say(registry, "http://10.0.0.1:8000", "llama")
    say(registry, "http://10.0.0.2:8000", "qwen")
    say(registry, "http://10.0.0.3:8000", "llama")
    return registry


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + COLLECTED)
def test_body_is_wanted_when_models_differ(two_models, mode, without_waiting):
    """The policy needs none, but the model in it selects the pool, and the pool is the cluster."""
    exchange = start(two_models)

    exchange.receive(first(mode, without_waiting=without_waiting), 0.0)
    assert exchange.decision is None
    (answer, *_) = parse(exchange.receive(request_body(b'{"model": "qwen"}'), 0.0))

    assert endpoints(answer) == ["10.0.0.2:8000"]
    headers = set_headers(common(answer).header_mutation)
    assert headers["x-router-cluster"] == b"qwen"
    assert exchange.decision.pool is two_models.pools[1]


def test_lease_is_on_the_pool_of_the_model(two_models):
    """In flight there until the stream ends, and nowhere else."""
    exchange = start(two_models)
    exchange.receive(first(BUFFERED), 0.0)
    exchange.receive(request_body(b'{"model": "qwen"}'), 0.0)
    assert [pool.in_flight for pool in two_models.pools] == [0, 1]

    exchange.close(1.0)

    assert [pool.in_flight for pool in two_models.pools] == [0, 0]


def test_pool_that_goes_meanwhile_gets_its_lease_back(two_models):
    """The lease is on the pool that there was."""
    exchange = start(two_models)
    exchange.receive(first(BUFFERED), 0.0)
    exchange.receive(request_body(b'{"model": "qwen"}'), 0.0)
    (_, gone) = two_models.pools
    reset(two_models, "http://10.0.0.1:8000")
    assert (two_models.retired, gone.in_flight) == ((gone,), 1)

    exchange.close(1.0)

    assert gone.in_flight == 0


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + COLLECTED)
def test_unknown_model_is_404_and_names_the_known_ones(two_models, policy, mode, without_waiting):
    """As OpenAI answers, so that SDKs raise NotFoundError; nothing is in flight."""
    exchange = start(two_models)
    exchange.receive(first(mode, without_waiting=without_waiting), 0.0)

    (answer,) = parse(exchange.receive(request_body(b'{"model": "gpt-5"}'), 0.0))

    immediate = answer.immediate_response
    assert immediate.status.code == 404
    assert immediate.details == "router_model_not_found"
    assert set_headers(immediate.headers) == {"content-type": b"application/json"}
    assert json.loads(immediate.body) == {
        "error": {
            "message": "The model 'gpt-5' does not exist. Known models: llama, qwen.",
            "type": "invalid_request_error",
            "param": None,
            "code": "model_not_found",
        }
    }
    assert isinstance(exchange.decision, Refused)
    assert policy.sent == []


@pytest.mark.parametrize("path", ["/llama", "/v1/base"])
@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
def test_cluster_is_that_of_the_worker(mode, path):
    """A base path is a cluster of its own beside the pool's."""
    exchange = start(registry_of(f"http://10.0.0.1:8000{path}", "http://10.0.0.2:8000"))

    (answer,) = parse(exchange.receive(first(mode), 0.0))

    headers = set_headers(common(answer).header_mutation)
    assert headers["x-router-cluster"] == f"default~{path[1:]}".encode()
    assert endpoints(answer) == ["10.0.0.1:8000"]


# --- data-parallel ranks ------------------------------------------------------------------------


def ranks_of(answer):
    fields = answer.dynamic_metadata.fields
    assert set(fields) == {"envoy.lb", "vllm.rank"}
    found = fields["vllm.rank"].struct_value.fields
    return {endpoint: value.string_value for endpoint, value in found.items()}


def destinations(answer):
    found = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    return found["x-gateway-destination-endpoint"].string_value.split(",")


@pytest.mark.parametrize("needs_body", [False, True])
@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
def test_rank_of_the_pick_is_a_header_and_that_of_each_endpoint_is_metadata(
    policy, mode, needs_body
):
    """The header for who has no filter for it; the metadata so that a retry names the right rank."""
    policy.needs_body = needs_body
    workers = ["http://10.0.0.1:8000@3", "http://10.0.0.2:8000@1", "http://10.0.0.3:8000@0"]
    exchange = start(registry_of(*workers, policy=policy))

    answers = exchange.receive(first(mode), 0.0)
    answers += exchange.receive(request_body(b"{}"), 0.0)

    (answer,) = [a for a in parse(answers) if a.HasField("dynamic_metadata")]
    (rank,) = [
        option
        for option in common(answer).header_mutation.set_headers
        if option.header.key == "x-data-parallel-rank"
    ]
    assert (rank.header.raw_value, rank.append_action) == (b"3", 2)
    assert destinations(answer) == ALL
    assert ranks_of(answer) == dict(zip(ALL, ["3", "1", "0"], strict=True))


def test_rank_of_the_client_is_replaced():
    """It is overwritten, not doubled: the pick knows the load of the ranks."""
    exchange = start(registry_of("http://10.0.0.1:8000", ranks=2))

    message = request_headers({**POST, "x-data-parallel-rank": "1"})
    (answer,) = parse(exchange.receive(first(BUFFERED, message), 0.0))

    options = [
        (option.header.raw_value, option.append_action)
        for option in common(answer).header_mutation.set_headers
        if option.header.key == "x-data-parallel-rank"
    ]
    assert options == [(b"0", 2)]


def test_worker_without_ranks_gets_no_rank(exchange):
    """Neither header nor metadata: the engine chooses by itself."""
    (answer,) = parse(exchange.receive(first(BUFFERED), 0.0))

    assert "x-data-parallel-rank" not in set_headers(common(answer).header_mutation)
    assert set(answer.dynamic_metadata.fields) == {"envoy.lb"}


def test_leases_are_per_rank():
    """Two requests on one engine are one on each rank, for a policy that looks at load."""
    registry = registry_of("http://10.0.0.1:8000", ranks=2, policy=PowerOfTwo())
    exchanges = [start(registry) for _ in range(2)]

    for exchange in exchanges:
        exchange.receive(first(BUFFERED), 0.0)

    assert [worker.in_flight for worker in registry.pools[0].members] == [1, 1]
    for exchange in exchanges:
        exchange.close(1.0)
    assert [worker.in_flight for worker in registry.pools[0].members] == [0, 0]


# --- subset hint --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (["10.0.0.3:8000", "10.0.0.2:8000"], ["10.0.0.2:8000", "10.0.0.3:8000"]),
        (["10.0.0.2:8000,10.0.0.3:8000"], ["10.0.0.2:8000", "10.0.0.3:8000"]),
        ("10.0.0.2:8000", ["10.0.0.2:8000"]),
        (" 10.0.0.3:8000 , 10.0.0.2:8000,", ["10.0.0.2:8000", "10.0.0.3:8000"]),
        (["10.0.0.2"], ["10.0.0.2:8000"]),
        (["192.168.1.9:8000", "10.0.0.1:8000"], ["10.0.0.1:8000"]),
    ],
    ids=["list", "list with commas", "string", "string with commas", "no port", "one unknown"],
)
@pytest.mark.parametrize("needs_body", [False, True])
def test_subset_hint_limits_the_candidates(registry, policy, hint, expected, needs_body):
    """Picked and fallbacks come from the hint only, in whatever form it is written."""
    policy.needs_body = needs_body
    exchange = start(registry)

    answers = exchange.receive(first(BUFFERED, with_subset(request_headers(), hint)), 0.0)
    answers += exchange.receive(request_body(b"{}"), 0.0)

    assert endpoints(parse(answers)[needs_body]) == expected


@pytest.mark.parametrize(
    "hint",
    [[], "", [""], [","], ["192.168.1.9:8000"], ["10.0.0.1:9"], None, 7, [7], {}],
    ids=str,
)
def test_subset_hint_that_allows_nobody_is_503(exchange, pool, hint):
    """An empty or foreign hint is not the same as none: nobody may serve the request."""
    (answer,) = parse(exchange.receive(first(BUFFERED, with_subset(request_headers(), hint)), 0.0))

    assert answer.immediate_response.status.code == 503
    assert pool.in_flight == 0


def test_subset_hint_that_comes_with_the_body_counts(reading):
    """A filter before ours may set it only when it has seen the body."""
    reading.receive(first(BUFFERED), 0.0)

    message = with_subset(request_body(b"{}"), ["10.0.0.3:8000"])
    (answer,) = parse(reading.receive(message, 0.0))

    assert endpoints(answer) == ["10.0.0.3:8000"]


def test_other_metadata_is_no_subset_hint(exchange):
    """Another namespace, or another key in it, allows everybody."""
    message = request_headers()
    metadata = message.metadata_context.filter_metadata
    metadata["envoy.lb"]["x-gateway-destination-endpoint-subset"] = "10.0.0.3:8000"
    metadata["envoy.lb.subset_hint"]["other"] = "10.0.0.3:8000"

    (answer,) = parse(exchange.receive(first(BUFFERED, message), 0.0))

    assert endpoints(answer) == ALL


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "without_waiting"), HELD_BACK + AT_ONCE + COLLECTED)
@pytest.mark.parametrize("needs_body", [False, True])
def test_pool_without_workers_answers_503(
    registry, pool, policy, mode, without_waiting, needs_body
):
    """One immediate answer: JSON as OpenAI's, details of ours, nothing in flight."""
    reset(registry)
    policy.needs_body = needs_body
    exchange = start(registry)

    answers = exchange.receive(first(mode, without_waiting=without_waiting), 0.0)
    if exchange.decision is None:
        answers = exchange.receive(request_body(b"{}"), 0.0)

    (answer,) = parse(answers)
    immediate = answer.immediate_response
    assert immediate.status.code == 503
    assert immediate.details == "router_no_worker_available"
    assert set_headers(immediate.headers) == {"content-type": b"application/json"}
    error = json.loads(immediate.body)["error"]
    assert (error["code"], error["type"]) == ("no_worker_available", "server_error")
    assert isinstance(exchange.decision, Refused)
    assert (pool.in_flight, policy.sent) == (0, [])


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
def test_messages_under_way_when_a_request_is_refused_do_no_harm(registry, pool, policy, mode):
    """Envoy may have sent more before it read the refusal; the decision stays what it was."""
    reset(registry)
    exchange = start(registry)
    exchange.receive(first(mode), 0.0)
    refused = exchange.decision

    for message in (request_body(b"x", end=False), bare("request_trailers")):
        parse(exchange.receive(message, 0.0))

    assert exchange.decision is refused
    exchange.close(1.0)
    assert (pool.in_flight, policy.done) == (0, [])


# --- observability mode -------------------------------------------------------------------------


@pytest.mark.parametrize("needs_body", [False, True])
@pytest.mark.parametrize("mode", [NONE, STREAMED, BUFFERED])
def test_observability_mode_is_never_answered(registry, pool, policy, needs_body, mode):
    """Envoy only shows what passes; an answer would be a protocol error for it."""
    policy.needs_body = needs_body
    exchange = start(registry)
    messages = [first(mode), request_body(b"{}"), bare("response_headers"), response_body(b"x")]

    answers = []
    for message in messages:
        message.observability_mode = True
        answers += exchange.receive(message, 0.0)

    assert answers == []
    exchange.close(1.0)
    assert pool.in_flight == 0


# --- response direction -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["response_headers", "response_body", "response_trailers"])
@pytest.mark.parametrize("before", [True, False], ids=["routed", "without a request"])
def test_response_messages_are_waved_through(exchange, kind, before):
    """Each gets a bare "continue", also when the request direction was never shown."""
    if before:
        exchange.receive(first(BUFFERED), 0.0)

    answers = exchange.receive(bare(kind), 0.0)

    assert parse(answers) == [ProcessingResponse(**{kind: {}})]


def test_full_duplex_response_body_is_echoed(exchange):
    """Envoy forwards only what comes back: every byte, cut below the limit, the end marked."""
    exchange.receive(first(BUFFERED, response_mode=FULL_DUPLEX), 0.0)
    body = random.Random(3).randbytes(MAX_ECHO_BYTES + 5)

    begin = echoed(parse(exchange.receive(response_body(body, end=False), 0.0)))
    end = echoed(parse(exchange.receive(response_body(b""), 0.0)))

    assert begin == [
        ("response_body", body[:MAX_ECHO_BYTES], False),
        ("response_body", body[MAX_ECHO_BYTES:], False),
    ]
    assert end == [("response_body", b"", True)]


@pytest.mark.parametrize("mode", [STREAMED, BUFFERED])
def test_response_body_in_other_modes_is_not_echoed(exchange, mode):
    """A full-duplex request does not make the response full duplex."""
    exchange.receive(first(FULL_DUPLEX, response_mode=mode), 0.0)

    assert parse(exchange.receive(response_body(b"x"), 0.0)) == [
        ProcessingResponse(response_body={})
    ]


# --- what may come when -------------------------------------------------------------------------


@pytest.mark.parametrize("needs_body", [False, True])
def test_without_protocol_config_the_mode_is_buffered(registry, policy, needs_body):
    """Envoys before 1.35 do not say; BUFFERED is what our documentation tells to configure."""
    policy.needs_body = needs_body
    exchange = start(registry)

    answers = exchange.receive(request_headers(), 0.0)
    answers += exchange.receive(request_body(b"{}"), 0.0)

    assert kinds(answers) == ["request_headers", "request_body"]
    assert endpoints(parse(answers)[needs_body]) == ALL
    assert parse(answers)[0].HasField("mode_override") is not needs_body


def test_modes_of_the_first_message_stay(reading):
    """Envoy says them once; a later message that names others changes nothing."""
    reading.receive(first(BUFFERED), 0.0)

    answers = reading.receive(announce(request_body(b"{}"), FULL_DUPLEX), 0.0)

    assert kinds(answers) == ["request_body"]
    assert not common(parse(answers)[0]).HasField("body_mutation")


@pytest.mark.parametrize(
    "messages",
    [
        [ProcessingRequest()],
        [announce(ProcessingRequest(), BUFFERED)],
        [announce(request_body(b"x"), BUFFERED)],
        [announce(bare("request_trailers"), FULL_DUPLEX)],
        [announce(request_headers(), BUFFERED), request_headers()],
        [announce(request_headers(), FULL_DUPLEX), request_headers()],
        [announce(request_headers(), BUFFERED), bare("request_trailers")],
    ],
    ids=[
        "empty",
        "modes only",
        "body first",
        "trailers first",
        "headers twice, buffered",
        "headers twice, duplex",
        "trailers before the buffered body",
    ],
)
def test_message_that_cannot_come_here_is_a_protocol_error(reading, pool, messages):
    """The last message of each sequence is refused, and nothing stays in flight."""
    *before, last = messages
    for message in before:
        reading.receive(message, 0.0)

    with pytest.raises(ProtocolError):
        reading.receive(last, 0.0)

    reading.close(1.0)
    assert pool.in_flight == 0


def test_second_headers_after_the_pick_are_a_protocol_error(exchange, pool):
    """One stream is one request: a second pick would leak the first lease."""
    exchange.receive(first(BUFFERED), 0.0)

    with pytest.raises(ProtocolError):
        exchange.receive(request_headers(), 0.0)

    exchange.close(1.0)
    assert pool.in_flight == 0


# --- the lease ----------------------------------------------------------------------------------


def test_worker_is_busy_from_the_pick_to_the_close(pool, policy, exchange):
    """In flight from the decision, whatever comes between, until the stream ends."""
    worker = pool.candidates[0]
    assert worker.in_flight == 0

    exchange.receive(first(BUFFERED), 1.0)
    assert (worker.in_flight, pool.in_flight) == (1, 1)
    exchange.receive(bare("response_trailers"), 2.0)
    assert worker.in_flight == 1

    exchange.close(3.0)
    assert (worker.in_flight, pool.in_flight) == (0, 0)
    assert policy.done == [(worker, 3.0)]


def test_body_wanted_but_not_yet_there_holds_no_worker(reading, pool, policy):
    """A client that leaves while it uploads was sent nowhere."""
    reading.receive(first(BUFFERED), 0.0)
    assert pool.in_flight == 0

    reading.close(1.0)

    assert (policy.sent, policy.done) == ([], [])


def test_closing_twice_gives_the_worker_back_once(pool, policy, exchange):
    """The second close finds nothing to release and tells nobody."""
    exchange.receive(first(BUFFERED), 0.0)

    exchange.close(1.0)
    exchange.close(2.0)

    assert (pool.candidates[0].in_flight, pool.in_flight) == (0, 0)
    assert policy.done == [(pool.candidates[0], 1.0)]


def test_worker_removed_meanwhile_is_given_back_too(registry, pool, policy, exchange):
    """The lease is on the worker, not on its place in the pool."""
    worker = pool.candidates[0]
    exchange.receive(first(BUFFERED), 0.0)
    remove(registry, worker.url)

    exchange.close(1.0)

    assert (worker.in_flight, pool.in_flight) == (0, 0)
    assert policy.done == [(worker, 1.0)]


# --- any sequence at all ------------------------------------------------------------------------

modes = st.sampled_from(list(ProcessingMode.BodySendMode.values()))
bodies = st.sampled_from([b"", b"{}", b"x" * 900, b"y" * (MAX_ECHO_BYTES + 1)])
names = st.sampled_from([":method", ":path", "x-request-id", "x-a", ""])
hints = st.one_of(
    st.none(),
    st.sampled_from(["", "10.0.0.1:8000", "nobody", ["10.0.0.2:8000"], [], [["10.0.0.1"]], 3]),
)


@st.composite
def messages(draw):
    message = ProcessingRequest()
    kind = draw(
        st.sampled_from(
            [
                *["request_headers", "request_body"] * 3,
                "request_trailers",
                "response_headers",
                "response_body",
                "response_trailers",
                None,
            ]
        )
    )
    if kind in {"request_headers", "response_headers"}:
        pairs = draw(st.lists(st.tuples(names, st.binary(max_size=4)), max_size=4))
        found = request_headers(pairs, end=draw(st.booleans())).request_headers
        getattr(message, kind).CopyFrom(found)
    elif kind in {"request_body", "response_body"}:
        body = HttpBody(body=draw(bodies), end_of_stream=draw(st.booleans()))
        getattr(message, kind).CopyFrom(body)
    elif kind is not None:
        getattr(message, kind).SetInParent()
    if draw(st.booleans()):
        announce(
            message, draw(modes), response_mode=draw(modes), without_waiting=draw(st.booleans())
        )
    hint = draw(hints)
    if hint is not None:
        with_subset(message, hint)
    message.observability_mode = draw(st.sampled_from([False, False, False, True]))
    return message


@pytest.mark.slow
@settings(max_examples=200)
@given(
    sequence=st.lists(messages(), max_size=8),
    needs_body=st.booleans(),
    workers=st.integers(0, 3),
    closes=st.integers(1, 2),
)
def test_any_sequence_of_messages_leaves_the_exchange_legal(sequence, needs_body, workers, closes):
    """Each message is refused as a whole or answered readably; the close leaves nothing behind."""
    policy = Recorder(needs_body=needs_body)
    registry = registry_of(*(f"http://{endpoint}" for endpoint in ALL[:workers]), policy=policy)
    (pool,) = registry.pools
    exchange = start(registry, limit=1000)
    decisions = []
    with contextlib.suppress(ProtocolError):
        for message in sequence:
            answers = exchange.receive(message, 0.0)
            assert all(kind is not None for kind in kinds(answers))
            assert not (message.observability_mode and answers)
            decisions.append(exchange.decision)
            assert pool.in_flight == isinstance(exchange.decision, Routed)
    for _ in range(closes):
        exchange.close(1.0)

    made = [decision for decision in decisions if decision is not None]
    assert all(decision is made[0] for decision in made), "a decision is made once"
    assert pool.in_flight == 0
    assert [worker.in_flight for worker in pool.candidates] == [0] * workers
    assert [worker for worker, _ in policy.done] == [worker for worker, _ in policy.sent]
    assert len(policy.sent) <= 1


@given(
    chunks=st.lists(st.binary(max_size=40), min_size=1, max_size=5),
    mode=st.sampled_from([BUFFERED, STREAMED, FULL_DUPLEX]),
    needs_body=st.booleans(),
    trailers=st.booleans(),
)
def test_whatever_the_chunks_the_request_is_routed_and_no_byte_lost(
    chunks, mode, needs_body, trailers
):
    """One pick a request; in full duplex the echo is the body, byte for byte."""
    policy = Recorder(needs_body=needs_body)
    exchange = start(registry_of("http://10.0.0.1:8000", policy=policy))
    if mode == BUFFERED:
        chunks = [b"".join(chunks)]

    answers = exchange.receive(first(mode, without_waiting=mode == STREAMED), 0.0)
    for number, chunk in enumerate(chunks, start=1):
        end = number == len(chunks) and not trailers
        answers += exchange.receive(request_body(chunk, end=end), 0.0)
    if trailers:
        answers += exchange.receive(bare("request_trailers"), 0.0)

    picks = [answer for answer in parse(answers) if answer.HasField("dynamic_metadata")]
    assert len(picks) == 1
    assert kinds(answers)[0] == "request_headers"
    assert (kinds(answers)[-1] == "request_trailers") == trailers
    assert policy.requests[0].body == (b"".join(chunks) if needs_body else None)
    if mode == FULL_DUPLEX:
        found = echoed(answer for answer in parse(answers) if answer.HasField("request_body"))
        assert b"".join(data for _, data, _ in found) == b"".join(chunks)
        assert [end for _, _, end in found].count(True) == (not trailers)
    else:
        assert kinds(answers).count("request_body") == len(chunks)


@given(raw=st.binary(max_size=200))
def test_bytes_that_parse_at_all_are_refused_or_answered(raw):
    """Anything else than a protocol error would end a stream as our own fault."""
    try:
        message = ProcessingRequest.FromString(raw)
    except DecodeError:
        return
    registry = registry_of()
    (pool,) = registry.pools
    exchange = start(registry)
    with contextlib.suppress(ProtocolError):
        parse(exchange.receive(message, 0.0))
    exchange.close(0.0)
    assert pool.in_flight == 0


# --- having to wait -----------------------------------------------------------------------------


def gated(registry, *, admit=0, **limits):
    """Begin an exchange behind a gate that is closed until somebody is released."""
    options = {"concurrent": 1, "queue": 5, "queue_s": 10.0, "grace_s": 2.0, **limits}
    admission = Admission(Limits(**options))
    router = Router(registry, random.Random(1), no_worker_s=options.get("no_worker_s", 0.0))
    exchange = Exchange(router, ids=random.Random(2), max_body_bytes=LIMIT, admission=admission)
    for _ in range(admit or options["concurrent"]):
        admission.enter()
    return exchange, admission


def only_patience(answers, seconds):
    (answer,) = parse(answers)
    expected = ProcessingResponse()
    expected.override_message_timeout.FromSeconds(seconds)
    assert answer == expected


@pytest.mark.parametrize(("mode", "without_waiting"), [*HELD_BACK, *AT_ONCE, (STREAMED, True)])
def test_request_at_the_gate_asks_envoy_once_for_patience(registry, policy, mode, without_waiting):
    """Nothing else is said, and nothing is decided, until it is let in."""
    exchange, admission = gated(registry)

    only_patience(exchange.receive(first(mode, without_waiting=without_waiting), 0.0), 12)

    assert exchange.waiting
    assert (exchange.decision, policy.requests) == (None, [])
    admission.release()
    answers = exchange.resume(3.0)
    assert kinds(answers) == ["request_headers"]
    assert isinstance(exchange.decision, Routed)
    assert (exchange.waiting, exchange.ticket.waited_s) == (False, 3.0)


def test_in_full_duplex_envoy_needs_no_asking(registry, policy):
    """There is no timeout; the body that comes meanwhile is kept, and echoed after the pick."""
    policy.needs_body = True
    exchange, admission = gated(registry)
    assert exchange.receive(first(FULL_DUPLEX), 0.0) == []
    assert exchange.receive(request_body(b"one ", end=False), 0.0) == []
    assert exchange.receive(request_body(b"two", end=False), 0.0) == []
    assert exchange.receive(bare("request_trailers"), 0.0) == []
    assert policy.requests == []

    admission.release()
    answers = exchange.resume(3.0)

    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert echoed(parse(answers)[1:2]) == [("request_body", b"one two", False)]
    assert [request.body for request in policy.requests] == [b"one two"]


def test_what_comes_while_it_waits_is_bounded(registry):
    """A body that is too large is refused, and its place in the queue is free."""
    exchange, admission = gated(registry)
    exchange.receive(first(FULL_DUPLEX), 0.0)

    answers = exchange.receive(request_body(b"x" * (LIMIT + 1), end=False), 0.0)

    assert parse(answers)[0].immediate_response.status.code == 413
    assert (exchange.waiting, admission.places) == (False, {})
    assert exchange.resume(1.0) == exchange.give_up(1.0) == []


@pytest.mark.parametrize("needs_body", [False, True])
def test_busy_workers_make_it_wait_at_its_headers_or_its_body(registry, pool, policy, needs_body):
    """Envoy is asked for patience with the message that is to be answered."""
    policy.needs_body = needs_body
    limit_to(pool, 1)
    leases = [pool.acquire(worker) for worker in pool.members]
    exchange, _ = gated(registry, concurrent=10, admit=1)

    answers = exchange.receive(first(BUFFERED), 0.0)
    if needs_body:
        assert parse(answers) == [ProcessingResponse(request_headers={})]
        answers = exchange.receive(request_body(b"{}"), 1.0)

    only_patience(answers, 12)
    assert exchange.resume(2.0) == []
    assert exchange.waiting
    leases[1].release(3.0)
    (answer,) = parse(exchange.resume(3.0))
    assert answer.WhichOneof("response") == ("request_body" if needs_body else "request_headers")
    assert endpoints(answer)[0] == ALL[1]
    assert answer.HasField("mode_override") is not needs_body


def test_each_message_may_ask_for_patience_once(registry, pool, policy):
    """At the gate with the headers, then for a worker with the body."""
    policy.needs_body = True
    limit_to(pool, 1)
    for worker in pool.members:
        pool.acquire(worker)
    exchange, admission = gated(registry)

    only_patience(exchange.receive(first(BUFFERED), 0.0), 12)
    admission.release()
    assert parse(exchange.resume(1.0)) == [ProcessingResponse(request_headers={})]

    only_patience(exchange.receive(request_body(b"{}"), 2.0), 12)


def test_second_wait_of_one_message_says_nothing_more(registry, pool):
    """Envoy would take no second one; the first covers both."""
    limit_to(pool, 1)
    for worker in pool.members:
        pool.acquire(worker)
    exchange, admission = gated(registry)
    exchange.receive(first(BUFFERED), 0.0)
    admission.release()

    assert exchange.resume(1.0) == []
    assert exchange.waiting
    assert exchange.ticket.deadline == 10.0


@pytest.mark.parametrize("needs_body", [False, True])
def test_without_any_worker_it_waits_before_its_body_is_read(registry, policy, needs_body):
    """The body stays where it is until there is somebody to read it for."""
    policy.needs_body = needs_body
    reset(registry)
    exchange, _ = gated(registry, concurrent=5, admit=1, no_worker_s=30.0)

    only_patience(exchange.receive(first(BUFFERED), 0.0), 42)
    assert exchange.resume(1.0) == []
    reset(registry, "http://10.0.0.1:8000")
    (answer,) = parse(exchange.resume(2.0))

    if needs_body:
        assert answer == ProcessingResponse(request_headers={})
        (answer,) = parse(exchange.receive(request_body(b"{}"), 3.0))
    assert endpoints(answer) == ALL[:1]


@pytest.mark.parametrize(
    ("place", "status", "code"),
    [
        ("gate", 408, "queue_timeout"),
        ("busy", 408, "queue_timeout"),
        ("nobody", 503, "no_worker_available"),
    ],
)
def test_who_has_waited_long_enough_is_refused(registry, pool, place, status, code):
    """For the reason that it waited for, and its place is free."""
    exchange, admission = gated(registry, no_worker_s=30.0)
    if place != "gate":
        admission.release()
    if place == "busy":
        limit_to(pool, 0)
    if place == "nobody":
        reset(registry)
    exchange.receive(first(BUFFERED), 0.0)
    assert exchange.waiting

    (answer,) = parse(exchange.give_up(10.0))

    assert answer.immediate_response.status.code == status
    assert json.loads(answer.immediate_response.body)["error"]["code"] == code
    assert (exchange.waiting, admission.places) == (False, {})
    assert exchange.give_up(11.0) == exchange.resume(11.0) == []
    exchange.close(12.0)
    assert admission.admitted == (place == "gate")


def test_full_queue_says_when_to_come_again(registry):
    """Retry-After beside the type of the body."""
    exchange, _ = gated(registry, queue=0)

    (answer,) = parse(exchange.receive(first(BUFFERED), 0.0))

    assert answer.immediate_response.status.code == 429
    headers = set_headers(answer.immediate_response.headers)
    assert headers == {"content-type": b"application/json", "retry-after": b"10"}


@pytest.mark.parametrize("stage", ["gate", "under way", "refused"])
def test_close_gives_back_what_it_holds(registry, stage):
    """Its place in the queue or its place past the gate, once."""
    exchange, admission = gated(registry, queue=0 if stage == "refused" else 5)
    if stage == "under way":
        admission.release()
    exchange.receive(first(BUFFERED), 0.0)

    exchange.close(1.0)
    exchange.close(2.0)

    assert admission.places == {}
    assert admission.admitted == (stage != "under way")


def test_observer_never_waits(registry, pool):
    """Envoy asks for the record only and waits for no answer: it neither queues nor is refused aloud."""
    limit_to(pool, 0)
    exchange, admission = gated(registry)
    message = first(BUFFERED)
    message.observability_mode = True

    assert exchange.receive(message, 0.0) == []

    assert (exchange.waiting, admission.admitted) == (False, 1)
    exchange.close(1.0)
    assert admission.admitted == 1


def test_request_that_waited_is_renamed_like_any_other(registry, pool):
    """An alias is replaced once, after the wait, however often it was looked at."""
    limit_to(pool, 0)
    router = Router(registry, random.Random(1), aliases={"short": "llama"})
    admission = Admission(Limits(queue=1))
    exchange = Exchange(router, ids=random.Random(2), max_body_bytes=LIMIT, admission=admission)
    exchange.receive(first(BUFFERED), 0.0)
    exchange.receive(request_body(b'{"model": "short"}'), 0.0)
    assert exchange.resume(1.0) == []
    limit_to(pool, 1)

    (answer,) = parse(exchange.resume(2.0))

    assert common(answer).body_mutation.body == b'{"model": "llama"}'


def limit_to(pool, limit):
    for worker in pool.members:
        worker.limit = limit
    pool.look_at_limits()
