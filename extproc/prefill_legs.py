"""Prefill legs: the part of a split request that a prefill worker computes.

The service sends a leg through Envoy, as a request of its own, and Envoy asks the service again where that
goes: by then it has been decided, and the token in the leg's headers says which decision is meant. So a leg has a
pick, retries, a lease that ends with its stream and a place in the metrics, like any request.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from extproc.answer_merge import AnswerMerge
from extproc.pd.connector import Leg, Peer
from extproc.pool import Lease
from extproc.router import Routed
from policies.base import Request, Worker

LEG_HEADER = "x-router-leg"
"""The token. Envoy takes it only where nobody but the service can connect."""

SERVED_HEADER = "x-router-served"
"""On the answer of a leg: the endpoint that gave it."""

NOT_SENT = frozenset(
    {
        "accept-encoding",  # the answer is read here
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "range",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-data-parallel-rank",
        "x-request-id",
    }
)
"""Headers of the client that are not about what is asked, or that the router sets itself."""

BUSY = (408, 429)
"""What a worker says that has no time for any request."""

MAX_RENEWED = 10_000
"""Requests of which it is remembered that their blocks were renewed."""

NOT_SENT_PREFIXES = (":", "x-router-", "x-envoy-", "x-gateway-")


@dataclasses.dataclass(slots=True, eq=False)
class PrefillLeg:
    """One leg, from the decision to its answer."""

    token: str
    decision: Routed
    """Where it goes."""

    leg: Leg
    peer: Peer
    """The worker that it goes to first."""

    path: str
    headers: Mapping[str, str]
    """What is sent, the token included."""

    once: bool = False
    """Whether only this worker will do, since the leg names it."""

    lease: Lease | None = None
    """On the worker that it goes to first, until Envoy asks about it: whoever picks next must know."""

    whole: bool = False
    """Whether it is all of the request, for a worker that generates."""


@dataclasses.dataclass(frozen=True, slots=True)
class LegAnswer:
    """What became of a leg."""

    status: int = 0
    """0: there was no answer."""

    body: bytes = b""
    content_type: str = ""
    retry_after: str = ""
    served: str = ""
    """The endpoint that answered; empty when that is not known."""

    reason: str = ""
    """Why there was none."""

    broken: bool = False
    """Whether it had begun: Envoy, which tries others before that, has not."""

    @property
    def succeeded(self) -> bool:
        """Whether the prompt has been computed."""
        return 200 <= self.status < 300

    @property
    def refused(self) -> bool:
        """Whether it is the client's request that the worker does not like."""
        return 400 <= self.status < 500 and self.status not in BUSY and bool(self.served)


@dataclasses.dataclass(slots=True, eq=False)
class Handover:
    """A request whose prompt has been computed for another worker, until its answer has ended."""

    token: str
    request: Request
    """Without its body."""

    prefill: Worker
    """Who has computed the prompt."""

    merge: AnswerMerge | None = None
    """What is to be done with the answer."""


class PrefillLegs:
    """The legs that are under way and of which Envoy has yet to ask, and what has come of others."""

    def __init__(self, ids: random.Random, *, longest_s: float) -> None:
        """Make none; tokens are drawn from *ids*, which must not be guessable. *longest_s*: what a leg may take."""
        self.longest_s = longest_s
        self._ids = ids
        self._pending: dict[str, PrefillLeg] = {}
        self._handovers: dict[str, Handover] = {}
        self._renewed: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def prepare(
        self,
        decision: Routed,
        leg: Leg,
        peer: Peer,
        path: str,
        headers: Mapping[str, str],
        *,
        once: bool,
    ) -> PrefillLeg:
        """Return the leg to send for a request with these *headers*, its id among them."""
        token = self._token()
        sent = {
            name: value
            for name, value in headers.items()
            if name not in NOT_SENT and not name.startswith(NOT_SENT_PREFIXES)
        }
        sent |= {
            "host": headers.get(":authority", "prefill"),
            "accept-encoding": "identity",
            "x-request-id": leg.request_id or headers.get("x-request-id", token),
            LEG_HEADER: token,
        }
        found = PrefillLeg(token, decision, leg, peer, path, sent, once, _lease(decision))
        self._pending[token] = found
        return found

    def prepare_whole(
        self, decision: Routed, body: bytes, peer: Peer, path: str, headers: Mapping[str, str]
    ) -> PrefillLeg:
        """Return what has a decode worker answer all of a request."""
        found = self.prepare(decision, Leg(body), peer, path, headers, once=False)
        found.whole = True
        return found

    def again(self, leg: PrefillLeg) -> PrefillLeg:
        """Return *leg* to be sent once more, just as it was."""
        token = self._token()
        found = dataclasses.replace(
            leg,
            token=token,
            headers={**leg.headers, LEG_HEADER: token},
            lease=_lease(leg.decision),
        )
        self._pending[token] = found
        return found

    def hand_over(self, request: Request, prefill: Worker, merge: AnswerMerge | None) -> Handover:
        """Keep what is known of a *request* whose prompt *prefill* has computed; end it with ``ended``."""
        bare = Request(request.method, request.path, request.headers)
        found = Handover(self._token(), bare, prefill, merge)
        self._handovers[found.token] = found
        return found

    def handover(self, token: str) -> Handover | None:
        """Return the one of *token*; None when there is none."""
        return self._handovers.get(token)

    def renew(self, handover: Handover) -> None:
        """Learn that blocks of another prefill are handed over by now."""
        while len(self._renewed) >= MAX_RENEWED:
            del self._renewed[next(iter(self._renewed))]
        self._renewed[handover.token] = None

    def renewed(self, token: str) -> bool:
        """Tell whether that was so of the request of *token*, also when that has ended not long ago."""
        return token in self._renewed

    def ended(self, handover: Handover) -> None:
        """Forget *handover*."""
        self._handovers.pop(handover.token, None)

    def _token(self) -> str:
        return f"{self._ids.getrandbits(128):032x}"

    def take(self, token: str) -> PrefillLeg | None:
        """Return the leg of *token*, once; None when there is none."""
        return self._pending.pop(token, None)

    def drop(self, leg: PrefillLeg) -> Lease | None:
        """Forget *leg*: it is over. Return its lease, to be given back, if Envoy has never asked about it."""
        self._pending.pop(leg.token, None)
        lease, leg.lease = leg.lease, None
        return lease


def _lease(decision: Routed) -> Lease:
    return decision.pool.acquire(decision.workers[0])
