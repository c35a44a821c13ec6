"""What clients learn of the models, and whether somebody generates."""

from __future__ import annotations

import asyncio

import pytest

from extproc.admin import ADMIN
from extproc.attempt import Attempt, Outcome
from extproc.circuit import CircuitRules
from extproc.config import Config
from extproc.engine import State
from extproc.generation_check import GenerationCheck
from extproc.sim.config import SimConfig
from extproc.sim.worker import SimWorker
from extproc.worker_client import Answer, WorkerUnreachableError
from tests.extproc.admin_api import BY_ENVOY, A, B, C, fake_worker, serve, unserved
from tests.fleets import registry_of

GENERATE = "GET /health_generate"
COMPLETE = "POST /v1/completions"


@pytest.fixture
async def api():
    async with serve() as api:
        yield api


# --- models -------------------------------------------------------------------------------------


async def ids(api):
    answer = await api.get("/v1/models")
    assert (answer.status, answer.json["object"]) == (200, "list")
    return [entry["id"] for entry in answer.json["data"]]


async def test_models_are_the_union_over_workers(api):
    """One entry per name: that of the first worker that has it, and nothing added."""
    first, second, _ = api.add(A, B, C)
    api.tell_models(first, "llama", adapters=["sql"], owned_by="vllm", max_model_len=1)
    api.tell_models(second, "llama", "qwen", owned_by="me")

    answer = (await api.get("/v1/models")).json

    assert answer == {
        "object": "list",
        "data": [
            {"id": "llama", "object": "model", "owned_by": "vllm", "max_model_len": 1},
            {"id": "sql", "object": "model", "parent": "llama"},
            {"id": "qwen", "object": "model", "owned_by": "me"},
        ],
    }


async def test_model_that_a_worker_is_declared_to_serve_is_listed():
    """Though it does not name it, or does not answer."""
    async with serve() as api:
        api.add({"url": A, "model": "llama"})

        assert (await api.get("/v1/models")).json["data"] == [
            {"id": "llama", "object": "model", "created": 1769860800, "owned_by": "vllm"}
        ]


async def test_models_of_workers_that_are_not_healthy_are_not_listed():
    """They come back with the worker; without any it is 503."""
    async with serve(BY_ENVOY) as api:
        first, second = api.add(A, B)
        api.tell_models(first, "llama")
        api.tell_models(second, "llama", adapters=["sql"])
        none = await api.get("/v1/models")
        one_none = await api.get("/v1/models/llama")
        api.pass_check(A)
        one = await ids(api)
        api.pass_check(B)
        both = await ids(api)

    assert (none.status, one_none.status) == (503, 503)
    assert none.json["error"]["code"] == "no_worker_available"
    assert none.json["error"]["type"] == "server_error"
    assert (one, both) == (["llama"], ["llama", "sql"])


async def test_aliases_are_models_too():
    """Of models that are there; the alias wins over a model of its name."""
    aliases = ("gpt-4=llama", "gpt-5=nothing", "qwen=llama")
    async with serve(config=Config(model_aliases=aliases)) as api:
        (engine,) = api.add(A)
        api.tell_models(engine, "llama", "qwen", root="/models/x", created=5)

        data = (await api.get("/v1/models")).json["data"]
    shared = {"object": "model", "created": 5}
    assert data == [
        {"id": "llama", "root": "/models/x", **shared},
        {"id": "qwen", "root": "llama", **shared},
        {"id": "gpt-4", "root": "llama", **shared},
    ]


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "Qwen%2FQwen3-8B", "%51wen/Qwen3-8B"])
async def test_one_model_is_shown_by_its_name(api, path):
    """Slashes and all."""
    (engine,) = api.add(A)
    api.tell_models(engine, "Qwen/Qwen3-8B")

    answer = await api.get(f"/v1/models/{path}")

    assert (answer.status, answer.json["id"]) == (200, "Qwen/Qwen3-8B")


async def test_unknown_model_does_not_exist(api):
    """404 as OpenAI says it."""
    api.add(A)

    answer = await api.get("/v1/models/gpt-9")

    assert answer.status == 404
    assert answer.json["error"] == {
        "message": "The model 'gpt-9' does not exist.",
        "type": "invalid_request_error",
        "param": None,
        "code": "model_not_found",
    }


# --- generation ---------------------------------------------------------------------------------


async def test_worker_that_generates_is_enough(api):
    """A simulated vLLM is asked for one token."""
    worker = SimWorker(SimConfig(speed=0.0))
    await worker.start()
    try:
        (engine,) = api.add(worker.url)
        api.tell_models(engine, "sim-model", "other")
        answer = await api.get("/health_generate")
    finally:
        await worker.stop()

    assert (answer.status, answer.text) == (200, "OK")


async def test_worker_is_asked_for_one_token_of_its_model(api):
    """One that has no endpoint for it; one whose models are not known takes its own."""
    async with fake_worker({COMPLETE: (200, {})}) as (worker, url):
        (engine,) = api.add(url)
        assert (await api.get("/health_generate")).status == 200
        api.tell_models(engine, "llama", "zebra")
        check = GenerationCheck(api.registry, api.client.server.app[ADMIN].client)
        assert await check.failure() == ""

    wanted = {"prompt": "a", "max_tokens": 1}
    assert worker.asked == [
        (GENERATE, None),
        (COMPLETE, wanted),
        (GENERATE, None),
        (COMPLETE, {"model": "llama", **wanted}),
    ]


async def test_worker_with_an_endpoint_of_its_own_is_asked_there(api):
    """And its verdict counts, good or bad."""
    async with fake_worker({GENERATE: (200, {})}) as (worker, url):
        api.add(url)
        assert (await api.get("/health_generate")).status == 200

    assert worker.asked == [(GENERATE, None)]


async def test_nobody_generates_without_healthy_workers():
    """503 with the reason; nobody is asked."""
    async with serve(BY_ENVOY) as api, fake_worker({GENERATE: (200, {})}) as (worker, url):
        api.add(url)
        answer = await api.get("/health_generate")

    assert (answer.status, answer.text) == (503, "no healthy workers available")
    assert worker.asked == []


async def test_reasons_name_no_address(api):
    """Everybody may ask, and addresses are internal."""
    async with fake_worker({GENERATE: (500, {})}) as (_, broken):
        api.add(broken, "http://127.0.0.1:9")
        answer = await api.get("/health_generate")

    assert answer.status == 503
    assert (
        answer.text == "none of 2 healthy workers generates: one answered 500; one did not answer"
    )


class FakeClient:
    """Answers in virtual time; the first *bad* workers do not."""

    def __init__(self, answer=Answer(200, b""), delay_s=0.1, bad=()):  # noqa: B008
        self.answer, self.delay_s, self.bad = answer, delay_s, bad
        self.asked = []

    async def request(self, engine, method, path, *, timeout_s, json=None):
        self.asked.append(engine.key)
        await asyncio.sleep(self.delay_s)
        if engine.key in self.bad:
            raise WorkerUnreachableError("no")
        return self.answer


@pytest.mark.looptime
async def test_check_is_shared_and_holds_for_a_second():
    """It costs a GPU; ten that ask at once make one request."""
    client = FakeClient()
    check = GenerationCheck(unserved(A).registry, client)

    assert await asyncio.gather(*(check.failure() for _ in range(10))) == [""] * 10
    assert len(client.asked) == 1
    await asyncio.sleep(0.95)
    await check.failure()
    assert len(client.asked) == 1
    await asyncio.sleep(0.1)
    await check.failure()
    assert len(client.asked) == 2


@pytest.mark.looptime
async def test_client_that_goes_away_takes_nobody_with_it():
    """Who waited makes the check instead."""
    client = FakeClient(delay_s=5)
    check = GenerationCheck(unserved(A).registry, client)
    first, second = (asyncio.ensure_future(check.failure()) for _ in range(2))
    await asyncio.sleep(1)
    first.cancel()

    assert await second == ""
    assert len(client.asked) == 2


@pytest.mark.looptime
async def test_three_workers_are_tried_the_idle_ones_first():
    """The first that generates is enough; a fourth is not asked."""
    urls = [A, B, C, "http://10.0.0.4:8000"]
    registry = unserved(*urls).registry
    (pool,) = registry.pools
    pool.acquire(pool.members[0])

    found = FakeClient(bad=urls[1:2])
    assert await GenerationCheck(registry, found).failure() == ""
    assert found.asked == urls[1:3]
    lost = FakeClient(bad=urls)
    assert "none of 3 healthy workers generates" in await GenerationCheck(registry, lost).failure()
    assert lost.asked == urls[1:]


def half_open_beside(*others):
    """Return a registry in which worker A is half-open and idle."""
    rules = CircuitRules(failures=1, successes=1, open_s=60.0)
    registry = registry_of(A, *others, circuits=rules)
    registry.breakers.on_attempt(Attempt("10.0.0.1:8000", Outcome.FAILED, 500, 0.0), 1.0)
    registry.commit(1.0)
    registry.commit(62.0)
    assert registry.get(A).state is State.HALF_OPEN
    return registry


@pytest.mark.looptime
async def test_half_open_worker_is_left_to_the_requests_of_clients():
    """It is not asked, however idle it is and whatever the others answer."""
    registry = half_open_beside(B)
    (pool,) = registry.pools
    pool.acquire(pool.members[1])
    client = FakeClient(bad=[B])

    assert "none of 1 healthy workers" in await GenerationCheck(registry, client).failure()
    assert client.asked == [B]


@pytest.mark.looptime
@pytest.mark.parametrize("bad", [[], [A]], ids=["it generates", "it does not"])
async def test_half_open_worker_that_is_alone_is_asked_without_effect(bad):
    """Its trial is still to be had meanwhile, and the answer neither closes nor opens its circuit."""
    registry = half_open_beside()
    worker = registry.pools[0].members[0]
    check = asyncio.ensure_future(GenerationCheck(registry, FakeClient(bad=bad)).failure())
    await asyncio.sleep(0.05)
    circuit = registry.get(A).circuit
    assert (worker.limit, circuit.probing) == (1, False)

    assert bool(await check) is bool(bad)
    registry.commit(63.0)
    assert (registry.get(A).state, worker.limit) == (State.HALF_OPEN, 1)


@pytest.mark.looptime
async def test_suspended_worker_is_asked_last():
    """It may not be there, and the answer would take 10 s."""
    registry = unserved(A, B).registry
    registry.suspend("10.0.0.1:8000", suspended=True)
    client = FakeClient()

    assert await GenerationCheck(registry, client).failure() == ""
    assert client.asked == [B]


@pytest.mark.looptime
async def test_worker_has_ten_seconds_in_all():
    """For both of its requests."""
    loop = asyncio.get_running_loop()
    client = FakeClient(answer=Answer(404, b""), delay_s=6)
    started = loop.time()

    reason = await GenerationCheck(unserved(A).registry, client).failure()

    assert reason == "none of 1 healthy workers generates: one did not answer"
    assert loop.time() - started == pytest.approx(10, abs=0.1)
