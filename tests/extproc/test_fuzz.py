"""Bodies and messages that nobody would send, by the hundred thousand, through the real service.

Each case is made from the seed and its number alone; a failure prints what runs it again: for a body that case
alone, for a stream all cases up to it, since streams act on each other. ``make fuzz`` runs 100,000 of each kind,
the usual tests a part of them. FUZZ_CASES, FUZZ_SEED and FUZZ_ONLY (the number of one case) change what is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from extproc.admission import Admission, Limits
from extproc.discovery.updates import Reset
from extproc.h2.grpc import Status
from extproc.metrics import Metrics
from extproc.router import Router
from extproc.service import ExtProcService
from policies.cache_aware import CacheAware
from protos.ext_proc_pb2 import ProcessingResponse
from tests.e2e.harness import rss_bytes
from tests.extproc.envoy_messages import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX,
    NONE,
    STREAMED,
    announce,
    bare,
    request_body,
    request_headers,
    response_body,
    with_subset,
)
from tests.fleets import registry_of, say, spec_of, urls

CASES = int(os.environ.get("FUZZ_CASES", "10000"))
SEED = int(os.environ.get("FUZZ_SEED", "20261"))
ONLY = os.environ.get("FUZZ_ONLY")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_BODY_BYTES = 300_000
MAX_ROUTED_BYTES = 200_000
ONE_MESSAGE_CPU_S = 0.25
"""CPU that one message may take: nobody else is served meanwhile."""

GROWTH_BYTES = 30_000_000
GROWTH_OBJECTS = 2_000

POST = {":method": "POST", ":path": "/v1/chat/completions", "x-request-id": "client-id"}


class FakeCall:
    """The call of one stream as the gRPC server runs it: nothing arrives after its end."""

    def __init__(self, service: ExtProcService) -> None:
        self.path = "/fuzz"
        self.sent: list[bytes] = []
        self.status: Status | None = None
        self.closed = False
        self.unwritten = False
        """Whether something was sent outside of a message of the peer, and not written."""

        self._inside = False
        self.handler = service.open(self)  # type: ignore[arg-type]

    def send(self, message: bytes) -> None:
        assert self.status is None, "an answer after the end"
        self.sent.append(message)
        self.unwritten = not self._inside

    def flush(self) -> None:
        """Write what was sent."""
        self.unwritten = False

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        assert self.status is None, "ended twice"
        assert isinstance(message, str)
        self.status = status
        self.unwritten = not self._inside
        self.close()

    def close(self) -> None:
        """End the stream, as a reset does too."""
        if not self.closed:
            self.closed = True
            self.handler.on_close()

    def take(self, message: bytes) -> float:
        """Hand over a message; return the CPU seconds that it took."""
        if self.closed:
            return 0.0
        started = time.process_time()
        with self._written_after():
            self.handler.on_message(message)
        return time.process_time() - started

    def half_close(self) -> None:
        """Note that the peer sends no more."""
        if not self.closed:
            with self._written_after():
                self.handler.on_end()

    @contextlib.contextmanager
    def _written_after(self) -> Iterator[None]:
        """As the server does: it writes after each message of a peer."""
        self._inside = True
        yield
        self._inside = self.unwritten = False

    def kinds(self) -> list[str]:
        """Return what was answered."""
        answers = map(ProcessingResponse.FromString, self.sent)
        return [answer.WhichOneof("response") or "be patient" for answer in answers]


class Bench:
    """A service with workers, and what must hold of it after all streams have ended."""

    def __init__(self, limits: Limits | None = None) -> None:
        workers = [spec_of(url) for url in urls(3)]
        # small bounds, so that the tree is full early and its memory is flat after that
        policy = CacheAware(max_tree_chars=20_000, max_tree_size=200, eviction_interval_secs=0.01)
        self.registry = registry_of(*workers, policy=policy, asks_models=True)
        for url in urls(3):
            say(self.registry, url, "sim-model", ["adapter"])
        self.metrics = Metrics("cache_aware", self.registry)
        self._internal = self.metrics.stream_errors.labels("internal")
        self.admission = Admission(limits)
        self.service = ExtProcService(
            Router(self.registry, random.Random(1)),
            self.metrics,
            ids=random.Random(2),
            max_body_bytes=MAX_BODY_BYTES,
            max_routed_bytes=MAX_ROUTED_BYTES,
            admission=self.admission,
        )

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"vllm_extproc_{name}", labels) or 0.0

    def check_idle(self) -> None:
        """Check that no stream has left anything."""
        assert [pool.in_flight for pool in self.registry.pools] == [0]
        assert [worker.in_flight for worker in self.registry.pools[0].candidates] == [0, 0, 0]
        assert self.admission.admitted == 0
        assert set(self.admission.waiting.values()) == {0}
        assert self.admission.places == {}
        self.check_sound()

    def check_sound(self) -> None:
        """Check that nothing was raised that nobody had thought of."""
        assert self._internal._value.get() == 0, "an exception escaped, see the log above"


class Growth:
    """Memory from when the service is warm."""

    def __init__(self) -> None:
        self._objects, self._bytes = self._measure()

    def _measure(self) -> tuple[int, int]:
        gc.collect()
        return len(gc.get_objects()), rss_bytes(os.getpid())

    def check(self) -> str:
        """Check that it has not grown; return the figures."""
        objects, size = self._measure()
        grown = objects - self._objects, size - self._bytes
        assert grown[0] < GROWTH_OBJECTS, grown
        assert grown[1] < GROWTH_BYTES, grown
        return f"{grown[0]:+} objects, {grown[1] / 1e6:+.1f} MB"


NUMBERS = range(CASES) if ONLY is None else range(int(ONLY), int(ONLY) + 1)


@contextlib.contextmanager
def case(kind: str, number: int, again: str) -> Iterator[random.Random]:
    """Give a case its randomness; when it fails, say how to run it *again*."""
    try:
        yield random.Random(f"{SEED} {kind} {number}")
    except BaseException:
        print(
            f"\nrun it again: FUZZ_SEED={SEED} {again} pytest tests/extproc/test_fuzz.py -k {kind}"
        )
        raise


@pytest.fixture(autouse=True)
def _only_errors_are_logged() -> Iterator[None]:
    """Log no warning for each refused message: they would drown the one error that matters."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


# --- bodies

CHAT: dict[str, Any] = {
    "model": "sim-model",
    "messages": [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "What is an envoy? \u00e9\u4f60\U0001f600"},
        {"role": "assistant", "content": "A messenger."},
        {"role": "user", "content": "And a router?"},
    ],
    "temperature": 0.7,
    "stream": True,
    "max_tokens": 16,
    "user": "somebody",
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 40}}
SEEDS: list[bytes] = [
    *(
        json.dumps(document).encode()
        for document in (
            CHAT,
            {"model": "adapter", "prompt": "Once upon a time", "max_tokens": 5, "n": 2},
            {"model": "sim-model", "prompt": ["a", "b", "c"]},
            {"model": "sim-model", "prompt": list(range(1, 200))},
            {"model": "sim-model", "prompt": [[1, 2, 3], [4, 5], []]},
            {"model": "sim-model", "input": ["embed me", "and me"]},
            {"model": "sim-model", "input": "text", "encoding_format": "base64"},
            {"model": "sim-model", "input": "text", "instructions": "be brief"},
            {
                "model": "sim-model",
                "input": [{"role": "user", "content": [{"type": "input_text"}]}],
            },
            {"model": "sim-model", "query": "q", "documents": ["d1", "d2"]},
            {"text": "generate", "sampling_params": {}, "session_params": {"session_id": "s"}},
            {"input_ids": [1, 2, 3], "session_params": None},
            {
                **CHAT,
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE, IMAGE]}
                ],
            },
            {
                **CHAT,
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "object"}},
                    }
                ],
                "messages": [
                    {"role": "user", "content": "call"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "1", "content": "2"},
                ],
            },
        )
    ),
    (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nsim-model\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        b"RIFF\0\0\r\n--b--\r\n"
    ),
    b"",
]

VALUES = (
    b"1e999", b"-0", b"1" * 400, b"0." + b"9" * 400, b"NaN", b"Infinity", b"-Infinity", b"null", b"true",
    b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xff"', b'"\xc0\xaf"', b'"\xed\xa0\x80"', b"[]",
    b"{}", b'""', b"[[]]", b"[null]", b"[{}]", b"18446744073709551616", b"-9223372036854775809", b"1.5",
    b'[1,"a",null,{}]', b"[-1]", b"[4294967296]", b"[1e3]", b"[true]", b'[[1,2],"x"]', b"0x10", b"01",
    b'{"text":1}', b'[{"text":[]}]', b'[{"role":1,"content":{}}]', b'[{"role":"user","content":[[]]}]',
)  # fmt: skip
KEYS = (
    *("model", "messages", "prompt", "input", "input_ids", "text", "query", "tools", "system"),
    *("instructions", "session_params", "user", "session_id", "user_id", "content", "role"),
)


def flip_bytes(rng: random.Random, body: bytearray) -> None:
    for _ in range(rng.randint(1, 8)):
        if body:
            body[rng.randrange(len(body))] = rng.randrange(256)


def truncate(rng: random.Random, body: bytearray) -> None:
    del body[rng.randint(0, len(body)) :]


def duplicate(rng: random.Random, body: bytearray) -> None:
    start = rng.randint(0, len(body))
    part = body[start : start + rng.randint(1, 60)]
    at = rng.randint(0, len(body))
    body[at:at] = part * rng.randint(1, 40)


def delete(rng: random.Random, body: bytearray) -> None:
    start = rng.randint(0, len(body))
    del body[start : start + rng.randint(1, 30)]


def nest(rng: random.Random, body: bytearray) -> None:
    depth = rng.choice((10, 100, 1_000, 10_000, 50_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"content":[', b"]}")))
    inner = opening * depth + b"1" + (closing * depth if rng.random() < 0.7 else b"")
    body[:] = b'{"%s":%s}' % (rng.choice(KEYS).encode(), inner)


def replace_value(rng: random.Random, body: bytearray) -> None:
    colons = [at for at, byte in enumerate(body) if byte == 58]
    if colons:
        at = rng.choice(colons) + 1
        end = min((e for e in (body.find(c, at) for c in (b",", b"}", b"]")) if e > 0), default=at)
        body[at:end] = rng.choice(VALUES)


def add_key(rng: random.Random, body: bytearray) -> None:
    """Add a key, mostly one that is there already."""
    at = body.find(b"{") + 1
    body[at:at] = b'"%s":%s,' % (rng.choice(KEYS).encode(), rng.choice(VALUES))


def add_mark(rng: random.Random, body: bytearray) -> None:
    body[:0] = rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" \t\r\n" * 50, b"\x0b"))


def recode(rng: random.Random, body: bytearray) -> None:
    body[:] = body.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-7")))


def grow(rng: random.Random, body: bytearray) -> None:
    """Make one text long, up to beyond what is routed by its body."""
    size = rng.choice((1_000, 20_000, MAX_ROUTED_BYTES + 10))
    quote = body.find(b'"', rng.randint(0, len(body))) + 1
    body[quote:quote] = rng.choice((b"x", b"\\n", b"\xf0\x9f\x98\x80", b"\\ud83d")) * (size // 4)


def noise(rng: random.Random, body: bytearray) -> None:
    body[:] = rng.randbytes(rng.choice((0, 1, 10, 1_000)))


MUTATIONS: tuple[Callable[[random.Random, bytearray], None], ...] = (
    *(flip_bytes, truncate, duplicate, delete, replace_value, add_key),
    *(flip_bytes, replace_value, add_key, add_mark, recode, noise),
)
RARE = (nest, grow)
"""Cost more than the others together."""


def mutate(rng: random.Random) -> bytes:
    """Return a body that was a proper one."""
    body = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        chosen = RARE if rng.random() < 0.02 else MUTATIONS
        rng.choice(chosen)(rng, body)
    return bytes(body)


CONTENT_TYPES = ("application/json", "multipart/form-data; boundary=b", "text/plain", "")
PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/generate"),
    *("/v1/rerank", "/v1/audio/transcriptions", "/", "*", ""),
)


async def test_mutated_bodies() -> None:
    """Each gets a worker or a refusal, whatever it is, in bounded time and without a trace."""
    bench = Bench()
    growth: Growth | None = None
    results: Counter[str] = Counter()
    slowest = (0.0, -1, 0)
    started = time.monotonic()
    for number in NUMBERS:
        if growth is None and number >= CASES // 5:
            growth = Growth()
        with case("mutated_bodies", number, f"FUZZ_ONLY={number}") as rng:
            body = mutate(rng)
            call = FakeCall(bench.service)
            mode = rng.choice((BUFFERED, BUFFERED, FULL_DUPLEX))
            head = {
                ":method": "POST",
                ":path": rng.choice(PATHS),
                "content-type": rng.choice(CONTENT_TYPES),
                "content-length": str(len(body)),
            }
            call.take(announce(request_headers(head), mode).SerializeToString())
            took = 0.0
            pieces = (
                [body] if mode == BUFFERED else [body[: len(body) // 2], body[len(body) // 2 :]]
            )
            for index, piece in enumerate(pieces):
                message = request_body(piece, end=index + 1 == len(pieces))
                took = max(took, call.take(message.SerializeToString()))
            slowest = max(slowest, (took, number, len(body)))
            kinds = call.kinds()
            assert call.status is None, (call.status, kinds)
            decided = "immediate_response" if "immediate_response" in kinds else "routed"
            if mode == FULL_DUPLEX and decided == "routed":
                assert b"".join(echoes(call)) == body, "not one byte may change"
            results[decided] += 1
            assert len(kinds) >= 1 + (mode == BUFFERED and decided == "routed"), kinds
            assert bench.registry.pools[0].in_flight == (decided == "routed")
            if rng.random() < 0.5:
                call.half_close()
            call.close()
            bench.check_sound()
    bench.check_idle()
    memory = growth.check() if growth is not None else "one case"
    print(
        f"\nfuzz: {sum(results.values())} bodies (seed {SEED}) in {time.monotonic() - started:.1f} s:"
        f" {dict(results)}; {memory}; slowest {slowest[0] * 1e3:.1f} ms"
        f" (case {slowest[1]}, {slowest[2]} bytes)"
    )
    assert slowest[0] < ONE_MESSAGE_CPU_S, slowest
    assert bench.count("stream_errors_total", kind="protocol") == 0


def echoes(call: FakeCall) -> Iterator[bytes]:
    """Yield the pieces of the request's body that went on."""
    for answer in map(ProcessingResponse.FromString, call.sent):
        if answer.WhichOneof("response") == "request_body":
            yield answer.request_body.response.body_mutation.streamed_response.body


# --- sequences of messages

MODES = (NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX)
KINDS = (
    *("request_headers", "request_body", "request_trailers"),
    *("response_headers", "response_body", "response_trailers"),
)
HEADERS = (
    *(
        (b"content-length", value)
        for value in (b"", b"0", b"-1", b"10", b"9" * 30, b"\xff", b"1e3")
    ),
    *((b"x-request-priority", value) for value in (b"5", b"-100", b"999", b"x", b"\xe9", b"")),
    *((b"x-tenant-id", value) for value in (b"a", b"b", b"c" * 5000, b"\xff\0")),
    (b"x-request-id", b""),
    (b"x-request-id", b"i" * 10_000),
    (b"x-router-client", b"somebody"),
    (b"content-type", b"application/json"),
    (b"x-session-id", "s\u00e9".encode()),
    (b"", b""),
    (b":path", b"/v1/completions"),
)


def message_of(rng: random.Random, kind: str, *, first: bool) -> bytes:
    """Return a message of *kind* that is fit to be sent, or nearly so."""
    end = rng.random() < 0.4
    match kind:
        case "request_headers":
            pairs: list[tuple[str, bytes]] = [
                (name, value.encode()) for name, value in POST.items() if rng.random() < 0.95
            ]
            extra = rng.sample(HEADERS, rng.randint(0, 4))
            pairs += [(name.decode(), value) for name, value in extra]
            message = request_headers(pairs, end=end)
        case "request_body":
            message = request_body(some_body(rng), end=end)
        case "response_body":
            message = response_body(some_body(rng), end=end)
        case _:
            message = bare(kind)
    if first or rng.random() < 0.05:
        announce(
            message,
            rng.choice(MODES),
            response_mode=rng.choice(MODES),
            without_waiting=rng.random() < 0.3,
        )
    if rng.random() < 0.05:
        message.observability_mode = True
    if rng.random() < 0.05:
        with_subset(message, rng.choice(SUBSETS))
    return message.SerializeToString()


SUBSETS: tuple[object, ...] = (
    "10.0.0.1:8000",
    ["10.0.0.1:8000,10.0.0.2:8000", "", 5, None, {"a": "b"}],
    "",
    [],
    None,
    True,
    {"x": ["y"]},
    "nowhere:1",
)


def some_body(rng: random.Random) -> bytes:
    """Return a body: proper, spoilt, empty or (seldom) larger than may be held."""
    dice = rng.random()
    if dice < 0.3:
        return rng.choice(SEEDS)
    if dice < 0.5:
        return mutate(rng)
    if dice < 0.51:
        return bytes(MAX_BODY_BYTES + 1)
    return rng.choice((b"", b"{}", b"x" * 100, b"\0"))


VALID = {
    "headers only": ("request_headers",),
    "one body": ("request_headers", "request_body"),
    "body in pieces": ("request_headers", "request_body", "request_body", "request_body"),
    "with trailers": ("request_headers", "request_body", "request_trailers"),
    "to the end": (*KINDS,),
    "response only": ("request_headers", "response_headers", "response_trailers"),
}


def script(rng: random.Random) -> list[bytes]:
    """Return the messages of one stream."""
    dice = rng.random()
    if dice < 0.5:
        kinds = list(rng.choice(list(VALID.values())))
    elif dice < 0.75:  # nearly valid
        kinds = list(rng.choice(list(VALID.values())))
        at = rng.randrange(len(kinds))
        match rng.randrange(3):
            case 0:
                del kinds[at]
            case 1:
                kinds.insert(at, kinds[at])
            case _:
                rng.shuffle(kinds)
    else:
        kinds = rng.choices(KINDS, k=rng.randint(1, 8))
    messages = [message_of(rng, kind, first=n == 0) for n, kind in enumerate(kinds)]
    if rng.random() < 0.25:
        at = rng.randrange(max(len(messages), 1))
        messages[at : at + 1] = [garbage(rng, messages[at] if messages else b"")]
    return messages


def garbage(rng: random.Random, message: bytes) -> bytes:
    """Return bytes that were a message once, or never."""
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.choice((0, 1, 5, 100)))
        case 1:
            return message[: rng.randint(0, len(message))]
        case 2:
            spoilt = bytearray(message)
            flip_bytes(rng, spoilt)
            return bytes(spoilt)
        case 3:
            return message + message
        case _:
            # groups and fields that are nested without end
            return rng.choice((b"\x0b", b"\x12\x02", b"\x1a\x80\x80\x80\x80\x80")) * 500


OPEN_AT_ONCE = 12
SOME_LIMITS = Limits(concurrent=4, queue=4, queue_s=0.02, no_worker_s=0.01)
"""A few pass, a few wait, the others are refused."""


async def test_message_sequences() -> None:
    """Streams in any order, with anything in them, that end at any point, a dozen at a time."""
    bench = Bench(SOME_LIMITS)
    growth: Growth | None = None
    ends: Counter[str] = Counter()
    open_calls: list[tuple[FakeCall, list[bytes]]] = []
    most_waiting = slowest = 0.0
    started = time.monotonic()

    async def advance(rng: random.Random) -> None:
        """Let one of the open streams do one thing."""
        nonlocal most_waiting, slowest
        index = rng.randrange(len(open_calls))
        call, messages = open_calls[index]
        assert not call.unwritten, "an answer that Envoy will get some time, or never"
        dice = rng.random()
        if call.closed or not messages or dice < 0.08:
            del open_calls[index]
            if not call.closed and rng.random() < 0.5:
                ends["half-closed"] += 1
                call.half_close()
            elif not call.closed:
                ends["reset"] += 1
            elif call.status is Status.OK:
                raise AssertionError(
                    "ended with OK by itself, which Envoy takes for: go on without me"
                )
            else:
                assert call.status is not None
                ends[call.status.name] += 1
            for kind in call.kinds():
                if kind in ("immediate_response", "be patient"):
                    ends[kind] += 1
            call.close()
        else:
            slowest = max(slowest, call.take(messages.pop(0)))
        most_waiting = max(most_waiting, sum(bench.admission.waiting.values()))
        bench.check_sound()
        if dice < 0.3:
            await asyncio.sleep(0)  # whoever waits gets a turn
        if dice < 0.002:
            workers = [spec_of(url) for url in urls(rng.randint(0, 3))]
            change_workers(bench, workers)
            await asyncio.sleep(0.005)

    for number in NUMBERS:
        if growth is None and number >= CASES // 5:
            growth = Growth()
        with case("message_sequences", number, f"FUZZ_CASES={number + 1}") as rng:
            open_calls.append((FakeCall(bench.service), script(rng)))
            while len(open_calls) >= OPEN_AT_ONCE or (ONLY is not None and open_calls):
                await advance(rng)
    rng = random.Random(SEED)
    while open_calls:
        await advance(rng)
    change_workers(bench, [spec_of(url) for url in urls(3)])
    await asyncio.sleep(0.05)
    bench.check_idle()
    memory = growth.check() if growth is not None else "one case"
    print(
        f"\nfuzz: {CASES} streams (seed {SEED}) in {time.monotonic() - started:.1f} s: {dict(ends)};"
        f" at most {most_waiting:g} waiting; {memory}; slowest message {slowest * 1e3:.1f} ms"
    )
    assert slowest < ONE_MESSAGE_CPU_S
    if ONLY is None:
        assert most_waiting > 1
        assert ends["be patient"]
        assert ends["immediate_response"]


def change_workers(bench: Bench, workers: list[Any]) -> None:
    """Let *workers* be all there are."""
    bench.registry.apply("static", Reset(tuple(workers)), time.monotonic())
    bench.registry.commit(time.monotonic())
    for worker in workers:
        say(bench.registry, worker.key, "sim-model", ["adapter"])
    bench.service.on_workers()
