"""The service's own HTTP requests to workers: models, metrics, loads, caches.

They go straight to the worker, not through Envoy, and carry none of a client's credentials. Proxies of the
environment are ignored: they are for clients of the internet.
"""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from extproc.address import is_ip, join_host_port
from extproc.engine import Engine
from extproc.errors import ConfigError
from extproc.log import cap

MAX_ANSWER_BYTES = 8 * 2**20
CONNECTIONS_PER_WORKER = 4
"""There is no bound on all of them together: workers that hang would use it up, and starve the others."""

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which vLLM closes an idle connection."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a worker answered."""

    status: int
    body: bytes
    content_type: str = ""

    @property
    def ok(self) -> bool:
        """Whether the status is one of success."""
        return 200 <= self.status < 300


class WorkerUnreachableError(Exception):
    """The worker did not answer; the text says why."""


class WorkerRefusedError(WorkerUnreachableError):
    """Nothing listens there: the worker's process is gone, or has yet to begin."""


class WorkerClient:
    """Asks workers. Use as an async context manager."""

    def __init__(
        self,
        *,
        api_key: str = "",
        ca_file: str = "",
        tls_server_name: str = "",
        tls_insecure: bool = False,
    ) -> None:
        self.set_api_key(api_key)
        self._tls_server_name = tls_server_name
        self._tls = _tls_context(ca_file, insecure=tls_insecure)
        self._session: aiohttp.ClientSession | None = None

    def set_api_key(self, api_key: str) -> None:
        """Show workers *api_key* from the next request on; nothing when it is empty."""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=CONNECTIONS_PER_WORKER, keepalive_timeout=KEEP_ALIVE_S
            ),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        engine: Engine,
        method: str,
        path: str,
        *,
        timeout_s: float,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
        side_port: int | None = None,
    ) -> Answer:
        """Ask *engine*; *path* comes after its base path.

        *side_port*: ask another server of its host instead, which speaks plain HTTP and is shown no key.

        ``WorkerUnreachableError`` when it does not answer, or with more than *max_bytes*.
        """
        if self._session is None or not engine.address:
            raise WorkerUnreachableError(engine.unresolved or "it has no address yet")
        url = engine.spec.url
        # At the address that Envoy uses, under the name that the worker is known by.
        target = f"{url.scheme}://{join_host_port(engine.address, url.port)}{url.path}{path}"
        sent = {**self._headers, **(headers or {})}
        if side_port is not None:
            target = f"http://{join_host_port(engine.address, side_port)}{path}"
            sent = dict(headers or {})
        if url.is_named:
            sent["Host"] = url.host
        name = engine.spec.tls_name or self._tls_server_name or url.host
        try:
            async with self._session.request(
                method,
                target,
                json=json,
                headers=sent,
                ssl=self._tls,
                server_hostname=name if url.scheme == "https" and not _same(name, engine) else None,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > max_bytes:
                        raise WorkerUnreachableError("its answer is too large")
                return Answer(response.status, bytes(body), response.content_type)
        except TimeoutError as error:
            raise WorkerUnreachableError(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(_cause(error), ConnectionRefusedError):
                raise WorkerRefusedError("connection refused") from error
            raise WorkerUnreachableError(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return cap(f"its certificate is refused: {error.certificate_error}")
    return cap(str(_cause(error))) or type(error).__name__


def _cause(error: Exception) -> Exception:
    return error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error


def _same(name: str, engine: Engine) -> bool:
    return is_ip(name) and name == engine.address


def _tls_context(ca_file: str, *, insecure: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--worker-ca-file: cannot read {ca_file}: {error}") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
