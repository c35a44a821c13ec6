"""What the service asks workers itself, against workers of several kinds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import shutil
import socket
import subprocess
import warnings

import msgspec
import pytest
from aiohttp import web

from extproc.address import WorkerUrl
from extproc.discovery.updates import WorkerSpec
from extproc.engine import Engine
from extproc.errors import ConfigError
from extproc.sim.config import SimConfig
from extproc.sim.worker import SimWorker
from extproc.worker_client import (
    CONNECTIONS_PER_WORKER,
    MAX_ANSWER_BYTES,
    Answer,
    WorkerClient,
    WorkerRefusedError,
    WorkerUnreachableError,
)

PATIENCE_S = 10


def engine(url, address="127.0.0.1", **fields):
    url = WorkerUrl.parse(url)
    address = url.host if not url.is_named else address
    return Engine(WorkerSpec(url, **fields), "static", 0.0, address=address)


@pytest.fixture
async def start_worker():
    """Return a function that starts a simulated worker."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**settings):
            worker = SimWorker(SimConfig(**{"speed": 0.0, **settings}))
            await worker.start()
            stack.push_async_callback(worker.stop)
            return worker

        yield start
    # What asyncio leaves of a handshake that failed would be found, and called an error, amid another test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
async def connect():
    """Return a function that makes a client."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**settings):
            return await stack.enter_async_context(WorkerClient(**settings))

        yield make


@pytest.fixture
async def client(connect):
    """Make a client without any settings."""
    return await connect()


async def ask(client, worker, path="/v1/models", **settings):
    settings = {"timeout_s": PATIENCE_S, **settings}
    return await client.request(worker, settings.pop("method", "GET"), path, **settings)


async def reason(client, worker, **settings):
    """Return why *worker* does not answer."""
    with pytest.raises(WorkerUnreachableError) as caught:
        await ask(client, worker, **settings)
    return str(caught.value)


@pytest.fixture
async def mirror():
    """Start a worker that answers with what it was asked; return its port."""

    async def show(request):
        seen = {
            "method": request.method,
            "path": request.path_qs,
            "headers": {name.lower(): value for name, value in request.headers.items()},
            "body": (await request.read()).decode(),
        }
        return web.json_response(seen)

    async def redirect(_request):
        raise web.HTTPFound("/elsewhere")

    async def cookie(_request):
        answer = web.Response(text="set")
        answer.set_cookie("a", "b")
        return answer

    async def packed(_request):
        body = gzip.compress(b"x" * 100_000)
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    app = web.Application()
    app.router.add_get("/redirect", redirect)
    app.router.add_get("/cookie", cookie)
    app.router.add_get("/packed", packed)
    app.router.add_route("*", "/{path:.*}", show)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def seen(client, worker, path="/x", **settings):
    """Return what the mirror saw."""
    return msgspec.json.decode((await ask(client, worker, path, **settings)).body)


@contextlib.asynccontextmanager
async def raw_worker(handle):
    """Serve connections with *handle*; yield the engine."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield engine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()
        await server.wait_closed()


# --- what is asked


async def test_answer_has_status_body_and_type(client, start_worker):
    """As the worker gave them."""
    worker = await start_worker(models=("llama",))

    found = await ask(client, engine(worker.url))

    assert (found.status, found.ok, found.content_type) == (200, True, "application/json")
    assert msgspec.json.decode(found.body)["data"][0]["id"] == "llama"


@pytest.mark.parametrize(("status", "ok"), [(199, False), (200, True), (299, True), (300, False)])
def test_status_of_two_hundred_and_more_is_success(status, ok):
    """A redirect is none."""
    assert Answer(status, b"").ok is ok


async def test_error_of_a_worker_is_an_answer(client, start_worker):
    """It can be reached; what its status means is for who asked."""
    worker = await start_worker()
    worker.set_faults(models_status=503)

    found = await ask(client, engine(worker.url))

    assert (found.status, found.ok) == (503, False)


@pytest.mark.parametrize("base", ["", "/llama", "/a/b"])
async def test_path_comes_after_the_base_path(client, mirror, base):
    """With its query, as it is."""
    worker = engine(f"http://127.0.0.1:{mirror}{base}")

    found = await seen(client, worker, "/flush?level=1&deep=yes")

    assert found["path"] == f"{base}/flush?level=1&deep=yes"


async def test_base_path_of_a_simulated_worker_is_kept(client, start_worker):
    """As vLLM's --root-path has it."""
    worker = await start_worker(root_path="/llama")

    assert (await ask(client, engine(worker.url), "/health")).ok


async def test_worker_is_asked_by_its_name_at_its_address(client, mirror):
    """Nothing is resolved again: the address is the one that Envoy uses."""
    named = engine(f"http://w1.example:{mirror}", "127.0.0.1")

    assert (await seen(client, named))["headers"]["host"] == "w1.example"
    plain = await seen(client, engine(f"http://127.0.0.1:{mirror}"))
    assert plain["headers"]["host"] == f"127.0.0.1:{mirror}"


async def test_method_body_and_headers_are_sent(client, mirror):
    """JSON when there is any."""
    worker = engine(f"http://127.0.0.1:{mirror}")

    found = await seen(client, worker, method="POST", json={"a": 1}, headers={"X-Rank": "3"})

    assert (found["method"], found["body"]) == ("POST", '{"a": 1}')
    assert found["headers"]["content-type"] == "application/json"
    assert found["headers"]["x-rank"] == "3"
    assert "authorization" not in found["headers"]


async def test_key_of_the_workers_is_sent(connect, start_worker):
    """Workers that want one answer nobody without."""
    worker = await start_worker(api_key="secret")

    assert (await ask(await connect(), engine(worker.url))).status == 401
    assert (await ask(await connect(api_key="secret"), engine(worker.url))).ok


async def test_proxies_of_the_environment_are_ignored(client, mirror, monkeypatch):
    """They are for clients of the internet; workers are near."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)

    assert (await seen(client, engine(f"http://127.0.0.1:{mirror}")))["path"] == "/x"


async def test_redirects_are_not_followed(client, mirror):
    """A worker cannot send the service elsewhere."""
    found = await ask(client, engine(f"http://127.0.0.1:{mirror}"), "/redirect")

    assert (found.status, found.ok) == (302, False)


async def test_cookies_are_not_kept(client, mirror):
    """One request tells another nothing."""
    worker = engine(f"http://127.0.0.1:{mirror}")
    await ask(client, worker, "/cookie")

    assert "cookie" not in (await seen(client, worker))["headers"]


# --- what goes wrong


async def test_worker_that_is_not_there_refuses_the_connection(client, start_worker):
    """In two words, without an address."""
    worker = await start_worker()
    await worker.stop()

    with pytest.raises(WorkerRefusedError, match=r"^connection refused$"):
        await ask(client, engine(worker.url))


async def test_worker_without_an_address_is_not_asked(client):
    """The reason is why its name is not resolved, when that is known."""
    unresolved = engine("http://w1:8000", "")
    assert await reason(client, unresolved) == "it has no address yet"

    unresolved.unresolved = "no such name"

    assert await reason(client, unresolved) == "no such name"


async def test_client_that_is_not_open_asks_nobody():
    """It does not open a session that nobody would close."""
    assert await reason(WorkerClient(), engine("http://127.0.0.1:1")) == "it has no address yet"


async def test_client_that_was_never_open_can_be_closed():
    """There is nothing to close."""
    await WorkerClient().__aexit__(None, None, None)


async def test_worker_that_hangs_is_given_up(client):
    """After the time that was said, whether it accepts or stops in its answer."""

    async def hang(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await reader.read()
        writer.close()

    async def stop(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
        await hang(reader, writer)

    for handle in (hang, stop):
        async with raw_worker(handle) as worker:
            assert await reason(client, worker, timeout_s=0.05) == "no answer within 0.05 s"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"junk\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
        b"HTTP/1.1 999999 X\r\n\r\n",
    ],
)
async def test_worker_that_speaks_something_else_is_not_reached(client, answer):
    """The reason says something, and no more than a line of a log bears."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with raw_worker(talk) as worker:
        assert 0 < len(await reason(client, worker)) < 300


async def test_answer_that_is_too_large_is_not_read(client, mirror):
    """Not a packed one either; an answer that just fits is."""
    worker = engine(f"http://127.0.0.1:{mirror}")
    assert len((await ask(client, worker, "/packed", max_bytes=100_000)).body) == 100_000

    refused = await reason(client, worker, path="/packed", max_bytes=99_999)

    assert refused == "its answer is too large"
    assert (await seen(client, worker))["path"] == "/x"


async def test_answer_that_never_ends_is_not_read(client):
    """Memory is bounded however long the worker talks, and whoever asks."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 100_000)
                await writer.drain()
        writer.close()

    async with raw_worker(talk) as worker:
        for bound in ({"max_bytes": 10_000}, {}):
            assert await reason(client, worker, **bound) == "its answer is too large"
    assert MAX_ANSWER_BYTES <= 8 * 2**20


# --- many workers


@pytest.fixture
def hanging_port():
    """Return a port of all loopback addresses, where connections are made and nothing is ever answered."""
    with socket.create_server(("0.0.0.0", 0), backlog=1024) as listening:
        yield listening.getsockname()[1]


@pytest.mark.slow
async def test_workers_that_hang_do_not_keep_others_from_being_asked(client, mirror, hanging_port):
    """However many they are: there is no bound on all connections together."""
    hosts = [f"127.0.{n // 250 + 1}.{n % 250 + 1}" for n in range(520)]
    async with asyncio.TaskGroup() as tasks:
        hanging = [
            tasks.create_task(reason(client, engine(f"http://{host}:{hanging_port}"), timeout_s=60))
            for host in hosts
        ]
        await asyncio.sleep(0.2)

        assert (await seen(client, engine(f"http://127.0.0.1:{mirror}")))["path"] == "/x"
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()


async def test_one_worker_has_few_connections(client):
    """Whoever asks it waits for one to be free, and no longer than for an answer."""
    connections = []

    async def hang(reader, writer):
        connections.append(writer)
        await reader.read()
        writer.close()

    async with raw_worker(hang) as worker, asyncio.TaskGroup() as tasks:
        waiting = [
            tasks.create_task(reason(client, worker, timeout_s=0.3))
            for _ in range(CONNECTIONS_PER_WORKER + 3)
        ]
        await asyncio.sleep(0.15)

        assert len(connections) == CONNECTIONS_PER_WORKER
        assert [await task for task in waiting] == ["no answer within 0.3 s"] * len(waiting)


# --- https


@pytest.fixture(scope="session")
def make_certificate(tmp_path_factory):
    """Return a function that makes a certificate for some names: the paths of it and of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command: apt-get install openssl")

    def make(names):
        directory = tmp_path_factory.mktemp("tls")
        paths = directory / "cert.pem", directory / "key.pem"
        subprocess.run(
            [
                *(openssl, "req", "-x509", "-newkey", "ec"),
                *("-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
                *("-subj", "/CN=sim", "-addext", f"subjectAltName={names}"),
                *("-out", paths[0], "-keyout", paths[1]),
            ],
            check=True,
            capture_output=True,
            timeout=20,
        )
        return [str(path) for path in paths]

    return make


@pytest.fixture(scope="session")
def for_address(make_certificate):
    """Make a certificate for 127.0.0.1."""
    return make_certificate("IP:127.0.0.1")


@pytest.fixture(scope="session")
def for_name(make_certificate):
    """Make a certificate for w.example."""
    return make_certificate("DNS:w.example")


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # see start_worker
async def test_certificate_of_an_address_is_checked(connect, start_worker, for_address):
    """Against the certificates that were given, else those of the system."""
    certificate, key = for_address
    worker = engine((await start_worker(ssl_certfile=certificate, ssl_keyfile=key)).url)

    assert (await ask(await connect(ca_file=certificate), worker)).ok
    refused = await reason(await connect(), worker)
    assert refused.startswith("its certificate is refused: ")
    assert "self-signed" in refused
    assert (await ask(await connect(tls_insecure=True), worker)).ok


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # see start_worker
@pytest.mark.parametrize(
    ("url", "fields", "settings", "good"),
    [
        ("https://w.example", {}, {}, True),
        ("https://other", {}, {}, False),
        ("https://other", {"tls_name": "w.example"}, {}, True),
        ("https://other", {}, {"tls_server_name": "w.example"}, True),
        ("https://other", {"tls_name": "w.example"}, {"tls_server_name": "none.example"}, True),
        ("https://w.example", {"tls_name": "none.example"}, {}, False),
        ("https://127.0.0.1", {}, {}, False),
        ("https://127.0.0.1", {"tls_name": "w.example"}, {}, True),
        ("https://127.0.0.1", {}, {"tls_server_name": "w.example"}, True),
        ("https://w.example", {"tls_name": "127.0.0.1"}, {}, False),
        ("https://other", {}, {"tls_insecure": True}, True),
    ],
)
async def test_certificate_must_carry_the_name_of_the_worker(
    connect, start_worker, for_name, url, fields, settings, good
):
    """Its own TLS name, else the one for all workers, else its host."""
    certificate, key = for_name
    server = await start_worker(ssl_certfile=certificate, ssl_keyfile=key)
    worker = engine(f"{url}:{server.port}", **fields)
    client = await connect(ca_file=certificate, **settings)

    if good:
        assert (await ask(client, worker)).ok
    else:
        assert "certificate is refused" in await reason(client, worker)


async def test_http_behind_https_is_not_reached(client, start_worker):
    """A URL that says too much; the reason says something."""
    worker = await start_worker()

    assert await reason(client, engine(worker.url.replace("http:", "https:")))


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
async def test_certificates_that_cannot_be_read_are_an_error_of_the_configuration(
    tmp_path, content
):
    """It names the flag and the file."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"--worker-ca-file: cannot read .*ca\.pem: "):
        WorkerClient(ca_file=str(path))


async def test_another_server_of_the_worker_is_shown_no_key(connect, mirror):
    """It speaks plain HTTP, below no base path, whatever the worker does."""
    client = await connect(api_key="secret")
    worker = engine("https://w1.example:1/base")

    answer = await ask(client, worker, "/query", side_port=mirror)

    seen = msgspec.json.decode(answer.body)
    assert (seen["method"], seen["path"]) == ("GET", "/query")
    assert "authorization" not in seen["headers"]
