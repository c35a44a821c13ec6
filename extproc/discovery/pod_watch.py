"""Following Pods by list and watch: what to ask the API server next, and which workers follow.

``Follower`` is one label selector. It lists the Pods page by page, then watches from the version of the
list on: a watch tells every change since then, in order, and nothing twice but for harmless repetitions.
A watch that ends or fails is taken up where it ended. When the server no longer knows that version (410 Gone),
when a stream makes no sense, and every so often just in case, the Pods are listed anew, and the list replaces
all that was known. Until a list is complete, and while the server is away, what was known stays.

It is the watch that tells of changes: only one that works ends the pauses after failures, not a list in
between. And a list that is merely due does not end a watch that works: when it fails, it is put off.

``PodWorkers`` puts together the Pods of all selectors and says what changed about the workers.

Source: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from extproc.discovery.pods import Pod, PodDefaults, PodState, Reading, needs_zone, read_pod, trim
from extproc.discovery.updates import Add, Remove, Reset, Update, WorkerSpec, WorkerType

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 15.0
BACKOFF_FACTOR = 2.0
SHORT_WATCH_S = 0.5
"""A watch that ends sooner counts as a failure: else one that is closed at once would be begun again without
end."""

LIST_INTERVAL_JITTER = 0.1
"""Share of the interval by which a list may come sooner: many routers start in the same moment."""

MAX_LINE_BYTES = 8 * 2**20
"""An object of Kubernetes has 1.5 MiB at most, as etcd takes it; JSON is longer."""

TELL_AFTER = 3
"""Failures in a row until somebody should know: one or two are usual where a server or a load balancer is
renewed."""

SLOW_FAILURE_S = 3.0
"""A failure that took so long is told at once."""

GONE = 410
DENIED = (401, 403)
TOO_MANY = 429


class ListMeta(msgspec.Struct, rename={"resource_version": "resourceVersion", "token": "continue"}):
    """Where a list stands."""

    resource_version: str = ""
    token: str | None = None


class Page(msgspec.Struct):
    """Some of the Pods of a list; ``metadata.token`` leads to the next ones."""

    metadata: ListMeta
    items: list[Pod] | None = None


class Status(msgspec.Struct):
    """What the API server says when it does not do what was asked."""

    code: int = 0
    reason: str = ""
    message: str = ""


class Event(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


_page_decoder = msgspec.json.Decoder(Page)
_event_decoder = msgspec.json.Decoder(Event)
_pod_decoder = msgspec.json.Decoder(Pod)
_status_decoder = msgspec.json.Decoder(Status)

_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class UnreadableError(ValueError):
    """The API server said something that makes no sense."""


class RefusedError(Exception):
    """The API server refused, by a status of HTTP or in the middle of a watch."""

    def __init__(self, code: int, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{reason} ({code})" if reason else f"status {code}")
        self.code = code
        self.retry_after_s = retry_after_s


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for a while."""

    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class List:
    """Ask for a page of Pods."""

    token: str
    """Of the page before; empty for the first one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """Ask for what happens after *version*."""

    version: str
    timeout_s: int
    """When the server shall end the watch."""


Action = Wait | List | Watch


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """These are all the Pods."""

    pods: tuple[Pod, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
    """One Pod is new or another than before."""

    pod: Pod


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """One Pod is gone, or no longer has the labels."""

    pod: Pod


Happening = Replace | Put | Drop


class Follower:
    """The list and the watch of one label selector. Times are of any one clock, in seconds."""

    def __init__(self, *, list_interval_s: float, watch_timeout_s: int, rng: random.Random) -> None:
        self._list_interval_s = list_interval_s
        self._watch_timeout_s = watch_timeout_s
        self._rng = rng
        self._pages: list[Pod] = []
        self._token = ""
        self._version = ""
        """Where the watch goes on; empty: the Pods must be listed."""

        self._asked_at = 0.0
        self._listing = True
        """Whether it was a list that was asked for last."""

        self._list_due = 0.0
        self._lists_failed = 0
        """In a row, of those that were merely due."""

        self._not_before = 0.0
        self._failures = 0
        """In a row, until a watch works."""

        self._begun = False
        """Whether the server has taken up the watch."""

        self._doubtful = False
        """Whether a watch failed though it was taken up: that the next one is taken up proves nothing."""

        self._gone = False
        """Whether the last list was asked for since the version was gone."""

        self._watch_failing = False
        self._list_failing = False
        self.starting = True
        """Whether neither a watch was ever taken up nor anything failed."""

    @property
    def failing(self) -> bool:
        """Whether somebody should know that it goes wrong."""
        return self._watch_failing or self._list_failing

    def next(self, now: float) -> Action:
        """Return what to do now."""
        if now < self._not_before:
            return Wait(self._not_before - now)
        self._asked_at = now
        self._begun = False
        self._listing = not self._version or now >= self._list_due
        if self._listing:
            return List(self._token)
        left = self._list_due - now
        return Watch(self._version, max(1, min(self._watch_timeout_s, round(left))))

    def on_page(self, page: Page, now: float) -> Replace | None:
        """Take in a page; return all Pods when it was the last."""
        self._pages += page.items or ()
        self._token = page.metadata.token or ""
        if self._token:
            return None
        pods, self._pages = tuple(self._pages), []
        self._version = page.metadata.resource_version
        sooner = self._rng.random() * LIST_INTERVAL_JITTER
        self._list_due = now + self._list_interval_s * (1 - sooner)
        self._lists_failed = 0
        self._list_failing = False
        return Replace(pods)

    def on_begun(self) -> None:
        """Learn that the server has taken up the watch."""
        self._begun = True
        self.starting = False
        if not self._doubtful:
            self._on_watched()

    def on_line(self, line: bytes) -> Put | Drop | None:
        """Take in a line of the watch.

        ``RefusedError`` and ``UnreadableError``, which ``on_failure`` wants to hear of, when it ends there.
        """
        try:
            event = _event_decoder.decode(line)
            if event.type == "ERROR":
                status = _status_decoder.decode(event.object)
                raise RefusedError(status.code, status.message or status.reason)
            pod = _pod_decoder.decode(event.object)
        except _FAULTS as error:
            raise UnreadableError(f"a watch says what makes no sense: {error}") from error
        if not pod.metadata.resource_version:
            raise UnreadableError("a watch tells of an object without a version")
        if event.type != "BOOKMARK":
            _with_uid(pod)
        self._version = pod.metadata.resource_version
        self._on_proof()
        if event.type in ("ADDED", "MODIFIED"):
            return Put(pod)
        return Drop(pod) if event.type == "DELETED" else None

    def on_end(self, now: float) -> None:
        """Learn that the server has ended the watch.

        ``ConnectionError``, which ``on_failure`` wants to hear of, when that was too soon.
        """
        if now - self._asked_at < SHORT_WATCH_S:
            raise ConnectionError("the server ends a watch as soon as it has begun")
        self._on_proof()

    def on_failure(self, error: Exception, now: float) -> None:
        """Learn why a list or a watch did not work."""
        self.starting = False
        if self._listing and self._version:
            self._put_off(error, now)
            return
        took_s = now - self._asked_at
        if self._begun:
            if took_s >= SHORT_WATCH_S and _is_of_connection(error):
                self._on_proof()  # it has worked until then
                took_s = 0.0
            self._doubtful = True
        if _breaks_off(error):
            self._start_over()
        if isinstance(error, RefusedError) and error.code == GONE and not self._gone:
            self._gone = True  # once at once: it is how the server says that it is time for a list
            return
        self._not_before = now + self._pause(FIRST_BACKOFF_S, self._failures, MAX_BACKOFF_S, error)
        self._failures += 1
        if self._failures >= TELL_AFTER or took_s >= SLOW_FAILURE_S or _is_denial(error):
            self._watch_failing = True

    def _put_off(self, error: Exception, now: float) -> None:
        """Watch on for a while: it tells the same as the list that failed."""
        self._pages, self._token = [], ""
        pause = self._pause(MAX_BACKOFF_S, self._lists_failed, self._list_interval_s, error)
        self._list_due = now + pause
        self._lists_failed += 1
        if self._lists_failed >= TELL_AFTER or _is_denial(error):
            self._list_failing = True

    def _start_over(self) -> None:
        self._version = self._token = ""
        self._pages = []

    def _on_watched(self) -> None:
        self._failures = 0
        self._watch_failing = False

    def _on_proof(self) -> None:
        """Learn that the watch has said something, or has lasted."""
        self._on_watched()
        self._doubtful = self._gone = False

    def _pause(self, first: float, failures: int, longest: float, error: Exception) -> float:
        """Return how long to wait, in seconds: the longer, the more *failures* there were before."""
        pause = min(first * BACKOFF_FACTOR ** min(failures, 30), longest)
        # Half of it drawn: many routers must not come back in the same moment.
        pause *= 0.5 + self._rng.random() / 2
        asked = error.retry_after_s if isinstance(error, RefusedError) else 0.0
        return max(pause, min(asked, longest))


def _is_denial(error: Exception) -> bool:
    return isinstance(error, RefusedError) and error.code in DENIED


def _is_of_connection(error: Exception) -> bool:
    return not isinstance(error, (RefusedError, UnreadableError, TimeoutError))


def _breaks_off(error: Exception) -> bool:
    """Tell whether the version may be what is wrong. It is not when the server has troubles of its own."""
    if isinstance(error, RefusedError):
        return error.code not in (*DENIED, TOO_MANY) and error.code < 500
    return isinstance(error, UnreadableError)


def parse_page(body: bytes) -> Page:
    """Read a page of a list."""
    try:
        page = _page_decoder.decode(body)
    except _FAULTS as error:
        raise UnreadableError(f"a list of Pods makes no sense: {error}") from error
    if not page.metadata.resource_version:
        raise UnreadableError("a list of Pods is without a version")
    for pod in page.items or ():
        _with_uid(pod)
    return page


def parse_refusal(code: int, body: bytes, retry_after: str = "") -> RefusedError:
    """Read an answer other than 200, and its header Retry-After."""
    try:
        status = _status_decoder.decode(body)
    except _FAULTS:
        status = Status()
    wait_s = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
    return RefusedError(code, status.message or status.reason, wait_s)


class Lines:
    """Puts the lines of a stream together."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that are complete with *chunk*."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise UnreadableError(f"a watch has a line of more than {MAX_LINE_BYTES} bytes")
        return [line for line in lines if line.strip()]


def _with_uid(pod: Pod) -> Pod:
    if not pod.metadata.uid:
        raise UnreadableError(f"a Pod is without uid: {pod.name!a}")
    return pod


@dataclasses.dataclass(frozen=True, slots=True)
class _Dropped:
    """A Pod that a selector has lost."""

    version: int
    """Older words of it do not count."""

    behind: set[int]
    """Selectors that may still say such words: neither have they lost it nor were they listed since."""


@dataclasses.dataclass(slots=True)
class Sync:
    """How well the API server is followed, for operators."""

    failing: set[int] = dataclasses.field(default_factory=set)
    """Selectors of which the last that was asked went wrong, or nothing has been heard yet."""

    in_touch_at: float = 0.0
    """When the server last said something that was understood, Unix time in seconds; 0: never."""

    requests: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    """Requests ended, by verb (list, watch, get) and result."""

    states: Callable[[], Mapping[PodState, int]] = dict
    """How many Pods are in each state."""


class PodWorkers:
    """The workers among the Pods of several selectors.

    A Pod that fits more than one has the role of the first. Of what they say of it the newest counts, since
    one stream may be behind another. That a Pod is gone, or has lost the labels, is such a word, too: whoever
    says older things of it has yet to hear of that. Of several Pods at one URL the youngest is there.
    """

    def __init__(
        self,
        roles: Sequence[WorkerType],
        defaults: PodDefaults,
        known: Iterable[WorkerSpec] = (),
    ) -> None:
        """Begin with *known*, the workers that have been told already; *roles*: one for each selector."""
        self._roles = roles
        self._defaults = defaults
        self._pods: tuple[dict[str, Pod], ...] = tuple({} for _ in roles)
        """Of each selector, by uid."""

        self._dropped: dict[str, _Dropped] = {}
        """By uid, the Pods of which one selector has heard that they are gone, and another perhaps not yet."""

        self._readings: dict[str, Reading] = {}
        self._age: dict[str, tuple[str, int, str]] = {}
        """By uid, what sorts Pods from the oldest to the youngest."""

        self._node_of: dict[str, str] = {}
        self._zones: dict[str, str] = {}
        self._told = {spec.key: spec for spec in known}
        self._complaints: dict[str, tuple[str, tuple[str, ...]]] = {}

    def on_happening(self, selector: int, happening: Happening) -> None:
        """Take in what was heard of a selector."""
        match happening:
            case Replace(found):
                there = {pod.metadata.uid for pod in found}
                for uid, pod in list(self._pods[selector].items()):
                    if uid not in there:
                        # It has changed since, or else it would be on the list.
                        self._drop(selector, uid, pod.version + 1)
                for pod in found:
                    self._put(selector, pod)
                for uid in list(self._dropped):
                    self._catch_up(selector, uid)
            case Put(pod):
                self._put(selector, pod)
            case Drop(pod):
                self._drop(selector, pod.metadata.uid, pod.version)

    def _put(self, selector: int, pod: Pod) -> None:
        pods, uid = self._pods[selector], pod.metadata.uid
        known = pods.get(uid)
        if known is pod:
            return
        trim(pod, self._defaults)
        if known != pod:
            pods[uid] = pod
            self._read(uid)
        if uid in self._dropped and pod.version >= self._dropped[uid].version:
            self._catch_up(selector, uid)

    def _drop(self, selector: int, uid: str, version: int) -> None:
        self._pods[selector].pop(uid, None)
        before = self._dropped.get(uid)
        if before is None or version > before.version:
            self._dropped[uid] = _Dropped(version, set(range(len(self._roles))))
        self._read(uid)
        if version >= self._dropped[uid].version:
            self._catch_up(selector, uid)

    def _catch_up(self, selector: int, uid: str) -> None:
        """Learn that *selector* says nothing any more of a Pod that is older than its loss."""
        behind = self._dropped[uid].behind
        behind.discard(selector)
        if not behind:
            del self._dropped[uid]
            self._read(uid)

    def on_zone(self, node: str, zone: str) -> None:
        """Learn the zone of a node; empty: it has none."""
        before = self._zones.get(node, "")
        self._zones[node] = zone
        if zone == before:
            return
        for uid, name in list(self._node_of.items()):
            if name == node:
                self._read(uid)

    def forget_zones(self, *, missing: bool) -> None:
        """Forget the nodes of which no Pod is left; with *missing* let those be asked again that have no zone."""
        nodes = set(self._node_of.values())
        kept = {n: zone for n, zone in self._zones.items() if n in nodes}
        self._zones = {n: zone for n, zone in kept.items() if zone or not missing}

    @property
    def nodes_without_zone(self) -> Collection[str]:
        """Return the nodes that would have to be asked in which zone they are."""
        return set(self._node_of.values()) - self._zones.keys()

    def _read(self, uid: str) -> None:
        """Work out which worker a Pod is by now."""
        copies = [
            (pods[uid], role)
            for pods, role in zip(self._pods, self._roles, strict=True)
            if uid in pods
        ]
        self._node_of.pop(uid, None)
        if not copies:
            for known in (self._readings, self._age, self._complaints):
                known.pop(uid, None)
            return
        role = copies[0][1]
        pod = max((pod for pod, _ in copies), key=lambda pod: pod.version)
        node = pod.spec.node_name or ""
        if uid in self._dropped and pod.version < self._dropped[uid].version:
            reading = Reading(PodState.ENDING)
        else:
            reading = read_pod(pod, role, self._defaults, self._zones.get(node, ""))
        self._readings[uid] = reading
        self._age[uid] = pod.metadata.creation_timestamp or "", pod.version, uid
        if reading.worker is not None and needs_zone(pod):
            self._node_of[uid] = node
        if reading.complaints:
            self._complaints[uid] = pod.name, reading.complaints
        elif reading.state is PodState.WORKER:
            self._complaints.pop(uid, None)

    @property
    def workers(self) -> Mapping[str, WorkerSpec]:
        """Return the workers by key."""
        there = [uid for uid, reading in self._readings.items() if reading.worker is not None]
        there.sort(key=self._age.__getitem__)
        return {
            reading.worker.key: reading.worker
            for reading in (self._readings[uid] for uid in there)
            if reading.worker is not None
        }

    @property
    def states(self) -> Mapping[PodState, int]:
        """Return how many Pods are in each state."""
        return Counter(reading.state for reading in self._readings.values())

    @property
    def complaints(self) -> Collection[tuple[str, str]]:
        """Return what of the Pods is ignored: their names, each with a reason."""
        return [(name, reason) for name, reasons in self._complaints.values() for reason in reasons]

    def changes(self) -> Update | None:
        """Return what to tell now, and take it as told; None: nothing.

        Call it until it returns None, with some time in between: where another Pod, or one in another role, is
        at the URL of one that was told, the old one is removed first, so that nothing that is known of it is
        taken for the other's.
        """
        wanted = dict(self.workers)
        told = self._told
        replaced = {
            key for key, spec in wanted.items() if key in told and _who(told[key]) != _who(spec)
        }
        for key in replaced:
            del wanted[key]
        gone = [key for key in told if key not in wanted]
        fresh = [spec for key, spec in wanted.items() if told.get(key) != spec]
        self._told = wanted
        match gone, fresh:
            case [], []:
                return None
            case [key], []:
                return Remove(key)
            case [], [spec]:
                return Add(spec)
            case _:
                return Reset(tuple(wanted.values()))


def _who(spec: WorkerSpec) -> tuple[str, WorkerType]:
    return spec.instance, spec.worker_type
