"""The record of arrivals."""

import base64
import hashlib

from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.recorder import BODY_LIMIT_BYTES, Outcome, Recorder


def arrive(recorder, *chunks, path="/v1/completions"):
    """Record one request whose body comes in *chunks*."""
    arrival = recorder.open(
        method="POST",
        raw_path=path,
        raw_headers=((b"X-Odd", b"\xe9"), (b"x-odd", b"2")),
        http_version="1.1",
    )
    for chunk in chunks:
        arrival.feed(chunk)
    return arrival


@given(st.lists(st.binary(max_size=100)))
def test_a_body_is_recorded_whatever_its_pieces(chunks):
    """Length, digest and content are those of the whole."""
    shown = arrive(Recorder(1), *chunks).as_json()

    body = b"".join(chunks)
    assert shown["body_bytes"] == len(body)
    assert shown["body_sha256"] == hashlib.sha256(body).hexdigest()
    assert base64.b64decode(shown["body_base64"]) == body


def test_long_bodies_are_only_digested():
    """One byte over the limit, and nothing of it is kept."""
    recorder = Recorder(2)
    most = arrive(recorder, b"x" * BODY_LIMIT_BYTES)
    more = arrive(recorder, b"x" * BODY_LIMIT_BYTES, b"y", b"")

    assert most.body == b"x" * BODY_LIMIT_BYTES
    assert more.body is None
    assert more.as_json()["body_base64"] is None
    assert more.body_sha256 == hashlib.sha256(b"x" * BODY_LIMIT_BYTES + b"y").hexdigest()


def test_headers_keep_case_order_and_bytes():
    """And can be asked for in any case."""
    arrival = arrive(Recorder(1))

    assert arrival.headers == [("X-Odd", "\xe9"), ("x-odd", "2")]
    assert arrival.header("X-ODD") == "\xe9"
    assert arrival.header("other") is None


def test_the_oldest_leave_first():
    """Numbers go on counting."""
    recorder = Recorder(2)
    for path in "abc":
        arrive(recorder, path=path)

    assert [(kept.sequence, kept.raw_path) for kept in recorder] == [(2, "b"), (3, "c")]
    assert recorder[-1].outcome is Outcome.OPEN

    recorder.clear()
    assert len(recorder) == 0


def test_a_recorder_may_be_off():
    """Limit zero keeps nothing."""
    assert not Recorder(0).enabled
    assert Recorder(1).enabled
