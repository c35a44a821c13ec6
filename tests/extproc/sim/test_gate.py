"""What a request passes before its route: base path, key, and a model that still loads."""

import pytest

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("bearer secret", 200),
        ("Bearer secret", 200),
    ],
)
async def test_the_api_needs_the_key(start_worker, http, chat_body, header, status):
    """A wrong one is answered as vLLM does, before anything else."""
    worker = await start_worker(api_key="secret")
    headers = {} if header is None else {"Authorization": header}

    answers = [
        await http.post(worker.url + CHAT, json=chat_body(), headers=headers),
        await http.get(worker.url + "/v1/models", headers=headers),
    ]

    assert [answer.status for answer in answers] == [status, status]
    if status == 401:
        assert await answers[0].read() == b'{"error":"Unauthorized"}'
        assert worker.state()["requests_received"] == 0
    assert [arrival.status for arrival in worker.recorder] == [status, status]


async def test_service_routes_need_no_key(start_worker, http):
    """Nor does control; unknown paths of the API do."""
    worker = await start_worker(api_key="secret")
    paths = ("/health", "/ping", "/metrics", "/load", "/version", "/server_info", "/_sim/state")

    statuses = [(await http.get(worker.url + path)).status for path in paths]

    assert statuses == [200] * len(paths)
    assert (await http.get(worker.url + "/nothing")).status == 404
    assert (await http.get(worker.url + "/v1/nothing")).status == 401
    assert (await http.post(worker.url + "/v2/rerank", json={})).status == 401
    assert (await http.options(worker.url + "/v1/models")).status == 405


async def test_the_key_is_not_shown(start_worker):
    """Neither in logs nor in tracebacks."""
    worker = await start_worker(api_key="secret")

    assert "secret" not in repr(worker.config)


async def test_every_route_is_below_the_base_path(start_worker, http, chat_body):
    """And nowhere else; the record has the path as it was sent."""
    worker = await start_worker(root_path="/x/y")
    bare = worker.url.removesuffix("/x/y")

    inside = [
        await http.post(worker.url + CHAT, json=chat_body()),
        await http.get(worker.url + "/v1/models?x=1"),
        await http.get(worker.url + "/health"),
    ]
    outside = [
        await http.post(bare + CHAT, json=chat_body()),
        await http.get(bare + "/health"),
        await http.get(bare + "/x/yhealth"),
        await http.get(bare + "/x/y"),
        await http.get(worker.url + "/x/y/health"),
    ]

    assert [answer.status for answer in inside] == [200] * 3
    assert [answer.status for answer in outside] == [404] * 5
    assert (await http.get(worker.url + CHAT)).status == 405
    assert [arrival.raw_path for arrival in worker.recorder][:2] == [
        "/x/y/v1/chat/completions",
        "/x/y/v1/models?x=1",
    ]
    assert worker.state()["probes"] == {"/health": 1}


async def test_control_needs_no_base_path(start_worker, http):
    """It answers with and without."""
    worker = await start_worker(root_path="/x")
    bare = worker.url.removesuffix("/x")

    statuses = [
        (await http.get(url + path)).status
        for url in (worker.url, bare)
        for path in ("/_sim/state", "/_sim/requests", "/_sim/faults")
    ]

    assert statuses == [200] * 6
    assert len(worker.recorder) == 0


async def test_a_key_guards_the_api_below_a_base_path(start_worker, http):
    """The base path does not count as part of the route."""
    worker = await start_worker(root_path="/x", api_key="secret")

    assert (await http.get(worker.url + "/v1/models")).status == 401
    assert (await http.get(worker.url + "/health")).status == 200


async def test_a_worker_that_loads_is_not_ready(start_worker, http, chat_body):
    """Health and inference answer 503 until the model is there; the rest answers."""
    worker = await start_worker(startup_delay_s=60)
    health = await http.get(worker.url + "/health")
    answer = await http.post(worker.url + CHAT, json=chat_body())
    others = [
        (await http.get(worker.url + path)).status for path in ("/version", "/metrics", "/load")
    ]

    assert (health.status, answer.status) == (503, 503)
    assert (await answer.json())["error"]["message"] == "the model is still loading"
    assert others == [200] * 3


async def test_a_worker_is_ready_after_its_delay(start_worker, http, chat_body, until):
    """Without being asked."""
    worker = await start_worker(startup_delay_s=0.02)

    await until(lambda: not worker._gate.loading)

    assert (await http.get(worker.url + "/health")).status == 200
    assert (await http.post(worker.url + CHAT, json=chat_body())).status == 200
