"""Workers shown, added, removed and drained through the admin API."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admin_model import SUSPENDED
from extproc.config import Config
from extproc.discovery.updates import Remove, Reset
from extproc.registry import Settings
from tests.extproc.admin_api import AT_ONCE, BY_ENVOY, A, B, C, serve

TWO_RANKS = Settings(follows_envoy=False, asks_models=False, ranks=2)
NAMED = "http://worker.example:8000"


@pytest.fixture
async def api():
    async with serve() as api:
        yield api


@pytest.fixture
async def by_envoy():
    async with serve(BY_ENVOY) as api:
        yield api


@pytest.fixture
async def ranked():
    async with serve(TWO_RANKS) as api:
        api.add(A, B)
        yield api


def urls_of(answer):
    return [entry["url"] for entry in answer.json["workers"]]


# --- showing ------------------------------------------------------------------------------------


async def test_router_without_workers_lists_none(api):
    """An empty list, not an error."""
    assert (await api.get("/workers")).json == {
        "workers": [],
        "total": 0,
        "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": 0},
    }
    assert (await api.get("/list_workers")).json == {"urls": []}


async def test_entry_tells_all_that_is_known(api):
    """The fields of vLLM Router, and more."""
    described = {"url": A, "weight": 2, "labels": {"zone": "a"}}
    (engine,) = api.add(described)
    api.tell_models(engine, "llama", "llama-8b", adapters=["sql"])
    api.tell_loads(engine, {0: (3, 1, 0.25)})
    (pool,) = api.registry.pools
    lease = pool.acquire(pool.members[0])

    assert (await api.get(f"/workers/{A}")).json == {
        "url": A,
        "model_id": "llama",
        "models": ["llama", "llama-8b"],
        "adapters": ["sql"],
        "worker_type": "regular",
        "is_healthy": True,
        "state": "healthy",
        "reason": "",
        "since": "2026-01-31T12:00:00.000Z",
        "load": 1,
        "running": 3,
        "waiting": 1,
        "kv_usage": 0.25,
        "dp_rank": None,
        "weight": 2.0,
        "labels": {"zone": "a"},
        "source": "admin",
        "endpoint": "10.0.0.1:8000",
        "pool": "default",
        "connection_mode": "http",
        "priority": 0,
        "cost": 1.0,
    }
    lease.release(0.0)
    assert (await api.get(f"/workers/{A}")).json["load"] == 0


async def test_worker_without_an_address_is_listed(api):
    """With what is known: why there is none."""
    api.add(NAMED)
    api.fleet.on_unresolved("worker.example", "no such name")
    api.fleet.commit()

    entry = (await api.get(f"/workers/{NAMED}")).json
    assert (entry["state"], entry["reason"]) == ("starting", "no such name")
    assert (entry["endpoint"], entry["pool"], entry["running"]) == (None, None, None)
    assert urls_of(await api.get("/workers")) == [NAMED]
    api.fleet.on_address("worker.example", "10.0.0.9")
    api.fleet.commit()
    assert (await api.get(f"/workers/{NAMED}")).json["endpoint"] == "10.0.0.9:8000"


async def test_workers_are_listed_in_the_order_of_joining(api):
    """Whatever their names; one that returns is last."""
    api.add(C, A, B)
    api.fleet.remove(C)
    api.add(C)

    assert urls_of(await api.get("/workers")) == [A, B, C]
    assert (await api.get("/list_workers")).json == {"urls": [A, B, C]}


async def test_workers_are_counted_by_their_role(api):
    """As in vLLM Router."""
    api.add(A, {"url": B, "worker_type": "decode"})
    api.add({"url": C, "worker_type": "prefill", "bootstrap_port": 8998})

    answer = (await api.get("/workers")).json
    assert answer["total"] == 3
    assert answer["stats"] == {"prefill_count": 1, "decode_count": 1, "regular_count": 1}
    assert answer["workers"][2]["bootstrap_port"] == 8998
    assert "bootstrap_port" not in answer["workers"][0]


async def test_state_follows_envoy(by_envoy):
    """With the reason and the time since when."""
    by_envoy.add(A)
    states = []
    for event in (None, by_envoy.pass_check, by_envoy.fail_check):
        by_envoy.now += 60
        if event is not None:
            event(A)
        entry = (await by_envoy.get(f"/workers/{A}")).json
        states.append((entry["state"], entry["is_healthy"], entry["reason"], entry["since"][11:19]))

    assert states == [
        ("starting", False, "its first health check is under way", "12:00:00"),
        ("healthy", True, "", "12:02:00"),
        ("unhealthy", False, "it cannot be reached", "12:03:00"),
    ]


async def test_worker_that_is_left_alone_for_a_while_says_so(api):
    """It is healthy as far as Envoy knows, but others are preferred."""
    api.add(A)
    api.registry.suspend("10.0.0.1:8000", suspended=True)

    entry = (await api.get(f"/workers/{A}")).json
    assert (entry["state"], entry["reason"]) == ("healthy", SUSPENDED)


@pytest.mark.parametrize(
    "path",
    [
        A,
        "http:/10.0.0.1:8000",
        "HTTP://10.0.0.1:8000/",
        quote(A, safe=""),
        quote(A),
        "http:%2F/10.0.0.1:8000",
        "http%3a//10.0.0.1:8000",
    ],
)
async def test_worker_is_found_however_its_url_is_written(api, path):
    """As it is, with one slash lost, encoded in part or whole, in capitals."""
    api.add(A)

    answer = await api.get(f"/workers/{path}")

    assert (answer.status, answer.json["url"]) == (200, A)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://10.0.0.1/llama/v2", "http://10.0.0.1:80/llama/v2/"),
        ("https://[2001:DB8::1]", "https://[2001:db8:0::1]:443"),
        ("http://10.0.0.1/drain", "http://10.0.0.1/drain"),
        ("http://Worker.Example", "http://worker.example"),
    ],
)
async def test_worker_is_found_whatever_its_url(api, url, path):
    """Base paths, IPv6, ports that go without saying; shown and removed."""
    (engine,) = api.add(url)

    assert (await api.get(f"/workers/{path}")).json["url"] == engine.key
    assert (await api.post(f"/workers/{path}/drain")).status == 202
    assert (await api.delete(f"/workers/{path}")).status == 200
    assert (await api.delete(f"/workers/{path}")).status == 404


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_unknown_worker_is_not_found(api, method):
    """404 as in vLLM Router, also where that says success."""
    api.add(A)

    for url in (B, f"{A}@0", f"{A}/base"):
        answer = await api.ask(method, f"/workers/{url}")
        assert answer.status == 404
        assert answer.json == {"error": f"Worker {url} not found", "code": "WORKER_NOT_FOUND"}


@pytest.mark.parametrize("path", ["x", "ftp://10.0.0.1", "http://", "http://a:0", "http://u:p@a", "%ff", "%00"])  # fmt: skip
async def test_path_that_is_no_url_is_refused(api, path):
    """400 with what is expected; passwords are not repeated."""
    for method in ("GET", "DELETE"):
        answer = await api.ask(method, f"/workers/{path}")
        assert (answer.status, answer.json["code"]) == (400, "INVALID_REQUEST")
        assert "expected http://host:port" in answer.json["error"]
        assert "u:p" not in answer.text


# --- ranks --------------------------------------------------------------------------------------


async def test_each_rank_is_a_worker(ranked):
    """With its own load and rank; the loads come from the engine's metrics."""
    engine = ranked.registry.get(A)
    ranked.tell_loads(engine, {0: (1, 2, 0.1), 1: (3, 4, 0.5)})
    (pool,) = ranked.registry.pools
    pool.acquire(pool.members[1])

    entries = (await ranked.get("/workers")).json["workers"]
    assert [entry["url"] for entry in entries] == [f"{A}@0", f"{A}@1", f"{B}@0", f"{B}@1"]
    assert [entry["dp_rank"] for entry in entries] == [0, 1, 0, 1]
    assert [entry["running"] for entry in entries] == [1, 3, None, None]
    assert [entry["load"] for entry in entries] == [0, 1, 0, 0]


async def test_metrics_without_ranks_are_those_of_every_rank(ranked):
    """Better than nothing."""
    ranked.tell_loads(ranked.registry.get(A), {None: (5, 6, 0.7)})

    entries = (await ranked.get("/workers")).json["workers"]
    assert [entry["waiting"] for entry in entries] == [6, 6, None, None]


async def test_engine_without_its_rank_stands_for_all_of_them(ranked):
    """Sums, and the entries of the ranks."""
    engine = ranked.registry.get(A)
    ranked.tell_loads(engine, {0: (1, 2, 0.1), 1: (3, 4, 0.5)})
    (pool,) = ranked.registry.pools
    pool.acquire(pool.members[0])
    pool.acquire(pool.members[1])

    entry = (await ranked.get(f"/workers/{A}")).json
    assert (entry["url"], entry["dp_rank"], entry["load"]) == (A, None, 2)
    assert (entry["running"], entry["waiting"], entry["kv_usage"]) == (4, 6, 0.5)
    assert [rank["url"] for rank in entry["ranks"]] == [f"{A}@0", f"{A}@1"]
    assert "ranks" not in (await ranked.get(f"/workers/{A}@1")).json
    assert (await ranked.get(f"/workers/{B}")).json["running"] is None


async def test_engine_with_ranks_is_removed_as_a_whole(ranked):
    """By its URL; one rank alone is refused with an explanation."""
    refused = await ranked.delete(f"/workers/{A}@1")
    drained = await ranked.post(f"/workers/{A}@1/drain")
    missing = await ranked.delete(f"/workers/{A}@2")

    assert (refused.status, drained.status, missing.status) == (400, 400, 404)
    assert "was added with all its ranks: name it without @1" in refused.json["error"]
    assert (await ranked.delete(f"/workers/{A}")).status == 200
    assert urls_of(await ranked.get("/workers")) == [f"{B}@0", f"{B}@1"]


async def test_ranks_that_were_added_one_by_one_are_removed_alone_or_together(api):
    """As in vLLM Router the bare URL means all of them."""
    api.add(f"{A}@0", f"{A}@1", f"{A}@2", B)

    assert (await api.delete(f"/workers/{A}@1")).status == 200
    whole = (await api.get(f"/workers/{A}")).json
    assert [rank["url"] for rank in whole["ranks"]] == [f"{A}@0", f"{A}@2"]
    assert (await api.delete(f"/workers/{A}")).status == 200
    assert urls_of(await api.get("/workers")) == [B]


async def test_several_ranks_are_as_healthy_as_the_best(api):
    """One that can be picked is enough."""
    api.add(f"{A}@0", f"{A}@1")
    api.fleet.drain(f"{A}@0", 60)

    whole = (await api.get(f"/workers/{A}")).json
    assert (whole["state"], whole["is_healthy"]) == ("healthy", True)
    api.fleet.drain(f"{A}@1", 60)
    assert (await api.get(f"/workers/{A}")).json["state"] == "draining"


# --- adding -------------------------------------------------------------------------------------


async def test_worker_is_added_at_once(by_envoy):
    """While it is starting; its URL is written as everywhere."""
    answer = await by_envoy.post(
        "/workers",
        json={
            "url": "HTTP://10.0.0.1:8000/",
            "weight": 2,
            "model_id": "llama",
            "labels": {"zone": "a"},
            "worker_type": "prefill",
            "bootstrap_port": 8998,
            "priority": 7,
            "cost": 1.5,
        },
    )

    assert answer.status == 200
    assert (answer.json["success"], answer.json["message"]) == (
        True,
        "Worker http://10.0.0.1:8000 added",
    )
    entry = answer.json["worker"]
    assert (entry["url"], entry["state"], entry["is_healthy"]) == (A, "starting", False)
    assert (entry["weight"], entry["model_id"], entry["labels"]) == (2, "llama", {"zone": "a"})
    assert (entry["worker_type"], entry["bootstrap_port"]) == ("prefill", 8998)
    assert urls_of(await by_envoy.get("/workers")) == [A]


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"url": A}, f"Worker {A} already exists"),
        ({"url": f"{A}/", "weight": 2}, f"Worker {A} already exists"),
        ({"url": f"{A}@0"}, f"Worker {A} already exists and shares its ranks"),
        ({"url": "http://127.0.0.1:30000"}, "is this router itself"),
        ({"url": "http://localhost:30000/x"}, "is this router itself"),
        ({}, "url"),
        ({"url": 5}, "url"),
        ({"url": None}, "url"),
        ({"url": ""}, "expected http://host:port"),
        ({"url": "10.0.0.2:8000"}, "expected http://host:port"),
        ({"url": "ftp://10.0.0.2"}, "expected http://host:port"),
        ({"url": "http://10.0.0.2:0"}, "port"),
        ({"url": "http://u:secret@10.0.0.2"}, "without either"),
        ({"url": "http://169.254.169.254"}, "no worker can be there"),
        ({"url": B, "weight": 0}, "weight"),
        ({"url": B, "weight": 1e999}, "weight"),
        ({"url": B, "weight": "2"}, "weight"),
        ({"url": B, "labels": {"k": "v" * 257}}, "labels"),
        ({"url": B, "labels": {"k" * 64: ""}}, "labels"),
        ({"url": B, "labels": {"k": "\n"}}, "labels"),
        ({"url": B, "model": "m\x1b[31m"}, "model"),
        ({"url": B, "worker_type": "x"}, "worker_type"),
        ({"url": B, "bootstrap_port": 1}, "bootstrap_port"),
        ({"url": B, "wait": 2}, "unknown key 'wait'"),
        ([], "expected a URL or a mapping"),
        (5, "expected a URL or a mapping"),
        (None, "expected a URL or a mapping"),
    ],
    ids=str,
)
async def test_wrong_description_is_refused_with_the_reason(api, described, message):
    """400, nothing changed."""
    api.add(A)
    # aiohttp would write Infinity, which is no JSON
    body = json.dumps(described).replace("Infinity", "1e999")
    answer = await api.post("/workers", data=body)

    assert answer.status == 400
    assert answer.json["code"] in ("ADD_WORKER_FAILED", "INVALID_REQUEST")
    assert message in answer.json["error"] or "1e999" in body
    assert "secret" not in answer.text
    assert urls_of(await api.get("/workers")) == [A]


async def test_worker_that_is_being_drained_is_taken_back(api):
    """By adding it again, with its new description."""
    api.add(A)
    api.fleet.drain(A, 60)

    entry = (await api.post("/workers", json={"url": A, "weight": 3})).json["worker"]

    assert (entry["state"], entry["weight"]) == ("healthy", 3)
    api.fleet.tick()
    assert urls_of(await api.get("/workers")) == [A]


@pytest.mark.parametrize("value", ["1", "true", "YES"])
async def test_adding_can_wait_until_the_worker_is_healthy(by_envoy, value):
    """The answer comes with Envoy's verdict."""
    async with asyncio.TaskGroup() as tasks:
        adding = tasks.create_task(by_envoy.post(f"/workers?wait={value}", json={"url": A}))
        await by_envoy.joined(A)
        # Others are not delayed.
        assert (await by_envoy.post("/workers", json={"url": B})).status == 200
        assert not adding.done()
        by_envoy.pass_check(A)

    assert adding.result().status == 200
    assert adding.result().json["worker"]["state"] == "healthy"


async def test_worker_that_is_not_healthy_in_time_stays(by_envoy):
    """504 with its state and the reason."""
    answer = await by_envoy.post("/workers?wait=1&timeout=0.02", json={"url": A})

    assert (answer.status, answer.json["code"]) == (504, "WORKER_NOT_HEALTHY")
    assert "starting, its first health check is under way" in answer.json["error"]
    assert answer.json["worker"]["state"] == "starting"
    assert urls_of(await by_envoy.get("/workers")) == [A]


@pytest.mark.parametrize("form", ["/workers?wait=1", f"/add_worker?url={A}&wait=1"])
async def test_worker_that_is_removed_meanwhile_is_gone(by_envoy, form):
    """410 at once, not when the time is up."""
    async with asyncio.TaskGroup() as tasks:
        adding = tasks.create_task(by_envoy.post(form, json={"url": A}))
        await by_envoy.joined(A)
        await by_envoy.delete(f"/workers/{A}")

    answer = adding.result()
    assert answer.status == 410
    assert "was removed before it became healthy" in answer.text


@pytest.mark.parametrize("seconds", ["x", "-1", "nan", "inf", "1e9", ""])
async def test_wrong_timeout_is_refused_before_anything_happens(api, seconds):
    """For adding and for draining."""
    api.add(A)

    for answer in (
        await api.post(f"/workers?wait=1&timeout={seconds}", json={"url": B}),
        await api.post(f"/workers/{A}/drain?timeout={seconds}"),
        await api.delete(f"/workers/{A}?drain=1&timeout={seconds}"),
    ):
        assert (answer.status, answer.json["code"]) == (400, "INVALID_REQUEST")
        assert "timeout: expected seconds" in answer.json["error"]
    entries = (await api.get("/workers")).json["workers"]
    assert [(entry["url"], entry["state"]) for entry in entries] == [(A, "healthy")]


# --- removing and draining ----------------------------------------------------------------------


async def test_worker_is_removed_at_once(api):
    """Requests under way finish on their own."""
    api.add(A, B)
    (pool,) = api.registry.pools
    pool.acquire(pool.members[0])

    answer = await api.delete(f"/workers/{A}")

    assert answer.status == 200
    assert answer.json == {"success": True, "message": f"Worker {A} removed"}
    assert urls_of(await api.get("/workers")) == [B]


async def test_worker_that_a_source_names_stays_away(api):
    """Until the source forgets it and names it again, or it is added."""
    (engine,) = api.add(A)
    api.fleet.on_update("file", Reset((engine.spec,)))

    assert (await api.delete(f"/workers/{A}")).status == 200
    api.fleet.on_update("file", Reset((engine.spec,)))
    assert urls_of(await api.get("/workers")) == []
    assert (await api.post("/workers", json={"url": A})).status == 200
    api.fleet.on_update("file", Remove(A))
    assert urls_of(await api.get("/workers")) == [A]


@pytest.mark.parametrize(
    ("method", "path", "timeout_s"),
    [
        ("DELETE", f"/workers/{A}?drain=1", 77),
        ("DELETE", f"/workers/{A}?drain=true&timeout=5", 5),
        ("POST", f"/workers/{A}/drain", 77),
        ("POST", f"/workers/{A}/drain?timeout=0", 0),
        ("POST", f"/workers/{quote(A, safe='')}/drain?timeout=5", 5),
    ],
)
async def test_drained_worker_goes_when_it_is_idle_or_overdue(method, path, timeout_s):
    """202 with its state; then it is gone."""
    async with serve(AT_ONCE, Config(worker_drain_timeout_secs=77)) as api:
        (engine,) = api.add(A)
        (pool,) = api.registry.pools
        pool.acquire(pool.members[0])
        answer = await api.ask(method, path)
        deadline_s = engine.drain_deadline - api.now
        api.now += max(0, timeout_s - 1)
        api.fleet.tick()
        before = urls_of(await api.get("/workers"))
        api.now += 1
        api.fleet.tick()
        after = urls_of(await api.get("/workers"))

    assert (answer.status, answer.json["success"]) == (202, True)
    assert answer.json["worker"]["state"] == "draining"
    assert deadline_s == timeout_s
    assert (before, after) == ([A] if timeout_s else [], [])


async def test_several_ranks_are_drained_together(api):
    """By their URL; the answer shows them."""
    api.add(f"{A}@0", f"{A}@1")

    answer = await api.post(f"/workers/{A}/drain")

    assert answer.status == 202
    assert [rank["state"] for rank in answer.json["worker"]["ranks"]] == ["draining"] * 2


async def test_draining_an_unknown_worker_is_not_found(api):
    """As with removing it."""
    for answer in (
        await api.post(f"/workers/{A}/drain"),
        await api.delete(f"/workers/{A}?drain=1"),
    ):
        assert (answer.status, answer.json["code"]) == (404, "WORKER_NOT_FOUND")


async def test_two_administrators_at_once_end_in_one_of_two_orders(api):
    """Added then removed, or removed then added; never half of both."""
    for _ in range(20):
        added, removed = await asyncio.gather(
            api.post("/workers", json={"url": A}), api.delete(f"/workers/{A}")
        )
        there = urls_of(await api.get("/workers")) == [A]
        assert (added.status, removed.status, there) in [(200, 200, False), (200, 404, True)]
        await api.delete(f"/workers/{A}")


# --- the old forms ------------------------------------------------------------------------------


async def test_old_forms_answer_as_vllm_router(api):
    """Plain text, the same words; only removing what is not there is no success."""
    asked = [
        ("/add_worker", A),
        ("/add_worker", f"{A}/"),
        ("/add_worker", quote(B, safe="")),
        ("/remove_worker", A),
        ("/remove_worker", A),
    ]
    answers = [await api.post(f"{path}?url={url}") for path, url in asked]

    assert [(answer.status, answer.text) for answer in answers] == [
        (200, f"Successfully added worker: {A}"),
        (400, f"Worker {A} already exists"),
        (200, f"Successfully added worker: {B}"),
        (200, f"Successfully removed worker: {A}"),
        (404, f"Worker {A} not found"),
    ]
    assert all(a.headers["Content-Type"] == "text/plain; charset=utf-8" for a in answers)


@pytest.mark.parametrize("path", ["/add_worker", "/remove_worker"])
@pytest.mark.parametrize("query", ["", "?url=", "?url=x", "?url=http://127.0.0.1:0", "?uri=http://a"])  # fmt: skip
async def test_old_forms_refuse_what_is_no_url(api, path, query):
    """400 with the reason as text."""
    answer = await api.post(f"{path}{query}")

    assert answer.status == 400
    assert "expected http://host:port" in answer.text


async def test_old_form_can_wait_too(by_envoy):
    """200 when it is healthy, else 504 with the reason."""
    answer = await by_envoy.post(f"/add_worker?url={A}&wait=1&timeout=0.02")

    assert answer.status == 504
    assert "is not healthy after 0.02 s: starting" in answer.text


async def test_old_form_removes_all_ranks(ranked):
    """By the bare URL; a single rank is refused."""
    assert (await ranked.post(f"/remove_worker?url={A}@0")).status == 400
    assert (await ranked.post(f"/remove_worker?url={A}")).status == 200
    assert (await ranked.get("/list_workers")).json == {"urls": [f"{B}@0", f"{B}@1"]}


# --- whatever comes -----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FIELDS = ["url", "weight", "model", "model_id", "labels", "worker_type", "bootstrap_port", "tls_name"]  # fmt: skip
DESCRIPTIONS = st.dictionaries(st.sampled_from(FIELDS), JSON | st.just(A)) | JSON
PATHS = st.lists(
    st.sampled_from([*"/:@[].%?&=", "%2F", "%ff", "%00", "%0a", "http", A, "drain", "1", "\\", "|"]),
    max_size=8,
).map("".join)  # fmt: skip


@pytest.mark.slow
@given(st.lists(DESCRIPTIONS, min_size=1, max_size=5), st.lists(PATHS, max_size=5))
def test_nothing_that_is_sent_fails_the_service(bodies, paths):
    """Good or bad, never a 500."""

    async def send():
        async with serve() as api:
            for body in bodies:
                yield await api.post("/workers", data=json.dumps(body))
            for path in paths:
                for method in ("GET", "DELETE", "POST"):
                    yield await api.ask(method, f"/workers/{path}")
                yield await api.post(f"/add_worker?url={path}")
                yield await api.post(f"/remove_worker?{path}")
                yield await api.get(f"/v1/models/{path}")

    async def check():
        async for answer in send():
            assert answer.status < 500 or answer.status == 503

    asyncio.run(check())


@pytest.mark.slow
@given(st.binary(max_size=60), st.sampled_from(["", "application/json", "text/plain", "x"]))
def test_no_body_fails_the_service(body, content_type):
    """Bytes of any kind, under any name."""

    async def check():
        async with serve() as api:
            answer = await api.post("/workers", data=body, headers={"Content-Type": content_type})
            assert answer.status in (200, 400)

    asyncio.run(check())
