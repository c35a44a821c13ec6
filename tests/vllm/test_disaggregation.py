"""Prefill and decode on two real engines: the same tokens as one engine gives."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import Router, http_get
from tests.vllm.conftest import MODEL, Engine

PROMPTS = [
    "A router sends each request to the worker that can answer it soonest. " * 6,
    "The key value cache of a prompt is kept in blocks of a few tokens. " * 9,
    "fox",
]
LIMIT_S = 180
"""The first transfer between two engines shakes hands, which took half a minute on a busy machine."""


@pytest.fixture(scope="module")
def router(
    engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    """Let the first engine prefill for the second."""
    prefill, decode = engines
    flags = ("--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url)
    router = Router([], tmp_path_factory.mktemp("router"), *flags)
    try:
        yield router.until_ready(workers=2)
        router.stop()
    finally:
        router.end()


def ask(url: str, path: str, body: dict[str, Any]) -> bytes:
    """Return the body of the answer."""
    request = urllib.request.Request(  # noqa: S310  of our own
        f"{url}{path}",
        data=json.dumps({"model": MODEL, "temperature": 0, "max_tokens": 24, **body}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as response:  # noqa: S310
        return bytes(response.read())


def events(answer: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream but the last, which is no JSON."""
    lines = [line for line in answer.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def metric(engine: Engine, name: str, label: str = "") -> float:
    """Return the sum of a metric of *engine*, of the series that carry *label*."""
    found = 0.0
    for line in http_get(f"{engine.url}/metrics")[1].splitlines():
        if line.startswith(name) and label in line:
            found += float(line.rpartition(" ")[2])
    return found


@pytest.mark.parametrize("prompt", PROMPTS, ids=["long", "longer", "short"])
def test_tokens_are_those_of_one_engine(
    router: Router, engines: tuple[Engine, Engine], prompt: str
) -> None:
    """At temperature 0, whole and streamed; the prompt is counted once."""
    url = f"http://127.0.0.1:{router.port}"
    alone = json.loads(ask(engines[0].url, "/v1/completions", {"prompt": prompt}))

    split = json.loads(ask(url, "/v1/completions", {"prompt": prompt}))
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    streamed = events(ask(url, "/v1/completions", body))

    text = alone["choices"][0]["text"]
    assert split["choices"][0]["text"] == text
    assert "".join(e["choices"][0]["text"] for e in streamed if e["choices"]) == text
    for usage in (split["usage"], streamed[-1]["usage"]):
        assert usage["prompt_tokens"] == alone["usage"]["prompt_tokens"]
        assert usage["completion_tokens"] == alone["usage"]["completion_tokens"]
        assert usage["total_tokens"] == alone["usage"]["total_tokens"]


def test_blocks_come_from_the_prefill_worker(
    router: Router, engines: tuple[Engine, Engine]
) -> None:
    """A prompt that no engine has seen is not computed where its answer is."""
    prompt = "One worker reads the prompt, another one writes the answer. " * 8
    name, label = "vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"'
    before = metric(engines[1], name, label)

    url = f"http://127.0.0.1:{router.port}"
    messages = [{"role": "user", "content": prompt}]
    split = json.loads(ask(url, "/v1/chat/completions", {"messages": messages}))
    alone = json.loads(ask(engines[0].url, "/v1/chat/completions", {"messages": messages}))

    assert metric(engines[1], name, label) > before
    assert split["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    # It was new to the engine that computed it.
    assert split["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_prefill_worker_that_dies_costs_nobody_an_answer(
    router: Router, engines: tuple[Engine, Engine]
) -> None:
    """The decode worker then computes the prompt itself."""
    prefill, decode = engines
    expected = json.loads(ask(decode.url, "/v1/completions", {"prompt": PROMPTS[0]}))

    prefill.end()
    url = f"http://127.0.0.1:{router.port}"
    answer = json.loads(ask(url, "/v1/completions", {"prompt": PROMPTS[0]}))

    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
