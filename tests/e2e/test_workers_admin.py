"""The admin API through Envoy: workers added, removed and drained while requests run; who may."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.e2e.client import Response, ask
from tests.e2e.harness import Router, Sim, free_port, until, wait_until
from tests.e2e.raw_worker import RawWorker
from tests.e2e.workers_support import (
    FAST,
    ROUND_ROBIN,
    STREAM_BODY,
    AdminApi,
    chat,
    chats,
    elapsed,
    hold_streams,
    rest_of,
    serve_models,
    server,
    stream_on,
    until_ended,
    worker_path,
)

pytestmark = pytest.mark.envoy

KEY = "e2e-admin-key"
WORKER_KEY = "e2e-worker-key"


def _running(router: Router) -> Iterator[Router]:
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


@pytest.fixture(scope="module")
def base() -> Iterator[RawWorker]:
    """Give the worker that the routers of this module keep; those without models join its pool."""
    worker = RawWorker().start()
    serve_models(worker, {worker.ports[0]: ["sim-model"]})
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def open_router(base: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router on a loopback address, without a key."""
    yield from _running(Router(base.urls, logs, *FAST, *ROUND_ROBIN))


@pytest.fixture(scope="module")
def wide_router(base: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router that listens on all addresses, without a key."""
    yield from _running(Router(base.urls, logs, *FAST, host="0.0.0.0"))


@pytest.fixture(scope="module")
def two_sims(logs: Path) -> Iterator[list[Sim]]:
    """Start two simulated workers, one with a model more."""
    sims = [
        Sim(logs, "--itl-ms", "20"),
        Sim(logs, "--itl-ms", "20", "--lora-modules", "sql-lora"),
    ]
    try:
        yield [sim.until_ready() for sim in sims]
    finally:
        for sim in sims:
            sim.end()


@pytest.fixture(scope="module")
def keyed_router(two_sims: list[Sim], logs: Path) -> Iterator[Router]:
    """Start a router with a key before simulated workers."""
    router = Router(
        [sim.url for sim in two_sims],
        logs,
        *FAST,
        *("--admin-api-key", KEY, "--worker-api-key", WORKER_KEY),
    )
    yield from _running(router)


@pytest.fixture
def api(open_router: Router, base: RawWorker) -> Iterator[AdminApi]:
    """Give the API of the open router, which has its one worker before and after."""
    api = AdminApi(open_router)
    yield api
    for url in api.workers():
        if url not in base.urls:
            api.remove(url)
    for url in base.urls:
        if url not in api.workers():
            api.add(url)
    api.until_states(dict.fromkeys(base.urls, "healthy"))


@pytest.fixture
def keyed(keyed_router: Router) -> AdminApi:
    return AdminApi(keyed_router, KEY)


@pytest.fixture
def extra() -> Iterator[RawWorker]:
    """Give a worker that no router knows yet."""
    worker = RawWorker().start()
    yield worker
    worker.stop()


def error_of(answer: Response, status: int, code: str) -> str:
    """Check an error of the admin API and return its text."""
    assert answer.status == status, answer
    document = answer.json()
    assert set(document) == {"error", "code"}, document
    assert document["code"] == code
    return str(document["error"])


# --- adding


async def test_added_worker_serves_in_less_than_a_second(
    open_router: Router, api: AdminApi, extra: RawWorker
) -> None:
    """The answer comes at once and says starting; health check and models follow by themselves."""
    (url,) = extra.urls
    serve_models(extra, {extra.ports[0]: ["extra-model"]})

    answer = api.add(url, labels={"zone": "a"}, weight=2, model="extra-model")
    answered = time.monotonic()
    api.until_state(url, "healthy")
    took = elapsed(answered)

    assert answer.status == 200
    entry = answer.json()["worker"]
    assert (entry["url"], entry["state"], entry["is_healthy"]) == (url, "starting", False)
    assert took < 1
    entry = api.worker(url)
    assert entry["labels"] == {"zone": "a"}
    assert entry["weight"] == 2
    assert entry["model_id"] == "extra-model"
    assert entry["models"] == ["extra-model"]
    assert entry["source"] == "admin"
    assert entry["endpoint"] == url.removeprefix("http://")
    assert entry["reason"] == ""
    assert await chats(open_router, 4, "extra-model") == {str(extra.ports[0]): 4}
    assert api.ask("GET", f"/workers/{url}").json() == api.worker(url), "slashes as they are"


async def test_adding_can_wait_until_it_is_healthy(
    open_router: Router, api: AdminApi, base: RawWorker, extra: RawWorker
) -> None:
    """With ``?wait=1`` the very next request may go there."""
    answer = api.add(extra.urls[0], wait=True)

    assert answer.status == 200
    assert answer.json()["worker"]["state"] == "healthy"
    assert await chats(open_router, 4) == {str(port): 2 for port in (*base.ports, *extra.ports)}


def test_waiting_for_a_worker_that_does_not_come(api: AdminApi) -> None:
    """504 in time; it was added and stays; removed meanwhile, 410."""
    url = f"http://127.0.0.1:{free_port()}"

    late = api.ask("POST", "/workers?wait=1&timeout=0.3", {"url": url})
    state = api.state(url)
    assert api.remove(url).status == 200
    answers: list[Response] = []
    waiting = threading.Thread(target=lambda: answers.append(api.add(url, wait=True)))
    waiting.start()
    wait_until(lambda: api.state(url) == "starting", 5, "added")
    assert api.remove(url).status == 200
    waiting.join(5)

    assert late.status == 504
    assert late.json()["code"] == "WORKER_NOT_HEALTHY"
    assert state == "starting"
    assert [answer.status for answer in answers] == [410]
    assert answers[0].json()["code"] == "WORKER_REMOVED"


async def test_hanging_target_does_not_delay_another(api: AdminApi, extra: RawWorker) -> None:
    """The other one is healthy in less than a second, though it was added later."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port), backlog=64):
        hanging = f"http://127.0.0.1:{port}"
        waiting = asyncio.create_task(
            asyncio.to_thread(api.ask, "POST", "/workers?wait=1&timeout=3", {"url": hanging})
        )
        await until(lambda: hanging in api.workers(), 5, "added")

        began = time.monotonic()
        answer = api.add(extra.urls[0], wait=True)
        took = elapsed(began)
        state = api.state(hanging)

        assert (await waiting).status == 504
    assert answer.status == 200
    assert took < 1
    assert state == "starting"


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("", id="empty"),
        pytest.param("nonsense", id="malformed"),
        pytest.param("127.0.0.1:8000", id="no scheme"),
        pytest.param("ftp://127.0.0.1:8000", id="scheme"),
        pytest.param("http://127.0.0.1:0", id="port 0"),
        pytest.param("http://127.0.0.1:65536", id="port"),
        pytest.param("http://user:hunter2@127.0.0.1:8000", id="userinfo"),
        pytest.param("http://hunter2@127.0.0.1:8000", id="user"),
        pytest.param("http://:hunter2@5", id="userinfo like a rank"),
        pytest.param("http://169.254.169.254", id="link-local"),
        pytest.param("http://[fe80::1]:8000", id="link-local IPv6"),
        pytest.param("http://[::ffff:169.254.169.254]:80", id="link-local, mapped"),
        pytest.param("http://0.0.0.0:8000", id="no host"),
        pytest.param("http://127.1:8000", id="short address"),
        pytest.param("http://127.0.0.1:8000?x=1", id="query"),
        pytest.param("http://127.0.0.1:8000/../x", id="dot segments"),
        pytest.param("http://h" + "x" * 600, id="long"),
        pytest.param("http://127.0.0.1:{port}", id="this router"),
        pytest.param("http://localhost:{port}", id="this router by name"),
    ],
)
def test_bad_url_changes_nothing(open_router: Router, api: AdminApi, url: str) -> None:
    """400 with the reason in both forms; a password is neither in the answer nor in the log."""
    url = url.format(port=open_router.port)
    before = api.workers()

    answer = api.add(url)
    old = api.ask("POST", f"/add_worker?url={quote(url)}")

    text = error_of(answer, 400, "ADD_WORKER_FAILED")
    assert len(text) > 10
    assert (old.status, old.body.decode()) == (400, text)
    assert api.workers() == before
    assert "hunter2" not in text
    assert "hunter2" not in open_router.stderr


@pytest.mark.parametrize(
    "described",
    [
        pytest.param({"labels": {"a": "x" * 257}}, id="label"),
        pytest.param({"labels": {"a" * 64: "x"}}, id="label key"),
        pytest.param({"labels": {str(n): "" for n in range(33)}}, id="labels"),
        pytest.param({"labels": {"a": "\u001b[31m"}}, id="control character"),
        pytest.param({"weight": 0}, id="weight"),
        pytest.param({"mode": "m"}, id="unknown key"),
        pytest.param({"worker_type": "driver"}, id="type"),
        pytest.param({"bootstrap_port": 0}, id="bootstrap port"),
        pytest.param({"url": 5}, id="number"),
        pytest.param({"url": None}, id="null"),
        pytest.param([], id="list"),
    ],
)
def test_bad_description_changes_nothing(api: AdminApi, described: Any) -> None:
    """400 with the reason."""
    before = api.workers()
    if isinstance(described, dict):
        described = {"url": f"http://127.0.0.1:{free_port()}", **described}

    answer = api.ask("POST", "/workers", described)

    text = error_of(answer, 400, "ADD_WORKER_FAILED")
    assert len(text) > 10
    assert text.isprintable()
    assert api.workers() == before


def test_duplicate_changes_nothing(api: AdminApi, base: RawWorker) -> None:
    """However it is written."""
    (url,) = base.urls
    before = api.workers()

    for same in (url, f"{url}/", url.replace("http", "HTTP")):
        assert "exists" in error_of(api.add(same, weight=3), 400, "ADD_WORKER_FAILED")
    old = api.ask("POST", f"/add_worker?url={url}")

    assert old.status == 400
    assert "exists" in old.body.decode()
    assert api.workers() == before


async def test_body_that_is_not_json(api: AdminApi) -> None:
    """400, told apart from a wrong description."""
    before = api.workers()

    for described in (b"{", b"", b"\xff\xfe", b"[" * 5000):
        answer = await ask(api.port, "POST", "/workers", [("Host", "127.0.0.1")], described)
        error_of(answer, 400, "INVALID_REQUEST")

    assert api.workers() == before


# --- removing


async def test_stream_on_a_removed_worker_finishes(
    open_router: Router, api: AdminApi, base: RawWorker, extra: RawWorker
) -> None:
    """It is gone at once for new requests; the stream comes whole."""
    (url,) = extra.urls
    go_on = [hold_streams(worker) for worker in (base, extra)]
    assert api.add(url, wait=True).status == 200

    async with stream_on(open_router, extra.ports[0]) as connection:
        answer = api.remove(url)
        state = api.state(url)
        served = await chats(open_router, 10)
        for signal in go_on:
            signal.set()
        body = await rest_of(connection)

    assert answer.status == 200
    assert answer.json()["success"] is True
    assert state == "gone"
    assert served == {str(base.ports[0]): 10}
    assert body == STREAM_BODY
    await until_ended(open_router)


def test_removing_an_unknown_worker(api: AdminApi, base: RawWorker) -> None:
    """404 in both forms, and for one that was removed before."""
    unknown = "http://127.0.0.1:9"

    error_of(api.remove(unknown), 404, "WORKER_NOT_FOUND")
    error_of(api.drain(unknown), 404, "WORKER_NOT_FOUND")
    error_of(api.ask("GET", worker_path(unknown)), 404, "WORKER_NOT_FOUND")
    assert api.ask("POST", f"/remove_worker?url={unknown}").status == 404
    assert api.remove(base.urls[0]).status == 200
    error_of(api.remove(base.urls[0]), 404, "WORKER_NOT_FOUND")


# --- draining


async def test_drained_worker_goes_when_its_stream_ends(
    open_router: Router, api: AdminApi, base: RawWorker, extra: RawWorker
) -> None:
    """No new picks, but it stays as long as something is under way."""
    (url,) = extra.urls
    go_on = [hold_streams(worker) for worker in (base, extra)]
    assert api.add(url, wait=True).status == 200

    async with stream_on(open_router, extra.ports[0]) as connection:
        answer = api.drain(url)
        served = await chats(open_router, 10)
        entry = api.worker(url)
        for signal in go_on:
            signal.set()
        body = await rest_of(connection)
    await until(lambda: api.state(url) == "gone", 3, "removed")

    assert answer.status == 202
    assert answer.json()["worker"]["state"] == "draining"
    assert (entry["state"], entry["load"]) == ("draining", 1)
    assert served == {str(base.ports[0]): 10}
    assert body == STREAM_BODY
    await until_ended(open_router)


async def test_drain_ends_at_its_deadline(
    open_router: Router, api: AdminApi, base: RawWorker, extra: RawWorker
) -> None:
    """The worker goes though a stream is under way, which finishes all the same."""
    (url,) = extra.urls
    go_on = [hold_streams(worker) for worker in (base, extra)]
    assert api.add(url, wait=True).status == 200

    async with stream_on(open_router, extra.ports[0]) as connection:
        began = time.monotonic()
        assert api.ask("DELETE", f"{worker_path(url)}?drain=1&timeout=0.7").status == 202
        early = api.state(url)
        await until(lambda: api.state(url) == "gone", 5, "removed")
        took = elapsed(began)
        served = await chats(open_router, 4)
        for signal in go_on:
            signal.set()
        body = await rest_of(connection)

    assert early == "draining"
    assert took >= 0.7
    assert served == {str(base.ports[0]): 4}
    assert body == STREAM_BODY
    await until_ended(open_router)


async def test_drained_worker_can_be_taken_back(
    open_router: Router, api: AdminApi, base: RawWorker, extra: RawWorker
) -> None:
    """Adding it again ends the drain: it is picked and stays; its stream goes on."""
    (url,) = extra.urls
    go_on = [hold_streams(worker) for worker in (base, extra)]
    assert api.add(url, wait=True).status == 200

    async with stream_on(open_router, extra.ports[0]) as connection:
        assert api.drain(url, timeout_s=1).status == 202
        again = api.add(url, wait=True)
        served = await chats(open_router, 4)
        for signal in go_on:
            signal.set()
        body = await rest_of(connection)
    await asyncio.sleep(1.2)  # past the deadline of the drain

    assert again.status == 200
    assert again.json()["worker"]["state"] == "healthy"
    assert served == {str(base.ports[0]): 2, str(extra.ports[0]): 2}
    assert body == STREAM_BODY
    assert api.state(url) == "healthy"


# --- two administrators


def test_two_administrators_end_in_one_of_the_two_orders(api: AdminApi, extra: RawWorker) -> None:
    """One adds, the other removes the same worker at the same time, again and again."""
    (url,) = extra.urls
    outcomes = set()

    for _ in range(30):
        there = api.state(url) != "gone"
        barrier = threading.Barrier(2)
        statuses: dict[str, int] = {}

        def act(name: str, barrier: threading.Barrier, statuses: dict[str, int]) -> None:
            barrier.wait(5)
            statuses[name] = (api.add(url) if name == "add" else api.remove(url)).status

        threads = [
            threading.Thread(target=act, args=(name, barrier, statuses))
            for name in ("add", "remove")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        outcomes.add((there, statuses["add"], statuses["remove"], api.state(url) != "gone"))

    assert outcomes <= {
        (False, 200, 200, False),  # added, then removed
        (False, 200, 404, True),  # removed in vain, then added
        (True, 200, 200, True),  # removed, then added
        (True, 400, 200, False),  # added in vain, then removed
    }
    assert len(outcomes) >= 2


def test_two_administrators_add_the_same_worker(api: AdminApi, extra: RawWorker) -> None:
    """One of them succeeds."""
    (url,) = extra.urls
    for _ in range(10):
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda s=statuses: s.append(api.add(url).status))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(statuses) == [200, 400]
        assert api.remove(url).status == 200


# --- old forms


async def test_old_forms(
    open_router: Router, api: AdminApi, base: RawWorker, extra: RawWorker
) -> None:
    """Statuses as in vLLM Router, but removing what is not there is 404."""
    (url,) = extra.urls

    added = api.ask("POST", f"/add_worker?url={url}&wait=1")
    listed = api.ask("GET", "/list_workers")
    served = await chats(open_router, 4)
    removed = api.ask("POST", f"/remove_worker?url={url}")
    again = api.ask("POST", f"/remove_worker?url={url}")

    assert (added.status, added.body.decode()) == (200, f"Successfully added worker: {url}")
    assert listed.json() == {"urls": [*base.urls, url]}
    assert set(served) == {str(port) for port in (*base.ports, *extra.ports)}
    assert (removed.status, removed.body.decode()) == (200, f"Successfully removed worker: {url}")
    assert again.status == 404
    assert api.ask("GET", "/list_workers").json() == {"urls": base.urls}


# --- who may

ADMIN_REQUESTS = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("GET", "/workers/http://127.0.0.1:9"),
    ("DELETE", "/workers/http://127.0.0.1:9"),
    ("POST", "/workers/http://127.0.0.1:9/drain"),
    ("POST", "/add_worker?url=http://127.0.0.1:9"),
    ("POST", "/remove_worker?url=http://127.0.0.1:9"),
    ("GET", "/list_workers"),
    ("GET", "/get_loads"),
    ("POST", "/flush_cache"),
    ("GET", "/get_server_info"),
    ("GET", "/get_model_info"),
    ("GET", "/config"),
]
OPEN_REQUESTS = [
    ("GET", "/liveness"),
    ("GET", "/readiness"),
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("POST", "/finish_session?session_id=1"),
]


@pytest.mark.parametrize(("method", "target"), ADMIN_REQUESTS)
def test_key_is_needed(keyed_router: Router, method: str, target: str) -> None:
    """401 without it and with another; nothing but the right one will do."""
    for shown in (None, f"Bearer {KEY}x", "Bearer", f"Basic {KEY}", KEY, f"Bearer {WORKER_KEY}"):
        headers = {} if shown is None else {"Authorization": shown}
        answer = AdminApi(keyed_router).ask(method, target, headers=headers)

        error_of(answer, 401, "UNAUTHORIZED")
        assert answer.values("www-authenticate") == ["Bearer"]

    answer = AdminApi(keyed_router, KEY).ask(method, target)
    assert answer.status not in (401, 403)


@pytest.mark.parametrize(("method", "target"), OPEN_REQUESTS)
def test_what_is_for_everybody_needs_no_key(
    keyed_router: Router, wide_router: Router, method: str, target: str
) -> None:
    """Neither with a key set nor on a router that serves other machines."""
    for router in (keyed_router, wide_router):
        answer = AdminApi(router).ask(method, target, headers={"Host": "router.test"})
        assert answer.status == 200, answer


async def test_key_is_no_matter_for_inference(keyed_router: Router) -> None:
    """Requests of clients are served without it; the key is in no log."""
    assert (await chat(keyed_router)).status == 200
    assert KEY not in keyed_router.stderr


@pytest.mark.parametrize(("method", "target"), ADMIN_REQUESTS)
def test_without_a_key_other_machines_may_not(
    wide_router: Router, method: str, target: str
) -> None:
    """403 with what to do about it, though this test comes from the same machine."""
    text = error_of(AdminApi(wide_router).ask(method, target), 403, "FORBIDDEN")

    assert "--admin-api-key" in text


async def test_without_a_key_other_machines_get_inference(
    wide_router: Router, base: RawWorker
) -> None:
    """Only the admin API is closed."""
    assert await chats(wide_router, 2) == {str(base.ports[0]): 2}


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Host": "localhost"}, True),
        ({"Host": "[::1]:1"}, True),
        ({"Host": "evil.example"}, False),
        ({"Host": "127.0.0.1.evil.example"}, False),
        ({"Origin": "http://127.0.0.1:{port}"}, True),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"X-Forwarded-Host": "127.0.0.1", "Host": "evil.example"}, False),
    ],
    ids=str,
)
def test_without_a_key_web_pages_of_elsewhere_may_not(
    open_router: Router, headers: dict[str, str], allowed: bool
) -> None:
    """A page in a browser of this machine could ask; names that point here are no good either."""
    shown = {name: value.format(port=open_router.port) for name, value in headers.items()}

    answer = AdminApi(open_router).ask("GET", "/workers", headers=shown)

    if allowed:
        assert answer.status == 200
    else:
        error_of(answer, 403, "FORBIDDEN")


TRICKS = [
    "//workers",
    "///workers",
    "/%77orkers",
    "/workers%2f",
    "/workers%2F..%2Fworkers",
    "/v1/../workers",
    "/v1/%2e%2e/workers",
    "/v1/..%2fworkers",
    "/./workers",
    "/workers/../workers",
    "/workers/./",
    "/health/../workers",
    "/v1/models/../../workers",
    "/v1/models/..%2f..%2fworkers",
    "/v1/models/%2e%2e/%2e%2e/workers",
    "/workers;x=1",
    "/workers#x",
    "/workers?x=/v1/models/",
    "/WORKERS",
    "\\workers",
    "/\\workers",
    "/workers%00",
    "/list_workers/",
    "//config",
    "/%63onfig",
    "/v1/models/../../config",
]


@pytest.mark.parametrize("target", TRICKS)
async def test_no_spelling_of_a_path_gets_past_the_key(
    keyed_router: Router, keyed: AdminApi, target: str
) -> None:
    """It is an administrator's path, which needs the key, or a worker's, which does not know it."""
    before = keyed.workers()
    added = f'{{"url": "http://127.0.0.1:{free_port()}"}}'.encode()

    seen = await ask(keyed_router.port, "GET", target)
    changed = await ask(keyed_router.port, "POST", target, body=added)

    for answer in (seen, changed):
        assert 400 <= answer.status < 500, answer
        assert b"127.0.0.1" not in answer.body
        assert b"admin_api_key" not in answer.body
    assert keyed.workers().keys() == before.keys()


# --- what is known of workers


async def test_loads_are_the_routers_and_the_workers(
    keyed_router: Router, keyed: AdminApi, two_sims: list[Sim]
) -> None:
    """While one of them streams."""
    idle = keyed.ask("GET", "/get_loads").json()
    stream = asyncio.create_task(chat(keyed_router, tokens=40, stream=True))
    await until(lambda: keyed_router.in_flight() == 1, 10, "the stream is open")
    busy = keyed.ask("GET", "/get_loads").json()
    name = server(await stream)

    urls = [sim.url for sim in two_sims]
    assert idle == {"workers": [{"worker": url, "load": 0, "worker_load": 0} for url in urls]}
    (url,) = [sim.url for sim in two_sims if sim.worker_name == name]
    loads = {entry.pop("worker"): entry for entry in busy["workers"]}
    assert loads == {u: dict.fromkeys(("load", "worker_load"), int(u == url)) for u in urls}


def test_flush_reaches_every_worker(keyed: AdminApi, two_sims: list[Sim]) -> None:
    """Each is asked once, and the policy's own index is emptied."""
    before = [sim.state()["prefix_cache_resets"] for sim in two_sims]

    answer = keyed.ask("POST", "/flush_cache")

    assert answer.status == 200
    assert answer.json() == {
        "results": [{"worker": sim.url, "status": 200, "ok": True} for sim in two_sims],
        "router_index": "flushed",
    }
    after = [sim.state()["prefix_cache_resets"] for sim in two_sims]
    assert after == [count + 1 for count in before]


def test_flush_says_who_failed(keyed: AdminApi, two_sims: list[Sim]) -> None:
    """207 when some did not."""
    dead = f"http://127.0.0.1:{free_port()}"
    assert keyed.add(dead).status == 200

    answer = keyed.ask("POST", "/flush_cache")
    assert keyed.remove(dead).status == 200

    assert answer.status == 207
    results = {result["worker"]: result for result in answer.json()["results"]}
    assert results[dead]["ok"] is False
    assert "refused" in results[dead]["error"]
    assert all(results[sim.url]["ok"] for sim in two_sims)


def test_models_are_the_union(keyed_router: Router) -> None:
    """One entry per name, without a key, in OpenAI's shape."""
    api = AdminApi(keyed_router)

    answer = api.ask("GET", "/v1/models")
    one = api.ask("GET", "/v1/models/sql-lora")
    none = api.ask("GET", "/v1/models/nobodys-model")

    document = answer.json()
    assert document["object"] == "list"
    assert [entry["id"] for entry in document["data"]] == ["sim-model", "sql-lora"]
    assert all(entry["object"] == "model" for entry in document["data"])
    assert not any(name.startswith("x-") for entry in document["data"] for name in entry)
    assert one.json() == document["data"][1]
    assert none.status == 404
    assert none.json()["error"]["code"] == "model_not_found"


def test_health_generate_generates(keyed_router: Router, two_sims: list[Sim]) -> None:
    """A worker is really asked for a token."""
    before = sum(sim.state()["requests_received"] for sim in two_sims)

    answer = AdminApi(keyed_router).ask("GET", "/health_generate")

    assert (answer.status, answer.body) == (200, b"OK")
    assert sum(sim.state()["requests_received"] for sim in two_sims) == before + 1


def test_infos_of_all_workers(keyed: AdminApi, two_sims: list[Sim]) -> None:
    """What each says of itself, by URL."""
    servers = keyed.ask("GET", "/get_server_info").json()
    models = keyed.ask("GET", "/get_model_info").json()

    urls = {sim.url for sim in two_sims}
    assert servers["workers"].keys() == models["workers"].keys() == urls
    assert all("error" not in info for info in servers["workers"].values())
    assert {info["model_id"] for info in models["workers"].values()} == {"sim-model"}
    assert servers["policy"] == models["policy"] == "cache_aware"


def test_configuration_hides_secrets(keyed: AdminApi, two_sims: list[Sim]) -> None:
    """They are shown as set, nothing more."""
    answer = keyed.ask("GET", "/config")

    shown = answer.json()
    assert shown["admin_api_key"] == shown["worker_api_key"] == "***"
    assert shown["worker_urls"] == [sim.url for sim in two_sims]
    assert shown["health_check_interval_secs"] == 0.25
    assert KEY.encode() not in answer.body
    assert WORKER_KEY.encode() not in answer.body
