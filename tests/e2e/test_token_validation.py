"""Bearer tokens that other services vouch for, with an auth service of which the tests decide every byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.e2e.client import Connection, Response, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Router, rss_bytes, until
from tests.e2e.raw_worker import Handler, RawWorker, Received, Signal, Stream, respond, unique_path
from tests.e2e.workers_support import ROUND_ROBIN, StartWorker

pytestmark = pytest.mark.envoy

CHECK = "/check"
GOOD = "good-token-5f2c"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
NO = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"
TIMEOUT_S = 1.0
MB = 2**20
UNKNOWN = 1200
"""Tokens; Envoy asks about no more than 1024 at a time unless it is told to."""

Start = Callable[..., Router]


def bearer(token: str) -> list[tuple[str, str]]:
    return [("Authorization", f"Bearer {token}")]


async def vouch(request: Received, stream: Stream) -> None:
    """Vouch for one token."""
    good = request.values("authorization") == [f"Bearer {GOOD}"]
    await stream.send(OK if good else NO)


@pytest.fixture
def auth(start_worker: StartWorker) -> RawWorker:
    """Start an auth service that vouches for ``GOOD``."""
    auth = start_worker(2)
    auth.on(CHECK, vouch)
    return auth


@pytest.fixture
def start(start_router: StartRouter, worker: RawWorker, auth: RawWorker) -> Start:
    """Start a router that asks the auth service."""

    def start(*flags: str, urls: list[str] | None = None) -> Router:
        asked = [f"{auth.urls[0]}{CHECK}"] if urls is None else urls
        return start_router(
            worker.urls,
            *ROUND_ROBIN,
            *("--api-key-validation-urls", *asked),
            *("--api-key-validation-timeout-secs", str(TIMEOUT_S)),
            *flags,
        )

    return start


def code_of(response: Response) -> str:
    code: str = openai_error(response)["code"]
    return code


async def test_only_vouched_tokens_get_in(start: Start, auth: RawWorker, worker: RawWorker) -> None:
    """The client is named to the worker, cannot name itself, and its token goes no further."""
    router = start()
    path, refused = unique_path(), unique_path()

    claim = ("x-router-client", "admin")
    served = [await ask(router.port, "POST", path, [*bearer(GOOD), claim], b"{}") for _ in range(5)]
    async with H2Connection(router.port) as h2:
        served.append(await h2.ask("POST", path, bearer(GOOD), b"{}"))
    bad = await ask(router.port, "POST", refused, bearer("bad"), b"{}")

    assert [response.status for response in served] == [200] * 6
    assert bad.status == 401
    assert code_of(bad) == "invalid_api_key"
    assert bad.values("www-authenticate") == ["Bearer"]
    assert worker.begun(refused) == 0
    names = {tuple(request.values("x-router-client")) for request in worker.received(path)}
    ((name,),) = names
    assert name.startswith("key-")
    assert len(name) == len("key-") + 12
    assert all("authorization" not in request.names() for request in worker.received(path))
    first, second = auth.received(CHECK)  # each token once: answers are remembered
    assert (first.method, first.body_bytes) == ("GET", 0)
    assert first.values("authorization") == [f"Bearer {GOOD}"]
    assert second.values("authorization") == ["Bearer bad"]
    assert "x-router-client" not in first.names()


NO_TOKENS: list[list[tuple[str, str]]] = [
    [],
    [("Authorization", GOOD)],
    [("Authorization", f"Basic {GOOD}")],
    [("Authorization", "Bearer")],
    [("Authorization", "Bearer ")],
    [("Authorization", f"Bearer {GOOD} x")],
    [("Authorization", f"Bearer {GOOD},Bearer {GOOD}")],
    [*bearer("bad"), *bearer(GOOD)],
    [*bearer(GOOD), *bearer("bad")],
    [("x-api-key", GOOD)],
    [("Authorization", f"Bearer {'x' * 9000}")],
]


async def test_what_is_no_bearer_token(start: Start, auth: RawWorker, worker: RawWorker) -> None:
    """It is refused and nobody is asked."""
    router = start()
    path = unique_path()

    answers = [await ask(router.port, "POST", path, headers, b"{}") for headers in NO_TOKENS]

    assert [answer.status for answer in answers] == [401] * len(NO_TOKENS)
    assert {code_of(answer) for answer in answers} == {"invalid_api_key"}
    assert worker.begun(path) == 0
    assert auth.begun(CHECK) == 0


async def test_requests_with_one_token_share_one_look_up(start: Start, auth: RawWorker) -> None:
    """Fifty at once, while the auth service takes its time; one that leaves takes nothing from the others."""
    router = start()
    go_on = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await go_on.wait()
        await stream.send(OK)

    auth.on(CHECK, answer)
    path = unique_path()
    async with Connection(router.port) as leaving:
        await leaving.send("GET", path, bearer(GOOD))
        await until(lambda: auth.begun(CHECK) == 1, 5, "the auth service is asked")
        asking = [
            asyncio.create_task(ask(router.port, "GET", path, bearer(GOOD))) for _ in range(50)
        ]
        leaving.abort()
    await asyncio.sleep(0.1)
    go_on.set()
    responses = await asyncio.gather(*asking)

    assert {response.status for response in responses} == {200}
    assert auth.begun(CHECK) == 1


async def test_auth_service_that_hangs(start: Start, auth: RawWorker, worker: RawWorker) -> None:
    """Hundreds of unknown tokens get 503 in bounded time and memory; known ones go on; nothing is remembered."""
    router = start("--api-key-validation-timeout-secs", "4")
    path, lost = unique_path(), unique_path()
    assert (await ask(router.port, "GET", path, bearer(GOOD))).status == 200
    before = rss_bytes(router.service_pid)
    hang = Signal()

    async def answer(_request: Received, _stream: Stream) -> None:
        await hang.wait()

    auth.on(CHECK, answer)
    started = time.monotonic()
    waiting = [
        asyncio.create_task(ask(router.port, "GET", lost, bearer(f"unknown-{number}")))
        for number in range(UNKNOWN)
    ]
    await until(lambda: auth.begun(CHECK) > 1, 5, "the auth service is asked")
    known = await asyncio.gather(*(ask(router.port, "GET", path, bearer(GOOD)) for _ in range(20)))
    known_s = time.monotonic() - started
    answers = await asyncio.gather(*waiting)
    took = time.monotonic() - started
    growth = rss_bytes(router.service_pid) - before
    hang.set()
    auth.on(CHECK, respond(OK))
    again = await ask(router.port, "GET", path, bearer("unknown-1"))

    assert {response.status for response in known} == {200}, known
    assert known_s < took
    assert {response.status for response in answers} == {503}
    assert {code_of(response) for response in answers} == {"auth_unavailable"}
    assert took < 25
    assert worker.begun(lost) == 0
    assert growth < 50 * MB
    assert again.status == 200
    assert router.metrics()("token_validations_total", result="unknown") > 0
    assert len(router.logged("token validation timed out")) < 10
    crowded = router.logged("too many unknown tokens at a time")
    assert {entry["address"] for entry in crowded} == {"127.0.0.1"}


async def endless(_request: Received, stream: Stream) -> None:
    await stream.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        await stream.send(b"10000\r\n" + bytes(65536) + b"\r\n")


async def reset(_request: Received, stream: Stream) -> None:
    stream.reset()


async def close(_request: Received, stream: Stream) -> None:
    stream.close()


async def endless_head(_request: Received, stream: Stream) -> None:
    await stream.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        await stream.send(b"x-more: " + b"y" * 4000 + b"\r\n")


def status(code: int, headers: str = "") -> Handler:
    return respond(f"HTTP/1.1 {code} X\r\n{headers}content-length: 0\r\n\r\n".encode())


LIES: dict[str, tuple[Handler, int]] = {
    "200 with an endless body": (endless, 200),
    "200 with a length it does not keep": (
        respond(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\nx"),
        200,
    ),
    "201": (status(201), 401),
    "204": (status(204), 401),
    "403": (status(403), 401),
    "404": (status(404), 401),
    "302 to where everybody gets 200": (status(302, "location: /everybody\r\n"), 401),
    "307 to where everybody gets 200": (status(307, "location: /everybody\r\n"), 401),
    "500": (status(500), 503),
    "503": (status(503), 503),
    "429": (status(429), 503),
    "a reset": (reset, 503),
    "a close": (close, 503),
    "garbage": (respond(b"\x16\x03\x01 this is not HTTP\r\n\r\n"), 503),
    "an endless head": (endless_head, 503),
}


async def test_auth_service_that_lies(start: Start, auth: RawWorker) -> None:
    """What counts is the status alone, of the URL itself; whatever else it sends harms nobody."""
    router = start()
    auth.on("/everybody", respond(OK))
    before = rss_bytes(router.service_pid)
    path = unique_path()

    found = {}
    for number, (lie, (handler, _)) in enumerate(LIES.items()):
        auth.on(CHECK, handler)
        found[lie] = (await ask(router.port, "GET", path, bearer(f"token-{number}"))).status
    auth.on(CHECK, vouch)
    after = await ask(router.port, "GET", path, bearer(GOOD))

    assert found == {lie: expected for lie, (_, expected) in LIES.items()}
    assert auth.begun("/everybody") == 0, "redirects are not followed"
    assert after.status == 200
    assert rss_bytes(router.service_pid) - before < 50 * MB


async def test_one_url_that_vouches_is_enough(start: Start, auth: RawWorker) -> None:
    """Another that refuses, fails or hangs does not matter; none that vouches and one that fails is no answer."""
    first, second = (f"{url}{path}" for url, path in zip(auth.urls, ("/a", "/b"), strict=True))
    router = start(urls=[first, second])
    hang = Signal()

    async def hanging(_request: Received, _stream: Stream) -> None:
        await hang.wait()

    kinds = {"yes": respond(OK), "no": respond(NO), "fails": reset, "hangs": hanging}
    expected = {
        ("yes", "no"): 200,
        ("no", "yes"): 200,
        ("fails", "yes"): 200,
        ("hangs", "yes"): 200,
        ("yes", "hangs"): 200,
        ("no", "no"): 401,
        ("no", "fails"): 503,
        ("hangs", "no"): 503,
        ("fails", "fails"): 503,
    }
    path = unique_path()

    found, times = {}, {}
    for number, pair in enumerate(expected):
        for name, kind in zip(("/a", "/b"), pair, strict=True):
            auth.on(name, kinds[kind])
        started = time.monotonic()
        found[pair] = (await ask(router.port, "GET", path, bearer(f"t{number}"))).status
        times[pair] = time.monotonic() - started
    hang.set()

    assert found == expected
    assert times["hangs", "yes"] < TIMEOUT_S
    assert times["yes", "hangs"] < TIMEOUT_S


TRICKS = (
    "/authorize",
    "/authorize/",
    "//authorize",
    "/authorize?x=1",
    "/%61uthorize",
    "/health/../authorize",
    "/health/..%2fauthorize",
    "/workers/../authorize",
    "/workers/..%2fauthorize",
    "/workers/%2e%2e/authorize",
    "/v1/models/../../authorize",
    "/v1/models/..%2f..%2fauthorize",
    "/readiness/authorize",
    "http://extproc/authorize",
)


async def test_endpoint_is_for_envoy_alone(start: Start, worker: RawWorker) -> None:
    """No path leads a client to ``/authorize`` of the service, with a token or without."""
    router = start()
    assert (await ask(router.port, "GET", unique_path(), bearer(GOOD))).status == 200

    async with Connection(router.port) as connection:
        for trick in TRICKS:
            for headers in (bearer(GOOD), bearer("other"), []):
                before = len(worker.received("/authorize")) + worker.begun(trick)
                response = await connection.ask("GET", trick, headers)
                # Its own answers have no body; all others have one.
                assert response.body, (trick, headers, response)
                assert response.values("x-router-client") == [], trick
                if headers == bearer(GOOD):
                    continue
                now = len(worker.received("/authorize")) + worker.begun(trick)
                assert now == before, (trick, headers)
                assert response.status in {400, 401, 403, 404}, (trick, response)


async def test_probes_and_administrators_need_no_token(start: Start, auth: RawWorker) -> None:
    """They have a key of their own."""
    router = start()

    for path in ("/readiness", "/liveness", "/health", "/workers"):
        response = await ask(router.port, "GET", path, [("Host", f"127.0.0.1:{router.port}")])
        assert response.status == 200, path

    assert auth.begun(CHECK) == 0


async def test_nobody_gets_in_while_the_service_is_away(start: Start) -> None:
    """A router that fails open still lets nobody in whom it cannot check."""
    router = start()
    path = unique_path()
    assert (await ask(router.port, "GET", unique_path(), bearer(GOOD))).status == 200

    router.kill_service()
    with_token = await ask(router.port, "GET", path, bearer(GOOD))
    without = await ask(router.port, "GET", unique_path())

    # The launcher may have started it again by then.
    assert with_token.status in {200, 503}
    assert without.status in {401, 503}


async def test_hanging_service_lets_nobody_in(start: Start, worker: RawWorker) -> None:
    """Envoy gives up after the time for validation and some more."""
    router = start()
    path = unique_path()

    with router.service_stopped():
        response = await ask(router.port, "GET", path, bearer(GOOD))

    assert response.status == 503
    assert code_of(response) == "auth_unavailable"
    assert worker.begun(path) == 0


async def test_tokens_and_secrets_of_urls_are_not_logged(start: Start, auth: RawWorker) -> None:
    """Even when the look-up fails, and with the most talkative log."""
    auth.on("/fails", status(500))
    router = start("--log-level", "debug", urls=[f"{auth.urls[0]}/fails?key=url-secret"])

    response = await ask(router.port, "GET", unique_path(), bearer("token-secret"))
    (said,) = router.logged("token cannot be validated")

    assert response.status == 503
    assert said["url"] == f"{auth.urls[0]}/fails"
    for text in (router.stderr, router.metrics().text):
        assert "token-secret" not in text
        assert "url-secret" not in text


def test_urls_with_credentials_are_refused(start_router: StartRouter) -> None:
    """They would end up in logs of others; the message does not repeat them."""
    router = start_router(
        [], "--api-key-validation-urls", "http://me:hidden@a.example/check", ready=False
    )

    assert router.wait(20) == 1
    assert "--api-key-validation-urls" in router.stderr
    assert "hidden" not in router.stderr
