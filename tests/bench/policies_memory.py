"""Memory of the indexes, each in a process of its own: ``python -m tests.bench.policies_memory KIND BLOCKS``.

Prints one JSON object: resident memory above that of the empty process at ten points on the way, and how
long the garbage collector takes to look through it all.
"""

from __future__ import annotations

import functools
import gc
import json
import random
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from policies.base import Request, Worker
from policies.prefix_tree import PrefixTree
from policies.sticky_least_loaded import StickyLeastLoaded
from tests.bench.policies_work import BlockIndex

BLOCK_CHARS = 16
LONG_BLOCKS = 1000
TURN_BLOCKS = 30
TURNS = 8
FAN_OUT = 100
CHECKPOINTS = 10
ROOT = Path(__file__).resolve().parents[2]

KINDS = {
    "nodes": "tree, every block a node of its own",
    "turns": f"tree, conversations ({TURNS} turns of {TURN_BLOCKS} blocks)",
    "long": f"tree, prompts of {LONG_BLOCKS} blocks with nothing in common",
    "dict": "dict of block hashes",
    "sessions": "sticky_least_loaded, sessions",
}


class Memory(msgspec.Struct, frozen=True):
    """What one process reported."""

    kind: str
    blocks: int
    nodes: int
    characters: int
    points: list[tuple[int, int]]
    """(blocks, resident bytes) on the way."""

    collect_ms: float
    """One full pass of the garbage collector."""

    @property
    def bytes_per_block(self) -> float:
        """Resident bytes per block at the end."""
        return self.points[-1][1] / self.points[-1][0]


def measure(kind: str, blocks: int) -> Memory:
    """Measure in a new process."""
    command = [sys.executable, "-m", "tests.bench.policies_memory", kind, str(blocks)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return msgspec.json.decode(done.stdout, type=Memory)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@functools.cache
def _letters() -> str:
    return "".join(random.Random(2).choices(string.ascii_letters, k=1 << 16))


def _texts(kind: str, blocks: int) -> Iterator[tuple[str, int]]:
    """Yield what is inserted, each with the number of blocks that it adds."""
    rng, pool = random.Random(1), _letters()

    def piece(length: int) -> str:
        at = rng.randrange(len(pool) - length)
        return pool[at : at + length]

    if kind == "nodes":
        # A tree of three levels; the first characters of brothers differ, so no edge is longer.
        first = [chr(0x21 + n) for n in range(FAN_OUT)]
        added = 0
        for a in first:
            above = a + piece(BLOCK_CHARS - 1)
            for b in first:
                middle = above + b + piece(BLOCK_CHARS - 1)
                for c in first:
                    yield middle + c + piece(BLOCK_CHARS - 1), 1
                    added += 1
                    if added >= blocks:
                        return
    elif kind == "turns":
        for number in range(blocks // (TURNS * TURN_BLOCKS)):
            text = f"{number:08}"
            for _ in range(TURNS):
                text += piece(TURN_BLOCKS * BLOCK_CHARS - (8 if len(text) == 8 else 0))
                yield text, TURN_BLOCKS
    else:
        for number in range(blocks // LONG_BLOCKS):
            text = f"{number:08}{piece(LONG_BLOCKS * BLOCK_CHARS - 8)}"
            yield text, LONG_BLOCKS


def _fill(kind: str, blocks: int) -> tuple[object, Iterator[int]]:
    """Return the index and an iterator that fills it, which yields how many blocks it added."""
    if kind == "sessions":
        return _sessions(blocks)
    index: BlockIndex | PrefixTree
    add: Callable[[str], None]
    if kind == "dict":
        dictionary = index = BlockIndex()

        def add(text: str) -> None:
            dictionary.insert(text, 0)
    else:
        tree = index = PrefixTree()
        slot = tree.add_slot()

        def add(text: str) -> None:
            tree.insert("c:m", text, slot)

    def steps() -> Iterator[int]:
        for text, added in _texts(kind, blocks):
            add(text)
            yield added

    return index, steps()


def _sessions(count: int) -> tuple[object, Iterator[int]]:
    policy = StickyLeastLoaded()
    worker = Worker("http://w", "10.0.0.1:8000", 0)
    policy.on_workers((worker,))

    def steps() -> Iterator[int]:
        for number in range(count):
            request = Request("POST", "/", {"x-session-id": f"{number:032x}"})
            policy.on_sent(worker, request, 0.0)
            yield 1

    return policy, steps()


def main(kind: str, blocks: int) -> None:
    """Fill and report."""
    _letters()  # what the texts are made of is not counted
    gc.collect()
    base = resident_bytes()
    gc.disable()
    index, steps = _fill(kind, blocks)
    points, done, step = [], 0, blocks // CHECKPOINTS
    for added in steps:
        done += added
        if done >= step * (len(points) + 1):
            points.append((done, resident_bytes() - base))
    if points[-1][0] < done:
        points.append((done, resident_bytes() - base))
    started = time.thread_time()
    gc.collect()
    collect_ms = (time.thread_time() - started) * 1e3
    nodes = characters = 0
    if isinstance(index, PrefixTree):
        nodes, characters = index.node_count(0), int(index.characters[0])
    json.dump(
        msgspec.to_builtins(Memory(kind, done, nodes, characters, points, collect_ms)), sys.stdout
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
