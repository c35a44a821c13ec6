"""P2P-NCCL: the request id tells each worker the address of the other, the body tells nothing.

vLLM's connector reads both addresses out of the id, which has to be the same on both legs. A client's
own id must never look like one, or it would choose whom a worker connects to: `is_transfer_id`. A decode
worker that gets another kind of id fails, in vLLM with its whole engine: it never serves a request alone.
"""

from __future__ import annotations

import dataclasses
import random
from typing import ClassVar

from extproc.pd.connector import PREFILL_FAILED, Handoff, Leg, Peer, alone
from extproc.pd.paths import phase_of
from extproc.pd.prefill_body import build_prefill_body


def is_transfer_id(request_id: str) -> bool:
    """Tell whether a worker with P2P-NCCL would read an address out of *request_id*."""
    return "___prefill_addr_" in request_id or "___decode_addr_" in request_id


@dataclasses.dataclass(frozen=True, slots=True)
class Nccl:
    """vLLM's ``P2pNcclConnector``."""

    name: ClassVar[str] = "nccl"
    binds_early: ClassVar[bool] = True
    decodes_whole: ClassVar[bool] = False

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
        """Return the prefill leg, which carries the addresses of both workers in its id."""
        if decode is None:
            raise ValueError("P2P-NCCL needs the decode worker before the prefill leg")
        endpoint = phase_of(path)
        edited = endpoint and build_prefill_body(body, endpoint, None)
        if not edited:
            return None
        source = prefill.zmq_address or prefill.authority
        target = decode.zmq_address or decode.authority
        unique = f"{ids.getrandbits(128):032x}"
        return Leg(edited, f"___prefill_addr_{source}___decode_addr_{target}_{unique}")

    def decode(
        self, body: bytes, leg: Leg, answer: bytes | None, prefill: Peer, decode: Peer
    ) -> Handoff:
        """Return the decode leg: the client's body under the id of the prefill leg."""
        if answer is None:
            return alone(body, PREFILL_FAILED)
        return dataclasses.replace(alone(body, ""), request_id=leg.request_id)

    def learn(self, prefill: Peer, answer: bytes | None) -> None:
        """Do nothing: an answer tells nothing about later requests."""
