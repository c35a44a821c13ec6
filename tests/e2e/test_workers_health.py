"""Workers that fail and come back: the router obeys Envoy's verdicts, and clients notice nothing."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Sim, free_port, http_get, until, wait_until
from tests.e2e.raw_worker import respond, unique_path
from tests.e2e.workers_support import (
    FAST,
    ROUND_ROBIN,
    STREAM_BODY,
    STREAM_PATH,
    AdminApi,
    HealthSwitch,
    StartSim,
    StartWorker,
    chat,
    chats,
    elapsed,
    hold_streams,
    kill_now,
    paused,
    remembered,
    retries,
    serve_models,
    server,
    traffic,
    unix_time,
    until_status,
    verdict_times,
)

pytestmark = pytest.mark.envoy

RESTART_LIMIT_S = 30
CHAT = "/v1/chat/completions"


@pytest.fixture
def hanging_url() -> Iterator[str]:
    """Give a worker that accepts connections and never answers."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port), backlog=64):
        yield f"http://127.0.0.1:{port}"


async def test_killed_worker_is_avoided_within_a_second_of_the_verdict(
    start_sim: StartSim, start_router: StartRouter
) -> None:
    """Clients see no error; no request is tried on it in vain once Envoy has spoken."""
    dying, sound = start_sim("--speed", "0"), start_sim("--speed", "0")
    router = start_router([dying.url, sound.url], *FAST, *ROUND_ROBIN)
    api = AdminApi(router)

    async with traffic(router) as load:
        kill_now(dying)
        await until(lambda: verdict_times(router, dying.port), 10, "a verdict of Envoy")
        await until(lambda: api.state(dying.url) in ("unhealthy", "ejected"), 1, "obeyed")
        entry = api.worker(dying.url)
        await load.until_served(50)
    await router.until_idle()
    before = await retries(router, load.served.total())
    served = await chats(router, 20)
    after = await retries(router, load.served.total() + 20)

    assert load.failures == []
    assert unix_time(entry["since"]) - verdict_times(router, dying.port)[0] < 1
    assert entry["reason"]
    assert served == {sound.worker_name: 20}
    assert after == before


async def test_idle_worker_that_dies_is_found_before_its_next_health_check(
    start_sim: StartSim, start_router: StartRouter
) -> None:
    """Checks are a minute apart by default; the service notices that nothing listens, and when it is back."""
    dying, sound = start_sim("--speed", "0"), start_sim("--speed", "0")
    flags = ("--worker-poll-interval-secs", "1")
    router = start_router([dying.url, sound.url], *ROUND_ROBIN, *flags)
    api = AdminApi(router)
    api.until_states(dict.fromkeys([dying.url, sound.url], "healthy"))

    kill_now(dying)
    api.until_state(dying.url, "unhealthy", limit_s=4)
    reason = api.worker(dying.url)["reason"]
    served = await chats(router, 10)
    start_sim("--speed", "0", port=dying.port)
    api.until_state(dying.url, "healthy", limit_s=4)

    assert reason == "it refuses connections"
    assert served == {sound.worker_name: 10}
    assert await retries(router, 10) == 0
    assert verdict_times(router, dying.port) == []


async def test_worker_that_is_back_gets_traffic_again(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Found by health checks alone, both ways: no request is tried on it while it is away."""
    away, sound = start_worker(), start_worker()
    router = start_router([*away.urls, *sound.urls], *FAST, *ROUND_ROBIN)
    api = AdminApi(router)

    away.refuse()
    api.until_state(away.urls[0], "unhealthy")
    reason = api.worker(away.urls[0])["reason"]
    without = await chats(router, 10)
    in_vain = await retries(router, 10)
    away.come_back()
    api.until_state(away.urls[0], "healthy")
    within = await chats(router, 10)

    assert reason in ("it cannot be reached", "it refuses connections")
    assert without == {str(sound.ports[0]): 10}
    assert in_vain == 0
    assert within == {str(away.ports[0]): 5, str(sound.ports[0]): 5}


@pytest.mark.slow
async def test_worker_that_answers_500_stays_ejected_for_its_time(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """A passing ``/health`` does not end the 8 s; afterwards it gets traffic."""
    failing, sound = start_worker(), start_worker()
    health = HealthSwitch(failing)
    failing.on(CHAT, respond(b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\n{}"))
    flags = ("--disable-retries", "--cb-failure-threshold", "5", "--cb-timeout-duration-secs", "8")
    router = start_router([*failing.urls, *sound.urls], *FAST, *ROUND_ROBIN, *flags)
    api = AdminApi(router)
    (url,) = failing.urls

    statuses = []
    async with asyncio.timeout(10):
        while api.state(url) != "ejected":
            statuses.append((await chat(router)).status)
    entry = api.worker(url)
    received, passed = failing.begun(CHAT), health.asked[failing.ports[0], 200]
    began = time.monotonic()
    states = set()
    served = []
    while elapsed(began) < 4:
        states.add(api.state(url))
        served.append(await chats(router, 5))
        await asyncio.sleep(0.1)
    passed = health.asked[failing.ports[0], 200] - passed
    received_while_out = failing.begun(CHAT) - received
    failing.on(CHAT, respond(b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"port": 0}'))
    async with asyncio.timeout(45):
        while api.state(url) != "healthy":
            await chats(router, 2)
    back = api.worker(url)

    assert 5 <= statuses.count(500) <= 6, "five in a row eject"
    assert "failures in a row" in entry["reason"]
    assert states == {"ejected"}
    assert passed >= 5, "its health checks went on, and passed"
    assert served == [{str(sound.ports[0]): 5}] * len(served)
    assert received_while_out == 0
    assert unix_time(back["since"]) - unix_time(entry["since"]) >= 7.5
    assert await chats(router, 10) == {"0": 5, str(sound.ports[0]): 5}


async def test_failing_health_checks_take_a_worker_out_until_enough_have_passed(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Both thresholds count: of failures, and of successes in a row."""
    worker = start_worker(2)
    ill, sound = worker.ports
    health = HealthSwitch(worker)
    router = start_router(
        worker.urls,
        *FAST,
        *ROUND_ROBIN,
        *("--health-failure-threshold", "3", "--health-success-threshold", "4"),
    )
    api = AdminApi(router)
    url = worker.urls[0]

    before = await chats(router, 4)
    health.statuses[ill] = 500
    api.until_state(url, "unhealthy")
    failed, reason = health.asked[ill, 500], api.worker(url)["reason"]
    during = await chats(router, 10)
    passed = health.asked[ill, 200]
    del health.statuses[ill]
    api.until_state(url, "healthy")
    passed = health.asked[ill, 200] - passed
    after = await chats(router, 4)

    assert before == after == {str(ill): 2, str(sound): 2}
    assert failed >= 3
    assert reason == "its health check answers 500"
    assert during == {str(sound): 10}
    assert passed >= 4


async def test_no_healthy_worker_is_an_answer_at_once(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """503 in OpenAI's shape, in less than 0.2 s, though the workers would answer."""
    worker = start_worker(2)
    health = HealthSwitch(worker)
    router = start_router(worker.urls, *FAST)
    health.statuses |= dict.fromkeys(worker.ports, 503)
    wait_until(lambda: router.metrics()("workers") == 0, 10, "all are unhealthy")
    path = unique_path()

    took = []
    for _ in range(5):
        began = time.monotonic()
        response = await ask(router.port, "POST", path, body=b"{}")
        took.append(elapsed(began))

        assert response.status == 503
        assert openai_error(response)["code"] == "no_worker_available"
    assert min(took) < 0.2
    assert worker.begun(path) == 0
    assert http_get(f"{router.base_url}/readiness")[0] == 503
    assert http_get(f"{router.base_url}/health")[0] == 503
    assert http_get(f"{router.base_url}/liveness")[0] == 200


async def test_no_healthy_worker_is_tried_if_asked_to(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """``--when-none-healthy try``: those that never passed, and those that no longer pass."""
    worker = start_worker(2)
    both = {str(port): 5 for port in worker.ports}
    health = HealthSwitch(worker)
    health.statuses |= dict.fromkeys(worker.ports, 500)
    router = start_router(
        worker.urls, *FAST, *ROUND_ROBIN, "--when-none-healthy", "try", healthy=False
    )
    api = AdminApi(router)

    await until_status(router, 200)
    never_passed = await chats(router, 10)
    health.statuses.clear()
    api.until_states(dict.fromkeys(worker.urls, "healthy"))
    health.statuses |= dict.fromkeys(worker.ports, 500)
    api.until_states(dict.fromkeys(worker.urls, "unhealthy"))
    no_longer = await chats(router, 10)
    del health.statuses[worker.ports[0]]
    api.until_state(worker.urls[0], "healthy")
    one_is = await chats(router, 10)

    assert never_passed == no_longer == both
    assert one_is == {str(worker.ports[0]): 10}, "a healthy one is all that is needed"


async def test_start_with_a_worker_that_hangs(
    hanging_url: str, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """The others are served within 2 s of the router's listening."""
    worker = start_worker()

    router = start_router([hanging_url, *worker.urls], healthy=False)
    await until_status(router, 200)
    served_at = time.time()
    served = await chats(router, 10)
    states = AdminApi(router).states()

    (listening,) = router.logged("router listening")
    assert served_at - unix_time(listening["timestamp"]) < 2
    assert served == {str(worker.ports[0]): 10}
    assert states == {hanging_url: "starting", worker.urls[0]: "healthy"}


async def test_start_while_all_workers_are_loading(
    tmp_path: Path, start_router: StartRouter
) -> None:
    """503 and not ready until the first one has loaded; the log says ready then, not before."""
    ports = [free_port() for _ in range(2)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    router = start_router(urls, *FAST, healthy=False)
    api = AdminApi(router)
    early = await chat(router)
    readiness = http_get(f"{router.base_url}/readiness")
    states = api.states()
    said_early = router.logged("router ready")

    sims = [Sim(tmp_path, "--startup-delay", "2", port=port) for port in ports]
    try:
        response = await until_status(router, 200)
        wait_until(lambda: router.logged("router ready"), 2, "said to be ready")
        probes = [sim.until_ready().state()["probes"]["/health"] for sim in sims]
        ready = http_get(f"{router.base_url}/readiness")
    finally:
        for sim in sims:
            sim.end()

    assert early.status == 503
    assert openai_error(early)["code"] == "no_worker_available"
    assert readiness[0] == 503
    assert "no healthy workers" in readiness[1]
    assert states == dict.fromkeys(urls, "starting")
    assert said_early == []
    assert server(response) in {sim.worker_name for sim in sims}
    assert max(probes) >= 3, "checked while it was loading"
    assert ready[0] == 200
    first = min(unix_time(entry["timestamp"]) for entry in router.logged("worker healthy"))
    (said,) = router.logged("router ready")
    assert unix_time(said["timestamp"]) >= first


async def test_states_survive_the_death_of_envoy(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """While it is away and after, nobody's state changes; then picks go on."""
    worker = start_worker(3)
    ill, *sound = worker.ports
    health = HealthSwitch(worker)
    router = start_router(worker.urls, *FAST, *ROUND_ROBIN)
    api = AdminApi(router)
    health.statuses[ill] = 500
    api.until_state(worker.urls[0], "unhealthy")
    before = {url: (w["state"], w["since"]) for url, w in api.workers().items()}
    envoy = router.envoy_pid
    seen = set()

    def back() -> bool:
        metrics = router.metrics()
        seen.add((metrics("worker_states", state="healthy"), metrics("workers")))
        return router.envoy_pid != envoy

    router.kill_envoy()
    await until(back, RESTART_LIMIT_S, "Envoy started again")
    await router.until_serving()
    decisions = router.decisions()
    served = await chats(router, 10)
    # Two reconciliations with the view of the new Envoy, one every 2 s.
    began = time.monotonic()
    await until(lambda: back() and elapsed(began) > 4.5, 10, "reconciled")
    after = {url: (w["state"], w["since"]) for url, w in api.workers().items()}

    assert seen == {(2, 2)}
    assert served == {str(port): 5 for port in sound}
    assert router.decisions() == decisions + 10
    assert after == before
    del health.statuses[ill]
    api.until_state(worker.urls[0], "healthy")
    assert set(await chats(router, 9)) == {str(port) for port in worker.ports}


async def test_everything_is_as_before_when_the_service_was_killed(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Added workers, removed ones, models, states; requests meanwhile succeed."""
    worker = start_worker(5)
    kept, removed, ill, added, other = worker.urls
    health = HealthSwitch(worker)
    serve_models(
        worker, {port: ["sim-model"] for port in worker.ports} | {worker.ports[4]: ["other-model"]}
    )
    router = start_router([kept, removed, ill], *FAST, *ROUND_ROBIN)
    api = AdminApi(router)
    assert api.add(added, wait=True, labels={"who": "me"}, weight=2).status == 200
    assert api.add(other, wait=True).status == 200
    assert api.remove(removed).status == 200
    health.statuses[worker.ports[2]] = 500
    api.until_states({kept: "healthy", ill: "unhealthy", added: "healthy", other: "healthy"})
    before = _lasting(api)
    service = router.service_pid

    async with traffic(router) as load:
        router.kill_service()
        await until(lambda: router.service_pid != service, RESTART_LIMIT_S, "started again")
        await api.until_service_answers()
        at_once = _lasting(api)
        decided = router.decisions()
        await load.until_served(50)
    later = _lasting(api)

    assert load.failures == []
    assert at_once == later == before
    assert before[added]["labels"] == {"who": "me"}
    assert router.decisions() > decided, "picks go on"
    assert set(await chats(router, 10)) == {str(worker.ports[0]), str(worker.ports[3])}
    assert await chats(router, 4, "other-model") == {str(worker.ports[4]): 4}
    assert (await chat(router, "nobodys-model")).status == 404
    await router.until_idle()


def _lasting(api: AdminApi) -> dict[str, dict[str, object]]:
    """Return of each worker what must not change by itself."""
    fields = ("state", "model_id", "models", "weight", "labels", "source", "endpoint", "pool")
    return {url: {name: entry[name] for name in fields} for url, entry in api.workers().items()}


async def test_drain_is_not_forgotten_when_the_service_was_killed(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """A worker that was being drained gets no request of the next service either; its stream finishes."""
    worker = start_worker(2)
    drained, other = worker.urls
    go_on = hold_streams(worker)
    router = start_router(worker.urls, *FAST, *ROUND_ROBIN)
    api = AdminApi(router)
    service = router.service_pid

    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(ask(router.port, "GET", STREAM_PATH)) for _ in range(2)]
        await until(lambda: router.in_flight() == 2, 10, "both have a stream")
        assert api.drain(drained).status == 202
        await until(
            lambda: any(known["drain_deadline"] for known in remembered(router)), 2, "remembered"
        )
        router.kill_service()
        await until(lambda: router.service_pid != service, RESTART_LIMIT_S, "started again")
        await api.until_service_answers()
        state = api.state(drained)
        served = await chats(router, 6)
        go_on.set()

    assert [task.result().body for task in streams] == [STREAM_BODY] * 2
    assert state in ("draining", "gone")
    assert served == {str(worker.ports[1]): 6}
    api.until_states({other: "healthy"})


async def test_paused_envoy_does_no_harm(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """A second without Envoy: no client fails, no state changes."""
    worker = start_worker(2)
    router = start_router(worker.urls, *FAST, *ROUND_ROBIN)
    api = AdminApi(router)
    service, envoy = router.service_pid, router.envoy_pid
    before = {url: (w["state"], w["since"]) for url, w in api.workers().items()}

    async with traffic(router) as load:
        with paused(envoy):
            await asyncio.sleep(1)
        await load.until_served(50)
    after = {url: (w["state"], w["since"]) for url, w in api.workers().items()}

    assert load.failures == []
    assert {state for state, _ in after.values()} == {"healthy"}
    assert after == before
    assert (router.service_pid, router.envoy_pid) == (service, envoy)
    await router.until_idle()
