"""The ext_proc service behind its server, asked by a real gRPC client over a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc
import grpc.aio
import pytest

from extproc.address import Address
from extproc.admission import Admission, Limits
from extproc.grpc_server import GrpcServer
from extproc.metrics import Metrics
from extproc.router import Router
from extproc.service import PROCESS, SLICE, ExtProcService
from tests.extproc.envoy_messages import (
    BUFFERED,
    FULL_DUPLEX,
    announce,
    bare,
    endpoints,
    kinds,
    parse,
    request_body,
    request_headers,
)
from tests.extproc.recorder import Recorder
from tests.fleets import remove, reset, say

TIMEOUT_S = 10
MAX_MESSAGE_BYTES = 100_000
ALL = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
pytestmark = pytest.mark.timeout(30)


class Faulty(Recorder):
    """Breaks on every pick."""

    def pick(self, request, workers, *, now, rng):
        raise ZeroDivisionError("secret detail")


@pytest.fixture
def metrics(registry):
    return Metrics("recorder", registry)


@pytest.fixture
def limits():
    """Return limits that no test of anything else meets."""
    return Limits()


@pytest.fixture
def service(registry, metrics, limits):
    """Return the service."""
    router = Router(registry, random.Random(1), no_worker_s=limits.no_worker_s)
    return ExtProcService(
        router,
        metrics,
        ids=random.Random(2),
        max_body_bytes=100,
        admission=Admission(limits),
    )


@pytest.fixture
async def channel(service, tmp_path):
    """Connect to a server with the service."""
    server = GrpcServer(service.methods(), max_message_bytes=MAX_MESSAGE_BYTES)
    await server.start(Address(path=f"{tmp_path}/s"))
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        yield channel
    await server.stop()


@pytest.fixture
def open_stream(channel):
    """Begin an exchange as Envoy does."""
    method = channel.stream_stream(PROCESS)
    return lambda: method(timeout=TIMEOUT_S)


def headers(mode=BUFFERED, **options):
    return announce(request_headers(**options), mode).SerializeToString()


async def end(stream):
    """Half-close, and return how the service ended its side and what it still sent."""
    rest = []
    # A service that has refused a message has ended the stream, maybe before our half-close.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await stream.done_writing()
        while (answer := await stream.read()) is not grpc.aio.EOF:
            rest.append(answer)
    return await stream.code(), rest


async def settles(condition):
    """Wait until *condition* holds: the handler ends a little after its status is on the way."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - the service tells nobody that a stream has ended
            await asyncio.sleep(0)


def count(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"vllm_extproc_{name}", labels)


def errors(metrics):
    return {
        kind: count(metrics, "stream_errors_total", kind=kind) for kind in ("protocol", "internal")
    }


async def test_request_is_answered_and_its_worker_released_at_the_end(
    open_stream, pool, metrics, policy
):
    """In flight from the answer to the half-close of Envoy, which is answered with OK."""
    stream = open_stream()
    await stream.write(headers())

    (answer,) = parse([await stream.read()])
    assert endpoints(answer) == ALL
    assert pool.in_flight == 1

    code, rest = await end(stream)
    assert (code, rest) == (grpc.StatusCode.OK, [])
    assert pool.in_flight == 0
    assert len(policy.done) == 1
    assert errors(metrics) == {"protocol": 0, "internal": 0}


async def test_answers_come_in_the_order_of_the_messages(open_stream):
    """Headers, chunks, trailers, response: one stream, nothing lost, nothing mixed."""
    stream = open_stream()
    await stream.write(headers(FULL_DUPLEX))
    for message in (request_body(b"a", end=False), bare("request_trailers")):
        await stream.write(message.SerializeToString())
    await stream.write(bare("response_trailers").SerializeToString())

    _, answers = await end(stream)

    assert kinds(answers) == [
        "request_headers",
        "request_body",
        "request_trailers",
        "response_trailers",
    ]


async def test_decision_is_counted_once_per_exchange(open_stream, metrics):
    """Whatever messages follow; its duration is observed with it."""
    for _ in range(3):
        stream = open_stream()
        await stream.write(headers())
        await stream.write(request_body(b"x").SerializeToString())
        await end(stream)

    assert count(metrics, "decisions_total", policy="recorder", result="routed") == 3
    assert count(metrics, "decision_duration_seconds_count") == 3


async def test_refusal_is_counted_by_its_reason(open_stream, metrics, registry):
    """Answered with 503, the stream ends well: a refusal is no error."""
    reset(registry)
    stream = open_stream()
    await stream.write(headers())

    code, answers = await end(stream)

    assert code is grpc.StatusCode.OK
    assert kinds(answers) == ["immediate_response"]
    assert count(metrics, "decisions_total", policy="recorder", result="no_worker_available") == 1
    assert count(metrics, "decisions_total", policy="recorder", result="routed") == 0


@pytest.mark.parametrize(
    "messages",
    [
        [b"\xff\xff\xff"],
        [b""],
        [headers(), b"\x12"],
        [headers(), headers()],
        [request_body(b"x").SerializeToString()],
    ],
    ids=["garbage", "empty", "cut off", "headers twice", "body first"],
)
async def test_what_cannot_come_ends_that_stream_with_invalid_argument(
    open_stream, pool, metrics, messages
):
    """Never with OK, which Envoy takes for "continue"; the service lives and nothing is leaked."""
    stream = open_stream()
    for message in messages:
        await stream.write(message)

    code, _ = await end(stream)

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert errors(metrics) == {"protocol": 1, "internal": 0}
    await settles(lambda: pool.in_flight == 0)
    again = open_stream()
    await again.write(headers())
    code, answers = await end(again)
    assert (code, kinds(answers)) == (grpc.StatusCode.OK, ["request_headers"])


async def test_message_larger_than_is_accepted_ends_that_stream(open_stream, pool):
    """A body that is too large is no reason to hold it in memory, and never an OK."""
    stream = open_stream()
    await stream.write(headers())
    await stream.read()
    await stream.write(bytes(MAX_MESSAGE_BYTES + 1))

    code, _ = await end(stream)

    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await settles(lambda: pool.in_flight == 0)


async def test_error_text_of_a_refused_message_is_short(open_stream):
    """It says what was wrong; foreign text in it is capped."""
    stream = open_stream()
    await stream.write(request_body(b"x" * 5000).SerializeToString())

    await end(stream)

    details = await stream.details()
    assert "request_header_mode: SEND" in details
    assert len(details) < 300


@pytest.mark.parametrize("policy", [Faulty()], ids=["broken policy"])
async def test_fault_of_our_own_ends_the_stream_with_internal(open_stream, pool, metrics):
    """Without its text, which goes to the log alone; nothing stays in flight."""
    stream = open_stream()
    await stream.write(headers())

    code, answers = await end(stream)

    assert (code, answers) == (grpc.StatusCode.INTERNAL, [])
    assert await stream.details() == "internal error"
    assert errors(metrics) == {"protocol": 0, "internal": 1}
    assert pool.in_flight == 0  # it was never sent


async def test_fault_after_the_pick_releases_the_worker(open_stream, pool, metrics, monkeypatch):
    """The lease is given back however the handler ends."""
    stream = open_stream()
    await stream.write(headers())
    await stream.read()
    assert pool.in_flight == 1

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("extproc.exchange.Exchange.receive", broken)
    await stream.write(bare("response_trailers").SerializeToString())
    code, _ = await end(stream)

    assert code is grpc.StatusCode.INTERNAL
    await settles(lambda: pool.in_flight == 0)
    assert errors(metrics) == {"protocol": 0, "internal": 1}


@pytest.mark.parametrize("answered", [True, False], ids=["after the answer", "at once"])
async def test_cancelled_stream_releases_the_worker(open_stream, pool, metrics, policy, answered):
    """Envoy resets the stream when a client leaves: that is an end like any other."""
    stream = open_stream()
    await stream.write(headers())
    if answered:
        await stream.read()
        assert pool.in_flight == 1

    stream.cancel()

    await settles(lambda: len(policy.done) == len(policy.sent) and pool.in_flight == 0)
    assert errors(metrics) == {"protocol": 0, "internal": 0}


async def test_lost_connection_releases_all_its_workers(open_stream, channel, pool, policy):
    """An Envoy that dies takes its requests with it."""
    streams = [open_stream() for _ in range(5)]
    for stream in streams:
        await stream.write(headers())
        await stream.read()
    assert pool.in_flight == 5

    await channel.close()

    await settles(lambda: pool.in_flight == 0)
    assert len(policy.done) == 5


@pytest.mark.slow
async def test_200_aborted_streams_leave_nothing_in_flight(open_stream, pool, metrics, policy):
    """Cancelled before, in the middle of and after the answer, or ended well, all at once."""
    rng = random.Random(8)

    async def one(how):
        stream = open_stream()
        await stream.write(headers())
        if how == "before":
            stream.cancel()
            return
        await stream.read()
        if how == "middle":
            await stream.write(request_body(b"x" * 50, end=False).SerializeToString())
            stream.cancel()
        elif how == "after":
            stream.cancel()
        elif how == "garbage":
            await stream.write(b"\xff")
            await end(stream)
        else:
            await end(stream)

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        for _ in range(200):
            how = rng.choice(["before", "middle", "after", "garbage", "well"])
            tasks.create_task(one(how))

    await settles(lambda: pool.in_flight == 0 and len(policy.done) == len(policy.sent))
    assert [worker.in_flight for worker in pool.candidates] == [0, 0, 0]
    assert errors(metrics)["internal"] == 0
    again = open_stream()
    await again.write(headers())
    assert (await end(again))[0] is grpc.StatusCode.OK
    assert pool.in_flight == 0


@pytest.mark.slow
async def test_many_streams_at_once_do_not_mix(open_stream, pool):
    """Each gets its own answers while all are open."""
    streams = [open_stream() for _ in range(100)]
    for number, stream in enumerate(streams):
        await stream.write(headers(FULL_DUPLEX))
        await stream.write(request_body(f"{number}".encode()).SerializeToString())

    for number, stream in enumerate(streams):
        _, echo = parse([await stream.read(), await stream.read()])
        mutation = echo.request_body.response.body_mutation
        assert mutation.streamed_response.body == f"{number}".encode()
    assert pool.in_flight == 100

    for stream in streams:
        await end(stream)
    assert pool.in_flight == 0


# --- having to wait -----------------------------------------------------------------------------


def status_of(answer):
    return parse([answer])[0].immediate_response.status.code


async def begin(open_stream, **options):
    """Begin an exchange; return its stream and its first answer."""
    stream = open_stream()
    await stream.write(headers(**options))
    return stream, await stream.read()


def is_patience(answer):
    return parse([answer])[0].HasField("override_message_timeout")


@pytest.mark.parametrize("limits", [Limits(concurrent=1, queue=5)], ids=["one at a time"])
async def test_next_in_the_queue_goes_on_when_one_ends(open_stream, service, pool, metrics):
    """Without anybody asking, in order of coming."""
    first, _ = await begin(open_stream)
    second, patience = await begin(open_stream)
    third, _ = await begin(open_stream)
    assert is_patience(patience)
    assert count(metrics, "queue_waiting", reason="limit") == 2
    assert count(metrics, "admitted") == 1

    await end(first)
    assert endpoints(parse([await second.read()])[0]) == ALL
    assert count(metrics, "queue_waiting", reason="limit") == 1
    second.cancel()
    assert endpoints(parse([await third.read()])[0]) == ALL
    await end(third)

    await settles(lambda: service.admission.admitted == 0 and pool.in_flight == 0)
    assert count(metrics, "decisions_total", policy="recorder", result="routed") == 3
    assert count(metrics, "queue_wait_seconds_count") == 2


@pytest.mark.parametrize("limits", [Limits(concurrent=1, queue=5, queue_s=0.2)], ids=["short"])
async def test_who_has_waited_long_enough_is_answered(open_stream, service, metrics):
    """By a timer of its own; a timer of one that has left does nothing."""
    first, _ = await begin(open_stream)
    left, _ = await begin(open_stream)
    second, _ = await begin(open_stream)
    left.cancel()

    assert status_of(await second.read()) == 408

    await end(first)
    await settles(lambda: not service.admission.places and service.admission.admitted == 0)
    assert count(metrics, "decisions_total", policy="recorder", result="queue_timeout") == 1
    assert count(metrics, "queue_wait_seconds_count") == 2
    assert errors(metrics) == {"protocol": 0, "internal": 0}


@pytest.mark.parametrize("limits", [Limits(no_worker_s=30.0)], ids=["wait for workers"])
async def test_change_of_workers_wakes_who_waits_for_one(
    open_stream, service, registry, specs, pool
):
    """All of them, however many slices that takes."""
    reset(registry)
    waits = [await begin(open_stream) for _ in range(SLICE * 2 + 5)]
    assert all(is_patience(answer) for _, answer in waits)

    reset(registry, *specs)
    service.on_workers()

    for stream, _ in waits:
        assert endpoints(parse([await stream.read()])[0]) == ALL
        stream.cancel()
    await settles(lambda: service.admission.admitted == 0 and pool.in_flight == 0)


@pytest.mark.parametrize("limits", [Limits(no_worker_s=30.0)], ids=["wait for workers"])
async def test_change_that_nobody_announces_is_noticed(open_stream, registry, specs):
    """After a moment."""
    reset(registry)
    stream, _ = await begin(open_stream)

    reset(registry, *specs)

    assert endpoints(parse([await stream.read()])[0]) == ALL


@pytest.mark.parametrize("limits", [Limits(concurrent=1, queue=5, no_worker_s=30.0)], ids=["all"])
async def test_service_that_stops_refuses_who_waits_and_who_comes(
    open_stream, service, registry, metrics
):
    """503 at once; what is under way is left alone."""
    first, _ = await begin(open_stream)
    second, _ = await begin(open_stream)

    service.stop()

    assert status_of(await second.read()) == 503
    _, refused = await begin(open_stream)
    assert status_of(refused) == 503
    await end(first)
    reset(registry)
    _, refused = await begin(open_stream)
    assert status_of(refused) == 503
    assert count(metrics, "decisions_total", policy="recorder", result="no_worker_available") == 3


@pytest.mark.parametrize("limits", [Limits(concurrent=1, queue=5)], ids=["one at a time"])
async def test_higher_limit_lets_in_who_waits(open_stream, service):
    """As soon as it is set."""
    await begin(open_stream)
    second, _ = await begin(open_stream)

    service.set_limits(Limits(concurrent=2))

    assert endpoints(parse([await second.read()])[0]) == ALL


@pytest.mark.parametrize("limits", [Limits(queue=5)], ids=["busy"])
async def test_room_at_a_worker_wakes_who_waits_for_it(open_stream, pool, metrics):
    """One for each request that ends."""
    for worker in pool.members:
        worker.limit = 1
    pool.look_at_limits()
    running = [await begin(open_stream) for _ in range(3)]
    waits = [await begin(open_stream) for _ in range(2)]
    assert count(metrics, "queue_waiting", reason="busy") == 2

    await end(running[1][0])

    assert endpoints(parse([await waits[0][0].read()])[0])[0] == ALL[1]
    assert count(metrics, "queue_waiting", reason="busy") == 1


@pytest.mark.parametrize("policy", [Faulty()], ids=["broken policy"])
@pytest.mark.parametrize("limits", [Limits(concurrent=1, queue=5)], ids=["one at a time"])
async def test_fault_after_the_wait_ends_that_stream_alone(open_stream, service, metrics):
    """Counted as a fault, and the next one gets its turn."""
    service.admission.enter()
    streams = [(await begin(open_stream))[0] for _ in range(3)]

    service.admission.release()
    service.wake()

    for stream in streams:
        assert (await end(stream))[0] is grpc.StatusCode.INTERNAL
    assert errors(metrics) == {"protocol": 0, "internal": 3}
    assert (service.admission.admitted, service.admission.places) == (0, {})


@pytest.mark.parametrize("limits", [Limits(no_worker_s=30.0)], ids=["wait for workers"])
async def test_models_of_removed_workers_are_waited_for(open_stream, service, registry):
    """The service hears their names with the change."""
    a, b, other = registry.engines
    say(registry, a.key, "a")
    say(registry, b.key, "b")
    remove(registry, a.key)
    remove(registry, other.key)
    service.on_workers(["a"])
    stream, answer = await begin(open_stream)
    assert kinds([answer]) == ["request_headers"]
    await stream.write(request_body(b'{"model": "a"}').SerializeToString())
    assert is_patience(await stream.read())

    reset(registry, "http://10.0.0.9:8000", b.spec)
    say(registry, "http://10.0.0.9:8000", "a")
    service.on_workers()

    assert endpoints(parse([await stream.read()])[0]) == ["10.0.0.9:8000"]
