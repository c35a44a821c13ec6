"""Prefill and decode on different workers: what each of them is sent, and what the client gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import ask
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, until
from tests.e2e.pd_support import (
    CHAT,
    COMPLETIONS,
    EVENTS,
    GENERATE,
    PARAMS,
    PREFILL_PARAMS,
    RESPONSES,
    WHOLE_ANSWER,
    PdWorkers,
    chat,
    post,
    post_as,
)

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

IMAGE = "data:image/png;base64,iVBORw0KGgo="
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def workers() -> Iterator[PdWorkers]:
    """Two workers of each role for the module."""
    workers = PdWorkers()
    yield workers
    workers.stop()


@pytest.fixture(scope="module")
def router(workers: PdWorkers, logs: Path) -> Iterator[Router]:
    """Start a router before them, for the module."""
    router = Router([], logs, *workers.flags)
    try:
        yield router.until_ready(workers=4)
        router.stop()
    finally:
        router.end()


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


def plain(**more: Any) -> dict[str, Any]:
    """Return what the prefill worker of a chat or a completion is asked for."""
    return {
        "kv_transfer_params": PREFILL_PARAMS,
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        **more,
    }


MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": IMAGE}},
        ],
    }
]

BODIES = [
    pytest.param(CHAT, chat(), {}, id="chat"),
    pytest.param(CHAT, chat(stream=True), {}, id="chat-stream"),
    pytest.param(
        CHAT,
        chat(
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            max_completion_tokens=99,
            max_tokens=77,
            n=3,
            seed=1,
            user="u",
        ),
        {"max_completion_tokens": 1, "n": 1, "stream_options": None},
        id="chat-everything",
    ),
    pytest.param(
        CHAT,
        json.dumps(
            {"model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
        ).encode(),
        {},
        id="chat-tools-image",
    ),
    pytest.param(
        COMPLETIONS,
        b'{"model":"m","prompt":[1,2,3],"max_tokens":5,"echo":true,"n":2,"best_of":2}',
        {"n": 1, "best_of": 1},
        id="completions",
    ),
    pytest.param(
        COMPLETIONS,
        b'{"model":"m","prompt":"\\u00e9","stream":true,"stream_options":{"include_usage":true}}',
        {"stream_options": None},
        id="completions-stream",
    ),
]


@pytest.mark.parametrize(("path", "body", "changed"), BODIES)
async def test_prefill_body_asks_for_one_token_and_decode_body_is_the_clients(
    router: Router, workers: PdWorkers, path: str, body: bytes, changed: dict[str, Any]
) -> None:
    """All that the first leg changes is in the table of the facts; the second only gains its parameters."""
    request_id, response = await post(router, path, body)

    prefill, decode = workers.legs(request_id, path).one()
    client = json.loads(body)
    expected = {**client, **plain(), **changed}
    assert json.loads(prefill.body) == {k: v for k, v in expected.items() if v is not None}
    assert decode.body == with_params(body)
    assert response.status == 200
    assert response.body == (EVENTS if client.get("stream") else WHOLE_ANSWER)


def with_params(body: bytes) -> bytes:
    """Return what the decode worker gets for a client's *body*."""
    assert body.startswith(b"{")
    return b'{"kv_transfer_params":' + PARAMS + b"," + body[1:]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_split(router: Router, workers: PdWorkers, stream: bool) -> None:
    """They have a name of their own for the number of tokens."""
    body = json.dumps(
        {"model": "m", "input": "hi", "max_output_tokens": 50, "stream": stream, "tools": []}
    ).encode()

    request_id, response = await post(router, RESPONSES, body)

    prefill, decode = workers.legs(request_id, RESPONSES).one()
    assert json.loads(prefill.body) == {
        "kv_transfer_params": PREFILL_PARAMS,
        "model": "m",
        "input": "hi",
        "max_output_tokens": 1,
        "stream": False,
        "tools": [],
    }
    assert decode.body == with_params(body)
    assert response.body == (EVENTS if stream else WHOLE_ANSWER)


@pytest.mark.parametrize("stream", [False, True])
async def test_generate_is_split(router: Router, workers: PdWorkers, stream: bool) -> None:
    """Its number of tokens stands in its sampling parameters."""
    body = json.dumps(
        {
            "model": "m",
            "token_ids": [1, 2],
            "sampling_params": {"max_tokens": 9, "n": 2, "temperature": 0.0},
            "stream": stream,
        }
    ).encode()

    request_id, response = await post(router, GENERATE, body)

    prefill, decode = workers.legs(request_id, GENERATE).one()
    assert json.loads(prefill.body) == {
        "kv_transfer_params": PREFILL_PARAMS,
        "model": "m",
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 1, "min_tokens": 1, "n": 1, "temperature": 0.0},
        "stream": False,
    }
    assert decode.body == with_params(body)
    assert response.body == (EVENTS if stream else WHOLE_ANSWER)


async def test_white_space_and_duplicates_and_numbers_stay(
    router: Router, workers: PdWorkers
) -> None:
    """Every byte that is not about the number of tokens is the client's on both legs."""
    body = (
        b'{\n\t"model" :"m" , "temperature": 1.50e0,"seed":12345678901234567890,\r\n"x":{"a":1,"a":2},'
        b'"messages":[ {"role":"user","content":"\\ud83d\\ude00 \xe2\x82\xac"} ],"max_tokens":4 ,"max_tokens": 5}  '
    )

    request_id, _ = await post(router, CHAT, body)

    prefill, decode = workers.legs(request_id, CHAT).one()
    assert decode.body == with_params(body)
    head = (
        b'{"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
        b'"remote_block_ids":null,"remote_host":null,"remote_port":null},"min_tokens":1,"stream":false,'
    )
    kept = body[1:].replace(b'"max_tokens":4', b'"max_tokens":1')
    assert prefill.body == head + kept.replace(b'"max_tokens": 5', b'"max_tokens": 1')


async def test_large_body_is_split_and_arrives_unchanged(
    router: Router, workers: PdWorkers
) -> None:
    """A body of more than one buffer's size, sent in chunks, too."""
    body = chat(pad="x" * 60_000)
    chunks = [body[at : at + 7_001] for at in range(0, len(body), 7_001)]
    headers = [("Content-Type", "application/json"), ("X-Test-Id", "large")]

    response = await ask(router.port, "POST", CHAT, headers, chunks=chunks)

    assert response.status == 200
    prefill, decode = workers.legs("large", CHAT).one()
    assert decode.body == with_params(body)
    assert json.loads(prefill.body) == {**json.loads(body), **plain()}


HEADERS = [
    ("Authorization", "Bearer sk-client"),
    ("Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("Tracestate", "a=b"),
    ("Baggage", "k=v"),
    ("X-Tenant-Id", "tenant"),
    ("X-Odd", "caf\xc3\xa9"),
    ("User-Agent", "client/1"),
]


async def test_headers_of_the_client_reach_both_legs(router: Router, workers: PdWorkers) -> None:
    """Who asks, for whom, and the trace it belongs to; the id is the same on both legs, and the client's."""
    request_id, response = await post(router, CHAT, chat(), *HEADERS)

    prefill, decode = workers.legs(request_id, CHAT).one()
    for leg in (prefill, decode):
        for name, value in HEADERS:
            assert leg.values(name) == [value], name
        assert leg.values("x-request-id") == [request_id]
        assert leg.values("content-type") == ["application/json"]
        assert leg.values("content-length") == [str(len(leg.body))]
    assert response.values("x-request-id") == [request_id]


async def test_legs_of_a_request_without_an_id_get_the_same(
    router: Router, workers: PdWorkers
) -> None:
    """The client is shown the one that was made up."""
    response = await ask(router.port, "POST", CHAT, [("X-Test-Id", "no-id")], chat())

    prefill, decode = workers.legs("no-id", CHAT).one()
    (made_up,) = response.values("x-request-id")
    assert len(made_up) == 32
    assert prefill.values("x-request-id") == decode.values("x-request-id") == [made_up]


INTERNAL = (
    ("X-Router-Leg", "0" * 32),
    ("X-Router-Cluster", "elsewhere"),
    ("X-Router-Served", "1.2.3.4:5"),
    ("X-Gateway-Destination-Endpoint", "1.2.3.4:5"),
    ("X-Envoy-Max-Retries", "99"),
    ("X-Data-Parallel-Rank", "7"),
)


async def test_what_is_the_routers_own_reaches_no_worker(
    router: Router, workers: PdWorkers
) -> None:
    """Neither from the client nor from the router itself; the client sees nothing of it either."""
    request_id, response = await post(router, CHAT, chat(), *INTERNAL)

    assert response.status == 200
    for leg in workers.legs(request_id, CHAT).one():
        inner = [n for n in leg.names() if n.startswith(("x-router-", "x-gateway-", "x-envoy-"))]
        assert inner == []
        assert "x-data-parallel-rank" not in leg.names() or leg.values("x-data-parallel-rank") == [
            "7"
        ]
    assert [n for n, _ in response.headers if n.lower().startswith("x-router-")] == []


SMUGGLED = [
    b'{"do_remote_prefill":true,"remote_host":"6.6.6.6"}',
    b"null",
    b'"x"',
]


@pytest.mark.parametrize("value", SMUGGLED)
async def test_transfer_parameters_of_a_client_reach_no_worker(
    router: Router, workers: PdWorkers, value: bytes
) -> None:
    """In no place where a worker would look for them, twice and in escapes."""
    body = (
        b'{"kv_transfer_params":%b,"model":"m","prompt":"x","kv_transfer_param\\u0073":%b,'
        b'"vllm_xargs":{"kv_transfer_params":%b,"a":1}}' % (value, value, value)
    )

    request_id, response = await post(router, COMPLETIONS, body)

    assert response.status == 200
    prefill, decode = workers.legs(request_id, COMPLETIONS).one()
    assert json.loads(prefill.body)["kv_transfer_params"] == PREFILL_PARAMS
    assert b"6.6.6.6" not in prefill.body + decode.body
    assert json.loads(decode.body) == {
        "kv_transfer_params": json.loads(PARAMS),
        "model": "m",
        "prompt": "x",
        "vllm_xargs": {"a": 1},
    }


@pytest.mark.parametrize(
    "path", ["/tokenize", "/v1/embeddings", "/rerank", "/v1/messages", "/generate", "/v1/score"]
)
async def test_other_paths_are_not_split(router: Router, workers: PdWorkers, path: str) -> None:
    """They have no prefill phase of their own; what a client says of transfers is taken from them too."""
    body = b'{ "model":"m", "kv_transfer_params":{"remote_host":"6.6.6.6"},"input":"x"}'

    request_id, response = await post(router, path, body)

    arrived = workers.legs(request_id, path).whole()
    assert response.status == 200
    assert json.loads(arrived.body) == {"model": "m", "input": "x"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","input":"x","previous_response_id":"resp_1"}',
    ],
)
async def test_continued_response_is_not_split(
    router: Router, workers: PdWorkers, body: bytes
) -> None:
    """Only who gave the earlier one knows what it said."""
    request_id, response = await post(router, RESPONSES, body)

    assert workers.legs(request_id, RESPONSES).whole().body == body
    assert response.status == 200


@pytest.mark.parametrize("prompt", ['["a", "b"]', "[[1, 2], [3]]"], ids=["texts", "token lists"])
async def test_completion_of_several_prompts_is_not_split(
    router: Router, workers: PdWorkers, prompt: str
) -> None:
    """The parameters of one transfer speak of one prompt."""
    body = f'{{"model":"m","prompt":{prompt}}}'.encode()

    request_id, response = await post(router, COMPLETIONS, body)

    assert workers.legs(request_id, COMPLETIONS).whole().body == body
    assert response.status == 200


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"", b'{"model":"m","messages":NaN}'])
async def test_what_cannot_be_read_is_left_to_a_decode_worker(
    router: Router, workers: PdWorkers, body: bytes
) -> None:
    """It judges requests, not the router."""
    request_id, response = await post(router, CHAT, body)

    assert response.status == 200
    assert workers.legs(request_id, CHAT).whole().body == body


async def test_both_roles_take_turns(router: Router, workers: PdWorkers) -> None:
    """Each role has a policy and all of its workers get requests; a GET goes to a decode worker."""
    seen = set()
    for _ in range(4):
        request_id, _ = await post(router, CHAT, chat())
        seen |= {leg.port for leg in workers.legs(request_id, CHAT).one()}
    response = await ask(router.port, "GET", "/version")

    assert seen == {port for worker in (*workers.prefill, *workers.decode) for port in worker.ports}
    assert response.json()["port"] in [worker.ports[0] for worker in workers.decode]


async def test_alias_is_renamed_on_both_legs(start_router: StartRouter, workers: PdWorkers) -> None:
    """Neither worker has heard of the name that clients use."""
    router = start_router([], *workers.flags, "--model-alias", "gpt-4=m", workers=4)
    body = b'{"model": "gpt-4" ,"prompt":"x"}'

    request_id, response = await post(router, COMPLETIONS, body)

    assert response.status == 200
    prefill, decode = workers.legs(request_id, COMPLETIONS).one()
    assert json.loads(prefill.body)["model"] == "m"
    assert decode.body == with_params(b'{"model": "m" ,"prompt":"x"}')


async def test_key_for_workers_is_on_both_legs(
    start_router: StartRouter, workers: PdWorkers
) -> None:
    """The client's own stays with the router."""
    router = start_router([], *workers.flags, "--worker-api-key", "wk", workers=4)

    request_id, response = await post(router, CHAT, chat(), ("Authorization", "Bearer client"))

    assert response.status == 200
    for leg in workers.legs(request_id, CHAT).one():
        assert leg.values("authorization") == ["Bearer wk"]


async def test_short_prompts_go_to_a_decode_worker(
    start_router: StartRouter, workers: PdWorkers
) -> None:
    """Below the given length, estimated, both text and token ids."""
    router = start_router([], *workers.flags, "--pd-min-prefill-tokens", "100", workers=4)
    short = b'{"model":"m","prompt":"%b"}' % (b"x" * 396)
    long = b'{"model":"m","prompt":"%b"}' % (b"x" * 400)
    ids = json.dumps({"model": "m", "prompt": [1] * 100}).encode()

    first, _ = await post(router, COMPLETIONS, short)
    second, _ = await post(router, COMPLETIONS, long)
    third, _ = await post(router, COMPLETIONS, ids)

    assert workers.legs(first, COMPLETIONS).whole().body == short
    assert workers.legs(second, COMPLETIONS).one()[1].body == with_params(long)
    workers.legs(third, COMPLETIONS).one()


async def test_id_in_another_header_is_that_of_both_legs(
    start_router: StartRouter, workers: PdWorkers
) -> None:
    """As for requests that are not split."""
    router = start_router(
        [], *workers.flags, "--request-id-headers", "x-correlation-id", "x-request-id", workers=4
    )
    headers = [("X-Correlation-Id", "corr-1"), ("X-Test-Id", "corr")]

    response = await ask(router.port, "POST", CHAT, headers, chat())

    prefill, decode = workers.legs("corr", CHAT).one()
    assert prefill.values("x-request-id") == decode.values("x-request-id") == ["corr-1"]
    assert response.values("x-request-id") == ["corr-1"]


async def test_push_runs_both_legs_at_once(
    start_router: StartRouter, start_pd: Callable[..., PdWorkers]
) -> None:
    """From the second request on, both have an id of their own, which the client does not see."""
    workers = start_pd(1, 1)
    workers.params = (
        b'{"remote_engine_id":"e","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2,'
        b'"transfer_mode":"push"}'
    )
    flags = ("--request-id-headers", "x-correlation-id", "x-request-id")
    router = start_router([], *workers.flags, *flags, workers=2)
    first, _ = await post(router, CHAT, chat())
    second = "second"
    wait = ("X-Test-Prefill", "wait"), ("X-Test-Decode", "wait")
    asking = asyncio.create_task(
        post_as(router, CHAT, chat(), second, *wait, ("X-Correlation-Id", "corr-2"))
    )
    both = workers.legs
    await until(
        lambda: both(second, CHAT).prefill and both(second, CHAT).decode, 5, "both legs are there"
    )
    workers.went_on.set()
    response = await asking

    decode = workers.legs(first, CHAT).decode[0]
    assert json.loads(decode.body)["kv_transfer_params"] == json.loads(workers.params)
    prefill, decode = workers.legs(second, CHAT).one()
    (own_id,) = decode.values("x-request-id")
    assert prefill.values("x-request-id") == [own_id]
    assert own_id not in ("corr-2", second)
    params = json.loads(decode.body)["kv_transfer_params"]
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "remote_request_id": own_id,
    }
    assert json.loads(prefill.body) == {**json.loads(chat()), **plain()}
    assert response.status == 200
    assert response.values("x-request-id") == ["corr-2"]
    await router.until_idle()
