"""A client of the admin API, for the command line."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import ssl
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from extproc.address import DEFAULT_PORTS
from extproc.log import cap

TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 2**20


class RouterError(Exception):
    """The router did not do what it was asked to; the text says why, and is safe for a terminal."""


class RouterUnreachableError(RouterError):
    """Nobody answers at the router's URL, or it is not a router."""


class ListedWorker(msgspec.Struct):
    """A worker as ``GET /workers`` shows it, as far as the command line does."""

    url: str
    state: str = "unknown"
    reason: str = ""
    model_id: str = "unknown"
    load: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    since: dt.datetime | None = None


class _WorkerList(msgspec.Struct):
    workers: list[ListedWorker]


class _Error(msgspec.Struct):
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """The workers at one moment."""

    workers: tuple[ListedWorker, ...]
    at: dt.datetime | None
    """What the router's clock said; ages follow from it, whatever the clock here says."""

    raw: bytes
    """The JSON of the answer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterTls:
    """How an https router is trusted, and what it is shown. Files in PEM."""

    ca_file: str = ""
    """Certificates that vouch for the router; empty: those of the system."""

    insecure: bool = False
    client_cert: str = ""
    client_key: str = ""
    """Empty: it stands in the file of ``client_cert``."""

    def context(self) -> ssl.SSLContext:
        """Return what a connection needs; ``RouterError`` names the file that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            raise RouterError(f"--router-ca-file: {_why_not(error, self.ca_file)}") from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_key and not self.client_cert:
            raise RouterError("--router-client-key: --router-client-cert must be given too")
        if self.client_cert:
            key = self.client_key or None
            try:
                context.load_cert_chain(self.client_cert, key, password=_no_password)
            except (OSError, ValueError) as error:
                files = " and ".join(filter(None, (self.client_cert, self.client_key)))
                raise RouterError(f"--router-client-cert: {_why_not(error, files)}") from error
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")


def _why_not(error: Exception, file: str) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "not PEM").lower().replace("_", " ")
    elif isinstance(error, OSError):
        reason = error.strerror or str(error)
    else:
        reason = str(error)
    return plain(f"cannot use {file}: {reason}")


class AdminClient:
    """Asks one router. Use as an async context manager."""

    def __init__(
        self, router_url: str, admin_api_key: str = "", tls: RouterTls | None = None
    ) -> None:
        """Make a client; ``RouterError`` when *router_url* is none."""
        self.url = router_url.rstrip("/")
        parts = _split(self.url)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.query or parts.fragment:
            raise RouterError(f"--router-url: expected http://host:port, got {plain(router_url)!r}")
        if parts.username is not None:  # not repeated
            raise RouterError("--router-url: expected http://host:port without user and password")
        if not (admin_api_key.isascii() and admin_api_key.isprintable()):
            raise RouterError("--admin-api-key: expected visible ASCII characters")
        self._headers = {"Authorization": f"Bearer {admin_api_key}"} if admin_api_key else {}
        tls = tls or RouterTls()
        self._tls = tls.context() if parts.scheme == "https" else None
        self._shows_no_certificate = self._tls is not None and not tls.client_cert
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._tls) if self._tls is not None else None
        self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def list_workers(self) -> Listing:
        """Return all workers."""
        body, date = await self._request("GET", "/workers")
        try:
            workers = msgspec.json.decode(body, type=_WorkerList).workers
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._not_a_router() from error
        return Listing(tuple(workers), date, body)

    async def add(self, described: Mapping[str, Any], *, wait_s: float | None = None) -> None:
        """Add a worker, and with *wait_s* wait that long until it is healthy."""
        query = "" if wait_s is None else f"?wait=1&timeout={wait_s:g}"
        await self._request(
            "POST", f"/workers{query}", json=dict(described), timeout_s=TIMEOUT_S + (wait_s or 0)
        )

    async def remove(self, url: str) -> None:
        """Remove a worker at once."""
        await self._request("DELETE", f"/workers/{quote(url, safe='')}")

    async def drain(self, url: str, *, timeout_s: float | None = None) -> None:
        """Remove a worker when it is idle, or after *timeout_s* seconds."""
        query = "" if timeout_s is None else f"?timeout={timeout_s:g}"
        await self._request("POST", f"/workers/{quote(url, safe='')}/drain{query}")

    async def _request(
        self, method: str, path: str, *, json: Any = None, timeout_s: float = TIMEOUT_S
    ) -> tuple[bytes, dt.datetime | None]:
        if self._session is None:
            raise RuntimeError("used outside its context")
        try:
            async with self._session.request(
                method,
                f"{self.url}{path}",
                json=json,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
                allow_redirects=False,  # the key is for this router alone
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise self._not_a_router()
                status, date = response.status, response.headers.get("Date", "")
        except TimeoutError as error:
            raise RouterUnreachableError(
                f"the router at {self.url} does not answer within {timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RouterUnreachableError(
                f"the router at {self.url} cannot be reached: {self._why(error)}"
            ) from error
        if 200 <= status < 300:
            return bytes(body), _parse_date(date)
        raise self._error(status, bytes(body))

    def _why(self, error: Exception) -> str:
        why = _why(error)
        if self._shows_no_certificate and not isinstance(error, aiohttp.ClientConnectorError):
            # TLS 1.3 lets a client in before it is refused; often the connection just breaks then.
            return f"{why}; if it wants a certificate of its clients, give one with --router-client-cert"
        return why

    def _error(self, status: int, body: bytes) -> RouterError:
        try:
            text = plain(msgspec.json.decode(body, type=_Error).error)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return RouterUnreachableError(
                f"{self.url} answers {status}: it is not a router, or the router's service is away"
            )
        if status == 401:
            return RouterError(
                f"{text.partition(':')[0]}: give it with --admin-api-key or in"
                " VLLM_EXTPROC_ADMIN_API_KEY"
            )
        return RouterError(text)

    def _not_a_router(self) -> RouterError:
        return RouterUnreachableError(f"what answers at {self.url} is not a router")


def plain(text: str) -> str:
    """Return *text* from outside without anything that a terminal would obey, and not too long."""
    return cap(
        "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    )


def _why(error: Exception) -> str:
    """Return the cause in few words: aiohttp's own texts repeat the address."""
    for cause in (getattr(error, "os_error", None), error, error.__cause__):
        if isinstance(cause, ssl.SSLError | ssl.CertificateError):
            return _why_no_tls(cause)
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno)
        return plain(cause.strerror or str(cause))  # a name that cannot be resolved
    return plain(str(error)) or type(error).__name__


def _why_no_tls(error: ssl.SSLError | ssl.CertificateError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return plain(
            f"its certificate is refused ({error.verify_message}); --router-ca-file names who vouches for it"
        )
    reason = (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
    if "alert" in reason and ("certificate" in reason or "handshake failure" in reason):
        return (
            "it refuses us as a client; if it wants a certificate of its clients, give one with"
            " --router-client-cert"
        )
    if reason in ("wrong version number", "record layer failure"):
        return "it does not speak TLS; is its URL http://?"
    return plain(reason)


def _split(url: str) -> Any:
    try:
        parts = urlsplit(url)
        _ = parts.port  # read lazily: raises when it is none
    except ValueError:
        return urlsplit("")
    return parts


def _parse_date(text: str) -> dt.datetime | None:
    try:
        return parsedate_to_datetime(text)
    except ValueError:
        return None
