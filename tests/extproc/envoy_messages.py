"""What Envoy says over ext_proc, and a reader of what it is answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.json_format import ParseDict

from extproc.ext_proc_answers import HANDOVER_KEY, LENGTH_KEY
from protos.ext_proc_pb2 import (
    CommonResponse,
    HeaderMutation,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)

NONE = ProcessingMode.NONE
STREAMED = ProcessingMode.STREAMED
BUFFERED = ProcessingMode.BUFFERED
BUFFERED_PARTIAL = ProcessingMode.BUFFERED_PARTIAL
FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED

POST = {":method": "POST", ":path": "/v1/chat/completions", "x-request-id": "client-id"}


def announce(
    message: ProcessingRequest,
    mode: ProcessingMode.BodySendMode,
    *,
    response_mode: ProcessingMode.BodySendMode = NONE,
    without_waiting: bool = False,
) -> ProcessingRequest:
    """Make *message* the first of a stream: it carries the modes of the filter."""
    message.protocol_config.request_body_mode = mode
    message.protocol_config.response_body_mode = response_mode
    message.protocol_config.send_body_without_waiting_for_header_response = without_waiting
    return message


def request_headers(
    headers: Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]] = POST,
    *,
    end: bool = False,
) -> ProcessingRequest:
    """Request headers; as Envoy does, with the values in ``raw_value``."""
    message = ProcessingRequest()
    message.request_headers.end_of_stream = end
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    for name, value in pairs:
        raw = value.encode() if isinstance(value, str) else value
        message.request_headers.headers.headers.add(key=name, raw_value=raw)
    return message


def request_body(body: bytes, *, end: bool = True) -> ProcessingRequest:
    """Return a piece of the request body; *end*: nothing follows it."""
    message = ProcessingRequest()
    message.request_body.body = body
    message.request_body.end_of_stream = end
    return message


def response_headers(status: str) -> ProcessingRequest:
    """Return the head of a response."""
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    return message


def response_body(body: bytes, *, end: bool = True) -> ProcessingRequest:
    """Return a piece of the response body."""
    message = ProcessingRequest()
    message.response_body.body = body
    message.response_body.end_of_stream = end
    return message


def bare(kind: str) -> ProcessingRequest:
    """Return a message of *kind* without content."""
    message = ProcessingRequest()
    getattr(message, kind).SetInParent()
    return message


def with_subset(message: ProcessingRequest, value: object) -> ProcessingRequest:
    """Put a subset hint in; *value* is any JSON value."""
    hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    ParseDict({"x-gateway-destination-endpoint-subset": value}, hint)
    return message


def parse(answers: Iterable[bytes]) -> list[ProcessingResponse]:
    """Read the answers of an exchange."""
    return [ProcessingResponse.FromString(answer) for answer in answers]


def kinds(answers: Iterable[bytes]) -> list[str | None]:
    """Return which message each answer is an answer to."""
    return [answer.WhichOneof("response") for answer in parse(answers)]


def common(answer: ProcessingResponse) -> CommonResponse:
    """Return what headers and body answers have in common."""
    kind = answer.WhichOneof("response")
    assert kind in {"request_headers", "request_body", "response_headers", "response_body"}
    found: CommonResponse = getattr(answer, kind).response
    return found


def set_headers(mutation: HeaderMutation) -> dict[str, bytes]:
    """Return the headers that *mutation* sets."""
    assert not mutation.remove_headers
    return {option.header.key: option.header.raw_value for option in mutation.set_headers}


def endpoints(answer: ProcessingResponse) -> list[str]:
    """Return the ordered endpoints that *answer* puts into the metadata."""
    fields = answer.dynamic_metadata.fields
    assert set(fields) == {"envoy.lb"}
    found = fields["envoy.lb"].struct_value.fields
    assert set(found) - {HANDOVER_KEY, LENGTH_KEY} == {"x-gateway-destination-endpoint"}
    return found["x-gateway-destination-endpoint"].string_value.split(",")


def echoed(answers: Iterable[ProcessingResponse]) -> list[tuple[str | None, bytes, bool]]:
    """Return kind, bytes and end-of-stream of echoed chunks."""
    found = []
    for answer in answers:
        mutation = common(answer).body_mutation
        assert mutation.WhichOneof("mutation") == "streamed_response"
        streamed = mutation.streamed_response
        found.append((answer.WhichOneof("response"), streamed.body, streamed.end_of_stream))
    return found
