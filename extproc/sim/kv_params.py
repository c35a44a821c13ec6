"""``kv_transfer_params`` of a request, and the request id that stands for them with P2P-NCCL."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a router says about the other leg, for all connectors; unknown fields are ignored."""

    do_remote_decode: bool = False
    """This is the prefill leg."""
    do_remote_prefill: bool = False
    """This is the decode leg."""
    remote_block_ids: list[list[int]] | None = None
    """Blocks per KV cache group."""
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int | None = None
    remote_num_tokens: int | None = None
    transfer_mode: str | None = None
    transfer_id: str | None = None
    """Of both legs with Mooncake."""
    remote_bootstrap_addr: str | None = None
    """URL of the prefill worker's bootstrap server with Mooncake."""


KvAnswer = Mapping[str, object]
"""``kv_transfer_params`` of an answer."""


class NcclAddresses(NamedTuple):
    """The ZMQ addresses in a request id of P2P-NCCL."""

    prefill: str
    decode: str


ID_LIMIT = 1024
"""Longest request id of P2P-NCCL that is read; two host names fit."""

_NCCL_ID = re.compile(r"___prefill_addr_(\S+:\d+)___decode_addr_(\S+:\d+)_[0-9a-f]{32}")


def parse_nccl_id(request_id: str) -> NcclAddresses | None:
    """Return the addresses in *request_id*, None when it has no such form."""
    found = _NCCL_ID.fullmatch(request_id) if len(request_id) <= ID_LIMIT else None
    return None if found is None else NcclAddresses(found[1], found[2])


def join_address(host: str, port: int) -> str:
    """Undo ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int] | None:
    """Return host and port of ``host:port`` (``[host]:port`` for IPv6), None when it is not that."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or re.fullmatch("[0-9]{1,5}", port) is None or int(port) > 0xFFFF:
        return None
    return host, int(port)
