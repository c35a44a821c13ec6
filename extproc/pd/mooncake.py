"""Mooncake: both legs carry an id of the transfer, the decode leg the prefill worker's address.

The answer of the prefill leg is not used, but awaited: it proves that there is something to fetch. The
engine ids come from the bootstrap server of each prefill worker, `parse_query`.
"""

from __future__ import annotations

import dataclasses
import random
import uuid
from typing import ClassVar

import msgspec

from extproc.pd.connector import PREFILL_FAILED, Handoff, Leg, Peer, alone, handed
from extproc.pd.paths import phase_of
from extproc.pd.prefill_body import build_prefill_body

DEFAULT_BOOTSTRAP_PORT = 8998
"""Of vLLM, ``VLLM_MOONCAKE_BOOTSTRAP_PORT``."""


class _Entry(msgspec.Struct):
    engine_id: str


def bootstrap_url(peer: Peer) -> str:
    """Return the URL of the bootstrap server of *peer*; engine ids are at ``/query`` below it."""
    port = DEFAULT_BOOTSTRAP_PORT if peer.bootstrap_port is None else peer.bootstrap_port
    return f"http://{peer.host}:{port}"


def parse_query(answer: bytes) -> dict[int, str]:
    """Return the engine id of each data-parallel rank from an answer of ``GET /query``.

    ``ValueError`` says what is wrong with it.
    """
    try:
        entries = msgspec.json.decode(answer, type=dict[int, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected an object of engine ids by rank: {error}") from error
    if not entries:
        raise ValueError("no engine has registered at the bootstrap server")
    return {rank: entry.engine_id for rank, entry in entries.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Mooncake:
    """vLLM's ``MooncakeConnector``."""

    name: ClassVar[str] = "mooncake"
    binds_early: ClassVar[bool] = False
    decodes_whole: ClassVar[bool] = True

    def prefill(
        self,
        body: bytes,
        path: str,
        prefill: Peer,
        decode: Peer | None,
        ids: random.Random,
        *,
        at_once: bool = True,
    ) -> Leg | None:
        """Return the prefill leg; None also while the engine id of *prefill* is not known."""
        endpoint = phase_of(path) if prefill.engine_id else None
        transfer_id = f"xfer-{uuid.UUID(int=ids.getrandbits(128), version=4)}"
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        }
        edited = endpoint and build_prefill_body(body, endpoint, msgspec.json.encode(params))
        if not edited:
            return None
        # Who it comes from is known when the leg has been answered: it may have been retried elsewhere.
        decode_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
        }
        return Leg(edited, decode_params=msgspec.json.encode(decode_params))

    def decode(
        self, body: bytes, leg: Leg, answer: bytes | None, prefill: Peer, decode: Peer
    ) -> Handoff:
        """Return the decode leg that fetches the transfer from *prefill*."""
        if answer is None:
            return alone(body, PREFILL_FAILED)
        if not prefill.engine_id:
            return alone(body, "the engine id of the prefill worker is not known")
        source = {
            "remote_bootstrap_addr": bootstrap_url(prefill),
            "remote_engine_id": prefill.engine_id,
        }
        return handed(body, leg.decode_params[:-1] + b"," + msgspec.json.encode(source)[1:])

    def learn(self, prefill: Peer, answer: bytes | None) -> None:
        """Do nothing: an answer tells nothing about later requests."""
