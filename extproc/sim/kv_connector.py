"""KV transfer of one worker: which leg a request is, keeping blocks on one side, getting them on the other.

A wrong request is refused with 400. Two legs that do not fit together fail with 500 and count as a
mismatch, where a real vLLM would compute the prompt again or answer from the wrong blocks: a router
with that fault should not pass a test. A decode leg has its blocks before its response starts.
"""

import dataclasses
import functools
import itertools
import os
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TypeVar

from extproc.sim.api_errors import ApiError, invalid
from extproc.sim.engine_loop import Generation
from extproc.sim.kept_transfers import KeptTransfers, MismatchError, Transfer
from extproc.sim.kv_bootstrap import Bootstrap, find_engine
from extproc.sim.kv_config import Connector, KvConfig, Role, TransferMode
from extproc.sim.kv_params import KvTransferParams, join_address, parse_nccl_id, split_address
from extproc.sim.kv_wire import Pull
from extproc.sim.nccl_ping import NcclPing
from extproc.sim.prefix_cache import BLOCK_TOKENS
from extproc.sim.ranks import Rank, Ranks
from extproc.sim.side_channel import SideChannel, TransferFailedError, pull_blocks
from extproc.sim.statistics import KvStatistics
from extproc.sim.work import Work

T = TypeVar("T")

PARAM = "kv_transfer_params"
NO_PARAMS = KvTransferParams()


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillLeg:
    """Keep the blocks under this id."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeLeg:
    """Get the blocks before the first token."""

    pull: Pull
    host: str = ""
    port: int = 0
    bootstrap_url: str | None = None
    """Where host and port are found, None when they are known."""


Leg = PrefillLeg | DecodeLeg


class KvConnector:
    """The connector of one worker with all its ranks."""

    def __init__(self, config: KvConfig, ranks: Ranks) -> None:
        self.config = config
        self.mismatches = 0
        """Legs that did not fit, counted where the 500 is answered."""
        own_id = str(uuid.uuid4())
        numbers = [rank.number for rank in ranks]
        self.engine_ids = {
            number: own_id if len(numbers) == 1 else f"{own_id}_dp{number}" for number in numbers
        }
        """By rank; new at each start, as in vLLM."""
        self.statistics = {number: KvStatistics() for number in numbers}
        """By rank."""
        self.kept = KeptTransfers(list(self.engine_ids.values()))
        self.side_channel = SideChannel(self.kept)
        self.bootstrap = Bootstrap()
        self._ping: NcclPing | None = None
        self._block_ids = itertools.count()

    @property
    def zmq_address(self) -> str:
        """How request ids of P2P-NCCL name this worker."""
        return self.config.zmq_address or join_address(self.config.host, self.side_channel.port)

    async def start(self) -> None:
        """Listen where the other side comes to; ValueError when a port cannot be had."""
        config = self.config
        if config.role != Role.DECODE or config.connector == Connector.NCCL:
            port = config.port
            if port == 0 and config.zmq_address is not None:
                port = (split_address(config.zmq_address) or ("", 0))[1]
            try:
                await self.side_channel.start(config.host, port)
            except OSError as error:
                raise _cannot_listen("kv port", config.host, port, error) from error
        self.kept.address = self.zmq_address
        if config.role != Role.DECODE and config.connector == Connector.MOONCAKE:
            try:
                await self.bootstrap.start(
                    config.host,
                    config.bootstrap_port,
                    engine_ids=self.engine_ids,
                    side_port=self.side_channel.port,
                )
            except OSError as error:
                raise _cannot_listen(
                    "bootstrap port", config.host, config.bootstrap_port, error
                ) from error

    def ping(self, http_address: str) -> None:
        """Tell the router where this worker is from here on; ValueError without pyzmq."""
        config = self.config
        if config.discovery_address is not None:
            self._ping = NcclPing(
                config.discovery_address,
                kind="P" if config.role == Role.PREFILL else "D",
                http_address=http_address,
                zmq_address=self.zmq_address,
            )
            self._ping.start()

    def close(self) -> None:
        """Let go of everything at once. A second call does nothing."""
        if self._ping is not None:
            self._ping.close()
            self._ping = None
        self.bootstrap.close()
        self.side_channel.close()
        self.kept.clear()

    def leg(
        self,
        params: KvTransferParams | None,
        works: Sequence[Work],
        *,
        request_id: str,
        answer_id: str,
        stream: bool,
    ) -> Leg | None:
        """Return which leg a request is, None for a whole one.

        Args:
            params: of the request.
            works: its sequences.
            request_id: value of ``X-Request-Id``.
            answer_id: ``id`` of the answer.
            stream: whether the answer is a stream.

        Raises:
            ApiError: 400 for what this worker does not do, 500 for a mismatch.

        """
        params = params or NO_PARAMS
        self._check_role(params, works)
        try:
            if self.config.connector == Connector.NCCL:
                return self._nccl_leg(request_id, works)
            if params.do_remote_decode:
                if stream:
                    raise invalid("do_remote_decode needs an answer without stream", param=PARAM)
                return self._prefill_leg(params, works, request_id, answer_id)
            if params.do_remote_prefill:
                return self._decode_leg(params, works)
        except MismatchError as error:
            raise self._mismatch(error) from error
        return None

    def keep(self, leg: PrefillLeg, rank: Rank, generation: Generation) -> dict[str, object] | None:
        """Keep the blocks of *generation*, which has ended; return the params for the answer."""
        work = generation.choices[0].work
        loop = rank.engine_loop
        allocation = loop.take_kv(generation)
        transfer = Transfer(
            engine_id=self.engine_ids[rank.number],
            request_id=leg.request_id,
            block_ids=[self._new_block_ids(rank, len(allocation.keys))],
            prompt_tokens=work.prompt_tokens,
            prompt_key=work.prompt_key,
            release=functools.partial(loop.release, allocation),
        )
        hold_s = self.config.hold_s
        try:
            self.kept.keep(transfer, loop.real_s(hold_s) or hold_s)
        except MismatchError as error:
            transfer.release()
            raise self._mismatch(error) from error
        if self.config.connector != Connector.NIXL:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": transfer.block_ids,
            "remote_engine_id": transfer.engine_id,
            "remote_request_id": transfer.request_id,
            "remote_host": self.config.host,
            "remote_port": self.side_channel.port,
            "tp_size": 1,
            "remote_num_tokens": transfer.prompt_tokens,
            "transfer_mode": self.config.transfer_mode,
        }

    async def receive(self, leg: DecodeLeg, rank: Rank, works: Sequence[Work]) -> list[Work]:
        """Get the blocks of the prompt of *works*; ApiError 500 when that is not possible."""
        loop, engine, statistics = rank.engine_loop, rank.engine, self.statistics[rank.number]
        hold_s = self.config.hold_s
        engine.receiving += 1
        try:
            host, port = leg.host, leg.port
            if leg.bootstrap_url is not None:
                host, port = await find_engine(leg.bootstrap_url, leg.pull.engine_id or "")
            size_bytes = self._size_bytes(rank, works[0])
            transfer_s = 0.0
            if self.config.transfer_mb_per_s:
                transfer_s = size_bytes / (self.config.transfer_mb_per_s * 1e6)
            await pull_blocks(
                host,
                port,
                leg.pull,
                wait_s=loop.real_s(hold_s) or hold_s,
                transfer_s=loop.real_s(transfer_s),
            )
        except MismatchError as error:
            raise self._mismatch(error) from error
        except TransferFailedError as error:
            statistics.failed_transfers += 1
            raise ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"KV transfer failed: {error}", param=PARAM
            ) from error
        finally:
            engine.receiving -= 1
        statistics.transferred_bytes.observe(size_bytes)
        statistics.transfer_s.observe(transfer_s)
        return [dataclasses.replace(work, received_tokens=work.prompt_tokens) for work in works]

    def _check_role(self, params: KvTransferParams, works: Sequence[Work]) -> None:
        role = self.config.role
        if params.do_remote_decode and params.do_remote_prefill:
            raise invalid("do_remote_decode and do_remote_prefill exclude each other", param=PARAM)
        if role == Role.DECODE and params.do_remote_decode:
            raise invalid("a decode worker does not serve do_remote_decode", param=PARAM)
        if role == Role.PREFILL and params.do_remote_prefill:
            raise invalid("a prefill worker does not serve do_remote_prefill", param=PARAM)
        longest = max(len(work.pieces) for work in works)
        if longest > 1 and (role == Role.PREFILL or params.do_remote_decode):
            raise invalid(f"a prefill is one token, got max_tokens {longest}", param="max_tokens")

    def _prefill_leg(
        self, params: KvTransferParams, works: Sequence[Work], request_id: str, answer_id: str
    ) -> PrefillLeg:
        _check_one_sequence(works)
        if self.config.connector == Connector.MOONCAKE:
            return PrefillLeg(_given("transfer_id", params.transfer_id))
        if self.config.transfer_mode == TransferMode.PUSH:
            return PrefillLeg(request_id)
        # the id within the engine, which differs when a caller uses an id twice
        return PrefillLeg(f"{answer_id}-0-{os.urandom(4).hex()}")

    def _decode_leg(self, params: KvTransferParams, works: Sequence[Work]) -> DecodeLeg:
        prompt_tokens, prompt_key = _prompt(works)
        if self.config.connector == Connector.MOONCAKE:
            pull = Pull(
                engine_id=_given("remote_engine_id", params.remote_engine_id),
                request_id=_given("transfer_id", params.transfer_id),
                block_ids=None,
                prompt_tokens=prompt_tokens,
                prompt_key=prompt_key,
                wait=True,
            )
            url = _given("remote_bootstrap_addr", params.remote_bootstrap_addr)
            return DecodeLeg(pull, bootstrap_url=url)
        push = self.config.transfer_mode == TransferMode.PUSH
        if params.transfer_mode not in (None, self.config.transfer_mode):
            raise MismatchError(
                f"transfer_mode is '{self.config.transfer_mode}' here, not {params.transfer_mode!r}"
            )
        if params.tp_size not in (None, 1):
            raise MismatchError(f"tp_size is 1 here, not {params.tp_size}")
        if params.remote_num_tokens not in (None, prompt_tokens):
            raise MismatchError(
                f"remote_num_tokens is {params.remote_num_tokens}, but the prompt has {prompt_tokens} tokens"
            )
        block_ids = params.remote_block_ids
        pull = Pull(
            engine_id=_given("remote_engine_id", params.remote_engine_id),
            request_id=_given("remote_request_id", params.remote_request_id),
            block_ids=block_ids if push else _given("remote_block_ids", block_ids),
            prompt_tokens=prompt_tokens,
            prompt_key=prompt_key,
            wait=push,
        )
        host = _given("remote_host", params.remote_host)
        return DecodeLeg(pull, host, _given("remote_port", params.remote_port))

    def _nccl_leg(self, request_id: str, works: Sequence[Work]) -> Leg | None:
        own, role = self.zmq_address, self.config.role
        addresses = parse_nccl_id(request_id)
        if addresses is None:
            if role == Role.BOTH:
                return None
            raise MismatchError(
                f"request id {request_id[:256]!r} is not ___prefill_addr_A___decode_addr_B_ and 32 hex digits"
            )
        if role == Role.PREFILL or (role == Role.BOTH and addresses.prefill == own):
            if addresses.prefill != own:
                raise MismatchError(
                    f"prefill address {addresses.prefill!r} is not this worker's, which is {own!r}"
                )
            _check_one_sequence(works)
            return PrefillLeg(request_id)
        if addresses.decode != own:
            raise MismatchError(
                f"decode address {addresses.decode!r} is not this worker's, which is {own!r}"
            )
        prompt_tokens, prompt_key = _prompt(works)
        pull = Pull(
            engine_id=None,
            address=addresses.prefill,
            request_id=request_id,
            block_ids=None,
            prompt_tokens=prompt_tokens,
            prompt_key=prompt_key,
            wait=True,
        )
        host, port = split_address(addresses.prefill) or ("", 0)
        return DecodeLeg(pull, host, port)

    def _size_bytes(self, rank: Rank, work: Work) -> int:
        """Return what has to be transferred: the prompt without what this engine has of it."""
        full = work.prompt_tokens // BLOCK_TOKENS
        cached = rank.engine.cache.match(work.block_hashes[:full]) * BLOCK_TOKENS
        return (work.prompt_tokens - cached) * self.config.bytes_per_token

    def _new_block_ids(self, rank: Rank, blocks: int) -> list[int]:
        """Return ids for *blocks* blocks; as in vLLM, block 0 is never used."""
        capacity = rank.engine.cache.capacity_blocks
        return [1 + next(self._block_ids) % capacity for _ in range(blocks)]

    def _mismatch(self, error: MismatchError) -> ApiError:
        self.mismatches += 1
        return ApiError(
            HTTPStatus.INTERNAL_SERVER_ERROR, f"KV transfer mismatch: {error}", param=PARAM
        )


def _given(name: str, value: T | None) -> T:
    if value is None:
        raise MismatchError(f"{name} is missing")
    return value


def _check_one_sequence(works: Sequence[Work]) -> None:
    if len(works) != 1:
        raise invalid(f"a prefill is one prompt with n=1, got {len(works)} sequences", param=PARAM)


def _prompt(works: Sequence[Work]) -> tuple[int, int]:
    """Return tokens and key of the one prompt that *works* share."""
    prompts: Mapping[tuple[int, int], None] = dict.fromkeys(
        (work.prompt_tokens, work.prompt_key) for work in works
    )
    if len(prompts) != 1:
        raise MismatchError(f"one prompt was computed elsewhere, this request has {len(prompts)}")
    return next(iter(prompts))


def _cannot_listen(what: str, host: str, port: int, error: OSError) -> ValueError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return ValueError(f"cannot listen on {join_address(host, port)} ({what}): {reason}")
