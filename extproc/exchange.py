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
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto

from google.protobuf.struct_pb2 import Value

from extproc.admission import GATE, Admission, Place, Ticket
from extproc.errors import ProtocolError, Refusal, error_body, refusal_status
from extproc.openai import parse_content
from extproc.pool import Lease
from extproc.router import Decision, Held, Refused, Routed, Router
from policies.base import Request
from protos.core_pb2 import HeaderMap, HeaderValueOption
from protos.ext_proc_pb2 import (
    HttpBody,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)

CLUSTER_HEADER = "x-router-cluster"
"""Names the Envoy cluster (the pool). Envoy removes a client's own before we are asked."""

ENDPOINT_KEY = "x-gateway-destination-endpoint"
"""The ordered endpoints, in dynamic metadata; in full duplex also a header (protocol 004)."""

METADATA_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
REQUEST_ID_HEADER = "x-request-id"
RETRY_AFTER_HEADER = "retry-after"

MAX_RETRIES_HEADER = "x-envoy-max-retries"
"""How often Envoy may retry the request, when that is not what its route says. Envoy removes it."""

MAX_REQUEST_ID_CHARS = 256
"""A longer value of another header is taken for no id."""

RANK_HEADER = "x-data-parallel-rank"
"""Tells a vLLM engine which of its data-parallel ranks shall serve."""

RANK_NAMESPACE = "vllm.rank"
"""Dynamic metadata: the rank by endpoint, so that a retry elsewhere names the rank that is meant there."""

DEFAULT_MAX_ROUTED_BYTES = 8 * 2**20

MAX_ECHO_BYTES = 62_000
"""Envoy refuses streamed body answers from 64 KiB on; the peers use this figure too."""

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class _State(Enum):
    START = auto()
    BODY = auto()
    DECIDED = auto()


def _continue(direction: str) -> bytes:
    answer = ProcessingResponse()
    getattr(answer, direction).SetInParent()
    return answer.SerializeToString()


_CONTINUE_REQUEST_HEADERS = _continue("request_headers")
_CONTINUE_REQUEST_BODY = _continue("request_body")
_CONTINUE_REQUEST_TRAILERS = _continue("request_trailers")
_CONTINUE_RESPONSE_HEADERS = _continue("response_headers")
_CONTINUE_RESPONSE_BODY = _continue("response_body")
_CONTINUE_RESPONSE_TRAILERS = _continue("response_trailers")


def _bare(kind: str) -> bytes:
    message = ProcessingRequest()
    getattr(message, kind).SetInParent()
    return message.SerializeToString()


_REQUEST_TRAILERS = _bare("request_trailers")


@functools.lru_cache(maxsize=8)
def _be_patient(seconds: float) -> bytes:
    """Return what tells Envoy to wait so long for the answer to its last message."""
    answer = ProcessingResponse()
    answer.override_message_timeout.FromMilliseconds(round(seconds * 1000))
    return answer.SerializeToString()


@dataclasses.dataclass(slots=True)
class _Asked:
    """A request whose worker is to be picked, with what the answer to Envoy depends on."""

    request: Request
    in_body: bool = False
    """Whether the answer is one to a body message."""

    body_follows: bool = False
    chunks: int = 0
    """Messages in which the body came, where it was collected."""

    end_of_stream: bool | None = None
    """Whether the last of them was the end of the request; None: nothing was collected."""


class Exchange:
    """The state of one exchange."""

    __slots__ = (
        "_admission",
        "_admitted",
        "_asked",
        "_chunks",
        "_collects",
        "_headers",
        "_id_headers",
        "_ids",
        "_kept",
        "_lease",
        "_max_body_bytes",
        "_max_routed_bytes",
        "_may_wait",
        "_mode",
        "_patient",
        "_received_bytes",
        "_response_mode",
        "_router",
        "_state",
        "_subset",
        "decision",
        "ticket",
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
    ) -> None:
        """Begin.

        *ids*: source of request ids. *max_body_bytes*: most that is held of a streamed body.
        *max_routed_bytes*: largest body that the policy is shown. *admission*: who may go on; None: everybody.
        *id_headers*: of those that the client sent, the first is the request's id.
        """
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
        self._asked: _Asked | None = None
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
        if self.waiting:
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
                answers = [_CONTINUE_RESPONSE_HEADERS]
            case "response_body":
                answers = self._on_response_body(message.response_body)
            case "response_trailers":
                answers = [_CONTINUE_RESPONSE_TRAILERS]
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
            found = self._router.decide(asked.request, now, subset=self._subset)
            if isinstance(found, Held):
                return self._wait_on(ticket, found.place, now)
            self._admission.leave(ticket, now, served=True)
            self.waiting, self._asked = False, None
            answers = self._answer(asked, found, now)
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
        kept, self._kept = self._kept, []
        self._received_bytes = 0
        for message in kept:
            answers += self.receive(ProcessingRequest.FromString(message), now)
        return answers

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
        lease = self._lease
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
        return [_be_patient(admission.limits.patience_s)]

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
        if not self._admitted:
            self._admitted = self._admission.enter()
            if not self._admitted and self._may_wait:
                self._kept = [message.SerializeToString()]
                return self._wait(GATE, headers, now)
        self._headers = headers
        self._take_subset(message)
        last = message.request_headers.end_of_stream
        # What follows a CONNECT is no body and never ends. Envoy has no route for one, and says so.
        tunnel = headers.get(":method") == "CONNECT"
        wanted = not last and not tunnel and self._collects and self._is_small(headers)
        if wanted and self._router.wants_body(headers):
            nobody = self._router.no_worker
            if nobody is not None and self._may_wait:
                self._kept = [message.SerializeToString()]
                return self._wait(nobody, headers, now)
            self._state = _State.BODY
            return [_CONTINUE_REQUEST_HEADERS] if self._buffered else []
        # A policy that reads bodies must find one, also where none can be had (an upgrade, a tunnel).
        unavailable = (tunnel or not self._collects) and self._router.needs_body
        request = self._request(b"" if last or unavailable else None)
        return self._decide(_Asked(request, body_follows=not last), now)

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
                return list(_echo_request(body)) if self._full_duplex else [_CONTINUE_REQUEST_BODY]
            case _State.BODY:
                self._take_subset(message)
                self._patient = False
                if self._buffered:
                    return self._decide(_Asked(self._request(body.body), in_body=True), now)
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
                    self._kept.append(_REQUEST_TRAILERS)
                    return answers
                return [*answers, _CONTINUE_REQUEST_TRAILERS]
            case _State.DECIDED:
                return [_CONTINUE_REQUEST_TRAILERS]

    def _on_response_body(self, body: HttpBody) -> list[bytes]:
        if self._response_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return list(_echo_response(body))
        return [_CONTINUE_RESPONSE_BODY]

    def _decide_collected(self, now: float, *, end_of_stream: bool) -> list[bytes]:
        chunks, self._chunks = self._chunks, []
        asked = _Asked(
            self._request(b"".join(chunks)), chunks=len(chunks), end_of_stream=end_of_stream
        )
        return self._decide(asked, now)

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

    def _decide(self, asked: _Asked, now: float) -> list[bytes]:
        self._state = _State.DECIDED
        decision = self._router.decide(
            asked.request, now, subset=self._subset, ahead=self._admission.places
        )
        if isinstance(decision, Held):
            self._asked = asked
            answers = self._wait(decision.place, asked.request.headers, now)
            if not self.waiting:
                self._asked = None
            return answers
        return self._answer(asked, decision, now)

    def _answer(self, asked: _Asked, decision: Decision, now: float) -> list[bytes]:
        """Return the answers that carry *decision*."""
        if isinstance(decision, Refused):
            return self._refuse(decision)
        self.decision = decision
        self._lease = decision.pool.acquire(decision.workers[0])
        answer = self._routed(
            decision,
            in_body=asked.in_body,
            body_follows=asked.body_follows,
            headers=asked.request.headers,
            retries=self._router.grant_retries(decision, now),
        )
        if asked.end_of_stream is None:
            return [answer]
        if self._full_duplex:
            body = asked.request.body if decision.body is None else decision.body
            end = HttpBody(body=body, end_of_stream=asked.end_of_stream)
            return [answer, *_echo_request(end)]
        if decision.body is None:
            return [answer, *(_CONTINUE_REQUEST_BODY for _ in range(asked.chunks))]
        # The first chunk becomes the whole body, the others nothing.
        new = [decision.body, *(b"" for _ in range(asked.chunks - 1))][: asked.chunks]
        return [answer, *(_replaced_chunk(chunk) for chunk in new)]

    def _routed(
        self,
        decision: Routed,
        *,
        in_body: bool,
        body_follows: bool,
        headers: Mapping[str, str],
        retries: int | None,
    ) -> bytes:
        answer = ProcessingResponse()
        common = (answer.request_body if in_body else answer.request_headers).response
        # The route was chosen before we were asked, without the cluster header.
        common.clear_route_cache = True
        mutation = common.header_mutation
        first = decision.workers[0]
        endpoints = ",".join([worker.endpoint for worker in decision.workers])
        _set_header(mutation.set_headers.add(), CLUSTER_HEADER, first.cluster or decision.pool.name)
        if in_body and decision.body is not None:
            common.body_mutation.body = decision.body
            if "content-length" in headers:
                length = str(len(decision.body))
                _set_header(mutation.set_headers.add(), "content-length", length)
        request_id = self._request_id(headers)
        if request_id:
            _set_header(mutation.set_headers.add(), REQUEST_ID_HEADER, request_id)
        if retries is not None:
            _set_header(mutation.set_headers.add(), MAX_RETRIES_HEADER, str(retries))
        if self._full_duplex:
            _set_header(mutation.set_headers.add(), ENDPOINT_KEY, endpoints)
        elif body_follows and self._buffered:
            answer.mode_override.request_body_mode = ProcessingMode.NONE
            answer.mode_override.response_trailer_mode = ProcessingMode.SEND
            answer.mode_override.response_header_mode = ProcessingMode.SKIP
        namespace = answer.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value
        namespace.fields[ENDPOINT_KEY].string_value = endpoints
        if first.rank is not None:
            _set_header(mutation.set_headers.add(), RANK_HEADER, str(first.rank))
        for worker in decision.workers:
            if worker.rank is not None:
                ranks = answer.dynamic_metadata.fields[RANK_NAMESPACE].struct_value
                ranks.fields[worker.endpoint].string_value = str(worker.rank)
        return answer.SerializeToString()

    def _request_id(self, headers: Mapping[str, str]) -> str:
        """Return the id that the request is given, "" when it has the right one."""
        for name in self._id_headers:
            value = headers.get(name)
            if not value:
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
        refusal = refused.refusal
        status = refusal_status(refusal)
        answer = ProcessingResponse()
        immediate = answer.immediate_response
        immediate.status.code = status
        immediate.body = error_body(status, refusal, refused.message).encode()
        immediate.details = f"router_{refusal}"
        _set_header(immediate.headers.set_headers.add(), "content-type", "application/json")
        if refused.retry_after_s is not None:
            later = str(refused.retry_after_s)
            _set_header(immediate.headers.set_headers.add(), RETRY_AFTER_HEADER, later)
        return [answer.SerializeToString()]

    def _take_subset(self, message: ProcessingRequest) -> None:
        if message.HasField("metadata_context"):
            hint = message.metadata_context.filter_metadata.get(SUBSET_NAMESPACE)
            if hint is not None and SUBSET_KEY in hint.fields:
                self._subset = parse_subset(hint.fields[SUBSET_KEY])


def header_map(headers: HeaderMap) -> dict[str, str]:
    """Return names (lower case, as Envoy sends them) to values; of a repeated name the first.

    Bytes that are not UTF-8 are kept as Latin-1 characters: HTTP allows them, and they must neither
    fail a request nor be lost.
    """
    found: dict[str, str] = {}
    for header in headers.headers:
        raw = header.raw_value
        if header.key in found:
            continue
        if not raw:
            found[header.key] = header.value
            continue
        try:
            found[header.key] = raw.decode()
        except UnicodeDecodeError:
            found[header.key] = raw.decode("latin-1")
    return found


def parse_subset(value: Value) -> frozenset[str]:
    """Read the subset hint: a list of endpoints, or one string of them with commas.

    The protocol says list; gateways send either, and lists whose entries hold commas.
    """
    if value.WhichOneof("kind") == "list_value":
        entries = [item.string_value for item in value.list_value.values]
    else:
        entries = [value.string_value]
    return frozenset(part.strip() for entry in entries for part in entry.split(",") if part.strip())


def _set_header(option: HeaderValueOption, name: str, value: str) -> None:
    option.header.key = name
    option.header.raw_value = value.encode()
    option.append_action = _OVERWRITE


def _replaced_chunk(body: bytes) -> bytes:
    answer = ProcessingResponse()
    mutation = answer.request_body.response.body_mutation
    if body:
        mutation.body = body
    else:
        mutation.clear_body = True
    return answer.SerializeToString()


def _echo_request(body: HttpBody) -> Iterator[bytes]:
    for answer, part, last in _parts(body):
        streamed = answer.request_body.response.body_mutation.streamed_response
        streamed.SetInParent()  # an empty chunk is still a chunk
        streamed.body = part
        streamed.end_of_stream = last
        yield answer.SerializeToString()


def _echo_response(body: HttpBody) -> Iterator[bytes]:
    for answer, part, last in _parts(body):
        streamed = answer.response_body.response.body_mutation.streamed_response
        streamed.SetInParent()  # an empty chunk is still a chunk
        streamed.body = part
        streamed.end_of_stream = last
        yield answer.SerializeToString()


def _parts(body: HttpBody) -> Iterator[tuple[ProcessingResponse, bytes, bool]]:
    data = body.body
    for start in range(0, max(len(data), 1), MAX_ECHO_BYTES):
        end = start + MAX_ECHO_BYTES
        yield ProcessingResponse(), data[start:end], body.end_of_stream and end >= len(data)
