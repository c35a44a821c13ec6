"""KV blocks of 16 tokens, shared by prefix and evicted least recently used first.

The model is the one of vLLM's block pool:

* A full block is named by a hash over its tokens and the hash of the block before it, so equal names
  mean equal prefixes. A block that is not full, or whose name another block already has, is
  anonymous and cannot be shared.
* A block in use has a reference count. When the count falls to zero, a named block becomes idle: it
  keeps its content and may be matched again until it is evicted. An anonymous one is empty at once.
* Blocks are given back last block first, so the leaves of a prefix tree are evicted before its root.

Invariant: in use + idle + empty = capacity. "Free" means idle or empty: what can be taken.
"""

import dataclasses
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16
"""Tokens in one block; vLLM's default on GPUs."""


def chain_hashes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return one 64-bit hash per full block, each covering every token up to the end of its block.

    Token ids are unsigned 32-bit; ``struct.error`` is raised for others.
    """
    full = len(token_ids) // BLOCK_TOKENS
    packed = struct.pack(f"<{full * BLOCK_TOKENS}I", *token_ids[: full * BLOCK_TOKENS])
    width = 4 * BLOCK_TOKENS
    parent = b""
    hashes = []
    for start in range(0, len(packed), width):
        parent = hashlib.blake2b(
            parent + packed[start : start + width], digest_size=8, usedforsecurity=False
        ).digest()
        hashes.append(int.from_bytes(parent, "little"))
    return tuple(hashes)


@dataclasses.dataclass(slots=True)
class Allocation:
    """The blocks that one sequence holds, in token order."""

    keys: list[int | None]
    """The hash under which the block is shared, None while it is anonymous."""

    cached_blocks: int
    """How many of the first blocks were found in the cache when the allocation was made."""


class PrefixCache:
    """A pool of *capacity_blocks* KV blocks."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks must be >= 1, got {capacity_blocks!r}")
        self.capacity_blocks = capacity_blocks
        self.query_tokens = 0
        """Prompt tokens looked up so far."""
        self.hit_tokens = 0
        """Of these, the tokens that needed no computation."""
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._anonymous = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken: empty ones, then idle ones."""
        return self.capacity_blocks - len(self._references) - self._anonymous

    @property
    def cached_blocks(self) -> int:
        """Blocks that can be matched, in use or idle."""
        return len(self._references) + len(self._idle)

    @property
    def usage_ratio(self) -> float:
        """Share of the blocks that are in use, 0 to 1; idle ones do not count, as in vLLM."""
        return 1 - self.free_blocks / self.capacity_blocks

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many of the first *hashes* are cached, without touching them."""
        for index, key in enumerate(hashes):
            if key not in self._references and key not in self._idle:
                return index
        return len(hashes)

    def acquire(
        self, hashes: Sequence[int], *, tokens: int, count_query: bool = True
    ) -> Allocation | None:
        """Take the blocks for *tokens* tokens, reusing what is cached; None when they do not fit.

        At least the last token is always left to compute, because its result is the first output.

        Args:
            hashes: one per full block of the sequence; missing ones at the end stay anonymous.
            tokens: tokens that must have a place.
            count_query: whether the lookup counts in the hit statistics.

        """
        blocks = -(-tokens // BLOCK_TOKENS)
        matched = self.match(hashes[: max(0, tokens - 1) // BLOCK_TOKENS])
        revived = sum(key in self._idle for key in hashes[:matched])
        if blocks - matched > self.free_blocks - revived:
            return None
        keys: list[int | None] = []
        for key in hashes[:matched]:
            self._idle.pop(key, None)
            self._references[key] = self._references.get(key, 0) + 1
            keys.append(key)
        allocation = Allocation(keys, matched)
        full = min(len(hashes), tokens // BLOCK_TOKENS)
        for index in range(matched, blocks):
            self._append(allocation)
            if index < full:
                self.register(allocation, index, hashes[index])
        if count_query:
            self.query_tokens += tokens
            self.hit_tokens += matched * BLOCK_TOKENS
        return allocation

    def extend(self, allocation: Allocation) -> bool:
        """Add one empty block to *allocation*; False when none is free."""
        if self.free_blocks < 1:
            return False
        self._append(allocation)
        return True

    def register(self, allocation: Allocation, index: int, key: int) -> None:
        """Share the full block at *index* under *key*, unless another block has that name."""
        if key in self._references or key in self._idle:
            return
        allocation.keys[index] = key
        self._references[key] = 1
        self._anonymous -= 1

    def release(self, allocation: Allocation) -> None:
        """Give all blocks of *allocation* back, leaves first; a second call does nothing."""
        for key in reversed(allocation.keys):
            if key is None:
                self._anonymous -= 1
            elif self._references[key] > 1:
                self._references[key] -= 1
            else:
                del self._references[key]
                self._idle[key] = None
        allocation.keys.clear()

    def reset(self) -> None:
        """Forget every idle block; blocks in use stay shared."""
        self._idle.clear()

    def _append(self, allocation: Allocation) -> None:
        if self.free_blocks == len(self._idle):
            self._idle.popitem(last=False)
        self._anonymous += 1
        allocation.keys.append(None)
