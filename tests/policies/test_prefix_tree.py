"""The radix tree against a model that a child understands: the set of all prefixes of each worker."""

from __future__ import annotations

import collections
import itertools
import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from policies import prefix_tree
from policies.prefix_tree import VACANT, PrefixTree, common_length

SPACES = ("c:m", "t:m", "c:other")
# Two letters, so that nearly every text splits another; one of four bytes, as in text with emoji.
texts = st.text(alphabet="ab\U0001f600", max_size=9)
filled = st.text(alphabet="ab\U0001f600", min_size=1, max_size=9)
numbers = st.integers(0, 7)


def prefixes(text):
    return {text[:length] for length in range(1, len(text) + 1)}


def spelled(tree):
    """Yield space, whole prefix and node of every node, parents first."""
    stack = [(space, "", root) for space, root in tree._roots.items()]
    while stack:
        space, before, node = stack.pop()
        if node.parent is not None:
            yield space, before, node
        stack += [(space, before + node.text, child) for child in node.children.values()]


def known_to(tree, slot):
    """Return every prefix that the worker of *slot* has, as (space, prefix)."""
    return {
        (space, before + node.text[:length])
        for space, before, node in spelled(tree)
        if node.owners >> slot & 1
        for length in range(1, len(node.text) + 1)
    }


def check_structure(tree):
    """Assert the invariants that the module promises, and its bookkeeping."""
    counts, characters = collections.Counter(), collections.Counter()
    for _, _, node in spelled(tree):
        assert node.text
        assert node.owners > 0, "a node without an owner"
        assert node.parent.children[node.text[0]] is node
        if node.parent.parent is not None:
            assert node.owners & ~node.parent.owners == 0, "an owner does not own the parent"
        for slot in range(len(tree.characters)):
            if node.owners >> slot & 1:
                counts[slot] += 1
                characters[slot] += len(node.text)
                assert node in tree._ticks[slot]
        assert node.owners < 1 << len(tree.characters)
    assert all(not root.text and root.parent is None for root in tree._roots.values())
    for slot, recorded in enumerate(tree.characters):
        assert recorded == (VACANT if recorded == VACANT else characters[slot])
        assert tree.node_count(slot) == len(tree._ticks[slot]) == counts[slot]
        if recorded == VACANT:
            assert counts[slot] == 0
    assert sum(1 for _ in tree.nodes()) == sum(1 for _ in spelled(tree))


class TreeMachine(RuleBasedStateMachine):
    """Everything that can be done to a tree, next to sets of prefixes."""

    def __init__(self):
        super().__init__()
        self.tree = PrefixTree()
        self.known: dict[int, set[tuple[str, str]]] = {}

    def slot(self, number):
        slots = sorted(self.known)
        return slots[number % len(slots)]

    @initialize(count=st.integers(1, 3))
    def begin(self, count):
        for _ in range(count):
            self.add_slot()

    @precondition(lambda self: len(self.known) < 4)
    @rule()
    def add_slot(self):
        slot = self.tree.add_slot()
        assert slot == next(n for n in range(9) if n not in self.known), "not the lowest free one"
        self.known[slot] = set()

    @precondition(lambda self: self.known)
    @rule(number=numbers)
    def remove_slot(self, number):
        slot = self.slot(number)
        self.tree.remove_slot(slot)
        del self.known[slot]

    @precondition(lambda self: self.known)
    @rule(number=numbers, space=st.sampled_from(SPACES), text=texts)
    def insert(self, number, space, text):
        slot = self.slot(number)
        self.tree.insert(space, text, slot)
        self.known[slot] |= {(space, prefix) for prefix in prefixes(text)}

    @precondition(lambda self: self.known)
    @rule(number=numbers, max_nodes=st.integers(0, 6), max_characters=st.integers(0, 20))
    def evict(self, number, max_nodes, max_characters):
        slot, before = self.slot(number), self.tree.node_count(self.slot(number))
        fitted = before <= max_nodes and self.tree.characters[slot] <= max_characters

        dropped = self.tree.evict(slot, max_nodes=max_nodes, max_characters=max_characters)

        assert self.tree.node_count(slot) == before - dropped <= max_nodes
        assert self.tree.characters[slot] <= max_characters
        assert (dropped == 0) is fitted
        left = known_to(self.tree, slot)
        assert left <= self.known[slot], "it learnt by forgetting"
        self.known[slot] = left

    @rule()
    def clear(self):
        self.tree.clear()
        for known in self.known.values():
            known.clear()

    @rule(space=st.sampled_from(SPACES), text=texts, asked=st.integers(0, 15))
    def match(self, space, text, asked):
        match = self.tree.match(space, text)
        length, owners = match.longest(asked)

        by_slot = {
            slot: max((len(p) for s, p in known if s == space and text.startswith(p)), default=0)
            for slot, known in self.known.items()
        }
        best = max((n for slot, n in by_slot.items() if asked >> slot & 1), default=0)
        holders = sum(1 << s for s, n in by_slot.items() if asked >> s & 1 and n == best and best)
        assert (length, owners) == (best, holders)
        assert match.length == max(by_slot.values(), default=0)
        lengths = [length for _, length in match.path]
        assert lengths == sorted(set(lengths))

    @rule(space=st.sampled_from(SPACES), text=texts, fan_out=st.integers(2, 3))
    def shared_length(self, space, text, fan_out):
        """Count the texts that follow; a prefix that ends inside a node is followed by one only."""
        known = {p for of in self.known.values() for s, p in of if s == space}
        branching = [
            length
            for length in range(1, len(text) + 1)
            if text[:length] in known
            and len({p[length] for p in known if len(p) > length and p.startswith(text[:length])})
            >= fan_out
        ]
        match = self.tree.match(space, text)
        shared = self.tree.shared_length(match, texts=fan_out, share=0)
        # A text may branch further below too: at least where so many letters follow it is shared.
        assert shared >= max(branching, default=0)
        assert shared == 0 or text[:shared] in known

    @invariant()
    def structure(self):
        check_structure(self.tree)

    @invariant()
    def everybody_has_what_was_sent(self):
        for slot, known in self.known.items():
            assert known_to(self.tree, slot) == known


@pytest.mark.slow
def test_tree_agrees_with_the_sets_of_all_prefixes():
    """Whatever is inserted, evicted, removed and cleared; the invariants hold after every step."""
    run_state_machine_as_test(
        TreeMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


@given(
    history=st.lists(st.tuples(st.integers(0, 1), filled), max_size=14),
    max_nodes=st.integers(0, 8),
    max_characters=st.integers(0, 40),
)
def test_least_recently_used_goes_first(history, max_nodes, max_characters):
    """Nothing that is kept was used before something that is dropped, whoever else splits nodes."""
    tree = PrefixTree()
    slot, other = tree.add_slot(), tree.add_slot()
    used = {}
    for time, (whose, text) in enumerate(history):
        tree.insert("c", text, (slot, other)[whose])
        if whose == 0:
            used |= dict.fromkeys(prefixes(text), time)

    tree.evict(slot, max_nodes=max_nodes, max_characters=max_characters)

    kept = {prefix for _, prefix in known_to(tree, slot)}
    newest_dropped = max((time for text, time in used.items() if text not in kept), default=-1)
    assert all(used[prefix] >= newest_dropped for prefix in kept)


LONG = "abcdefghij"


@given(
    cuts=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 10)), max_size=12),
    bounds=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), min_size=1, max_size=3),
)
def test_eviction_of_a_text_cut_in_many_pieces_keeps_the_invariants(cuts, bounds):
    """Texts that leave one long text here and there, from both workers, in any order."""
    tree = PrefixTree()
    slots = tree.add_slot(), tree.add_slot()
    tree.insert("c", LONG, slots[0])
    for whose, cut in cuts:
        tree.insert("c", f"{LONG[:cut]}#", slots[whose])
    theirs = known_to(tree, slots[1])

    for max_nodes, max_characters in bounds:
        known = known_to(tree, slots[0])
        tree.evict(slots[0], max_nodes=max_nodes, max_characters=max_characters)
        check_structure(tree)
        assert known_to(tree, slots[0]) <= known
        assert tree.node_count(slots[0]) <= max_nodes
        assert tree.characters[slots[0]] <= max_characters

    assert known_to(tree, slots[1]) == theirs


def test_text_of_another_worker_does_not_refresh_ours():
    """A node that somebody else's text cuts in two stays as old as it was, both halves."""
    tree = PrefixTree()
    ours, theirs = tree.add_slot(), tree.add_slot()
    for text in ("old-one", "newer", "newest"):
        tree.insert("c", text, ours)
    tree.insert("c", "old-two", theirs)

    tree.evict(ours, max_nodes=99, max_characters=len("newest" + "r"))

    assert tree.match("c", "old-one").longest(1 << ours) == (0, 0)
    assert tree.match("c", "newest").longest(1 << ours)[0] == len("newest")
    assert tree.match("c", "newer").longest(1 << ours)[0] == len("newer")


def test_use_refreshes_the_whole_path():
    """A prompt that is sent again is the newest, its beginnings with it."""
    tree = PrefixTree()
    slot = tree.add_slot()
    for text in ("system one", "system two", "other", "system one"):
        tree.insert("c", text, slot)

    tree.evict(slot, max_nodes=99, max_characters=len("system one"))

    assert tree.match("c", "system one").length == len("system one")
    assert tree.match("c", "system two").length == len("system ")
    assert tree.match("c", "other").length == 0


@pytest.mark.parametrize("cuts", [range(1, 120), range(119, 0, -1)], ids=["rising", "falling"])
@pytest.mark.parametrize("bound", [0, 60])
def test_eviction_costs_the_same_per_node_however_nodes_were_split(cuts, bound):
    """A long text that others leave at ever later (or earlier) places: some lines per node, no more."""
    text = "".join(chr(0x4E00 + n) for n in range(130))
    tree = PrefixTree()
    slot, other = tree.add_slot(), tree.add_slot()
    tree.insert("c", text, slot)
    for cut in cuts:
        tree.insert("c", f"{text[:cut]}#", other)
    nodes = tree.node_count(slot)

    with counted_lines(prefix_tree.__file__) as lines:
        dropped = tree.evict(slot, max_nodes=bound, max_characters=10**6)

    assert dropped == nodes - bound
    assert lines() < 40 * nodes


class counted_lines:  # noqa: N801 - reads like a function
    """Count the lines of one file that are executed: a measure of work that no load disturbs."""

    def __init__(self, path):
        self.path, self.count = path, 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return lambda: self.count

    def __exit__(self, *_):
        sys.settrace(self.before)

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename != self.path:
            return None
        self.count += event == "line"
        return self._trace


@given(st.lists(st.tuples(st.integers(0, 2), filled), max_size=12), st.integers(0, 2))
def test_removed_slot_leaves_no_trace(history, gone):
    """What is left is what the others sent; the slot comes back empty and is given out again first."""
    tree, reference = PrefixTree(), PrefixTree()
    for _ in range(3):
        tree.add_slot()
        reference.add_slot()
    for slot, text in history:
        tree.insert("c", text, slot)
        if slot != gone:
            reference.insert("c", text, slot)

    tree.remove_slot(gone)

    assert tree.characters[gone] == VACANT
    assert tree.node_count(gone) == 0
    for slot in range(3):
        assert known_to(tree, slot) == known_to(reference, slot)
    assert tree.add_slot() == gone
    assert tree.characters[gone] == 0


def test_spaces_never_meet():
    """The same text for another model is another text; the space of the last text goes with it."""
    tree = PrefixTree()
    slot = tree.add_slot()
    tree.insert("c:a", "hello", slot)
    tree.insert("c:b", "hello", slot)

    assert tree.match("c:c", "hello").path == ()
    assert tree.node_count(slot) == 2
    tree.evict(slot, max_nodes=1, max_characters=99)
    assert tree.match("c:a", "hello").length == 0
    assert tree.match("c:b", "hello").length == 5
    assert list(tree._roots) == ["c:b"]


@pytest.mark.parametrize("times", [1, 3])
def test_empty_text_leaves_nothing_behind(times):
    """Not even the root of its space, which nothing would ever take away again."""
    tree = PrefixTree()
    slot = tree.add_slot()

    for number in range(times):
        tree.insert(f"c:{number}", "", slot)

    assert tree.node_count(slot) == tree.characters[slot] == 0
    assert tree._roots == {}
    assert tree.match("c:0", "").path == ()


def test_nothing_is_known_at_first():
    """Of an empty tree, and to no slots."""
    tree = PrefixTree()

    match = tree.match("c", "hello")

    shared = tree.shared_length(match, texts=2, share=0)
    assert (match.length, match.longest(0b111), shared) == (0, (0, 0), 0)
    tree.insert("c", "hello", tree.add_slot())
    assert tree.match("c", "hello").longest(0) == (0, 0)


def test_many_slots_are_many_bits():
    """Beyond the width of a machine word as before it."""
    tree = PrefixTree()
    slots = [tree.add_slot() for _ in range(200)]
    for slot in slots:
        tree.insert("c", "shared" + "x" * (slot == 150), slot)

    assert tree.match("c", "sharedx").longest((1 << 200) - 1) == (7, 1 << 150)
    assert tree.match("c", "sharedx").longest(1 << 199 | 1 << 3) == (6, 1 << 199 | 1 << 3)
    assert len(list(tree.nodes())) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("sysA", 3), ("sys", 3), ("sysZ", 3), ("sy", 0), ("other", 0), ("sysAlong", 3)],
)
def test_beginning_that_many_texts_follow_is_shared(text, expected):
    """Only when the prompt agrees with all of it: whoever turns off earlier is not in that group."""
    tree = PrefixTree()
    slot = tree.add_slot()
    for letter in "ABCD":
        tree.insert("c", f"sys{letter}", slot)

    match = tree.match("c", text)

    assert tree.shared_length(match, texts=4, share=0.5) == expected
    assert tree.shared_length(match, texts=5, share=0.5) == 0


def test_what_was_sent_lately_makes_a_beginning_common():
    """A new one is noticed however many texts there were before; a rare one never is."""
    tree = PrefixTree()
    tree.set_memory(32)
    slot = tree.add_slot()
    for number in range(300):
        tree.insert("c", f"{number} old", slot)
    shared = []
    for number in range(60):
        tree.insert("c", f"system {number}", slot)
        match = tree.match("c", "system x")
        shared.append(tree.shared_length(match, texts=4, share=0.5))

    assert shared[10] == 0
    assert shared[40] == len("system ")
    for number in range(300):
        tree.insert("c", f"{number} new", slot)
        if number % 20 == 0:
            tree.insert("c", f"document {number}", slot)
    match = tree.match("c", "document x")
    assert tree.shared_length(match, texts=4, share=0.125) == 0


@given(st.text(alphabet="ab", max_size=40), st.text(alphabet="ab", max_size=40), st.integers(0, 5))
def test_common_length_counts_equal_characters(piece, text, at):
    """As if counted one by one, from a place on."""
    pairs = zip(piece, text[at:], strict=False)

    same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    assert common_length(piece, text, at) == len(same)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 4095, 4096, 100_000])
@pytest.mark.parametrize(
    "letter", ["a", "\xe9", "\u4e2d", "\U0001f600"], ids=lambda letter: f"{ord(letter):x}"
)
def test_common_length_of_long_texts(length, letter):
    """Every width of character, around powers of two."""
    piece, text = letter * length + "x" * 50, "??" + letter * length + "y" * 70

    assert common_length(piece, text, 2) == length


def test_vacant_is_larger_than_any_size():
    """The smallest tree is looked for over all slots."""
    assert math.inf == VACANT
