"""Hashes that are the same in every process, on every machine, for ever.

Replicas of a router must agree on them; Python's own ``hash`` of text differs per process.
"""

from __future__ import annotations

from hashlib import blake2b


def hash64(text: str) -> int:
    """Return 64 bits of *text*, well mixed."""
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


def hash32(text: str) -> int:
    """Return 32 bits of *text*, well mixed."""
    return hash64(text) >> 32


def positions32(text: str, count: int) -> list[int]:
    """Return *count* independent 32-bit numbers derived from *text*."""
    found: list[int] = []
    block = 0
    while len(found) < count:
        digest = blake2b(f"{block}:{text}".encode(), digest_size=64).digest()
        found.extend(int.from_bytes(digest[at : at + 4], "big") for at in range(0, 64, 4))
        block += 1
    return found[:count]
