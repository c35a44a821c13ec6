"""Tokens judged by services on real sockets that accept, reject, fail, hang and lie."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from extproc.authorize import add_authorize, bearer_token
from extproc.fair_places import SHARE
from extproc.token_cache import Verdict
from extproc.token_validation import MAX_AT_ONCE, MAX_WAITING, TokenValidator

LIMIT_S = 10.0
TIMEOUT_S = 0.3
CANARY = "CANARYTOKEN"


class AuthService:
    """Answers as it is told and remembers what it was asked."""

    def __init__(self):
        self.status = 200
        self.headers = {}
        self.asked = []
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.hangs_for = ""
        self.now = self.most = 0

    async def check(self, request):
        self.asked.append(request.headers.get("Authorization"))
        self.begun.set()
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if request.headers.get("Authorization", "").startswith(self.hangs_for):
                await self.go_on.wait()
        finally:
            self.now -= 1
        return web.Response(status=self.status, headers=self.headers)

    async def endless(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    async def elsewhere(self, _request):
        raise web.HTTPFound("/check")


@pytest.fixture
async def auth():
    service = AuthService()
    app = web.Application()
    app.router.add_get("/check", service.check)
    app.router.add_get("/endless", service.endless)
    app.router.add_get("/elsewhere", service.elsewhere)
    async with TestServer(app) as server:
        service.url = str(server.make_url("/check"))
        service.other = lambda path: str(server.make_url(path))
        yield service
        service.go_on.set()


@contextlib.asynccontextmanager
async def asking(*urls, cache_s=60.0, timeout_s=TIMEOUT_S):
    """Yield a validator that asks *urls*, with its results in ``results``."""
    results = []
    async with TokenValidator(
        urls, cache_s=cache_s, timeout_s=timeout_s, count=results.append
    ) as validator:
        validator.results = results
        yield validator


async def verdict(validator, token="t", address="192.0.2.1"):  # noqa: S107  a token, not a password
    """Return what the validator says within the limit."""
    async with asyncio.timeout(LIMIT_S):
        return (await validator.validate(token, address))[0]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (200, Verdict.ACCEPTED),
        (201, Verdict.REJECTED),
        (204, Verdict.REJECTED),
        (302, Verdict.REJECTED),
        (400, Verdict.REJECTED),
        (401, Verdict.REJECTED),
        (403, Verdict.REJECTED),
        (404, Verdict.REJECTED),
        (408, Verdict.UNKNOWN),
        (429, Verdict.UNKNOWN),
        (500, Verdict.UNKNOWN),
        (503, Verdict.UNKNOWN),
    ],
)
async def test_status_decides(auth, status, expected):
    """200 alone vouches; a service in trouble says nothing."""
    auth.status = status

    async with asking(auth.url) as validator:
        assert await verdict(validator) is expected
    assert auth.asked == ["Bearer t"]
    assert validator.results == [expected.name.lower()]


async def test_answer_is_asked_for_once(auth):
    """Both kinds; another token is another question."""
    async with asking(auth.url) as validator:
        for _ in range(3):
            await verdict(validator)
        auth.status = 401
        for _ in range(3):
            assert await verdict(validator, "u") is Verdict.REJECTED

    assert auth.asked == ["Bearer t", "Bearer u"]
    assert validator.results[-2:] == ["rejected_cached"] * 2


async def test_failure_is_asked_for_again(auth):
    """Trouble that has passed is over."""
    auth.status = 500
    async with asking(auth.url) as validator:
        assert await verdict(validator) is Verdict.UNKNOWN
        auth.status = 200
        assert await verdict(validator) is Verdict.ACCEPTED


@pytest.mark.parametrize("good_first", [True, False])
async def test_any_url_vouches(auth, good_first, unused_tcp_port):
    """Whatever the other one says, or whether it is there at all."""
    urls = [auth.url, f"http://127.0.0.1:{unused_tcp_port}/x"]
    async with asking(*(urls if good_first else reversed(urls))) as validator:
        assert await verdict(validator) is Verdict.ACCEPTED


async def test_rejection_needs_every_url(auth, unused_tcp_port):
    """One that cannot be asked might vouch."""
    auth.status = 401
    async with asking(auth.url, f"http://127.0.0.1:{unused_tcp_port}/x") as validator:
        assert await verdict(validator) is Verdict.UNKNOWN


async def test_lookups_of_one_token_are_joined(auth):
    """A hundred requests, one question; one that leaves does not spoil it for the others."""
    auth.go_on.clear()
    async with asking(auth.url, timeout_s=LIMIT_S) as validator, asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(verdict(validator)) for _ in range(100)]
        async with asyncio.timeout(LIMIT_S):
            await auth.begun.wait()
        waiting[0].cancel()
        auth.go_on.set()
        answers = await asyncio.gather(*waiting[1:])

    assert set(answers) == {Verdict.ACCEPTED}
    assert len(auth.asked) == 1


async def test_service_that_hangs_costs_its_time_and_known_tokens_nothing(auth):
    """Look-ups are bounded in number, waiting ones too; what is known stays known."""
    async with asking(auth.url) as validator:
        await verdict(validator, "known")
        auth.go_on.clear()
        async with asyncio.TaskGroup() as tasks:
            waiting = [
                tasks.create_task(verdict(validator, f"t{number}", f"192.0.2.{number % 5}"))
                for number in range(MAX_WAITING + 50)
            ]
            await asyncio.sleep(TIMEOUT_S / 2)
            assert await verdict(validator, "known") is Verdict.ACCEPTED
            answers = await asyncio.gather(*waiting)
        assert set(answers) == {Verdict.UNKNOWN}
        assert auth.most <= MAX_AT_ONCE
        auth.go_on.set()
        assert await verdict(validator, "t1") is Verdict.ACCEPTED


async def test_flood_of_one_address_leaves_places_for_others(auth):
    """Its tokens wait or get no answer, while those of another address are judged."""
    flood = "198.51.100.7"
    auth.hangs_for = "Bearer flood"
    auth.go_on.clear()
    async with asking(auth.url, timeout_s=LIMIT_S) as validator:
        waiting = [
            asyncio.ensure_future(verdict(validator, f"flood{number}", flood))
            for number in range(MAX_WAITING // SHARE)
        ]
        await asyncio.sleep(0)
        assert await verdict(validator, "flood-last", flood) is Verdict.UNKNOWN
        assert await verdict(validator, "good", "203.0.113.9") is Verdict.ACCEPTED
        assert await verdict(validator, "good", flood) is Verdict.ACCEPTED
        auth.go_on.set()
        assert set(await asyncio.gather(*waiting)) == {Verdict.ACCEPTED}
        assert await verdict(validator, "flood-last", flood) is Verdict.ACCEPTED


async def test_body_without_end_is_not_read(auth):
    """The status is the answer."""
    async with asking(auth.other("/endless"), timeout_s=LIMIT_S) as validator:
        assert await verdict(validator) is Verdict.ACCEPTED


async def test_redirect_is_not_followed(auth):
    """The token is for nobody else."""
    async with asking(auth.other("/elsewhere")) as validator:
        assert await verdict(validator) is Verdict.REJECTED
    assert auth.asked == []


@pytest.mark.parametrize("said", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200", b"\x00" * 9000])
async def test_answer_that_is_not_http_is_no_answer(said):
    """A service that lies, or another one at its port."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, asking(f"http://127.0.0.1:{port}/") as validator:
        assert await verdict(validator) is Verdict.UNKNOWN


@pytest.mark.parametrize("token", ["", " ", "a b", "a\n", "é", "\x7f", "x" * 8193])
async def test_text_that_is_no_token_is_rejected_unasked(auth, token):
    """It could not even stand in a header."""
    async with asking(auth.url) as validator:
        assert await verdict(validator, token) is Verdict.REJECTED
    assert auth.asked == []


async def test_other_urls_are_asked_anew(auth):
    """What earlier ones vouched for counts no more."""
    async with asking(auth.url) as validator:
        await verdict(validator)
        validator.configure([auth.other("/elsewhere")], cache_s=60, timeout_s=1)
        assert await verdict(validator) is Verdict.REJECTED


async def test_token_is_in_no_log(auth, capfd, unused_tcp_port):
    """Nor is the query of a URL that failed."""
    auth.status = 500
    urls = (f"{auth.url}?key={CANARY}", f"http://127.0.0.1:{unused_tcp_port}/?key={CANARY}")
    async with asking(*urls) as validator:
        await verdict(validator, CANARY)

    shown = capfd.readouterr()
    assert "token cannot be validated" in shown.out + shown.err
    assert CANARY not in shown.out + shown.err


@pytest.mark.parametrize(
    ("values", "token"),
    [
        ([], ""),
        (["Bearer x"], "x"),
        (["bearer  x "], "x"),
        (["Basic x"], ""),
        (["Bearer"], ""),
        (["Bearer x", "Bearer y"], ""),
        (["x"], ""),
    ],
)
def test_bearer_token(values, token):
    """One header, one scheme."""
    assert bearer_token(values) == token


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "PURGE"])
@pytest.mark.parametrize(
    ("status", "answer", "named"), [(200, 200, True), (401, 401, False), (500, 503, False)]
)
async def test_envoy_is_answered(auth, method, status, answer, named):
    """By status, with the client's name when it may come in."""
    auth.status = status
    async with asking(auth.url) as validator:
        app = web.Application()
        add_authorize(app, validator)
        async with TestClient(TestServer(app)) as client:
            headers = {"Authorization": "Bearer t", "x-router-client-address": "192.0.2.1"}
            async with client.request(method, "/authorize", headers=headers) as response:
                assert response.status == answer
                assert ("x-router-client" in response.headers) is named
            async with client.request(method, "/authorize") as response:
                assert response.status == 401


async def test_fault_elsewhere_passes_through_as_it_is(auth):
    """Whoever waits for a configuration that cannot be used must see that, and nothing is left open."""
    auth.go_on.clear()
    waiting = []

    async def fail_while_a_token_is_asked_about():
        async with TokenValidator([auth.url], cache_s=60, timeout_s=LIMIT_S) as validator:
            waiting.append(asyncio.ensure_future(validator.validate("t")))
            await auth.begun.wait()
            raise LookupError

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(LookupError):
            await fail_while_a_token_is_asked_about()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
