"""Policies as a client sees them: which simulated worker answers."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Sim

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

SESSIONS = 40
REQUESTS = 1_000
CLIENTS = 4
SESSION_POLICIES = ["consistent_hash", "rendezvous_hash", "sticky_least_loaded"]

StartSim = Callable[..., Sim]


def start(count: int, start_sim: StartSim, start_router: StartRouter, policy: str) -> Any:
    sims = [start_sim("--speed", "0") for _ in range(count)]
    return sims, start_router([sim.url for sim in sims], "--policy", policy)


async def chat(
    client: aiohttp.ClientSession, base_url: str, turns: list[tuple[str, str]], **headers: str
) -> tuple[int, str, str]:
    """Return the status, who answered, and the text."""
    body = {
        "model": "sim-model",
        "max_tokens": 8,
        "messages": [{"role": role, "content": text} for role, text in turns],
    }
    async with client.post(
        f"{base_url}/v1/chat/completions", json=body, headers=headers
    ) as response:
        answer = await response.json()
        text = answer["choices"][0]["message"]["content"] if response.status == 200 else ""
        return response.status, response.headers.get("x-sim-worker", ""), text


@pytest.mark.parametrize("policy", SESSION_POLICIES)
@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.heavy)])
async def test_sessions_stick_over_losses_of_workers(
    policy: str, count: int, start_sim: StartSim, start_router: StartRouter
) -> None:
    """1,000 requests, workers killed in between: every one answered; only sessions of the dead move, once."""
    sims, router = start(count, start_sim, start_router, policy)
    losses = min(3, count - 1)
    served: dict[int, list[str]] = collections.defaultdict(list)
    statuses: collections.Counter[int] = collections.Counter()
    names = [sim.worker_name for sim in sims]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client:
        numbers = iter(range(REQUESTS))

        async def send() -> None:
            for number in numbers:
                if number % (REQUESTS // (losses + 1)) == 0 and number and len(names) > 1:
                    sims[names.index(names[0])].end()
                    del sims[0], names[0]
                session = number % SESSIONS
                status, name, _ = await chat(
                    client,
                    router.base_url,
                    [("user", "hello")],
                    **{"x-session-id": f"session-{session}"},
                )
                statuses[status] += 1
                served[session].append(name)

        await asyncio.gather(*(send() for _ in range(CLIENTS)))

    assert statuses == {200: REQUESTS}
    # While a loss is news (some hundred ms) a fallback may differ from the place that follows.
    moves = {s: sum(a != b for a, b in itertools.pairwise(w)) for s, w in served.items()}
    assert sum(moves.values()) <= SESSIONS * losses
    assert sum(move == 0 for move in moves.values()) >= SESSIONS * (count - losses) / count / 2


@pytest.mark.parametrize("policy", ["cache_aware", "consistent_hash", "rendezvous_hash"])
@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.heavy)])
async def test_conversations_without_an_id_stick_and_spread(
    policy: str, count: int, start_sim: StartSim, start_router: StartRouter
) -> None:
    """Three turns each stay in one place; different conversations are shared out."""
    _, router = start(count, start_sim, start_router, policy)
    conversations = 150 if policy != "cache_aware" else 60
    places: list[set[str]] = []

    async with aiohttp.ClientSession() as client:
        for number in range(conversations):
            turns = [("user", f"conversation {number * 7919} about topic {number}")]
            place = set()
            for turn in range(3):
                status, name, text = await chat(client, router.base_url, turns)
                assert status == 200
                place.add(name)
                turns += [("assistant", text), ("user", f"and then, {turn}?")]
            places.append(place)

    assert all(len(place) == 1 for place in places)
    by_worker = collections.Counter(next(iter(place)) for place in places)
    assert max(by_worker.values()) <= 1.5 * conversations / count


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.heavy)])
async def test_shared_system_prompt_does_not_gather_all_in_one_place(
    count: int, start_sim: StartSim, start_router: StartRouter
) -> None:
    """Also when many other chats came before it."""
    _, router = start(count, start_sim, start_router, "cache_aware")
    system = "You are a careful assistant of the railway. " * 60
    by_worker: collections.Counter[str] = collections.Counter()

    async with aiohttp.ClientSession() as client:
        for number in range(200):
            await chat(client, router.base_url, [("user", f"{number * 31} is a number")])
        for number in range(200):
            turns = [("system", system), ("user", f"{number * 17} is a train")]
            _, name, _ = await chat(client, router.base_url, turns)
            by_worker[name] += 1

    assert max(by_worker.values()) <= 1.5 * 200 / count


async def test_finished_session_is_forgotten(
    start_sim: StartSim, start_router: StartRouter
) -> None:
    """Its worker has one session less, so the next new one goes there."""
    _, router = start(2, start_sim, start_router, "sticky_least_loaded")

    async with aiohttp.ClientSession() as client:

        async def ask(session: str) -> str:
            headers = {"x-session-id": session}
            return (await chat(client, router.base_url, [("user", "x")], **headers))[1]

        first, second = await ask("a"), await ask("b")
        assert first != second
        async with client.post(f"{router.base_url}/finish_session?session_id=b") as response:
            assert (response.status, (await response.json())["status"]) == (200, "ok")

        assert await ask("c") == second
        assert await ask("a") == first
