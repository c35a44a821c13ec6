"""What clients see when a worker of a split request fails, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Connection, Response, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, until
from tests.e2e.pd_support import (
    CHAT,
    COMPLETIONS,
    ERROR_TYPE,
    EVENTS,
    FLAGS,
    PARAMS,
    WHOLE_ANSWER,
    PdWorkers,
    chat,
    error_text,
    post,
    post_as,
    write_workers,
)
from tests.e2e.raw_worker import RawWorker

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

QUICK = (
    *("--retry-initial-backoff-ms", "10", "--retry-max-backoff-ms", "50"),
    *("--disable-circuit-breaker",),
    *("--health-check-interval-secs", "30"),
)
"""Workers stay where they are, however often a test makes them fail."""

IMPATIENT = ("--stream-idle-timeout-secs", "0.7", "--retry-max-retries", "2")


@pytest.fixture(scope="module")
def workers() -> Iterator[PdWorkers]:
    """Two workers of each role for the module."""
    workers = PdWorkers()
    yield workers
    workers.stop()


def _router(workers: PdWorkers, logs: Path, *flags: str) -> Iterator[Router]:
    router = Router([], logs, *workers.flags, *QUICK, *flags)
    try:
        yield router.until_ready(workers=4)
        router.stop()
    finally:
        router.end()


@pytest.fixture(scope="module")
def router(workers: PdWorkers, logs: Path) -> Iterator[Router]:
    """Start a router that lets a decode worker do all of it."""
    yield from _router(workers, logs, *IMPATIENT)


@pytest.fixture(scope="module")
def strict_router(workers: PdWorkers, logs: Path) -> Iterator[Router]:
    """Start a router that answers 503 instead."""
    yield from _router(workers, logs, "--pd-fallback", "error", *IMPATIENT)


@pytest.fixture
def start_pd() -> Iterator[Callable[..., PdWorkers]]:
    """Start workers for one test."""
    started: list[PdWorkers] = []

    def start(*counts: int) -> PdWorkers:
        started.append(PdWorkers(*counts))
        return started[-1]

    yield start
    for workers in started:
        workers.stop()


def with_params(body: bytes) -> bytes:
    """Return what the decode worker gets for a client's *body*."""
    return b'{"kv_transfer_params":' + PARAMS + b"," + body[1:]


def check_no_address(response: Response) -> None:
    """Check that the client learns nothing of who failed."""
    text = response.body + str(response.headers).encode()
    for secret in (b"10.9.8.7", b"127.0.0.1", b"internal.example", b"/tmp/", b".sock"):
        assert secret not in text, response


@pytest.mark.parametrize("fault", ["500", "503", "reset", "close", "hang"])
async def test_prefill_that_fails_is_tried_elsewhere(
    router: Router, workers: PdWorkers, fault: str
) -> None:
    """The other prefill worker computes the prompt; the client notices nothing."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Prefill", f"{fault} first"))

    legs = workers.legs(request_id, CHAT)
    assert (response.status, response.body) == (200, WHOLE_ANSWER)
    assert len(legs.prefill) == 2
    assert legs.prefill[0].port != legs.prefill[1].port
    assert legs.prefill[0].body == legs.prefill[1].body
    assert legs.prefill[0].values("x-request-id") == legs.prefill[1].values("x-request-id")
    (decode,) = legs.decode
    assert decode.body == with_params(chat())
    await router.until_idle()


@pytest.mark.parametrize("size", [3_000_000, 12_000_000])
async def test_large_prompt_is_tried_elsewhere_on_both_legs(
    router: Router, workers: PdWorkers, size: int
) -> None:
    """With images in it: more than fits into a buffer, and more than policies are shown."""
    body = chat(pad="x" * size)
    request_id, response = await post(
        router, CHAT, body, ("X-Test-Prefill", "500 first"), ("X-Test-Decode", "reset first")
    )

    legs = workers.legs(request_id, CHAT)
    assert response.status == 200
    assert len(legs.prefill) == len(legs.decode) == 2
    assert len({leg.sha256 for leg in legs.prefill}) == 1
    handed = b'{"kv_transfer_params":' + PARAMS + b"," + body[1:]
    assert {leg.sha256 for leg in legs.decode} == {hashlib.sha256(handed).hexdigest()}
    await router.until_idle()


@pytest.mark.parametrize("fault", ["500", "reset", "hang"])
async def test_decode_worker_does_all_of_it_when_no_prefill_worker_can(
    router: Router, workers: PdWorkers, fault: str
) -> None:
    """It gets the client's body as it was."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Prefill", fault))

    legs = workers.legs(request_id, CHAT)
    assert (response.status, response.body) == (200, WHOLE_ANSWER)
    assert legs.prefill
    assert [leg.body for leg in legs.decode] == [chat()]
    assert response.values("x-request-id") == [request_id]
    await router.until_idle()


@pytest.mark.parametrize("fault", ["500", "reset"])
async def test_client_is_told_that_no_prefill_worker_could(
    strict_router: Router, workers: PdWorkers, fault: str
) -> None:
    """With ``--pd-fallback error``; of addresses it says nothing."""
    request_id, response = await post(strict_router, CHAT, chat(), ("X-Test-Prefill", fault))

    assert response.status == 503
    assert openai_error(response)["code"] == "prefill_failed"
    check_no_address(response)
    assert workers.legs(request_id, CHAT).decode == []
    await strict_router.until_idle()


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_refusal_of_a_prefill_worker_is_passed_on(
    router: Router, workers: PdWorkers, status: int
) -> None:
    """Status, body and content type as they came: it is about the client's request."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Prefill", str(status)))

    legs = workers.legs(request_id, CHAT)
    assert response.status == status
    assert response.body == error_text(status)
    assert response.values("content-type") == [ERROR_TYPE]
    assert len(legs.prefill) == 1
    assert legs.decode == []
    assert response.values("x-request-id") == [request_id]
    await router.until_idle()


async def test_overloaded_prefill_worker_is_passed_over(router: Router, workers: PdWorkers) -> None:
    """429 is about the worker."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Prefill", "429 first"))

    assert (response.status, response.body) == (200, WHOLE_ANSWER)
    assert len(workers.legs(request_id, CHAT).prefill) == 2


@pytest.mark.parametrize(
    "answer",
    ["no json", "[]", "{}", '{"kv_transfer_params":null}', '{"kv_transfer_params":"x"}'],
)
async def test_answer_without_parameters_lets_the_decode_worker_compute(
    router: Router, workers: PdWorkers, answer: str
) -> None:
    """It gets the client's body."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Prefill", f"answer {answer}"))

    _, decode = workers.legs(request_id, CHAT).one()
    assert response.status == 200
    assert decode.body == chat()


@pytest.mark.parametrize("fault", ["500", "reset", "close"])
async def test_decode_that_fails_is_tried_elsewhere_with_the_same_parameters(
    router: Router, workers: PdWorkers, fault: str
) -> None:
    """The prompt is not computed again."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Decode", f"{fault} first"))

    legs = workers.legs(request_id, CHAT)
    assert (response.status, response.body) == (200, WHOLE_ANSWER)
    assert len(legs.prefill) == 1
    assert len(legs.decode) == 2
    assert legs.decode[0].port != legs.decode[1].port
    assert {leg.body for leg in legs.decode} == {with_params(chat())}
    await router.until_idle()


@pytest.mark.parametrize("fault", ["500", "reset"])
async def test_prompt_is_computed_again_when_decode_fails_twice(
    router: Router, workers: PdWorkers, fault: str
) -> None:
    """Somebody may have fetched the blocks, or they are gone with the worker that had them."""
    request_id, response = await post(
        router, CHAT, chat(), ("X-Test-Prefill", "number"), ("X-Test-Decode", f"{fault} twice")
    )

    legs = workers.legs(request_id, CHAT)
    assert (response.status, response.body) == (200, WHOLE_ANSWER)
    handed = [b'{"kv_transfer_params":{"n":%d},' % n + chat()[1:] for n in (1, 1, 2)]
    assert sorted(leg.body for leg in legs.decode) == handed
    first, again = (json.loads(leg.body) for leg in legs.prefill)
    assert first == again
    assert {leg.values("x-request-id")[0] for leg in (*legs.prefill, *legs.decode)} == {request_id}
    for leg in legs.decode:
        assert leg.values("x-router-attempt") == []
        assert leg.values("content-length") == [str(len(leg.body))]
    await router.until_idle()


async def test_large_prompt_is_computed_again(router: Router, workers: PdWorkers) -> None:
    """Also one that fits into no buffer of Envoy's own choice."""
    body = chat(pad="x" * 12_000_000)
    request_id, response = await post(
        router, CHAT, body, ("X-Test-Prefill", "number"), ("X-Test-Decode", "500 twice")
    )

    legs = workers.legs(request_id, CHAT)
    assert response.status == 200
    handed = [b'{"kv_transfer_params":{"n":%d},' % n + body[1:] for n in (1, 1, 2)]
    digests = [hashlib.sha256(sent).hexdigest() for sent in handed]
    assert sorted(leg.sha256 for leg in legs.decode) == sorted(digests)
    await router.until_idle()


PUSHED = (
    b'{"remote_engine_id":"e","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2,'
    b'"transfer_mode":"push"}'
)


@pytest.mark.parametrize("fault", ["500", "reset", "close"])
async def test_push_that_fails_is_tried_again_by_the_same_worker(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers], fault: str
) -> None:
    """The decode worker waits for this one alone."""
    workers = start_pd(2, 1)
    workers.params = PUSHED
    router = start_router([], *workers.flags, *QUICK, workers=3)
    for _ in range(2):
        await post(router, CHAT, chat())

    sending = asyncio.ensure_future(
        post_as(
            router,
            CHAT,
            chat(),
            "pushed",
            *(("X-Test-Prefill", f"{fault} first"), ("X-Test-Decode", "wait")),
        )
    )
    await until(lambda: len(workers.legs("pushed", CHAT).prefill) == 2, 5, "the leg is sent again")
    workers.went_on.set()
    response = await sending

    legs = workers.legs("pushed", CHAT)
    assert (response.status, response.body) == (200, WHOLE_ANSWER)
    first, again = legs.prefill
    assert (first.port, first.body) == (again.port, again.body)
    assert first.values("x-request-id") == again.values("x-request-id")
    await router.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_push_that_fails_does_not_leave_the_client_waiting(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers], *, stream: bool
) -> None:
    """A decode worker answers all of it; the one that waits for the blocks is let go."""
    workers = start_pd(1, 2)
    workers.params = PUSHED
    router = start_router([], *workers.flags, *QUICK, workers=3)
    await post(router, CHAT, chat())
    body = chat(stream=stream)

    request_id, response = await post(
        router, CHAT, body, ("X-Test-Prefill", "500"), ("X-Test-Decode", "hang first")
    )

    legs = workers.legs(request_id, CHAT)
    assert (response.status, response.body) == (200, EVENTS if stream else WHOLE_ANSWER)
    assert response.values("content-type")[0].startswith(
        "text/event-stream" if stream else "application/json"
    )
    assert response.values("x-request-id") == [request_id]
    assert len(legs.prefill) == 3
    assert sorted(leg.body == body for leg in legs.decode) == [False, True]
    await until(lambda: workers.left[request_id] == 1, 5, "the worker that waits is let go")
    assert router.metrics()("answered_elsewhere_total") == 1
    await router.until_idle()


async def test_no_address_is_told_when_every_decode_worker_is_reset(
    router: Router, workers: PdWorkers
) -> None:
    """503 of the router's own."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Decode", "reset"))

    assert len(workers.legs(request_id, CHAT).decode) > 1
    assert response.status == 503
    openai_error(response)
    check_no_address(response)
    await router.until_idle()


async def test_refused_connections_are_tried_elsewhere(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers]
) -> None:
    """Of prefill and of decode workers."""
    workers = start_pd(2, 2)
    router = start_router([], *workers.flags, *QUICK, workers=4)
    workers.prefill[0].refuse()
    workers.decode[0].refuse()

    for _ in range(4):
        request_id, response = await post(router, CHAT, chat())
        prefill, decode = workers.legs(request_id, CHAT).one()
        assert response.status == 200
        assert decode.body == with_params(chat())
        assert prefill.port == workers.prefill[1].ports[0]
        assert decode.port == workers.decode[1].ports[0]
    await router.until_idle()


async def test_all_prefill_workers_away(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers]
) -> None:
    """Requests go on, on decode workers."""
    workers = start_pd(1, 1)
    router = start_router([], *workers.flags, *QUICK, workers=2)
    workers.prefill[0].refuse()

    for _ in range(3):
        request_id, response = await post(router, CHAT, chat())
        assert response.status == 200
        assert workers.legs(request_id, CHAT).whole().body == chat()
    await router.until_idle()


async def test_client_that_leaves_ends_its_prefill(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers]
) -> None:
    """The prefill worker sees it within a second, and nothing stays in flight."""
    workers = start_pd(1, 1)
    router = start_router([], *workers.flags, *QUICK, workers=2)
    headers = [("X-Test-Id", "leaves"), ("X-Test-Prefill", "hang")]
    async with Connection(router.port) as connection:
        await connection.send("POST", CHAT, headers, chat())
        await until(lambda: workers.legs("leaves", CHAT).prefill, 5, "the prefill leg arrives")
        metrics = router.metrics()
        assert metrics("worker_in_flight", worker=workers.prefill_urls[0]) == 1
        assert metrics("worker_in_flight", worker=workers.decode_urls[0]) == 0
        connection.abort()
        await until(lambda: workers.left["leaves"], 1, "the prefill worker sees the client leave")

    await router.until_idle()
    assert workers.legs("leaves", CHAT).decode == []


async def test_client_that_leaves_ends_its_decode(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers]
) -> None:
    """The same after the prefill."""
    workers = start_pd(1, 1)
    router = start_router([], *workers.flags, *QUICK, workers=2)
    headers = [("X-Test-Id", "leaves"), ("X-Test-Decode", "hang")]
    async with Connection(router.port) as connection:
        await connection.send("POST", CHAT, headers, chat())
        await until(lambda: workers.legs("leaves", CHAT).decode, 5, "the decode leg arrives")
        metrics = router.metrics()
        assert metrics("worker_in_flight", worker=workers.prefill_urls[0]) == 0
        assert metrics("worker_in_flight", worker=workers.decode_urls[0]) == 1
        connection.abort()
        await until(lambda: workers.left["leaves"], 1, "the decode worker sees the client leave")

    await router.until_idle()


NAMING = (
    b'{"model":"m","messages":[],"kv_transfer_params":{"remote_host":"evil"}}',
    b'{"model":"m","messages":[],"kv_transf\\u0065r_params":{"remote_host":"evil"}}',
    '{"model":"m","messages":[],"kv_transfer_params":{"remote_host":"evil"}}'.encode("utf-16"),
)


async def test_client_names_no_host_while_the_service_is_away(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers]
) -> None:
    """Requests that could are refused; others are served whole, and byte for byte."""
    workers = start_pd(1, 1)
    router = start_router([], *workers.flags, *QUICK, "--decision-timeout-secs", "0.2", workers=2)
    large = chat(pad="x" * 3_000_000)
    with router.service_stopped():
        for body in NAMING:
            _, response = await post(router, CHAT, body)
            assert response.status == 503
            openai_error(response)
        _, response = await post(router, CHAT, NAMING[0], ("X-Router-Cluster", "default"))
        assert response.status == 503
        for body in (chat(), large):
            request_id, response = await post(router, CHAT, body)
            assert (response.status, response.body) == (200, WHOLE_ANSWER)
            (leg,) = workers.legs(request_id, CHAT).decode
            assert leg.sha256 == hashlib.sha256(body).hexdigest()
    assert len(workers.decode[0].received(CHAT)) == 2


@pytest.mark.parametrize("again", ["500", 'answer {"kv_transfer_params":{"n":"%s"}}' % ("x" * 300)])
async def test_service_that_dies_between_two_attempts(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers], again: str
) -> None:
    """Attempts share their headers: the length of a body that another one had must not be said of this one."""
    workers = start_pd(1, 2)
    router = start_router([], *workers.flags, *QUICK, "--retry-max-retries", "5", workers=3)
    wanted = ("X-Test-Prefill", f";{again}"), ("X-Test-Decode", "500;500;wait 500;")
    asking = asyncio.create_task(post_as(router, CHAT, chat(), "dies", *wanted))
    await until(lambda: len(workers.legs("dies", CHAT).decode) == 3, 10, "the third attempt")

    router.kill_service()
    workers.went_on.set()
    response = await asking

    legs = workers.legs("dies", CHAT).decode
    assert response.status == 200
    assert len(legs) == 4
    assert len({len(leg.body) for leg in legs}) == 2, "the third had another body"
    for leg in legs:
        assert leg.values("content-length") == [str(len(leg.body))]
        json.loads(leg.body)


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
async def test_service_that_dies_during_a_prefill(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers], closed: bool
) -> None:
    """A decode worker does all of it, or with ``--fail-closed`` the client is told."""
    workers = start_pd(1, 1)
    flags = ["--fail-closed"] if closed else []
    router = start_router([], *workers.flags, *QUICK, *flags, workers=2)
    body = b'{"model":"m","prompt":"x"}'
    asking = asyncio.create_task(post(router, COMPLETIONS, body, ("X-Test-Prefill", "hang")))
    prefill = workers.prefill[0]
    await until(lambda: prefill.received(COMPLETIONS), 5, "the prefill leg arrives")
    (request_id,) = prefill.received(COMPLETIONS)[0].values("x-test-id")

    router.kill_service()
    _, response = await asking

    if closed:
        assert response.status == 503
        openai_error(response)
        check_no_address(response)
        assert workers.legs(request_id, COMPLETIONS).decode == []
    else:
        assert (response.status, response.body) == (200, WHOLE_ANSWER)
        assert [leg.body for leg in workers.legs(request_id, COMPLETIONS).decode] == [body]
    await until(lambda: workers.left[request_id], 5, "the prefill worker sees the service leave")
    await router.until_serving(20)
    router.until_workers(2)
    request_id, response = await post(router, CHAT, chat())
    workers.legs(request_id, CHAT).one()
    await router.until_idle()


async def test_request_waits_for_a_decode_worker_after_its_prefill(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers]
) -> None:
    """All of them went away while the prompt was computed, and one comes back."""
    workers = start_pd(1, 1)
    router = start_router(
        [],
        *workers.flags,
        *("--health-check-interval-secs", "0.2", "--health-failure-threshold", "1"),
        *("--health-success-threshold", "1", "--no-worker-timeout-secs", "10"),
        workers=2,
    )
    asking = asyncio.create_task(post(router, CHAT, chat(), ("X-Test-Prefill", "wait")))
    await until(lambda: workers.prefill[0].received(CHAT), 5, "the prefill leg arrives")
    workers.decode[0].refuse()
    router.until_workers(1)

    workers.went_on.set()
    await asyncio.sleep(0.5)
    assert not asking.done()
    workers.decode[0].come_back()
    request_id, response = await asking

    assert (response.status, response.body) == (200, WHOLE_ANSWER)
    _, decode = workers.legs(request_id, CHAT).one()
    assert decode.body == with_params(chat())
    await router.until_idle()


async def test_request_does_not_wait_for_ever_for_a_decode_worker(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers]
) -> None:
    """It is refused when the time is up."""
    workers = start_pd(1, 1)
    router = start_router(
        [],
        *workers.flags,
        *("--health-check-interval-secs", "0.2", "--health-failure-threshold", "1"),
        *("--no-worker-timeout-secs", "1"),
        workers=2,
    )
    asking = asyncio.create_task(post(router, CHAT, chat(), ("X-Test-Prefill", "wait")))
    await until(lambda: workers.prefill[0].received(CHAT), 5, "the prefill leg arrives")
    workers.decode[0].refuse()
    router.until_workers(1)

    workers.went_on.set()
    began = time.monotonic()
    _, response = await asking

    assert response.status == 503
    assert openai_error(response)["code"] == "no_worker_available"
    check_no_address(response)
    assert 0.5 < time.monotonic() - began < 5
    await router.until_idle()


ZONES = ("prefill", "a"), ("prefill", "b"), ("decode", "a"), ("decode", "b")


@pytest.mark.parametrize("rule", ["prefer", "require"])
async def test_both_workers_are_of_one_zone(
    start_router: StartRouter,
    start_pd: Callable[..., PdWorkers],
    tmp_path: Path,
    rule: str,
) -> None:
    """When the zone has no decode worker left, another one will do, or does all of it."""
    workers = start_pd(2, 2)
    everybody = (*workers.prefill, *workers.decode)
    path = write_workers(
        tmp_path / "workers.json",
        [
            {"url": worker.urls[0], "worker_type": role, "labels": {"zone": zone}}
            for worker, (role, zone) in zip(everybody, ZONES, strict=True)
        ],
    )
    router = start_router(
        [],
        *FLAGS,
        *("--worker-file", path, "--pd-topology-label", "zone", "--pd-topology", rule),
        *("--health-check-interval-secs", "0.2", "--health-failure-threshold", "1"),
        *("--no-worker-timeout-secs", "5"),
        workers=4,
    )
    zone_of = {worker.ports[0]: zone for worker, (_, zone) in zip(everybody, ZONES, strict=True)}

    for _ in range(6):
        request_id, response = await post(router, CHAT, chat())
        prefill, decode = workers.legs(request_id, CHAT).one()
        assert zone_of[prefill.port] == zone_of[decode.port]
        assert decode.body == with_params(chat())

    # Zone b loses its decode worker while a prompt is computed there.
    asking = [
        asyncio.create_task(post(router, CHAT, chat(), ("X-Test-Prefill", "wait"))) for _ in "ab"
    ]

    def under_way(worker: RawWorker) -> bool:
        return any(r.values("x-test-prefill") for r in worker.received(CHAT))

    await until(lambda: all(map(under_way, workers.prefill)), 5, "both prefill legs arrive")
    workers.decode[1].refuse()
    router.until_workers(3)
    workers.went_on.set()
    pairs = {}
    for task in asking:
        request_id, response = await task
        assert response.status == 200
        prefill, decode = workers.legs(request_id, CHAT).one()
        pairs[zone_of[prefill.port]] = zone_of[decode.port], decode.body

    assert pairs["a"] == ("a", with_params(chat()))
    assert pairs["b"] == ("a", with_params(chat()) if rule == "prefer" else chat())
    for _ in range(4):  # from now on nobody asks in zone b
        request_id, _ = await post(router, CHAT, chat())
        prefill, decode = workers.legs(request_id, CHAT).one()
        assert zone_of[prefill.port] == zone_of[decode.port] == "a"
    await router.until_idle()
