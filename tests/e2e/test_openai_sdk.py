"""The real OpenAI SDK, without its own retries, cannot tell the router from a worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.harness import Router, Sim

pytestmark = pytest.mark.envoy

MODEL = "sim-model"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What does a router do?"}],
    "max_tokens": 8,
}
REQUEST_ID = {"X-Request-Id": "e2e"}
"""Part of the ids of the answers: the same id, the same answer."""


def _client(base_url: str) -> openai.OpenAI:
    http_client = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{base_url}/v1",
        api_key="sk-e2e",
        max_retries=0,
        timeout=20,
        http_client=http_client,
    )


@pytest.fixture(scope="module")
def client(sim_router: Router) -> Iterator[openai.OpenAI]:
    with _client(sim_router.base_url) as client:
        yield client


def _without_times(document: Any) -> Any:
    """Return *document* without what depends on the second in which it was made."""
    if isinstance(document, dict):
        return {
            key: _without_times(value)
            for key, value in document.items()
            if key not in ("created", "created_at", "prompt_tokens_details", "input_tokens_details")
        }
    if isinstance(document, list):
        return [_without_times(item) for item in document]
    return document


def _served_by(sims: list[Sim], raw: Any) -> openai.OpenAI:
    """Return a client of the very worker that gave the answer *raw*."""
    (sim,) = [sim for sim in sims if sim.worker_name == raw.headers["x-sim-worker"]]
    return _client(sim.url)


def test_chat_is_that_of_the_worker(client: openai.OpenAI, sims: list[Sim]) -> None:
    """An answer in one piece is the same as when the worker is asked directly."""
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers=REQUEST_ID)
    with _served_by(sims, raw) as direct:
        expected = direct.chat.completions.create(**CHAT, extra_headers=REQUEST_ID)

    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8
    assert _without_times(answer.to_dict()) == _without_times(expected.to_dict())


def test_streamed_chat_is_that_of_the_worker(client: openai.OpenAI, sims: list[Sim]) -> None:
    """The chunks are the same, one by one."""
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    raw = client.chat.completions.with_raw_response.create(**asked, extra_headers=REQUEST_ID)
    chunks = [chunk.to_dict() for chunk in raw.parse()]
    with _served_by(sims, raw) as direct:
        stream = direct.chat.completions.create(**asked, extra_headers=REQUEST_ID)
        expected = [chunk.to_dict() for chunk in stream]

    assert len(chunks) == 10  # role, eight tokens, usage
    assert _without_times(chunks) == _without_times(expected)


@pytest.mark.parametrize("stream", [False, True])
def test_completion(client: openai.OpenAI, stream: bool) -> None:
    """The old completions work, streamed and not."""
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=6, stream=stream
    )

    if stream:
        pieces = [chunk.choices[0].text for chunk in answer if chunk.choices]
        assert len([piece for piece in pieces if piece]) == 6
    else:
        assert answer.usage.completion_tokens == 6
        assert answer.choices[0].finish_reason == "length"


def test_embeddings(client: openai.OpenAI) -> None:
    """The SDK asks for base64 by itself; several inputs give several vectors."""
    answer = client.embeddings.create(model=MODEL, input=["one", "two", "one"])

    first, second, third = (item.embedding for item in answer.data)
    assert len(first) == len(second) == 64
    assert first == third != second


def test_models(client: openai.OpenAI) -> None:
    """The list is the worker's."""
    assert [model.id for model in client.models.list()] == [MODEL]


def test_response(client: openai.OpenAI, sims: list[Sim]) -> None:
    """The Responses API works."""
    asked: dict[str, Any] = {"model": MODEL, "input": "Say hello", "max_output_tokens": 5}
    raw = client.responses.with_raw_response.create(**asked, extra_headers=REQUEST_ID)
    with _served_by(sims, raw) as direct:
        expected = direct.responses.create(**asked, extra_headers=REQUEST_ID)

    answer = raw.parse()
    assert answer.output_text
    assert _without_times(answer.to_dict()) == _without_times(expected.to_dict())


def test_streamed_response(client: openai.OpenAI) -> None:
    """Its events come whole and in order."""
    stream = client.responses.create(model=MODEL, input="Say hello", stream=True)
    events = list(stream)

    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_error_of_the_worker_is_the_sdk_error(client: openai.OpenAI) -> None:
    """The SDK raises what it would raise without a router."""
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(**{**CHAT, "model": "no-such-model"})


def test_error_of_the_router_is_an_sdk_error(router: Router) -> None:
    """The SDK understands the router's own errors, too."""
    with _client(router.base_url) as client, pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model=MODEL, input="x" * (8 * 1024 * 1024))

    assert caught.value.status_code == 413
    assert caught.value.code == "payload_too_large"
    assert caught.value.type == "invalid_request_error"
