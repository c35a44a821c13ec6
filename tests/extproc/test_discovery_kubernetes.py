"""Following Pods through real sockets: a small API server that says whatever a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from structlog.testing import capture_logs

from extproc.config import Config
from extproc.discovery import kubernetes, pod_watch
from extproc.discovery.kubernetes_failures import explain, is_hopeless, result_of
from extproc.discovery.pod_watch import RefusedError, Sync
from extproc.discovery.updates import Add, Remove, Reset, WorkerSpec
from extproc.errors import ConfigError

pytestmark = pytest.mark.slow

LIMIT_S = 10.0
PATH = "/api/v1/namespaces/ns/pods"


def pod(name: str, ip: str = "10.0.0.1", version: int = 1, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            **metadata,
        },
        "spec": {"nodeName": "n"},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def event(kind: str, value: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": value}).encode() + b"\n"


class Api:
    """The API server: what it lists, what its watches say, and what it was asked."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.version = 10
        self.asked: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.refusals: list[web.Response] = []
        """Answered to the next requests for Pods instead of what they ask for."""

        self.watch_refusals: list[web.Response] = []
        """The same for watches alone."""

        self.more = asyncio.Event()
        """Whether the second page of a list is answered."""

        self.more.set()
        self.watches: list[asyncio.Queue[bytes | None]] = []
        self.node: Callable[[], web.Response] = lambda: web.json_response({}, status=403)
        self.nodes_asked: list[str] = []
        self.page_size = 1000
        self.port = 0

    async def serve(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get(PATH, self._pods)
        app.router.add_get("/api/v1/nodes/{name}", self._node)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    async def _node(self, request: web.Request) -> web.Response:
        self.nodes_asked.append(request.match_info["name"])
        return self.node()

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.refusals:
            return self.refusals.pop(0)
        if "watch" in request.query and self.watch_refusals:
            return self.watch_refusals.pop(0)
        if "continue" in request.query:
            await self.more.wait()
        if "watch" not in request.query:
            begin = int(request.query.get("continue", "0"))
            end = begin + self.page_size
            more = str(end) if end < len(self.pods) else ""
            metadata = {"resourceVersion": str(self.version), "continue": more}
            return web.json_response({"metadata": metadata, "items": self.pods[begin:end]})
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.watches.append(queue)
        while (chunk := await queue.get()) is not None:
            await response.write(chunk)
        return response

    def say(self, *chunks: bytes | None) -> None:
        """Let the latest watch say this, and end with None."""
        for chunk in chunks:
            self.watches[-1].put_nowait(chunk)

    def lists(self) -> int:
        return sum("watch" not in query for query in self.asked)

    async def until(self, condition: Callable[[], Any], _what: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110  many conditions, one way to wait
                await asyncio.sleep(0.005)

    async def watched(self, count: int) -> None:
        await self.until(lambda: len(self.watches) >= count, f"{count} watches")


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = Api()
    runner = await api.serve()
    yield api
    for queue in api.watches:
        queue.put_nowait(None)
    await runner.cleanup()


@pytest.fixture
def options(api: Api, tmp_path: Path) -> Config:
    """Return the options of a router before that server."""
    return make_options(api, tmp_path / "kubeconfig")


def make_options(
    api: Api,
    path: Path,
    token: str = "first",  # noqa: S107
    user: dict[str, Any] | None = None,
    **more: Any,
) -> Config:
    document = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api.port}"}}],
        "users": [{"name": "u", "user": user or {"token": token}}],
    }
    path.write_text(yaml.safe_dump(document))
    return Config(
        service_discovery=True,
        selector=("app=vllm",),
        service_discovery_namespace="ns",
        kubeconfig=str(path),
        **more,
    )


class Followed:
    """What a router makes of it."""

    def __init__(self, options: Config, known: tuple[WorkerSpec, ...] = ()) -> None:
        self.sync = Sync()
        self.updates: list[Any] = []
        self.reports: list[tuple[str, str]] = []
        self.workers: dict[str, WorkerSpec] = {spec.key: spec for spec in known}
        self.error: Exception | None = None
        self._source = kubernetes.watch(
            options,
            known=lambda: known,
            sync=self.sync,
            report=lambda *report: self.reports.append(report),
            report_pod=lambda *report: self.reports.append(report),
            clock=lambda: 1000.0,
        )

    async def run(self) -> None:
        try:
            async for update in self._source:
                self.updates.append(update)
                match update:
                    case Reset(workers):
                        self.workers = {spec.key: spec for spec in workers}
                    case Add(worker):
                        self.workers[worker.key] = worker
                    case Remove(key):
                        self.workers.pop(key, None)
        except ConfigError as error:
            self.error = error

    def reasons(self) -> list[str]:
        """Return why the selector could not be followed; empty: it could again."""
        return [reason for what, reason in self.reports if what == "--selector"]

    def pods(self) -> set[str]:
        return {dict(spec.labels)["pod"] for spec in self.workers.values()}

    async def until_pods(self, *names: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not self.updates or self.pods() != set(names):  # noqa: ASYNC110  as above
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def following(options: Config, known: tuple[WorkerSpec, ...] = ()) -> AsyncIterator[Followed]:
    followed = Followed(options, known)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(followed.run())
        yield followed
        task.cancel()


async def test_pods_are_listed_page_by_page_and_watched(api: Api, options: Config) -> None:
    """Nothing is said before the list is complete; then each change, alone or together."""
    api.pods = [pod(f"p{n}", f"10.0.0.{n}") for n in range(1, 6)]
    api.page_size = 2
    async with following(options) as followed:
        await followed.until_pods("p1", "p2", "p3", "p4", "p5")
        await api.watched(1)
        api.say(event("ADDED", pod("new", "10.0.1.1", 11)))
        await followed.until_pods("p1", "p2", "p3", "p4", "p5", "new")
        api.say(event("DELETED", pod("p1", "10.0.0.1", 12)))
        await followed.until_pods("p2", "p3", "p4", "p5", "new")
        whole = event("ADDED", pod("late", "10.0.1.2", 13)) + event(
            "ADDED", pod("later", "10.0.1.3", 14)
        )
        api.say(whole[:100], whole[100:250], whole[250:])
        await followed.until_pods("p2", "p3", "p4", "p5", "new", "late", "later")

        assert [type(update) for update in followed.updates[:3]] == [Reset, Add, Remove]
        assert [query.get("continue") for query in api.asked[:3]] == [None, "2", "4"]
        assert all(query["labelSelector"] == "app=vllm" for query in api.asked)
        assert api.asked[3] | {"timeoutSeconds": ""} == {
            "labelSelector": "app=vllm",
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": "10",
            "timeoutSeconds": "",
        }
        assert set(api.tokens) == {"Bearer first"}
        assert followed.sync.failing == set()
        assert followed.sync.in_touch_at == 1000.0


async def test_no_pods_is_a_word_too(options: Config) -> None:
    """Whoever waits for the first word must not wait for the first Pod."""
    async with following(options) as followed:
        await followed.until_pods()
        assert followed.updates == [Reset(())]


async def test_a_watch_that_ends_goes_on_where_it_was(
    api: Api, options: Config, monkeypatch
) -> None:
    """Bookmarks count; nothing is listed again."""
    monkeypatch.setattr(pod_watch, "SHORT_WATCH_S", 0.0)
    async with following(options) as followed:
        await api.watched(1)
        bookmark = {"kind": "Pod", "metadata": {"resourceVersion": "77", "creationTimestamp": None}}
        api.say(event("BOOKMARK", bookmark), None)
        await api.watched(2)
        assert api.asked[-1]["resourceVersion"] == "77"
        assert api.lists() == 1
        await api.until(lambda: followed.sync.requests["watch", "ok"] == 1, "counted")


@pytest.mark.parametrize("way", ["status", "event"])
async def test_gone_is_no_failure(api: Api, options: Config, way: str) -> None:
    """The Pods are listed at once, what was missed is made good, and nobody is alarmed."""
    api.pods = [pod("a"), pod("b", "10.0.0.2")]
    async with following(options) as followed:
        await followed.until_pods("a", "b")
        await api.watched(1)
        api.pods, api.version = [pod("b", "10.0.0.2"), pod("c", "10.0.0.3")], 50
        gone = {"kind": "Status", "code": 410, "reason": "Expired"}
        if way == "status":
            api.refusals = [web.json_response(gone, status=410)]
            api.say(event("BOOKMARK", pod("x", version=11)), None)
        else:
            api.say(event("ERROR", gone))
        await followed.until_pods("b", "c")
        await api.watched(2)
        assert api.asked[-1]["resourceVersion"] == "50"
        assert followed.sync.requests["watch", "gone"] == 1
        assert not any("gone" in reason or "410" in reason for _, reason in followed.reports)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"<html>\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "ADDED", "object": null}\n',
        b'{"type": "ADDED", "object": {"metadata": {"name": 5}}}\n',
        b"\xff\xfe\n",
        event("ADDED", pod("x", uid="")),
        event("ERROR", {"code": 500, "message": "etcd is not well"}),
    ],
)
async def test_a_stream_that_makes_no_sense(api: Api, options: Config, nonsense: bytes) -> None:
    """The workers stay; the reason is told when it happens again and again, until a watch works."""
    api.pods = [pod("a")]
    async with following(options) as followed:
        await followed.until_pods("a")
        for count in range(1, pod_watch.TELL_AFTER + 1):
            await api.watched(count)
            assert followed.reasons() == []
            api.say(nonsense)
        await api.watched(pod_watch.TELL_AFTER + 1)
        assert followed.pods() == {"a"}
        assert followed.sync.failing == {0}
        assert followed.sync.requests["watch", "failed"] == pod_watch.TELL_AFTER
        (reason,) = followed.reasons()
        assert reason.startswith("cannot watch pods in namespace 'ns': ")
        api.say(event("ADDED", pod("b", "10.0.0.2", 11)))
        await api.until(lambda: ("--selector", "") in followed.reports, "all is well again")


@pytest.mark.parametrize("status", [429, 500, 502])
async def test_lists_that_fail(api: Api, options: Config, status: int) -> None:
    """They are tried again; a proxy may answer with a page, or with half a list."""
    api.pods = [pod("a")]
    page = web.Response(status=status, text="<html>", headers={"Retry-After": "0"})
    half = web.Response(status=200, text='{"metadata": {"resourceVersion": "5"}, "items": [{"meta')
    api.refusals = [page, half]
    async with following(options) as followed:
        await followed.until_pods("a")
        assert followed.sync.requests["list", "failed"] == 2
        assert api.lists() == 3


async def test_denied_at_the_start(api: Api, options: Config) -> None:
    """There is no hope: the source ends, and says why."""
    status = {"message": "pods is forbidden", "reason": "Forbidden"}
    api.refusals = [web.json_response(status, status=403)]
    followed = Followed(options)

    async with asyncio.timeout(LIMIT_S):
        await followed.run()

    assert "not allowed to list pods in namespace 'ns': pods is forbidden (403)" in str(
        followed.error
    )


async def test_denied_at_the_start_to_watch_alone(api: Api, options: Config) -> None:
    """That, too, is how a role is forgotten."""
    api.watch_refusals = [web.json_response({"message": "no watch"}, status=403)]
    followed = Followed(options)

    async with asyncio.timeout(LIMIT_S):
        await followed.run()

    assert "not allowed to watch pods in namespace 'ns': no watch (403)" in str(followed.error)


@pytest.mark.parametrize("status", [429, 500])
async def test_denied_after_another_failure(api: Api, options: Config, status: int) -> None:
    """A server that starts denies for a while, and the router may long serve other workers."""
    api.pods = [pod("a")]
    api.refusals = [
        web.Response(status=status),
        *(web.json_response({"message": "not yet"}, status=code) for code in (401, 403)),
    ]
    async with following(options) as followed:
        await followed.until_pods("a")
        assert followed.error is None
        assert followed.sync.requests["list", "denied"] == 2
        assert any("not yet (401)" in reason for reason in followed.reasons())


async def test_denied_later_to_watch_alone(
    api: Api, options: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told until it is allowed again; lists change nothing about that."""
    monkeypatch.setattr(pod_watch, "SHORT_WATCH_S", 0.0)
    api.pods = [pod("a")]
    async with following(options) as followed:
        await followed.until_pods("a")
        await api.watched(1)
        api.watch_refusals = [
            web.json_response({"message": "no watch"}, status=403) for _ in range(3)
        ]
        api.say(None)
        await api.until(lambda: followed.sync.failing == {0}, "noticed")
        await api.watched(2)
        await api.until(lambda: followed.sync.failing == set(), "well again")
        assert [reason[:24] for reason in followed.reasons()] == ["not allowed to watch pod", ""]
        assert followed.sync.requests["watch", "denied"] == 3
        assert followed.pods() == {"a"}
        assert api.lists() == 1


async def test_denied_with_workers_of_an_earlier_run(
    api: Api, options: Config, tmp_path: Path
) -> None:
    """They stay, and the token is read anew each time."""
    api.pods = [pod("a")]
    async with following(options) as first:
        await first.until_pods("a")
    known = tuple(first.workers.values())
    api.refusals = [web.json_response({"message": "who?"}, status=401) for _ in range(2)]
    async with following(options, known) as followed:
        await api.until(lambda: followed.sync.requests["list", "denied"] == 1, "denied")
        make_options(api, tmp_path / "kubeconfig", "second")
        assert followed.updates == []
        assert followed.pods() == {"a"}
        await followed.until_pods("a")
        assert followed.updates == [Reset(known)]
        assert api.tokens[-1] == "Bearer second"


async def test_a_server_that_is_away_and_comes_back(api: Api, tmp_path: Path) -> None:
    """Nothing changes until it is there; then the watch is taken up where it was."""
    other = Api()
    other.pods = [pod("a")]
    first = await other.serve()
    async with following(make_options(other, tmp_path / "other")) as followed:
        await followed.until_pods("a")
        await other.watched(1)
        other.say(None)
        await first.cleanup()
        await api.until(lambda: followed.sync.failing == {0}, "noticed")
        assert followed.pods() == {"a"}
        second = await other.serve()
        await other.watched(2)
        other.say(event("ADDED", pod("b", "10.0.0.2", 11)))
        await followed.until_pods("a", "b")
        await api.until(lambda: followed.sync.failing == set(), "well again")
        assert other.lists() == 1
        for queue in other.watches:
            queue.put_nowait(None)
    await second.cleanup()


async def test_a_watch_that_hangs_is_given_up(api: Api, tmp_path: Path, monkeypatch) -> None:
    """The server was to end it, and did not."""
    monkeypatch.setattr(kubernetes, "STALL_S", 0.2)
    monkeypatch.setattr(pod_watch, "SLOW_FAILURE_S", 1.0)
    options = make_options(api, tmp_path / "kubeconfig", service_discovery_watch_timeout_secs=1)
    async with following(options) as followed:
        await api.watched(2)
        await api.until(lambda: followed.sync.requests["watch", "stalled"] == 1, "stalled")
        assert (
            "--selector",
            "cannot watch pods in namespace 'ns': the connection has stalled",
        ) in (followed.reports)
        assert api.lists() == 1


async def test_zones_of_nodes(api: Api, options: Config) -> None:
    """They are asked once; one that cannot be asked now is asked later."""
    labels = {"metadata": {"labels": {"topology.kubernetes.io/zone": "z1"}}}
    answers = [web.json_response(labels)]
    api.node = lambda: answers.pop(0)
    api.pods = [pod("a"), pod("b", "10.0.0.2")]
    async with following(options) as followed:
        await api.until(
            lambda: [dict(s.labels).get("zone") for s in followed.workers.values()] == ["z1", "z1"],
            "zones",
        )
        assert followed.sync.requests["get", "ok"] == 1


async def test_a_node_that_cannot_be_read_holds_up_no_other(
    api: Api, options: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, and asked again later."""
    monkeypatch.setattr(kubernetes, "NODE_RETRY_S", 0.05)
    zone = {"metadata": {"labels": {"topology.kubernetes.io/zone": "z"}}}
    api.node = lambda: (
        web.Response(status=500) if api.nodes_asked[-1] == "bad" else web.json_response(zone)
    )
    api.pods = [pod("a"), pod("b", "10.0.0.2")]
    api.pods[0]["spec"]["nodeName"] = "bad"
    async with following(options) as followed:
        await api.until(lambda: api.nodes_asked.count("bad") == 2, "asked again")
        assert api.nodes_asked.count("n") == 1
        zones = {spec.url.host: dict(spec.labels).get("zone") for spec in followed.workers.values()}
        assert zones == {"10.0.0.1": None, "10.0.0.2": "z"}
        assert ("nodes", "node 'bad': status 500") in followed.reports


async def test_a_node_without_a_zone_is_not_asked_at_each_list(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster without zones that would be all nodes, again and again."""
    monkeypatch.setattr(kubernetes, "STALL_S", 0.1)
    api.node = lambda: web.json_response({"metadata": {}})
    api.pods = [pod("a")]
    options = make_options(
        api, tmp_path / "kubeconfig", service_discovery_list_interval_secs=1,
        service_discovery_watch_timeout_secs=1,
    )  # fmt: skip
    async with following(options):
        await api.until(lambda: api.nodes_asked, "asked")
        await api.until(lambda: api.lists() == 2, "listed again")
        await api.watched(2)
        assert api.nodes_asked == ["n"]


async def test_a_watch_that_is_ended_at_once_is_a_failure(api: Api, options: Config) -> None:
    """It is counted and told as one, though the server calls it a success."""
    async with following(options) as followed:
        for count in range(1, pod_watch.TELL_AFTER + 1):
            await api.watched(count)
            api.say(None)
        await api.watched(pod_watch.TELL_AFTER + 1)
        assert followed.sync.failing == {0}
        assert followed.sync.requests["watch", "failed"] == pod_watch.TELL_AFTER
        assert followed.sync.requests["watch", "ok"] == 0
        (reason,) = followed.reasons()
        assert reason.endswith("the server ends a watch as soon as it has begun")
        assert api.lists() == 1


async def test_pages_of_a_list_are_told_as_they_come(api: Api, tmp_path: Path) -> None:
    """No watch runs meanwhile, and a page may take long."""
    api.pods = [pod("a")]
    options = make_options(
        api, tmp_path / "kubeconfig", service_discovery_list_interval_secs=1,
        service_discovery_watch_timeout_secs=1,
    )  # fmt: skip
    async with following(options) as followed:
        await followed.until_pods("a")
        api.pods, api.page_size = [pod("b", "10.0.0.2", 11), pod("c", "10.0.0.3", 12)], 1
        api.more.clear()
        await api.watched(1)
        await asyncio.sleep(1)
        api.say(None)
        await followed.until_pods("a", "b")
        api.more.set()
        await followed.until_pods("b", "c")


async def test_a_watch_is_closed_before_what_follows_it(
    options: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when what it says makes no sense."""
    steps = []

    async def watch(*_arguments: object):
        steps.append("watch")
        try:
            yield [b"nonsense"]
        finally:
            steps.append("closed")

    async def list_page(*_arguments: object) -> bytes:
        steps.append("list")
        return b'{"metadata": {"resourceVersion": "1"}}'

    monkeypatch.setattr(kubernetes._Api, "watch", watch)
    monkeypatch.setattr(kubernetes._Api, "list_page", list_page)
    async with following(options), asyncio.timeout(LIMIT_S):
        while len(steps) < 6:  # noqa: ASYNC110  as above
            await asyncio.sleep(0.005)

    assert steps[:6] == ["list", "watch", "closed"] * 2


# --- credentials, and what nobody has thought of


@pytest.mark.parametrize("where", ["token", "tokenFile"])
async def test_white_space_around_a_token_is_taken_off(
    api: Api, tmp_path: Path, where: str
) -> None:
    """Editors and agents end a file with a newline, which cannot be sent."""
    api.pods = [pod("a")]
    (tmp_path / "token").write_text(" first\n")
    user = {"token": " first\n"} if where == "token" else {"tokenFile": str(tmp_path / "token")}
    async with following(make_options(api, tmp_path / "kubeconfig", user=user)) as followed:
        await followed.until_pods("a")
        assert set(api.tokens) == {"Bearer first"}


async def test_a_token_that_cannot_be_read_for_a_while(
    api: Api, options: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes the file may empty it first: the workers stay, and it is tried again."""
    broken = False
    make_client = kubernetes.make_client

    def refresh(_configuration: object) -> None:
        if broken:
            raise Exception("Token file exists but empty.")  # noqa: TRY002  as the client does

    async def made(path: str):
        client = await make_client(path)
        client.configuration.refresh_api_key_hook = refresh
        return client

    monkeypatch.setattr(kubernetes, "make_client", made)
    monkeypatch.setattr(pod_watch, "SHORT_WATCH_S", 0.0)
    api.pods = [pod("a")]
    with capture_logs() as logs:
        async with following(options) as followed:
            await followed.until_pods("a")
            await api.watched(1)
            broken = True
            api.say(None)
            await api.until(lambda: followed.sync.failing == {0}, "noticed")
            assert followed.pods() == {"a"}
            broken = False
            await api.watched(2)
            assert followed.error is None
            assert "the token cannot be read" in followed.reasons()[0]
    assert logs == []


async def test_what_nobody_has_foreseen_ends_nothing(
    api: Api, options: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged once with its traceback, counted, and tried again with pauses."""
    parse_page, left = kubernetes.parse_page, [KeyError("x") for _ in range(4)]

    def parse(body: bytes):
        if left:
            raise left.pop()
        return parse_page(body)

    monkeypatch.setattr(kubernetes, "parse_page", parse)
    api.pods = [pod("a")]
    with capture_logs() as logs:
        async with following(options) as followed:
            await followed.until_pods("a")
            assert followed.sync.requests["list", "failed"] == 4
            assert followed.reasons()[0] == "cannot list pods in namespace 'ns': KeyError: 'x'"
    (entry,) = logs
    assert entry["log_level"] == "error"
    assert isinstance(entry["exc_info"], KeyError)


async def test_what_nobody_has_foreseen_of_a_node_ends_nothing(
    api: Api, options: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same."""
    monkeypatch.setattr(kubernetes, "NODE_RETRY_S", 0.05)

    async def zone_of(*_arguments: object) -> str:
        raise KeyError("x")

    monkeypatch.setattr(kubernetes._Api, "zone_of", zone_of)
    api.pods = [pod("a")]
    with capture_logs() as logs:
        async with following(options) as followed:
            await api.until(lambda: followed.sync.requests["get", "failed"] == 3, "asked again")
            await followed.until_pods("a")
    assert len(logs) == 1


def plugin(command: str) -> dict[str, Any]:
    exec_ = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh"}
    return {"exec": exec_ | {"args": ["-c", command]}}


@pytest.mark.parametrize("command", ["exit 3", "echo '{}'", "echo secret"])
async def test_an_exec_plugin_that_fails_is_told_as_such(
    api: Api, tmp_path: Path, command: str
) -> None:
    """The client would go on as nobody."""
    options = make_options(api, tmp_path / "kubeconfig", user=plugin(command))
    followed = Followed(options)

    async with asyncio.timeout(LIMIT_S):
        await followed.run()

    assert str(followed.error).startswith(
        f"--kubeconfig: {tmp_path / 'kubeconfig'} cannot be used: the exec plugin"
    )
    assert "secret" not in str(followed.error)
    assert api.asked == []


async def test_a_kubeconfig_without_credentials_is_no_failure(api: Api, tmp_path: Path) -> None:
    """As behind `kubectl proxy`."""
    api.pods = [pod("a")]
    options = make_options(api, tmp_path / "kubeconfig", user={"as": "someone"})
    async with following(options) as followed:
        await followed.until_pods("a")


async def test_an_exec_plugin_that_hangs_is_told(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another is not begun meanwhile; what it says in the end counts."""
    monkeypatch.setattr(kubernetes, "CREDENTIALS_S", 0.1)
    begun, go = tmp_path / "begun", tmp_path / "go"
    answer = json.dumps(
        {
            "apiVersion": "client.authentication.k8s.io/v1",
            "kind": "ExecCredential",
            "status": {"token": "of-plugin"},
        }
    )
    command = (
        f"echo x >> {begun}; while ! test -e {go}; do sleep 0.05; done; echo {shlex.quote(answer)}"
    )
    api.pods = [pod("a")]
    options = make_options(api, tmp_path / "kubeconfig", user=plugin(command))
    async with following(options) as followed:
        await api.until(followed.reasons, "told")
        assert "was not read in time; its exec plugin may hang" in followed.reasons()[0]
        assert followed.sync.requests["list", "failed"] == pod_watch.TELL_AFTER
        go.touch()
        await followed.until_pods("a")
        assert set(api.tokens) == {"Bearer of-plugin"}
        assert begun.read_text() in ("x\n", "x\n" * 2)  # the second for the nodes


async def test_a_refusal_without_end_is_not_read_whole(
    api: Api, options: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may send anything."""

    class Endless(web.StreamResponse):
        async def prepare(self, request: web.BaseRequest):
            writer = await super().prepare(request)
            with contextlib.suppress(OSError):
                while True:
                    await self.write(b"x" * 4096)
            return writer

    monkeypatch.setattr(kubernetes, "ANSWER_S", 5.0)
    api.pods = [pod("a")]
    api.refusals = [Endless(status=502)]  # type: ignore[list-item]
    async with following(options) as followed, asyncio.timeout(2):
        await followed.until_pods("a")


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_server_that_cannot_be_connected_to_is_no_stalled_watch(
    options: Config, verb: str
) -> None:
    """Its error is one of time, too."""
    error = aiohttp.ConnectionTimeoutError("to somewhere")

    assert result_of(error, verb) == "failed"
    assert explain(error, verb, options).endswith("no connection to the API server in time")


@pytest.mark.parametrize(
    ("code", "hopeless"),
    [(400, True), (401, True), (403, True), (404, True), (408, False), (410, False), (429, False), (503, False)],
)  # fmt: skip
async def test_a_busy_server_is_no_mistake_of_the_options(
    api: Api, options: Config, code: int, hopeless: bool
) -> None:
    """`check` fails only when the router could not work either."""
    api.refusals = [web.json_response({"message": "no"}, status=code)]

    with pytest.raises(ConfigError if hopeless else OSError, match="pods in namespace 'ns': "):
        await kubernetes.look_once(options)

    assert is_hopeless(RefusedError(code, "")) is hopeless


async def test_complaints_about_pods_are_told_once(api: Api, options: Config) -> None:
    """Each event of the Pod would repeat it else."""
    wrong = {"vllm-extproc.io/port": "x"}
    api.pods = [pod("a", annotations=wrong)]
    async with following(options) as followed:
        await api.watched(1)
        api.say(event("MODIFIED", pod("a", version=11, annotations=wrong)))
        api.say(event("ADDED", pod("b", "10.0.0.2", version=12)))
        await followed.until_pods("a", "b")
        assert [what for what, _ in followed.reports if "/" in what] == ["ns/a"]


async def test_the_pods_can_be_looked_at_once(api: Api, options: Config) -> None:
    """For `check`: counts, or the reason."""
    api.pods, api.page_size = [pod("a"), pod("b", deletionTimestamp="x"), pod("c", "10.0.0.3")], 1
    counts = await kubernetes.look_once(options)
    api.refusals = [web.json_response({"message": "no"}, status=403)]
    with pytest.raises(ConfigError, match="not allowed to list pods in namespace 'ns': no"):
        await kubernetes.look_once(options)
    api.refusals = [web.Response(status=200, text="<html>")]
    with pytest.raises(OSError, match="cannot list pods in namespace 'ns'"):
        await kubernetes.look_once(options)

    assert counts == {"worker": 2, "ending": 1}


async def test_closing_the_source_ends_its_tasks(options: Config) -> None:
    """Nobody goes on asking."""
    source = kubernetes.watch(
        options, sync=Sync(), report=lambda *_: None, report_pod=lambda *_: None, clock=lambda: 0.0
    )
    await anext(source)
    before = len(asyncio.all_tasks())
    await source.aclose()

    assert before > len(asyncio.all_tasks())
