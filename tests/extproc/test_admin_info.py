"""What the admin API tells of loads, caches and servers; workers are asked for it."""

from __future__ import annotations

import asyncio

import pytest

from extproc import __version__, admin_info
from extproc.registry import Settings
from extproc.sim.config import SimConfig
from extproc.sim.worker import SimWorker
from policies.base import Content, Request
from policies.cache_aware import CacheAware
from tests.extproc.admin_api import AT_ONCE, A, B, fake_worker, serve

UNRESOLVED = "http://worker.example:8000"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
async def api():
    async with serve() as api:
        yield api


@pytest.fixture
async def sim():
    """Start a simulated vLLM worker."""
    worker = SimWorker(SimConfig(speed=0.0))
    await worker.start()
    yield worker
    await worker.stop()


# --- loads --------------------------------------------------------------------------------------


async def test_loads_are_ours_and_the_workers_own(api, sim):
    """In flight here, and what /load says there."""
    api.add(sim.url)
    (pool,) = api.registry.pools
    pool.acquire(pool.members[0])

    assert (await api.get("/get_loads")).json == {
        "workers": [{"worker": sim.url, "load": 1, "worker_load": 0}]
    }


@pytest.mark.parametrize(
    ("answer", "load"),
    [
        ((200, {"server_load": 7}), 7),
        ((200, {"server_load": None}), None),
        ((200, {"server_load": True}), None),
        ((200, {"server_load": "7"}), None),
        ((200, {}), None),
        ((200, []), None),
        ((200, 5), None),
        ((200, b"{"), None),
        ((200, b"\xff"), None),
        ((200, b"[" * 100_000), None),
        ((500, {"server_load": 7}), None),
        ((404, {}), None),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_load_is_null_when_the_worker_does_not_say(api, answer, load):
    """Whatever it says instead."""
    async with fake_worker({"GET /load": answer}) as (_, url):
        api.add(url)

        assert (await api.get("/get_loads")).json["workers"][0]["worker_load"] == load


async def test_loads_of_workers_that_do_not_answer_are_null(api, monkeypatch):
    """Not reachable, too slow, without an address; others are told all the same."""
    monkeypatch.setattr(admin_info, "LOAD_TIMEOUT_S", 0.1)
    async with (
        fake_worker({"GET /load": (200, {"server_load": 3})}) as (_, good),
        fake_worker() as (slow, stalled),
    ):
        slow.stall()
        api.add(NOBODY, stalled, UNRESOLVED, good)
        answer = await api.get("/get_loads")

    assert [entry["worker_load"] for entry in answer.json["workers"]] == [None, None, None, 3]


async def test_ranks_share_the_answer_of_their_engine():
    """It is asked once, whether the ranks came together or one by one."""
    async with (
        serve(Settings(follows_envoy=False, asks_models=False, ranks=2)) as api,
        fake_worker({"GET /load": (200, {"server_load": 3})}) as (together, one),
        fake_worker({"GET /load": (200, {"server_load": 4})}) as (alone, other),
    ):
        api.add(one, f"{other}@0", f"{other}@1")
        answer = await api.get("/get_loads")

        assert answer.json["workers"] == [
            {"worker": f"{one}@0", "load": 0, "worker_load": 3},
            {"worker": f"{one}@1", "load": 0, "worker_load": 3},
            {"worker": f"{other}@0", "load": 0, "worker_load": 4},
            {"worker": f"{other}@1", "load": 0, "worker_load": 4},
        ]
        assert (len(together.asked), len(alone.asked)) == (1, 1)


async def test_workers_are_asked_at_once_within_bounds(api, monkeypatch):
    """Two at a time here; the others come in turn."""
    monkeypatch.setattr(admin_info, "MAX_ASKED_AT_ONCE", 2)
    async with fake_worker({"GET /load": (200, {"server_load": 1})}) as (worker, url):
        worker.stall()
        api.add(url, f"{url}/a", f"{url}/b")
        worker.answers |= {"GET /a/load": (200, {"server_load": 2})}
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(api.get("/get_loads"))
            await asyncio.sleep(0.1)
            begun = len(worker.asked)
            worker.released.set()

    assert begun == 2
    assert [entry["worker_load"] for entry in asking.result().json["workers"]] == [1, 2, None]


# --- caches -------------------------------------------------------------------------------------


async def test_caches_of_workers_and_router_are_flushed(sim):
    """The worker is asked, and the policy forgets what it knows."""
    async with serve(AT_ONCE, policy=CacheAware) as api:
        api.add(sim.url)
        (pool,) = api.registry.pools
        pool.policy.on_sent(
            pool.members[0], Request("POST", "/", {}, b"", Content(prompts=("hello",))), 0.0
        )
        answer = await api.post("/flush_cache")

        assert pool.policy._tree.characters == [0]
    assert answer.status == 200
    assert answer.json == {
        "results": [{"worker": sim.url, "status": 200, "ok": True}],
        "router_index": "flushed",
    }
    assert sim.state()["prefix_cache_resets"] == 1


async def test_policy_without_an_index_has_nothing_to_flush(api):
    """It is said, and no error; neither are no workers."""
    answer = await api.post("/flush_cache")

    assert (answer.status, answer.json) == (200, {"results": [], "router_index": "none"})


async def test_flush_that_fails_in_part_says_where(api):
    """207; a worker without the endpoint is told what it lacks."""
    async with (
        fake_worker({"POST /reset_prefix_cache": (200, {})}) as (_, good),
        fake_worker() as (_, plain),
        fake_worker({"POST /reset_prefix_cache": (500, {})}) as (_, broken),
    ):
        api.add(good, plain, broken, UNRESOLVED)
        answer = await api.post("/flush_cache")

    assert answer.status == 207
    assert answer.json["results"] == [
        {"worker": good, "status": 200, "ok": True},
        {"worker": plain, "status": 404, "ok": False, "error": admin_info.NO_FLUSH},
        {"worker": broken, "status": 500, "ok": False, "error": "it answered 500"},
        {"worker": UNRESOLVED, "ok": False, "error": "it has no address yet"},
    ]
    assert "VLLM_SERVER_DEV_MODE=1" in admin_info.NO_FLUSH


async def test_flush_that_fails_everywhere_is_a_bad_gateway(api):
    """502, with the reasons."""
    api.add(NOBODY, UNRESOLVED)

    answer = await api.post("/flush_cache")

    assert answer.status == 502
    assert [result["ok"] for result in answer.json["results"]] == [False, False]


# --- servers and models -------------------------------------------------------------------------


async def test_server_infos_are_those_of_the_workers(api, sim):
    """As they are, by URL."""
    async with fake_worker({"GET /version": (200, b'{"version": "0.11.0", "x": 1e400}')}) as (plain, url):  # fmt: skip
        api.add(sim.url, url)
        answer = await api.get("/get_server_info")

    assert answer.status == 200
    assert f'"{url}":{{"version": "0.11.0", "x": 1e400}}' in answer.text
    shown = answer.json
    assert (shown["version"], shown["policy"]) == (__version__, "round_robin")
    assert shown["workers"][sim.url]["vllm_config"]["model_config"]["model"] == "sim-model"
    assert [path for path, _ in plain.asked] == [
        "GET /server_info?config_format=json",
        "GET /version",
    ]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, {}), "it answered 500"),
        ((200, b"{"), "its answer is not JSON"),
        ((200, b'{"a": "\xff"}'), "its answer is not JSON"),
        ((200, b'{"a": NaN}'), "its answer is not JSON"),
        ((200, b""), "its answer is not JSON"),
        ((200, b'"' + b"x" * 2**20 + b'"'), "its answer is too large"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_server_info_that_cannot_be_passed_on_is_an_error_of_that_worker(api, answer, error):
    """The answer as a whole stays JSON."""
    async with fake_worker({"GET /server_info": answer}) as (_, url):
        api.add(url, UNRESOLVED)
        shown = await api.get("/get_server_info")

    assert shown.status == 200
    assert shown.json["workers"] == {
        url: {"error": error},
        UNRESOLVED: {"error": "it has no address yet"},
    }


async def test_model_infos_are_what_is_known(api):
    """No worker is asked."""
    first, _ = api.add(A, B)
    api.tell_models(first, "llama", adapters=["sql"], max_model_len=4096)

    assert (await api.get("/get_model_info")).json == {
        "workers": {
            A: {
                "model_id": "llama",
                "models": ["llama"],
                "adapters": ["sql"],
                "max_model_len": 4096,
            },
            B: {"model_id": "unknown", "models": [], "adapters": [], "max_model_len": None},
        },
        "version": __version__,
        "policy": "round_robin",
    }


@pytest.mark.parametrize("value", [None, "4096", True, 1.5])
async def test_length_that_is_no_number_is_unknown(api, value):
    """Workers may say what they like."""
    (engine,) = api.add(A)
    api.tell_models(engine, "llama", max_model_len=value)

    shown = (await api.get("/get_model_info")).json["workers"][A]
    assert shown["max_model_len"] is None
