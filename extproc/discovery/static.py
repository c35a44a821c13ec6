"""Workers named on the command line or in the configuration file.

Literal addresses are known at once. Host names are resolved, and resolved again for as long as the
program runs: a name that cannot be resolved yet delays no other worker, and one that moves to
another address is followed. A name with several addresses is one worker, at its first IPv4 address
or else its first IPv6 address: ``localhost`` often resolves to both, and servers of this field listen
on IPv4 unless told otherwise. (A headless service, where each address is a worker, is another source.)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from extproc.address import WorkerUrl, is_ip, join_host_port
from extproc.discovery.updates import Add, Reset, Update, WorkerSpec

RESOLVE_TIMEOUT_S = 5.0
RETRY_UNRESOLVED_S = 2.0
REFRESH_RESOLVED_S = 30.0

Resolver = Callable[[str], Awaitable[str]]
"""Host name to one IP address; raises ``OSError`` when there is none."""

Report = Callable[[str, str], None]
"""Called with a worker's URL and the reason why its name cannot be resolved."""


async def resolve(host: str) -> str:
    """Ask the system's resolver."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(RESOLVE_TIMEOUT_S):
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])


async def watch(
    urls: Sequence[WorkerUrl], *, report: Report, resolver: Resolver = resolve
) -> AsyncIterator[Update]:
    """Yield one ``Reset`` with every literal address, then ``Add`` as names resolve or move."""
    endpoints = {
        worker.url: join_host_port(worker.host, worker.port)
        for worker in urls
        if is_ip(worker.host)
    }
    yield Reset(tuple(WorkerSpec(w.url, endpoints[w.url]) for w in urls if w.url in endpoints))

    named = [worker for worker in urls if not is_ip(worker.host)]
    while named:
        hosts = sorted({worker.host for worker in named})
        answers = await asyncio.gather(*map(resolver, hosts), return_exceptions=True)
        found = dict(zip(hosts, answers, strict=True))
        unresolved = False
        for worker in named:
            answer = found[worker.host]
            if isinstance(answer, str):
                endpoint = join_host_port(answer, worker.port)
                if endpoints.get(worker.url) != endpoint:
                    endpoints[worker.url] = endpoint
                    yield Add(WorkerSpec(worker.url, endpoint))
            elif isinstance(answer, OSError):  # TimeoutError is one
                unresolved = unresolved or worker.url not in endpoints
                report(worker.url, str(answer) or "the resolver did not answer in time")
            else:
                raise answer
        await asyncio.sleep(RETRY_UNRESOLVED_S if unresolved else REFRESH_RESOLVED_S)
