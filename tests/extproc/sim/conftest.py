"""Simulated workers that start in the test's own event loop and stop with it."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess

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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """Make a certificate for 127.0.0.1; return the paths of it and of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command: apt-get install openssl")
    directory = tmp_path_factory.mktemp("tls")
    paths = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=sim", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-out", paths[0], "-keyout", paths[1]),
        ],
        check=True,
        capture_output=True,
        timeout=20,
    )
    return [str(path) for path in paths]


@pytest.fixture
def trust(certificate):
    """Make a client context that knows the certificate."""
    return ssl.create_default_context(cafile=certificate[0])
