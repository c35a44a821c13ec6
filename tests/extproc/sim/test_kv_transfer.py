"""Prefill on one simulated worker and decode on another, over real sockets."""

import asyncio

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.sim.kv_config import KvConfig
from extproc.sim.kv_params import in_url
from extproc.sim.kv_wire import FRAME_LIMIT_BYTES, Done, encode

COMPLETIONS = "/v1/completions"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 10
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture
def pair(start_worker):
    """Return a function that starts a prefill and a decode worker; settings are ``KvConfig``'s."""

    async def start(settings=None, **kv):
        settings = settings or {}
        return [
            await start_worker(
                name=role, kv=KvConfig(role=role, **{"bootstrap_port": 0, **kv}), **settings
            )
            for role in ("prefill", "decode")
        ]

    return start


@pytest.fixture
def post(http):
    """Return a function that posts a completion; it returns status and document."""

    async def send(worker, params=None, *, path=COMPLETIONS, request_id=None, **fields):
        body = {"prompt": PROMPT, "max_tokens": 8, **fields}
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {} if request_id is None else {"X-Request-Id": request_id}
        async with http.post(worker.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    return send


@pytest.fixture
def metrics(http):
    """Return a function that reads one metric of a worker, summed over the labels given."""

    async def read(worker, name, **labels):
        page = await (await http.get(worker.url + "/metrics")).text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    return read


async def prefill(post, worker, **fields):
    """Prefill and return the params for decode."""
    status, document = await post(worker, PREFILL, max_tokens=1, **fields)
    assert status == 200, document
    return document["kv_transfer_params"]


def nccl_id(first, second):
    """Return a request id of P2P-NCCL for two workers."""
    a, b = first.kv.zmq_address, second.kv.zmq_address
    return f"___prefill_addr_{a}___decode_addr_{b}_{'0a' * 16}"


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
@pytest.mark.parametrize("connector", ["nixl", "mooncake", "nccl"])
async def test_workers_reach_each_other_at_the_address_given(pair, post, connector, host):
    """As Pods must, which have no loopback in common."""
    first, second = await pair(connector=connector, host=host)
    request_id, params, told = None, None, PREFILL
    if connector == "nccl":
        request_id, told = nccl_id(first, second), None
    elif connector == "mooncake":
        told = {**PREFILL, "transfer_id": "t"}
    status, document = await post(first, told, max_tokens=1, request_id=request_id)
    assert status == 200, document
    if connector == "nixl":
        params = document["kv_transfer_params"]
        assert params["remote_host"] == host
    elif connector == "mooncake":
        bootstrap = f"http://{in_url(host)}:{first.kv.bootstrap.port}"
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": "t",
            "remote_engine_id": first.kv.engine_ids[0],
            "remote_bootstrap_addr": bootstrap,
        }

    status, document = await post(second, params, request_id=request_id)

    assert status == 200, document
    assert document["usage"]["completion_tokens"] == 8


async def test_decode_pulls_what_prefill_computed(pair, post, metrics):
    """The answer is that of a whole request, the prompt is computed once, the blocks are freed."""
    first, second = await pair()
    tokens = -(-len(PROMPT) // 4)

    status, document = await post(first, PREFILL, max_tokens=1, request_id="pd-1")
    params = document["kv_transfer_params"]
    assert status == 200
    assert document["usage"]["completion_tokens"] == 1
    assert params["remote_request_id"].startswith("cmpl-pd-1-0-")
    assert len(params["remote_block_ids"][0]) == -(-tokens // 16)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": params["remote_block_ids"],
        "remote_engine_id": first.kv.engine_ids[0],
        "remote_request_id": params["remote_request_id"],
        "remote_host": "127.0.0.1",
        "remote_port": first.kv.side_channel.port,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "transfer_mode": "pull",
    }
    assert await metrics(first, "sim_kv_transfers_held") == 1
    assert first.engine.kv_usage_ratio > 0

    status, document = await post(second, params, request_id="pd-1")

    _, whole = await post(second)
    assert status == 200
    assert document["choices"][0]["text"] == whole["choices"][0]["text"]
    assert document["kv_transfer_params"] is None
    assert document["usage"]["prompt_tokens_details"] == {"cached_tokens": tokens - 1}
    assert await metrics(first, "sim_kv_transfers_held") == 0
    assert first.engine.kv_usage_ratio == 0
    assert await metrics(second, "vllm:external_prefix_cache_hits_total") == tokens
    assert await metrics(second, "vllm:nixl_bytes_transferred_sum") == tokens * 131_072
    source = "vllm:prompt_tokens_by_source_total"
    assert await metrics(second, source, source="external_kv_transfer") == tokens
    assert await metrics(first, source, source="local_compute") == tokens
    assert await metrics(second, "sim_kv_mismatches_total") == 0


@pytest.mark.parametrize(
    ("path", "body", "one"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": PROMPT}]},
            {"max_tokens": 1},
        ),
        ("/v1/responses", {"input": PROMPT}, {"max_output_tokens": 1}),
    ],
)
async def test_chat_and_responses_hand_over_too(pair, http, path, body, one):
    """Decode may stream."""
    first, second = await pair()

    answer = await http.post(first.url + path, json={**body, **one, "kv_transfer_params": PREFILL})
    params = (await answer.json())["kv_transfer_params"]
    request = {**body, "stream": True, "kv_transfer_params": params}
    stream = await http.post(second.url + path, json=request)

    assert stream.status == 200
    assert b"Hell" in await stream.read()
    assert second.engine.statistics.received_prompt_tokens == params["remote_num_tokens"]
    assert len(first.kv.kept) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remote_engine_id": "other"}, "engine id 'other' is not of this worker"),
        ({"remote_engine_id": None}, "remote_engine_id is missing"),
        ({"remote_request_id": "cmpl-x"}, "request id 'cmpl-x' has no blocks here"),
        ({"remote_block_ids": [[1, 2]]}, "not [[1, 2]]"),
        ({"remote_block_ids": [[1 << 70]]}, "not [[1180591620717411303424]]"),
        ({"remote_block_ids": None}, "remote_block_ids is missing"),
        ({"remote_num_tokens": 3}, "remote_num_tokens is 3, but the prompt has"),
        ({"tp_size": 2}, "tp_size is 1 here, not 2"),
        ({"transfer_mode": "push"}, "transfer_mode is 'pull' here, not 'push'"),
    ],
)
async def test_params_that_do_not_fit_fail_loudly(pair, post, metrics, change, message):
    """500 with the reason, a count, and the blocks are still there for the right request."""
    first, second = await pair()
    params = await prefill(post, first)

    status, document = await post(second, {**params, **change})

    assert status == 500
    assert message in document["error"]["message"]
    assert document["error"]["param"] == "kv_transfer_params"
    assert await metrics(second, "sim_kv_mismatches_total") == 1
    assert (await post(second, params))[0] == 200


async def test_another_prompt_fails_loudly(pair, post):
    """Whether its length differs or not, and several prompts for one transfer."""
    first, second = await pair()
    params = await prefill(post, first)
    del params["remote_num_tokens"]

    for prompt, message in (
        (PROMPT + "more", "tokens, not"),
        (PROMPT.swapcase(), "another one of the same length"),
        ([PROMPT, "x"], "one prompt was computed elsewhere, this request has 2"),
    ):
        status, document = await post(second, params, prompt=prompt)
        assert status == 500
        assert message in document["error"]["message"]
    assert second.kv.mismatches == 3


async def test_blocks_are_pulled_once(pair, post):
    """The second request is told so; two choices of one request share the blocks."""
    first, second = await pair()
    params = await prefill(post, first)

    assert (await post(second, params, n=2))[0] == 200
    status, document = await post(second, params)

    assert status == 500
    assert "was already pulled" in document["error"]["message"]


async def test_blocks_that_nobody_pulls_expire(pair, post, metrics, until):
    """And are counted on the prefill side."""
    first, second = await pair(hold_s=0.05)
    params = await prefill(post, first)

    await until(lambda: first.engine.kv_usage_ratio == 0)

    assert await metrics(first, "vllm:nixl_num_kv_expired_reqs_total") == 1
    status, document = await post(second, params)
    assert status == 500
    assert "has expired" in document["error"]["message"]


@pytest.mark.slow
async def test_a_transfer_takes_time_by_its_size(pair, post, metrics, until):
    """Until then the request waits, and nobody else gets the blocks; leaving gives them back."""
    first, second = await pair({"itl_ms": 0.0}, transfer_mb_per_s=0.001, bytes_per_token=10)
    params = await prefill(post, first)
    task = asyncio.create_task(post(second, params))
    await until(lambda: second.engine.waiting == 1)
    other = await post(second, params)
    assert "being pulled by another request" in other[1]["error"]["message"]

    task.cancel()
    await asyncio.wait([task])
    await until(lambda: second.engine.waiting == 0)

    await until(lambda: not any(kept.reserved for kept in first.kv.kept._held.values()))
    loop = asyncio.get_running_loop()
    begin = loop.time()
    assert (await post(second, params))[0] == 200
    assert loop.time() - begin > 1  # 113 tokens of 10 bytes at 1,000 bytes per second
    assert await metrics(second, "vllm:nixl_xfer_time_seconds_count") == 1


async def test_a_cached_prefix_is_not_transferred_again(pair, post, metrics):
    """Only the part that the decode worker does not have."""
    first, second = await pair()
    await post(second)

    await post(second, await prefill(post, first))

    tokens = -(-len(PROMPT) // 4)
    missing = tokens - tokens // 16 * 16
    assert await metrics(second, "vllm:external_prefix_cache_hits_total") == missing
    assert await metrics(second, "vllm:nixl_bytes_transferred_sum") == missing * 131_072


async def test_roles_refuse_what_is_not_theirs(pair, start_worker, post):
    """With 400 and the reason."""
    first, second = await pair()
    both = await start_worker(name="both")
    decode = {"do_remote_prefill": True}
    for worker, params, fields, message in (
        (first, decode, {"max_tokens": 1}, "a prefill worker does not serve do_remote_prefill"),
        (first, None, {"max_tokens": 2}, "a prefill is one token, got max_tokens 2"),
        (first, PREFILL, {"max_tokens": 1, "n": 2}, "one prompt with n=1, got 2 sequences"),
        (first, PREFILL, {"max_tokens": 1, "stream": True}, "an answer without stream"),
        (second, PREFILL, {"max_tokens": 1}, "a decode worker does not serve do_remote_decode"),
        (both, PREFILL, {"max_tokens": 2}, "a prefill is one token, got max_tokens 2"),
        (both, {**PREFILL, **decode}, {}, "exclude each other"),
        (both, {"do_remote_decode": "yes"}, {}, "Expected `bool`"),
    ):
        status, document = await post(worker, params, **fields)
        assert (status, message in document["error"]["message"]) == (400, True), document
        assert worker.kv.mismatches == 0
    assert (await post(second))[0] == 200
    assert (await post(first, max_tokens=1))[0] == 200


async def test_one_worker_can_be_both(worker, post):
    """Prefill, decode and whole requests."""
    params = await prefill(post, worker)

    assert (await post(worker, params))[0] == 200
    assert (await post(worker))[0] == 200
    assert worker.engine.kv_usage_ratio == 0


async def test_an_aborted_prefill_keeps_nothing(pair, post, until):
    """The blocks are free as soon as the client has left."""
    first, _ = await pair({"itl_ms": 60_000.0})
    task = asyncio.create_task(post(first, PREFILL, max_tokens=1))
    await until(lambda: first.engine.running == 1)

    task.cancel()
    await asyncio.wait([task])

    await until(lambda: first.engine.running == 0)
    assert first.engine.kv_usage_ratio == 0
    assert len(first.kv.kept) == 0


async def test_freed_blocks_let_a_waiting_prefill_in(pair, post, until):
    """Kept blocks are in use; a pull makes room."""
    first, second = await pair({"kv_blocks": 10})
    params = await prefill(post, first)
    waiting = asyncio.create_task(prefill(post, first, prompt=PROMPT.swapcase()))
    await until(lambda: first.engine.waiting == 1)

    assert (await post(second, params, max_tokens=1))[0] == 200

    await asyncio.wait_for(waiting, 5)


async def test_a_prefill_worker_that_is_gone_fails_the_transfer(pair, post, metrics):
    """That is no mismatch."""
    first, second = await pair()
    params = await prefill(post, first)
    first.crash()

    status, document = await post(second, params)

    assert status == 500
    assert document["error"]["message"].startswith("KV transfer failed: 127.0.0.1:")
    assert await metrics(second, "vllm:nixl_num_failed_transfers_total") == 1
    assert second.kv.mismatches == 0


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": "a\0b"},
        {"remote_host": "x" * 70},
        {"remote_port": 70_000},
        {"remote_port": -1},
    ],
)
async def test_an_impossible_address_fails_the_transfer(pair, post, change):
    """Without a traceback."""
    first, second = await pair()
    params = await prefill(post, first)

    status, document = await post(second, {**params, **change})

    assert (status, document["error"]["message"][:18]) == (500, "KV transfer failed"), document


async def test_a_prefill_worker_that_answers_nonsense_fails_the_transfer(pair, post):
    """And one that hangs up in the middle."""
    _, second = await pair()
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", (3).to_bytes(4, "big") + b"[]]", b"\0"):

        async def serve(reader, writer, answer=answer):
            await reader.read(1)
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            params = {
                "do_remote_prefill": True,
                "remote_engine_id": "e",
                "remote_request_id": "r",
                "remote_block_ids": [[1]],
                "remote_host": "127.0.0.1",
                "remote_port": server.sockets[0].getsockname()[1],
            }
            status, document = await post(second, params)

        assert (status, document["error"]["message"][:18]) == (500, "KV transfer failed")


async def test_a_restarted_prefill_worker_is_another_engine(pair, start_worker, post):
    """Params from before do not fit any more."""
    first, second = await pair()
    params = await prefill(post, first)
    port = first.kv.side_channel.port
    await first.stop()
    await start_worker(kv=KvConfig(role="prefill", port=port))

    status, document = await post(second, params)

    assert status == 500
    assert "is not of this worker, which has" in document["error"]["message"]


async def test_ranks_have_engines_of_their_own(pair, http, post):
    """The id says which; the side channel is one."""
    first, second = await pair({"data_parallel_size": 2})
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": PREFILL}
    answer = await http.post(
        first.url + COMPLETIONS, json=body, headers={"X-data-parallel-rank": "1"}
    )
    params = (await answer.json())["kv_transfer_params"]

    assert params["remote_engine_id"].endswith("_dp1")
    wrong = {**params, "remote_engine_id": first.kv.engine_ids[0]}
    assert "engine id of request id" in (await post(second, wrong))[1]["error"]["message"]
    assert (await post(second, params))[0] == 200


async def test_push_lets_decode_come_first(pair, post, until):
    """Both legs at once: decode waits for the blocks of the request id."""
    first, second = await pair(transfer_mode="push")
    params = await prefill(post, first, request_id="r1")
    assert (params["transfer_mode"], params["remote_request_id"]) == ("push", "r1")
    assert (await post(second, params, request_id="r1"))[0] == 200
    known = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "do_remote_prefill")
    early = {**{name: params[name] for name in known}, "remote_request_id": "r2"}

    decode = asyncio.create_task(post(second, early, request_id="r2"))
    await until(lambda: first.kv.kept._waiting)
    assert second.engine.waiting == 1
    await prefill(post, first, request_id="r2")

    assert (await decode)[0] == 200
    assert len(first.kv.kept) == 0
    status, document = await post(second, early)
    assert (status, "was already pulled" in document["error"]["message"]) == (500, True)


async def test_push_does_not_wait_for_ever(pair, post):
    """A prefill that never comes is a failed transfer, a client that leaves is forgotten."""
    first, second = await pair(transfer_mode="push", hold_s=0.05)
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": first.kv.engine_ids[0],
        "remote_host": "127.0.0.1",
        "remote_port": first.kv.side_channel.port,
        "remote_request_id": "r1",
    }

    status, document = await post(second, params)

    assert (status, "in time" in document["error"]["message"]) == (500, True)
    assert second.engine.waiting == 0


async def test_an_id_in_use_is_not_kept_twice(pair, post):
    """A router that uses an id twice is told."""
    first, _ = await pair(transfer_mode="push")
    await prefill(post, first, request_id="r1")
    used = first.engine.kv_usage_ratio

    status, document = await post(first, PREFILL, max_tokens=1, request_id="r1")

    assert status == 500
    assert "already has blocks" in document["error"]["message"]
    assert first.kv.mismatches == 1
    assert first.engine.kv_usage_ratio == used


async def test_mooncake_finds_the_engine_at_the_bootstrap_server(pair, http, post):
    """``/query`` says the engine ids; the transfer id joins the legs."""
    first, second = await pair(connector="mooncake")
    address = f"http://127.0.0.1:{first.kv.bootstrap.port}"
    engines = await (await http.get(f"{address}/query")).json()
    assert engines["0"]["engine_id"] == first.kv.engine_ids[0]
    assert (await http.get(f"{address}/other")).status == 404
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": "xfer-1",
        "remote_bootstrap_addr": address,
        "remote_engine_id": engines["0"]["engine_id"],
    }

    status, document = await post(first, ask, max_tokens=1)
    assert (status, document["kv_transfer_params"]) == (200, None)
    for change, message in (
        ({"remote_engine_id": "x"}, "remote_engine_id 'x' is not at http://127.0.0.1:"),
        ({"remote_bootstrap_addr": address[7:]}, "remote_bootstrap_addr must be a URL"),
        ({"transfer_id": None}, "transfer_id is missing"),
        ({"remote_bootstrap_addr": second.url}, "KV transfer failed: bootstrap server"),
    ):
        status, document = await post(second, {**params, **change})
        assert (status, message in document["error"]["message"]) == (500, True), document
    assert (await post(second, params))[0] == 200
    assert second.kv.mismatches == 3
    status, document = await post(first, {"do_remote_decode": True}, max_tokens=1)
    assert (status, "transfer_id is missing" in document["error"]["message"]) == (500, True)


async def test_nccl_needs_nothing_but_the_request_id(pair, post, until):
    """Both legs carry it; decode may come first."""
    first, second = await pair(connector="nccl")
    request_id = nccl_id(first, second)

    decode = asyncio.create_task(post(second, request_id=request_id))
    await until(lambda: first.kv.kept._waiting)
    status, document = await post(first, max_tokens=1, request_id=request_id)

    assert (status, document["kv_transfer_params"]) == (200, None)
    assert (await decode)[0] == 200
    assert len(first.kv.kept) == 0
    assert second.engine.statistics.received_prompt_tokens > 0


async def test_nccl_addresses_must_be_the_workers_own(pair, start_worker, post):
    """On both sides, and an id without addresses is refused."""
    first, second = await pair(connector="nccl")
    third = await start_worker(kv=KvConfig(role="prefill", connector="nccl", zmq_address="x:1"))
    for worker, request_id, message in (
        (first, nccl_id(second, first), "prefill address '127.0.0.1:"),
        (second, nccl_id(second, first), "decode address '127.0.0.1:"),
        (first, "plain", "request id 'plain' is not ___prefill_addr_A"),
        (third, nccl_id(first, second), "which is 'x:1'"),
    ):
        status, document = await post(worker, max_tokens=1, request_id=request_id)
        assert (status, message in document["error"]["message"]) == (500, True), document


async def test_nccl_asks_the_worker_that_the_id_names(pair, post):
    """One that goes by another name says so."""
    first, second = await pair(connector="nccl")
    advertised = f"localhost:{first.kv.side_channel.port}"
    request_id = nccl_id(first, second).replace(first.kv.zmq_address, advertised)

    status, document = await post(second, request_id=request_id)

    assert status == 500
    assert f"prefill address '{advertised}' is not this worker's" in document["error"]["message"]


async def test_nccl_workers_that_are_both_know_their_leg_by_the_id(start_worker, post):
    """Whichever address is theirs; other requests are whole."""
    kv = KvConfig(connector="nccl")
    first, second = await start_worker(kv=kv), await start_worker(kv=kv)
    request_id = nccl_id(first, second)

    assert (await post(first, max_tokens=1, request_id=request_id))[0] == 200
    assert len(first.kv.kept) == 1
    assert (await post(second, request_id=request_id))[0] == 200
    assert (await post(second, request_id="plain"))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (FRAME_LIMIT_BYTES + 1).to_bytes(4, "big"),
        (3).to_bytes(4, "big") + b"\xff{[",
        (200_000).to_bytes(4, "big") + b"[" * 200_000,
        (2).to_bytes(4, "big") + b"{}",
        encode(Done()),
    ],
)
async def test_garbage_on_the_side_channel_ends_that_connection_only(pair, post, data):
    """In one piece or byte by byte, and half a frame of a client that leaves."""
    first, second = await pair()
    params = await prefill(post, first)
    reader, writer = await asyncio.open_connection("127.0.0.1", first.kv.side_channel.port)
    half_reader, half = await asyncio.open_connection("127.0.0.1", first.kv.side_channel.port)
    half.write(encode(Done())[:5])
    half.close()

    writer.write(data)

    async with asyncio.timeout(5):
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert await half_reader.read() == b""
    writer.close()
    assert (await post(second, params))[0] == 200


async def test_frames_may_come_in_pieces(pair, post):
    """Nothing is lost at the seams."""
    first, _ = await pair()
    params = await prefill(post, first)
    reader, writer = await asyncio.open_connection("127.0.0.1", params["remote_port"])
    pull = (
        b'{"op":"pull","engine_id":"x","request_id":"r","block_ids":null,'
        b'"prompt_tokens":1,"prompt_key":0}'
    )
    for byte in len(pull).to_bytes(4, "big") + pull:
        writer.write(bytes([byte]))
        await asyncio.sleep(0)

    length = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), 5), "big")

    assert b"engine id 'x' is not of this worker" in await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()


async def test_a_port_in_use_is_named(worker, start_worker):
    """Of the side channel and of the bootstrap server."""
    port = worker.port
    with pytest.raises(ValueError, match=rf"127.0.0.1:{port} \(kv port\): Address already in use"):
        await start_worker(kv=KvConfig(port=port))
    with pytest.raises(ValueError, match=rf"127.0.0.1:{port} \(bootstrap port\): Address already"):
        await start_worker(kv=KvConfig(connector="mooncake", bootstrap_port=port))


async def test_pings_need_pyzmq(start_worker, monkeypatch):
    """The message says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)

    with pytest.raises(ValueError, match="discovery_address needs pyzmq: pip install pyzmq"):
        await start_worker(
            kv=KvConfig(role="decode", connector="nccl", discovery_address="127.0.0.1:1")
        )


async def test_pings_say_where_the_worker_is(start_worker):
    """One message at once, as vLLM's P2P-NCCL connector sends it."""
    zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        kv = KvConfig(role="prefill", connector="nccl", discovery_address=f"127.0.0.1:{port}")
        worker = await start_worker(kv=kv)

        assert await asyncio.to_thread(router.poll, 5000)
        identity, message = router.recv_multipart()
        await worker.stop()

    assert identity.decode() == worker.kv.zmq_address
    assert msgspec.msgpack.decode(message) == {
        "type": "P",
        "http_address": f"127.0.0.1:{worker.port}",
        "zmq_address": worker.kv.zmq_address,
    }
