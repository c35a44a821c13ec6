"""A compressed radix tree of prompts, shared by all workers of a pool.

Each node stands for a piece of text; the path from the root to it is a prefix, and its owners are the
workers that have been sent a prompt that begins with it. Invariants:

* an owner of a node owns all its ancestors;
* no two children of a node begin with the same character;
* every node but a root has an owner.

Owners are bits of one integer: a node costs the same for one worker as for hundreds, and finding the
owners among the candidates is one AND. Per worker each node has a tick, the time of its last use. A use
gives its whole path the same tick, so a node is never older than what hangs below it, and evicting in
the order of ticks, deeper nodes first, takes leaves first without walking the tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

VACANT = math.inf
MIN_COUNTED_TEXTS = 2
"""Nodes with fewer texts below are not counted: each belongs to one conversation."""

MAX_TEXT_BITS = 40
"""No text is longer than 2^40 characters."""


class Node:
    """A piece of text below its parent."""

    __slots__ = ("children", "end", "leaves", "owners", "parent", "text")

    def __init__(self, text: str, parent: Node | None, owners: int) -> None:
        self.text = text
        self.parent = parent
        self.owners = owners
        """Bit n is set when the worker of slot n has been sent this prefix."""
        self.children: dict[str, Node] = {}
        """By first character."""
        self.end: int = len(text) + (0 if parent is None else parent.end)
        """Length of the prefix up to the end of this node."""
        self.leaves = 1
        """Different texts that go through this node: the leaves below it, itself when it is one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """How far a prompt is known."""

    path: tuple[tuple[Node, int], ...]
    """Nodes from the top, each with the length of the prefix up to where the prompt agrees with it."""

    whole: bool
    """Whether the prompt agrees with all of the last node, so that it may go on in a child of it."""

    @property
    def length(self) -> int:
        """Characters of the prompt that are known at all."""
        return self.path[-1][1] if self.path else 0

    def longest(self, slots: int) -> tuple[int, int]:
        """Return the longest prefix that some worker of *slots* has, and the workers that have it."""
        for node, length in reversed(self.path):
            owners = node.owners & slots
            if owners:
                return length, owners
        return 0, 0

    def owners_at(self, length: int, slots: int) -> int:
        """Return the workers of *slots* that have the prefix of *length*."""
        for node, known in self.path:
            if known >= length:
                return node.owners & slots
        return 0


class PrefixTree:
    """Prompts by worker slot: a small number that stands for a worker while it is a member."""

    __slots__ = (
        "_clock",
        "_fading",
        "_popularity",
        "_roots",
        "_sent",
        "_spaces",
        "_ticks",
        "characters",
    )

    def __init__(self) -> None:
        self._popularity: dict[Node, tuple[float, int]] = {}
        """For nodes that several texts go through: a count that fades, and the clock when it was right."""
        self._sent = 0.0
        """The same count over all texts."""
        self._fading = 0.5
        self.set_memory(16)
        self._roots: dict[str, Node] = {}
        self._spaces: dict[Node, str] = {}
        """The other way round."""
        self._clock = 0
        self._ticks: list[dict[Node, int]] = []
        """Nodes of each slot with their last use; a larger number is later."""
        self.characters: list[float] = []
        """Characters of the nodes of each slot; infinite for one that is not in use. Read only."""

    def set_memory(self, texts: float) -> None:
        """Let what was sent *texts* texts ago count half of what is sent now."""
        self._fading = 0.5 ** (1 / texts)

    def add_slot(self) -> int:
        """Return a slot for one more worker, the lowest one that is free."""
        if VACANT in self.characters:
            slot = self.characters.index(VACANT)
            self.characters[slot] = 0
            return slot
        self.characters.append(0)
        self._ticks.append({})
        return len(self.characters) - 1

    def remove_slot(self, slot: int) -> None:
        """Forget all that the worker of *slot* has been sent, and take the slot back."""
        self.evict(slot, max_nodes=0, max_characters=0)
        self.characters[slot] = VACANT

    def match(self, space: str, text: str) -> Match:
        """Follow *text* as far as it is known. Prompts of different *space* (model) never meet."""
        node = self._roots.get(space)
        path: list[tuple[Node, int]] = []
        at, end = 0, len(text)
        while node is not None and at < end:
            node = node.children.get(text[at])
            if node is None:
                break
            piece = node.text
            if text.startswith(piece, at):
                at += len(piece)
                path.append((node, at))
            else:
                at += common_length(piece, text, at)
                path.append((node, at))
                return Match(tuple(path), whole=False)
        return Match(tuple(path), whole=True)

    def insert(self, space: str, text: str, slot: int) -> None:
        """Note that the worker of *slot* has been sent *text*."""
        if not text:
            return
        node = self._roots.get(space)
        if node is None:
            node = self._roots[space] = Node("", None, 0)
            self._spaces[node] = space
        path: list[Node] = []
        at, end = 0, len(text)
        while at < end:
            child = node.children.get(text[at])
            if child is None:
                child = self._add(node, text[at:])
            elif not text.startswith(child.text, at):
                child = self._split(child, common_length(child.text, text, at))
            at += len(child.text)
            path.append(child)
            node = child
        bit = 1 << slot
        ticks = self._ticks[slot]
        self._clock += 1
        gained = 0
        for node in path:
            if not node.owners & bit:
                node.owners |= bit
                gained += len(node.text)
            ticks[node] = self._clock
        self.characters[slot] += gained
        self._count(path)

    def shared_length(self, match: Match, *, texts: int, share: float) -> int:
        """Return the length of the longest prefix of *match* that is common property.

        That is one with which at least *texts* different texts begin, and more than *share* of what was sent
        lately (0 to 1): a system prompt, which says nothing about which conversation a prompt belongs to.
        """
        path = match.path if match.whole else match.path[:-1]
        for node, length in reversed(path):
            if node.leaves >= texts and self._popularity_of(node) > share * self._sent:
                return length
        return 0

    def _popularity_of(self, node: Node) -> float:
        """Return how much of what was sent lately went through *node*, as ``_sent`` counts it."""
        counted, at = self._popularity.get(node, (float(node.leaves), self._clock))
        return counted * self._fading ** (self._clock - at)

    def _count(self, path: list[Node]) -> None:
        """Count one more text that went along *path*."""
        self._sent = self._sent * self._fading + 1
        for node in path:
            if node.leaves < MIN_COUNTED_TEXTS:
                return  # fewer go through what is below
            self._popularity[node] = (self._popularity_of(node) + 1, self._clock)

    def node_count(self, slot: int) -> int:
        """Return the nodes of *slot*."""
        return len(self._ticks[slot])

    def evict(self, slot: int, *, max_nodes: int, max_characters: int) -> int:
        """Forget what *slot* used least recently until it is within both bounds; return nodes dropped."""
        ticks = self._ticks[slot]
        if len(ticks) <= max_nodes and self.characters[slot] <= max_characters:
            return 0
        dropped = 0
        # By last use; of one use the deeper node first.
        for node in sorted(ticks, key=lambda node: (ticks[node] << MAX_TEXT_BITS) - node.end):
            del ticks[node]
            self._disown(node, slot)
            dropped += 1
            if len(ticks) <= max_nodes and self.characters[slot] <= max_characters:
                break
        return dropped

    def clear(self) -> None:
        """Forget every text; slots stay given out."""
        self._roots.clear()
        self._spaces.clear()
        self._popularity.clear()
        self._sent = 0.0
        for slot, ticks in enumerate(self._ticks):
            ticks.clear()
            if self.characters[slot] != VACANT:
                self.characters[slot] = 0

    def dissolve(self) -> None:
        """Let go of all nodes, which refer to each other; the tree is of no use afterwards.

        The garbage collector would find them too, in one long pause.
        """
        pending = list(self._roots.values())
        self._roots.clear()
        self._spaces.clear()
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            node.parent = None
            node.children = {}

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def _add(self, parent: Node, text: str) -> Node:
        """Hang a new leaf below *parent*."""
        child = Node(text, parent, 0)
        if parent.children:
            above: Node | None = parent
            while above is not None:
                above.leaves += 1
                above = above.parent
        parent.children[text[0]] = child
        return child

    def _split(self, node: Node, length: int) -> Node:
        """Cut *node* in two; return the upper half, which takes its place below the parent."""
        parent = node.parent
        if parent is None:
            raise AssertionError("a root has no text to split")
        upper = Node(node.text[:length], parent, node.owners)
        upper.leaves = node.leaves
        if node in self._popularity:
            self._popularity[upper] = self._popularity[node]
        parent.children[upper.text[0]] = upper
        node.text = node.text[length:]
        node.parent = upper
        upper.children[node.text[0]] = node
        owners = node.owners
        while owners:
            lowest = owners & -owners
            ticks = self._ticks[lowest.bit_length() - 1]
            ticks[upper] = ticks[node]
            owners ^= lowest
        return upper

    def _disown(self, node: Node, slot: int) -> None:
        node.owners &= ~(1 << slot)
        self.characters[slot] -= len(node.text)
        parent = node.parent
        if node.owners or parent is None:
            return
        del parent.children[node.text[0]]
        self._popularity.pop(node, None)
        if parent.children:
            above: Node | None = parent
            while above is not None:
                above.leaves -= 1
                above = above.parent
        elif parent.parent is None:
            del self._roots[self._spaces.pop(parent)]


def common_length(piece: str, text: str, at: int) -> int:
    """Return how many characters *piece* and *text* from *at* on have in common.

    Bisects with slice comparisons, which run in C: far faster than a loop over characters.
    """
    low, high = 0, min(len(piece), len(text) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if piece[low:middle] == text[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low
