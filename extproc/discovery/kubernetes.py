"""Workers that are Pods of Kubernetes: the requests to its API server; see ``pods`` and ``pod_watch``.

The official client knows how to reach the server and as whom, in the cluster and outside. Its models are not
used: to make them of two thousand Pods would stop every request for seconds. Answers are decoded here into
the few fields that are needed.

A server that is away, or does not let the router in any more, takes no worker away, and neither does anything
unforeseen. Only a router that knows no Pod and is denied with the very first answers ends, since it would wait
in vain for someone to notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import structlog

from extproc.discovery.dns import Reasons
from extproc.discovery.kubernetes_client import make_client
from extproc.discovery.kubernetes_failures import (
    FORESEEN,
    Result,
    SlowCredentialsError,
    explain,
    is_hopeless,
    result_of,
)
from extproc.discovery.pod_watch import (
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

log = structlog.get_logger(__name__)

PAGE_PODS = 500
"""As the client of Kubernetes in Go: some 5 MB, which are read in 3 ms."""
CONNECT_S = 5.0
ANSWER_S = 30.0
CREDENTIALS_S = 30.0
"""For reading how to reach the server and as whom. A kubeconfig may name a program to run."""

REFUSAL_BYTES = 64 * 1024
"""Of a refusal, at most; a proxy may send anything."""

STALL_S = 5.0
"""How long after its time a watch that the server has not ended counts as stalled."""

GATHER_S = 0.02
"""Between two updates, at least: a thousand Pods may become ready in one moment."""

PODS_AT_ONCE = 50
"""Pods that are looked at before others have their turn: about two milliseconds."""

NODE_RETRY_S = 5.0
NODE_DENIED_RETRY_S = 300.0
"""As long as nobody gives the right there is nothing to gain."""

ZONELESS_S = 3600.0
"""How long a node that has no zone is not asked again."""

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
        self._connecting: asyncio.Future[ApiClient] | None = None

    async def connect(self) -> ApiClient:
        """Read how to reach the server. ``ConfigError`` says what is wrong."""
        if self._client is None:
            # A program that a kubeconfig names cannot be ended from here: when it hangs, it is waited for again
            # rather than begun once more.
            if self._connecting is None:
                self._connecting = asyncio.ensure_future(make_client(self._kubeconfig))
            done, _ = await asyncio.wait({self._connecting}, timeout=CREDENTIALS_S)
            if not done:
                raise SlowCredentialsError(
                    f"--kubeconfig: {self._kubeconfig} was not read in time; its exec plugin may hang"
                )
            connected, self._connecting = self._connecting, None
            self._client = connected.result()
        return self._client

    async def renew(self) -> None:
        """Close the connections; the next request reads anew how to reach the server, and as whom."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def close(self) -> None:
        """Close the connections for good."""
        if self._connecting is not None:
            self._connecting.cancel()
        await self.renew()

    async def list_page(self, selector: str, token: str) -> bytes:
        """Return a page of Pods."""
        query = {"labelSelector": selector, "limit": str(PAGE_PODS)}
        if token:
            query["continue"] = token
        response = await self._get(self._pods_path, query, ANSWER_S)
        return await response.read()

    async def watch(self, selector: str, action: Watch) -> AsyncGenerator[list[bytes], None]:
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
        try:
            method, url, headers, _, _ = await client.param_serialize(
                method="GET",
                resource_path=path,
                query_params=list(query.items()),
                header_params=headers,
                auth_settings=["BearerToken"],
            )
        except Exception as error:  # of the file with the token
            # Not the text of a kubeconfig: it may show a secret.
            why = type(error).__name__ if self._kubeconfig else error
            raise ConfigError(f"--service-discovery: the token cannot be read: {why}") from error
        if token := headers.get("authorization"):
            headers["authorization"] = " ".join(token.split())  # most files end with a newline
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        answer = await client.rest_client.request(method, url, headers, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        if response.status != 200:
            body = b""
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > REFUSAL_BYTES:
                    break
            response.release()
            retry_after = response.headers.get("Retry-After", "")
            raise parse_refusal(response.status, body, retry_after)
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
        self._unforeseen: set[type[Exception]] = set()
        self._zoneless_until = 0.0
        sync.failing = set(self._unlisted)
        sync.states = lambda: self.pods.states

    @property
    def listed(self) -> bool:
        """Whether the Pods of every selector are known."""
        return not self._unlisted

    async def follow(self, index: int) -> None:
        """List and watch the Pods of one selector for ever. ``ConfigError`` when that is hopeless."""
        loop = asyncio.get_running_loop()
        role, _ = self._selectors[index]
        follower = Follower(
            list_interval_s=self._options.service_discovery_list_interval_secs,
            watch_timeout_s=self._options.service_discovery_watch_timeout_secs,
            rng=random.Random(),
        )
        reasons = Reasons(functools.partial(self._report, _option(role)))
        api = _Api(self._options)
        try:
            while True:
                action = follower.next(loop.time())
                if isinstance(action, Wait):
                    await asyncio.sleep(action.seconds)
                    continue
                verb = "list" if isinstance(action, List) else "watch"
                result: Result = "ok"
                try:
                    if isinstance(action, List):
                        await self._list(index, api, follower, action)
                    else:
                        await self._watch(index, api, follower, action, reasons)
                except Exception as error:  # whatever it is, the workers stay
                    result = result_of(error, verb)
                    reason = explain(error, verb, self._options)
                    if self._may_end and follower.starting:
                        if isinstance(error, ConfigError):
                            raise
                        if result == "denied":
                            raise ConfigError(f"--service-discovery: {reason}") from error
                    self._log_unforeseen(error)
                    follower.on_failure(error, loop.time())
                    if follower.failing:
                        reasons.tell(reason)
                    if result in ("denied", "failed"):
                        await api.renew()  # another token may be there by now, or another CA
                self._sync.requests[verb, result] += 1
                self._note(index, follower, reasons)
        finally:
            await api.close()

    def _log_unforeseen(self, error: Exception) -> None:
        if not isinstance(error, FORESEEN) and type(error) not in self._unforeseen:
            self._unforeseen.add(type(error))
            log.error("kubernetes discovery failed; it is tried again", exc_info=error)

    async def _list(self, index: int, api: _Api, follower: Follower, action: List) -> None:
        body = await api.list_page(self._selectors[index][1], action.token)
        page = parse_page(body)
        # In small portions, so that little is left to do at the end. It is the truth though not yet all of it.
        for number, pod in enumerate(page.items or (), 1):
            self.pods.on_happening(index, Put(pod))
            if number % PODS_AT_ONCE == 0:
                await asyncio.sleep(0)
        now = asyncio.get_running_loop().time()
        happening = follower.on_page(page, now)
        self._sync.in_touch_at = self._clock()
        if happening is not None:
            self.pods.on_happening(index, happening)
            self._forget_zones(now)
            self._unlisted.discard(index)
        self._tell()

    def _forget_zones(self, now: float) -> None:
        missing = now >= self._zoneless_until
        if missing:
            self._zoneless_until = now + ZONELESS_S
        self.pods.forget_zones(missing=missing)

    async def _watch(
        self, index: int, api: _Api, follower: Follower, action: Watch, reasons: Reasons
    ) -> None:
        _, selector = self._selectors[index]
        async with contextlib.aclosing(api.watch(selector, action)) as stream:
            async for lines in stream:
                follower.on_begun()
                await self._take(index, follower, lines)
                self._note(index, follower, reasons)
        follower.on_end(asyncio.get_running_loop().time())

    async def _take(self, index: int, follower: Follower, lines: list[bytes]) -> None:
        for number, line in enumerate(lines, 1):
            happening = follower.on_line(line)
            if happening is not None:
                self.pods.on_happening(index, happening)
                self._tell()
            if number % PODS_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._sync.in_touch_at = self._clock()

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
        reasons.tell()

    async def read_zones(self) -> None:
        """Ask for the zones of nodes as long as that is allowed."""
        api = _Api(self._options)
        reasons = Reasons(functools.partial(self._report, "nodes"))
        try:
            while True:
                await self._nodes_wanted.wait()
                self._nodes_wanted.clear()
                if pause_s := await self._read_zones(api, reasons):
                    await api.renew()
                    await asyncio.sleep(pause_s)
                    self._nodes_wanted.set()
        finally:
            await api.close()

    async def _read_zones(self, api: _Api, reasons: Reasons) -> float:
        """Ask for the zones that are not known; return after how many seconds to try again, 0: not soon."""
        trouble = ""
        for node in sorted(self.pods.nodes_without_zone):
            try:
                zone = await api.zone_of(node)
            except Exception as error:  # noqa: BLE001  whatever it is, the workers stay
                self._log_unforeseen(error)
                result = result_of(error, "get")
                self._sync.requests["get", result] += 1
                if result == "denied":
                    reasons.tell(str(error))
                    return NODE_DENIED_RETRY_S
                trouble = trouble or f"node {node!r}: {str(error) or type(error).__name__}"
                if not isinstance(error, (RefusedError, UnreadableError)):
                    break  # it is not about this node
                continue
            self._sync.requests["get", "ok"] += 1
            self.pods.on_zone(node, zone)
            self.changed.set()
        if trouble:
            reasons.tell(trouble)
            return NODE_RETRY_S
        reasons.tell()
        return 0.0


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
    except ConfigError:
        raise
    except Exception as error:
        reason = explain(error, "list", options)
        if is_hopeless(error):
            raise ConfigError(f"--service-discovery: {reason}") from error
        raise OSError(reason) from error
    finally:
        await api.close()
    return pods.states


def _option(role: WorkerType) -> str:
    return "--selector" if role is WorkerType.REGULAR else f"--{role}-selector"
