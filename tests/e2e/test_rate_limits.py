"""How many requests come in, over all clients and of each."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.client import Connection, Headers, Response, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, until
from tests.e2e.raw_worker import RawWorker, unique_path

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

LOAD_S = 5.0
NEAR_S = 6.0
OVERLOAD = 4
CLIENTS = 16
"""Connections at the same time, which Envoy's threads share."""

TOLERANCE = 0.05
SLOW = "0.001"
"""A rate at which nothing comes back while a test runs."""


def arrivals(per_second: float, seconds: float, seed: int | None = None) -> list[float]:
    """Return when requests come: evenly spaced, or with a *seed* independently of each other (Poisson)."""
    if seed is None:
        return [number / per_second for number in range(int(per_second * seconds))]
    rng = random.Random(seed)
    gaps = (rng.expovariate(per_second) for _ in itertools.count())
    return list(itertools.takewhile(lambda due: due < seconds, itertools.accumulate(gaps)))


async def load(router: Router, times: list[float], headers: Headers) -> tuple[int, float]:
    """Ask at these *times*; return how many got through, and the seconds that it took."""
    path = unique_path()
    passed = 0
    started = time.monotonic()

    async def client(number: int) -> None:
        nonlocal passed
        async with Connection(router.port) as connection:
            for due in times[number::CLIENTS]:
                await asyncio.sleep(started + due - time.monotonic())
                response = await connection.ask("GET", path, headers)
                assert response.status in (200, 429)
                passed += response.status == 200

    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client(number))
    return passed, time.monotonic() - started


@pytest.mark.parametrize("rate", [pytest.param(20, marks=pytest.mark.heavy), 100])
@pytest.mark.parametrize("flag", ["--rate-limit-tokens-per-second", "--rate-limit-per-key"])
async def test_rate_holds_under_four_times_the_load(
    start_router: StartRouter, worker: RawWorker, flag: str, rate: int
) -> None:
    """Within 5 %, over several threads of Envoy: they share a bucket."""
    flags = [flag, str(rate), "--envoy-concurrency", "3", "--policy", "round_robin"]
    router = start_router(worker.urls, *flags)
    headers = [("Authorization", "Bearer one")]

    passed, seconds = await load(router, arrivals(OVERLOAD * rate, LOAD_S), headers)

    allowed = rate * seconds + rate // 5
    assert abs(passed - allowed) <= TOLERANCE * allowed, (passed, allowed)


@pytest.mark.parametrize(
    ("flag", "rate", "factors", "seed"),
    [
        ("--rate-limit-tokens-per-second", 10, [1.1], None),
        ("--rate-limit-per-key", 10, [1.1, 1.5, 4], None),
        ("--rate-limit-per-key", 100, [1.1, 1.5, 4], 1),
    ],
)
async def test_whole_rate_is_let_through_near_the_limit(
    start_router: StartRouter,
    worker: RawWorker,
    flag: str,
    rate: int,
    factors: list[float],
    seed: int | None,
) -> None:
    """A little more than the rate does not make less of it come through; each factor has a key of its own."""
    router = start_router(worker.urls, flag, str(rate), "--policy", "round_robin")

    found = await asyncio.gather(
        *(
            load(
                router,
                arrivals(factor * rate, NEAR_S, seed),
                [("Authorization", f"Bearer {factor}")],
            )
            for factor in factors
        )
    )

    for factor, (passed, seconds) in zip(factors, found, strict=True):
        allowed = rate * seconds
        at_once = max(2, rate // 5)
        least, most = (1 - TOLERANCE) * allowed, (1 + TOLERANCE) * allowed + at_once
        assert least <= passed <= most, (factor, passed, allowed)


async def burst(router: Router, count: int, headers: Headers = ()) -> list[Response]:
    """Ask *count* times, one after the other."""
    path = unique_path()
    async with Connection(router.port) as connection:
        return [await connection.ask("GET", path, headers) for _ in range(count)]


def statuses(responses: list[Response]) -> list[int]:
    return [response.status for response in responses]


async def test_refusal_says_when_to_come_back(start_router: StartRouter, worker: RawWorker) -> None:
    """429 as OpenAI words it, with the seconds to wait; answers before it say how much is left."""
    flags = ["--rate-limit-tokens-per-second", "0.05", "--rate-limit-burst", "2"]
    router = start_router(worker.urls, *flags)

    first, second, refused = await burst(router, 3)

    assert statuses([first, second, refused]) == [200, 200, 429]
    assert openai_error(refused)["code"] == "rate_limit_exceeded"
    assert 0 < int(refused.values("retry-after")[0]) <= 40
    assert first.values("x-ratelimit-limit") == ["2"]
    left = [response.values("x-ratelimit-remaining") for response in (first, second, refused)]
    assert left == [["1"], ["0"], ["0"]]
    assert len(refused.values("x-request-id")) == 1


async def test_rate_below_one_per_second(start_router: StartRouter, worker: RawWorker) -> None:
    """One in two seconds comes through, and not one in each."""
    flags = ["--rate-limit-tokens-per-second", "0.5", "--rate-limit-burst", "1"]
    router = start_router(worker.urls, *flags)
    path = unique_path()
    passed = []
    started = time.monotonic()

    async with Connection(router.port) as connection:
        while len(passed) < 3 and time.monotonic() < started + 20:
            if (await connection.ask("GET", path)).status == 200:
                passed.append(time.monotonic())

    gaps = [after - before for before, after in itertools.pairwise(passed)]
    assert len(gaps) == 2
    assert all(1.7 < gap < 2.6 for gap in gaps), gaps


async def test_each_client_has_a_bucket_of_its_own(
    start_router: StartRouter, worker: RawWorker
) -> None:
    """Known by token, key or tenant, the first that there is; who shows none of them has no limit of its own."""
    router = start_router(worker.urls, "--rate-limit-per-key", SLOW, "--rate-limit-burst", "2")
    authorization, key, tenant = ("authorization", "x"), ("x-api-key", "x"), ("x-tenant-id", "x")

    for headers in ([authorization], [key], [tenant], [("authorization", "y"), tenant]):
        assert statuses(await burst(router, 3, headers)) == [200, 200, 429], headers

    assert statuses(await burst(router, 1, [authorization, ("x-tenant-id", "fresh")])) == [429]
    assert set(statuses(await burst(router, 8))) == {200}
    forged = [tenant, ("x-router-client", "fresh")]
    assert statuses(await burst(router, 1, forged)) == [429]


async def test_client_is_known_by_its_name_where_there_is_one(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """Two keys of one client share its bucket, and a tenant's name gives nobody another."""
    keys = tmp_path / "keys"
    keys.write_text("team-a sk-1\nteam-a sk-2\nteam-b sk-3\n")
    flags = ["--rate-limit-per-key", SLOW, "--rate-limit-burst", "2"]
    router = start_router(worker.urls, "--api-keys-file", str(keys), *flags)

    one, two, three = ([("Authorization", f"Bearer sk-{n}")] for n in (1, 2, 3))

    assert statuses(await burst(router, 1, one)) == [200]
    assert statuses(await burst(router, 2, two)) == [200, 429]
    assert statuses(await burst(router, 1, [*one, ("x-tenant-id", "fresh")])) == [429]
    assert statuses(await burst(router, 2, three)) == [200, 200]


async def test_refused_authentication_takes_nothing_from_anybody(
    start_router: StartRouter, worker: RawWorker
) -> None:
    """Who does not get in cannot use up the rate of those who do."""
    flags = ["--rate-limit-tokens-per-second", SLOW, "--rate-limit-burst", "2"]
    router = start_router(worker.urls, "--api-key", "sk-a", *flags)

    outside = await burst(router, 5, [("Authorization", "Bearer wrong")])
    inside = await burst(router, 3, [("Authorization", "Bearer sk-a")])

    assert statuses(outside) == [401] * 5
    assert statuses(inside) == [200, 200, 429]


async def test_client_over_its_rate_takes_nothing_from_the_others(
    start_router: StartRouter, worker: RawWorker
) -> None:
    """Its own bucket is asked first."""
    flags = ["--rate-limit-per-key", SLOW, "--rate-limit-tokens-per-second", "1000"]
    router = start_router(worker.urls, *flags, "--rate-limit-burst", "3")
    await asyncio.sleep(0)

    greedy = statuses(await burst(router, 40, [("x-tenant-id", "greedy")]))
    other = statuses(await burst(router, 3, [("x-tenant-id", "other")]))

    assert Counter(greedy) == {200: 3, 429: 37}
    assert other == [200] * 3


async def test_probes_and_the_admin_api_have_no_limit(
    start_router: StartRouter, worker: RawWorker
) -> None:
    """A load balancer or an administrator must not be turned away when clients ask too much."""
    flags = ["--rate-limit-tokens-per-second", SLOW, "--rate-limit-per-key", SLOW]
    router = start_router(worker.urls, *flags)
    local = [("Host", f"127.0.0.1:{router.port}"), ("x-tenant-id", "a")]
    await burst(router, 3, local)

    for path in ("/health", "/liveness", "/readiness", "/list_workers", "/v1/models"):
        for _ in range(3):
            response = await ask(router.port, "GET", path, local)
            assert response.status == 200, path
            assert response.values("x-ratelimit-limit") == []


async def test_upgrades_count(start_router: StartRouter, worker: RawWorker) -> None:
    """A WebSocket is a request like any other."""
    flags = ["--rate-limit-tokens-per-second", SLOW, "--rate-limit-burst", "1"]
    router = start_router(worker.urls, *flags)
    upgrade = [
        *(("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ]

    found = [(await ask(router.port, "GET", unique_path(), upgrade)).status for _ in range(2)]

    assert found[0] != 429
    assert found[1] == 429


async def test_rate_changes_while_requests_are_under_way(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """By the file of options; open connections go on under the new rate."""
    options = tmp_path / "router.yaml"
    options.write_text(f"rate_limit_tokens_per_second: {SLOW}\n")
    router = start_router(worker.urls, "--config", str(options))
    path = unique_path()
    async with Connection(router.port) as connection:
        before = [(await connection.ask("GET", path)).status for _ in range(3)]
        options.write_text("rate_limit_tokens_per_second: 100000\n")
        await until(lambda: router.logged("configuration changed"), 15, "it is applied")
        async with asyncio.timeout(10):
            while (await connection.ask("GET", path)).status != 200:
                pass
        after = [(await connection.ask("GET", path)).status for _ in range(5)]

    assert before == [200, 200, 429]
    assert after == [200] * 5
