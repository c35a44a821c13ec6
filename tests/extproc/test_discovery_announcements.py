"""Workers that announce themselves: what follows from their messages, and from silence."""

from __future__ import annotations

import random

import msgspec
import pytest

from extproc.address import WorkerUrl
from extproc.discovery import announcements
from extproc.discovery.announcements import (
    COMPLAINT_S,
    EXPIRY_S,
    MAX_FRAME_BYTES,
    Announcements,
    parse,
)
from extproc.discovery.updates import WorkerSpec, WorkerType

ZMQ = "10.0.0.1:14579"


def map_of(**more):
    return {"type": "P", "http_address": "10.0.0.1:8000", "zmq_address": ZMQ, **more}


def frames(value=None, **more):
    value = map_of(**more) if value is None else value
    return [b"me", msgspec.msgpack.encode(value)]


# --- one message


def test_prefill_worker():
    """The scheme goes without saying; what else there is says nothing."""
    spec = parse(frames(transfer_mode="write", tp_size=2, dp_size=4))

    url = WorkerUrl.parse("http://10.0.0.1:8000")
    assert spec == WorkerSpec(url, worker_type=WorkerType.PREFILL, zmq_address=ZMQ)


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("w1.example:8000", "http://w1.example:8000"),
        ("https://w1.example", "https://w1.example"),
        ("http://[::1]:8000/llama/", "http://[::1]:8000/llama"),
    ],
)
def test_decode_worker_at(address, key):
    """Named, with TLS, under a path."""
    spec = parse(frames(type="D", http_address=address))

    assert (spec.key, spec.worker_type) == (key, WorkerType.DECODE)


REFUSED = [
    pytest.param([], "one part, got -1", id="nothing"),
    pytest.param([b"me"], "one part, got 0", id="no-part"),
    pytest.param([b"me", b"", frames()[1]], "one part, got 2", id="two-parts"),
    pytest.param([b"me", b""], "expected a map", id="empty"),
    pytest.param([b"me", b"\xc1"], "expected a map", id="no-msgpack"),
    pytest.param([b"me", frames()[1] + b"\x00"], "expected a map", id="more-after-it"),
    pytest.param([b"me", frames()[1][:-1]], "expected a map", id="cut-off"),
    pytest.param([b"me", b"\x91" * 4000], "expected a map", id="nested"),
    pytest.param([b"me", b"\xdf\xff\xff\xff\xff"], "expected a map", id="huge-map"),
    pytest.param([b"me", b"x" * (MAX_FRAME_BYTES + 1)], "larger than 4096 bytes", id="oversize"),
    pytest.param([b"m" * 4097, frames()[1]], "larger than 4096 bytes", id="oversize-identity"),
    pytest.param(frames([1, 2]), "expected a map", id="list"),
    pytest.param(frames({}), "missing required field `type`", id="empty-map"),
    pytest.param(frames(type="X"), "expected a map", id="role"),
    pytest.param(frames(type=1), "expected a map", id="role-number"),
    pytest.param(frames(http_address=None), "http_address", id="no-address"),
    pytest.param(frames(http_address=""), "worker URL", id="empty-address"),
    pytest.param(frames(http_address="ftp://h:1"), "worker URL", id="scheme"),
    pytest.param(frames(http_address="h:99999"), "port", id="port"),
    pytest.param(frames(http_address="169.254.169.254:80"), "link-local", id="metadata"),
    pytest.param(frames(http_address="a\r\nb:1"), "without spaces", id="line-break"),
    pytest.param(frames(http_address="http://u:secret@h:1"), "password", id="password"),
    pytest.param(frames(http_address="h:1@3"), "rank", id="rank"),
    pytest.param(frames(zmq_address=""), "zmq_address", id="no-zmq"),
    pytest.param(frames(zmq_address="h"), "expected host:port", id="zmq-no-port"),
    pytest.param(frames(zmq_address="h:"), "zmq_address", id="zmq-empty-port"),
    pytest.param(frames(zmq_address="h:0"), "zmq_address", id="zmq-port-0"),
    pytest.param(frames(zmq_address="tcp://h:1"), "zmq_address", id="zmq-scheme"),
    pytest.param(frames(zmq_address="h:1/"), "expected host:port", id="zmq-slash"),
    pytest.param(frames(zmq_address="h:1/x"), "expected host:port", id="zmq-path"),
    pytest.param(frames(zmq_address="h:1@2"), "expected host:port", id="zmq-rank"),
    pytest.param(frames(zmq_address="h:1\r\nx: y"), "zmq_address", id="zmq-header"),
    pytest.param(frames(zmq_address="h:1___decode_addr_x:2"), "zmq_address", id="zmq-id"),
]


@pytest.mark.parametrize(("message", "reason"), REFUSED)
def test_garbage_is_refused(message, reason):
    """It changes nothing, and is counted."""
    said = Announcements()
    said.take(frames(), 1.0)
    before = said.workers

    assert said.take(message, 2.0) is None

    assert (said.workers, said.refused, said.next_expiry) == (before, 1, 1.0 + EXPIRY_S)
    assert reason in said.complaint(2.0)[1]
    assert "secret" not in str(said.complaint(99.0))


# --- over time


def test_worker_is_new_once():
    """Until it says something else of itself."""
    said = Announcements()

    first = said.take(frames(), 0.0)
    again = said.take(frames(), 3.0)
    role = said.take(frames(type="D"), 4.0)
    moved = said.take(frames(type="D", zmq_address="10.0.0.1:2"), 5.0)

    assert first.worker_type is WorkerType.PREFILL
    assert again is None
    assert role.worker_type is WorkerType.DECODE
    assert moved.zmq_address == "10.0.0.1:2"
    assert said.workers == (moved,)


def test_silence_is_measured_exactly():
    """Not in whole seconds; a message in time renews it."""
    said = Announcements()
    said.take(frames(), 0.9)
    assert said.expire(5.89) == []
    said.take(frames(), 5.8)
    assert said.next_expiry == pytest.approx(10.8)

    assert said.expire(10.79) == []
    assert said.expire(10.81) == ["http://10.0.0.1:8000"]
    assert (said.workers, said.next_expiry) == ((), None)
    assert said.expire(99.0) == []


def test_those_of_an_earlier_run_have_as_much_time():
    """As if they had just spoken; who speaks is not new."""
    spec = parse(frames())
    other = parse(frames(http_address="10.0.0.2:8000"))
    said = Announcements([spec, other], 100.0)

    assert said.take(frames(), 103.0) is None
    assert said.expire(105.0) == [other.key]
    assert said.expire(108.0) == [spec.key]


def test_there_is_a_most(monkeypatch):
    """Those that are there may go on speaking."""
    monkeypatch.setattr(announcements, "MAX_WORKERS", 2)
    said = Announcements()
    for number in range(1, 4):
        said.take(frames(http_address=f"10.0.0.{number}:1"), number)

    said.take(frames(http_address="10.0.0.1:1"), 4.0)

    assert [spec.url.host for spec in said.workers] == ["10.0.0.2", "10.0.0.1"]
    assert said.complaint(5.0) == (1, "there are 2 workers already")


def test_complaints_are_rare():
    """One at once, then one for all that came since, after a while."""
    said = Announcements()
    assert said.complaint(0.0) is None
    told = []
    for tenth in range(250):
        said.take([b"me", b"x"], tenth / 10)
        told.append(said.complaint(tenth / 10))

    counts = {at / 10: complaint[0] for at, complaint in enumerate(told) if complaint}
    assert counts == {0.0: 1, COMPLAINT_S: 100, 2 * COMPLAINT_S: 100}
    assert said.refused == 250


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_workers_in_two_minutes(seed):
    """They join, leave, change their roles and send garbage: right at every moment."""
    rng = random.Random(seed)
    said = Announcements()
    expected = {}
    """What a slow observer knows: by key when it was heard, its role and its ZMQ address."""
    followed = {}
    """What the updates say."""
    roles = {number: rng.choice("PD") for number in range(100)}
    for step in range(12_000):
        now = step * 0.01
        number = rng.randrange(100)
        quiet = (int(now) // 10 + number) % 4 == 0  # a quarter is silent for ten seconds
        if not quiet and rng.random() < 0.5:
            if rng.random() < 0.02:
                roles[number] = rng.choice("PD")
            address, zmq = f"10.0.1.{number}:8000", f"10.0.1.{number}:{rng.choice((1, 1, 1, 2))}"
            key = f"http://{address}"
            message = frames(type=roles[number], http_address=address, zmq_address=zmq)
            if rng.random() < 0.1:
                message[1] = rng.choice((message[1][:-1], b"", rng.randbytes(20), b"x" * 5000))
            else:
                role = WorkerType.PREFILL if roles[number] == "P" else WorkerType.DECODE
                expected[key] = now, role, zmq
            spec = said.take(message, now)
            if spec is not None:
                followed[spec.key] = spec.worker_type, spec.zmq_address
        for key in said.expire(now):
            del followed[key]
        there = {
            key: (role, zmq) for key, (at, role, zmq) in expected.items() if now - at < EXPIRY_S
        }
        assert followed == there
        assert {s.key: (s.worker_type, s.zmq_address) for s in said.workers} == there
    assert said.refused > 100
