"""Several models behind one address: who gets a request, and which bytes of it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.client import Connection, Response, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router, until
from tests.e2e.raw_worker import RawWorker, Received, Stream, respond, unique_path
from tests.e2e.workers_support import (
    CHAT_PATH,
    FAST,
    JSON_HEADERS,
    ROUND_ROBIN,
    AdminApi,
    HealthSwitch,
    StartSim,
    StartWorker,
    chat,
    chat_body,
    chats,
    json_response,
    kill_now,
    serve_models,
    server,
    set_models,
    until_status,
)

pytestmark = pytest.mark.envoy

MODES = {
    "round_robin": ROUND_ROBIN,
    "cache_aware": ("--policy", "cache_aware"),
    "full_duplex": ("--policy", "cache_aware", "--body-mode", "full_duplex"),
}
"""A policy that reads no bodies, one that does, and the other way to hand bodies over."""

ALIASES = ("--model-alias", "gpt-4=alpha", "größe=beta")
BETA = "org/beta-7b"


@pytest.fixture(scope="module")
def two() -> Iterator[RawWorker]:
    """Give a worker of ``alpha`` and one that serves one model as ``beta`` and as ``org/beta-7b``."""
    worker = RawWorker(2).start()
    first, second = worker.ports
    serve_models(worker, {first: ["alpha"], second: ["beta", BETA]})
    yield worker
    worker.stop()


@pytest.fixture(scope="module", params=list(MODES))
def pools_router(request: pytest.FixtureRequest, two: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router before the two, in each mode."""
    yield from _running(Router(two.urls, logs, *FAST, *MODES[request.param], *ALIASES))


def _running(router: Router) -> Iterator[Router]:
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


async def _post(
    router: Router, body: bytes, path: str | None = None, *, chunks: list[bytes] | None = None
) -> Response:
    return await ask(
        router.port,
        "POST",
        path or unique_path(),
        JSON_HEADERS,
        body if chunks is None else None,
        chunks=chunks,
    )


def _asking(model: str) -> bytes:
    return json.dumps({"model": model, "prompt": "x"}).encode()


# --- which worker


async def test_each_request_goes_to_a_worker_of_its_model(
    pools_router: Router, two: RawWorker
) -> None:
    """Whatever order they come in; any name of the model will do."""
    first, second = two.ports

    for _ in range(5):
        for model, port in (("alpha", first), ("beta", second), (BETA, second)):
            response = await _post(pools_router, _asking(model))
            assert server(response) == str(port), model

    pools = {w["pool"] for w in AdminApi(pools_router).workers().values()}
    assert len(pools) == 2


async def test_unknown_model_is_not_found(pools_router: Router, two: RawWorker) -> None:
    """404 as OpenAI words it, naming those that there are; no worker is asked."""
    path = unique_path()

    response = await _post(pools_router, _asking("gamma"), path)

    assert response.status == 404
    error = openai_error(response)
    assert error["code"] == "model_not_found"
    for name in ("gamma", "alpha", "beta", BETA, "gpt-4", "größe"):
        assert name in error["message"]
    assert two.begun(path) == 0


@pytest.mark.parametrize(
    "body", [b"{}", b"", b"not JSON", b'{"model": 5}', b'{"model": ""}', b"[]"]
)
async def test_request_without_a_model_goes_to_the_first_pool(
    pools_router: Router, two: RawWorker, body: bytes
) -> None:
    """The worker judges it; not one byte is changed."""
    path = unique_path()

    response = await _post(pools_router, body, path)

    assert server(response) == str(two.ports[0])
    assert two.only(path).body == body


async def test_model_of_a_query(pools_router: Router, two: RawWorker) -> None:
    """As the realtime API has it."""
    for model, port in (("alpha", two.ports[0]), ("org%2Fbeta-7b", two.ports[1])):
        response = await ask(pools_router.port, "GET", f"{unique_path()}?model={model}")
        assert server(response) == str(port)
    missing = await ask(pools_router.port, "GET", f"{unique_path()}?model=gamma")
    assert openai_error(missing)["code"] == "model_not_found"


UPGRADE = [
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
]


async def test_model_of_a_web_socket(pools_router: Router, two: RawWorker) -> None:
    """It opens on a worker of the model, and bytes flow."""

    async def accept(request: Received, stream: Stream) -> None:
        key = request.values("sec-websocket-key")[0].encode()
        magic = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        token = base64.b64encode(hashlib.sha1(key + magic).digest())  # noqa: S324  RFC 6455
        await stream.send(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-accept: %s\r\nx-port: %d\r\n\r\n" % (token, request.port)
        )
        await stream.send(await stream.reader.readexactly(4))
        stream.close()

    path = two.on(unique_path(), accept)
    key = base64.b64encode(secrets.token_bytes(16)).decode()
    for model, port in (("alpha", two.ports[0]), ("beta", two.ports[1])):
        async with Connection(pools_router.port) as connection:
            headers = [*UPGRADE, ("Sec-WebSocket-Key", key)]
            await connection.send("GET", f"{path}?model={model}", headers)
            response = await connection.head()
            assert response.status == 101, response
            assert response.values("x-port") == [str(port)]
            await connection.send_raw(b"ping")
            async with asyncio.timeout(10):
                assert await connection.reader.readexactly(4) == b"ping"


def test_audio_upload_by_the_sdk(pools_router: Router, two: RawWorker) -> None:
    """The model stands in a field of the form, after the file or before it."""

    async def transcribe(request: Received, stream: Stream) -> None:
        await stream.send(json_response({"text": str(request.port)}))

    two.on("/v1/audio/transcriptions", transcribe)
    audio = b'RIFF\r\nname="model"\r\n\r\nalpha\r\n' + bytes(range(256)) * 200
    with openai.OpenAI(
        base_url=f"{pools_router.base_url}/v1",
        api_key="sk-e2e",
        max_retries=0,
        timeout=20,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        for model, port in (("alpha", two.ports[0]), ("beta", two.ports[1])):
            answer = client.audio.transcriptions.create(model=model, file=("a.wav", audio))
            assert answer.text == str(port)
            received = two.received("/v1/audio/transcriptions")[-1]
            assert received.body_bytes > len(audio)
        with pytest.raises(openai.NotFoundError, match="gamma"):
            client.audio.transcriptions.create(model="gamma", file=("a.wav", audio))


# --- which bytes

LONG = b"y" * 300_000
REWRITES: dict[str, tuple[bytes, bytes]] = {
    "plain": (
        b'{"model":"gpt-4","messages":[{"role":"user","content":"hi"}]}',
        b'{"model":"alpha","messages":[{"role":"user","content":"hi"}]}',
    ),
    "spacing": (
        b' \n{ "n" : 1.50e0 ,\t"model"\r\n:  "gpt-4"  , "x" :[ 1,2 , 3 ] } \n',
        b' \n{ "n" : 1.50e0 ,\t"model"\r\n:  "alpha"  , "x" :[ 1,2 , 3 ] } \n',
    ),
    "elsewhere": (
        b'{"x":{"model":"gpt-4"},"content":"\\"model\\": \\"gpt-4\\" gpt-4","model":"gpt-4","m":"gpt-4"}',
        b'{"x":{"model":"gpt-4"},"content":"\\"model\\": \\"gpt-4\\" gpt-4","model":"alpha","m":"gpt-4"}',
    ),
    "unicode": (
        '{"c":"größe 😀 \\ud83d\\ude00 \\u00e9 日本","model":"gpt-4","ключ":"é"}'.encode(),
        '{"c":"größe 😀 \\ud83d\\ude00 \\u00e9 日本","model":"alpha","ключ":"é"}'.encode(),
    ),
    "alias outside ASCII": (
        '{"model":"größe","x":"größe"}'.encode(),
        '{"model":"beta","x":"größe"}'.encode(),
    ),
    "escaped": (
        b'{"model":"gr\\u00f6\\u00dfe","x":1}',
        b'{"model":"beta","x":1}',
    ),
    "escaped key": (
        b'{"m\\u006fdel":"gpt-4","x":1}',
        b'{"m\\u006fdel":"alpha","x":1}',
    ),
    "duplicates": (
        b'{"a":1,"a":2,"model":"gpt-4","b":0.10,"b":1E5}',
        b'{"a":1,"a":2,"model":"alpha","b":0.10,"b":1E5}',
    ),
    "long": (
        b'{"prompt":"%s","model":"gpt-4","z":"%s"}' % (LONG, LONG),
        b'{"prompt":"%s","model":"alpha","z":"%s"}' % (LONG, LONG),
    ),
}


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("case", list(REWRITES))
async def test_alias_replaces_that_value_only(
    pools_router: Router, two: RawWorker, case: str, chunked: bool
) -> None:
    """Every other byte arrives as it was sent, and the length is right."""
    body, expected = REWRITES[case]
    path = unique_path()
    size = max(1, len(body) // 7)
    chunks = [body[at : at + size] for at in range(0, len(body), size)] if chunked else None

    response = await _post(pools_router, body, path, chunks=chunks)

    received = two.only(path)
    assert response.status == 200
    assert received.port == two.ports[b'"beta"' in expected]
    assert received.sha256 == hashlib.sha256(expected).hexdigest(), received.body
    assert received.body_bytes == len(expected)
    framing = (received.values("content-length"), received.values("transfer-encoding"))
    announced: tuple[list[str], list[str]] = ([str(len(expected))], [])
    full_duplex = AdminApi(pools_router).ask("GET", "/config").json()["body_mode"] == "full_duplex"
    assert framing == announced or (framing == ([], ["chunked"]) and (chunked or full_duplex))


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_without_an_alias_no_byte_changes(
    pools_router: Router, two: RawWorker, chunked: bool
) -> None:
    """A model that is named as the worker names it."""
    for _, body in REWRITES.values():
        path = unique_path()

        response = await _post(pools_router, body, path, chunks=[body] if chunked else None)

        assert response.status == 200, response
        assert two.only(path).sha256 == hashlib.sha256(body).hexdigest()


# --- default model


async def test_default_model_takes_what_nobody_serves(
    two: RawWorker, start_router: StartRouter
) -> None:
    """Unknown names are replaced by it; requests without a name go to its workers as they are."""
    router = start_router(two.urls, *FAST, *ROUND_ROBIN, "--default-model", "beta")
    unknown, nameless, known = (unique_path() for _ in range(3))

    responses = [
        await _post(router, b'{ "model" : "gamma", "n":1 }', unknown),
        await _post(router, b'{"n":1}', nameless),
        await _post(router, _asking("alpha"), known),
    ]

    first, second = two.ports
    assert [server(response) for response in responses] == [str(second), str(second), str(first)]
    assert two.only(unknown).body == b'{ "model" : "beta", "n":1 }'
    assert two.only(nameless).body == b'{"n":1}'
    assert two.only(known).body == _asking("alpha")


# --- one pool


async def test_one_pool_judges_for_itself_and_nobody_reads(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """The worker has the head of a request before its body ends, whatever model that will name."""
    worker = start_worker(2)
    serve_models(worker, {port: ["alpha"] for port in worker.ports})
    router = start_router(worker.urls, *FAST, *ROUND_ROBIN)
    body = _asking("nobodys-model")
    path = unique_path()

    async with Connection(router.port) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await connection.send_raw(head + body[:5])
        await until(lambda: worker.reading(path) == 5, 5, "the beginning has arrived")
        await connection.send_raw(body[5:])
        response = await connection.head()
        response.body = await connection.body()

    assert response.status == 200
    assert worker.only(path).body == body
    assert {await _port(router) for _ in range(4)} == {str(port) for port in worker.ports}


async def _port(router: Router) -> str:
    return server(await _post(router, _asking("alpha")))


# --- models that change


async def test_other_models_on_the_same_address_are_noticed(
    start_sim: StartSim, start_router: StartRouter
) -> None:
    """After a restart, and without one."""
    moving = start_sim("--speed", "0", "--model", "alpha")
    other = start_sim("--speed", "0", "--model", "beta")
    router = start_router([moving.url, other.url], *FAST, *ROUND_ROBIN)
    before = await chats(router, 2, "alpha")

    kill_now(moving)
    again = start_sim("--speed", "0", "--model", "gamma", port=moving.port)
    await until_status(router, 200, "gamma")
    restarted = await chats(router, 4, "gamma")
    gone = await chat(router, "alpha")
    still = await chats(router, 2, "beta")
    set_models(again, "delta", "beta")
    await until_status(router, 200, "delta")
    joined = await chats(router, 4, "beta")
    no_more = await chat(router, "gamma")

    assert before == {moving.worker_name: 2}
    assert restarted == {again.worker_name: 4}
    assert gone.status == 404
    assert "beta, gamma" in openai_error(gone)["message"]
    assert still == {other.worker_name: 2}
    assert joined == {again.worker_name: 2, other.worker_name: 2}
    assert no_more.status == 404


# --- workers that do not say


async def test_worker_that_does_not_say_what_it_serves_serves(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """It is healthy, and takes what nobody else is known to serve."""
    talking, failing, locked = start_worker(2), start_worker(), start_worker()
    first, second = talking.ports
    serve_models(talking, {first: ["alpha"], second: ["beta"]})
    failing.on("/v1/models", respond(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"))
    locked.on("/v1/models", respond(b"HTTP/1.1 401 X\r\ncontent-length: 0\r\n\r\n"))

    silent = [*failing.urls, *locked.urls]
    router = start_router([*talking.urls, *silent], *FAST, *ROUND_ROBIN)
    states = AdminApi(router).states()
    unknown = await chats(router, 4, "gamma")

    assert set(states.values()) == {"healthy"}
    assert unknown == {str(port): 2 for port in (*failing.ports, *locked.ports)}
    assert await chats(router, 2, "beta") == {str(second): 2}
    assert str(first) in await chats(router, 6, "alpha")
    for url, status in zip(silent, (500, 401), strict=True):
        (said,) = router.logged("worker does not say what it serves", worker=url)
        assert str(status) in said["reason"]


@pytest.mark.parametrize(
    ("flags", "expected"), [((), [200, 200]), (("--keep-client-authorization",), [200, 401])]
)
async def test_worker_that_wants_a_key_says_what_it_serves(
    start_sim: StartSim, start_router: StartRouter, flags: tuple[str, ...], expected: list[int]
) -> None:
    """Its models are read with ``--worker-api-key``, and so are requests sent, unless clients keep their own."""
    sim = start_sim("--speed", "0", "--api-key", "sk-worker", "--model", "alpha")
    router = start_router([sim.url], *FAST, *ROUND_ROBIN, "--worker-api-key", "sk-worker", *flags)

    entry = AdminApi(router).worker(sim.url)
    statuses = []
    for key in ("sk-worker", "sk-other"):
        headers = [*JSON_HEADERS, ("Authorization", f"Bearer {key}")]
        response = await ask(router.port, "POST", CHAT_PATH, headers, chat_body("alpha"))
        statuses.append(response.status)

    assert (entry["state"], entry["models"]) == ("healthy", ["alpha"])
    assert statuses == expected
    assert "sk-worker" not in router.stderr


# --- LoRA adapters


@pytest.fixture
def adapters(start_worker: StartWorker) -> tuple[RawWorker, HealthSwitch, dict[int, Any]]:
    """Give two workers of one model, the first with an adapter."""
    worker = start_worker(2)
    models: dict[int, Any] = {
        worker.ports[0]: ["base", ("sql", "base")],
        worker.ports[1]: ["base"],
    }
    serve_models(worker, models)
    return worker, HealthSwitch(worker), models


async def test_adapter_is_asked_for_where_it_is_loaded(
    adapters: tuple[RawWorker, HealthSwitch, dict[int, Any]], start_router: StartRouter
) -> None:
    """The base model by both; nobody else takes the adapter; one that is loaded later is noticed."""
    worker, health, models = adapters
    first, second = worker.ports
    router = start_router(worker.urls, *FAST, *ROUND_ROBIN)
    api = AdminApi(router)

    sql = await chats(router, 6, "sql")
    base = await chats(router, 6, "base")
    entry = api.worker(worker.urls[0])
    health.statuses[first] = 500
    api.until_state(worker.urls[0], "unhealthy")
    without = await chat(router, "sql")
    models[second] = ["base", ("sql", "base")]
    await until_status(router, 200, "sql")
    elsewhere = await chats(router, 4, "sql")

    assert sql == {str(first): 6}
    assert base == {str(first): 3, str(second): 3}
    assert (entry["models"], entry["adapters"]) == (["base"], ["sql"])
    assert without.status == 503
    assert openai_error(without)["code"] == "no_worker_available"
    assert elsewhere == {str(second): 4}


async def test_any_worker_can_load_an_adapter(
    adapters: tuple[RawWorker, HealthSwitch, dict[int, Any]], start_router: StartRouter
) -> None:
    """``--lora-any``: where it is loaded as long as that worker is healthy, then elsewhere."""
    worker, health, _ = adapters
    first, second = worker.ports
    router = start_router(worker.urls, *FAST, *ROUND_ROBIN, "--lora-any")

    loaded = await chats(router, 6, "sql")
    health.statuses[first] = 500
    AdminApi(router).until_state(worker.urls[0], "unhealthy")
    elsewhere = await chats(router, 4, "sql")

    assert loaded == {str(first): 6}
    assert elsewhere == {str(second): 4}
