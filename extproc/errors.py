"""Errors and refusals.

    ExtprocError
    +-- ConfigError      the user must change the configuration; the text says what
    +-- ProtocolError    Envoy sent what cannot come at this point; that one stream fails
    +-- WorkerExistsError  an administrator adds a worker that is there already

A refusal is not an error but a value: the router answers the client instead of routing. Its name is
the ``code`` of the JSON body, the metric label and the log field at once.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import assert_never


class ExtprocError(Exception):
    """Base of all errors of this package; never raised itself."""


class ConfigError(ExtprocError):
    """The configuration cannot be used."""


class ProtocolError(ExtprocError):
    """A message that the ext_proc protocol does not allow here."""


class WorkerExistsError(ExtprocError):
    """The worker, or one that shares its ranks, is there already."""


class Refusal(StrEnum):
    """Why a request is answered by the router."""

    NO_WORKER = "no_worker_available"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    MODEL_NOT_FOUND = "model_not_found"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    PREFILL_FAILED = "prefill_failed"
    UNREADABLE_BODY = "unreadable_body"


def refusal_status(refusal: Refusal) -> int:
    """Return the HTTP status of *refusal*."""
    match refusal:
        case Refusal.NO_WORKER | Refusal.PREFILL_FAILED:
            return 503
        case Refusal.UNREADABLE_BODY:
            return 400
        case Refusal.PAYLOAD_TOO_LARGE:
            return 413
        case Refusal.MODEL_NOT_FOUND:
            return 404
        case Refusal.QUEUE_FULL:
            return 429
        case Refusal.QUEUE_TIMEOUT:
            return 408
        case _:
            assert_never(refusal)


def refusal_message(refusal: Refusal) -> str:  # noqa: PLR0911  one line per refusal
    """Return the sentence for the client: what happened and what to do."""
    match refusal:
        case Refusal.NO_WORKER:
            return "No worker is available to serve this request. Retry later."
        case Refusal.PAYLOAD_TOO_LARGE:
            return "The request body is larger than this router accepts."
        case Refusal.MODEL_NOT_FOUND:
            return "No worker serves the model that was asked for."
        case Refusal.QUEUE_FULL:
            return "Too many requests are under way and waiting. Retry after a moment."
        case Refusal.QUEUE_TIMEOUT:
            return "The request waited too long for its turn. Retry later."
        case Refusal.UNREADABLE_BODY:
            return "The request body is not JSON in UTF-8 as this router reads it."
        case Refusal.PREFILL_FAILED:
            return "No prefill worker could compute the prompt of this request. Retry later."
        case _:
            assert_never(refusal)


def error_type(status: int) -> str:
    """Return OpenAI's ``error.type`` for *status*."""
    return "invalid_request_error" if 400 <= status < 500 else "server_error"


def error_body(status: int, code: str, message: str) -> str:
    """Return the JSON body of an error as OpenAI shapes it; clients' SDKs parse it."""
    return json.dumps(
        {"error": {"message": message, "type": error_type(status), "param": None, "code": code}}
    )
