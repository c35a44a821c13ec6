"""P2P-NCCL: what both workers are told stands in the request id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import openai_error
from tests.e2e.harness import Router
from tests.e2e.pd_support import CHAT, COMPLETIONS, EVENTS, WHOLE_ANSWER, PdWorkers, chat, post

pytestmark = [pytest.mark.envoy, pytest.mark.slow]


@pytest.fixture(scope="module")
def workers() -> Iterator[PdWorkers]:
    """Two workers of each role, whose prefill hands over nothing in its answer."""
    workers = PdWorkers()
    workers.params = b""
    yield workers
    workers.stop()


@pytest.fixture(scope="module")
def router(workers: PdWorkers, logs: Path) -> Iterator[Router]:
    """Start a router before them."""
    router = Router(
        [],
        logs,
        *workers.flags,
        *("--kv-connector", "nccl", "--disable-circuit-breaker", "--stream-idle-timeout-secs", "1"),
        *("--pd-min-prefill-tokens", "1000", "--health-check-interval-secs", "30"),
    )
    try:
        yield router.until_ready(workers=4)
        router.stop()
    finally:
        router.end()


def transfer_id(prefill: int, decode: int) -> re.Pattern[str]:
    """Return what the id looks like for the workers at these ports."""
    return re.compile(
        rf"___prefill_addr_127\.0\.0\.1:{prefill}___decode_addr_127\.0\.0\.1:{decode}_[0-9a-f]{{32}}"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_have_the_id_that_names_both_workers(
    router: Router, workers: PdWorkers, stream: bool
) -> None:
    """The bodies name nobody, and the client sees its own id; short prompts are split, too."""
    body = chat(stream=stream, n=2)

    request_id, response = await post(router, CHAT, body, ("Authorization", "Bearer c"))

    prefill, decode = workers.legs(request_id, CHAT).one()
    assert prefill.values("x-request-id") == decode.values("x-request-id")
    assert transfer_id(prefill.port, decode.port).fullmatch(decode.values("x-request-id")[0])
    assert decode.body == body
    assert json.loads(prefill.body) == {
        **json.loads(body),
        "max_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "stream": False,
    }
    assert response.body == (EVENTS if stream else WHOLE_ANSWER)
    assert response.values("x-request-id") == [request_id]
    assert prefill.values("authorization") == decode.values("authorization") == ["Bearer c"]
    await router.until_idle()


async def test_id_of_a_client_that_names_workers_is_not_used(
    router: Router, workers: PdWorkers
) -> None:
    """It would say whom workers connect to, split or not."""
    evil = f"___prefill_addr_6.6.6.6:1___decode_addr_6.6.6.7:1_{'0' * 32}"
    for path in (CHAT, "/tokenize"):
        request_id, response = await post(router, path, chat(), ("X-Request-Id", evil))
        legs = workers.legs(request_id, path)
        for leg in (*legs.prefill, *legs.decode):
            assert "6.6.6" not in "".join(leg.values("x-request-id"))
        assert "6.6.6" not in "".join(response.values("x-request-id"))


async def test_parameters_of_a_client_reach_no_worker(router: Router, workers: PdWorkers) -> None:
    """As with every connector."""
    body = b'{"model":"m","kv_transfer_params":{"remote_host":"6.6.6.6"},"prompt":"x"}'

    request_id, _ = await post(router, COMPLETIONS, body)

    prefill, decode = workers.legs(request_id, COMPLETIONS).one()
    assert b"kv_transfer_params" not in prefill.body
    assert decode.body == b'{"model":"m","prompt":"x"}'


@pytest.mark.parametrize("fault", ["500", "reset", "hang"])
async def test_other_prefill_worker_gets_another_id(
    router: Router, workers: PdWorkers, fault: str
) -> None:
    """It must find itself in the id."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Prefill", f"{fault} first"))

    legs = workers.legs(request_id, CHAT)
    assert (response.status, response.body) == (200, WHOLE_ANSWER)
    (decode,) = legs.decode
    assert len(legs.prefill) == 2
    assert legs.prefill[0].port != legs.prefill[1].port
    for leg in legs.prefill:
        assert re.search(rf"prefill_addr_127.0.0.1:{leg.port}_", leg.values("x-request-id")[0])
    (served,) = [
        leg for leg in legs.prefill if leg.values("x-request-id") == decode.values("x-request-id")
    ]
    assert transfer_id(served.port, decode.port).fullmatch(decode.values("x-request-id")[0])
    await router.until_idle()


async def test_nobody_generates_alone(router: Router, workers: PdWorkers) -> None:
    """A decode worker would fail on an id without addresses."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Prefill", "500"))

    assert response.status == 503
    assert openai_error(response)["code"] == "prefill_failed"
    assert workers.legs(request_id, CHAT).decode == []
    assert response.values("x-request-id") == [request_id]
    await router.until_idle()


async def test_no_other_decode_worker_gets_the_id(router: Router, workers: PdWorkers) -> None:
    """It would wait for what was sent elsewhere."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Decode", "reset first"))

    assert response.status == 503
    openai_error(response)
    assert len(workers.legs(request_id, CHAT).decode) == 1
    await router.until_idle()


async def test_refusal_of_a_prefill_worker_is_passed_on(router: Router, workers: PdWorkers) -> None:
    """The decode worker that was chosen is free again."""
    request_id, response = await post(router, CHAT, chat(), ("X-Test-Prefill", "422"))

    assert response.status == 422
    assert workers.legs(request_id, CHAT).decode == []
    assert response.values("x-request-id") == [request_id]
    await router.until_idle()
