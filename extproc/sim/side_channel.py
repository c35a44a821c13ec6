"""Both ends of the side channel over which a decode worker gets KV; the wire is in ``kv_wire``."""

import asyncio
from typing import cast

import structlog

from extproc.sim.exchange import reset
from extproc.sim.kept_transfers import KeptTransfers, MismatchError, Transfer
from extproc.sim.kv_wire import (
    Answer,
    Done,
    Frame,
    FrameBuffer,
    Pull,
    WireError,
    decode,
    encode,
    read_answer,
)

ANSWER_S = 5.0
"""How long the prefill side may take to accept, or to answer what needs no waiting, in seconds."""

log = structlog.get_logger(__name__)


class TransferFailedError(Exception):
    """The prefill side cannot be reached or does not answer."""


class SideChannel:
    """The prefill worker's end: serves *kept* on a port of its own."""

    def __init__(self, kept: KeptTransfers) -> None:
        self.port = 0
        """The port in use, once started."""
        self._kept = kept
        self._connections: set[_Connection] = set()
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; OSError when the port cannot be had."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: _Connection(self._kept, self._connections), host, port
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop at once; connections are reset. A second call does nothing."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.reset()


class _Connection(asyncio.Protocol):
    """One decode worker's connection; what it has reserved goes with it."""

    def __init__(self, kept: KeptTransfers, connections: set["_Connection"]) -> None:
        self._kept = kept
        self._connections = connections
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._waiting_for: Pull | None = None
        self._transfer: Transfer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Answer the frames that are complete; end the connection on anything else."""
        try:
            for body in self._frames.feed(data):
                self._on_frame(decode(body))
        except WireError as error:
            log.warning("side channel broken off", error=str(error)[:256])
            self.reset()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back what was reserved."""
        self._connections.discard(self)
        self._transport = None
        if self._waiting_for is not None:
            self._kept.stop_waiting(self._waiting_for.request_id, self._retry)
            self._waiting_for = None
        if self._transfer is not None:
            self._kept.give_back(self._transfer)
            self._transfer = None

    def reset(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            reset(self._transport)

    def _on_frame(self, frame: Frame) -> None:
        if isinstance(frame, Done):
            self._on_done()
        elif self._transfer is not None or self._waiting_for is not None:
            raise WireError("a second pull while one is under way")
        else:
            self._on_pull(frame)

    def _on_pull(self, pull: Pull) -> None:
        try:
            self._transfer = self._kept.reserve(pull)
        except MismatchError as error:
            self._answer(Answer(mismatch=str(error)))
            return
        if self._transfer is None:
            self._waiting_for = pull
            self._kept.wait(pull.request_id, self._retry)
        else:
            self._answer(Answer())

    def _retry(self) -> None:
        pull, self._waiting_for = self._waiting_for, None
        if pull is not None:
            self._on_pull(pull)

    def _on_done(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            raise WireError("done without a pull")
        try:
            self._kept.finish(transfer)
        except MismatchError as error:
            self._answer(Answer(mismatch=str(error)))
        else:
            self._answer(Answer())

    def _answer(self, answer: Answer) -> None:
        if self._transport is not None:
            self._transport.write(encode(answer))


async def pull_blocks(
    host: str, port: int, pull: Pull, *, wait_s: float, transfer_s: float
) -> None:
    """Reserve the blocks, let the transfer take *transfer_s*, and have them freed.

    Raises:
        MismatchError: the prefill side says what does not match.
        TransferFailedError: it cannot be reached, does not speak the protocol, or takes over *wait_s*.

    """
    writer = None
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port)
        writer.write(encode(pull))
        async with asyncio.timeout(wait_s if pull.wait else ANSWER_S):
            _check(await read_answer(reader))
        await asyncio.sleep(transfer_s)
        writer.write(encode(Done()))
        async with asyncio.timeout(ANSWER_S):
            _check(await read_answer(reader))
    except TimeoutError as error:
        raise TransferFailedError(f"no answer from {host}:{port} in time") from error
    except (OSError, EOFError, WireError, ValueError, OverflowError) as error:
        raise TransferFailedError(f"{host}:{port}: {error}") from error
    finally:
        if writer is not None:
            writer.close()


def _check(answer: Answer) -> None:
    if answer.mismatch is not None:
        raise MismatchError(answer.mismatch)
