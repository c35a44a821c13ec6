"""Mooncake's bootstrap server: which engines a prefill worker has and where their side channels are."""

import asyncio
from collections.abc import Mapping

import aiohttp
import msgspec
from aiohttp import web

from extproc.sim.exchange import reset
from extproc.sim.kept_transfers import MismatchError
from extproc.sim.kv_params import join_address, split_address
from extproc.sim.side_channel import ANSWER_S, TransferFailedError


class EngineEntry(msgspec.Struct, frozen=True):
    """One data-parallel rank in the answer of ``/query``."""

    engine_id: str
    worker_addr: dict[str, dict[str, str]]
    """Side channel as ``tcp://host:port``, by tensor- and pipeline-parallel rank."""


class Bootstrap:
    """Answers ``GET /query`` on a port of its own."""

    def __init__(self) -> None:
        self.port = 0
        """The port in use, once started."""
        self._answer = b"{}"
        self._http: web.Server | None = None
        self._listener: asyncio.Server | None = None

    async def start(
        self, host: str, port: int, *, engine_ids: Mapping[int, str], side_port: int
    ) -> None:
        """Listen; OSError when the port cannot be had.

        Args:
            host: address to listen on, which is the side channel's as well.
            port: TCP port; 0 takes a free one.
            engine_ids: by data-parallel rank.
            side_port: of the side channel.

        """
        address = {"0": {"0": f"tcp://{join_address(host, side_port)}"}}
        self._answer = msgspec.json.encode(
            {str(rank): EngineEntry(engine_id, address) for rank, engine_id in engine_ids.items()}
        )
        self._http = web.Server(self._handle, access_log=None)
        self._listener = await asyncio.get_running_loop().create_server(self._http, host, port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop at once; connections are reset. A second call does nothing."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._http is not None:
            for connection in self._http.connections:
                if connection.transport is not None:
                    reset(connection.transport)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if (request.method, request.path) != ("GET", "/query"):
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.Response(body=self._answer, content_type="application/json")


async def find_engine(bootstrap_url: str, engine_id: str) -> tuple[str, int]:
    """Return host and port of the side channel of *engine_id*.

    Raises:
        MismatchError: the URL is none, or the engine is not there.
        TransferFailedError: the server cannot be reached or answers something else.

    """
    if not bootstrap_url.startswith(("http://", "https://")):
        raise MismatchError(f"remote_bootstrap_addr must be a URL, got {bootstrap_url!r}")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session,
            session.get(f"{bootstrap_url}/query", raise_for_status=True) as answer,
        ):
            engines = msgspec.json.decode(await answer.read(), type=dict[str, EngineEntry])
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError) as error:
        raise TransferFailedError(f"bootstrap server {bootstrap_url}: {error}") from error
    for entry in engines.values():
        if entry.engine_id == engine_id:
            address = entry.worker_addr.get("0", {}).get("0", "")
            split = split_address(address.removeprefix("tcp://"))
            if split is None:
                raise TransferFailedError(
                    f"bootstrap server {bootstrap_url}: no address in {address!r}"
                )
            return split
    raise MismatchError(
        f"remote_engine_id {engine_id!r} is not at {bootstrap_url}, which has "
        f"{', '.join(entry.engine_id for entry in engines.values())}"
    )
