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

The lease on the picked worker is taken with the decision and released by ``close``: Envoy keeps the
stream open until the HTTP stream ends (``response_trailer_mode: SEND``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from enum import Enum, auto

from google.protobuf.struct_pb2 import Value

from extproc.errors import ProtocolError, Refusal, error_body, refusal_status
from extproc.openai import parse_content
from extproc.pool import Lease
from extproc.router import Decision, Refused, Routed, Router
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


class Exchange:
    """The state of one exchange."""

    __slots__ = (
        "_chunks",
        "_collects",
        "_headers",
        "_ids",
        "_lease",
        "_max_body_bytes",
        "_max_routed_bytes",
        "_mode",
        "_received_bytes",
        "_response_mode",
        "_router",
        "_state",
        "_subset",
        "decision",
    )

    def __init__(
        self,
        router: Router,
        *,
        ids: random.Random,
        max_body_bytes: int,
        max_routed_bytes: int = DEFAULT_MAX_ROUTED_BYTES,
    ) -> None:
        """Begin.

        *ids*: source of request ids. *max_body_bytes*: most that is held of a streamed body.
        *max_routed_bytes*: largest body that the policy is shown.
        """
        self.decision: Decision | None = None
        """What was decided; None until then."""
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

    def close(self, now: float) -> None:
        """Give the worker back: the stream has ended."""
        if self._lease is not None:
            self._lease.release(now)

    def _learn_modes(self, message: ProcessingRequest) -> None:
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
        self._headers = headers
        self._take_subset(message)
        last = message.request_headers.end_of_stream
        wanted = not last and self._collects and self._is_small(headers)
        if wanted and self._router.wants_body(headers):
            self._state = _State.BODY
            return [_CONTINUE_REQUEST_HEADERS] if self._buffered else []
        # A policy that reads bodies must find one, also where none can be had (an upgrade).
        unavailable = not self._collects and self._router.needs_body
        return self._decide(b"" if last or unavailable else None, now, body_follows=not last)

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
                if self._buffered:
                    return self._decide(body.body, now, in_body=True)
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
                return [
                    *self._decide_collected(now, end_of_stream=False),
                    _CONTINUE_REQUEST_TRAILERS,
                ]
            case _State.DECIDED:
                return [_CONTINUE_REQUEST_TRAILERS]

    def _on_response_body(self, body: HttpBody) -> list[bytes]:
        if self._response_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return list(_echo_response(body))
        return [_CONTINUE_RESPONSE_BODY]

    def _decide_collected(self, now: float, *, end_of_stream: bool) -> list[bytes]:
        chunks, self._chunks = self._chunks, []
        body = b"".join(chunks)
        answers = self._decide(body, now)
        decision = self.decision
        if not isinstance(decision, Routed):
            return answers
        if self._full_duplex:
            if decision.body is not None:
                body = decision.body
            return [*answers, *_echo_request(HttpBody(body=body, end_of_stream=end_of_stream))]
        if decision.body is None:
            return [*answers, *(_CONTINUE_REQUEST_BODY for _ in chunks)]
        # The first chunk becomes the whole body, the others nothing.
        new = [
            _replaced_chunk(decision.body if index == 0 else b"") for index in range(len(chunks))
        ]
        return [*answers, *new]

    def _decide(
        self, body: bytes | None, now: float, *, in_body: bool = False, body_follows: bool = False
    ) -> list[bytes]:
        self._state = _State.DECIDED
        headers, self._headers = self._headers, {}
        request = Request(
            method=headers.get(":method", ""),
            path=headers.get(":path", ""),
            headers=headers,
            body=body,
            content=parse_content(body) if body and len(body) <= self._max_routed_bytes else None,
        )
        decision = self._router.decide(request, now, subset=self._subset)
        if isinstance(decision, Refused):
            return self._refuse(decision)
        self.decision = decision
        self._lease = decision.pool.acquire(decision.workers[0])
        answer = self._routed(decision, in_body=in_body, body_follows=body_follows, headers=headers)
        return [answer]

    def _routed(
        self,
        decision: Routed,
        *,
        in_body: bool,
        body_follows: bool,
        headers: Mapping[str, str],
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
        if not headers.get(REQUEST_ID_HEADER):
            request_id = f"{self._ids.getrandbits(128):032x}"
            _set_header(mutation.set_headers.add(), REQUEST_ID_HEADER, request_id)
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

    def _refuse(self, refused: Refused) -> list[bytes]:
        self._state = _State.DECIDED
        self._chunks = []
        self.decision = refused
        refusal = refused.refusal
        status = refusal_status(refusal)
        answer = ProcessingResponse()
        immediate = answer.immediate_response
        immediate.status.code = status
        immediate.body = error_body(status, refusal, refused.message).encode()
        immediate.details = f"router_{refusal}"
        _set_header(immediate.headers.set_headers.add(), "content-type", "application/json")
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
