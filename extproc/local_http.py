"""One HTTP request to a program beside us: Envoy's admin endpoint, or the service's own."""

from __future__ import annotations

import asyncio

import aiohttp

from extproc.address import Address

_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


async def ask(
    address: Address, method: str, path: str, *, timeout_s: float
) -> tuple[int, bytes] | None:
    """Return status and body of the answer, or None when there is none."""
    connector: aiohttp.BaseConnector
    if address.path:
        connector = aiohttp.UnixConnector(path=address.path)
        base = "http://localhost"
    else:
        connector = aiohttp.TCPConnector()
        base = f"http://{address}"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, f"{base}{path}") as response,
        ):
            return response.status, await response.read()
    except _FAILURES:
        return None
