"""Data-parallel ranks: picked like workers, named to the engine in a header, one that fits each attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from tests.e2e.client import Connection
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, until, wait_until
from tests.e2e.raw_worker import RawWorker, Received, Stream, unique_path
from tests.e2e.workers_support import (
    CHAT_PATH,
    FAST,
    ROUND_ROBIN,
    STREAM_BODY,
    STREAM_PATH,
    AdminApi,
    HealthSwitch,
    StartSim,
    StartWorker,
    chats,
    hold_streams,
    json_response,
    rest_of,
    traffic,
)

pytestmark = pytest.mark.envoy

RANK = "x-data-parallel-rank"
TWO_RANKS = ("--intra-node-data-parallel-size", "2")
BY_METRICS = ("--intra-node-data-parallel-size", "0")
GLOBAL = ("--dp-rank-offset", "global")


async def _ranks_asked(
    router: Router,
    worker: RawWorker,
    count: int,
    headers: Sequence[tuple[str, str]] = (),
    path: str | None = None,
) -> Counter[tuple[int, tuple[str, ...]]]:
    """Send *count* requests; return how often which port got which values of the header."""
    path = path or unique_path()
    async with Connection(router.port) as connection:
        for _ in range(count):
            response = await connection.ask("POST", path, headers, b"{}")
            assert response.status == 200, response
    return Counter((r.port, tuple(r.values(RANK))) for r in worker.received(path))


def _show_ranks(worker: RawWorker, ranks: Mapping[int, Sequence[int]]) -> None:
    """Let raw workers publish metrics of these ranks, by port."""

    async def answer(request: Received, stream: Stream) -> None:
        lines = [
            f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 0.0\n'
            for rank in ranks.get(request.port, ())
        ]
        body = "".join(lines).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
        await stream.send(head % len(body) + body)

    worker.on("/metrics", answer)


async def test_every_rank_is_picked_and_named_once(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """A client's own header is replaced, however often and in which case it was sent; leases are per rank."""
    worker = start_worker(2)
    go_on = hold_streams(worker)
    router = start_router(
        worker.urls,
        *FAST,
        *ROUND_ROBIN,
        *TWO_RANKS,
        *("--decision-timeout-secs", "0.2"),
        workers=4,
    )

    plain = await _ranks_asked(router, worker, 8)
    with_own = await _ranks_asked(
        router, worker, 8, [("X-Data-Parallel-Rank", "7"), ("x-data-parallel-rank", "0")]
    )

    assert plain == {(port, (rank,)): 2 for port in worker.ports for rank in "01"}
    assert with_own == plain
    with router.service_stopped():
        alone = await _ranks_asked(router, worker, 4, [(RANK, "7")])
    assert {values for _, values in alone} == {()}, "the engine balances by itself"
    wait_until(lambda: router.serving_metrics() is not None, 10, "the service answers")
    api = AdminApi(router)
    entries = api.workers()
    assert list(entries) == [f"{url}@{rank}" for url in worker.urls for rank in (0, 1)]
    assert [entry["dp_rank"] for entry in entries.values()] == [0, 1, 0, 1]
    assert {entry["state"] for entry in entries.values()} == {"healthy"}

    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(Connection(router.port)) for _ in range(6)]
        for stream in streams:
            await stream.send("GET", STREAM_PATH)
            assert (await stream.head()).status == 200
            assert await stream.event() == "before"
        loads = [entry["load"] for entry in api.workers().values()]
        wholes = [api.worker(url) for url in worker.urls]
        metrics = router.metrics()
        go_on.set()
        bodies = [await rest_of(stream) for stream in streams]
    await router.until_idle()

    assert sorted(loads) == [1, 1, 2, 2], "six streams on four ranks"
    assert loads == [metrics("worker_in_flight", worker=url) for url in entries]
    assert [whole["load"] for whole in wholes] == [sum(loads[:2]), sum(loads[2:])]
    assert [part["load"] for whole in wholes for part in whole["ranks"]] == loads
    assert bodies == [STREAM_BODY] * 6


async def test_ranks_are_those_that_the_metrics_show(
    start_sim: StartSim, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Three on one engine; one without metrics is one worker, and gets no header."""
    sim = start_sim("--speed", "0", "--data-parallel-size", "3")
    plain = start_worker()
    router = start_router([sim.url, *plain.urls], *FAST, *ROUND_ROBIN, *BY_METRICS, workers=4)

    served = await chats(router, 12)

    assert list(AdminApi(router).workers()) == [f"{sim.url}@{n}" for n in range(3)] + plain.urls
    assert served == {sim.worker_name: 9, str(plain.ports[0]): 3}
    assert sim.state()["ranks"] == {"0": 3, "1": 3, "2": 3}
    received = plain.received("/v1/chat/completions")
    assert [request.values(RANK) for request in received] == [[]] * 3


async def test_ranks_are_numbered_over_all_nodes(
    start_sim: StartSim, start_router: StartRouter
) -> None:
    """Hybrid load balancing: an engine refuses a rank that is not on its node, so none is asked for one."""
    first = start_sim("--speed", "0", "--data-parallel-size", "2")
    second = start_sim(
        "--speed", "0", "--data-parallel-size", "2", "--data-parallel-start-rank", "2"
    )
    router = start_router(
        [first.url, second.url], *FAST, *ROUND_ROBIN, *TWO_RANKS, *GLOBAL, workers=4
    )
    api = AdminApi(router)

    served = await chats(router, 8)
    shown = {url: entry["dp_rank"] for url, entry in api.workers().items()}

    assert served == {first.worker_name: 4, second.worker_name: 4}
    assert first.state()["ranks"] == {"0": 2, "1": 2}
    assert second.state()["ranks"] == {"2": 2, "3": 2}
    assert shown == {
        f"{first.url}@0": 0,
        f"{first.url}@1": 1,
        f"{second.url}@2": 2,
        f"{second.url}@3": 3,
    }


async def test_retry_on_another_node_names_a_rank_of_that_node(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """One node dies with the request in its hands, one cannot be reached; the third is asked for its own."""
    worker, unreachable = start_worker(2), start_worker()
    dies, lives = worker.ports
    _show_ranks(worker, {dies: [0, 1], lives: [4, 5]})
    _show_ranks(unreachable, {unreachable.ports[0]: [2, 3]})

    async def answer(request: Received, stream: Stream) -> None:
        if request.port == dies:
            stream.reset()
        else:
            await stream.send(json_response({"port": request.port}))

    urls = [worker.urls[0], *unreachable.urls, worker.urls[1]]
    router = start_router(urls, *ROUND_ROBIN, *TWO_RANKS, *GLOBAL, workers=6)
    path = worker.on(unique_path(), answer)
    unreachable.refuse()

    asked = await _ranks_asked(router, worker, 12, [(RANK, "9")], path)

    tried = {port for port, _ in asked}
    assert tried == {dies, lives}, "the first node was tried"
    (url,) = unreachable.urls
    await until(lambda: _reason(router, f"{url}@2"), 5, "the second node was tried")
    assert {values for port, values in asked if port == dies} <= {("0",), ("1",)}
    assert {values for port, values in asked if port == lives} == {("4",), ("5",)}
    await router.until_idle()


def _reason(router: Router, url: str) -> str:
    """Return what the admin API says against a worker."""
    return str(AdminApi(router).worker(url)["reason"])


async def test_rank_that_was_named_with_the_url(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """``URL@1`` is that rank alone; others join at run time."""
    worker = start_worker()
    (url,) = worker.urls
    router = start_router([f"{url}@1"], *FAST, *ROUND_ROBIN)
    api = AdminApi(router)

    only = await _ranks_asked(router, worker, 4, [(RANK, "0")])
    assert api.add(f"{url}@3", wait=True).status == 200
    both = await _ranks_asked(router, worker, 4)
    whole = api.add(url)
    removed = api.remove(f"{url}@1")
    last = await _ranks_asked(router, worker, 2)

    (port,) = worker.ports
    assert only == {(port, ("1",)): 4}
    assert both == {(port, ("1",)): 2, (port, ("3",)): 2}
    assert whole.status == 400, "an engine is there as a whole or by its ranks"
    assert removed.status == 200
    assert last == {(port, ("3",)): 2}


async def test_engine_with_a_rank_joins_one_without(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Under traffic: no request fails, and each engine gets the header that it needs, or none."""
    plain, ranked = start_worker(), start_worker()
    (url,) = ranked.urls
    router = start_router(plain.urls, *FAST, *ROUND_ROBIN)
    api = AdminApi(router)

    async with traffic(router) as load:
        for _ in range(3):
            assert (await asyncio.to_thread(api.add, f"{url}@1", wait=True)).status == 200
            await load.until_served(20)
            assert (await asyncio.to_thread(api.remove, f"{url}@1")).status == 200
            await load.until_served(20)

    assert load.failures == []
    received = ranked.received(CHAT_PATH)
    assert received
    assert {tuple(request.values(RANK)) for request in received} == {("1",)}
    assert not any(request.values(RANK) for request in plain.received(CHAT_PATH))


@pytest.mark.parametrize("flags", [(), BY_METRICS], ids=["named", "by metrics"])
async def test_retry_on_an_engine_without_ranks_names_none(
    flags: tuple[str, ...], start_worker: StartWorker, start_router: StartRouter
) -> None:
    """The rank that was picked means nothing there."""
    worker = start_worker(2)
    dies, lives = worker.ports
    _show_ranks(worker, {dies: [0, 1]})
    HealthSwitch(worker)

    async def answer(request: Received, stream: Stream) -> None:
        if request.port == dies:
            stream.reset()
        else:
            await stream.send(json_response({"port": request.port}))

    path = worker.on(unique_path(), answer)
    first, second = worker.urls
    urls = [first, second] if flags else [f"{first}@1", second]
    router = start_router(urls, *ROUND_ROBIN, *flags, workers=3 if flags else 2)

    asked = await _ranks_asked(router, worker, 6, path=path)

    assert {port for port, _ in asked} == {dies, lives}, "the ranked engine was tried"
    assert {values for port, values in asked if port == lives} == {()}
