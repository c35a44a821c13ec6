"""Several data-parallel ranks in one worker."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"
RANK = "X-data-parallel-rank"


async def figures(http, worker, name):
    """Return the values of metric *name* by engine."""
    page = await (await http.get(worker.url + "/metrics")).text()
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


async def test_a_worker_has_one_rank_by_default(worker, http, chat_body):
    """Rank 0, by name too."""
    answers = [
        await http.post(worker.url + CHAT, json=chat_body(), headers=headers)
        for headers in ({}, {RANK: "0"}, {RANK: "1"})
    ]

    assert [answer.status for answer in answers] == [200, 200, 400]
    assert worker.state()["ranks"] == {"0": 2}


async def test_every_series_is_there_for_every_rank(start_worker, http):
    """With the numbers that the worker was given; what is counted per worker is named ``sim_``."""
    worker = await start_worker(data_parallel_size=3, data_parallel_start_rank=4)
    page = await (await http.get(worker.url + "/metrics")).text()

    for family in text_string_to_metric_families(page):
        if family.name.startswith("sim_"):
            continue
        engines = {sample.labels["engine"] for sample in family.samples}
        assert engines == {"4", "5", "6"}, family.name


async def test_the_header_chooses_the_rank(start_worker, http, chat_body):
    """In any letter case; requests, tokens and blocks are counted where they are."""
    worker = await start_worker(data_parallel_size=2, data_parallel_start_rank=2)
    ask = chat_body("x" * 200, max_tokens=5)

    async def cached(rank):
        answer = await http.post(
            worker.url + CHAT, json=ask, headers={"x-Data-Parallel-rank": rank}
        )
        return (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

    hits = [await cached(rank) for rank in ("3", "3", "2")]

    assert (hits[0], hits[1] > 0, hits[2]) == (0, True, 0)
    state = await (await http.get(worker.url + "/_sim/state")).json()
    assert state["ranks"] == {"2": 1, "3": 2}
    assert state["finished"] == 3
    assert await figures(http, worker, "vllm:generation_tokens_total") == {"2": 5, "3": 10}


async def test_running_and_waiting_are_those_of_the_rank(start_worker, http, chat_body, until):
    """A rank that is full lets requests wait while the other is idle."""
    worker = await start_worker(data_parallel_size=2, itl_ms=60_000, max_num_seqs=1)
    tasks = [
        asyncio.create_task(http.post(worker.url + CHAT, json=chat_body(), headers={RANK: "1"}))
        for _ in range(3)
    ]
    await until(lambda: (worker.state()["running"], worker.state()["waiting"]) == (1, 2))

    assert await figures(http, worker, "vllm:num_requests_running") == {"0": 0, "1": 1}
    assert await figures(http, worker, "vllm:num_requests_waiting") == {"0": 0, "1": 2}
    used = await figures(http, worker, "vllm:kv_cache_usage_perc")
    assert used["1"] > used["0"] == 0
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=5)
    await until(lambda: worker.state()["running"] == worker.state()["waiting"] == 0)


async def test_without_the_header_the_least_loaded_rank_serves(start_worker, http, chat_body):
    """Requests that stay spread evenly."""
    worker = await start_worker(data_parallel_size=3, itl_ms=60_000, ttft_ms=0)
    streams = []
    for _ in range(6):
        streams.append(await http.post(worker.url + CHAT, json=chat_body(stream=True)))
        await streams[-1].content.readline()

    assert worker.state()["ranks"] == {"0": 2, "1": 2, "2": 2}
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["1"], "data_parallel_rank 1 is out of range [2, 4)."),
        (["4"], "data_parallel_rank 4 is out of range [2, 4)."),
        (["-1"], "data_parallel_rank -1 is out of range [2, 4)."),
        (["two"], "X-data-parallel-rank must be an integer, got 'two'"),
        (["2,3"], "X-data-parallel-rank must be an integer, got '2,3'"),
        (["2", "3"], "X-data-parallel-rank was sent 2 times: 2, 3"),
        (["2", "2"], "X-data-parallel-rank was sent 2 times: 2, 2"),
    ],
)
async def test_what_names_no_rank_is_refused(start_worker, http, chat_body, values, message):
    """Status 400 in vLLM's form, and no rank is given the request."""
    worker = await start_worker(data_parallel_size=2, data_parallel_start_rank=2)
    headers = [(RANK, value) for value in values]

    answer = await http.post(worker.url + CHAT, json=chat_body(), headers=headers)

    assert answer.status == 400
    assert (await answer.json())["error"] == {
        "message": message,
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    assert worker.state()["ranks"] == {"2": 0, "3": 0}
    arrival = worker.recorder[-1]
    assert [value for name, value in arrival.headers if name == RANK] == values


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/rerank", {"query": "x", "documents": ["x"]}),
    ],
)
async def test_every_format_goes_to_its_rank(start_worker, http, path, fields):
    """Streamed or not."""
    worker = await start_worker(data_parallel_size=2)

    answer = await http.post(worker.url + path, json=fields, headers={RANK: "1"})
    await answer.read()

    assert answer.status == 200
    assert worker.state()["ranks"] == {"0": 0, "1": 1}


async def test_uploads_and_sockets_count_for_their_rank(start_worker, http):
    """Though no engine works for them here."""
    worker = await start_worker(data_parallel_size=2)
    upload = {"content-type": "multipart/form-data; boundary=b", RANK: "1"}

    answer = await http.post(worker.url + "/v1/audio/transcriptions", data=b"--b--", headers=upload)
    async with http.ws_connect(worker.url + "/v1/realtime", headers={RANK: "1"}):
        pass

    assert answer.status == 200
    assert worker.state()["ranks"] == {"0": 0, "1": 2}


async def test_a_reset_empties_the_cache_of_every_rank(start_worker, http, chat_body):
    """It counts once."""
    worker = await start_worker(data_parallel_size=2)
    for rank in ("0", "1"):
        await http.post(worker.url + CHAT, json=chat_body("x" * 200), headers={RANK: rank})
    caches = [rank.engine.cache for rank in worker.ranks]
    before = [cache.cached_blocks for cache in caches]

    await http.post(worker.url + "/reset_prefix_cache")

    assert min(before) > 0
    assert [cache.cached_blocks for cache in caches] == [0, 0]
    assert worker.state()["prefix_cache_resets"] == 1
