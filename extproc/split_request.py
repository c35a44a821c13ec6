"""A request that is split: what is asked of a prefill worker, and what is made of its answer."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from extproc.answer_merge import AnswerMerge, plan_merge
from extproc.errors import Refusal
from extproc.pd.connector import Leg, Peer
from extproc.pd.paths import phase_of
from extproc.pd.prefill_body import strip_client_params
from extproc.prefill_legs import LegAnswer, PrefillLeg, PrefillLegs
from extproc.router import (
    WHOLE,
    Progress,
    Refused,
    Relayed,
    Routed,
    Router,
    Split,
)
from policies.base import Request

MAX_LEGS = 3
"""Prefill workers that are tried one after the other, where Envoy cannot do that."""


@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    """A prompt that a prefill worker has computed, or is computing."""

    leg: Leg
    answer: bytes | None
    """The body of the worker's answer; None: it is not there yet."""

    peer: Peer


@dataclasses.dataclass(slots=True)
class Asked:
    """A request whose worker is to be picked, with what the answer to Envoy depends on."""

    request: Request
    in_body: bool = False
    """Whether the answer is one to a body message."""

    body_follows: bool = False
    chunks: int = 0
    """Messages in which the body came, where it was collected."""

    end_of_stream: bool | None = None
    """Whether the last of them was the end of the request; None: nothing was collected."""

    progress: Progress = WHOLE
    """How far it has come, when it may be split."""

    computed: Computed | None = None
    """What became of its prompt, once that has been with a prefill worker."""

    own_id: str | None = None
    """The id that it is given, "" when it has the right one; None: not known yet."""

    decode: Routed | None = None
    """Who generates, where that had to be known first; the lease is taken."""

    renamed: bytes | None = None
    """The client's body with the model's own name, when that went with the prompt; None: no other name."""


def prepare_leg(
    asked: Asked,
    split: Split,
    router: Router,
    legs: PrefillLegs,
    *,
    headers: Mapping[str, str],
    ids: random.Random,
    at_once: bool,
) -> PrefillLeg | None:
    """Return what to ask a prefill worker; None: the request cannot be split.

    *headers*: the client's, with the id that both legs are to have. *at_once*: whether both may run at the
    same time.
    """
    rules, request = router.split_rules, asked.request
    if rules is None:
        return None
    peer = router.peer(split.prefill.workers[0])
    asked.renamed = split.prefill.body or asked.renamed
    body = asked.renamed or request.body or b""
    other = None if split.decode is None else router.peer(split.decode.workers[0])
    leg = rules.connector.prefill(body, request.path, peer, other, ids, at_once=at_once)
    if leg is None:
        return None
    # Nobody can take its place where the other leg names it.
    once = rules.connector.binds_early or leg.concurrent
    workers = split.prefill.workers[:1] if once else split.prefill.workers
    decision = dataclasses.replace(split.prefill, workers=workers)
    return legs.prepare(decision, leg, peer, request.path, headers, once=once)


def take_answer(
    asked: Asked, leg: PrefillLeg, answer: LegAnswer, router: Router
) -> Relayed | Refused | None:
    """Take note of what became of *leg*; return what the client is told, None: the request goes on."""
    rules, first = router.split_rules, leg.decision.workers[0]
    if answer.refused:
        return Relayed(answer.status, answer.body, answer.content_type, answer.retry_after)
    if answer.succeeded:
        worker = router.who_served(leg.decision, answer.served)
        asked.progress = Progress(whole=True, near=worker)
        peer = leg.peer if worker is first else router.peer(worker)
        asked.computed = Computed(leg.leg, answer.body, peer)
        return None
    failed = (*asked.progress.failed, first)
    if (leg.once or answer.broken) and len(failed) < MAX_LEGS:
        asked.progress = Progress(failed=failed)
    elif rules is None or rules.fallback:
        asked.progress = WHOLE
    else:
        return Refused(Refusal.PREFILL_FAILED)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeLeg:
    """What goes to the worker that generates."""

    body: bytes | None
    """None: what it was."""

    request_id: str | None = None
    """None: what it was."""

    merge: AnswerMerge | None = None
    """What is to be done with the answer; None: nothing."""

    unused: str = ""
    """Why nothing of a prefill that succeeded is used; empty: it is, or there was none."""


def make_decode_leg(asked: Asked, body: bytes, decode: Peer, router: Router) -> DecodeLeg:
    """Return the leg of *asked* for *decode*, as far as its prompt has been computed.

    What a client says of KV transfers is taken away. Raises ``ValueError`` when *body* cannot be read here but
    a worker might read some in it.
    """
    rules, computed, request_id, merge = router.split_rules, asked.computed, None, None
    unused = ""
    if rules is not None and computed is not None:
        handoff = rules.connector.decode(body, computed.leg, computed.answer, computed.peer, decode)
        endpoint = phase_of(asked.request.path)
        if computed.answer is not None and endpoint is not None and not handoff.reason:
            merge = plan_merge(body, endpoint, computed.answer)
        if handoff.body is not None:
            return DecodeLeg(handoff.body, handoff.request_id, merge)
        request_id, unused = handoff.request_id, handoff.reason
    stripped = strip_client_params(body)
    if stripped is None:
        raise ValueError("the body cannot be read")
    return DecodeLeg(None if stripped == body else stripped, request_id, merge, unused)


NOTHING = DecodeLeg(None)
"""A leg that is the client's request as it came."""


def hand_over(asked: Asked, decision: Routed, router: Router) -> tuple[Routed | Refused, DecodeLeg]:
    """Return *decision* with the body and the id for the worker that generates, if it may have the request."""
    body, rules = asked.request.body, router.split_rules
    if rules is None or not body:
        return decision, NOTHING
    if decision.body is None and asked.renamed is not None:
        decision = dataclasses.replace(decision, body=asked.renamed)
    if decision.apart:
        asked.computed = None
    try:
        leg = make_decode_leg(
            asked, decision.body or body, router.peer(decision.workers[0]), router
        )
    except ValueError:
        return Refused(Refusal.UNREADABLE_BODY), NOTHING
    if leg.unused and not rules.fallback:
        return Refused(Refusal.PREFILL_FAILED), leg
    if leg.body is not None or leg.request_id is not None:
        new = decision.body if leg.body is None else leg.body
        decision = dataclasses.replace(decision, body=new, request_id=leg.request_id)
    return decision, leg
