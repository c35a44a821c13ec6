"""Large bodies between a real Envoy and the service, by way of our HTTP/2.

The default policy reads bodies, so every byte passes through here; in full duplex it goes back too.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import ask
from tests.e2e.harness import Router, Sim, rss_bytes, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.slow, pytest.mark.timeout(180)]

MB = 2**20
CPU_LIMIT_S = 4.0
"""For 20 MB; copied as a whole with every frame, they take twice that."""

LIMIT_S = 60.0
JSON = [("Content-Type", "application/json")]
CHAT = (
    b'{"model":"sim-model","max_tokens":1,"messages":[{"role":"user","content":['
    b'{"type":"text","text":"%d"},'
    b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}]}]}'
)


def chat(seed: int, size: int) -> bytes:
    """Return a chat of about *size* bytes that looks like no other."""
    return CHAT % (seed, base64.b64encode(random.Random(seed).randbytes(size * 3 // 4)))


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sim]:
    """Start one simulated worker that keeps a record of what arrives."""
    sim = Sim(tmp_path_factory.mktemp("sim"))
    try:
        yield sim.until_ready()
    finally:
        sim.end()


@pytest.fixture(scope="module", params=["full_duplex", "buffered"])
def router(
    request: pytest.FixtureRequest, sim: Sim, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    """Launch a router in each body mode."""
    directory = tmp_path_factory.mktemp(request.param)
    router = Router([sim.url], directory, "--body-mode", request.param)
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


def arrived(sim: Sim, bodies: list[bytes]) -> bool:
    """Tell whether each of *bodies* is among the latest requests of the worker, whole."""
    found = {
        entry["body_sha256"]
        for entry in sim.requests()[-2 * len(bodies) :]
        if entry["body_complete"]
    }
    return {digest(body) for body in bodies} <= found


def cpu_s(pid: int) -> float:
    """Return the CPU time that process *pid* has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def send(router: Router, bodies: list[bytes], limit_s: float = LIMIT_S) -> set[int]:
    async with asyncio.timeout(limit_s):
        answers = await asyncio.gather(
            *(ask(router.port, "POST", "/v1/chat/completions", JSON, body) for body in bodies)
        )
    return {answer.status for answer in answers}


async def test_20_mb_body_arrives_unchanged(router: Router, sim: Sim) -> None:
    """The worker has the digest of the client; it costs the service no more than its size."""
    body = chat(1, 20 * MB)
    before, decisions = cpu_s(router.service_pid), router.decisions()

    assert await send(router, [body]) == {200}

    assert cpu_s(router.service_pid) - before < CPU_LIMIT_S
    assert arrived(sim, [body])
    assert router.decisions() == decisions + 1
    await router.until_idle()


async def test_16_bodies_at_once_do_not_mix(router: Router, sim: Sim) -> None:
    """2 MB each."""
    bodies = [chat(seed, 2 * MB) for seed in range(2, 18)]
    decisions = router.decisions()

    assert await send(router, bodies) == {200}

    assert arrived(sim, bodies)
    assert router.decisions() == decisions + 16
    await router.until_idle()


async def test_memory_does_not_grow_with_the_number_of_large_bodies(router: Router) -> None:
    """What one large body needed serves the next ones too."""
    for seed in range(20, 23):
        assert await send(router, [chat(seed, 20 * MB)]) == {200}
    before = rss_bytes(router.service_pid)

    for seed in range(23, 31):
        assert await send(router, [chat(seed, 20 * MB)]) == {200}

    grown = rss_bytes(router.service_pid) - before
    assert grown < 40 * MB


async def test_client_that_leaves_in_the_middle_of_a_large_body_leaves_nothing(
    router: Router, sim: Sim
) -> None:
    """The stream is reset; the next request is routed."""
    body = chat(40, 20 * MB)
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body[: 12 * MB])
        async with asyncio.timeout(LIMIT_S):
            await writer.drain()
        writer.transport.abort()
        del reader

    small = chat(41, MB)
    assert await send(router, [small]) == {200}
    assert arrived(sim, [small])
    wait_until(lambda: router.in_flight() == 0, LIMIT_S, "in-flight back to 0")
