"""Who gets in: every way to authenticate clients, against the real Envoy."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from extproc.address import Address
from extproc.clusters import ClusterView, EndpointView
from extproc.envoy_binary import find_envoy
from extproc.grpc_server import GrpcServer
from extproc.h2.grpc import Call
from extproc.local_http import ask as ask_locally
from extproc.metrics import Metrics
from extproc.xds.ads import AdsService
from extproc.xds.bootstrap import build_bootstrap, to_yaml
from extproc.xds.model import Access, ApiKey, ApiKeys, EnvoyModel
from extproc.xds.snapshot import EXTENSION_TYPE, build_snapshot
from protos.discovery_pb2 import DiscoveryResponse
from tests.e2e.client import Connection, Headers, Response, ask, openai_error
from tests.e2e.conftest import StartRouter
from tests.e2e.h2_client import H2Connection
from tests.e2e.harness import Program, Router, free_port, until
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream, respond, unique_path
from tests.signed_tokens import ISSUER, jwks, token

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

RELOAD_LIMIT_S = 10.0
CLIENT = "x-router-client"
CREDENTIALS = {"authorization", "x-api-key"}

# "admin" hashed by SHA-1, as `htpasswd -s` does.
PASSWORD_HASH = "{SHA}0DPiKuNIrrVmD8IUCuw1hQxNqZc="  # noqa: S105  of the tests alone
VALIDATION_PATH = "/e2e/validate"


def bearer(value: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {value}")


def basic(user: str, password: str) -> tuple[str, str]:
    return ("Authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode())


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to authenticate clients."""

    flags: Callable[[Path, RawWorker], list[str]]
    good: Callable[[], Headers]
    client: str
    bad: tuple[Headers, ...]
    challenge: str = "Bearer"


def file_with(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


async def validate(request: Received, stream: Stream) -> None:
    """Let the bearer token ``good-token`` in, and no other."""
    good = request.values("authorization") == ["Bearer good-token"]
    status = b"200 OK" if good else b"401 Unauthorized"
    await stream.send(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % status)


def _validation_flags(_directory: Path, worker: RawWorker) -> list[str]:
    worker.on(VALIDATION_PATH, validate)
    return ["--api-key-validation-urls", f"{worker.urls[0]}{VALIDATION_PATH}"]


WAYS = {
    "key": Way(
        lambda _directory, _worker: ["--api-key", "sk-single"],
        lambda: [bearer("sk-single")],
        "api-key",
        ([bearer("sk-singl")], [bearer("sk-single2")], [bearer("")], [("x-api-key", "nothing")]),
    ),
    "keys": Way(
        lambda directory, _worker: [
            "--api-keys-file",
            file_with(directory, "keys", "# clients\nteam-a sk-a\nteam-b sk-b\n"),
        ],
        lambda: [("x-api-key", "sk-b")],
        "team-b",
        (
            [bearer("team-a")],
            [bearer("sk-c"), ("x-api-key", "sk-a")],
            [("Authorization", "sk-b, x")],
        ),
    ),
    "password": Way(
        lambda directory, _worker: [
            "--htpasswd-file",
            file_with(directory, "htpasswd", f"joe:{PASSWORD_HASH}\n"),
        ],
        lambda: [basic("joe", "admin")],
        "joe",
        (
            [basic("joe", "x")],
            [basic("", "admin")],
            [bearer("admin")],
            [("Authorization", "Basic x")],
        ),
        challenge='Basic realm="vllm-extproc"',
    ),
    "signed token": Way(
        lambda directory, _worker: [
            *("--jwt-issuer", ISSUER, "--jwt-audiences", "llm", "chat"),
            *("--jwt-jwks", file_with(directory, "jwks.json", jwks())),
        ],
        lambda: [bearer(token())],
        "ann",
        (
            [bearer(token(exp=int(time.time()) - 3600))],
            [bearer(token(exp=None))],
            [bearer(token(sub=None))],
            [bearer(token(sub=""))],
            [bearer(token(sub=7))],
            [bearer(token(iss="https://evil.example"))],
            [bearer(token(alg="none"))],
            [bearer(token(alg="HS256"))],
            [bearer(token()[:-8] + "AAAAAAAA")],
            [bearer(token().rpartition(".")[0] + ".")],
            [bearer("a.b.c")],
        ),
    ),
    "asked token": Way(
        _validation_flags,
        lambda: [bearer("good-token")],
        "",
        ([bearer("bad-token")], [("x-api-key", "good-token")], [bearer("good-token x")]),
    ),
}


@pytest.fixture(params=list(WAYS), scope="module")
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def router(way: Way, worker: RawWorker, logs: Path) -> Iterator[Router]:
    """Start a router that asks its clients who they are."""
    flags = ["--policy", "round_robin", "--cors-allowed-origins", "https://chat.example"]
    directory = logs / f"auth-{time.monotonic_ns()}"
    directory.mkdir()
    router = Router(worker.urls, logs, *flags, *way.flags(directory, worker))
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


def check_refused(response: Response, challenge: str) -> None:
    assert response.status == 401
    assert openai_error(response)["code"] == "invalid_api_key"
    assert response.values("www-authenticate") == [challenge]
    assert len(response.values("x-request-id")) == 1


async def test_client_that_proves_who_it_is_gets_in(
    router: Router, way: Way, worker: RawWorker
) -> None:
    """The worker learns its name, and sees no credentials."""
    path = unique_path()

    response = await ask(router.port, "POST", path, [*way.good(), ("x-kept", "1")], b"{}")

    assert response.status == 200
    request = worker.only(path)
    (client,) = request.values(CLIENT)
    assert client == way.client if way.client else client.isprintable()
    assert not CREDENTIALS & request.names()
    assert request.values("x-kept") == ["1"]
    assert "good-token" not in client


async def test_client_that_does_not_is_refused(router: Router, way: Way, worker: RawWorker) -> None:
    """Nothing shown, or something wrong: the same 401, and no worker hears of it."""
    path = unique_path()

    for headers in ((), *way.bad):
        check_refused(await ask(router.port, "POST", path, headers, b"{}"), way.challenge)

    assert worker.received(path) == []


@pytest.mark.parametrize(
    "name",
    ["x-router-client", "X-Router-Client", "x_router_client", "x-router_client", "x_router-client"],
)
async def test_name_of_a_client_cannot_be_forged(
    router: Router, way: Way, worker: RawWorker, name: str
) -> None:
    """Envoy alone sets it; alone it lets nobody in."""
    path = unique_path()

    response = await ask(router.port, "GET", path, [(name, "root"), *way.good()])
    alone = await ask(router.port, "GET", path, [(name, "root")])

    assert response.status == 200
    request = worker.only(path)
    assert len(request.values(CLIENT)) == 1
    assert "root" not in [value for _, value in request.headers]
    assert alone.status == 401


async def test_over_http2_as_well(router: Router, way: Way, worker: RawWorker) -> None:
    """The protocol makes no difference."""
    path = unique_path()
    good = [(name.lower(), value) for name, value in way.good()]

    async with H2Connection(router.port) as connection:
        inside = await connection.ask("POST", path, good, b"{}")
        outside = await connection.ask("POST", path, [], b"{}")

    assert inside.status == 200
    check_refused(outside, way.challenge)
    assert len(worker.received(path)) == 1


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/x", "/health_generate", "/finish_session"]
)
async def test_what_the_service_answers_to_clients_is_for_clients(
    router: Router, way: Way, path: str
) -> None:
    """They stand under the same lock as workers do."""
    check_refused(await ask(router.port, "GET", path), way.challenge)

    assert (await ask(router.port, "GET", path, way.good())).status != 401


@pytest.mark.parametrize("path", ["/health", "/liveness", "/readiness", "/readiness?x=1"])
async def test_probes_are_open(router: Router, path: str) -> None:
    """A load balancer has no key."""
    assert (await ask(router.port, "GET", path)).status == 200


async def test_administrators_need_no_key_of_clients(router: Router, way: Way) -> None:
    """The admin API has a guard of its own: here, that it is asked from this machine."""
    local = [("Host", f"127.0.0.1:{router.port}")]

    inside = await ask(router.port, "GET", "/list_workers", local)
    outside = await ask(router.port, "GET", "/list_workers", [("Host", "x.example"), *way.good()])

    assert inside.status == 200
    assert outside.status == 403


TRICKS = [
    "//{path}",
    "/./{path}",
    "/health/../{path}",
    "/health/..%2f{path}",
    "/health%2f..%2f{path}",
    "/%68ealth/../{path}",
    "/workers/../{path}",
    "/workers/..%2f{path}",
    "/workers/%2e%2e/{path}",
    "/workers/%2e%2e%2f{path}",
    "/workers/..;/{path}",
    "/workers/x/../../{path}",
    "/workers\\..\\{path}",
    "/list_workers/../{path}",
    "/list_workers/..%2f{path}",
    "/readiness;/../{path}",
    "/readiness?/../{path}",
    "/{path}?/health",
    "/{path}#/health",
    "/{path}/../{path}",
    "http://h/health/../{path}",
]


async def test_tricks_with_paths_open_no_door(router: Router, way: Way, worker: RawWorker) -> None:
    """What is open or guarded by others leads to no worker, and to nothing that clients need a key for."""
    del way
    path = unique_path()

    for trick in TRICKS:
        for target in (path.lstrip("/"), "v1/models", "authorize"):
            async with Connection(router.port) as connection:
                head = f"GET {trick.format(path=target)} HTTP/1.1\r\nHost: h\r\n\r\n"
                await connection.send_raw(head.encode())
                response = await connection.head()
                response.body = await connection.body()
            if response.status == 200:  # a probe
                assert response.json()["status"] in ("ok", "ready", "alive", "healthy"), trick
            else:
                assert response.status in (400, 401, 403, 404, 405), (trick, response)

    assert worker.received(path) == []


async def test_upgrade_needs_the_same(router: Router, way: Way) -> None:
    """A WebSocket has a chain of filters of its own."""
    url = f"ws://127.0.0.1:{router.port}{unique_path()}"

    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, proxy=None, open_timeout=10):
            pass
    with pytest.raises(InvalidStatus) as passed:  # the raw worker upgrades nothing
        async with connect(url, proxy=None, open_timeout=10, additional_headers=dict(way.good())):
            pass

    assert refused.value.response.status_code == 401
    assert passed.value.response.status_code == 200


async def test_page_asks_without_credentials_and_can_read_the_refusal(router: Router) -> None:
    """A browser sends none with its question, and hands a page what CORS allows only."""
    origin = ("Origin", "https://chat.example")
    path = unique_path()

    question = await ask(
        router.port, "OPTIONS", path, [origin, ("Access-Control-Request-Method", "POST")]
    )
    refusal = await ask(router.port, "POST", path, [origin], b"{}")

    assert question.status == 200
    assert question.values("access-control-allow-origin") == [origin[1]]
    assert refusal.status == 401
    assert refusal.values("access-control-allow-origin") == [origin[1]]


async def test_service_away_opens_no_door(
    start_router: StartRouter, way: Way, worker: RawWorker, tmp_path: Path
) -> None:
    """Envoy goes on checking by itself; where it must ask the service, nobody gets in."""
    router = start_router(worker.urls, "--policy", "round_robin", *way.flags(tmp_path, worker))
    path = unique_path()

    with router.service_stopped():
        outside = await ask(router.port, "POST", path, body=b"{}")
        inside = await ask(router.port, "POST", path, way.good(), b"{}")

    if way is WAYS["asked token"]:
        assert (outside.status, inside.status) == (503, 503)
        assert openai_error(inside)["code"] == "auth_unavailable"
        assert worker.received(path) == []
    else:
        check_refused(outside, way.challenge)
        assert inside.status == 200
        assert len(worker.received(path)) == 1


async def test_token_for_somebody_else_is_refused(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """403: it is good, but not for this router."""
    flags = WAYS["signed token"].flags(tmp_path, worker)
    router = start_router(worker.urls, *flags)

    response = await ask(router.port, "GET", unique_path(), [bearer(token(aud="other"))])

    assert response.status == 403
    assert openai_error(response)["code"] == "permission_denied"


@pytest.mark.parametrize("name", ["\0", "an\0n", "ann\n", "a\tnn", "ann\x7f", ""])
async def test_token_with_a_name_that_is_no_header_is_refused(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path, name: str
) -> None:
    """It could not be told to workers; one outside ASCII can."""
    flags = WAYS["signed token"].flags(tmp_path, worker)
    router = start_router(worker.urls, *flags)
    path = unique_path()

    refused = await ask(router.port, "GET", path, [bearer(token(sub=name))])
    welcome = await ask(router.port, "GET", path, [bearer(token(sub="änn müller"))])

    check_refused(refused, WAYS["signed token"].challenge)
    assert welcome.status == 200
    assert len(worker.received(path)) == 1


async def test_token_in_the_url_is_none(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """URLs are remembered at many places."""
    router = start_router(worker.urls, *WAYS["signed token"].flags(tmp_path, worker))

    response = await ask(router.port, "GET", f"{unique_path()}?access_token={token()}")

    assert response.status == 401


# --- changes while requests are under way --------------------------------------------------------


@contextlib.asynccontextmanager
async def stream_under_way(
    router: Router, worker: RawWorker, headers: Headers
) -> AsyncIterator[None]:
    """Hold a stream open; at the end it must go on, on the same connection."""
    go_on = Signal()

    async def answer(_request: Received, stream: Stream) -> None:
        await stream.open_events()
        await stream.event("first")
        await go_on.wait()
        await stream.event("second")
        await stream.close_events()

    path = worker.on(unique_path(), answer)
    async with Connection(router.port) as connection:
        await connection.send("POST", path, headers, b"{}")
        head = await connection.head()
        assert head.status == 200
        assert await connection.event() == "first"
        yield
        go_on.set()
        assert await connection.body() == b"data: second\n\ndata: [DONE]\n\n"


async def until_status(router: Router, status: int, headers: Headers) -> None:
    async with asyncio.timeout(RELOAD_LIMIT_S):
        found = 0
        while found != status:
            found = (await ask(router.port, "GET", unique_path(), headers)).status


def replace(path: Path, text: str) -> None:
    """Put another file in the place, as careful programs do."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


async def listener_stats(router: Router) -> dict[str, int]:
    """Return what Envoy has done with listeners."""
    (directory,) = router.temporary.glob("vllm-extproc-*")
    address = Address(path=str(directory / "envoy-admin.sock"))
    answer = await ask_locally(
        address, "GET", "/stats?filter=^listener_manager.listener_&format=json", timeout_s=5
    )
    assert answer is not None
    stats = {s["name"]: s.get("value", 0) for s in json.loads(answer[1])["stats"]}
    return {
        name.rpartition(".")[2]: stats[name]
        for name in stats
        if name.endswith(("added", "modified", "removed", "in_place_updated"))
    }


async def test_keys_change_without_cutting_a_stream(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """New keys count within seconds, old ones no more; Envoy's listener stays as it is."""
    file = tmp_path / "keys"
    file.write_text("team-a sk-old\n")
    router = start_router(worker.urls, "--policy", "round_robin", "--api-keys-file", str(file))
    before = await listener_stats(router)

    async with stream_under_way(router, worker, [bearer("sk-old")]):
        replace(file, "team-a sk-old\nteam-a sk-new\n")
        await until_status(router, 200, [bearer("sk-new")])
        both = await ask(router.port, "GET", unique_path(), [bearer("sk-old")])
        replace(file, "team-a sk-new\n")
        await until_status(router, 401, [bearer("sk-old")])
        new = await ask(router.port, "GET", unique_path(), [bearer("sk-new")])

    assert (both.status, new.status) == (200, 200)
    assert await listener_stats(router) == before
    assert router.logged("keys of clients changed", clients=["team-a"])


async def test_broken_file_changes_nothing(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """The old keys count on; the log says where the fault is, and shows no key."""
    file = tmp_path / "keys"
    file.write_text("team-a sk-old\n")
    router = start_router(worker.urls, "--api-keys-file", str(file))

    replace(file, "team-a sk-new\nteam-b sk-secret sk-other\n")
    refused = "keys of clients refused; those in use stay"
    await until(lambda: router.logged(refused), RELOAD_LIMIT_S, "the file is refused")
    old = await ask(router.port, "GET", unique_path(), [bearer("sk-old")])
    new = await ask(router.port, "GET", unique_path(), [bearer("sk-new")])
    file.unlink()
    await until(lambda: len(router.logged(refused)) > 1, RELOAD_LIMIT_S, "its absence is told")
    still = await ask(router.port, "GET", unique_path(), [bearer("sk-old")])

    assert (old.status, new.status, still.status) == (200, 401, 200)
    reason = router.logged(refused)[0]["reason"]
    assert f"{file}, line 2" in reason
    assert "sk-" not in router.stderr


async def test_files_swapped_as_kubernetes_does(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """The path leads through a symbolic link that points to another directory."""
    for name, password in (("one", PASSWORD_HASH), ("two", "{SHA}qUqP5cyxm6YcTAhz05Hph5gvu9M=")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "htpasswd").write_text(f"joe:{password}\n")
    link = tmp_path / "..data"
    link.symlink_to("one")
    router = start_router(worker.urls, "--htpasswd-file", str(link / "htpasswd"))
    assert (await ask(router.port, "GET", unique_path(), [basic("joe", "admin")])).status == 200

    fresh = tmp_path / "..new"
    fresh.symlink_to("two")
    fresh.replace(link)

    await until_status(router, 200, [basic("joe", "test")])
    assert (await ask(router.port, "GET", unique_path(), [basic("joe", "admin")])).status == 401


async def test_way_changes_without_a_restart(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """From open to keys to passwords and back, by the file of options; streams go on."""
    options = tmp_path / "router.yaml"
    options.write_text("policy: round_robin\n")
    htpasswd = file_with(tmp_path, "htpasswd", f"joe:{PASSWORD_HASH}\n")
    router = start_router(worker.urls, "--config", str(options))
    before = await listener_stats(router)

    async with stream_under_way(router, worker, []):
        replace(options, "policy: round_robin\napi_key: sk-one\n")
        await until_status(router, 401, [])
        keyed = await ask(router.port, "GET", unique_path(), [bearer("sk-one")])
        replace(options, f"policy: round_robin\nhtpasswd_file: {htpasswd}\n")
        await until_status(router, 401, [bearer("sk-one")])
        named = await ask(router.port, "GET", unique_path(), [basic("joe", "admin")])
        replace(options, "policy: round_robin\n")
        await until_status(router, 200, [])

    assert (keyed.status, named.status) == (200, 200)
    assert await listener_stats(router) == before


async def test_keys_of_a_url(
    start_router: StartRouter, start_worker: Callable[..., RawWorker]
) -> None:
    """Nobody gets in until they were had; then they stay though the URL is away, or talks nonsense."""
    worker = start_worker()
    path = worker.on("/e2e/jwks", respond(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"))
    router = start_router(
        worker.urls, "--jwt-issuer", ISSUER, "--jwt-jwks", f"{worker.urls[0]}{path}"
    )

    early = await ask(router.port, "GET", unique_path(), [bearer(token())])
    body = jwks().encode()
    worker.on(path, respond(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body))
    await until_status(router, 200, [bearer(token())])
    outside = await ask(router.port, "GET", unique_path())

    assert early.status == 503
    assert openai_error(early)["code"] == "auth_unavailable"
    assert outside.status == 401


# --- what workers are shown ----------------------------------------------------------------------


async def test_worker_key_takes_the_place_of_the_clients(
    start_router: StartRouter, worker: RawWorker
) -> None:
    """Whatever the client has sent; the service's own endpoints are not shown it."""
    router = start_router(worker.urls, "--policy", "round_robin", "--worker-api-key", "sk-worker")
    paths = [unique_path(), unique_path()]

    for path, headers in zip(paths, ([], [bearer("sk-client")]), strict=True):
        assert (await ask(router.port, "POST", path, headers, b"{}")).status == 200

    for path in paths:
        assert worker.only(path).values("authorization") == ["Bearer sk-worker"]


async def test_client_may_keep_its_own(start_router: StartRouter, worker: RawWorker) -> None:
    """Only who has none is given the worker's key."""
    router = start_router(
        worker.urls, "--worker-api-key", "sk-worker", "--keep-client-authorization"
    )
    paths = [unique_path(), unique_path()]

    for path, headers in zip(paths, ([], [bearer("sk-client")]), strict=True):
        assert (await ask(router.port, "POST", path, headers, b"{}")).status == 200

    shown = [worker.only(path).values("authorization") for path in paths]
    assert shown == [["Bearer sk-worker"], ["Bearer sk-client"]]


@pytest.mark.parametrize("name", list(WAYS))
@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(False, id="replaced"),
        pytest.param(True, marks=pytest.mark.heavy, id="kept"),
    ],
)
async def test_checked_credentials_and_a_key_for_workers(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path, name: str, kept: bool
) -> None:
    """The client's own reach a worker only when that was asked for."""
    way = WAYS[name]
    flags = [*way.flags(tmp_path, worker), *(["--keep-client-authorization"] if kept else [])]
    both = start_router(worker.urls, *flags, "--worker-api-key", "sk-worker")
    alone = start_router(worker.urls, *flags)
    credentials = way.good()
    ((header, value),) = credentials
    paths = [unique_path(), unique_path()]

    for router, path in zip((both, alone), paths, strict=True):
        assert (await ask(router.port, "POST", path, credentials, b"{}")).status == 200

    with_key, without = (worker.only(path) for path in paths)
    if not kept:
        assert with_key.values("authorization") == ["Bearer sk-worker"]
        assert not CREDENTIALS & without.names()
        assert value not in [shown for _, shown in with_key.headers]
    else:
        assert with_key.values(header) == without.values(header) == [value]


# --- a service for tokens that misbehaves ---------------------------------------------------------


async def test_token_service_that_hangs(start_router: StartRouter, worker: RawWorker) -> None:
    """503 in time; nobody gets in, and requests with known tokens go on."""

    async def answer(request: Received, stream: Stream) -> None:
        if request.values("authorization") == ["Bearer known"]:
            await validate_all(request, stream)
        else:
            await stream.until_peer_leaves()

    path = worker.on(unique_path(), answer)
    flags = ["--api-key-validation-urls", f"{worker.urls[0]}{path}"]
    router = start_router(worker.urls, *flags, "--api-key-validation-timeout-secs", "1")
    target = unique_path()
    assert (await ask(router.port, "GET", target, [bearer("known")])).status == 200

    started = time.monotonic()
    hanging = asyncio.gather(
        *(ask(router.port, "GET", unique_path(), [bearer(f"t{n}")]) for n in range(20))
    )
    await asyncio.sleep(0)
    known = await ask(router.port, "GET", target, [bearer("known")])
    responses = await hanging

    assert known.status == 200
    assert {response.status for response in responses} == {503}
    assert {openai_error(response)["code"] for response in responses} == {"auth_unavailable"}
    assert time.monotonic() - started < 15


async def validate_all(_request: Received, stream: Stream) -> None:
    await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


async def test_token_service_cannot_name_another_client(
    start_router: StartRouter, worker: RawWorker
) -> None:
    """What it answers beside its status goes nowhere."""
    path = worker.on(
        unique_path(),
        respond(
            b"HTTP/1.1 200 OK\r\nx-router-client: root\r\nx-router-cluster: extproc\r\n"
            b"content-length: 4\r\n\r\nroot"
        ),
    )
    router = start_router(worker.urls, "--api-key-validation-urls", f"{worker.urls[0]}{path}")
    target = unique_path()

    response = await ask(router.port, "POST", target, [bearer("x")], b"{}")

    assert response.status == 200
    assert "root" not in [value for _, value in worker.only(target).headers]


# --- Envoy that has not been told yet ---------------------------------------------------------------


class WithoutFilters(AdsService):
    """Tells an Envoy everything but what stands in the slots of its listener, until it is let."""

    def __init__(self, model: EnvoyModel) -> None:
        super().__init__(build_snapshot(model), Mock(spec=Metrics, xds_nacks=Mock(), envoys=Mock()))
        self.asked = asyncio.Event()
        self.let: Callable[[], None] = lambda: None

    def open(self, call: Call) -> Any:
        stream = super().open(call)
        send = stream.send

        def hold_back(responses: list[DiscoveryResponse]) -> None:
            late = [response for response in responses if response.type_url == EXTENSION_TYPE]
            if late:
                self.let = lambda: (send(late[-1:]), call.flush(), None)[-1]
                self.asked.set()
            send([response for response in responses if response.type_url != EXTENSION_TYPE])

        stream.send = hold_back  # type: ignore[method-assign]
        return stream


async def test_envoy_without_its_filters_lets_nobody_in(worker: RawWorker, tmp_path: Path) -> None:
    """It has listener, routes and workers, but not yet who may come in: it does not even listen."""
    port = free_port()
    (worker_port, *_) = worker.ports
    model = EnvoyModel(
        host="127.0.0.1",
        port=port,
        admin_address=Address("127.0.0.1", free_port()),
        clusters=(
            ClusterView(
                "default", "", (EndpointView(f"127.0.0.1:{worker_port}"),), is_default=True
            ),
        ),
        max_payload_bytes=1000,
        idle_timeout_s=10,
        decision_timeout_s=1,
        access=Access(ApiKeys((ApiKey("team-a", "sk-a"),))),
    )
    service = WithoutFilters(model)
    grpc = Address("127.0.0.1", free_port())
    server = GrpcServer(service.methods(), max_message_bytes=2**20)
    await server.start(grpc)
    config = tmp_path / "envoy.yaml"
    config.write_text(to_yaml(build_bootstrap(grpc, Address("127.0.0.1", free_port()))))
    command = [str(find_envoy("")), "-c", str(config), "--disable-hot-restart"]
    envoy = Program("envoy", [*command, "--log-level", "error"], tmp_path)
    path = unique_path()
    try:
        async with asyncio.timeout(20):
            await service.asked.wait()
        early = [await reachable(port) for _ in range(5)]
        service.let()
        async with asyncio.timeout(20):
            while not await reachable(port):
                pass
        outside = await ask(port, "GET", path)
        inside = await ask(port, "GET", path, [bearer("sk-a")])
    finally:
        envoy.end()
        await server.stop()

    assert not any(early)
    check_refused(outside, "Bearer")
    assert inside.status == 200
    assert len(worker.received(path)) == 1


async def reachable(port: int) -> bool:
    """Tell whether something listens, after giving it a moment."""
    await asyncio.sleep(0.05)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


# --- secrets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["keys", "passwords"])
async def test_secrets_are_shown_nowhere(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path, kind: str
) -> None:
    """Neither in Envoy's dumps, nor in statistics, logs, metrics, the running configuration, or the process list."""
    keys = tmp_path / "keys"
    hashed = base64.b64encode(b"canary-canary-canary").decode()
    if kind == "keys":
        keys.write_text("team-a sk-canary-file\n")
        env = {"VLLM_EXTPROC_API_KEY": "sk-canary-client"}
        flags, good = ["--api-keys-file", str(keys)], bearer("sk-canary-file")
    else:
        keys.write_text(f"joe:{{SHA}}{hashed}\njack:{PASSWORD_HASH}\n")
        env = {}
        flags, good = ["--htpasswd-file", str(keys)], basic("jack", "admin")
    env["VLLM_EXTPROC_WORKER_API_KEY"] = "sk-canary-worker"
    flags += ["--log-level", "debug", "--rate-limit-per-key", "1000", "--policy", "round_robin"]
    router = start_router(worker.urls, *flags, env=env)
    path = unique_path()
    for headers in ([good], [bearer("sk-canary-client")], [bearer("sk-canary-wrong")], []):
        await ask(router.port, "POST", path, headers, b"{}")
    replace(keys, keys.read_text() + "broken sk-canary-file sk-canary-client\n")
    await until(lambda: router.logged("keys of clients refused; those in use stay"), 10, "refused")
    (directory,) = router.temporary.glob("vllm-extproc-*")
    admin = Address(path=str(directory / "envoy-admin.sock"))
    shown = {"log": router.stderr + router.stdout, "metrics": router.metrics().text}
    for page in (
        "/config_dump?include_eds",
        "/config_dump?resource=dynamic_active_secrets",
        "/config_dump?resource=ecds_filters",
        "/stats?usedonly",
        "/stats/prometheus",
        "/clusters?format=json",
        "/listeners?format=json",
        "/runtime",
        "/server_info",
    ):
        answer = await ask_locally(admin, "GET", page, timeout_s=10)
        assert answer is not None
        assert answer[0] == 200
        shown[page] = answer[1].decode()
    local = [("Host", f"127.0.0.1:{router.port}")]
    shown["/config"] = (await ask(router.port, "GET", "/config", local)).body.decode()
    for pid in (router.pid, router.service_pid, router.envoy_pid):
        shown[f"process {pid}"] = command_line(pid)

    assert [r.values("authorization") for r in worker.received(path)] == (
        [["Bearer sk-canary-worker"]] * (2 if kind == "keys" else 1)
    )
    assert "client-auth" in shown["/config_dump?include_eds"]
    canaries = ("sk-canary-client", "sk-canary-file", "sk-canary-worker", hashed, PASSWORD_HASH)
    found = [
        (name, canary) for name, text in shown.items() for canary in canaries if canary in text
    ]
    assert found == []


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_static_configuration_says_that_it_holds_secrets(tmp_path: Path) -> None:
    """It must hold them to work; whoever prints it is told."""
    keys = file_with(tmp_path, "keys", "team-a sk-a\n")
    command = [sys.executable, "-m", "extproc", "envoy-config", "--static", "--api-keys-file", keys]

    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(40):
        out, err = await process.communicate()

    assert process.returncode == 0
    assert b"sk-a" in out
    assert b"holds keys in plain text" in err
    assert b"sk-a" not in err


async def test_key_for_workers_comes_and_changes_without_a_failure(
    start_router: StartRouter, worker: RawWorker, tmp_path: Path
) -> None:
    """Requests go on while Envoy is told of the filter and of its secret, one after the other."""
    options = tmp_path / "router.yaml"
    options.write_text("policy: round_robin\n")
    router = start_router(worker.urls, "--config", str(options))
    before = await listener_stats(router)
    path = unique_path()
    found: list[int] = []

    async def until_shown(key: str) -> None:
        async with asyncio.timeout(RELOAD_LIMIT_S), Connection(router.port) as connection:
            shown: list[str] = []
            while shown != [f"Bearer {key}"]:
                found.append((await connection.ask("GET", path)).status)
                shown = worker.received(path)[-1].values("authorization")

    for key in ("sk-one", "sk-two"):
        replace(options, f"policy: round_robin\nworker_api_key: {key}\n")
        await until_shown(key)

    assert set(found) == {200}
    assert await listener_stats(router) == before


async def test_static_configuration_asks_the_same(worker: RawWorker, tmp_path: Path) -> None:
    """An Envoy of one's own that gets everything from a file: keys, rates, and the key for workers."""
    port = free_port()
    keys = file_with(tmp_path, "keys", "team-a sk-a\n")
    flags = [
        *("--port", str(port), "--prometheus-port", "0"),
        *("--grpc-address", f"127.0.0.1:{free_port()}"),
        *("--admin-address", f"127.0.0.1:{free_port()}"),
        *("--worker-urls", worker.urls[0], "--api-keys-file", keys, "--worker-api-key", "sk-w"),
        *("--rate-limit-per-key", "0.001", "--rate-limit-burst", "2"),
        *("--cors-allowed-origins", "https://chat.example"),
    ]
    admin = ["--envoy-admin-address", f"127.0.0.1:{free_port()}"]
    program = [sys.executable, "-m", "extproc"]
    printed = Program("config", [*program, "envoy-config", "--static", *flags, *admin], tmp_path)
    assert printed.wait(60) == 0
    config = file_with(tmp_path, "envoy.yaml", printed.stdout)
    service = Program("serve", [*program, "serve", *flags], tmp_path)
    command = [str(find_envoy("")), "-c", config, "--disable-hot-restart", "--log-level", "error"]
    envoy = Program("envoy", command, tmp_path)
    path = unique_path()
    origin = ("Origin", "https://chat.example")
    try:
        async with asyncio.timeout(40):
            while not await reachable(port):
                assert envoy.running, envoy.describe()
        outside = await ask(port, "GET", path, [origin])
        inside = [await ask(port, "GET", path, [bearer("sk-a")]) for _ in range(3)]
    finally:
        envoy.end()
        service.end()
        printed.end()

    check_refused(outside, "Bearer")
    assert outside.values("access-control-allow-origin") == [origin[1]]
    assert [response.status for response in inside] == [200, 200, 429]
    shown = [request.values("authorization") for request in worker.received(path)]
    assert shown == [["Bearer sk-w"]] * 2
    assert worker.received(path)[0].values(CLIENT) == ["team-a"]
