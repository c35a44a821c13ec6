"""Web pages that use the router from a browser."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Response, ask
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Router
from tests.e2e.raw_worker import RawWorker, respond, unique_path

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

PAGE = "https://chat.example"
LOCAL_PAGE = "http://localhost:3000"
LIMIT_S = 15.0


@pytest.fixture(scope="module")
def cors_router(worker: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router that two origins may use."""
    flags = ("--policy", "round_robin", "--cors-allowed-origins", PAGE, LOCAL_PAGE)
    router = Router(worker.urls, logs, *flags)
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


async def preflight(
    router: Router, origin: str, path: str, *, method: str = "POST", headers: str = "authorization"
) -> Response:
    """Ask as a browser does before it sends what a page wants."""
    asked = [
        ("Origin", origin),
        ("Access-Control-Request-Method", method),
        ("Access-Control-Request-Headers", headers),
    ]
    return await ask(router.port, "OPTIONS", path, asked)


def allowed(response: Response) -> list[tuple[str, str]]:
    """Return what a response tells a browser."""
    return [header for header in response.headers if header[0].startswith("access-control-")]


def words(response: Response, name: str) -> set[str]:
    """Return the entries of a list in a header."""
    (value,) = response.values(name)
    return {word.strip().lower() for word in value.split(",")}


@pytest.mark.parametrize("origin", [PAGE, LOCAL_PAGE])
async def test_question_of_an_allowed_page_is_answered_by_envoy(
    cors_router: Router, worker: RawWorker, origin: str
) -> None:
    """With what OpenAI's SDK sends from a browser; for an hour; no worker hears of it."""
    path = unique_path()

    response = await preflight(cors_router, origin, path)

    assert response.status == 200
    assert response.values("access-control-allow-origin") == [origin]
    methods = words(response, "access-control-allow-methods")
    assert methods == {"get", "post", "put", "patch", "delete", "options"}
    headers = words(response, "access-control-allow-headers")
    assert {"authorization", "content-type", "openai-organization", "openai-project"} <= headers
    assert {
        f"x-stainless-{name}" for name in ("lang", "os", "arch", "runtime", "timeout")
    } <= headers
    assert response.values("access-control-max-age") == ["3600"]
    assert response.values("access-control-allow-credentials") == []
    assert worker.received(path) == []


async def test_answer_can_be_read_by_an_allowed_page(
    cors_router: Router, worker: RawWorker
) -> None:
    """Its origin is named, and which headers it may see beside the plain ones."""
    path = unique_path()

    response = await ask(cors_router.port, "POST", path, [("Origin", PAGE)], b"{}")

    assert response.status == 200
    assert response.values("access-control-allow-origin") == [PAGE]
    exposed = words(response, "access-control-expose-headers")
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining"} <= exposed
    assert len(worker.received(path)) == 1


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "https://chat.example.evil.example",
        "https://chat.example:444",
        "http://chat.example",
        "https://CHAT.example",
        "null",
        "https://chatxexample",
    ],
)
async def test_other_pages_are_told_nothing(
    cors_router: Router, worker: RawWorker, origin: str
) -> None:
    """Without the name of an origin a browser keeps the answer from a page, and sends nothing that it asked about."""
    path = unique_path()

    question = await preflight(cors_router, origin, path)
    answer = await ask(cors_router.port, "GET", path, [("Origin", origin)])

    assert question.values("access-control-allow-origin") == []
    assert allowed(answer) == []
    assert [request.method for request in worker.received(path)] == ["GET"]


@pytest.mark.parametrize("path", ["/workers", "/list_workers", "/config", "/add_worker"])
async def test_admin_api_is_for_no_page(cors_router: Router, path: str) -> None:
    """Not even for one that may use the models."""
    assert allowed(await preflight(cors_router, PAGE, path)) == []
    assert allowed(await ask(cors_router.port, "GET", path, [("Origin", PAGE)])) == []


async def test_models_can_be_listed_by_a_page(cors_router: Router) -> None:
    """It is part of OpenAI's API."""
    response = await ask(cors_router.port, "GET", "/v1/models", [("Origin", PAGE)])

    assert response.status == 200
    assert response.values("access-control-allow-origin") == [PAGE]


async def test_errors_can_be_read_by_a_page(start_router: StartRouter, worker: RawWorker) -> None:
    """413, 429, 503: a page that could not read them would only know that something failed."""
    flags = ["--cors-allowed-origins", PAGE, "--max-payload-size", "10"]
    limited = start_router(
        worker.urls, *flags, "--rate-limit-tokens-per-second", "0.001", "--rate-limit-burst", "2"
    )
    empty = start_router([], *flags)
    origin = [("Origin", PAGE)]

    responses = [
        await ask(limited.port, "POST", unique_path(), origin, b"x" * 11),
        await ask(empty.port, "POST", unique_path(), origin, b"{}"),
        await ask(limited.port, "POST", unique_path(), origin, b"{}"),
        await ask(limited.port, "POST", unique_path(), origin, b"{}"),
    ]

    assert [response.status for response in responses] == [413, 503, 200, 429]
    for response in responses:
        assert response.values("access-control-allow-origin") == [PAGE], response


async def test_all_pages(start_router: StartRouter, worker: RawWorker) -> None:
    """``*`` allows every origin, each under its own name."""
    router = start_router(worker.urls, "--cors-allowed-origins", "*")

    for origin in (PAGE, "https://evil.example"):
        question = await preflight(router, origin, unique_path())
        assert question.values("access-control-allow-origin") == [origin]
        assert question.values("access-control-allow-credentials") == []


GENEROUS = (
    b"HTTP/1.1 200 OK\r\naccess-control-allow-origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"
    b"access-control-allow-headers: *\r\naccess-control-allow-methods: *\r\naccess-control-max-age: 9\r\n"
    b"access-control-expose-headers: *\r\naccess-control-allow-private-network: true\r\n"
    b"access-control-allow-origin: https://evil.example\r\nvary: accept\r\ncontent-length: 0\r\n\r\n"
)
"""What a worker says that lets every page in."""


@pytest.mark.parametrize("origin", [PAGE, "https://evil.example", None])
async def test_worker_lets_nobody_else_in(
    cors_router: Router, worker: RawWorker, origin: str | None
) -> None:
    """Its own word on it goes no further, so that pages of elsewhere are told nothing."""
    path = worker.on(unique_path(), respond(GENEROUS))
    headers = [("Origin", origin)] if origin else []

    answer = await ask(cors_router.port, "GET", path, headers)
    plain = await ask(cors_router.port, "OPTIONS", path, headers)

    for response in (answer, plain):
        assert response.values("access-control-allow-origin") == ([PAGE] if origin == PAGE else [])
        assert response.values("access-control-allow-credentials") == []
        if origin != PAGE:
            assert allowed(response) == []
    assert answer.values("vary") != []


async def test_question_of_another_page_reaches_no_worker(
    cors_router: Router, worker: RawWorker
) -> None:
    """Also where the worker would say yes."""
    path = worker.on(unique_path(), respond(GENEROUS))

    question = await preflight(cors_router, "https://evil.example", path)

    assert question.values("access-control-allow-origin") == []
    assert worker.received(path) == []


async def test_without_origins_workers_answer_for_themselves(
    router: Router, worker: RawWorker
) -> None:
    """Nothing is answered in their place, and nothing added."""
    path = worker.on(
        unique_path(),
        respond(b"HTTP/1.1 204 No\r\naccess-control-allow-origin: https://w.example\r\n\r\n"),
    )

    question = await preflight(router, PAGE, path)
    plain = await ask(router.port, "GET", unique_path(), [("Origin", PAGE)])

    assert allowed(question) == [("access-control-allow-origin", "https://w.example")]
    assert allowed(plain) == []


async def test_origins_change_while_a_router_runs(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """They stand in routes, which change without a new listener."""
    options = tmp_path / "router.yaml"
    options.write_text("policy: round_robin\n")
    router = start_router(worker.urls, "--config", str(options))
    assert allowed(await ask(router.port, "GET", unique_path(), [("Origin", PAGE)])) == []
    generous = worker.on(unique_path(), respond(GENEROUS))
    evil = [("Origin", "https://evil.example")]
    before = await ask(router.port, "GET", generous, evil)
    assert before.values("access-control-allow-origin") == ["*,https://evil.example"]

    options.write_text(f"policy: round_robin\ncors_allowed_origins: ['{PAGE}']\n")

    found: list[tuple[str, str]] = []
    async with asyncio.timeout(LIMIT_S):
        while not found:
            found = allowed(await ask(router.port, "GET", unique_path(), [("Origin", PAGE)]))

    assert ("access-control-allow-origin", PAGE) in found
    assert allowed(await ask(router.port, "GET", generous, evil)) == []
