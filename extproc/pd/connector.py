"""What a KV connector of vLLM wants of a router.

The order of events for one request::

    leg = connector.prefill(body, path, prefill, decode, ids)    # None: not split
    answer of the prefill worker to leg.body                     # unless leg.concurrent
    handoff = connector.decode(body, leg, answer, prefill, decode)
    answer of the decode worker to handoff.body                  # the client's

``decode`` always gives a request that can be sent: when the prefill answer is of no use, the decode
worker computes the prompt itself, and ``Handoff.reason`` tells why.
"""

from __future__ import annotations

import dataclasses
import random
from typing import ClassVar, Protocol

from extproc.pd.prefill_body import strip_client_params, with_params

PREFILL_FAILED = "the prefill leg failed"
"""A reason of a `Handoff`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """The worker at one end of a transfer."""

    authority: str
    """``host:port`` of its HTTP server, IPv6 in brackets."""

    rank: int | None = None
    """Data-parallel rank, when one was picked."""

    zmq_address: str = ""
    """``host:port`` where P2P-NCCL listens; empty: unknown."""

    bootstrap_port: int | None = None
    """Port of Mooncake's bootstrap server; None: the default."""

    engine_id: str = ""
    """Mooncake's name of the engine, or of the rank; empty: unknown."""

    @property
    def host(self) -> str:
        """The host alone, IPv6 in brackets."""
        return self.authority.rpartition(":")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Leg:
    """What to send to the prefill worker."""

    body: bytes
    request_id: str | None = None
    """``X-Request-Id`` to send; None keeps the client's."""

    concurrent: bool = False
    """Whether the decode leg starts at once, without the answer of this one."""

    decode_params: bytes = b""
    """The JSON of the decode leg's ``kv_transfer_params``, when they do not depend on the answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Handoff:
    """What to send to the decode worker."""

    body: bytes | None = None
    """None: the client's, unchanged."""

    request_id: str | None = None
    """``X-Request-Id`` to send; None keeps the client's."""

    reason: str = ""
    """Why nothing of the prefill is used and the decode worker computes the prompt; empty: it is used."""


class Connector(Protocol):
    """Writes the two legs the way one kind of KV connector needs them."""

    name: ClassVar[str]
    binds_early: ClassVar[bool]
    """Whether `prefill` needs to know the decode worker, and no other one can take its place."""
    decodes_whole: ClassVar[bool]
    """Whether a decode worker takes requests whose prompt nobody has computed."""

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
        """Return the prefill leg for the client's *body*; None when the request is not split.

        *at_once*: whether both legs may run at the same time.
        """
        ...

    def decode(
        self, body: bytes, leg: Leg, answer: bytes | None, prefill: Peer, decode: Peer
    ) -> Handoff:
        """Return the decode leg for the client's *body*.

        *answer* is the body of a successful prefill answer; None when there was none, or, with
        ``leg.concurrent``, when it is not there yet.
        """
        ...

    def learn(self, prefill: Peer, answer: bytes | None) -> None:
        """Take note of the answer to a concurrent prefill leg; None: it failed."""
        ...


def alone(body: bytes, reason: str) -> Handoff:
    """Return the decode leg that computes the prompt itself."""
    stripped = strip_client_params(body)
    return Handoff(None if stripped == body else stripped, reason=reason)


def handed(body: bytes, params: bytes, request_id: str | None = None) -> Handoff:
    """Return the decode leg that fetches what *params* tell."""
    # A body that had a prefill leg can be read, and one member more is no matter.
    return Handoff(with_params(body, params), request_id)
