"""One HTTP request and its response as seen through ext_proc: the whole protocol, without I/O.

``receive`` takes one message of Envoy and returns what to send back, serialised, in order; ``close``
is called once when the stream has ended, however it ended. All that affects the state of an exchange
lives in this file.

The request direction passes through three states::

    START ── headers, and no body wanted or none to come ─────────────────────▶ DECIDED
      └───── headers, body wanted ──▶ BODY ── last (or only) body message ─────▶ DECIDED

What the answers look like depends on the body mode of Envoy's filter, announced in the first message:

* BUFFERED: the headers are answered at once. When no body is wanted, that answer carries the pick and
  turns the body off for this request (``mode_override``), so not one byte of it passes through here.
  Otherwise it says "continue", and the answer to the single body message carries the pick.
* FULL_DUPLEX_STREAMED (Endpoint Picker Protocol): Envoy hands over the body chunk by chunk and forwards
  only what is sent back. The headers are answered when the decision is made, and every chunk is echoed.
* STREAMED without waiting for the header answer: chunks are collected, headers answered at the last
  one, then each chunk acknowledged.
* NONE, and STREAMED otherwise: the body cannot be had before the headers are answered, so the decision
  is made without it.

Messages of the response direction are answered with "continue" (or echoed, in full duplex): our own
configuration does not ask Envoy for them, a gateway's may.

A request may have to wait (``admission``): at its headers until it may pass the gate, and when its worker
is picked. ``receive`` then returns at most one message, which tells Envoy to be patient, and ``waiting``
is true. What comes meanwhile is kept. The owner calls ``resume`` when it is the request's turn, or ``give_up``
when it has waited long enough; either returns the answers. A request that waits at the gate is kept
as the bytes of its headers only.

The lease on the picked worker is taken with the decision and released by ``close``: Envoy keeps the
stream open until the HTTP stream ends (``response_trailer_mode: SEND``).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from google.protobuf.struct_pb2 import Struct

from extproc.admission import GATE, Admission, Place, Ticket
from extproc.answer_merge import AnswerMerge
from extproc.errors import ProtocolError, Refusal
from extproc.ext_proc_answers import (
    CLUSTER_HEADER,
    CONTINUE_AND_SHOW_RESPONSE,
    CONTINUE_REQUEST_BODY,
    CONTINUE_REQUEST_HEADERS,
    CONTINUE_REQUEST_TRAILERS,
    CONTINUE_RESPONSE_BODY,
    CONTINUE_RESPONSE_HEADERS,
    CONTINUE_RESPONSE_TRAILERS,
    ENDPOINT_KEY,
    HANDOVER_KEY,
    LENGTH_KEY,
    MAX_RETRIES_HEADER,
    MAX_WAIT_S,
    METADATA_NAMESPACE,
    RANK_HEADER,
    RANK_NAMESPACE,
    REQUEST_ID_HEADER,
    REQUEST_TRAILERS,
    SHOWN_ID_KEY,
    STREAM_RESPONSE,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
    be_patient,
    echo_request,
    echo_response,
    header_map,
    parse_subset,
    refusal,
    relay,
    replaced_chunk,
    set_header,
)
from extproc.openai import parse_content
from extproc.pd.nccl import is_transfer_id
from extproc.pd.paths import phase_of
from extproc.pool import Lease
from extproc.prefill_legs import LEG_HEADER, Handover, LegAnswer, PrefillLeg, PrefillLegs
from extproc.router import (
    ONLY_SPLIT,
    WHOLE,
    Decision,
    Held,
    Progress,
    Refused,
    Relayed,
    Routed,
    Router,
    Split,
)
from extproc.split_request import MAX_LEGS, Asked, Computed, hand_over, prepare_leg, take_answer
from policies.base import Request
from protos.ext_proc_pb2 import (
    HeaderMutation,
    HttpBody,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)

MAX_REQUEST_ID_CHARS = 256
"""A longer value of another header is taken for no id."""

PREFILL_REFUSED = "router_prefill_refused"
"""Details, for the access log, of an answer that is a prefill worker's."""

ANSWERED_ELSEWHERE = "router_answered_elsewhere"
"""The same of one that is another decode worker's."""

DEFAULT_MAX_ROUTED_BYTES = 8 * 2**20


class _State(Enum):
    START = auto()
    BODY = auto()
    DECIDED = auto()


class Exchange:
    """The state of one exchange."""

    __slots__ = (
        "_admission",
        "_admitted",
        "_asked",
        "_begun",
        "_beside",
        "_chunks",
        "_collects",
        "_handover",
        "_headers",
        "_id_headers",
        "_ids",
        "_kept",
        "_lease",
        "_legs",
        "_max_body_bytes",
        "_max_routed_bytes",
        "_may_wait",
        "_merge",
        "_mode",
        "_patient",
        "_received_bytes",
        "_response_mode",
        "_router",
        "_state",
        "_subset",
        "decision",
        "is_leg",
        "leg",
        "ticket",
        "unused",
        "waiting",
    )

    def __init__(
        self,
        router: Router,
        *,
        ids: random.Random,
        max_body_bytes: int,
        max_routed_bytes: int = DEFAULT_MAX_ROUTED_BYTES,
        admission: Admission | None = None,
        id_headers: Sequence[str] = (REQUEST_ID_HEADER,),
        legs: PrefillLegs | None = None,
    ) -> None:
        """Begin.

        *ids*: source of request ids. *max_body_bytes*: most that is held of a streamed body.
        *max_routed_bytes*: largest body that the policy is shown. *admission*: who may go on; None: everybody.
        *id_headers*: of those that the client sent, the first is the request's id.
        *legs*: where prefill legs are kept until Envoy asks about them; None: nothing is split.
        """
        self.is_leg = False
        """Whether this is itself a prefill leg, not a client's request."""
        self.unused = ""
        """Why nothing is used of a prefill that succeeded; empty: it is, or there was none."""
        self.leg: PrefillLeg | None = None
        """The prefill leg under way: the owner sends it, and calls ``on_leg`` with the answer."""
        self._legs = legs
        self._beside: Asked | None = None
        """The request, while its prefill leg runs beside the other one."""
        self._handover: Handover | None = None
        """What is known of a request whose prompt was computed elsewhere."""
        self._begun = False
        """Whether a worker's answer has begun."""
        self._merge: AnswerMerge | None = None
        """What is done with it."""
        self.decision: Decision | None = None
        """What was decided; None until then."""
        self.waiting = False
        """Whether it waits, for ``resume`` or ``give_up``."""
        self.ticket: Ticket | None = None
        """Where and how long it waits; None when it never had to."""
        self._admission = admission or Admission()
        self._admitted = False
        self._may_wait = True
        self._patient = False
        """Whether Envoy has been told to wait for the answer to its last message; it listens once."""
        self._kept: list[bytes] = []
        """Messages that came while it waits; the one that waits at the gate itself is the first."""
        self._asked: Asked | None = None
        """What is to be decided, while it waits for a worker."""
        self._id_headers = id_headers
        self._router = router
        self._ids = ids
        self._max_body_bytes = max_body_bytes
        self._max_routed_bytes = max_routed_bytes
        self._state = _State.START
        self._mode: ProcessingMode.BodySendMode | None = None
        self._response_mode = ProcessingMode.NONE
        self._collects = True
        self._headers: Mapping[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._chunks: list[bytes] = []
        self._received_bytes = 0
        self._lease: Lease | None = None

    def receive(self, message: ProcessingRequest, now: float) -> list[bytes]:
        """Take one message and return the answers to send, in order.

        *now* is in seconds on a monotonic clock. Raises ``ProtocolError`` when the message cannot
        come at this point: the caller must then end the stream with an error, never with OK, which
        Envoy takes for "continue without me".
        """
        if self.waiting or self._awaits_leg:
            return self._keep(message, now)
        if self._mode is None:
            self._learn_modes(message)
        kind = message.WhichOneof("request")
        match kind:
            case "request_headers":
                answers = self._on_request_headers(message, now)
            case "request_body":
                answers = self._on_request_body(message, now)
            case "request_trailers":
                answers = self._on_request_trailers(now)
            case "response_headers":
                answers = self._on_response_headers(message, now)
            case "response_body":
                answers = self._on_response_body(message.response_body)
            case "response_trailers":
                answers = [CONTINUE_RESPONSE_TRAILERS]
            case _:
                raise ProtocolError("the message holds no request that this service knows")
        # In observability mode Envoy wants no answers and would count them as spurious.
        return [] if message.observability_mode else answers

    def resume(self, now: float) -> list[bytes]:
        """Try to go on, it being this one's turn; when that fails it still waits, and nothing is returned."""
        ticket, asked = self.ticket, self._asked
        if not self.waiting or ticket is None:
            return []
        answers: list[bytes] = []
        if asked is not None:
            found = self._router.decide(
                asked.request, now, subset=self._subset, progress=asked.progress
            )
            if isinstance(found, Held):
                return self._wait_on(ticket, found.place, now)
            self._admission.leave(ticket, now, served=True)
            self.waiting, self._asked = False, None
            answers = self._follow(asked, found, now)
            if self.waiting or self._awaits_leg:
                return answers
        elif ticket.place == GATE:
            self._admission.pass_gate(ticket, now)
            self._admitted = True
            self.waiting = False
        else:
            place = self._router.no_worker
            if place is not None:
                return self._wait_on(ticket, place, now)
            self._admission.leave(ticket, now, served=True)
            self.waiting = False
        return answers + self._catch_up(now)

    def on_leg(self, answer: LegAnswer, now: float) -> list[bytes]:
        """Take the answer to ``leg``, and go on."""
        leg, asked, rules = self.leg, self._asked, self._router.split_rules
        if leg is None or rules is None:
            return []
        self.leg = None
        if self._legs is not None:
            self._give_back(now, self._legs.drop(leg))  # Envoy may never have asked about it
        if leg.whole:
            return self._interrupt(answer, now, whole=True)
        if leg.leg.concurrent:  # the other leg has not waited for it
            rules.connector.learn(leg.peer, answer.body if answer.succeeded else None)
            return self._on_concurrent(leg, answer, now)
        if asked is None:
            return []
        self._asked = None
        answers = self._go_on(asked, leg, answer, now)
        if self.waiting or self._awaits_leg:
            return answers
        return answers + self._catch_up(now)

    def _go_on(self, asked: Asked, leg: PrefillLeg, answer: LegAnswer, now: float) -> list[bytes]:
        """Decide what follows the prefill leg of *asked*."""
        end = take_answer(asked, leg, answer, self._router)
        if end is not None:
            return self._answer(asked, end, now)
        if asked.decode is not None:
            if asked.progress.whole:
                return self._answer(asked, asked.decode, now)
            asked.decode = None
            self._give_own_back(now)
        return self._decide(asked, now)

    def _on_concurrent(self, leg: PrefillLeg, answer: LegAnswer, now: float) -> list[bytes]:
        """Go on after a leg that the other one has not waited for: if it failed, that one waits in vain."""
        asked, self._beside = self._beside, None
        legs, rules = self._legs, self._router.split_rules
        if answer.succeeded or asked is None or legs is None or rules is None or self._begun:
            return []
        if not self.waiting and not isinstance(self.decision, Routed):
            return []
        worker = leg.decision.workers[0]
        failed = (*asked.progress.failed, worker)
        again = not answer.refused and len(failed) < MAX_LEGS and self._router.has(worker)
        if again:
            asked.progress = dataclasses.replace(asked.progress, failed=failed)
            self._beside, self.leg = asked, legs.again(leg)
            return []
        if answer.refused or not rules.fallback:
            return self._interrupt(answer, now)
        asked.computed = None
        if self.waiting:  # for somebody who generates, who now does all of it
            asked.progress = WHOLE
            return []
        return self._answer_elsewhere(asked, answer, legs, now)

    def _answer_elsewhere(
        self, asked: Asked, answer: LegAnswer, legs: PrefillLegs, now: float
    ) -> list[bytes]:
        """Have a decode worker do all of it."""
        self._give_own_back(now)  # the leg has a lease of its own
        found = self._router.decide(asked.request, now, subset=self._subset)
        if isinstance(found, Routed):
            found, _ = hand_over(asked, found, self._router)
        if not isinstance(found, Routed):
            return self._interrupt(answer, now)
        self.leg = legs.prepare_whole(
            found,
            found.body or asked.request.body or b"",
            self._router.peer(found.workers[0]),
            asked.request.path,
            {**asked.request.headers, REQUEST_ID_HEADER: self._own_id(asked)},
        )
        return []

    def _interrupt(self, answer: LegAnswer, now: float, *, whole: bool = False) -> list[bytes]:
        """Give the client *answer* instead of what the worker that it waits for might say."""
        told: Refused | Relayed = Refused(Refusal.PREFILL_FAILED)
        if answer.refused or (whole and answer.served):
            told = Relayed(answer.status, answer.body, answer.content_type, answer.retry_after)
        if self.waiting and self.ticket is not None:
            self._stop_waiting(self.ticket, now)
            return self._refuse(told) if isinstance(told, Refused) else self._relay(told)
        if isinstance(told, Refused):
            return [refusal(told)]
        return [relay(told, ANSWERED_ELSEWHERE if whole else PREFILL_REFUSED)]

    def _catch_up(self, now: float) -> list[bytes]:
        """Take the messages that came while it waited."""
        answers: list[bytes] = []
        kept, self._kept = self._kept, []
        self._received_bytes = 0
        for message in kept:
            answers += self.receive(ProcessingRequest.FromString(message), now)
        return answers

    @property
    def _awaits_leg(self) -> bool:
        """Whether nothing can be answered before the prefill leg is over."""
        return self.leg is not None and not self.leg.leg.concurrent and self.decision is None

    def give_up(self, now: float) -> list[bytes]:
        """Refuse the request: it has waited long enough, or nobody may wait any more."""
        ticket = self.ticket
        if not self.waiting or ticket is None:
            return []
        refusal, place = self._admission.expired(ticket), ticket.place
        self._stop_waiting(ticket, now)
        if place is None:
            return self._refuse(Refused(refusal))
        return self._turn_away(refusal, place, now)

    def close(self, now: float) -> None:
        """Give the worker and the place back: the stream has ended."""
        if self.waiting and self.ticket is not None:
            self._stop_waiting(self.ticket, now)
        if self._admitted:
            self._admitted = False
            self._admission.release()
        self._drop_leg(now)
        if self._handover is not None and self._legs is not None:
            self._legs.ended(self._handover)
        self._give_own_back(now)

    def _drop_leg(self, now: float) -> None:
        leg, self.leg = self.leg, None
        if leg is not None and self._legs is not None:
            self._give_back(now, self._legs.drop(leg))

    def _give_own_back(self, now: float) -> None:
        lease, self._lease = self._lease, None
        self._give_back(now, lease)

    def _give_back(self, now: float, lease: Lease | None) -> None:
        if lease is not None and lease.release(now):
            self._admission.on_room(lease.worker)

    def _stop_waiting(self, ticket: Ticket, now: float) -> None:
        self._admission.leave(ticket, now)
        self.waiting, self._asked, self._kept = False, None, []

    def _wait(self, place: Place, headers: Mapping[str, str], now: float) -> list[bytes]:
        """Begin to wait at *place*."""
        admission = self._admission
        ticket = self.ticket or admission.ticket(headers)
        refusal = admission.wait(ticket, place, now) if self._may_wait else Refusal.NO_WORKER
        if refusal is not None:
            return self._turn_away(refusal, place, now)
        self.ticket, self.waiting = ticket, True
        if self._full_duplex or self._patient:  # in full duplex Envoy's patience has no end
            return []
        self._patient = True
        return [be_patient(self._longest_wait_s)]

    @property
    def _longest_wait_s(self) -> float:
        """How long Envoy must wait for an answer."""
        leg_s = 0.0 if self._legs is None else MAX_LEGS * self._legs.longest_s
        return min(self._admission.limits.patience_s + leg_s, MAX_WAIT_S)

    def _wait_on(self, ticket: Ticket, place: Place, now: float) -> list[bytes]:
        """Go on waiting, at *place*."""
        if ticket.place == place:
            self._admission.stuck(ticket)
            return []
        self._admission.leave(ticket, now)
        refusal = self._admission.wait(ticket, place, now, moved=True)
        if refusal is None:
            return []
        self.waiting, self._asked, self._kept = False, None, []
        return self._turn_away(refusal, place, now)

    def _turn_away(self, refusal: Refusal, place: Place, now: float) -> list[bytes]:
        later = None
        if refusal is Refusal.QUEUE_FULL:
            later = self._admission.retry_after_s(place.pool, now)
        return self._refuse(Refused(refusal, retry_after_s=later))

    def _keep(self, message: ProcessingRequest, now: float) -> list[bytes]:
        """Put aside what comes while the request waits."""
        self._received_bytes += message.ByteSize()
        if self._received_bytes > self._max_body_bytes and self.ticket is not None:
            self._stop_waiting(self.ticket, now)
            return self._refuse(Refused(Refusal.PAYLOAD_TOO_LARGE))
        self._kept.append(message.SerializeToString())
        return []

    def _learn_modes(self, message: ProcessingRequest) -> None:
        # An Envoy that only observes waits for nothing.
        self._may_wait = not message.observability_mode
        if not message.HasField("protocol_config"):
            self._mode = ProcessingMode.BUFFERED  # Envoy before 1.35; the mode that we document
            return
        modes = message.protocol_config
        self._mode = modes.request_body_mode
        self._response_mode = modes.response_body_mode
        self._collects = modes.request_body_mode != ProcessingMode.NONE and (
            modes.request_body_mode != ProcessingMode.STREAMED
            or modes.send_body_without_waiting_for_header_response
        )

    @property
    def _buffered(self) -> bool:
        return self._mode in (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)

    @property
    def _full_duplex(self) -> bool:
        return self._mode == ProcessingMode.FULL_DUPLEX_STREAMED

    def _on_request_headers(self, message: ProcessingRequest, now: float) -> list[bytes]:
        if self._state is not _State.START:
            raise ProtocolError(f"request headers in state {self._state.name}")
        headers = header_map(message.request_headers.headers)
        last = message.request_headers.end_of_stream
        if self._legs is not None and LEG_HEADER in headers:
            return self._answer_leg(self._legs, headers, now, body_follows=not last)
        if not self._admitted:
            self._admitted = self._admission.enter()
            if not self._admitted and self._may_wait:
                self._kept = [message.SerializeToString()]
                return self._wait(GATE, headers, now)
        self._headers = headers
        self._take_subset(message)
        # What follows a CONNECT is no body and never ends. Envoy has no route for one, and says so.
        tunnel = headers.get(":method") == "CONNECT"
        small = self._is_small(headers) or self._legs is not None
        wanted = not last and not tunnel and self._collects and small
        if wanted and self._router.wants_body(headers):
            nobody = self._router.no_worker
            if nobody is not None and self._may_wait:
                self._kept = [message.SerializeToString()]
                return self._wait(nobody, headers, now)
            self._state = _State.BODY
            if not self._buffered:
                return []
            splits = self._legs is not None and phase_of(headers.get(":path", ""))
            return [CONTINUE_AND_SHOW_RESPONSE if splits else CONTINUE_REQUEST_HEADERS]
        # A policy that reads bodies must find one, also where none can be had (an upgrade, a tunnel).
        unavailable = (tunnel or not self._collects) and self._router.needs_body
        request = self._request(b"" if last or unavailable else None)
        return self._decide(Asked(request, body_follows=not last), now)

    def _is_small(self, headers: Mapping[str, str]) -> bool:
        """Tell whether the body may be read, as far as its length is announced."""
        length = headers.get("content-length", "")
        return not length.isdecimal() or int(length) <= self._max_routed_bytes

    def _on_request_body(self, message: ProcessingRequest, now: float) -> list[bytes]:
        body = message.request_body
        match self._state:
            case _State.START:
                raise ProtocolError("a body before the headers; set request_header_mode: SEND")
            case _State.DECIDED:
                return list(echo_request(body)) if self._full_duplex else [CONTINUE_REQUEST_BODY]
            case _State.BODY:
                self._take_subset(message)
                self._patient = False
                if self._buffered:
                    return self._decide(
                        self._asked_with(self._request(body.body), in_body=True), now
                    )
                return self._collect(body, now)

    def _collect(self, body: HttpBody, now: float) -> list[bytes]:
        self._received_bytes += len(body.body)
        if self._received_bytes > self._max_body_bytes:
            return self._refuse(Refused(Refusal.PAYLOAD_TOO_LARGE))
        self._chunks.append(body.body)
        if not body.end_of_stream:
            return []
        return self._decide_collected(now, end_of_stream=True)

    def _on_request_trailers(self, now: float) -> list[bytes]:
        match self._state:
            case _State.START:
                raise ProtocolError("trailers before the headers; set request_header_mode: SEND")
            case _State.BODY if self._buffered:
                raise ProtocolError("trailers before the buffered body")
            case _State.BODY:
                answers = self._decide_collected(now, end_of_stream=False)
                if self.waiting:
                    self._kept.append(REQUEST_TRAILERS)
                    return answers
                return [*answers, CONTINUE_REQUEST_TRAILERS]
            case _State.DECIDED:
                return [CONTINUE_REQUEST_TRAILERS]

    def _on_response_headers(self, message: ProcessingRequest, now: float) -> list[bytes]:
        if not self._buffered:
            return [CONTINUE_RESPONSE_HEADERS]
        headers = header_map(message.response_headers.headers)
        if self.leg is not None and self.leg.whole:
            if headers.get(":status", "") >= "500":
                return [be_patient(self._longest_wait_s)]
            self._drop_leg(now)
        self._begun = True
        merge = None if self._handover is None else self._handover.merge
        if merge is None or not merge.begin(headers):
            self._merge = None
            return [CONTINUE_RESPONSE_HEADERS]
        self._merge = merge
        return [STREAM_RESPONSE]

    def _on_response_body(self, body: HttpBody) -> list[bytes]:
        if self._merge is not None:
            new = self._merge.feed(body.body, last=body.end_of_stream)
            if new == body.body:
                return [CONTINUE_RESPONSE_BODY]
            answer = ProcessingResponse()
            mutation = answer.response_body.response.body_mutation
            if new:
                mutation.body = new
            else:
                mutation.clear_body = True
            return [answer.SerializeToString()]
        if self._response_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return list(echo_response(body))
        return [CONTINUE_RESPONSE_BODY]

    def _decide_collected(self, now: float, *, end_of_stream: bool) -> list[bytes]:
        chunks, self._chunks = self._chunks, []
        asked = self._asked_with(self._request(b"".join(chunks)))
        asked.chunks, asked.end_of_stream = len(chunks), end_of_stream
        return self._decide(asked, now)

    def _asked_with(self, request: Request, *, in_body: bool = False) -> Asked:
        """Return the question of a *request* whose whole body is there."""
        progress = WHOLE if self._legs is None else Progress()
        return Asked(request, in_body, progress=progress)

    def _request(self, body: bytes | None) -> Request:
        """Return what the router is asked about, with *body*."""
        headers, self._headers = self._headers, {}
        return Request(
            method=headers.get(":method", ""),
            path=headers.get(":path", ""),
            headers=headers,
            body=body,
            content=parse_content(body) if body and len(body) <= self._max_routed_bytes else None,
        )

    def _decide(self, asked: Asked, now: float) -> list[bytes]:
        self._state = _State.DECIDED
        decision = self._router.decide(
            asked.request,
            now,
            subset=self._subset,
            ahead=self._admission.places,
            progress=asked.progress,
        )
        if isinstance(decision, Held):
            self._asked = asked
            answers = self._wait(decision.place, asked.request.headers, now)
            if not self.waiting:
                self._asked = None
            return answers
        return self._follow(asked, decision, now)

    def _follow(self, asked: Asked, found: Decision | Split, now: float) -> list[bytes]:
        """Do what was found to be right for *asked*."""
        if isinstance(found, Split):
            return self._begin_leg(asked, found, now)
        return self._answer(asked, found, now)

    def _begin_leg(self, asked: Asked, split: Split, now: float) -> list[bytes]:
        """Have the prompt computed."""
        legs, leg = self._legs, None
        if legs is not None:
            headers = {**asked.request.headers, REQUEST_ID_HEADER: self._own_id(asked)}
            leg = prepare_leg(
                asked,
                split,
                self._router,
                legs,
                headers=headers,
                ids=self._ids,
                at_once=self._buffered,  # in full duplex nothing could be done for one that waits in vain
            )
        if leg is None:
            if not self._router.decodes_whole:
                return self._refuse(Refused(Refusal.PREFILL_FAILED, ONLY_SPLIT))
            asked.progress = WHOLE
            if split.decode is not None:
                return self._answer(asked, split.decode, now)
            return self._decide(asked, now)
        self.leg = leg
        if leg.leg.concurrent:
            asked.progress = Progress(whole=True, near=split.prefill.workers[0])
            asked.computed = Computed(leg.leg, None, leg.peer)
            self._beside = asked
            return self._decide(asked, now)
        if split.decode is not None:
            asked.decode = split.decode
            self._lease = split.decode.pool.acquire(split.decode.workers[0])
        self._asked = asked
        if self._full_duplex or self._patient:
            return []
        self._patient = True
        return [be_patient(self._longest_wait_s)]

    def _answer_leg(
        self, legs: PrefillLegs, headers: Mapping[str, str], now: float, *, body_follows: bool
    ) -> list[bytes]:
        """Say where a prefill leg goes, as it was decided."""
        self.is_leg = True
        self._state = _State.DECIDED
        leg = legs.take(headers[LEG_HEADER])
        if leg is None:
            return self._refuse(Refused(Refusal.NO_WORKER))
        self.decision = leg.decision
        self._lease, leg.lease = leg.lease, None
        granted = self._router.grant_retries(leg.decision, now)
        # It has the id that it is to have, whatever that looks like.
        asked = Asked(Request("POST", leg.path, headers), body_follows=body_follows, own_id="")
        return [self._routed(asked, leg.decision, retries=0 if leg.once else granted)]

    def _answer(self, asked: Asked, decision: Decision, now: float) -> list[bytes]:
        """Return the answers that carry *decision*."""
        if isinstance(decision, Routed):
            decision = self._hand_over(asked, decision)
        if isinstance(decision, Refused):
            return self._refuse(decision)
        if isinstance(decision, Relayed):
            return self._relay(decision)
        self.decision = decision
        if asked.decode is None:
            self._lease = decision.pool.acquire(decision.workers[0])
        retries = self._router.grant_retries(decision, now)
        if asked.decode is not None:  # the prompt has been computed for this worker alone
            decision = dataclasses.replace(decision, workers=decision.workers[:1])
            self.decision, retries = decision, 0
        answer = self._routed(asked, decision, retries=retries)
        if asked.end_of_stream is None:
            return [answer]
        if self._full_duplex:
            body = asked.request.body if decision.body is None else decision.body
            end = HttpBody(body=body, end_of_stream=asked.end_of_stream)
            return [answer, *echo_request(end)]
        if decision.body is None:
            return [answer, *(CONTINUE_REQUEST_BODY for _ in range(asked.chunks))]
        # The first chunk becomes the whole body, the others nothing.
        new = [decision.body, *(b"" for _ in range(asked.chunks - 1))][: asked.chunks]
        return [answer, *(replaced_chunk(chunk) for chunk in new)]

    def _hand_over(self, asked: Asked, decision: Routed) -> Routed | Refused:
        """Return *decision* with what the worker that generates is sent."""
        found, leg = hand_over(asked, decision, self._router)
        self.unused = leg.unused
        legs, near = self._legs, asked.progress.near
        if legs is not None and near is not None and asked.computed is not None:
            self._handover = legs.hand_over(asked.request, near, leg.merge)
        return found

    def _routed(self, asked: Asked, decision: Routed, *, retries: int | None) -> bytes:
        headers = asked.request.headers
        answer = ProcessingResponse()
        in_body = asked.in_body
        common = (answer.request_body if in_body else answer.request_headers).response
        # The route was chosen before we were asked, without the cluster header.
        common.clear_route_cache = True
        mutation = common.header_mutation
        first = decision.workers[0]
        endpoints = ",".join([worker.endpoint for worker in decision.workers])
        set_header(mutation, CLUSTER_HEADER, first.cluster or decision.pool.name)
        if in_body and decision.body is not None:
            common.body_mutation.body = decision.body
            if "content-length" in headers:
                length = str(len(decision.body))
                set_header(mutation, "content-length", length)
        namespace = answer.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value
        self._set_ids(asked, decision, mutation, namespace)
        self._tell_handover(asked, decision, namespace)
        if retries is not None:
            set_header(mutation, MAX_RETRIES_HEADER, str(retries))
        if self._full_duplex:
            set_header(mutation, ENDPOINT_KEY, endpoints)
        elif asked.body_follows and self._buffered:
            answer.mode_override.request_body_mode = ProcessingMode.NONE
            answer.mode_override.response_trailer_mode = ProcessingMode.SEND
            answer.mode_override.response_header_mode = ProcessingMode.SKIP
        namespace.fields[ENDPOINT_KEY].string_value = endpoints
        if first.rank is not None:
            set_header(mutation, RANK_HEADER, str(first.rank))
        for worker in decision.workers:
            if worker.rank is not None:
                ranks = answer.dynamic_metadata.fields[RANK_NAMESPACE].struct_value
                ranks.fields[worker.endpoint].string_value = str(worker.rank)
        return answer.SerializeToString()

    def _tell_handover(self, asked: Asked, decision: Routed, metadata: Struct) -> None:
        """Say what is needed before a further attempt at a request whose prompt was computed elsewhere."""
        if self._handover is None:
            return
        metadata.fields[HANDOVER_KEY].string_value = self._handover.token
        if "content-length" in asked.request.headers:
            body = asked.request.body if decision.body is None else decision.body
            metadata.fields[LENGTH_KEY].string_value = str(len(body or b""))

    def _set_ids(
        self, asked: Asked, decision: Routed, mutation: HeaderMutation, metadata: Struct
    ) -> None:
        """Say which id the request has, and if that is not for the client's eyes, which one it is shown."""
        headers = asked.request.headers
        own_id = self._request_id(headers) if asked.own_id is None else asked.own_id
        request_id = decision.request_id or own_id
        if request_id:
            set_header(mutation, REQUEST_ID_HEADER, request_id)
        if decision.request_id is not None:
            shown = own_id or headers.get(REQUEST_ID_HEADER, "")
            metadata.fields[SHOWN_ID_KEY].string_value = shown

    def _own_id(self, asked: Asked) -> str:
        """Return the id of the request as the client shall see it, the same for both legs."""
        if asked.own_id is None:
            asked.own_id = self._request_id(asked.request.headers)
        return asked.own_id or asked.request.headers.get(REQUEST_ID_HEADER, "")

    def _request_id(self, headers: Mapping[str, str]) -> str:
        """Return the id that the request is given, "" when it has the right one."""
        for name in self._id_headers:
            value = headers.get(name)
            if not value or (self._legs is not None and is_transfer_id(value)):
                continue
            if name == REQUEST_ID_HEADER:
                return ""
            if len(value) <= MAX_REQUEST_ID_CHARS and value.isascii() and value.isprintable():
                return value
        return f"{self._ids.getrandbits(128):032x}"

    def _refuse(self, refused: Refused) -> list[bytes]:
        self._state = _State.DECIDED
        self._chunks, self._kept = [], []
        self.decision = refused
        return [refusal(refused)]

    def _relay(self, relayed: Relayed) -> list[bytes]:
        self.decision = relayed
        self._chunks, self._kept = [], []
        return [relay(relayed, PREFILL_REFUSED)]

    def _take_subset(self, message: ProcessingRequest) -> None:
        if message.HasField("metadata_context"):
            hint = message.metadata_context.filter_metadata.get(SUBSET_NAMESPACE)
            if hint is not None and SUBSET_KEY in hint.fields:
                self._subset = parse_subset(hint.fields[SUBSET_KEY])
