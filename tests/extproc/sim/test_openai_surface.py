"""The inference routes through the real OpenAI SDK."""

import itertools
import math

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Name the days of the week, please."}]


async def test_chat_says_which_worker_answers(client):
    """The answer, its usage and its header name the worker."""
    raw = await client.chat.completions.with_raw_response.create(
        model="sim-model", messages=MESSAGES, max_tokens=12
    )
    answer = raw.parse()

    choice = answer.choices[0]
    assert choice.message.content.startswith("Hello from w1.")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id.startswith("chatcmpl-")
    assert raw.headers["x-sim-worker"] == "w1"


async def test_a_repeated_chat_is_cached(client):
    """Usage says so, to the block."""
    messages = [{"role": "user", "content": "x" * 400}]
    answers = [
        await client.chat.completions.create(model="sim-model", messages=messages) for _ in range(2)
    ]

    usage = answers[1].usage
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


async def test_an_answer_without_a_limit_ends_by_itself(client):
    """Sixteen tokens and reason stop; either name of the limit is taken."""
    ask = client.chat.completions.create

    free = await ask(model="sim-model", messages=MESSAGES)
    limited = await ask(model="sim-model", messages=MESSAGES, max_completion_tokens=3, max_tokens=9)

    assert (free.choices[0].finish_reason, free.usage.completion_tokens) == ("stop", 16)
    assert (limited.choices[0].finish_reason, limited.usage.completion_tokens) == ("length", 3)


async def test_streamed_chat_is_the_same_answer_in_pieces(client):
    """One chunk a token, the role first, the reason last, then the usage."""
    whole = await client.chat.completions.create(model="sim-model", messages=MESSAGES, max_tokens=9)
    stream = await client.chat.completions.create(
        model="sim-model",
        messages=MESSAGES,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert len(pieces) == 9
    assert "".join(pieces) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[1:-1]] == [None] * 8 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


async def test_several_choices_share_their_prompt(client):
    """Streamed or not, each choice is complete and different, and the prompt counts once."""
    ask = {"model": "sim-model", "messages": MESSAGES, "max_tokens": 12, "n": 3}
    whole = await client.chat.completions.create(**ask)
    texts = dict.fromkeys(range(3), "")
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content

    assert [choice.message.content for choice in whole.choices] == list(texts.values())
    assert len(set(texts.values())) == 3
    assert whole.usage.completion_tokens == 36
    single = await client.chat.completions.create(**{**ask, "n": 1})
    assert whole.usage.prompt_tokens == single.usage.prompt_tokens


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("Once", 1), (["Once", "Twice"], 2), ([1, 2, 3], 1), ([[1, 2, 3], [4]], 2)],
)
async def test_completions_take_text_and_token_ids(client, prompt, prompts):
    """One choice for each prompt and each of ``n``."""
    answer = await client.completions.create(model="sim-model", prompt=prompt, n=2)

    assert [choice.index for choice in answer.choices] == list(range(2 * prompts))
    assert all(choice.text.startswith("Hello from w1.") for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 16 * 2 * prompts
    assert answer.id.startswith("cmpl-")


async def test_streamed_completions(client):
    """The pieces add up to the whole, and the usage comes when asked for."""
    ask = {"model": "sim-model", "prompt": "Once", "max_tokens": 5}
    whole = await client.completions.create(**ask)
    stream = await client.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


async def test_embeddings_are_unit_vectors_in_either_encoding(client):
    """The SDK asks for base64 by itself; a list gives one vector each."""
    ask = client.embeddings.create
    encoded = await ask(model="sim-model", input=["red", "green"])
    plain = await ask(model="sim-model", input="red", encoding_format="float", dimensions=64)

    assert [item.index for item in encoded.data] == [0, 1]
    assert encoded.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert encoded.data[0].embedding != encoded.data[1].embedding
    assert math.hypot(*plain.data[0].embedding) == pytest.approx(1)
    assert encoded.usage.prompt_tokens == 3


async def test_models_lists_every_name(start_worker, connect):
    """Each name can be asked for; the answer says the name that was asked."""
    client = await connect(await start_worker(models=("base", "alias")))

    assert [model.id async for model in client.models.list()] == ["base", "alias"]
    answer = await client.chat.completions.create(model="alias", messages=MESSAGES)
    assert answer.model == "alias"


async def test_responses_whole(client):
    """Input as text or as items, with instructions."""
    ask = client.responses.create
    answer = await ask(model="sim-model", input="Hi", instructions="Be brief.")
    items = await ask(model="sim-model", input=[{"role": "user", "content": "Hi"}])
    cut = await ask(model="sim-model", input="Hi", max_output_tokens=4)

    assert answer.output_text.startswith("Hello from w1.")
    assert (answer.status, answer.usage.output_tokens) == ("completed", 16)
    assert items.output_text != ""
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_responses_streamed(client):
    """The events come in the order and with the numbers that the SDK expects."""
    async with client.responses.stream(model="sim-model", input="Hi") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    assert final.output_text.startswith("Hello from w1.")


async def test_transcription_of_a_multipart_upload(client):
    """The answer says how much came."""
    answer = await client.audio.transcriptions.create(
        model="sim-model", file=("speech.wav", b"\0" * 200_000)
    )

    assert answer.text.startswith("Hello from w1. The upload had 2")


async def test_an_unknown_model_is_not_found(client):
    """As vLLM says it."""
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist") as caught:
        await client.chat.completions.create(model="other", messages=MESSAGES)

    assert caught.value.body["type"] == "NotFoundError"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"messages": []}, "messages must not be empty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"n": 0}, "n must be at least 1"),
        ({"max_tokens": 200_000}, "maximum context length is 131072"),
        ({"temperature": "warm", "n": "x"}, "Expected `int | null`, got `str` - at `\\$.n`"),
    ],
)
async def test_impossible_requests_are_refused(client, wrong, message):
    """Status 400 with the reason."""
    with pytest.raises(openai.BadRequestError, match=message):
        await client.chat.completions.create(
            **{"model": "sim-model", "messages": MESSAGES, **wrong}
        )
