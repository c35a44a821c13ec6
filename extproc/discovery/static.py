"""Workers named on the command line or in the configuration file.

Host names are resolved, and resolved again for as long as the program runs: a name that cannot be
resolved yet delays nobody for longer than the first look-up, and one that moves to another address is
followed. The first update waits for that look-up, since a service that is started again must not
tell Envoy of fewer workers than it has.

A name with several addresses is one worker, at its first IPv4 address or else its first IPv6 address:
``localhost`` often resolves to both, and servers of this field listen on IPv4 unless told otherwise.
(A headless service, where each address is a worker, is another source.)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from extproc.address import WorkerUrl, is_ip, join_host_port
from extproc.discovery.updates import Add, Reset, Update, WorkerSpec

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
    urls: Sequence[WorkerUrl], *, report: Report, resolver: Resolver = resolve
) -> AsyncIterator[Update]:
    """Yield one ``Reset`` with all that is known, then ``Add`` as names resolve or move."""
    endpoints: dict[str, str] = {}
    names = sorted({worker.host for worker in urls if not is_ip(worker.host)})
    timeout_s = FIRST_TIMEOUT_S
    first = True
    while True:
        answers = await asyncio.gather(*(_ask(resolver, name, timeout_s) for name in names))
        found: dict[str, str | OSError] = dict(zip(names, answers, strict=True))
        moved = []
        for worker in urls:
            answer = found.get(worker.host, worker.host)
            if isinstance(answer, OSError):  # the last known address, if any, stays
                report(worker.url, str(answer) or "the resolver did not answer in time")
                continue
            endpoint = join_host_port(answer, worker.port)
            if endpoints.get(worker.url) != endpoint:
                endpoints[worker.url] = endpoint
                moved.append(WorkerSpec(worker.url, endpoint))
        if first:
            yield Reset(tuple(moved))
            first = False
        else:
            for spec in moved:
                yield Add(spec)
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
