"""Workers are killed, stopped, slowed down and made to fail under load; clients notice what cannot be helped.

``make chaos`` runs it for a minute with the figures printed; CHAOS_SECONDS, CHAOS_SEED and CHAOS_POLICY change it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections import Counter
from collections.abc import Callable

import aiohttp
import openai
import pytest

from tests.e2e.chaos import CUTTING, DRAIN_LIMIT_S, LATE_S, Load, Monkey, Outcome
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Metrics, Router, Sim, rss_bytes, until

SECONDS = float(os.environ.get("CHAOS_SECONDS", "20"))
SEED = int(os.environ.get("CHAOS_SEED", "5"))
POLICY = os.environ.get("CHAOS_POLICY", "cache_aware")

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.timeout(SECONDS + 150),
]

WORKERS = 5
STREAMS = 200
OF_THESE_BY_SDK = 20
WHOLE_ANSWERS = 20
"""Requests under way besides the streams that are answered in one piece: no failure of these may be seen."""

ITL_MS, TTFT_MS = 200, 100
TOKENS = range(8, 25)
SLOWDOWN = 10
STREAM_IDLE_S = 3.0
"""More than a token takes on a worker that is slowed down, less than one is stopped."""

HOLD_S = (0.5, 1.5)
SLACK_S = 2.0
"""For two cores with 230 clients and seven processes on them."""

REQUEST_LIMIT_S = 60.0
"""What no request may take; a slow worker makes 24 tokens in as many seconds at most."""

HEAD_LIMIT_S = 3 * STREAM_IDLE_S + SLACK_S
"""Until an answer begins: two attempts at workers that say nothing, and one that succeeds."""

SERVICE_GROWTH_BYTES = 60_000_000
ENVOY_GROWTH_BYTES = 100_000_000

FLAGS = (
    *("--policy", POLICY),
    *("--health-check-interval-secs", "0.5", "--health-check-timeout-secs", "1"),
    *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--cb-failure-threshold", "5", "--cb-success-threshold", "2"),
    *("--cb-timeout-duration-secs", "1"),
    *("--stream-idle-timeout-secs", str(STREAM_IDLE_S)),
    *("--retry-initial-backoff-ms", "20", "--retry-max-backoff-ms", "2000"),
    *("--max-concurrent-requests", "1000", "--no-worker-timeout-secs", "10"),
)


async def test_chaos(start_router: StartRouter, start_sim: Callable[..., Sim]) -> None:
    """All requests whose answer had not begun succeed, the others are seen to be cut, and all is as before."""

    def start(port: int | None = None) -> Sim:
        return start_sim(
            "--itl-ms", str(ITL_MS), "--ttft-ms", str(TTFT_MS), "--record", "9999", port=port
        )

    sims = [start() for _ in range(WORKERS)]
    router = start_router([sim.url for sim in sims], *FLAGS)
    names = [sim.worker_name for sim in sims]
    load = Load(router, names, seed=SEED, tokens=TOKENS, limit_s=REQUEST_LIMIT_S)
    monkey = Monkey(
        router,
        sims,
        start,
        seed=SEED,
        hold_s=HOLD_S,
        silence_limit_s=STREAM_IDLE_S,
        slowdown=SLOWDOWN,
    )
    pids = (router.service_pid, router.envoy_pid)
    everybody = STREAMS + WHOLE_ANSWERS

    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
        ) as session,
        openai.AsyncOpenAI(
            base_url=f"{router.base_url}/v1",
            api_key="none",
            max_retries=0,
            timeout=REQUEST_LIMIT_S,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as sdk,
        asyncio.TaskGroup() as clients,
    ):
        by_aiohttp = functools.partial(load.by_aiohttp, session)
        by_sdk = functools.partial(load.by_sdk, sdk)
        for number in range(everybody):
            streamed = number < STREAMS
            how = by_sdk if number < OF_THESE_BY_SDK else by_aiohttp
            clients.create_task(load.client(how, streamed=streamed))
        await until(lambda: len(load.outcomes) > everybody, 30, "the load is up")
        before = [rss_bytes(pid) for pid in pids]
        assert load.open == everybody

        began = time.monotonic()
        await monkey.run(began + SECONDS)
        recovered_s = await monkey.until_all_sound()
        load.stop()
        async with asyncio.timeout(DRAIN_LIMIT_S):
            await until(lambda: load.open == 0, DRAIN_LIMIT_S, "all requests ended")

    await router.until_idle()
    report(router, load, monkey, recovered_s, before)
    assert [o for o in load.outcomes if o.kind not in ("whole", "cut")] == []
    assert [o for o in load.outcomes if o.kind == "cut" and not o.streamed] == []
    assert [o for o in load.outcomes if o.kind == "cut" and monkey.blame(o) not in CUTTING] == []
    assert max(o.silence_s for o in load.outcomes) < STREAM_IDLE_S + LATE_S + SLACK_S
    assert max(o.head_s for o in load.outcomes if o.streamed) < HEAD_LIMIT_S
    assert (router.service_pid, router.envoy_pid) == pids
    for pid, held, growth in zip(
        pids, before, (SERVICE_GROWTH_BYTES, ENVOY_GROWTH_BYTES), strict=True
    ):
        assert rss_bytes(pid) - held < growth
    metrics = router.metrics()
    assert metrics("in_flight") == metrics("worker_in_flight") == 0
    assert metrics("workers") == WORKERS
    assert metrics("stream_errors_total") == 0
    assert metrics("admitted") == metrics("queue_waiting") == 0
    assert metrics("circuit_state") == 0
    opened, closed = circuits(metrics)
    assert opened >= closed > 0


def circuits(metrics: Metrics) -> tuple[float, float]:
    """Return how often circuits have opened, and closed."""
    name = "circuit_transitions_total"
    return metrics(name, to="open"), metrics(name, to="closed")


def report(
    router: Router, load: Load, monkey: Monkey, recovered_s: float, before: list[int]
) -> None:
    """Print what happened, for people."""
    metrics = router.metrics()
    kinds = Counter(o.kind for o in load.outcomes)
    wrong = [o for o in load.outcomes if o.kind not in ("whole", "cut")]
    after = [rss_bytes(pid) for pid in (router.service_pid, router.envoy_pid)]
    print(
        f"\nchaos: {len(load.outcomes)} requests in {SECONDS:g} s of faults (seed {SEED}, {POLICY}):"
        f" {kinds['whole']} whole, {kinds['cut']} cut in the middle, {len(wrong)} wrong;"
        f" {metrics('retries_total'):g} retries; all workers back after {recovered_s:.1f} s"
    )
    longest_head = max(o.head_s for o in load.outcomes)
    longest_silence = max(o.silence_s for o in load.outcomes)
    print(
        f"  longest wait for an answer {longest_head:.1f} s, longest silence in one"
        f" {longest_silence:.1f} s, longest request {max(o.took_s for o in load.outcomes):.1f} s;"
        f" memory of service and Envoy {_mb(before)} -> {_mb(after)} MB"
    )
    opened, closed = circuits(metrics)
    print(f"  circuits opened {opened:g} times, closed {closed:g} times")
    strikes = Counter(strike.fault for strike in monkey.strikes)
    cut = Counter(monkey.blame(o) for o in load.outcomes if o.kind == "cut")
    failed = Counter(monkey.blame(o) or "no fault" for o in wrong)
    if os.environ.get("CHAOS_VERBOSE"):
        for strike in monkey.strikes:
            print("  strike", strike.fault, strike.worker, f"{strike.began:.2f} {strike.ended:.2f}")
        for o in load.outcomes:
            if o.kind != "whole":
                print("  ", o)
    for fault, count in strikes.most_common():
        seen = f", {failed[fault]} wrong" if failed[fault] else ""
        print(f"  {count:3} x {fault:10} {cut[fault]:4} streams cut{seen}")
    print(f"  {monkey.two_at_once} times two workers at once")
    for kind, number in Counter(f"{o.kind} {o.detail[:160]}" for o in wrong).most_common(20):
        print(f"  wrong: {number} x {kind}")
    for outcome in wrong[:10]:
        print(f"  {outcome.request_id} was at {attempts(outcome, monkey.sims)}")


def attempts(outcome: Outcome, sims: list[Sim]) -> list[str]:
    """Return which workers got a request and what they did, as far as they still know."""
    return [
        f"{sim.worker_name}: {request['status']} {request['outcome']}"
        for sim in sims
        for request in sim.requests()
        if outcome.request_id in str(request["headers"])
    ]


def _mb(sizes: list[int]) -> str:
    return "+".join(f"{size / 1e6:.0f}" for size in sizes)
