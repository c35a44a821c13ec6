"""The service as the bench starts it: the command line of ``extproc`` plus one policy.

``bench_prompt`` does the least that a policy does with a body: it parses the JSON and hashes the
opening of the prompt.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from extproc import cli
from policies.base import Request, Worker
from policies.registry import register

OPENING_CHARS = 256


class _Chat(msgspec.Struct):
    model: str = ""
    messages: list[dict[str, Any]] = []


_decode = msgspec.json.Decoder(_Chat).decode


@register("bench_prompt")
@dataclasses.dataclass(slots=True, kw_only=True)
class BenchPrompt:
    """Pick by a hash of the model and the opening of the first message."""

    name: ClassVar[str]
    needs_body: ClassVar[bool] = True

    _body: bytes = dataclasses.field(default=b"", init=False, repr=False)
    _hash: int = dataclasses.field(default=0, init=False, repr=False)

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        body = request.body or b"{}"
        if body is not self._body:  # the router asks again for each fallback
            chat = _decode(body)
            opening = str(chat.messages[0].get("content"))[:OPENING_CHARS] if chat.messages else ""
            self._hash = zlib.crc32(f"{chat.model}\0{opening}".encode())
            self._body = body
        return workers[self._hash % len(workers)]


if __name__ == "__main__":
    sys.exit(cli.main())
