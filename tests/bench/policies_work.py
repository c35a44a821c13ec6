"""What the bench of policies measures with: a timer, fleets, and conversations like real ones."""

from __future__ import annotations

import dataclasses
import random
import string
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from extproc.openai import parse_content
from policies.base import MembershipObserver, Policy, Request, Worker

PATH = "/v1/chat/completions"
REPEATS = 3
TURNS = 6
"""Turns of a conversation that the tree knows when the next one is asked for."""

MAX_STORED_CHARS = 32 * 2**20
"""What all conversations of one measurement may have together."""

_WORD_LETTERS = string.ascii_lowercase


def ns_per_call(call: Callable[[], object], seconds: float) -> float:
    """Return the CPU time of a call: the least of several loops, which took *seconds* in all."""
    loops = 1
    while (taken := _timed(call, loops)) < seconds / REPEATS / 2:
        loops *= 2
    rounds = [taken, *(_timed(call, loops) for _ in range(REPEATS - 1))]
    return min(rounds) / loops * 1e9


def ns_each(calls: Sequence[Callable[[], object]]) -> float:
    """Return the CPU time of one of *calls*, none of which can be repeated: the median."""
    taken = []
    for call in calls:
        started = time.thread_time_ns()
        call()
        taken.append(time.thread_time_ns() - started)
    return float(sorted(taken)[len(taken) // 2])


def _timed(call: Callable[[], object], loops: int) -> float:
    started = time.thread_time()
    for _ in range(loops):
        call()
    return time.thread_time() - started


def fleet(count: int, *, weighted: bool = False) -> tuple[Worker, ...]:
    """Return *count* workers with a few requests in flight each."""
    rng = random.Random(count)
    return tuple(
        Worker(
            url=f"http://10.0.{n >> 8}.{n & 255}:8000",
            endpoint=f"10.0.{n >> 8}.{n & 255}:8000",
            order=n,
            in_flight=rng.randrange(20),
            weight=1.0 + (n % 3 if weighted else 0),
        )
        for n in range(count)
    )


def join(policy: Policy, workers: Sequence[Worker]) -> None:
    """Tell *policy* its members."""
    if isinstance(policy, MembershipObserver):
        policy.on_workers(workers)


class Prose:
    """Endless text of random words; the same for the same seed."""

    def __init__(self, seed: int, alphabet: str = _WORD_LETTERS) -> None:
        self._rng = random.Random(seed)
        words = [
            "".join(self._rng.choices(alphabet, k=self._rng.randint(2, 9))) for _ in range(4000)
        ]
        self._text = " ".join(self._rng.choices(words, k=400_000 // 6))

    def take(self, length: int) -> str:
        """Return *length* characters from some place."""
        found = ""
        while len(found) < length:
            at = self._rng.randrange(len(self._text))
            found += self._text[at : at + length - len(found)]
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, as (role, content); system, then user and assistant in turn."""

    messages: tuple[tuple[str, str], ...]

    def turn(self, number: int) -> tuple[tuple[str, str], ...]:
        """Return what the client sends at its turn *number*, from 1."""
        return self.messages[: 2 * number]

    @property
    def last(self) -> tuple[tuple[str, str], ...]:
        """The longest request."""
        return self.messages


def conversations(
    size: int, count: int, prose: Prose, *, turns: int = TURNS
) -> Iterator[Conversation]:
    """Yield *count* conversations of *turns* + 1 turns, the last of *size* characters.

    All share a system prompt, a quarter of the whole and at most 4,000 characters. Replies are three times
    as long as questions.
    """
    system = prose.take(min(size // 4, 4000))
    question = max(1, (size - len(system)) // (4 * turns + 1))
    for _ in range(count):
        messages = [("system", system), ("user", prose.take(question))]
        for _ in range(turns):
            messages.append(("assistant", prose.take(3 * question)))
            messages.append(("user", prose.take(question)))
        yield Conversation(tuple(messages))


def body(messages: Sequence[tuple[str, str]]) -> bytes:
    """Return a chat request as clients send it."""
    return msgspec.json.encode(
        {
            "model": "bench-model",
            "messages": [{"role": role, "content": text} for role, text in messages],
            "max_tokens": 256,
            "stream": True,
        }
    )


def request(messages: Sequence[tuple[str, str]], *, session: str = "") -> Request:
    """Return it as the exchange hands it to a policy; a *session* in a header needs no body."""
    if session:
        return Request("POST", PATH, {"x-session-id": session})
    raw = body(messages)
    return Request("POST", PATH, {"content-type": "application/json"}, raw, parse_content(raw))


def stored_count(size: int, workers: int) -> int:
    """Return how many conversations of *size* a fleet of *workers* holds in a measurement."""
    return max(8, min(4 * workers, 512, MAX_STORED_CHARS // size))


class BlockIndex:
    """The baseline: a dictionary from the hash of each block of a prompt, chained, to its owners."""

    BLOCK = 16

    def __init__(self) -> None:
        self.owners: dict[int, int] = {}

    def match(self, text: str) -> tuple[int, int]:
        """Return the length of the longest known prefix in whole blocks, and its owners."""
        chained, found, length = 0, 0, 0
        owners = self.owners
        for at in range(0, len(text) - self.BLOCK + 1, self.BLOCK):
            chained = hash((chained, text[at : at + self.BLOCK]))
            known = owners.get(chained, 0)
            if not known:
                break
            found, length = known, at + self.BLOCK
        return length, found

    def insert(self, text: str, slot: int) -> None:
        """Note that the worker of *slot* has been sent *text*."""
        chained, bit = 0, 1 << slot
        owners = self.owners
        for at in range(0, len(text) - self.BLOCK + 1, self.BLOCK):
            chained = hash((chained, text[at : at + self.BLOCK]))
            owners[chained] = owners.get(chained, 0) | bit
