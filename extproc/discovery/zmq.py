"""Workers that announce themselves over ZMQ, as those with P2P-NCCL do; see ``announcements``.

Whoever can connect can become a worker, and nothing is ever answered. What waits to be read is bounded for
each connection; a part that is too large ends its connection within ZMQ. Not bounded are the parts of one
message: ZMQ keeps all of them until the last has come, and has no option against that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable

import zmq
import zmq.asyncio

from extproc.address import Address
from extproc.discovery.announcements import (
    EXPIRY_S,
    FRAMES,
    MAX_FRAME_BYTES,
    Announcements,
)
from extproc.discovery.updates import Add, Remove, Reset, Update, WorkerSpec
from extproc.errors import ConfigError

MAX_UNREAD = 16
"""Messages of one connection that wait to be read; then its sender waits."""

KERNEL_BYTES = 65_536
"""What the kernel keeps of a connection beyond these."""

MAX_AT_ONCE = 500
"""Messages that are read before others have their turn: a few milliseconds."""

GATHER_S = 0.05
"""Between two updates, at least: a thousand workers may join in one moment."""

LATE_S = 0.5
"""Who wakes up so late does not know yet who spoke meanwhile."""

PATIENCE_S = 1.0
"""How much longer workers are waited for when messages are not read in time."""

KEEP_ALIVE_S = 30
BACKLOG = 1024


async def watch(
    address: Address,
    *,
    known: Callable[[], Iterable[WorkerSpec]] = tuple,
    count_refused: Callable[[int], None],
    report: Callable[[int, str], None],
) -> AsyncIterator[Update]:
    """Yield what changes among the workers that announce themselves at *address*.

    *known* returns those of an earlier run, which have as much time as if they had just spoken. *report* is
    called now and then with the number of messages refused, and why the last of them. ``ConfigError`` when
    the address cannot be had.
    """
    loop = asyncio.get_running_loop()
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        _bind(router, address)
        inbox: zmq.Socket[bytes] = zmq.Socket.shadow(router)
        said = Announcements(known(), loop.time())
        while True:
            due = said.next_expiry
            wait_s = EXPIRY_S if due is None else max(due - loop.time(), 0.0)
            began = loop.time()
            await router.poll(math.ceil(wait_s * 1000))
            late = loop.time() - began > wait_s + LATE_S
            refused = said.refused
            changed, emptied = _read(inbox, said, loop.time())
            slack = 0.0 if emptied and not late else PATIENCE_S
            gone = said.expire(loop.time() - slack)
            if said.refused > refused:
                count_refused(said.refused - refused)
            if complaint := said.complaint(loop.time()):
                report(*complaint)
            match changed, gone:
                case [], []:
                    pass
                case [worker], []:
                    yield Add(worker)
                case [], [key]:
                    yield Remove(key)
                case _:
                    yield Reset(said.workers)
            if changed or gone or not emptied or slack:
                await asyncio.sleep(GATHER_S)


def _bind(router: zmq.asyncio.Socket, address: Address) -> None:
    options = {
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
        zmq.RCVHWM: MAX_UNREAD,
        zmq.RCVBUF: KERNEL_BYTES,
        zmq.BACKLOG: BACKLOG,
        # A worker that comes back before its old connection is known to be dead has the same identity.
        zmq.ROUTER_HANDOVER: 1,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: KEEP_ALIVE_S,
        zmq.TCP_KEEPALIVE_INTVL: KEEP_ALIVE_S,
        zmq.IPV6: int(":" in address.host),
    }
    for option, value in options.items():
        router.setsockopt(option, value)
    try:
        router.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        reason = zmq.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot listen on {address} (--vllm-discovery-address): {reason}"
        ) from error


def _read(
    inbox: zmq.Socket[bytes], said: Announcements, now: float
) -> tuple[list[WorkerSpec], bool]:
    """Take in what is there; return workers that are new or others, and whether everything was read."""
    changed: dict[str, WorkerSpec] = {}
    for _ in range(MAX_AT_ONCE):
        try:
            frames = _receive(inbox)
        except zmq.Again:
            return list(changed.values()), True
        spec = said.take(frames, now)
        if spec is not None:
            changed[spec.key] = spec
    return list(changed.values()), False


def _receive(inbox: zmq.Socket[bytes]) -> list[bytes]:
    """Return the parts of one message, of too many only the first."""
    frames = [inbox.recv(zmq.NOBLOCK)]
    while inbox.getsockopt(zmq.RCVMORE):
        frame = inbox.recv(zmq.NOBLOCK)
        if len(frames) <= FRAMES:
            frames.append(frame)
    return frames
