"""Clients that ask one after the other, and what became of each request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp

MODEL = "sim-model"
REQUEST_S = 90.0
END = b"data: [DONE]"


@dataclasses.dataclass(slots=True)
class Result:
    """One request. Times are of ``time.monotonic``."""

    started: float
    stream: bool
    ended: float = 0.0
    status: int = 0
    """Of the answer, 0 when none came."""

    worker: str = ""
    """Name of the Pod that answered."""

    complete: bool = False
    """It was answered with 200, and the answer came to its end."""

    error: str = ""

    @property
    def cut(self) -> bool:
        """The answer had begun, and ended before its end."""
        return self.status == 200 and not self.complete

    @property
    def failed(self) -> bool:
        """No answer had begun, or a wrong one."""
        return self.status != 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What clients ask."""

    clients: int
    tokens: int
    """Of each answer; a simulated worker makes 20 each second."""

    stream: bool = True
    keep_alive: bool = True
    """One connection for all requests of a client, or one for each."""


class Load:
    """Requests under way and done."""

    def __init__(self, url: str, kinds: Iterable[Kind]) -> None:
        self._url = url
        self._kinds = tuple(kinds)
        self._stopping = asyncio.Event()
        self._numbers = itertools.count()
        self.results: list[Result] = []
        """Of requests that have ended, in the order of their ends."""
        self.under_way: set[int] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask until the block ends, and then wait for the answers under way."""
        async with asyncio.TaskGroup() as group:
            for kind in self._kinds:
                for _ in range(kind.clients):
                    group.create_task(self._client(kind))
            try:
                yield
            finally:
                self._stopping.set()

    async def _client(self, kind: Kind) -> None:
        connector = aiohttp.TCPConnector(limit=1, force_close=not kind.keep_alive)
        timeout = aiohttp.ClientTimeout(total=REQUEST_S, connect=10)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            while not self._stopping.is_set():
                await self._ask(http, kind)

    async def _ask(self, http: aiohttp.ClientSession, kind: Kind) -> None:
        number = next(self._numbers)
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"What is {number}?"}],
            "max_tokens": kind.tokens,
            "stream": kind.stream,
        }
        result = Result(time.monotonic(), kind.stream)
        self.under_way.add(number)
        try:
            async with http.post(f"{self._url}/v1/chat/completions", json=body) as response:
                result.status = response.status
                result.worker = response.headers.get("x-sim-worker", "")
                content = await response.read()
                result.complete = response.status == 200 and (not kind.stream or END in content)
                if not result.complete:
                    result.error = f"{response.status}: {content[-200:].decode(errors='replace')}"
        except (aiohttp.ClientError, TimeoutError) as error:
            result.error = f"{type(error).__name__}: {error}"
        finally:
            self.under_way.discard(number)
        result.ended = time.monotonic()
        self.results.append(result)
        if not result.complete:
            await asyncio.sleep(
                0.05
            )  # a refusal costs nothing: do not ask a thousand times a second
