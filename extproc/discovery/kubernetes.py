"""Workers that are Pods of Kubernetes: the requests to its API server; see ``pods`` and ``pod_watch``.

The official client knows how to reach the server and as whom, in the cluster and outside. Its models are not
used: to make them of two thousand Pods would stop every request for seconds. Answers are decoded here into
the few fields that are needed.

A server that is away, or does not let the router in any more, takes no worker away. Only a router that knows
no Pod and is denied at the very start ends, since it would wait in vain for someone to notice.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from extproc.discovery.dns import Reasons
from extproc.discovery.kubernetes_client import make_client
from extproc.discovery.pod_watch import (
    DENIED,
    GONE,
    Follower,
    Lines,
    List,
    PodWorkers,
    Put,
    RefusedError,
    Replace,
    Sync,
    UnreadableError,
    Wait,
    Watch,
    parse_page,
    parse_refusal,
)
from extproc.discovery.pods import ZONE_LABEL, Pod, PodState
from extproc.discovery.updates import Reset, Update, WorkerSpec, WorkerType
from extproc.errors import ConfigError
from extproc.kubernetes_options import KubernetesOptions

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient

PAGE_PODS = 500
"""As the client of Kubernetes in Go: some 5 MB, which are read in 3 ms."""
CONNECT_S = 5.0
ANSWER_S = 30.0
STALL_S = 5.0
"""How long after its time a watch that the server has not ended counts as stalled."""

GATHER_S = 0.02
"""Between two updates, at least: a thousand Pods may become ready in one moment."""

PODS_AT_ONCE = 50
"""Pods that are looked at before others have their turn: about two milliseconds."""

NODE_RETRY_S = 5.0

Report = Callable[[str, str], None]
"""Takes what it is about and the reason; an empty one: all is well again."""


class _Node(msgspec.Struct):
    class _Metadata(msgspec.Struct):
        labels: dict[str, str] | None = None

    metadata: _Metadata


class _Api:
    """The API server, through the official client."""

    def __init__(self, options: KubernetesOptions) -> None:
        self._kubeconfig = options.kubeconfig
        namespace = options.service_discovery_namespace
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        self._client: ApiClient | None = None

    async def connect(self) -> ApiClient:
        """Read how to reach the server. ``ConfigError`` says what is wrong."""
        if self._client is None:
            self._client = await make_client(self._kubeconfig)
        return self._client

    async def close(self) -> None:
        """Close the connections; the next request reads anew how to reach the server, and as whom."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def list_page(self, selector: str, token: str) -> bytes:
        """Return a page of Pods."""
        query = {"labelSelector": selector, "limit": str(PAGE_PODS)}
        if token:
            query["continue"] = token
        response = await self._get(self._pods_path, query, ANSWER_S)
        return await response.read()

    async def watch(self, selector: str, action: Watch) -> AsyncIterator[list[bytes]]:
        """Yield lines as they come, until the server ends the watch."""
        query = {
            "labelSelector": selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": action.version,
            "timeoutSeconds": str(action.timeout_s),
        }
        response = await self._get(self._pods_path, query, action.timeout_s + STALL_S)
        try:
            lines = Lines()
            yield []  # it has begun
            async for chunk in response.content.iter_any():
                yield lines.feed(chunk)
        finally:
            response.close()

    async def zone_of(self, node: str) -> str:
        """Return the zone of a node; empty when it has none, or is gone."""
        try:
            response = await self._get(f"/api/v1/nodes/{node}", {}, ANSWER_S)
        except RefusedError as error:
            if error.code == 404:
                return ""
            raise
        try:
            found = msgspec.json.decode(await response.read(), type=_Node)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableError(f"a node makes no sense: {error}") from error
        return (found.metadata.labels or {}).get(ZONE_LABEL, "")

    async def _get(
        self, path: str, query: Mapping[str, str], limit_s: float
    ) -> aiohttp.ClientResponse:
        """Begin to read an answer of 200; ``RefusedError`` when it is another. *limit_s*: for all of it."""
        client = await self.connect()
        # In the cluster the network is faster than taking the answer apart.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        method, url, headers, _, _ = await client.param_serialize(
            method="GET",
            resource_path=path,
            query_params=list(query.items()),
            header_params=headers,
            auth_settings=["BearerToken"],
        )
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        answer = await client.rest_client.request(method, url, headers, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        if response.status != 200:
            retry_after = response.headers.get("Retry-After", "")
            raise parse_refusal(response.status, await response.read(), retry_after)
        return response


class _Source:
    """What the tasks of one ``watch`` share."""

    def __init__(
        self,
        options: KubernetesOptions,
        known: Iterable[WorkerSpec],
        *,
        sync: Sync,
        report: Report,
        report_pod: Report,
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._sync = sync
        self._report = report
        self._report_pod = report_pod
        self._clock = clock
        self._selectors = options.selectors()
        known = tuple(known)
        self.pods = PodWorkers([role for role, _ in self._selectors], options.pod_defaults(), known)
        self._unlisted = set(range(len(self._selectors)))
        self._may_end = not known
        self.changed = asyncio.Event()
        self._nodes_wanted = asyncio.Event()
        self._complaints: set[tuple[str, str]] = set()
        sync.failing = set(self._unlisted)
        sync.states = lambda: self.pods.states

    @property
    def listed(self) -> bool:
        """Whether the Pods of every selector are known."""
        return not self._unlisted

    async def follow(self, index: int) -> None:
        """List and watch the Pods of one selector for ever. ``ConfigError`` when that is hopeless."""
        loop = asyncio.get_running_loop()
        role, selector = self._selectors[index]
        follower = Follower(
            list_interval_s=self._options.service_discovery_list_interval_secs,
            watch_timeout_s=self._options.service_discovery_watch_timeout_secs,
            rng=random.Random(),
        )
        reasons = Reasons(functools.partial(self._report, _option(role)))
        api = _Api(self._options)
        may_end = self._may_end
        if may_end:
            await api.connect()
        try:
            while True:
                action = follower.next(loop.time())
                if isinstance(action, Wait):
                    await asyncio.sleep(action.seconds)
                    continue
                verb = "list" if isinstance(action, List) else "watch"
                result = "ok"
                try:
                    if isinstance(action, List):
                        await self._list(index, api, follower, action)
                    else:
                        async for lines in api.watch(selector, action):
                            may_end = False
                            follower.on_begun(loop.time())
                            await self._take(index, follower, lines)
                            self._note(index, follower, reasons)
                        follower.on_end(loop.time())
                except (
                    *(RefusedError, UnreadableError, ConfigError),
                    *(aiohttp.ClientError, OSError, TimeoutError),
                ) as error:
                    follower.on_failure(error, loop.time())
                    result = _result(error, verb)
                    reason = _explain(error, verb, self._options)
                    if result == "denied" and may_end:
                        raise ConfigError(f"--service-discovery: {reason}") from error
                    if result != "gone":
                        reasons.tell(reason)
                    if result in (
                        "denied",
                        "failed",
                    ):  # another token may be there by now, or another CA
                        await api.close()
                self._sync.requests[verb, result] += 1
                self._note(index, follower, reasons)
        finally:
            await api.close()

    async def _list(self, index: int, api: _Api, follower: Follower, action: List) -> None:
        body = await api.list_page(self._selectors[index][1], action.token)
        page = parse_page(body)
        # In small portions, so that little is left to do at the end. It is the truth though not yet all of it.
        for number, pod in enumerate(page.items or (), 1):
            self.pods.on_happening(index, Put(pod))
            if number % PODS_AT_ONCE == 0:
                await asyncio.sleep(0)
        happening = follower.on_page(page, asyncio.get_running_loop().time())
        if happening is not None:
            self.pods.on_happening(index, happening)
            self.pods.forget_zones()
            self._unlisted.discard(index)
            self._tell()

    async def _take(self, index: int, follower: Follower, lines: list[bytes]) -> None:
        now = asyncio.get_running_loop().time()
        for number, line in enumerate(lines, 1):
            happening = follower.on_line(line, now)
            if happening is not None:
                self.pods.on_happening(index, happening)
                self._tell()
            if number % PODS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _tell(self) -> None:
        self.changed.set()
        self._nodes_wanted.set()
        complaints = set(self.pods.complaints)
        for name, reason in sorted(complaints - self._complaints):
            self._report_pod(name, reason)
        self._complaints = complaints

    def _note(self, index: int, follower: Follower, reasons: Reasons) -> None:
        """Keep ``Sync`` up to date."""
        failing = self._sync.failing
        if follower.failing or index in self._unlisted:
            failing.add(index)
            return
        failing.discard(index)
        self._sync.in_touch_at = self._clock()
        reasons.tell()

    async def read_zones(self) -> None:
        """Ask for the zones of nodes as long as that is allowed."""
        api = _Api(self._options)
        reasons = Reasons(functools.partial(self._report, "nodes"))
        try:
            while True:
                await self._nodes_wanted.wait()
                self._nodes_wanted.clear()
                if not await self._read_zones(api, reasons):
                    await api.close()
                    await asyncio.sleep(NODE_RETRY_S)
                    self._nodes_wanted.set()
        finally:
            await api.close()

    async def _read_zones(self, api: _Api, reasons: Reasons) -> bool:
        """Ask for the zones that are not known; tell whether that need not be tried again soon."""
        for node in sorted(self.pods.nodes_without_zone):
            try:
                zone = await api.zone_of(node)
            except RefusedError as error:
                self._sync.requests["get", _result(error, "get")] += 1
                if error.code in DENIED:
                    reasons.tell(str(error))
                    # As long as nobody gives the right there is nothing to gain.
                    for unknown in self.pods.nodes_without_zone:
                        self.pods.on_zone(unknown, "")
                    return True
                return False
            except (
                UnreadableError,
                ConfigError,
                aiohttp.ClientError,
                OSError,
                TimeoutError,
            ) as error:
                self._sync.requests["get", _result(error, "get")] += 1
                return False
            self._sync.requests["get", "ok"] += 1
            self.pods.on_zone(node, zone)
            self.changed.set()
            reasons.tell()
        return True


async def watch(
    options: KubernetesOptions,
    *,
    known: Callable[[], Iterable[WorkerSpec]] = tuple,
    sync: Sync,
    report: Report,
    report_pod: Report,
    clock: Callable[[], float],
) -> AsyncIterator[Update]:
    """Yield what changes among the workers that are Pods.

    *known* returns those of an earlier run. *report* is called once with the option of a selector, or
    ``nodes``, and each reason why that does not work, and with an empty one when it does again; *report_pod*
    with the name of a Pod and what of it is ignored. *clock* gives Unix time in seconds. ``ConfigError`` when
    the router does not know how to reach the API server, or may not read Pods and knows none.
    """
    source = _Source(options, known(), sync=sync, report=report, report_pod=report_pod, clock=clock)
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(options.selectors())):
                tasks.create_task(source.follow(index))
            tasks.create_task(source.read_zones())
            while not source.listed:
                await source.changed.wait()
                source.changed.clear()
            # Also when nothing has changed: whoever waits for this source waits for its first word.
            yield source.pods.changes() or Reset(tuple(source.pods.workers.values()))
            while True:
                await asyncio.sleep(GATHER_S)
                while (update := source.pods.changes()) is None:
                    await source.changed.wait()
                    source.changed.clear()
                yield update
    except BaseExceptionGroup as group:  # of a task that gave up, or of the end of this generator
        raise group.exceptions[0] from None


async def look_once(options: KubernetesOptions) -> Mapping[PodState, int]:
    """Return how many Pods of the selectors there are, by state.

    ``ConfigError`` when they may not be read, or the way to the API server is not known; ``OSError`` when it
    does not answer.
    """
    selectors = options.selectors()
    pods = PodWorkers([role for role, _ in selectors], options.pod_defaults())
    api = _Api(options)
    try:
        for index, (_, selector) in enumerate(selectors):
            found: list[Pod] = []
            token = ""
            while True:
                page = parse_page(await api.list_page(selector, token))
                found += page.items or ()
                token = page.metadata.token or ""
                if not token:
                    break
            pods.on_happening(index, Replace(tuple(found)))
    except RefusedError as error:
        raise ConfigError(f"--service-discovery: {_explain(error, 'list', options)}") from error
    except (UnreadableError, aiohttp.ClientError, OSError) as error:
        raise OSError(_explain(error, "list", options)) from error
    finally:
        await api.close()
    return pods.states


def _explain(error: Exception, verb: str, options: KubernetesOptions) -> str:
    """Say what was tried in vain, and why."""
    namespace = options.service_discovery_namespace
    where = f"namespace {namespace!r}" if namespace else "all namespaces"
    what = f"{verb} pods in {where}"
    match error:
        case RefusedError(code=401):
            return f"cannot {what}: the API server does not know who this router is: {error}"
        case RefusedError(code=403):
            return (
                f"not allowed to {what}: {error}; the router needs a role with the verbs list and watch on"
                " pods there"
            )
        case TimeoutError() if verb == "watch":
            return f"cannot {what}: the connection has stalled"
        case TimeoutError():
            return f"cannot {what}: the API server did not answer in time"
        case _:
            return f"cannot {what}: {str(error) or type(error).__name__}"


def _result(error: Exception, verb: str) -> str:
    match error:
        case RefusedError(code=code) if code in DENIED:
            return "denied"
        case RefusedError(code=code) if code == GONE:
            return "gone"
        case TimeoutError() if verb == "watch":
            return "stalled"
        case _:
            return "failed"


def _option(role: WorkerType) -> str:
    return "--selector" if role is WorkerType.REGULAR else f"--{role}-selector"
