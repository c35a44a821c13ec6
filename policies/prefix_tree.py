"""A compressed radix tree of prompts, shared by all workers of a pool.

Each node stands for a piece of text; the path from the root to it is a prefix, and its owners are the
workers that have been sent a prompt that begins with it. Invariants:

* an owner of a node owns all its ancestors;
* no two children of a node begin with the same character;
* every node but a root has an owner.

Owners are bits of one integer: a node costs the same for one worker as for hundreds, and finding the
owners among the candidates is one AND. What is least recently used is known per worker by the order of a
dictionary: each access moves a path to the end, deepest node first, so the first entry is a leaf of
that worker, or becomes one soon; evicting takes from the front and never walks the tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

VACANT = math.inf


class Node:
    """A piece of text below its parent."""

    __slots__ = ("children", "owners", "parent", "text")

    def __init__(self, text: str, parent: Node | None, owners: int) -> None:
        self.text = text
        self.parent = parent
        self.owners = owners
        """Bit n is set when the worker of slot n has been sent this prefix."""
        self.children: dict[str, Node] = {}
        """By first character."""


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

    def shared_length(self, fan_out: int) -> int:
        """Return the length of the longest prefix that at least *fan_out* different texts follow.

        Such a prefix (a system prompt) says nothing about which conversation a prompt belongs to.
        """
        path = self.path if self.whole else self.path[:-1]
        for node, length in reversed(path):
            if len(node.children) >= fan_out:
                return length
        return 0


class PrefixTree:
    """Prompts by worker slot: a small number that stands for a worker while it is a member."""

    __slots__ = ("_recent", "_roots", "characters")

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._recent: list[dict[Node, None]] = []
        """Nodes of each slot, least recently used first."""
        self.characters: list[float] = []
        """Characters of the nodes of each slot; infinite for one that is not in use. Read only."""

    def add_slot(self) -> int:
        """Return a slot for one more worker, the lowest one that is free."""
        if VACANT in self.characters:
            slot = self.characters.index(VACANT)
            self.characters[slot] = 0
            return slot
        self.characters.append(0)
        self._recent.append({})
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
        bit = 1 << slot
        recent = self._recent[slot]
        node = self._roots.get(space)
        if node is None:
            node = self._roots[space] = Node("", None, 0)
        path: list[Node] = []
        at, end = 0, len(text)
        while at < end:
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = Node(text[at:], node, 0)
            elif not text.startswith(child.text, at):
                child = self._split(child, common_length(child.text, text, at))
            at += len(child.text)
            path.append(child)
            node = child
        gained = 0
        for node in reversed(path):
            if node.owners & bit:
                del recent[node]
            else:
                node.owners |= bit
                gained += len(node.text)
            recent[node] = None
        self.characters[slot] += gained

    def node_count(self, slot: int) -> int:
        """Return the nodes of *slot*."""
        return len(self._recent[slot])

    def evict(self, slot: int, *, max_nodes: int, max_characters: int) -> int:
        """Forget what *slot* used least recently until it is within both bounds; return nodes dropped."""
        recent = self._recent[slot]
        bit = 1 << slot
        dropped = 0
        while recent and (len(recent) > max_nodes or self.characters[slot] > max_characters):
            node = next(iter(recent))
            del recent[node]
            if any(child.owners & bit for child in node.children.values()):
                # A split put this node behind its child; the child must go first.
                recent[node] = None
                continue
            self._disown(node, slot)
            dropped += 1
        return dropped

    def clear(self) -> None:
        """Forget every text; slots stay given out."""
        self._roots.clear()
        for slot, recent in enumerate(self._recent):
            recent.clear()
            if self.characters[slot] != VACANT:
                self.characters[slot] = 0

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def _split(self, node: Node, length: int) -> Node:
        """Cut *node* in two; return the upper half, which takes its place below the parent."""
        parent = node.parent
        if parent is None:
            raise AssertionError("a root has no text to split")
        upper = Node(node.text[:length], parent, node.owners)
        parent.children[upper.text[0]] = upper
        node.text = node.text[length:]
        node.parent = upper
        upper.children[node.text[0]] = node
        owners = node.owners
        while owners:
            lowest = owners & -owners
            self._recent[lowest.bit_length() - 1][upper] = None
            owners ^= lowest
        return upper

    def _disown(self, node: Node, slot: int) -> None:
        node.owners &= ~(1 << slot)
        self.characters[slot] -= len(node.text)
        if node.owners == 0 and node.parent is not None:
            del node.parent.children[node.text[0]]
            self._drop_empty_root(node.parent)

    def _drop_empty_root(self, node: Node) -> None:
        if node.parent is None and not node.children:
            for space, root in self._roots.items():
                if root is node:
                    del self._roots[space]
                    return


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
