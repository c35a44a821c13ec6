"""A further attempt of Envoy's at a request whose prompt was computed by a prefill worker.

KV blocks are handed over once. An attempt that failed may have fetched them, or failed because they
are gone with the worker that had them; only the first retry can hope that they are still there. So Envoy asks
before it sends any but the first attempt, from within its retries (an upstream filter of the decode
clusters): from the third on, or once the prefill worker is out, the prompt is computed anew.

Envoy hands over the body as it was first sent. ``kv_transfer_params`` in it are replaced; all else stays. It also
sets ``content-length`` to that of this body before it asks, for attempts share their headers, and whether the
service answers at all must not matter.
"""

from __future__ import annotations

import random
from enum import Enum, auto

from google.protobuf.struct_pb2 import Struct

from extproc.admission import Admission, Ticket
from extproc.errors import ProtocolError
from extproc.ext_proc_answers import (
    ADDRESS_ATTRIBUTE,
    ATTEMPT_ATTRIBUTE,
    CONTINUE_REQUEST_BODY,
    CONTINUE_REQUEST_HEADERS,
    CONTINUE_WITHOUT_BODY,
    EXT_PROC_ATTRIBUTES,
    HANDOVER_KEY,
    MAX_WAIT_S,
    METADATA_NAMESPACE,
    REQUEST_ID_HEADER,
    be_patient,
    header_map,
    set_header,
)
from extproc.openai import parse_content
from extproc.pd.connector import Peer
from extproc.prefill_legs import Handover, LegAnswer, PrefillLeg, PrefillLegs
from extproc.router import Decision, Progress, Refused, Router
from extproc.split_request import MAX_LEGS, Asked, make_decode_leg, prepare_leg, take_answer
from policies.base import Request
from protos.ext_proc_pb2 import ProcessingRequest, ProcessingResponse

NOBODY = Peer("")
"""The other end where blocks are for anybody: those that are for one worker alone get no further attempts."""

SAME_BLOCKS = 2
"""Attempts that are made with the blocks of one prefill."""


class _State(Enum):
    HEADERS = auto()
    BODY = auto()
    LEG = auto()
    DONE = auto()


class NextAttempt:
    """The state of one attempt; to its owner it looks like an ``Exchange`` in which nothing is decided."""

    __slots__ = (
        "_admission",
        "_apart",
        "_asked",
        "_handover",
        "_ids",
        "_legs",
        "_max_routed_bytes",
        "_patient",
        "_request_id",
        "_router",
        "_state",
        "leg",
    )

    is_leg = False
    waiting = False
    decision: Decision | None = None
    ticket: Ticket | None = None

    def __init__(
        self,
        router: Router,
        legs: PrefillLegs,
        *,
        ids: random.Random,
        max_routed_bytes: int,
        admission: Admission,
    ) -> None:
        """Begin. See ``Exchange`` for what is given."""
        self.leg: PrefillLeg | None = None
        """The prefill leg under way."""
        self._router = router
        self._legs = legs
        self._ids = ids
        self._max_routed_bytes = max_routed_bytes
        self._admission = admission
        self._patient = False
        """Whether Envoy has been told to wait; it listens once."""
        self._state = _State.HEADERS
        self._handover: Handover | None = None
        self._request_id = ""
        self._apart = False
        """Whether the worker of this attempt is not where blocks may be fetched."""
        self._asked: Asked | None = None

    def receive(self, message: ProcessingRequest, now: float) -> list[bytes]:
        """Take one message and return the answers. Raises ``ProtocolError`` for one that cannot come."""
        kind = message.WhichOneof("request")
        if kind == "request_headers" and self._state is _State.HEADERS:
            return self._on_headers(message)
        if kind == "request_body" and self._state is _State.BODY:
            return self._on_body(message.request_body.body, now)
        raise ProtocolError(f"{kind} in state {self._state.name} of a further attempt")

    def on_leg(self, answer: LegAnswer, now: float) -> list[bytes]:
        """Take the answer to ``leg``, and go on."""
        leg, asked = self.leg, self._asked
        if leg is None or asked is None:
            return []
        self._drop_leg(now)
        if take_answer(asked, leg, answer, self._router) is not None:
            return self._as_it_was()
        return self._send(asked) if asked.progress.whole else self._compute(asked, now)

    def resume(self, now: float) -> list[bytes]:
        """Do nothing: it never waits."""
        return []

    def give_up(self, now: float) -> list[bytes]:
        """Do nothing: it never waits."""
        return []

    def close(self, now: float) -> None:
        """Forget the leg: the stream has ended."""
        self._drop_leg(now)

    def _drop_leg(self, now: float) -> None:
        leg, self.leg = self.leg, None
        lease = None if leg is None else self._legs.drop(leg)
        if lease is not None and lease.release(now):
            self._admission.on_room(lease.worker)

    def _on_headers(self, message: ProcessingRequest) -> list[bytes]:
        self._handover = handover = self._find(message)
        attributes = _attributes(message)
        attempt = attributes.fields[ATTEMPT_ATTRIBUTE].number_value
        endpoint = attributes.fields[ADDRESS_ATTRIBUTE].string_value
        self._apart = handover is not None and self._router.is_apart(handover.prefill, endpoint)
        same = attempt <= SAME_BLOCKS and not self._apart
        if handover is None or (same and self._router.may_prefill(handover.prefill)):
            self._state = _State.DONE
            return [CONTINUE_WITHOUT_BODY]
        headers = header_map(message.request_headers.headers)
        self._request_id = headers.get(REQUEST_ID_HEADER, "")
        self._state = _State.BODY
        return [CONTINUE_REQUEST_HEADERS]

    def _find(self, message: ProcessingRequest) -> Handover | None:
        metadata = message.metadata_context.filter_metadata
        if METADATA_NAMESPACE not in metadata:
            return None
        token = metadata[METADATA_NAMESPACE].fields[HANDOVER_KEY].string_value
        return self._legs.handover(token)

    def _on_body(self, body: bytes, now: float) -> list[bytes]:
        handover = self._handover
        if handover is None:
            raise ProtocolError("a body that was not asked for")
        known = handover.request
        content = parse_content(body) if len(body) <= self._max_routed_bytes else None
        request = Request(known.method, known.path, known.headers, body, content)
        self._asked = asked = Asked(request, in_body=True, progress=Progress())
        return self._compute(asked, now)

    def _compute(self, asked: Asked, now: float) -> list[bytes]:
        """Have the prompt computed once more; without a prefill worker the decode worker does it."""
        split = None
        if not self._apart:
            split = self._router.split_again(asked.request, now, asked.progress)
        if isinstance(split, Refused):
            return self._as_it_was()
        if split is not None:
            headers = {**asked.request.headers, REQUEST_ID_HEADER: self._request_id}
            self.leg = prepare_leg(
                asked,
                split,
                self._router,
                self._legs,
                headers=headers,
                ids=self._ids,
                at_once=False,  # the other one is under way
            )
        if self.leg is None:
            return self._send(asked)
        self._state = _State.LEG
        if self._patient:
            return []
        self._patient = True
        return [be_patient(min(MAX_LEGS * self._legs.longest_s, MAX_WAIT_S))]

    def _as_it_was(self) -> list[bytes]:
        self._state = _State.DONE
        return [CONTINUE_REQUEST_BODY]

    def _send(self, asked: Asked) -> list[bytes]:
        """Return the answer that lets the attempt go on."""
        self._state = _State.DONE
        handover, body = self._handover, asked.request.body or b""
        if handover is None:
            return [CONTINUE_REQUEST_BODY]
        leg = make_decode_leg(asked, body, NOBODY, self._router)
        handover.merge = leg.merge
        self._legs.renew(handover)
        if asked.progress.near is not None:
            handover.prefill = asked.progress.near
        if leg.body is None:
            return [CONTINUE_REQUEST_BODY]
        answer = ProcessingResponse()
        common = answer.request_body.response
        common.body_mutation.body = leg.body
        if "content-length" in handover.request.headers:
            set_header(common.header_mutation, "content-length", str(len(leg.body)))
        return [answer.SerializeToString()]


def is_next_attempt(message: ProcessingRequest) -> bool:
    """Tell whether the first *message* of a call is about a further attempt."""
    return ATTEMPT_ATTRIBUTE in _attributes(message).fields


def _attributes(message: ProcessingRequest) -> Struct:
    return message.attributes.get(EXT_PROC_ATTRIBUTES) or Struct()
