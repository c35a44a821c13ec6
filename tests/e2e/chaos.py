"""What the chaos test is made of: a load that checks every answer, and a monkey that breaks workers.

A request counts as one of:

* whole: 200, ended as it should, and exactly what the worker that served it makes of this prompt,
* cut: its answer had begun, was right as far as it went, and ended in an error that a client sees,
* anything else, which is a fault of the router.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import openai

from extproc.sim.answers import answer_pieces, seed_of
from extproc.sim.tokens import tokenize_chat
from tests.e2e.harness import Router, Sim

CHAT = "/v1/chat/completions"
MODEL = "sim-model"

GREETING_TOKENS = 6
"""The name of the worker, which every answer begins with, fills as many."""

RESTART_LIMIT_S = 30.0
RECOVERY_LIMIT_S = 30.0
DRAIN_LIMIT_S = 40.0
PROBE_LIMIT_S = 5.0

LATE_S = 1.0
"""How much later than it is cut a client sees it: Envoy closes a connection of HTTP/1.1 after a second."""

CUTTING = frozenset({"kill", "stop", "reset"})
"""Faults that cut answers; none of the others may."""

NO_FAULTS: dict[str, Any] = {"random_fail_rate": 0, "reset_after": None, "slowdown": 1}


@dataclasses.dataclass(slots=True)
class Outcome:
    """How one request went."""

    kind: str
    """``whole``, ``cut``, or what went wrong."""

    detail: str = ""
    worker: str = ""
    """Name of the worker that answered."""

    streamed: bool = True
    head_s: float = 0.0
    """Until the head of the answer was there."""

    silence_s: float = 0.0
    """Longest time without a byte after that."""

    took_s: float = 0.0
    at: float = 0.0
    """When it ended."""

    request_id: str = ""


class Answer:
    """What came of one answer so far, and what should."""

    def __init__(self, prompt: str, tokens: int, names: Sequence[str], request_id: str) -> None:
        seed = seed_of(tokenize_chat([{"role": "user", "content": prompt}]))
        self._expected = {name: "".join(answer_pieces(name, seed, tokens)) for name in names}
        self._id = f"chatcmpl-{request_id}"
        self.raw = bytearray()

    def feed(self, data: bytes) -> None:
        """Take some bytes of a stream."""
        self.raw += data

    def of_stream(self, *, ended_well: bool, error: str) -> Outcome:  # noqa: PLR0911
        """Judge a stream; *error* says how it ended if not well."""
        *events, rest = bytes(self.raw).split(b"\n\n")
        payloads = [event.removeprefix(b"data: ") for event in events]
        done = bool(payloads) and payloads[-1] == b"[DONE]"
        if ended_well and rest:
            return Outcome("garbled", f"ended amid an event: {rest[-100:]!r}")
        if ended_well and not done:
            return Outcome("silently cut", f"ended well without [DONE] after {len(events)} events")
        if done:
            payloads.pop()
        text, ids, reason = "", set(), None
        for payload in payloads:
            try:
                chunk = json.loads(payload)
                ids.add(chunk["id"])
                (choice,) = chunk["choices"]
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
            except (ValueError, KeyError, TypeError):
                return Outcome("garbled", f"not a chunk: {payload[:200]!r}")
        if ids - {self._id}:
            return Outcome("mixed up", f"{ids} in the answer of {self._id}")
        if not done:
            if text and not any(whole.startswith(text) for whole in self._expected.values()):
                return Outcome("mixed up", f"no worker would begin with {text!r}")
            return Outcome("cut", error)
        if not ended_well:
            return Outcome("cut", f"after [DONE]: {error}")
        if reason is None:
            return Outcome("silently cut", f"ended well without a finish reason: {text!r}")
        return self._judge(text, reason)

    def of_document(self, document: Any) -> Outcome:
        """Judge an answer in one piece."""
        if document["id"] != self._id:
            return Outcome("mixed up", f"{document['id']} in the answer of {self._id}")
        (choice,) = document["choices"]
        return self._judge(choice["message"]["content"], choice["finish_reason"])

    def _judge(self, text: str, reason: object) -> Outcome:
        for name, whole in self._expected.items():
            if text == whole and reason == "length":
                return Outcome("whole", worker=name)
        return Outcome("mixed up", f"no worker would say {text!r} ({reason})")


class Load:
    """Clients that ask one request after another until they are told to stop."""

    def __init__(
        self, router: Router, names: Sequence[str], *, seed: int, tokens: range, limit_s: float
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.open = 0
        self.least_open: int | None = None
        """Fewest requests under way since the load was up."""
        self._router = router
        self._names = names
        self._rng = random.Random(seed)
        self._tokens = tokens
        self._limit_s = limit_s
        self._stopping = False

    def stop(self) -> None:
        """Let every client finish its request and leave."""
        self._stopping = True

    async def client(self, ask: Callable[..., Any], *, streamed: bool = True) -> None:
        """Ask until ``stop``. *ask* is one of the methods below, with what it needs."""
        while not self._stopping:
            words = " ".join(self._rng.choices("abcdefgh", k=self._rng.randint(1, 40)))
            prompt = f"{self._rng.getrandbits(64):x} {words}"
            request_id = uuid.UUID(int=self._rng.getrandbits(128)).hex
            tokens = self._rng.choice(self._tokens) if streamed else GREETING_TOKENS + 2
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": tokens,
                "stream": streamed,
            }
            answer = Answer(prompt, tokens, self._names, request_id)
            started = time.monotonic()
            self.open += 1
            try:
                async with asyncio.timeout(self._limit_s):
                    outcome = await ask(body, {"x-request-id": request_id}, answer)
            except TimeoutError:
                outcome = Outcome("hung", f"{self._limit_s} s")
            finally:
                self.open -= 1
            outcome.streamed, outcome.request_id = streamed, request_id
            outcome.at = time.monotonic()
            outcome.took_s = outcome.at - started
            self.outcomes.append(outcome)

    async def by_aiohttp(
        self,
        session: aiohttp.ClientSession,
        body: dict[str, Any],
        headers: dict[str, str],
        answer: Answer,
    ) -> Outcome:
        """Ask as a program does that speaks plain HTTP."""
        started = last = time.monotonic()
        try:
            response = await session.post(self._router.base_url + CHAT, json=body, headers=headers)
        except aiohttp.ClientError as error:
            return Outcome("failed before an answer", repr(error))
        head_s = time.monotonic() - started
        silence_s = 0.0
        async with response:
            name = response.headers.get("x-sim-worker", "")
            if response.status != 200:
                try:
                    text = await response.text()
                except aiohttp.ClientError as error:
                    text = repr(error)
                return Outcome(f"status {response.status}", text, worker=name, head_s=head_s)
            error_text = ""
            last = time.monotonic()
            try:
                async for data in response.content.iter_any():
                    now = time.monotonic()
                    silence_s, last = max(silence_s, now - last), now
                    answer.feed(data)
            except aiohttp.ClientError as error:
                error_text = repr(error)
            silence_s = max(silence_s, time.monotonic() - last)
        if body["stream"]:
            outcome = answer.of_stream(ended_well=not error_text, error=error_text)
        elif error_text:
            outcome = Outcome("cut", error_text)
        else:
            outcome = answer.of_document(json.loads(answer.raw))
        outcome.worker = outcome.worker or name
        outcome.head_s, outcome.silence_s = head_s, silence_s
        return outcome

    async def by_sdk(
        self,
        client: openai.AsyncOpenAI,
        body: dict[str, Any],
        headers: dict[str, str],
        answer: Answer,
    ) -> Outcome:
        """Ask as our users do, through the OpenAI SDK."""
        started = time.monotonic()
        try:
            stream = await client.chat.completions.create(**body, extra_headers=headers)
        except openai.APIStatusError as error:
            return Outcome(f"status {error.status_code}", error.response.text)
        except openai.APIError as error:
            return Outcome("failed before an answer", repr(error))
        head_s = last = time.monotonic()
        head_s -= started
        silence_s = 0.0
        error_text = ""
        try:
            async for chunk in stream:
                now = time.monotonic()
                silence_s, last = max(silence_s, now - last), now
                answer.feed(b"data: %s\n\n" % chunk.model_dump_json().encode())
        except Exception as error:  # noqa: BLE001  the SDK's own, or one of its HTTP library
            error_text = repr(error)
        silence_s = max(silence_s, time.monotonic() - last)
        if not error_text:
            answer.feed(b"data: [DONE]\n\n")  # the SDK swallows it; the finish reason tells
        outcome = answer.of_stream(ended_well=not error_text, error=error_text)
        outcome.head_s, outcome.silence_s = head_s, silence_s
        outcome.worker = outcome.worker or stream.response.headers.get("x-sim-worker", "")
        return outcome


@dataclasses.dataclass(slots=True)
class Strike:
    """One fault of one worker, from when to when."""

    fault: str
    worker: str
    began: float
    ended: float = float("inf")


class Monkey:
    """Breaks workers with a fixed seed, at most two at once, and never the last two that are sound.

    A worker that was mended is left alone until the router gives it requests again.
    """

    FAULTS = (
        *("kill", "stop", "pause", "500", "503", "429", "429 later", "reset", "slow"),
    )  # fmt: skip
    """``stop`` is longer than the router waits for a silent worker, ``pause`` is not."""

    def __init__(
        self,
        router: Router,
        sims: list[Sim],
        start_again: Callable[[int], Sim],
        *,
        seed: int,
        hold_s: tuple[float, float],
        silence_limit_s: float,
        slowdown: float,
        least_sound: int = 2,
    ) -> None:
        self.strikes: list[Strike] = []
        self.two_at_once = 0
        self._router = router
        self.sims = sims
        self._start_again = start_again
        self._rng = random.Random(seed)
        self._hold_s = hold_s
        self._silence_limit_s = silence_limit_s
        self._slowdown = slowdown
        self._least_sound = least_sound
        self._broken: set[int] = set()

    async def run(self, until_time: float) -> None:
        """Break and mend until *until_time*; all are mended at the end."""
        faults = self._faults()
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < until_time:
                count = 2 if self._rng.random() < 0.3 else 1
                hits = []
                for _ in range(count):
                    index = await self._choose()
                    if index is None:
                        break
                    self._broken.add(index)
                    hits.append(tasks.create_task(self._hit(index, next(faults))))
                self.two_at_once += len(hits) == 2
                if hits:
                    await asyncio.wait(hits)
                await asyncio.sleep(self._rng.uniform(0.05, 0.2))

    def _faults(self) -> Iterator[str]:
        """Yield every fault once, in random order, again and again."""
        while True:
            yield from self._rng.sample(self.FAULTS, len(self.FAULTS))

    async def _choose(self) -> int | None:
        """Return a sound worker that may be broken."""
        sound = await self.sound()
        if len(sound) <= self._least_sound:
            return None
        return self._rng.choice(sound)

    async def sound(self) -> list[int]:
        """Return the workers that have no fault and that the router picks."""
        metrics = await asyncio.to_thread(self._router.metrics)
        return [
            index
            for index, sim in enumerate(self.sims)
            if index not in self._broken
            and metrics("worker_healthy", worker=sim.url) == 1
            and metrics("circuit_state", worker=sim.url) == 0
        ]

    async def until_all_sound(self) -> float:
        """Wait until the router picks every worker again; return the seconds that took."""
        started = time.monotonic()

        async def picked() -> float:
            # one that could not be connected to is left alone for a while after it is healthy
            return (await asyncio.to_thread(self._router.metrics))("workers")

        count = len(self.sims)
        async with asyncio.timeout(RECOVERY_LIMIT_S):
            while len(await self.sound()) < count or await picked() < count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return time.monotonic() - started

    async def _hit(self, index: int, fault: str) -> None:
        sim = self.sims[index]
        strike = Strike(fault, sim.worker_name, time.monotonic())
        self.strikes.append(strike)
        hold_s = self._rng.uniform(*self._hold_s)
        match fault:
            case "kill":
                os.kill(sim.pid, signal.SIGKILL)
                await asyncio.sleep(hold_s)
                self.sims[index] = await asyncio.to_thread(self._start_again, sim.port)
            case "stop" | "pause":
                stopped_s = self._silence_limit_s + hold_s if fault == "stop" else hold_s
                sim.send_signal(signal.SIGSTOP)
                await asyncio.sleep(stopped_s)
                sim.send_signal(signal.SIGCONT)
            case _:
                await self._set_faults(sim, **self._fields(fault))
                await asyncio.sleep(hold_s)
                await self._set_faults(sim, **NO_FAULTS)
        strike.ended = time.monotonic()
        self._broken.discard(index)

    def _fields(self, fault: str) -> dict[str, Any]:
        match fault:
            case "500" | "503" | "429":
                return {"random_fail_rate": 1, "status_code": int(fault), "retry_after_s": None}
            case "429 later":
                return {"random_fail_rate": 1, "status_code": 429, "retry_after_s": 1}
            case "reset":
                return {"reset_after": self._rng.randint(0, 12)}
            case _:
                return {"slowdown": self._slowdown}

    async def _set_faults(self, sim: Sim, **fields: Any) -> None:
        timeout = aiohttp.ClientTimeout(total=PROBE_LIMIT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{sim.url}/_sim/faults", json=fields) as response,
        ):
            assert response.status == 200, await response.text()

    def blame(self, outcome: Outcome) -> str:
        """Return the fault that its worker had when *outcome* came about, "" for none.

        The end of a connection reaches a client late, so an earlier fault that cuts streams comes first.
        """
        faults = [
            strike.fault
            for strike in self.strikes
            if strike.worker == outcome.worker
            and strike.began <= outcome.at
            and outcome.at - outcome.silence_s - LATE_S <= strike.ended
        ]
        cutting = [fault for fault in faults if fault in CUTTING]
        return next(iter([*cutting, *faults]), "")
