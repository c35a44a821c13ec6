"""Envoy's own admin endpoints."""

from __future__ import annotations

from typing import Any

import msgspec

from extproc.address import Address
from extproc.local_http import ask

TIMEOUT_S = 2.0


class EnvoyAdmin:
    """A client of one Envoy."""

    def __init__(self, address: Address) -> None:
        self._address = address

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

    async def clusters(self) -> bytes | None:
        """Return all clusters with the state of their endpoints, as JSON; None when Envoy does not answer."""
        return await self._bytes("GET", "/clusters?format=json")

    async def _stat(self, name: str) -> int | None:
        found = await self._request("GET", f"/stats?format=json&filter=^{name}$")
        if found is None:
            return None
        return sum(int(stat.get("value", 0)) for stat in found.get("stats", ()))

    async def _request(self, method: str, path: str) -> dict[str, Any] | None:
        """Return the JSON answer ({} when it is text), or None on failure."""
        body = await self._bytes(method, path)
        if body is None:
            return None
        try:
            answer = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return {}
        return answer if isinstance(answer, dict) else {}

    async def _bytes(self, method: str, path: str) -> bytes | None:
        """Return the body of the answer, or None on failure."""
        answer = await ask(self._address, method, path, timeout_s=TIMEOUT_S)
        return answer[1] if answer is not None and answer[0] == 200 else None
