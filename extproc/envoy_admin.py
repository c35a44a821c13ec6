"""Envoy's own admin endpoints, over its Unix socket."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

TIMEOUT_S = 2.0
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class EnvoyAdmin:
    """A client of one Envoy."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path

    async def listening(self) -> bool:
        """Tell whether Envoy has a listener that accepts connections."""
        # A listener is listed before the threads that accept its connections run.
        found = await self._request("GET", "/listeners?format=json")
        if not found or not found.get("listener_statuses"):
            return False
        return bool(await self._stat("listener_manager.workers_started"))

    async def fail_health_check(self) -> bool:
        """Make Envoy ask clients to close kept-alive connections with each response."""
        return await self._request("POST", "/healthcheck/fail") is not None

    async def close_listeners(self) -> bool:
        """Accept no new connections; those that are open go on."""
        return await self._request("POST", "/drain_listeners") is not None

    async def active_requests(self) -> int | None:
        """Return the requests under way, or None when Envoy does not answer."""
        return await self._stat("http.ingress.downstream_rq_active")

    async def _stat(self, name: str) -> int | None:
        found = await self._request("GET", f"/stats?format=json&filter=^{name}$")
        if found is None:
            return None
        return sum(int(stat.get("value", 0)) for stat in found.get("stats", ()))

    async def _request(self, method: str, path: str) -> dict[str, Any] | None:
        """Return the JSON answer ({} when it is text), or None on failure."""
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(path=self._path),
                    timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                ) as session,
                session.request(method, f"http://envoy{path}") as response,
            ):
                if response.status != 200:
                    return None
                if response.content_type != "application/json":
                    return {}
                answer: dict[str, Any] = await response.json()
                return answer
        except _FAILURES:
            return None
