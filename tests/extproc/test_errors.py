"""What clients read when the router answers them itself."""

from __future__ import annotations

import json

import pytest

from extproc import errors
from extproc.errors import Refusal, error_body, error_type, refusal_message, refusal_status

STATUSES = {
    Refusal.NO_WORKER: 503,
    Refusal.PAYLOAD_TOO_LARGE: 413,
    Refusal.MODEL_NOT_FOUND: 404,
    Refusal.QUEUE_FULL: 429,
    Refusal.QUEUE_TIMEOUT: 408,
    Refusal.PREFILL_FAILED: 503,
    Refusal.UNREADABLE_BODY: 400,
}


@pytest.mark.parametrize(("refusal", "status"), STATUSES.items())
def test_each_refusal_has_a_status(refusal, status):
    """The table of docs/interface.md."""
    assert refusal_status(refusal) == status


def test_every_refusal_is_tested_above():
    """A new one belongs into the table."""
    assert set(STATUSES) == set(Refusal)


@pytest.mark.parametrize("refusal", Refusal)
def test_refusal_speaks_to_the_client_in_a_sentence(refusal):
    """And its value is a label: lower case, no spaces."""
    message = refusal_message(refusal)

    assert message[0].isupper()
    assert message.endswith(".")
    assert refusal == refusal.lower().replace(" ", "_")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (413, "invalid_request_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_type_of_an_error_follows_its_status(status, kind):
    """Of the client up to 499, of the server from 500 on."""
    assert error_type(status) == kind


@pytest.mark.parametrize("message", ['with "quotes" and \\', "100 %", "zwei\nZeilen", "日本語", ""])
def test_error_body_has_the_shape_that_sdks_parse(message):
    """One object ``error`` with message, type, param and code; any text survives."""
    body = error_body(503, "no_worker_available", message)

    assert json.loads(body) == {
        "error": {
            "message": message,
            "type": "server_error",
            "param": None,
            "code": "no_worker_available",
        }
    }
    assert body.isascii()


@pytest.mark.parametrize(
    "cls", [errors.ConfigError, errors.ProtocolError, errors.WorkerExistsError]
)
def test_errors_of_this_package_have_one_base(cls):
    """Who catches the base catches all."""
    assert issubclass(cls, errors.ExtprocError)
