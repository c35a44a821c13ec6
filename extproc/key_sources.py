"""Follows the files and the URL that say how clients prove who they are.

Files are read again when they change, and the URL of an issuer's keys (JWKS) now and then. What cannot be
used changes nothing: the last good keys stay, and the log says where the fault is. As long as the keys of a
URL have never been had, nobody gets in, and that is so after each start: they are not written down.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import aiohttp
import structlog

from extproc.client_keys import parse_api_keys, parse_jwks, parse_passwords
from extproc.config import Config
from extproc.errors import ConfigError
from extproc.watched_files import watch_files
from extproc.xds.model import (
    ApiKey,
    ApiKeys,
    AskedTokens,
    ClientAuth,
    NobodyYet,
    Passwords,
    SignedTokens,
)

MAX_BYTES = 2**20
REFETCH_S = 300.0
FIRST_RETRY_S = 2.0
"""After a fetch that failed; doubled each time."""

FETCH_TIMEOUT_S = 10.0
LOCKED_OUT = "--jwt-jwks: cannot be used; nobody gets in until it can"
UNCHANGED = "--jwt-jwks: cannot be used; keys in use stay"

ANSWER_MARGIN_S = 1.0
"""What this service may need beside the URLs that it asks."""

KEY_OPTIONS = frozenset(
    {
        "api_key",
        "api_keys_file",
        "htpasswd_file",
        "jwt_issuer",
        "jwt_jwks",
        "jwt_audiences",
        "api_key_validation_urls",
        "api_key_validation_timeout_secs",
    }
)
"""Options that say how clients prove who they are."""

OWN_KEY_NAME = "api-key"
"""What the client with the key of ``--api-key`` is called."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class KeySources:
    """How clients prove who they are, as it is known at this moment."""

    def __init__(self, config: Config) -> None:
        """Read what *config* names. ``ConfigError`` when a file cannot be used."""
        self._config = config
        self._fetched: tuple[str, str] = ("", "")
        """A URL and the keys that were last had from it."""
        self.auth = self._read(config)
        self._changed = asyncio.Event()
        self._asked = asyncio.Event()
        """Whether the URL has been asked once."""

    def configure(self, config: Config) -> None:
        """Go by *config* from now on. ``ConfigError`` when a file cannot be used; then nothing changes.

        A file that is named as before is not read: it is followed anyway, and must not stand in the way of
        another change while it is broken.
        """
        if _settings(config) != _settings(self._config):
            self.auth = self._read(config)
        self._config = config
        self._changed.set()

    async def settle(self, limit_s: float) -> None:
        """Wait until keys that come from a URL have been asked for once, but no longer than *limit_s* seconds."""
        if is_url(self._config.jwt_jwks):
            try:
                async with asyncio.timeout(limit_s):
                    await self._asked.wait()
            except TimeoutError:
                log.warning(
                    "--jwt-jwks: no answer yet; nobody gets in until then",
                    url=self._config.jwt_jwks,
                    seconds=limit_s,
                )

    async def run(self, on_change: Callable[[], None]) -> None:
        """Follow for ever; call *on_change* when ``auth`` is another."""

        def look() -> None:
            if self._look():
                on_change()

        look()  # it may have changed since it was read
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch_files(lambda: key_files(self._config), look))
            tasks.create_task(self._fetch_for_ever(look))

    def _look(self) -> bool:
        """Read anew; tell whether anything changed."""
        try:
            found = self._read(self._config)
        except ConfigError as error:
            log.error("keys of clients refused; those in use stay", reason=str(error))
            return False
        if found == self.auth:
            return False
        self.auth = found
        log.info("keys of clients changed", **_described(found))
        return True

    def _read(self, config: Config) -> ClientAuth:
        return read_auth(config, fetched=dict([self._fetched]))

    async def _fetch_for_ever(self, look: Callable[[], None]) -> None:
        wait_s = FIRST_RETRY_S
        while True:
            self._changed.clear()
            url = self._config.jwt_jwks
            if not is_url(url):
                await self._changed.wait()
                continue
            try:
                self._fetched = (url, parse_jwks(await _fetch(url)))
            except (aiohttp.ClientError, OSError, ValueError) as error:
                reason = str(error) or type(error).__name__
                event = LOCKED_OUT if isinstance(self.auth, NobodyYet) else UNCHANGED
                log.error(event, url=url, reason=reason)
                pause_s = wait_s
                wait_s = min(2 * wait_s, REFETCH_S)
            else:
                pause_s, wait_s = REFETCH_S, FIRST_RETRY_S
                look()
            self._asked.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
                    wait_s = FIRST_RETRY_S


def read_auth(config: Config, *, fetched: dict[str, str] | None = None) -> ClientAuth:
    """Return how clients prove who they are.

    *fetched*: keys that were had from a URL. ``ConfigError`` names the file, the line and the reason.
    """
    if config.api_key_validation_urls:
        return AskedTokens(config.api_key_validation_timeout_secs + ANSWER_MARGIN_S)
    if config.htpasswd_file:
        return Passwords(_parsed("htpasswd_file", config.htpasswd_file, parse_passwords))
    if config.jwt_issuer:
        if is_url(config.jwt_jwks):
            jwks = (fetched or {}).get(config.jwt_jwks)
        else:
            jwks = _parsed("jwt_jwks", config.jwt_jwks, parse_jwks)
        if not jwks:
            return NobodyYet()
        return SignedTokens(config.jwt_issuer, jwks, config.jwt_audiences)
    keys = [ApiKey(OWN_KEY_NAME, config.api_key)] if config.api_key else []
    if config.api_keys_file:
        keys += _parsed("api_keys_file", config.api_keys_file, parse_api_keys)
        if len({key.key for key in keys}) < len(keys):
            raise ConfigError(
                f"--api-keys-file: {config.api_keys_file} holds the key of --api-key, too"
            )
    return ApiKeys(tuple(keys)) if keys else None


def key_files(config: Config) -> tuple[str, ...]:
    """Return the files that are to be watched."""
    jwks = "" if is_url(config.jwt_jwks) else config.jwt_jwks
    return tuple(filter(None, (config.api_keys_file, config.htpasswd_file, jwks)))


def is_url(text: str) -> bool:
    """Tell a URL from a file."""
    return text.startswith(("http://", "https://"))


def _settings(config: Config) -> tuple[object, ...]:
    return tuple(getattr(config, name) for name in sorted(KEY_OPTIONS))


def _parsed(option: str, path: str, parse: Callable[[str], T]) -> T:
    flag = f"--{option.replace('_', '-')}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise ConfigError(f"{flag}: cannot read {path}: {reason}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{flag}: {path} is larger than {MAX_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{flag}: {path}, line {line}: it is not UTF-8 text") from None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {path}, {error}") from None


async def _fetch(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
        session.get(url, allow_redirects=False) as response,
    ):
        if response.status != 200:
            raise ValueError(f"it answers {response.status}")
        data = await response.content.read(MAX_BYTES + 1)
        while len(data) <= MAX_BYTES and (more := await response.content.read(MAX_BYTES)):
            data += more
    if len(data) > MAX_BYTES:
        raise ValueError(f"its answer is larger than {MAX_BYTES} bytes")
    return data.decode()


def _described(auth: ClientAuth) -> dict[str, object]:
    """Return what may be told of *auth* in a log."""
    found: dict[str, object] = {"kind": type(auth).__name__}
    if isinstance(auth, ApiKeys):
        found["clients"] = sorted({key.client for key in auth.keys})
    return found
