"""NIXL: the decode worker pulls KV blocks, or the prefill worker pushes them.

Pull: the prefill answer says where the blocks are, in ``kv_transfer_params``; these bytes go into the
decode body as they came.

Push: an answer with ``"transfer_mode": "push"`` tells who the prefill worker is. From the next request
on its legs run at the same time: the decode worker announces itself, and the blocks come to it. One who
restarts has another identity; a failed leg or an answer without push forgets it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Container
from typing import ClassVar

import msgspec

from extproc.json_edit import top_level_value
from extproc.pd.connector import PREFILL_FAILED, Handoff, Leg, Peer, alone, handed
from extproc.pd.paths import phase_of
from extproc.pd.prefill_body import PARAMS, build_prefill_body

PREFILL_PARAMS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


class Identity(msgspec.Struct, frozen=True):
    """Who a prefill worker that pushes is, as its answers say."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    transfer_mode: str = ""


class _PushParams(msgspec.Struct, frozen=True):
    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_request_id: str


@dataclasses.dataclass(slots=True)
class Identities:
    """The prefill workers, by authority and rank, that are known to push."""

    known: dict[tuple[str, int | None], Identity] = dataclasses.field(default_factory=dict)

    def of(self, peer: Peer) -> Identity | None:
        """Return who *peer* is; None when it is not known to push."""
        return self.known.get((peer.authority, peer.rank))

    def note(self, peer: Peer, identity: Identity | None) -> None:
        """Remember who *peer* is, or forget it."""
        if identity is None:
            self.known.pop((peer.authority, peer.rank), None)
        else:
            self.known[peer.authority, peer.rank] = identity

    def keep(self, authorities: Container[str]) -> None:
        """Forget all workers but those at *authorities*."""
        self.known = {key: who for key, who in self.known.items() if key[0] in authorities}


@dataclasses.dataclass(frozen=True, slots=True)
class Nixl:
    """vLLM's ``NixlConnector``."""

    name: ClassVar[str] = "nixl"
    binds_early: ClassVar[bool] = False
    decodes_whole: ClassVar[bool] = True

    identities: Identities = dataclasses.field(default_factory=Identities)
    """What outlasts a request; shared by all that talk to the same workers."""

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
        """Return the prefill leg; concurrent when *prefill* is known to push, if that may be."""
        endpoint = phase_of(path)
        edited = endpoint and build_prefill_body(body, endpoint, PREFILL_PARAMS)
        if not edited:
            return None
        identity = self.identities.of(prefill) if at_once else None
        if identity is None:
            return Leg(edited)
        request_id = f"{ids.getrandbits(128):032x}"
        params = _PushParams(
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_engine_id=identity.remote_engine_id,
            remote_host=identity.remote_host,
            remote_port=identity.remote_port,
            tp_size=identity.tp_size,
            remote_request_id=request_id,
        )
        return Leg(edited, request_id, concurrent=True, decode_params=msgspec.json.encode(params))

    def decode(
        self, body: bytes, leg: Leg, answer: bytes | None, prefill: Peer, decode: Peer
    ) -> Handoff:
        """Return the decode leg with the parameters of the answer, or with those of a push."""
        if leg.concurrent:
            return handed(body, leg.decode_params, leg.request_id)
        if answer is None:
            return alone(body, PREFILL_FAILED)
        params = top_level_value(answer, PARAMS)
        if params is None or params in {b"null", b"{}"} or not params.startswith(b"{"):
            return alone(body, "the prefill answer has no kv_transfer_params")
        self.identities.note(prefill, _identity(params))
        return handed(body, params)

    def learn(self, prefill: Peer, answer: bytes | None) -> None:
        """Take note of who *prefill* is, or that it no longer pushes."""
        params = None if answer is None else top_level_value(answer, PARAMS)
        self.identities.note(prefill, None if params is None else _identity(params))


def _identity(params: bytes) -> Identity | None:
    """Return who pushes according to *params*; None when nobody does."""
    try:
        identity = msgspec.json.decode(params, type=Identity)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return identity if identity.transfer_mode == "push" else None
