"""Envoy's own answers, and the page that lists every error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from extproc.admin import CLIENT_CODES
from extproc.errors import Refusal, refusal_status
from extproc.xds.local_reply import build_local_replies, envoy_errors

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"
ROW = re.compile(r"^\| `(\w+)` \| (\d{3}(?:, \d{3})*) \| (.+) \| (.+) \| (yes|no|later)\b.* \|$")


def rows():
    """Return statuses by code, as the page has them."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if match := ROW.match(line):
            assert match[1] not in found, match[1]
            found[match[1]] = {int(status) for status in match[2].split(", ")}
    return found


def known():
    """Return statuses by code, as the code has them."""
    found = {}
    for error in envoy_errors():
        found.setdefault(str(error.code), set()).add(error.status)
    for refusal in Refusal:
        found.setdefault(str(refusal), set()).add(refusal_status(refusal))
    # What the endpoints for everybody answer beside that.
    for code, status in (("method_not_allowed", 405), ("missing_session_id", 400)):
        found.setdefault(code, set()).add(status)
    assert found.keys() >= set(CLIENT_CODES.values())
    return found


def test_page_lists_every_error_and_no_other():
    """Codes are stable: programs go by them. A new one belongs onto the page."""
    assert rows() == known()


@pytest.mark.parametrize("error", envoy_errors(), ids=range(len(envoy_errors())))
def test_error_speaks_to_the_client_in_a_sentence(error):
    """And its code is a label."""
    assert error.message[0].isupper()
    assert error.message.endswith(".")
    assert re.fullmatch(r"[a-z_]+", error.code)
    assert not re.search(r"envoy|upstream", error.message, re.IGNORECASE)


@pytest.mark.parametrize("fail_closed", [False, True])
def test_every_answer_is_json_of_openai(fail_closed):
    """But for probes while the service is away, which a load balancer reads."""
    for mapper in build_local_replies(fail_closed=fail_closed).mappers:
        text = mapper.body_format_override.text_format_source.inline_string
        body = json.loads(text.replace("%%", "%"))
        assert mapper.body_format_override.content_type == "application/json"
        if mapper.status_code == 200:
            assert body["status"] == "ready"
        else:
            assert set(body) == {"error"}
            assert set(body["error"]) == {"message", "type", "param", "code"}


def test_whatever_envoy_answers_is_worded():
    """The last mapper takes all that is left and is not ours."""
    last = envoy_errors()[-1]

    assert "router_" in repr(last.when)
    assert last.code == "request_failed"
