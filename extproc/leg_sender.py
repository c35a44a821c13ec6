"""Sends prefill legs through Envoy and reads their answers."""

from __future__ import annotations

import asyncio
from typing import Self

import aiohttp
import structlog
from yarl import URL

from extproc.address import Address
from extproc.log import cap
from extproc.prefill_legs import SERVED_HEADER, LegAnswer, PrefillLeg

MAX_ANSWER_BYTES = 64 * 2**20
"""An answer is one token, and what the connector says of its blocks."""

log = structlog.get_logger(__name__)


class LegSender:
    """A client of Envoy's listener for prefill legs; use it as a context."""

    def __init__(self, address: Address, *, idle_s: float) -> None:
        """*idle_s*: how long a leg may be silent."""
        self._address = address
        self._idle_s = idle_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        address = self._address
        connector: aiohttp.BaseConnector
        if address.path:
            connector = aiohttp.UnixConnector(path=address.path, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0)
        self._base = "http://prefill" if address.path else f"http://{address}"
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=self._idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, leg: PrefillLeg) -> LegAnswer:
        """Send *leg* and return what became of it."""
        if self._session is None:
            return LegAnswer(reason="the service is stopping")
        try:
            async with self._session.post(
                URL(f"{self._base}{leg.path}", encoded=True),
                data=leg.leg.body,
                headers=leg.headers,
                allow_redirects=False,
            ) as response:
                return await _read(response)
        except aiohttp.ClientPayloadError as error:
            return LegAnswer(reason=cap(str(error)) or "its answer broke off", broken=True)
        except TimeoutError:
            return LegAnswer(reason="no answer in time")
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            return LegAnswer(reason=cap(str(error)) or type(error).__name__)


async def _read(response: aiohttp.ClientResponse) -> LegAnswer:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            return LegAnswer(reason=f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
    headers = response.headers
    return LegAnswer(
        status=response.status,
        body=bytes(body),
        content_type=headers.get("content-type", ""),
        retry_after=headers.get("retry-after", ""),
        served=headers.get(SERVED_HEADER, ""),
        reason="" if response.status < 300 else f"status {response.status}",
    )
