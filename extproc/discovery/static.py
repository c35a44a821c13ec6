"""Workers named on the command line or in the configuration file.

Host names are resolved, and resolved again for as long as the program runs: a name that cannot be
resolved yet delays the others for one look-up at most, and one that moves to another address is
followed. A service that is started again while the resolver is away must not tell Envoy of fewer workers
than it has: names that cannot be resolved start at the address where they were last.

A name with several addresses is one worker, at its first IPv4 address or else its first IPv6 address:
``localhost`` often resolves to both, and servers of this field listen on IPv4 unless told otherwise.
(A headless service, where each address is a worker, is another source.)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from extproc.address import WorkerUrl, is_ip, join_host_port
from extproc.discovery.updates import Reset, Update, WorkerSpec

FIRST_TIMEOUT_S = 2.0
TIMEOUT_S = 5.0
RETRY_UNRESOLVED_S = 2.0
REFRESH_RESOLVED_S = 30.0

Resolver = Callable[[str], Awaitable[str]]
"""Host name to one IP address; raises ``OSError`` when there is none."""

Report = Callable[[str, str], None]
"""Called with a worker's URL and the reason why its name cannot be resolved."""


async def resolve(host: str) -> str:
    """Ask the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])


async def watch(
    urls: Sequence[WorkerUrl],
    *,
    report: Report,
    resolver: Resolver = resolve,
    last_known: Mapping[str, str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> AsyncIterator[Update]:
    """Yield a ``Reset`` with all that is known, and another whenever names resolve or move.

    *last_known*: endpoints by URL from an earlier run, for names that cannot be resolved now. *weights* by
    URL; 1 where there is none.
    """
    names = sorted({worker.host for worker in urls if not is_ip(worker.host)})
    known = last_known or {}
    endpoints = {worker.url: known[worker.url] for worker in urls if worker.url in known}
    told: Reset | None = None
    timeout_s = FIRST_TIMEOUT_S
    while True:
        answers = await asyncio.gather(*(_ask(resolver, name, timeout_s) for name in names))
        found: dict[str, str | OSError] = dict(zip(names, answers, strict=True))
        for worker in urls:
            answer = found.get(worker.host, worker.host)
            if isinstance(answer, OSError):  # the last known address, if any, stays
                report(worker.url, str(answer) or "the resolver did not answer in time")
            else:
                endpoints[worker.url] = join_host_port(answer, worker.port)
        # One update per look-up, however many names moved.
        update = Reset(
            tuple(
                WorkerSpec(w.url, endpoints[w.url], (weights or {}).get(w.url, 1.0))
                for w in urls
                if w.url in endpoints
            )
        )
        if update != told:
            told = update
            yield update
        if not names:
            return
        timeout_s = TIMEOUT_S
        complete = len(endpoints) == len(urls)
        await asyncio.sleep(REFRESH_RESOLVED_S if complete else RETRY_UNRESOLVED_S)


async def _ask(resolver: Resolver, name: str, timeout_s: float) -> str | OSError:
    try:
        async with asyncio.timeout(timeout_s):
            return await resolver(name)
    except OSError as error:  # TimeoutError is one
        return error
