"""The KV that a prefill worker keeps until it is pulled, and the checks a pull has to pass.

A transfer is kept, then reserved by one reader, then finished, which frees its blocks. A reader that
goes away gives it back. What nobody finishes in time expires, reserved or not. Ids that have ended
are remembered for a while, so that a second pull is told why.
"""

import asyncio
import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from extproc.sim.kv_wire import Pull

REMEMBERED = 4096
"""Ended ids that are remembered."""


class MismatchError(Exception):
    """Two legs do not fit together; the message says in what."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """The blocks of one prompt."""

    engine_id: str
    request_id: str
    block_ids: list[list[int]]
    prompt_tokens: int
    prompt_key: int
    release: Callable[[], None]
    """Frees the blocks."""
    reserved: bool = False
    """Whether a reader is at work."""
    timer: asyncio.TimerHandle | None = None


class KeptTransfers:
    """All transfers of one worker; *engine_ids* are those of its ranks."""

    def __init__(self, engine_ids: Sequence[str]) -> None:
        self.address: str | None = None
        """The worker's own address for ``Pull.address``."""
        self.expired: Counter[str] = Counter()
        """Transfers that nobody finished in time, by engine id."""
        self._engine_ids = engine_ids
        self._held: dict[str, Transfer] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, transfer: Transfer, hold_s: float) -> None:
        """Keep *transfer* for *hold_s* real seconds; MismatchError when its id is in use."""
        request_id = transfer.request_id
        if request_id in self._held:
            raise MismatchError(f"request id {request_id!r} already has blocks that nobody pulled")
        self._held[request_id] = transfer
        self._ended.pop(request_id, None)
        transfer.timer = asyncio.get_running_loop().call_later(hold_s, self._expire, transfer)
        for wake in self._waiting.pop(request_id, ()):
            wake()

    def reserve(self, pull: Pull) -> Transfer | None:
        """Return what *pull* asks for, reserved; None when it has to wait, MismatchError when wrong."""
        if pull.address is not None and pull.address != self.address:
            raise MismatchError(
                f"prefill address {pull.address!r} is not this worker's, which is {self.address!r}"
            )
        if pull.engine_id is not None and pull.engine_id not in self._engine_ids:
            raise MismatchError(
                f"engine id {pull.engine_id!r} is not of this worker, which has {', '.join(self._engine_ids)}"
            )
        transfer = self._held.get(pull.request_id)
        if transfer is None:
            end = self._ended.get(pull.request_id)
            if end is None and pull.wait:
                return None
            raise MismatchError(f"request id {pull.request_id!r} {end or 'has no blocks here'}")
        _check(transfer, pull)
        transfer.reserved = True
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Free the blocks of *transfer*, which is read; MismatchError when it has expired meanwhile."""
        if self._held.get(transfer.request_id) is not transfer:
            raise MismatchError(f"request id {transfer.request_id!r} expired during the transfer")
        self._end(transfer, "was already pulled")

    def give_back(self, transfer: Transfer) -> None:
        """Let another reader have *transfer*."""
        transfer.reserved = False

    def wait(self, request_id: str, wake: Callable[[], None]) -> None:
        """Call *wake* once when there is a transfer of that id."""
        self._waiting.setdefault(request_id, []).append(wake)

    def stop_waiting(self, request_id: str, wake: Callable[[], None]) -> None:
        """Forget *wake*."""
        waiting = self._waiting.get(request_id, [])
        if wake in waiting:
            waiting.remove(wake)
            if not waiting:
                del self._waiting[request_id]

    def clear(self) -> None:
        """Free everything, as the worker stops."""
        for transfer in list(self._held.values()):
            self._end(transfer, "was dropped")

    def _expire(self, transfer: Transfer) -> None:
        self.expired[transfer.engine_id] += 1
        self._end(transfer, "has expired")

    def _end(self, transfer: Transfer, how: str) -> None:
        del self._held[transfer.request_id]
        if transfer.timer is not None:
            transfer.timer.cancel()
        transfer.release()
        self._ended[transfer.request_id] = how
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)


def _check(transfer: Transfer, pull: Pull) -> None:
    """Raise MismatchError when *pull* does not describe *transfer*."""
    which = f"of request id {transfer.request_id!r}"
    if pull.engine_id is not None and pull.engine_id != transfer.engine_id:
        raise MismatchError(f"engine id {which} is {transfer.engine_id!r}, not {pull.engine_id!r}")
    if transfer.reserved:
        raise MismatchError(f"the blocks {which} are being pulled by another request")
    if pull.block_ids is not None and pull.block_ids != transfer.block_ids:
        raise MismatchError(
            f"block ids {which} are {_brief(transfer.block_ids)}, not {_brief(pull.block_ids)}"
        )
    if pull.prompt_tokens != transfer.prompt_tokens:
        raise MismatchError(
            f"the prompt {which} has {transfer.prompt_tokens} tokens, not {pull.prompt_tokens}"
        )
    if pull.prompt_key != transfer.prompt_key:
        raise MismatchError(f"the prompt {which} is another one of the same length")


def _brief(block_ids: list[list[int]]) -> str:
    text = str(block_ids)
    return text if len(text) <= 80 else f"{text[:77]}..."
