"""Prefill and decode workers that say who they are: over ZMQ with P2P-NCCL, by Mooncake's bootstrap servers."""

from __future__ import annotations

import asyncio
import socket
import time

import msgspec
import pytest
import zmq

from tests.e2e.client import ask
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import START_LIMIT_S, Router, Sim, free_port, refusing_url, until
from tests.e2e.workers_support import FAST, AdminApi, StartSim, kill_now

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

FLAGS = ("--vllm-pd-disaggregation", "--policy", "round_robin", *FAST)
CHAT = "/v1/chat/completions"
JSON = [("Content-Type", "application/json")]


async def chats(router: Router, count: int) -> None:
    """Have *count* chats, all of which must be answered."""
    body = b'{"model":"sim-model","max_tokens":3,"messages":[{"role":"user","content":"hi"}]}'
    for _ in range(count):
        answer = await ask(router.port, "POST", CHAT, JSON, body)
        assert answer.status == 200, (answer.status, answer.body)


def prompts(sims: list[Sim]) -> list[int]:
    """Return how many requests each worker has finished."""
    return [sim.state()["finished"] for sim in sims]


def mismatches(sims: list[Sim]) -> int:
    """Return how many legs did not fit."""
    return sum(sim.state()["kv_mismatches"] for sim in sims)


def announced_flags(address: str) -> tuple[str, ...]:
    """Return the flags of a router that workers announce themselves to."""
    return (*FLAGS, "--kv-connector", "nccl", "--vllm-discovery-address", address)


async def test_announced_workers(start_router: StartRouter, start_sim: StartSim) -> None:
    """They serve, outlive the service, and are gone soon after they die; one without HTTP gets nothing."""
    address = f"127.0.0.1:{free_port()}"
    router = start_router([], *announced_flags(address), healthy=False)
    flags = ("--kv-connector", "nccl", "--speed", "0", "--discovery-address", address)
    prefill = [start_sim("--role", "prefill", *flags) for _ in range(2)]
    decode = [start_sim("--role", "decode", *flags) for _ in range(2)]
    router.until_workers(4)
    api = AdminApi(router)

    await chats(router, 8)
    entry = api.worker(prefill[0].url)
    split = prompts(prefill), prompts(decode)

    router.kill_service()
    await api.until_service_answers()
    everybody = {sim.url: "healthy" for sim in (*prefill, *decode)}
    assert api.states().keys() == everybody.keys()
    router.until_workers(4)
    await chats(router, 4)
    await asyncio.sleep(6)
    assert api.states() == everybody

    dead = refusing_url().removeprefix("http://")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{address}")
        dealer.send(b"garbage")
        message = {"type": "P", "http_address": dead, "zmq_address": "127.0.0.1:1"}
        dealer.send(msgspec.msgpack.encode(message))
        await until(lambda: f"http://{dead}" in api.states(), 5, "announced")
        await chats(router, 4)
        assert api.state(f"http://{dead}") != "healthy"

    kill_now(prefill[0])
    killed = time.monotonic()
    await chats(router, 4)
    await until(lambda: api.state(prefill[0].url) == "gone", 10, "removed")
    took_s = time.monotonic() - killed
    await chats(router, 4)

    assert (entry["source"], entry["worker_type"]) == ("zmq", "prefill")
    assert split == ([4, 4], [4, 4])
    assert 3.5 < took_s < 6
    assert mismatches([prefill[1], *decode]) == 0
    assert router.metrics()("announcements_refused_total") == 1
    assert router.logged("announcements of workers refused", count=1)


async def test_address_in_use(start_router: StartRouter) -> None:
    """The router says which flag is to blame."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        router = start_router([], *announced_flags(address), ready=False)
        status = await asyncio.to_thread(router.wait, START_LIMIT_S)

    assert status != 0
    (entry, *_) = router.logged("service cannot start")
    assert entry["reason"] == (
        f"cannot listen on {address} (--vllm-discovery-address): Address already in use"
    )


async def test_engine_ids_of_mooncake(start_router: StartRouter, start_sim: StartSim) -> None:
    """A prefill worker gets prompts once its id is known; one that is started anew has another."""
    flags = ("--kv-connector", "mooncake", "--speed", "0")
    ports = [free_port(), free_port(), free_port()]

    def start(index: int, port: int | None = None) -> Sim:
        bootstrap = ("--bootstrap-port", str(ports[index]))
        return start_sim("--role", "prefill", *flags, *bootstrap, port=port)

    prefill = [start(0), start(1)]
    mute = start_sim("--role", "prefill", *flags, "--bootstrap-port", "0")
    decode = [start_sim("--role", "decode", *flags)]
    named: list[str] = []
    for sim, port in zip((*prefill, mute), ports, strict=True):
        named += ["--prefill", sim.url, str(port)]
    named += ["--decode", decode[0].url]
    router = start_router([], *FLAGS, "--kv-connector", "mooncake", *named, workers=4)

    await chats(router, 6)
    assert (prompts(prefill), prompts([mute]), prompts(decode)) == ([3, 3], [0], [6])
    (entry,) = router.logged("prefill worker does not say its engine id")
    assert entry["worker"] == mute.url
    reasons = {url: one["reason"] for url, one in AdminApi(router).workers().items()}
    assert reasons[mute.url].startswith("gets no prompts: its bootstrap server does not say")
    assert not any(reasons[sim.url] for sim in (*prefill, *decode))

    kill_now(prefill[0])
    await chats(router, 4)
    prefill[0] = start(0, prefill[0].port)
    await until(lambda: AdminApi(router).state(prefill[0].url) == "healthy", 20, "back")
    await chats(router, 6)
    assert prompts([prefill[0]]) == [3]

    for sim in prefill:
        kill_now(sim)
    before = prompts(decode)[0]
    await chats(router, 4)
    assert prompts(decode) == [before + 4]
    assert mismatches(decode) == 0
