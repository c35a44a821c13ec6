"""What all formats share: decoding a body, one server-sent event, a JSON string."""

from http import HTTPStatus
from typing import TypeVar

import msgspec

from extproc.sim.api_errors import ApiError

T = TypeVar("T")

SSE_DONE = b"data: [DONE]\n\n"


def parse_body(body: bytes | bytearray, form: type[T]) -> T:
    """Decode the JSON *body* as *form*; ApiError 400 says what is wrong with it.

    vLLM answers invalid JSON and missing fields alike with 400 and type "Bad Request".
    """
    try:
        return msgspec.json.decode(body, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error


def sse(data: bytes, *, event: str | None = None) -> bytes:
    """Return one server-sent event that carries *data*."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"
