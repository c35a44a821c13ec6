"""Raw workers that prefill and decode: they record both legs, and do to each what its headers ask for.

The client's headers reach both legs, so a test says in ``x-test-prefill`` and ``x-test-decode`` what is to
happen to its own request, and finds the legs again by its own request id.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.client import Response, ask
from tests.e2e.harness import Router
from tests.e2e.raw_worker import RawWorker, Received, Signal, Stream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, GENERATE = "/v1/responses", "/inference/v1/generate"
SPLIT_PATHS = (CHAT, COMPLETIONS, RESPONSES, GENERATE)

PARAMS = (
    b'{ "do_remote_prefill":true,"do_remote_decode": false,\n"remote_block_ids":[[1,2, 3]],'
    b'"remote_engine_id":"e\\u00e9-\xe2\x82\xac","remote_host":"10.9.8.7","remote_port":5600.0,"tp_size":1 }'
)
"""What a prefill worker hands over, in a form that no encoder would choose."""

PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

WHOLE_ANSWER = b'{"id": "x" ,  "choices":[{"text":"\\u00e9"}], "n":1e0}'
EVENTS = b'data: {"id": "x" , "choices":[]}\n\ndata: [DONE]\n\n'
HIDDEN_ADDRESS = "10.9.8.7:5600 at http://internal.example:8000"
"""An address that no client must ever see."""

FLAGS = ("--policy", "round_robin", "--vllm-pd-disaggregation")


def pd_flags(prefill: list[str], decode: list[str]) -> list[str]:
    """Return the flags that name workers."""
    flags: list[str] = []
    for url in prefill:
        flags += ["--prefill", url, "none"]
    for url in decode:
        flags += ["--decode", url]
    return flags


class Legs:
    """What reached the workers of one request."""

    def __init__(self, prefill: list[Received], decode: list[Received]) -> None:
        self.prefill = prefill
        self.decode = decode

    def one(self) -> tuple[Received, Received]:
        """Return the only prefill and the only decode leg."""
        (first,), (second,) = self.prefill, self.decode
        return first, second

    def whole(self) -> Received:
        """Return the only leg of a request that was not split."""
        assert self.prefill == []
        (only,) = self.decode
        return only


class PdWorkers:
    """Raw workers, two of each role unless told otherwise, each with a thread of its own."""

    def __init__(self, prefill: int = 2, decode: int = 2) -> None:
        self.prefill = [RawWorker().start() for _ in range(prefill)]
        self.decode = [RawWorker().start() for _ in range(decode)]
        self.params: bytes = PARAMS
        self.prefill_usage: bytes = b""
        self.left: Counter[str] = Counter()
        """Prefill legs, by request id, whose connection was closed while they were under way."""
        self.went_on = Signal()
        """Lets prefill legs that ``wait`` go on."""
        self._seen: Counter[tuple[str, str]] = Counter()
        self._turns: Counter[tuple[str, str]] = Counter()
        for path in SPLIT_PATHS:
            for worker in self.prefill:
                worker.on(path, self._prefill)
            for worker in self.decode:
                worker.on(path, self._decode)

    @property
    def prefill_urls(self) -> list[str]:
        return [worker.urls[0] for worker in self.prefill]

    @property
    def decode_urls(self) -> list[str]:
        return [worker.urls[0] for worker in self.decode]

    @property
    def flags(self) -> list[str]:
        """The flags of a router before them."""
        return [*FLAGS, *pd_flags(self.prefill_urls, self.decode_urls)]

    def stop(self) -> None:
        for worker in (*self.prefill, *self.decode):
            worker.stop()

    def legs(self, request_id: str, path: str) -> Legs:
        """Return what arrived of the request with that id."""
        return Legs(
            list(_with_id(self.prefill, request_id, path)),
            list(_with_id(self.decode, request_id, path)),
        )

    async def _prefill(self, request: Received, stream: Stream) -> None:
        params = b',"kv_transfer_params" : ' + self.params if self.params else b""
        usage = b',"usage":' + self.prefill_usage if self.prefill_usage else b""
        wanted = self._turn("prefill", request)
        body = b'{"id":"p" ,"choices":[]' + usage + params + b"}"
        if wanted.startswith("answer "):
            body = wanted.removeprefix("answer ").encode("latin-1")
            wanted = ""
        if wanted == "number":
            (request_id,) = request.values("x-test-id")
            number = self._seen["prefill", request_id] + 1
            body, wanted = b'{"kv_transfer_params":{"n":%d}}' % number, ""
        await self._act("prefill", request, stream, wanted, json_answer(body))

    async def _decode(self, request: Received, stream: Stream) -> None:
        wanted = self._turn("decode", request)
        answer = json_answer(WHOLE_ANSWER)
        if _streams(request.body):
            answer = (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(EVENTS), EVENTS)
            )
        if wanted.startswith("answer "):
            answer = json_answer(wanted.removeprefix("answer ").encode("latin-1"))
            wanted = ""
        if wanted.startswith("events "):
            events = json.loads(wanted.removeprefix("events "))
            await stream.open_events()
            for event in events:
                await stream.event(event)
            await stream.close_events()
            return
        await self._act("decode", request, stream, wanted, answer)

    def _turn(self, role: str, request: Received) -> str:
        """Return what the headers of *request* want of a worker; with ``;`` each time the next, then the last."""
        (wanted,) = request.values(f"x-test-{role}") or [""]
        (request_id,) = request.values("x-test-id") or [""]
        self._turns[role, request_id] += 1
        turns = wanted.split(";")
        return turns[min(self._turns[role, request_id], len(turns)) - 1]

    async def _act(
        self, role: str, request: Received, stream: Stream, wanted: str, answer: bytes
    ) -> None:
        """Do what is *wanted*: a status, ``reset``, ``close``, ``hang``, ``wait``; with ``first`` only once, with ``twice`` two times."""
        request_id = request.values("x-test-id")[0] if request.values("x-test-id") else ""
        self._seen[role, request_id] += 1
        if wanted.endswith(" first"):
            wanted = "" if self._seen[role, request_id] > 1 else wanted.removesuffix(" first")
        if wanted.endswith(" twice"):
            wanted = "" if self._seen[role, request_id] > 2 else wanted.removesuffix(" twice")
        if wanted.startswith("wait "):
            await self.went_on.wait()
            wanted = wanted.removeprefix("wait ")
        if wanted.isdecimal():
            await stream.send(error_answer(int(wanted)))
        elif wanted == "reset":
            stream.reset()
        elif wanted == "close":
            stream.close()
        elif wanted == "hang":
            await stream.until_peer_leaves()
            self.left[request_id] += 1
        elif wanted == "wait":
            await self.went_on.wait()
            await stream.send(answer)
        else:
            await stream.send(answer)


def _with_id(workers: list[RawWorker], request_id: str, path: str) -> Iterator[Received]:
    for worker in workers:
        for request in worker.received(path):
            if request.values("x-test-id") == [request_id]:
                yield request


def _streams(body: bytes) -> bool:
    try:
        document = json.loads(body)
    except ValueError:
        return False
    return isinstance(document, dict) and bool(document.get("stream"))


def json_answer(body: bytes) -> bytes:
    """Return a successful answer, head and all."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


ERROR_TYPE = "application/problem+json; charset=utf-8"


def error_text(status: int) -> bytes:
    """Return the body of an answer with *status*."""
    return b'{ "error": {"message":"worker says %d of %b" } }' % (status, HIDDEN_ADDRESS.encode())


def error_answer(status: int) -> bytes:
    """Return an answer that failed, head and all."""
    body = error_text(status)
    head = f"HTTP/1.1 {status} Odd\r\ncontent-type: {ERROR_TYPE}\r\nretry-after: 7\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def post(
    router: Router, path: str, body: bytes, *headers: tuple[str, str]
) -> tuple[str, Response]:
    """Send one request; return its id and the answer."""
    request_id = uuid.uuid4().hex
    return request_id, await post_as(router, path, body, request_id, *headers)


async def post_as(
    router: Router, path: str, body: bytes, request_id: str, *headers: tuple[str, str]
) -> Response:
    """Send one request with that id."""
    sent = [
        ("Content-Type", "application/json"),
        ("X-Request-Id", request_id),
        ("X-Test-Id", request_id),
        *headers,
    ]
    return await ask(router.port, "POST", path, sent, body)


def chat(**more: Any) -> bytes:
    """Return the body of a chat."""
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    ).encode()


def write_workers(path: Path, workers: list[dict[str, Any]]) -> str:
    """Write a worker file; return its name."""
    path.write_text(json.dumps({"workers": workers}))
    return str(path)
