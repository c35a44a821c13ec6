"""Simulated workers that start in the test's own event loop and stop with it."""

import asyncio
import contextlib

import aiohttp
import openai
import pytest

from extproc.sim.config import SimConfig
from extproc.sim.worker import SimWorker

PATIENCE_S = 10


@pytest.fixture
async def start_worker():
    """Return a function that starts a worker; settings are those of ``SimConfig``."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**settings):
            worker = SimWorker(SimConfig(**{"speed": 0.0, "name": "w1", **settings}))
            await worker.start()
            stack.push_async_callback(worker.stop)
            return worker

        yield start


@pytest.fixture
async def worker(start_worker):
    """Start a healthy worker that does not wait."""
    return await start_worker()


@pytest.fixture
async def http():
    """Make an HTTP client that decodes nothing and opens as many connections as it is asked to."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
        auto_decompress=False,
    ) as session:
        yield session


@pytest.fixture
async def connect():
    """Return a function that makes an OpenAI client for a worker."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(worker):
            client = openai.AsyncOpenAI(
                base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
            )
            return await stack.enter_async_context(client)

        yield make


@pytest.fixture
async def client(connect, worker):
    """Make an OpenAI client of *worker*."""
    return await connect(worker)


@pytest.fixture
def until():
    """Return a function that waits until a condition holds, within bounds."""

    async def wait(condition):
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)  # the far side of a socket has no event to wait on

    return wait


@pytest.fixture
def chat_body():
    """Return a function that makes the body of a chat request."""

    def make(content="hello", **fields):
        message = {"role": "user", "content": content}
        return {"model": "sim-model", "messages": [message], **fields}

    return make
