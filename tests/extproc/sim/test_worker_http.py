"""The worker seen as an HTTP server: what it records, its service routes and its errors."""

import asyncio
import base64
import gzip
import hashlib
import io
import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.sim.recorder import BODY_LIMIT_BYTES

CHAT = "/v1/chat/completions"


async def send(worker, head, body=b""):
    """Send bytes as they are on a connection of their own; return the answer's bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(head + b"Connection: close\r\n\r\n" + body)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_request_is_recorded_byte_for_byte(worker, http):
    """Path and query as sent, headers in order and letter case, body by digest and content."""
    body = b'{"model": "sim-model",  "prompt": "x", "unknown": 1e400}'
    body = body.replace(b"1e400", b"[1.0, 2]")
    head = (
        b"POST /v1/completions?b=2&a=%%2F HTTP/1.1\r\nHost: x\r\nX-Odd-Case: 1\r\nx-odd-case: \xe9\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    )

    assert (await send(worker, head, body)).startswith(b"HTTP/1.1 200")

    answer = await http.get(worker.url + "/_sim/requests")
    (shown,) = (await answer.json())["requests"]
    assert (shown["method"], shown["path"]) == ("POST", "/v1/completions?b=2&a=%2F")
    assert shown["headers"] == [
        ["Host", "x"],
        ["X-Odd-Case", "1"],
        ["x-odd-case", "\xe9"],
        ["Content-Type", "application/json"],
        ["Content-Length", str(len(body))],
        ["Connection", "close"],
    ]
    assert shown["body_sha256"] == hashlib.sha256(body).hexdigest()
    assert base64.b64decode(shown["body_base64"]) == body
    assert (shown["status"], shown["outcome"]) == (200, "ended")
    assert shown["body_complete"]


async def test_a_large_upload_is_digested_and_not_kept(worker, http):
    """Thirty megabytes in chunks, to a route that needs them and to one that does not exist."""
    piece = bytes(range(256)) * 4096
    digest = hashlib.sha256(piece * 30).hexdigest()

    async def pieces():
        for _ in range(30):
            yield piece

    for path in ("/v1/audio/transcriptions", "/v1/unknown"):
        answer = await http.post(
            worker.url + path,
            data=pieces(),
            headers={"content-type": "multipart/form-data; boundary=b"},
        )
        await answer.read()

    for arrival in worker.recorder:
        assert (arrival.body_bytes, arrival.body_sha256) == (30 << 20, digest)
        assert arrival.body is None
    assert [arrival.status for arrival in worker.recorder] == [200, 404]


async def test_a_large_json_body_is_served(worker, http, chat_body):
    """An image of several megabytes within a chat counts as an image, not as text."""
    image = {"type": "image_url", "image_url": {"url": "data:," + "x" * (8 << 20)}}
    answers = [
        await http.post(
            worker.url + CHAT,
            data=io.BytesIO(json.dumps(chat_body(content)).encode()),
            headers={"content-type": "application/json"},
        )
        for content in ([image], "x" * (9 << 20))
    ]
    answer, too_long = answers

    assert answer.status == 200
    assert (await answer.json())["usage"]["prompt_tokens"] < 100
    assert too_long.status == 400
    assert worker.recorder[0].body_bytes > BODY_LIMIT_BYTES


async def test_a_client_that_asks_before_it_sends_is_told_to(worker):
    """Curl does so for large bodies, and would wait a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        b"content-type: application/json\r\ncontent-length: 15\r\n\r\n"
    )
    async with asyncio.timeout(5):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b'{"prompt": "x"}')
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"count":1' in await reader.readuntil(b"}")
    writer.close()
    await writer.wait_closed()


async def test_bodies_are_not_decoded(worker, http):
    """A compressed body is recorded as it came; like vLLM, the worker cannot read it."""
    packed = gzip.compress(b'{"prompt": "x"}')
    headers = {"content-type": "application/json", "content-encoding": "gzip"}

    answer = await http.post(worker.url + "/v1/completions", data=packed, headers=headers)

    assert answer.status == 400
    assert worker.recorder[-1].body == packed


async def test_probes_and_control_are_not_recorded(worker, http):
    """They are counted."""
    for path in ("/health", "/health", "/metrics", "/_sim/state", "/version"):
        assert (await http.get(worker.url + path)).status == 200

    assert [arrival.raw_path for arrival in worker.recorder] == ["/version"]
    assert worker.state()["probes"] == {"/health": 2, "/metrics": 1}


async def test_the_record_can_be_cleared(worker, http):
    """For the next part of a test."""
    await http.get(worker.url + "/version")

    assert (await http.delete(worker.url + "/_sim/requests")).status == 204

    assert len(worker.recorder) == 0


async def test_a_worker_without_a_record_serves(start_worker, http, chat_body):
    """For load tests."""
    worker = await start_worker(record=0)

    assert (await http.post(worker.url + CHAT, json=chat_body())).status == 200
    assert len(worker.recorder) == 0


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/completions", {"prompt": []}, "prompt must not be empty"),
        ("/v1/completions", {"prompt": ""}, "prompt cannot be empty"),
        ("/v1/completions", {"prompt": [-1]}, "out of vocabulary"),
        ("/v1/completions", {"prompt": ["x", 1]}, "out of vocabulary"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions must be at least 1"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "Invalid enum value 'hex'"),
        ("/v1/responses", {"input": []}, "input must not be empty"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "must be at least 1"),
    ],
)
async def test_what_cannot_be_done_is_answered_400(worker, http, path, fields, message):
    """Each format says what is wrong."""
    answer = await http.post(worker.url + path, json=fields)

    assert answer.status == 400
    assert message in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"{", "application/json", "truncated"),
        (b"{}", "application/json", "missing required field `messages`"),
        (b"[]", "application/json", "Expected `object`, got `array`"),
        (b"", "application/json", "truncated"),
        (b'{"messages": [{"role": "\xff"}]}', "application/json", "Invalid UTF-8"),
        (b"{}", "text/plain", "Only 'application/json' is allowed"),
    ],
)
async def test_what_is_no_request_is_answered_400(worker, http, body, content_type, message):
    """In vLLM's form."""
    answer = await http.post(worker.url + CHAT, data=body, headers={"content-type": content_type})

    error = (await answer.json())["error"]
    assert answer.status == error["code"] == 400
    assert error["type"] == "Bad Request"
    assert message in error["message"]


async def test_unknown_paths_and_methods(worker, http):
    """As FastAPI answers them."""
    unknown = await http.post(worker.url + "/v1/nothing?x=1", data=b"x")
    method = await http.get(worker.url + CHAT)

    assert (unknown.status, await unknown.json()) == (404, {"detail": "Not Found"})
    assert (method.status, await method.json()) == (405, {"detail": "Method Not Allowed"})
    assert unknown.headers["x-sim-worker"] == "w1"
    assert worker.recorder[0].body == b"x"


async def test_the_id_of_a_response_carries_the_callers(worker, http, chat_body):
    """As with vLLM."""
    answer = await http.post(worker.url + CHAT, json=chat_body(), headers={"X-Request-Id": "abc-1"})

    assert (await answer.json())["id"] == "chatcmpl-abc-1"


async def test_tokens_there_and_back(worker, http, chat_body):
    """Of a prompt, and of a chat as it would be prompted."""
    post = http.post
    prompt = await (await post(worker.url + "/tokenize", json={"prompt": "Grüße, world"})).json()
    text = await (await post(worker.url + "/detokenize", json={"tokens": prompt["tokens"]})).json()
    chat = await (await post(worker.url + "/tokenize", json=chat_body("hello"))).json()
    answer = await (await post(worker.url + CHAT, json=chat_body("hello"))).json()

    assert text == {"prompt": "Grüße, world"}
    assert prompt["count"] == len(prompt["tokens"]) == 4
    assert chat["count"] == answer["usage"]["prompt_tokens"]
    assert (await post(worker.url + "/tokenize", json={})).status == 400
    assert (await post(worker.url + "/detokenize", json={"tokens": [-1]})).status == 400


async def test_rerank_orders_the_documents(worker, http):
    """Under each of its paths, best first, as many as asked for."""
    ask = {"model": "sim-model", "query": "colour", "documents": ["red", "blue", "dog"], "top_n": 2}
    answers = [
        await (await http.post(worker.url + path, json=ask)).json()
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ]

    results = answers[0]["results"]
    assert len(results) == 2
    assert results[0]["relevance_score"] > results[1]["relevance_score"]
    assert all(item["document"]["text"] == ask["documents"][item["index"]] for item in results)
    assert [answer["results"] for answer in answers] == [results] * 3
    empty = await http.post(worker.url + "/rerank", json={**ask, "documents": []})
    assert empty.status == 400


async def test_small_routes(worker, http):
    """Health, ping, version and load."""
    assert (await http.get(worker.url + "/ping")).status == 200
    assert "version" in await (await http.get(worker.url + "/version")).json()
    assert await (await http.get(worker.url + "/load")).json() == {"server_load": 0}
    form = await http.post(worker.url + "/v1/audio/transcriptions", data=b"x")
    assert form.status == 400


async def test_load_counts_open_requests(start_worker, http, chat_body):
    """Streams count until they end."""
    worker = await start_worker(itl_ms=60_000, ttft_ms=0)
    async with http.post(worker.url + CHAT, json=chat_body(stream=True)) as stream:
        await stream.content.readline()

        assert await (await http.get(worker.url + "/load")).json() == {"server_load": 1}
        state = await (await http.get(worker.url + "/_sim/state")).json()
        stream.close()

    assert (state["running"], state["waiting"], state["requests_active"]) == (1, 0, 1)
    assert state["kv_usage_ratio"] > 0


async def test_the_prefix_cache_can_be_reset(worker, http, chat_body):
    """The same prompt misses afterwards."""
    ask = chat_body("x" * 200)

    async def cached():
        answer = await (await http.post(worker.url + CHAT, json=ask)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (await cached(), await cached() > 0) == (0, True)
    assert (await http.post(worker.url + "/reset_prefix_cache?reset_external=true")).status == 200
    assert await cached() == 0
    state = await (await http.get(worker.url + "/_sim/state")).json()
    assert state["prefix_cache_resets"] == 1


async def test_server_info_shows_the_configuration(start_worker, http):
    """As text unless JSON is asked for, like vLLM in development mode."""
    worker = await start_worker(models=("a", "b"), data_parallel_size=2, kv_blocks=64)

    text = await (await http.get(worker.url + "/server_info")).json()
    sections = await (await http.get(worker.url + "/server_info?config_format=json")).json()

    assert text["vllm_config"].startswith("model='a', max_seq_len=1024, ")
    assert "data_parallel_size=2" in text["vllm_config"]
    assert text["version"].startswith("0.32")
    config = sections["vllm_config"]
    assert config["model_config"]["served_model_name"] == ["a", "b"]
    assert config["cache_config"] == {"block_size": 16, "num_gpu_blocks": 64}
    assert config["parallel_config"] == {"data_parallel_size": 2, "data_parallel_rank": 0}


async def test_realtime_echoes_frames(worker, http):
    """Text and bytes, with the subprotocol the client asks for; a plain GET finds nothing."""
    async with http.ws_connect(
        worker.url + "/v1/realtime?model=sim-model", protocols=["realtime"]
    ) as socket:
        assert socket.protocol == "realtime"
        await socket.send_str("hello")
        assert (await socket.receive(5)).data == "hello"
        await socket.send_bytes(b"\0\1")
        assert (await socket.receive(5)).data == b"\0\1"

    assert worker.recorder[-1].raw_path == "/v1/realtime?model=sim-model"
    assert (await http.get(worker.url + "/v1/realtime")).status == 404


async def test_metrics_carry_vllms_names_and_figures(worker, http, chat_body):
    """One answer of 5 tokens, read with the official parser."""
    answer = await (await http.post(worker.url + CHAT, json=chat_body(max_tokens=5))).json()
    page = await http.get(worker.url + "/metrics")
    samples = {}
    for family in text_string_to_metric_families(await page.text()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("engine", "0") == "0"
            assert labels.pop("model_name", "sim-model") == "sim-model"
            samples[sample.name.removeprefix("vllm:"), *labels.values()] = sample.value

    assert page.content_type == "text/plain"
    assert samples["num_requests_running",] == samples["num_requests_waiting",] == 0
    assert samples["kv_cache_usage_perc",] == 0
    assert samples["prompt_tokens_total",] == answer["usage"]["prompt_tokens"]
    assert samples["prefix_cache_queries_total",] == answer["usage"]["prompt_tokens"]
    assert samples["prefix_cache_hits_total",] == samples["num_preemptions_total",] == 0
    assert samples["generation_tokens_total",] == 5
    assert samples["request_success_total", "length"] == 1
    assert (
        samples["request_success_total", "stop"] == samples["request_success_total", "abort"] == 0
    )
    assert samples["time_to_first_token_seconds_count",] == 1
    assert samples["inter_token_latency_seconds_count",] == 4
    assert samples["e2e_request_latency_seconds_bucket", "+Inf"] == 1
    assert samples["cache_config_info", "16", "430400", "26900"] == 1


async def test_a_full_worker_shows_it_in_its_metrics(start_worker, http, chat_body, until):
    """Two run, one waits, and the KV blocks are in use."""
    worker = await start_worker(itl_ms=60_000, max_num_seqs=2, kv_blocks=64)
    tasks = [
        asyncio.create_task(http.post(worker.url + CHAT, json=chat_body("x" * 100 * number)))
        for number in range(1, 4)
    ]
    await until(lambda: worker.engine.running == 2 and worker.engine.waiting == 1)

    page = await (await http.get(worker.url + "/metrics")).text()

    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert values["vllm:num_requests_running"] == 2
    assert values["vllm:num_requests_waiting"] == 1
    assert 0 < values["vllm:kv_cache_usage_perc"] < 1
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=5)


@pytest.mark.slow
async def test_many_requests_at_once_are_all_answered(worker, http, chat_body):
    """More than one batch holds, each with an id of its own."""
    answers = await asyncio.gather(
        *(http.post(worker.url + CHAT, json=chat_body(f"{number}")) for number in range(400))
    )

    ids = {(await answer.json())["id"] for answer in answers}
    assert len(ids) == 400
    assert worker.state()["finished"] == 400


@pytest.mark.slow
async def test_a_fixed_pace_spaces_the_events(start_worker, http, chat_body):
    """None comes before its time: the first at 100 ms, then one every 50 ms."""
    worker = await start_worker(itl_ms=50, ttft_ms=100)
    began = time.monotonic()
    times = []
    async with http.post(worker.url + CHAT, json=chat_body(stream=True, max_tokens=5)) as answer:
        await answer.content.readuntil(b"\n\n")  # the role comes with the first token
        for _ in range(5):
            await answer.content.readuntil(b"\n\n")
            times.append(time.monotonic() - began)

    due = [0.1, 0.15, 0.2, 0.25, 0.3]
    assert all(-0.003 < at - wanted < 2 for at, wanted in zip(times, due, strict=True))


async def test_a_small_cache_bounds_the_context(start_worker, http, chat_body):
    """What could never run is refused instead of waiting for ever."""
    worker = await start_worker(kv_blocks=4)

    answer = await http.post(worker.url + CHAT, json=chat_body("x" * 400))

    assert answer.status == 400
    assert "maximum context length is 64 tokens" in (await answer.json())["error"]["message"]


async def test_idle_connections_close_after_five_seconds(worker):
    """As uvicorn's do; the setting is looked at instead of waiting for it."""
    assert worker._http._kwargs["keepalive_timeout"] == 5.0


async def test_an_engine_that_failed_answers_500(worker, http, chat_body, monkeypatch):
    """Requests do not hang; structlog prints the traceback."""

    def fail(_now):
        raise ZeroDivisionError

    monkeypatch.setattr(worker.engine, "step", fail)

    answers = [await http.post(worker.url + CHAT, json=chat_body()) for _ in range(2)]

    assert [answer.status for answer in answers] == [500, 500]
    assert "the engine loop has ended" in json.dumps(await answers[1].json())


async def test_two_workers_in_one_loop_are_told_apart(start_worker, http, chat_body):
    """Ports, names, engines and records are their own."""
    workers = [await start_worker(name=name) for name in ("a", "b")]
    for worker in workers:
        answer = await (await http.post(worker.url + CHAT, json=chat_body())).json()
        assert f"Hello from {worker.config.name}." in answer["choices"][0]["message"]["content"]

    assert workers[0].port != workers[1].port
    assert [len(worker.recorder) for worker in workers] == [1, 1]


async def test_a_worker_needs_its_port(start_worker, worker):
    """OSError, for the caller to word."""
    with pytest.raises(OSError, match="address already in use"):
        await start_worker(port=worker.port)
