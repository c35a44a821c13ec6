"""What the client's answer says of the prompt: what the prefill worker knows of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Router
from tests.e2e.pd_support import (
    CHAT,
    COMPLETIONS,
    EVENTS,
    RESPONSES,
    WHOLE_ANSWER,
    PdWorkers,
    chat,
    post,
)

pytestmark = [pytest.mark.envoy, pytest.mark.slow]


@pytest.fixture(scope="module")
def workers() -> Iterator[PdWorkers]:
    """One worker of each role."""
    workers = PdWorkers(1, 1)
    yield workers
    workers.stop()


@pytest.fixture(scope="module")
def router(workers: PdWorkers, logs: Path) -> Iterator[Router]:
    """Start a router before them."""
    router = Router([], logs, *workers.flags)
    try:
        yield router.until_ready(workers=2)
        router.stop()
    finally:
        router.end()


TOLD = {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41}
CACHED = {**TOLD, "prompt_tokens_details": {"cached_tokens": 16}}
OF_DECODE = {
    "prompt_tokens": 40,
    "completion_tokens": 7,
    "total_tokens": 47,
    "prompt_tokens_details": {"cached_tokens": 39, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
MERGED = {**OF_DECODE, "prompt_tokens_details": {"cached_tokens": 16, "audio_tokens": 0}}


async def ask(
    router: Router, path: str, body: bytes, prefill: Any, decode: str
) -> tuple[Any, list[tuple[str, str]], bytes]:
    """Send a request of which the workers give these answers; return status, headers and body."""
    kv = {"kv_transfer_params": {"remote_host": "h"}}
    headers = [
        ("X-Test-Prefill", f"answer {json.dumps({**prefill, **kv})}"),
        ("X-Test-Decode", decode),
    ]
    _, response = await post(router, path, body, *headers)
    return response.status, response.headers, response.body


async def test_cached_tokens_of_a_whole_answer_are_the_prefill_workers(router: Router) -> None:
    """All other bytes stay."""
    answer = f'{{ "id":"x",  "usage": {json.dumps(OF_DECODE)} ,"a":1.0}}'

    status, _, body = await ask(router, CHAT, chat(), {"usage": CACHED}, f"answer {answer}")

    assert status == 200
    assert body.decode() == answer.replace('"cached_tokens": 39', '"cached_tokens": 16')
    assert json.loads(body)["usage"] == MERGED


async def test_cached_tokens_of_a_stream_are_the_prefill_workers(router: Router) -> None:
    """The event that has the usage changes, no other one does."""
    events = ['{"id":"x" ,"choices":[]}', json.dumps({"id": "x", "usage": OF_DECODE})]
    body = chat(stream=True, stream_options={"include_usage": True})

    status, headers, got = await ask(
        router, CHAT, body, {"usage": CACHED}, f"events {json.dumps(events)}"
    )

    first, second, done, rest = got.split(b"\n\n")
    assert status == 200
    assert ("content-type", "text/event-stream; charset=utf-8") in headers
    assert first.decode() == f"data: {events[0]}"
    assert json.loads(second.removeprefix(b"data: ")) == {"id": "x", "usage": MERGED}
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_cached_tokens_of_a_response_are_the_prefill_workers(router: Router) -> None:
    """There they have other names, and stand in an event about the whole response."""
    told = {"input_tokens": 40, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 16}}
    usage = {"input_tokens": 40, "output_tokens": 7, "total_tokens": 47}
    usage_of_decode = {**usage, "input_tokens_details": {"cached_tokens": 39}}
    events = [json.dumps({"type": "response.completed", "response": {"usage": usage_of_decode}})]
    body = b'{"model":"m","input":"x","stream":true}'

    _, _, got = await ask(router, RESPONSES, body, {"usage": told}, f"events {json.dumps(events)}")

    event = json.loads(got.split(b"\n\n")[0].removeprefix(b"data: "))
    assert event["response"]["usage"] == {**usage, "input_tokens_details": {"cached_tokens": 16}}


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_needs_nothing_keeps_its_bytes_and_length(
    router: Router, stream: bool
) -> None:
    """Where the prefill worker does not tell what was cached, the answer does not pass through the service."""
    kv = {"kv_transfer_params": {"remote_host": "h"}}

    _, response = await post(
        router,
        CHAT,
        chat(stream=stream),
        ("X-Test-Prefill", f"answer {json.dumps({'usage': TOLD, **kv})}"),
    )

    assert response.body == (EVENTS if stream else WHOLE_ANSWER)
    lengths = [] if stream else [str(len(WHOLE_ANSWER))]
    assert response.values("content-length") == lengths


async def test_error_of_the_decode_worker_is_not_touched(router: Router) -> None:
    """It has no usage, and keeps its length."""
    kv = {"kv_transfer_params": {"remote_host": "h"}}

    _, response = await post(
        router,
        CHAT,
        chat(),
        ("X-Test-Prefill", f"answer {json.dumps({'usage': CACHED, **kv})}"),
        ("X-Test-Decode", "422"),
    )

    assert response.status == 422
    assert response.values("content-length") == [str(len(response.body))]


def logprobs(tokens: list[str], offset: int) -> dict[str, Any]:
    """Return the log probabilities of *tokens*, whose text begins at *offset*."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [-0.5] * len(tokens),
        "top_logprobs": [{token: -0.5} for token in tokens],
        "text_offset": offsets,
    }


async def test_log_probabilities_of_an_echoed_prompt_are_the_prefill_workers(
    router: Router,
) -> None:
    """Those of the prompt come from one worker, those of the answer from the other."""
    body = b'{"model":"m","prompt":"ab cd","echo":true,"logprobs":1,"max_tokens":2}'
    prefill = {
        "choices": [{"index": 0, "text": "ab cd!", "logprobs": logprobs(["ab", " cd", "!"], 0)}]
    }
    decode = {"choices": [{"index": 0, "text": "ab cd! x", "logprobs": logprobs(["!", " x"], 0)}]}

    _, _, got = await ask(router, COMPLETIONS, body, prefill, f"answer {json.dumps(decode)}")

    (choice,) = json.loads(got)["choices"]
    assert choice["text"] == "ab cd! x"
    assert choice["logprobs"] == logprobs(["ab", " cd", "!", " x"], 0)


async def test_prompt_log_probabilities_are_the_prefill_workers(router: Router) -> None:
    """For each of several answers."""
    prompt = [None, {"1": {"logprob": -1.25}}]
    body = b'{"model":"m","messages":[],"prompt_logprobs":1,"n":2}'
    decode = {"prompt_logprobs": None, "choices": [{"index": 0}, {"index": 1}]}

    _, _, got = await ask(
        router, CHAT, body, {"prompt_logprobs": prompt}, f"answer {json.dumps(decode)}"
    )

    assert json.loads(got) == {**decode, "prompt_logprobs": prompt}


async def test_usage_and_length_of_a_large_answer(router: Router) -> None:
    """It comes in many pieces, of which each is held until the last."""
    answer = json.dumps({"pad": "x" * 40_000, "usage": OF_DECODE})

    status, _, body = await ask(router, CHAT, chat(), {"usage": CACHED}, f"answer {answer}")

    assert status == 200
    assert json.loads(body) == {"pad": "x" * 40_000, "usage": MERGED}
