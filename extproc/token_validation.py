"""Asks other services whether a client's bearer token is good.

Envoy asks ``/authorize`` of this service for each request (ext_authz); what was found out is remembered for
a bounded time, and requests that come with one token at the same time share one look-up. Any URL that
answers 200 vouches for the token. Only answers are remembered: when a URL cannot be asked, does not answer
in time or fails (5xx, 408, 429) and no other vouches, the request gets 503 and the next one asks again.

A service that hangs costs the requests that wait for it, and no more: look-ups are bounded in number and
time, and no client address may hold more than a quarter of them; answers' bodies are not read, redirects are not followed (the token is for nobody else), and tokens
that are known go on being known.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import aiohttp
import structlog
from yarl import URL

from extproc.fair_places import FairPlaces, holder_of
from extproc.log import cap
from extproc.token_cache import TokenCache, Verdict, identity, token_digest

MAX_AT_ONCE = 64
"""Tokens that are asked about at the same time."""

MAX_WAITING = 1000
"""Tokens that are asked about or wait for that; beyond, requests are answered at once."""

MAX_TOKEN_CHARS = 8192
QUIET_S = 5.0
"""Between two log entries about look-ups that failed."""

UNANSWERED = "token cannot be validated"
TOKEN = re.compile(r"[!-~]+")

log = structlog.get_logger(__name__)


class TokenValidator:
    """Tells whether tokens are good. Use as an async context manager."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        cache_s: float,
        timeout_s: float,
        count: Callable[[str], None] = lambda _result: None,
    ) -> None:
        """Ask *urls*; *count* is called with the result of each validation.

        Results: ``accepted``, ``rejected``, ``unknown``, each followed by ``_cached`` when it was known.
        """
        self._count = count
        self._session: aiohttp.ClientSession | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._pending: dict[bytes, asyncio.Task[Verdict]] = {}
        self._quiet_until = 0.0
        self._unsaid = 0
        self._places = FairPlaces(MAX_AT_ONCE, MAX_WAITING)
        self._urls: tuple[str, ...] = ()
        self._cache = TokenCache(cache_s)
        self.configure(urls, cache_s=cache_s, timeout_s=timeout_s)

    def configure(self, urls: Sequence[str], *, cache_s: float, timeout_s: float) -> None:
        """Ask other *urls* from now on; what the earlier ones said is forgotten."""
        if (tuple(urls), cache_s) != (self._urls, self._cache.accepted_s):
            self._urls = tuple(urls)
            self._cache = TokenCache(cache_s)
            self._pending.clear()
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_AT_ONCE * 4),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tasks is not None and self._session is not None:
            for task in self._pending.values():
                task.cancel()
            try:
                # Not what went wrong outside: the group would hide it in one of its own.
                await self._tasks.__aexit__(None, None, None)
            finally:
                await self._session.close()

    async def validate(self, token: str, address: str = "") -> tuple[Verdict, str]:
        """Return the verdict on *token*, which came from *address*, and a name for whoever shows it."""
        if len(token) > MAX_TOKEN_CHARS or not TOKEN.fullmatch(token):
            return self._done(Verdict.REJECTED), ""
        digest = token_digest(token)
        known = self._cache.get(digest, self._now())
        if known is not None:
            self._count(f"{known.name.lower()}_cached")
            return known, identity(digest)
        task = self._pending.get(digest)
        if task is None:
            holder = holder_of(address)
            if self._tasks is None:
                return self._done(Verdict.UNKNOWN), ""
            if not self._places.enter(holder):
                self._complain("too many unknown tokens at a time", address=address)
                return self._done(Verdict.UNKNOWN), ""
            task = self._tasks.create_task(self._look_up(token, digest, holder))
            self._pending[digest] = task
            task.add_done_callback(lambda done: self._forget(digest, holder, done))
        # Whoever asked first may leave; the others want to know all the same.
        return self._done(await asyncio.shield(task)), identity(digest)

    def _forget(self, digest: bytes, holder: str, task: asyncio.Task[Verdict]) -> None:
        self._places.leave(holder)
        if self._pending.get(digest) is task:
            del self._pending[digest]

    def _done(self, verdict: Verdict) -> Verdict:
        self._count(verdict.name.lower())
        return verdict

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _look_up(self, token: str, digest: bytes, holder: str) -> Verdict:
        urls, cache = self._urls, self._cache
        try:
            async with asyncio.timeout(self._timeout_s), self._places.place(holder):
                verdict = await self._ask_all(urls, token)
        except TimeoutError:
            self._complain("token validation timed out", seconds=self._timeout_s)
            return Verdict.UNKNOWN
        except Exception as error:  # noqa: BLE001  one look-up must not end the service
            self._complain("token validation failed", reason=type(error).__name__)
            return Verdict.UNKNOWN
        cache.put(digest, verdict, self._now())
        return verdict

    async def _ask_all(self, urls: Sequence[str], token: str) -> Verdict:
        """Ask all at once; the first that vouches is enough."""
        worst = Verdict.REJECTED
        asked = [asyncio.ensure_future(self._ask(url, token)) for url in urls]
        try:
            for answer in asyncio.as_completed(asked):
                verdict = await answer
                if verdict is Verdict.ACCEPTED:
                    return verdict
                if verdict is Verdict.UNKNOWN:
                    worst = verdict
        finally:
            for request in asked:
                request.cancel()
        return worst

    async def _ask(self, url: str, token: str) -> Verdict:
        if self._session is None:
            return Verdict.UNKNOWN
        try:
            async with self._session.get(
                url, headers={"Authorization": f"Bearer {token}"}, allow_redirects=False
            ) as response:
                status = response.status
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._complain(UNANSWERED, url=_shown(url), reason=type(error).__name__)
            return Verdict.UNKNOWN
        if status == 200:
            return Verdict.ACCEPTED
        if status >= 500 or status in (408, 429):
            self._complain(UNANSWERED, url=_shown(url), reason=f"it answered {status}")
            return Verdict.UNKNOWN
        return Verdict.REJECTED

    def _complain(self, event: str, **keys: object) -> None:
        """Say that a look-up failed; not each time, since clients decide how many there are."""
        now = self._now()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        log.warning(event, **keys, others_since_the_last=self._unsaid)
        self._quiet_until, self._unsaid = now + QUIET_S, 0


def _shown(url: str) -> str:
    # Neither a query, which may hold a secret, nor the error's own text, which may hold the request.
    parts = URL(url)
    return cap(f"{parts.scheme}://{parts.host}:{parts.port}{parts.path}")
