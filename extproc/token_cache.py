"""What was found out about tokens, for a bounded time and a bounded number of them.

A token itself is never kept: its digest stands for it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from enum import Enum, auto

MAX_TOKENS = 10_000
MAX_REJECTED_S = 10.0
"""A token that is refused may be registered in the next moment; nobody should then wait for a minute."""

IDENTITY_DIGITS = 12


class Verdict(Enum):
    """What the validation URLs say of a token."""

    ACCEPTED = auto()
    REJECTED = auto()
    UNKNOWN = auto()
    """They could not be asked, or could not tell."""


def token_digest(token: str) -> bytes:
    """Return what stands for *token*."""
    return hashlib.sha256(b"vllm-extproc token\0" + token.encode()).digest()


def identity(digest: bytes) -> str:
    """Return a name for whoever shows the token with this *digest*: the same tomorrow, and on other machines."""
    return f"key-{digest.hex()[:IDENTITY_DIGITS]}"


class TokenCache:
    """Verdicts by digest; of too many the one goes that was not asked for the longest."""

    def __init__(self, accepted_s: float, max_tokens: int = MAX_TOKENS) -> None:
        """Keep what was accepted for *accepted_s* seconds, and what was rejected for no longer than 10."""
        self.accepted_s = accepted_s
        self._max_tokens = max_tokens
        self._known: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, digest: bytes, now: float) -> Verdict | None:
        """Return what is known, None when nothing is (any more)."""
        found = self._known.get(digest)
        if found is None:
            return None
        verdict, until = found
        if now >= until:
            del self._known[digest]
            return None
        self._known.move_to_end(digest)
        return verdict

    def put(self, digest: bytes, verdict: Verdict, now: float) -> None:
        """Remember *verdict*. What could not be told is not remembered: it is asked for again."""
        if verdict is Verdict.UNKNOWN:
            return
        kept_s = self.accepted_s
        if verdict is Verdict.REJECTED:
            kept_s = min(kept_s, MAX_REJECTED_S)
        self._known[digest] = verdict, now + kept_s
        self._known.move_to_end(digest)
        while len(self._known) > self._max_tokens:
            self._known.popitem(last=False)
