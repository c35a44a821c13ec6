"""What happens in the engine when clients go away, and to clients when the worker does."""

import asyncio

import aiohttp
import pytest

from extproc.sim.recorder import Outcome

CHAT = "/v1/chat/completions"


async def test_a_client_that_leaves_its_stream_frees_the_engine(
    start_worker, http, chat_body, until
):
    """The request is aborted at once, its blocks return, and the record says who left."""
    worker = await start_worker(itl_ms=20)
    async with http.post(worker.url + CHAT, json=chat_body(stream=True, max_tokens=9999)) as answer:
        await answer.content.readline()
        assert worker.engine.running == 1
        answer.close()

        await until(lambda: worker.engine.running == 0)

    assert worker.engine.kv_usage_ratio == 0
    assert worker.state()["aborted"] == 1
    await until(lambda: worker.recorder[-1].outcome is Outcome.CANCELLED)
    assert worker.recorder[-1].status == 200


async def test_a_client_that_leaves_before_the_answer_frees_the_engine(
    start_worker, http, chat_body, until
):
    """Running or waiting makes no difference."""
    worker = await start_worker(itl_ms=60_000, max_num_seqs=1)
    requests = [
        asyncio.create_task(http.post(worker.url + CHAT, json=chat_body())) for _ in range(2)
    ]
    await until(lambda: (worker.engine.running, worker.engine.waiting) == (1, 1))

    for request in requests:
        request.cancel()
    await asyncio.wait(requests, timeout=5)

    await until(lambda: worker.state()["requests_active"] == 0)
    assert (worker.engine.running, worker.engine.waiting) == (0, 0)
    assert worker.state()["aborted"] == 2
    assert [arrival.outcome for arrival in worker.recorder] == [Outcome.CANCELLED] * 2
    assert [arrival.status for arrival in worker.recorder] == [None] * 2


async def test_a_client_that_leaves_lets_the_next_one_in(start_worker, http, chat_body, until):
    """The place in the batch is free without waiting for the next token."""
    worker = await start_worker(itl_ms=60_000, ttft_ms=0, max_num_seqs=1)
    async with http.post(worker.url + CHAT, json=chat_body(stream=True)) as first:
        await first.content.readline()
        async with http.post(worker.url + CHAT, json=chat_body(stream=True)) as second:
            await until(lambda: worker.engine.waiting == 1)

            first.close()

            await asyncio.wait_for(second.content.readline(), 5)
    await until(lambda: worker.engine.running == 0)


async def test_a_body_that_never_comes_to_its_end_is_recorded(worker, until):
    """What arrived of it is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
    await until(lambda: len(worker.recorder) == 1 and worker.recorder[-1].body_bytes == 4)

    writer.close()
    await writer.wait_closed()

    await until(lambda: worker.recorder[-1].outcome is Outcome.CANCELLED)
    assert not worker.recorder[-1].complete
    assert await reader.read() == b""


async def test_a_complete_stream_is_recorded_as_ended(worker, http, chat_body):
    """Even when the client closes right after the last event."""
    async with http.post(worker.url + CHAT, json=chat_body(stream=True)) as answer:
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        answer.close()

    assert worker.recorder[-1].outcome is Outcome.ENDED


async def test_stopping_cuts_open_streams(start_worker, http, chat_body):
    """And does not wait for them."""
    worker = await start_worker(itl_ms=60_000, ttft_ms=0)
    async with http.post(worker.url + CHAT, json=chat_body(stream=True)) as answer:
        await answer.content.readline()

        async with asyncio.timeout(5):
            await worker.stop()

        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert worker.recorder[-1].outcome is Outcome.BROKEN
    with pytest.raises(aiohttp.ClientConnectorError):
        await http.get(worker.url + "/health")
    await worker.stop()


async def test_a_worker_can_be_stopped_before_it_was_started(start_worker):
    """Cleaning up never needs to know how far things went."""
    worker = await start_worker()
    twin = type(worker)(worker.config)

    await twin.stop()
