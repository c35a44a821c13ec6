"""Workers behind one name: each address that it has is a worker, as with a headless service of Kubernetes.

The order of an answer means nothing, since servers rotate it, and an answer may be cut short: an address is
gone when two answers in a row lack it. A new one is there at once.

No answer, and a name without any address, say nothing about the workers: the last known ones stay. A
resolver that is away must not take a healthy fleet away, and whoever has really left fails Envoy's health
checks.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future

from extproc.address import WorkerUrl, check_reachable, join_host_port
from extproc.discovery.updates import Reset, Update, WorkerSpec

TIMEOUT_S = 5.0
NO_ANSWER = "the resolver did not answer in time"
MISSES = 2
"""Answers in a row without an address until it is gone."""

MAX_LOOK_UPS = 32
"""Look-ups at the same time. One that hangs holds its place for half a minute with usual settings."""

Resolver = Callable[[str], Awaitable[Sequence[str]]]
"""Host name to its IP addresses; raises ``OSError`` when there is none."""


class SystemResolver:
    """The system's resolver, in threads of its own.

    A look-up cannot be interrupted: it goes on when nobody waits for it any more. So the same name is never
    looked up twice at the same time (who asks meanwhile gets the same answer), one that nobody waits for is
    not begun, and the end of the program waits for none.
    """

    def __init__(self, max_look_ups: int = MAX_LOOK_UPS) -> None:
        self._max_look_ups = max_look_ups
        self._threads = 0
        self._waiting: dict[str, list[Future[Sequence[str]]]] = {}
        self._lock = threading.Lock()
        self._hosts: queue.SimpleQueue[str] = queue.SimpleQueue()

    async def __call__(self, host: str) -> Sequence[str]:
        """Return the addresses of *host*, IPv4 and IPv6, in the resolver's order."""
        future: Future[Sequence[str]] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(host, [])
            waiting.append(future)
            if len(waiting) == 1:
                self._hosts.put(host)
            start = self._threads < min(len(self._waiting), self._max_look_ups)
            self._threads += start
        if start:
            threading.Thread(target=self._work, name="resolver", daemon=True).start()
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            self._serve(self._hosts.get())

    def _serve(self, host: str) -> None:
        with self._lock:
            if all(future.cancelled() for future in self._waiting[host]):
                del self._waiting[host]
                return
        answer: Sequence[str] | Exception
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer = tuple(dict.fromkeys(str(info[4][0]) for info in found))
        except Exception as error:  # noqa: BLE001 - it is for those who asked
            answer = error
        with self._lock:
            waiting = self._waiting.pop(host)
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


resolve_all: Resolver = SystemResolver()
"""Ask the system's resolver."""


class Reasons:
    """Why something does not work: each reason is told once, and an empty one when it works again."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._told: set[str] = set()

    def tell(self, *reasons: str) -> None:
        """Take what is wrong; nothing when all is well."""
        if not reasons and self._told:
            self._told.clear()
            self._report("")
        for reason in reasons:
            if reason not in self._told:
                self._told.add(reason)
                self._report(reason)


async def look_up(resolver: Resolver, host: str, timeout_s: float) -> Sequence[str]:
    """Return at least one address of *host*; ``OSError`` says why there is none."""
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await resolver(host)
    except TimeoutError as error:
        raise OSError(NO_ANSWER) from error
    except OSError as error:
        raise OSError(error.strerror or str(error) or type(error).__name__) from error
    if not addresses:
        raise OSError("the name has no address")
    return addresses


def refused(addresses: Sequence[str]) -> dict[str, str]:
    """Return those of *addresses* where no worker can be, each with the reason."""
    found = {address: check_reachable(address) for address in addresses}
    return {
        address: f"{address} is {reason}, no worker can be there"
        for address, reason in found.items()
        if reason
    }


async def watch(
    url: WorkerUrl,
    *,
    report: Callable[[str], None],
    resolver: Resolver = resolve_all,
    interval_s: float = 5.0,
) -> AsyncIterator[Update]:
    """Yield a ``Reset`` with a worker for each address of the host of *url*, whenever there are others.

    The workers have scheme, port, path and rank of *url*; the certificate of an https worker must carry the
    name. *report* is called once with each reason why the name, or one of its addresses, cannot be used,
    and with an empty one when all can again. A name that fails, or has no address (NXDOMAIN and NODATA,
    too), keeps the last workers; until it first has one, nothing is yielded. A host that is an address is
    one worker, for ever.
    """
    if not url.is_named:
        yield Reset((WorkerSpec(url),))
        return
    reasons = Reasons(report)
    missed: dict[str, int] = {}  # known address -> answers in a row that lack it
    while True:
        try:
            addresses = await look_up(resolver, url.host, TIMEOUT_S)
        except OSError as error:
            reasons.tell(str(error))
        else:
            unusable = refused(addresses)
            reasons.tell(*unusable.values())
            usable = set(addresses) - unusable.keys()
            if usable:  # else it is as if there were no address at all
                known = set(missed)
                missed = _count_misses(missed, usable)
                if missed.keys() != known:
                    yield Reset(_specs(url, missed))
        await asyncio.sleep(interval_s)


def _count_misses(missed: dict[str, int], found: set[str]) -> dict[str, int]:
    counts = {address: missed[address] + 1 for address in missed.keys() - found}
    return dict.fromkeys(found, 0) | {
        address: count for address, count in counts.items() if count < MISSES
    }


def _specs(url: WorkerUrl, addresses: dict[str, int]) -> tuple[WorkerSpec, ...]:
    rank = "" if url.rank is None else f"@{url.rank}"
    tls_name = url.host.removesuffix(".") if url.scheme == "https" else ""
    urls = [
        WorkerUrl.parse(f"{url.scheme}://{join_host_port(address, url.port)}{url.path}{rank}")
        for address in addresses
    ]
    return tuple(WorkerSpec(url, tls_name=tls_name) for url in sorted(urls, key=str))
