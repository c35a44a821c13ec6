"""Prefill and decode on simulated workers, which check that both legs of every request fit together."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import pytest

from extproc.sim.answers import answer_pieces, seed_of
from extproc.sim.tokens import tokenize, tokenize_chat
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, Sim, free_port, until
from tests.e2e.pd_support import CHAT, COMPLETIONS, FLAGS, pd_flags
from tests.e2e.workers_support import set_faults

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

FAST = (
    *("--health-check-interval-secs", "0.5", "--health-failure-threshold", "2"),
    *("--health-success-threshold", "1", "--cb-timeout-duration-secs", "1"),
    *("--retry-initial-backoff-ms", "20", "--retry-max-backoff-ms", "500"),
    *("--no-worker-timeout-secs", "20"),
)
HOLD_S = 3
GREETING_TOKENS = 6


def start_pair(
    start_sim: Callable[..., Sim], count: int, *flags: str
) -> tuple[list[Sim], list[Sim]]:
    """Start *count* workers of each role."""

    def start(role: str) -> list[Sim]:
        return [start_sim("--role", role, *flags) for _ in range(count)]

    return start("prefill"), start("decode")


def start_router_before(
    start_router: StartRouter, prefill: list[Sim], decode: list[Sim], *flags: str
) -> Router:
    """Start a router before these workers."""
    named = pd_flags([sim.url for sim in prefill], [sim.url for sim in decode])
    return start_router([], *FLAGS, *named, *FAST, *flags, workers=len(prefill) + len(decode))


def mismatches(sims: Sequence[Sim]) -> int:
    """Return how many requests had legs that do not fit."""
    return sum(sim.state()["kv_mismatches"] for sim in sims)


def held(sims: Sequence[Sim]) -> int:
    """Return how many transfers wait for somebody to fetch them."""
    return sum(sim.state()["kv_transfers_held"] for sim in sims)


class Clients:
    """Clients that send mixed requests and check every answer."""

    def __init__(self, router: Router, names: Sequence[str], *, seed: int, cuts: bool) -> None:
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.wrong_at: list[float] = []
        """When each of them ended."""
        self._router = router
        self._names = names
        self._rng = random.Random(seed)
        self._cuts = cuts
        """Whether faults may cut streams that have begun."""

    async def run(self, count: int, at_once: int) -> None:
        """Send *count* requests."""
        left = iter(range(count))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def client() -> None:
                for _ in left:
                    kind, detail = await self._ask(session)
                    self.kinds[kind] += 1
                    if kind not in ("whole", "cut"):
                        self.wrong.append(f"{kind}: {detail}")
                        self.wrong_at.append(time.monotonic())

            async with asyncio.TaskGroup() as clients:
                for _ in range(at_once):
                    clients.create_task(client())

    def _request(self) -> tuple[str, dict[str, Any], list[int], int]:
        """Return path, body, prompt and number of tokens of a request."""
        rng = self._rng
        words = " ".join(rng.choices("abcdefgh", k=rng.choice((5, 50, 500))))
        text = f"{rng.getrandbits(64):x} {words}"
        tokens = GREETING_TOKENS + rng.randint(1, 4)
        body: dict[str, Any] = {"model": "sim-model", "stream": rng.random() < 0.5}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.5:
            body |= {"prompt": text, "max_tokens": tokens}
            return COMPLETIONS, body, list(tokenize(text)), tokens
        messages = [{"role": "user", "content": text}]
        body |= {"messages": messages, "max_completion_tokens": tokens}
        return CHAT, body, list(tokenize_chat(messages)), tokens

    async def _ask(self, session: aiohttp.ClientSession) -> tuple[str, str]:
        path, body, prompt, tokens = self._request()
        expected = {"".join(answer_pieces(name, seed_of(prompt), tokens)) for name in self._names}
        url, headers = self._router.base_url + path, {"x-request-id": uuid.uuid4().hex}
        try:
            async with asyncio.timeout(60):
                async with session.post(url, json=body, headers=headers) as response:
                    if response.status != 200:
                        return f"status {response.status}", (await response.text())[:300]
                    try:
                        raw = await response.read()
                    except aiohttp.ClientError as error:
                        if self._cuts and body["stream"]:
                            return "cut", repr(error)
                        return "cut off", repr(error)
        except (aiohttp.ClientError, TimeoutError) as error:
            return "failed", repr(error)
        return self._judge(raw, bool(body["stream"]), expected, (len(prompt), tokens))

    @staticmethod
    def _judge(
        raw: bytes, streamed: bool, expected: set[str], counts: tuple[int, int]
    ) -> tuple[str, str]:
        """Compare an answer with what workers make of its prompt; *counts*: tokens of prompt and answer."""
        documents = [raw]
        if streamed:
            *documents, done, _ = (event.removeprefix(b"data: ") for event in raw.split(b"\n\n"))
            if done != b"[DONE]":
                return "silently cut", repr(raw[-100:])
        text, usage = "", None
        for document in map(json.loads, documents):
            usage = document.get("usage") or usage
            for choice in document["choices"]:
                message = choice.get("delta") or choice.get("message") or {}
                text += choice.get("text") or message.get("content") or ""
        if text not in expected:
            return "mixed up", text
        if usage is None or (usage["prompt_tokens"], usage["total_tokens"]) != (
            counts[0],
            sum(counts),
        ):
            return "usage", f"{usage}, {counts} tokens"
        return "whole", ""


async def check_nothing_left(
    router: Router, prefill: list[Sim], decode: list[Sim], *, mismatched: bool = False
) -> None:
    """Check that nothing is in flight and no transfer is kept, after those that were lost have expired."""
    await router.until_idle()
    metrics = router.metrics()
    assert metrics("worker_in_flight") == metrics("in_flight") == 0
    assert metrics("stream_errors_total") == 0
    assert metrics("admitted") == metrics("queue_waiting") == 0
    await until(lambda: held(prefill) == 0, HOLD_S + 2, "no transfer is kept")
    assert mismatched or mismatches([*prefill, *decode]) == 0
    assert all(sim.state()["requests_active"] == 0 for sim in (*prefill, *decode))


@pytest.mark.parametrize("mode", ["pull", pytest.param("push", marks=pytest.mark.heavy)])
async def test_mixed_requests_of_nixl(
    start_router: StartRouter, start_sim: Callable[..., Sim], mode: str
) -> None:
    """All are served, right, by both roles, and each transfer is fetched; then every fifth fails at first."""
    flags = ("--kv-transfer-mode", mode, "--speed", "0", "--kv-hold-s", str(HOLD_S))
    prefill, decode = start_pair(start_sim, 2, *flags)
    router = start_router_before(
        start_router, prefill, decode, "--disable-circuit-breaker", "--retry-budget-ratio", "1"
    )
    clients = Clients(router, [sim.worker_name for sim in decode], seed=1, cuts=False)

    await clients.run(150, 15)

    assert clients.wrong == []
    await check_nothing_left(router, prefill, decode)
    served = [sim.state()["finished"] for sim in (*prefill, *decode)]
    assert sum(served[:2]) == sum(served[2:]) == 150
    assert all(served)

    for sims in (prefill, decode):  # the other one of each role serves what these refuse
        set_faults(sims[0], random_fail_rate=0.2)
    await clients.run(150, 10)

    assert clients.wrong == []
    assert clients.kinds == {"whole": 300}
    await check_nothing_left(router, prefill, decode)


async def test_mixed_requests_of_nccl(
    start_router: StartRouter, start_sim: Callable[..., Sim]
) -> None:
    """The request id names both workers, which have announced themselves."""
    address = f"127.0.0.1:{free_port()}"
    flags = ("--kv-connector", "nccl", "--speed", "0", "--discovery-address", address)
    prefill, decode = start_pair(start_sim, 2, *flags)
    router = start_router(
        [],
        *(*FLAGS, *FAST, "--kv-connector", "nccl", "--vllm-discovery-address", address),
        workers=4,
    )
    clients = Clients(router, [sim.worker_name for sim in decode], seed=2, cuts=False)

    await clients.run(100, 10)

    assert clients.wrong == []
    await check_nothing_left(router, prefill, decode)
    served = [sim.state()["finished"] for sim in (*prefill, *decode)]
    assert sum(served[:2]) == sum(served[2:]) == 100
    assert all(served)


@pytest.mark.heavy
async def test_mixed_requests_of_mooncake(
    start_router: StartRouter, start_sim: Callable[..., Sim]
) -> None:
    """The engine ids come from the bootstrap servers."""
    flags = ("--kv-connector", "mooncake", "--speed", "0")
    ports = [free_port() for _ in range(2)]
    prefill = [
        start_sim("--role", "prefill", "--bootstrap-port", str(port), *flags) for port in ports
    ]
    decode = [start_sim("--role", "decode", *flags) for _ in range(2)]
    named = [
        word
        for sim, port in zip(prefill, ports, strict=True)
        for word in ("--prefill", sim.url, str(port))
    ]
    router = start_router(
        [],
        *(*FLAGS, *FAST, "--kv-connector", "mooncake", *named),
        *("--decode", *(sim.url for sim in decode)),
        workers=4,
    )
    clients = Clients(router, [sim.worker_name for sim in decode], seed=4, cuts=False)

    await clients.run(100, 10)

    assert clients.wrong == []
    await check_nothing_left(router, prefill, decode)
    served = [sim.state()["finished"] for sim in (*prefill, *decode)]
    assert sum(served[:2]) == sum(served[2:]) == 100
    assert all(served)


REQUESTS = int(os.environ.get("PD_REQUESTS", "10000"))
SEED = int(os.environ.get("CHAOS_SEED", "5"))
CLIENTS = 30
CUT_WITHIN_S = 4.0
"""How long after a worker was killed an answer may be cut that had begun. One whose head was not yet with the
client is 502."""

CUT_BEFORE_HEAD = "status 502: "

NO_FAULTS: dict[str, Any] = {"random_fail_rate": 0, "slowdown": 1}


class Breaker:
    """Breaks one worker of each role at a time: for a while, then the next one."""

    FAULTS = ("500", "503", "slow", "kill")

    def __init__(
        self, router: Router, prefill: list[Sim], decode: list[Sim], start: Callable[..., Sim]
    ) -> None:
        self.struck: Counter[str] = Counter()
        self.kills: list[float] = []
        """When workers were killed."""
        self._router = router
        self.stopping = False
        self._prefill, self._decode, self._start = prefill, decode, start
        self._rng = random.Random(SEED)

    async def run(self) -> None:
        """Break and mend until told to stop; all are mended at the end."""
        async with asyncio.TaskGroup() as roles:
            roles.create_task(self._role("prefill", self._prefill))
            roles.create_task(self._role("decode", self._decode))

    async def _role(self, role: str, sims: list[Sim]) -> None:
        while not self.stopping:
            index = self._rng.randrange(len(sims))
            fault = self._rng.choice(self.FAULTS)
            self.struck[f"{role} {fault}"] += 1
            held_s = self._rng.uniform(0.3, 1.5)
            if fault == "kill":
                self.kills.append(time.monotonic())
                os.kill(sims[index].pid, signal.SIGKILL)
                await asyncio.sleep(held_s)
                sims[index] = await asyncio.to_thread(self._start, role, sims[index].port)
            else:
                await asyncio.to_thread(_set, sims[index], self._fields(fault))
                await asyncio.sleep(held_s)
                await asyncio.to_thread(_set, sims[index], NO_FAULTS)
            await asyncio.sleep(self._rng.uniform(0.2, 0.5))
            await until(lambda: self._all_healthy(sims), 30, f"all {role} workers are healthy")

    def _all_healthy(self, sims: list[Sim]) -> bool:
        metrics = self._router.metrics()
        return all(metrics("worker_healthy", worker=sim.url) == 1 for sim in sims)

    def _fields(self, fault: str) -> dict[str, Any]:
        if fault == "slow":
            return {"slowdown": 5}
        return {"random_fail_rate": 1, "status_code": int(fault)}


def _set(sim: Sim, fields: dict[str, Any]) -> None:
    set_faults(sim, **fields)


@pytest.mark.heavy
@pytest.mark.timeout(600)
async def test_ten_thousand_requests_among_failing_workers(
    start_router: StartRouter, start_sim: Callable[..., Sim]
) -> None:
    """None is lost, and nothing is left: no transfer, nothing in flight."""
    flags = ("--itl-ms", "5", "--ttft-ms", "10", "--kv-hold-s", str(HOLD_S), "--record", "0")

    def start(role: str, port: int | None = None) -> Sim:
        return start_sim("--role", role, *flags, port=port)

    prefill = [start("prefill") for _ in range(3)]
    decode = [start("decode") for _ in range(3)]
    router = start_router_before(
        start_router, prefill, decode, "--retry-budget-ratio", "1", "--disable-circuit-breaker"
    )
    pids = (router.service_pid, router.envoy_pid)
    clients = Clients(router, [sim.worker_name for sim in decode], seed=SEED, cuts=True)
    breaker = Breaker(router, prefill, decode, start)
    began = time.monotonic()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(breaker.run())
        await clients.run(REQUESTS, CLIENTS)
        breaker.stopping = True

    metrics = router.metrics()
    print(
        f"\n{REQUESTS} requests in {time.monotonic() - began:.0f} s: {dict(clients.kinds)};"
        f" faults {dict(breaker.struck)}; {metrics('prefill_legs_total'):g} prefill legs,"
        f" {metrics('retries_total'):g} retries; {len(clients.wrong)} wrong"
    )
    for kind, number in Counter(clients.wrong).most_common(20):
        print(f"  {number} x {kind}")
    lost = [wrong for wrong in clients.wrong if not wrong.startswith(CUT_BEFORE_HEAD)]
    assert lost == []
    assert all(
        any(kill <= at <= kill + CUT_WITHIN_S for kill in breaker.kills) for at in clients.wrong_at
    )
    assert len(clients.wrong) <= len(breaker.kills)
    router.until_workers(6, 30)
    await check_nothing_left(router, prefill, decode, mismatched=breaker.struck["decode kill"] > 0)
    assert (router.service_pid, router.envoy_pid) == pids
