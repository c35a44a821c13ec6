"""What the service says to Envoy over ext_proc, and how it reads what Envoy says."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from google.protobuf.struct_pb2 import Value

from extproc.errors import error_body, refusal_status
from extproc.router import Refused, Relayed
from protos.core_pb2 import HeaderMap, HeaderValueOption
from protos.ext_proc_pb2 import (
    HeaderMutation,
    HttpBody,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)

CLUSTER_HEADER = "x-router-cluster"
"""Names the Envoy cluster (the pool). Envoy removes a client's own before we are asked."""

ENDPOINT_KEY = "x-gateway-destination-endpoint"
"""The ordered endpoints, in dynamic metadata; in full duplex also a header (protocol 004)."""

SHOWN_ID_KEY = "x-router-request-id"
"""Dynamic metadata: the id that the client is shown, where workers are given another one."""

HANDOVER_KEY = "x-router-handover"
"""Dynamic metadata: the token of a request whose prompt a prefill worker has computed."""

LENGTH_KEY = "x-router-length"
"""Dynamic metadata: the length of the body that such a request was given, for attempts that go on with it."""

ATTEMPT_HEADER = "x-router-attempt"
"""Which attempt at a request this is, from 1; only within Envoy."""

ATTEMPT_ATTRIBUTE = "upstream.request_attempt_count"
"""The same, as Envoy tells the service."""

ADDRESS_ATTRIBUTE = "upstream.address"
"""The endpoint of the attempt."""

EXT_PROC_ATTRIBUTES = "envoy.filters.http.ext_proc"
"""Where attributes stand in a message."""

METADATA_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
REQUEST_ID_HEADER = "x-request-id"
RETRY_AFTER_HEADER = "retry-after"

MAX_RETRIES_HEADER = "x-envoy-max-retries"
"""How often Envoy may retry the request, when that is not what its route says. Envoy removes it."""

RANK_HEADER = "x-data-parallel-rank"
"""Tells a vLLM engine which of its data-parallel ranks shall serve."""

RANK_NAMESPACE = "vllm.rank"
"""Dynamic metadata: the rank by endpoint, so that a retry elsewhere names the rank that is meant there."""

MAX_WAIT_S = 3600.0
"""The longest that a request may wait for an answer of the service: Envoy takes no longer one."""

MAX_ECHO_BYTES = 62_000
"""Envoy refuses streamed body answers from 64 KiB on; the peers use this figure too."""

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def _continue(direction: str) -> bytes:
    answer = ProcessingResponse()
    getattr(answer, direction).SetInParent()
    return answer.SerializeToString()


CONTINUE_REQUEST_HEADERS = _continue("request_headers")
CONTINUE_REQUEST_BODY = _continue("request_body")
CONTINUE_REQUEST_TRAILERS = _continue("request_trailers")
CONTINUE_RESPONSE_HEADERS = _continue("response_headers")
CONTINUE_RESPONSE_BODY = _continue("response_body")
CONTINUE_RESPONSE_TRAILERS = _continue("response_trailers")


def _continue_and_show_response() -> bytes:
    """Return an answer to the headers of a request whose response may have to be changed."""
    answer = ProcessingResponse()
    answer.request_headers.SetInParent()
    answer.mode_override.request_body_mode = ProcessingMode.BUFFERED
    answer.mode_override.response_header_mode = ProcessingMode.SEND
    answer.mode_override.response_trailer_mode = ProcessingMode.SEND
    return answer.SerializeToString()


def _stream_response() -> bytes:
    """Return an answer to the headers of a response whose body is to be changed."""
    answer = ProcessingResponse()
    answer.response_headers.response.header_mutation.remove_headers.append("content-length")
    answer.mode_override.response_body_mode = ProcessingMode.STREAMED
    answer.mode_override.response_trailer_mode = ProcessingMode.SEND
    return answer.SerializeToString()


CONTINUE_AND_SHOW_RESPONSE = _continue_and_show_response()
STREAM_RESPONSE = _stream_response()


def _bare(kind: str) -> bytes:
    message = ProcessingRequest()
    getattr(message, kind).SetInParent()
    return message.SerializeToString()


REQUEST_TRAILERS = _bare("request_trailers")


def _continue_without_body() -> bytes:
    answer = ProcessingResponse()
    answer.request_headers.SetInParent()
    answer.mode_override.request_body_mode = ProcessingMode.NONE
    return answer.SerializeToString()


CONTINUE_WITHOUT_BODY = _continue_without_body()


@functools.lru_cache(maxsize=8)
def be_patient(seconds: float) -> bytes:
    """Return what tells Envoy to wait so long for the answer to its last message."""
    answer = ProcessingResponse()
    answer.override_message_timeout.FromMilliseconds(round(seconds * 1000))
    return answer.SerializeToString()


def refusal(refused: Refused) -> bytes:
    """Return the answer that the client gets instead of a worker's."""
    status = refusal_status(refused.refusal)
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    immediate.body = error_body(status, refused.refusal, refused.message).encode()
    immediate.details = f"router_{refused.refusal}"
    set_header(immediate.headers, "content-type", "application/json")
    if refused.retry_after_s is not None:
        set_header(immediate.headers, RETRY_AFTER_HEADER, str(refused.retry_after_s))
    return answer.SerializeToString()


def relay(relayed: Relayed, details: str) -> bytes:
    """Return the answer of a worker that the service itself has asked; *details* are for the access log."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = relayed.status
    immediate.body = relayed.body
    immediate.details = details
    for name, value in (
        ("content-type", relayed.content_type),
        (RETRY_AFTER_HEADER, relayed.retry_after),
    ):
        if value:
            set_header(immediate.headers, name, value)
    return answer.SerializeToString()


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


def set_header(mutation: HeaderMutation, name: str, value: str) -> None:
    """Let *mutation* set the header *name*, whatever it was."""
    option = mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value.encode()
    option.append_action = _OVERWRITE


def replaced_chunk(body: bytes) -> bytes:
    """Return the answer to a chunk of a request that becomes *body*."""
    answer = ProcessingResponse()
    mutation = answer.request_body.response.body_mutation
    if body:
        mutation.body = body
    else:
        mutation.clear_body = True
    return answer.SerializeToString()


def echo_request(body: HttpBody) -> Iterator[bytes]:
    """Yield what hands a chunk of the request back as it is, in full duplex."""
    for answer, part, last in _parts(body):
        streamed = answer.request_body.response.body_mutation.streamed_response
        streamed.SetInParent()  # an empty chunk is still a chunk
        streamed.body = part
        streamed.end_of_stream = last
        yield answer.SerializeToString()


def echo_response(body: HttpBody) -> Iterator[bytes]:
    """Yield what hands a chunk of the response back as it is, in full duplex."""
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
