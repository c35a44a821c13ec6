"""Which session a request belongs to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import Config, PolicyConfig, build_policy
from policies.base import Content, Request
from policies.session import SESSION_HEADERS, header_session, named_session, session_key
from tests.policies.fleets import chat, completion, post


def test_headers_in_their_order():
    """The first that is not empty; each beats all after it."""
    assert SESSION_HEADERS == (
        "x-session-id",
        "x-user-id",
        "x-tenant-id",
        "x-request-id",
        "x-correlation-id",
        "x-trace-id",
    )
    for count in range(len(SESSION_HEADERS)):
        headers = {name: f"of {name}" for name in SESSION_HEADERS[count:]}
        headers |= dict.fromkeys(SESSION_HEADERS[:count], "")
        assert header_session(headers) == f"of {SESSION_HEADERS[count]}"
    assert header_session({}) == ""
    assert header_session({"x-session": "no", "X-Session-Id": "names are lower case here"}) == ""


def test_headers_of_the_operator_come_first():
    """In the order given; empty ones are passed over."""
    headers = {"x-chat": "", "x-thread": "t", "x-session-id": "s"}

    assert header_session(headers, ("x-chat", "x-thread")) == "t"
    assert header_session(headers, ("x-chat",)) == "s"
    assert header_session({"x-trace-id": "z"}, ("x-chat",)) == "z"


FIELDS = {"session_params": {"session_id": "p"}, "user": "u", "session_id": "s", "user_id": "i"}


@pytest.mark.parametrize("present", list(itertools.product([True, False], repeat=4)), ids=str)
def test_body_fields_in_their_order(present):
    """All sixteen combinations; then the prompt."""
    chosen = {
        name: value for there, (name, value) in zip(present, FIELDS.items(), strict=True) if there
    }
    expected = next((str(v)[0] if isinstance(v, str) else "p" for v in chosen.values()), "")

    request = completion("hello", **chosen)

    assert named_session(request) == expected
    assert session_key(request) == (expected or "hello")


def test_header_beats_body_and_body_beats_prompt():
    """The three steps."""
    assert named_session(completion("p", user="u", headers={"x-trace-id": "t"})) == "t"
    assert named_session(completion("p", user="u", headers={"x-trace-id": ""})) == "u"
    assert named_session(completion("p")) == ""


@pytest.mark.parametrize(
    "text",
    [
        '"user":"x"',
        '{"user": "x", "session_id": "y"}',
        '", "user": "x", "z": "',
        "user: x",
        '\\", \\"user\\": \\"x\\"',
        '"session_params": {"session_id": "x"}',
    ],
)
def test_text_that_looks_like_a_session_is_none(text):
    """In a prompt, a message, a tool or a nested object: only top-level values name a session."""
    assert named_session(completion(text)) == ""
    assert named_session(chat(("user", text))) == ""
    assert named_session(post({"messages": [{"role": "user", "user": "x", "content": text}]})) == ""
    assert named_session(completion("p", metadata={"user": "x", "session_id": "x"})) == ""
    assert named_session(completion("p", tools=[{"user": "x"}])) == ""
    assert session_key(completion(text)) == text


def test_key_is_the_opening_or_the_body():
    """What stands in for an id, as configured."""
    request = chat(("system", "s"), ("user", "hello"), ("assistant", "a"), ("user", "more"))

    assert session_key(request) == request.content.opening
    assert session_key(request, (), "body") == request.body.decode()
    assert "more" not in session_key(request)


def test_body_that_is_no_prompt_stands_for_itself():
    """Bytes of any kind; nothing at all gives no key."""
    binary = Request("POST", "/", {}, b"\xff\x00", None)

    assert session_key(binary) == session_key(binary, (), "body") == "\xff\x00"
    for body in (None, b""):
        assert session_key(Request("GET", "/", {}, body)) == ""
    assert session_key(Request("POST", "/", {}, b"{}", Content())) == "{}"


@given(
    headers=st.dictionaries(st.sampled_from([*SESSION_HEADERS, "x-a"]), st.text(max_size=3)),
    session=st.text(max_size=2),
    opening=st.text(max_size=2),
    body=st.one_of(st.none(), st.binary(max_size=3)),
)
def test_key_is_empty_only_when_there_is_nothing(headers, session, opening, body):
    """Of whatever there is the first non-empty is taken."""
    request = Request("POST", "/", headers, body, Content(session=session, opening=opening))
    named = [headers.get(name, "") for name in SESSION_HEADERS]
    last = body.decode("latin-1") if body else ""

    expected = next((value for value in (*named, session, opening, last) if value), "")

    assert session_key(request) == expected


@pytest.mark.parametrize("name", ["consistent_hash", "rendezvous_hash", "sticky_least_loaded"])
@pytest.mark.parametrize("by", ["flag", "params"])
def test_header_names_are_taken_in_any_case(name, by):
    """Envoy hands names over in lower case; ``X-Chat`` in the file must mean the same header."""
    if by == "flag":
        config = Config(policy=name, session_headers=("X-Chat",))
    else:
        config = Config(policy=PolicyConfig(name=name, params={"session_headers": ["X-Chat"]}))

    policy = build_policy(config)

    assert not policy.wants_body({"x-chat": "1"})
