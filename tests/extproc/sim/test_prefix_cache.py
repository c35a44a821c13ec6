"""The prefix cache, alone and against a naive model of it."""

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.sim.prefix_cache import BLOCK_TOKENS, PrefixCache, chain_hashes


def test_a_hash_covers_everything_before_its_block():
    """Equal hashes mean equal prefixes, not equal blocks."""
    first, second, other = range(16), range(16, 32), range(32, 48)

    assert chain_hashes([*first, *second])[0] == chain_hashes(first)[0]
    assert chain_hashes([*first, *second])[1] != chain_hashes([*other, *second])[1]
    assert len(chain_hashes(range(47))) == 2


def test_hashes_are_the_same_in_every_process():
    """The value is worked out by hand, so a change of the scheme does not go unseen."""
    block = struct.pack("<16I", *range(16))

    expected = int.from_bytes(hashlib.blake2b(block, digest_size=8).digest(), "little")

    assert chain_hashes(range(16)) == (expected,)


def test_the_last_token_is_always_computed():
    """A prompt that is cached to its end reuses all blocks but the last."""
    cache = PrefixCache(10)
    hashes = chain_hashes(range(48))
    cache.release(cache.acquire(hashes, tokens=48))

    assert cache.acquire(hashes, tokens=48).cached_blocks == 2
    assert cache.acquire(hashes, tokens=49).cached_blocks == 3
    assert (cache.query_tokens, cache.hit_tokens) == (48 + 48 + 49, 32 + 48)


def test_leaves_are_evicted_before_the_root():
    """Whoever needs one block takes the end of the oldest prompt."""
    cache = PrefixCache(4)
    old = chain_hashes(range(64))
    cache.release(cache.acquire(old, tokens=64))

    cache.acquire(chain_hashes(range(100, 116)), tokens=16)

    assert cache.match(old) == 3


def test_blocks_in_use_are_not_evicted():
    """A request that does not fit beside them is refused and changes nothing."""
    cache = PrefixCache(4)
    held = cache.acquire(chain_hashes(range(48)), tokens=48)

    assert cache.acquire(chain_hashes(range(100, 132)), tokens=32) is None
    assert (cache.free_blocks, cache.query_tokens) == (1, 48)

    cache.release(held)
    assert cache.acquire(chain_hashes(range(100, 132)), tokens=32) is not None


def test_a_reset_forgets_idle_blocks_only():
    """Blocks in use stay shared."""
    cache = PrefixCache(8)
    idle, used = chain_hashes(range(32)), chain_hashes(range(100, 132))
    cache.release(cache.acquire(idle, tokens=32))
    cache.acquire(used, tokens=32)

    cache.reset()

    assert (cache.match(idle), cache.match(used)) == (0, 2)


def test_a_cache_without_blocks_is_refused():
    """Nothing could ever run on it."""
    with pytest.raises(ValueError, match="capacity_blocks must be >= 1, got 0"):
        PrefixCache(0)


class NaivePool:
    """The same rules, said as plainly as possible: a list of blocks that are searched one by one."""

    def __init__(self, capacity):
        self.blocks = [{"key": None, "users": 0, "freed": 0} for _ in range(capacity)]
        self.clock = 0

    def find(self, key):
        return next(
            (block for block in self.blocks if key is not None and block["key"] == key), None
        )

    def free(self):
        return [block for block in self.blocks if block["users"] == 0]

    def take(self):
        block = min(self.free(), key=lambda block: (block["key"] is not None, block["freed"]))
        block.update(key=None, users=1)
        return block

    def acquire(self, keys, tokens):
        usable = keys[: max(0, tokens - 1) // BLOCK_TOKENS]
        shared = []
        for key in usable:
            block = self.find(key)
            if block is None:
                break
            shared.append(block)
        missing = -(-tokens // BLOCK_TOKENS) - len(shared)
        if missing > len([block for block in self.free() if block not in shared]):
            return None
        for block in shared:
            block["users"] += 1
        held = list(shared)
        for index in range(len(shared), len(shared) + missing):
            held.append(self.take())
            if index < min(len(keys), tokens // BLOCK_TOKENS):
                self.name(held[-1], keys[index])
        return held, len(shared)

    def name(self, block, key):
        if self.find(key) is None:
            block["key"] = key

    def release(self, held):
        for block in reversed(held):
            block["users"] -= 1
            self.clock += 1
            block["freed"] = self.clock


# a prompt is a path in a small tree, so that random prompts share prefixes
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
OPERATIONS = st.one_of(
    st.tuples(st.just("acquire"), PATHS, st.integers(0, BLOCK_TOKENS)),
    st.tuples(st.just("extend"), st.integers(0, 9), st.integers(0, 1)),
    st.tuples(st.just("release"), st.integers(0, 9), st.none()),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(1, 9), st.lists(OPERATIONS, max_size=40))
def test_agrees_with_the_naive_model(capacity, operations):
    """Any order of operations gives the same hits, the same refusals and the same content."""
    cache, naive = PrefixCache(capacity), NaivePool(capacity)
    held = []
    for operation, argument, extra in operations:
        if operation == "acquire":
            keys = [hash(tuple(argument[: end + 1])) for end in range(len(argument))]
            tokens = max(1, len(keys) * BLOCK_TOKENS - extra)
            ours, theirs = cache.acquire(keys, tokens=tokens), naive.acquire(keys, tokens)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.cached_blocks == theirs[1]
                held.append((ours, theirs[0], argument))
        elif held and operation == "extend":
            ours, theirs, path = held[argument % len(held)]
            grown = cache.extend(ours)
            assert grown == bool(naive.free())
            if grown:
                theirs.append(naive.take())
                path = [*path, extra]
                key = hash((*path, len(theirs)))
                cache.register(ours, len(theirs) - 1, key)
                naive.name(theirs[-1], key)
        elif held:
            ours, theirs, _ = held.pop(argument % len(held))
            cache.release(ours)
            naive.release(theirs)
        named = {block["key"] for block in naive.blocks if block["key"] is not None}
        assert cache.free_blocks == len(naive.free())
        assert cache.cached_blocks == len(named)
        assert all(cache.match([key]) == 1 for key in named)
    for ours, theirs, _ in held:
        cache.release(ours)
        cache.release(ours)
        naive.release(theirs)
    assert cache.free_blocks == capacity
    assert cache.usage_ratio == 0
