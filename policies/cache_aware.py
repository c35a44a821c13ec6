"""Prefix-cache affinity with load balance."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

from policies.base import Content, Request, Worker
from policies.hashing import hash64
from policies.prefix_tree import VACANT, Match, PrefixTree
from policies.registry import register
from policies.selection import absent, least_loaded, uniform

MEMORY_TEXTS_PER_WORKER = 16
"""Prompts per worker after which one counts half in what is common property: a new system prompt is
noticed soon, a burst of questions about one document is not mistaken for one."""

MAX_MODEL_CHARS = 128
"""A longer name stands for itself by its hash: names do not count towards the bounds."""

EVICT_TO_RATIO = 0.9
"""How much of a bound is left after an eviction: rare and short pauses instead of one per request."""


@register("cache_aware")
@dataclasses.dataclass(slots=True, kw_only=True)
class CacheAware:
    """Send a prompt where most of its beginning has been sent before, as long as loads allow it.

    1. The match of a worker is the longest beginning of the prompt that it has been sent; its ratio is
       matched length / prompt length, over characters, or tokens when the request carries token ids.
       The reply that follows a known prompt was generated, and so cached, where that prompt was sent: it
       counts as matched too.
    2. The best match strictly above *cache_threshold* wins, of equal ones the lower load, then chance,
       unless that worker is overloaded: its load exceeds the lowest by more than
       *balance_abs_threshold* and is more than *balance_rel_threshold* times it. Then the least loaded
       worker gets the request, and the tree learns it.
    3. Without such a match the worker with the smallest tree gets it (ties: chance), or the least loaded
       one when the loads are imbalanced: max - min above *balance_abs_threshold* and max above
       min * *balance_rel_threshold*.

    A worker is judged by its own load, not by the highest one in the pool: one hot prefix takes requests
    away from its own worker and leaves everybody else's affinity alone.

    A beginning of more than one worker's share of the latest prompts (and of at least *shared_fan_out* texts),
    such as a system prompt, is common property: no single worker could serve all that begins with it. It
    counts neither as matched nor as length, or all new conversations would go to the worker that saw it
    first.

    Inputs: what this router has sent, not what workers have kept; in-flight counts, local and exact.
    A request without a prompt (or whose body cannot be read) goes to the least loaded worker.
    Sources: SGLang's cache-aware router (2024) for the tree and the thresholds; its users' complaints for
    the two corrections.
    """

    name: ClassVar[str]
    needs_body: ClassVar[bool] = True

    cache_threshold: float = 0.5
    """Match ratio that a match must exceed to count, 0 to 1."""

    balance_abs_threshold: int = 32
    """Requests by which loads must differ to be imbalanced."""

    balance_rel_threshold: float = 1.1
    """Factor by which loads must differ to be imbalanced."""

    eviction_interval_secs: float = 30
    """Seconds between two checks of all workers' trees against the bounds."""

    max_tree_size: int = 10_000
    """Nodes that one worker may have in the tree."""

    max_tree_chars: int = 2**25
    """Characters that one worker may have in the tree."""

    shared_fan_out: int = 4
    """Texts that must begin alike at least before the beginning counts as common property."""

    _tree: PrefixTree = dataclasses.field(default_factory=PrefixTree, init=False, repr=False)
    _slots: dict[int, int] = dataclasses.field(default_factory=dict, init=False, repr=False)
    """Slot in the tree by the worker's ``order``."""

    _members: dict[int, Worker] = dataclasses.field(default_factory=dict, init=False, repr=False)
    """Workers by slot."""

    _ordered: tuple[Worker, ...] = dataclasses.field(default=(), init=False, repr=False)
    """The members, sorted by ``order``."""

    _weighted: bool = dataclasses.field(default=False, init=False, repr=False)
    _last_match: tuple[Content, Match] | None = dataclasses.field(
        default=None, init=False, repr=False
    )
    """The request asked about last and its match; the tree does not change between two events."""

    _last_check: float = dataclasses.field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ValueError(f"cache_threshold must be from 0 to 1, got {self.cache_threshold}")
        if self.balance_abs_threshold < 0:
            raise ValueError(
                f"balance_abs_threshold must be >= 0, got {self.balance_abs_threshold}"
            )
        if self.balance_rel_threshold < 1:
            raise ValueError(
                f"balance_rel_threshold must be >= 1, got {self.balance_rel_threshold}"
            )
        for name, least in (("max_tree_size", 1), ("max_tree_chars", 1), ("shared_fan_out", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.eviction_interval_secs <= 0:
            raise ValueError(
                f"eviction_interval_secs must be > 0, got {self.eviction_interval_secs}"
            )

    def wants_body(self, headers: Mapping[str, str]) -> bool:
        """Only bodies that can hold a prompt: uploads of audio and the like stay in Envoy."""
        content_type = headers.get("content-type", "").lower()
        return not content_type.startswith(("multipart/", "audio/", "image/", "application/octet"))

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        if len(workers) == 1:
            return workers[0]
        content = request.content
        loads: Sequence[float]
        if self._weighted:
            loads = [worker.in_flight / worker.weight for worker in workers]
        else:
            loads = [worker.in_flight for worker in workers]
        lowest = min(loads)
        if content is None or not any(content.prompts) or not self._ordered:
            return _any_with(workers, loads, lowest, rng)

        affine = self._best_match(content, workers, rng)
        if affine is not None:
            if self._overloaded(affine.load, lowest):
                return _any_with(workers, loads, lowest, rng)
            return affine
        if self._overloaded(max(loads), lowest):
            return _any_with(workers, loads, lowest, rng)
        return self._smallest_tree(workers, rng)

    def on_workers(self, workers: Sequence[Worker]) -> None:
        """Give new members a slot; forget at once all about those that are gone."""
        self._weighted = len({worker.weight for worker in workers}) > 1
        self._ordered = tuple(workers)
        self._tree.set_memory(MEMORY_TEXTS_PER_WORKER * max(1, len(workers)))
        self._last_match = None
        members = {worker.order: worker for worker in workers}
        for order in self._slots.keys() - members.keys():
            slot = self._slots.pop(order)
            del self._members[slot]
            self._tree.remove_slot(slot)
        for order, worker in members.items():
            if order not in self._slots:
                slot = self._tree.add_slot()
                self._slots[order] = slot
                self._members[slot] = worker

    def on_sent(self, worker: Worker, request: Request, now: float) -> None:
        """Note the prompt for *worker*, and keep the tree within its bounds."""
        self._last_match = None
        slot = self._slots.get(worker.order)
        if slot is None or request.content is None:
            return
        space = _space(request.content)
        for prompt in request.content.prompts:
            self._tree.insert(space, prompt, slot)
        self._evict(slot)
        if now - self._last_check >= self.eviction_interval_secs:
            self._last_check = now
            for other in self._members:
                self._evict(other)

    def on_done(self, worker: Worker, now: float) -> None:
        """Nothing to learn from the end of a request: the prefix stays cached."""

    def flush(self) -> None:
        """Forget all prompts; the workers stay."""
        old, self._tree, self._last_match = self._tree, PrefixTree(), None
        old.dissolve()
        self._slots.clear()
        self._members.clear()
        self.on_workers(self._ordered)

    def _best_match(
        self, content: Content, workers: Sequence[Worker], rng: random.Random
    ) -> Worker | None:
        """Return the worker with the best match above the threshold."""
        space = _space(content)
        slots = self._slots_of(workers)
        if len(content.prompts) == 1:
            prompt = content.prompts[0]
            match = self._match(content, space, prompt)
            matched, owners = match.longest(slots)
            for start, end in content.replies:
                if 0 < start <= matched < end:
                    matched, owners = min(end, len(prompt)), match.owners_at(start, slots)
                    break
            shared = self._shared_length(match, len(workers))
            if not owners or matched <= shared:
                return None
            if (matched - shared) / (len(prompt) - shared) <= self.cache_threshold:
                return None
        else:
            owners = self._best_of_batch(space, content.prompts, slots, len(workers))
        return self._lowest_load(owners, rng)

    def _match(self, content: Content, space: str, prompt: str) -> Match:
        """Match once per request: the router asks again for each fallback."""
        if self._last_match is None or self._last_match[0] is not content:
            self._last_match = (content, self._tree.match(space, prompt))
        return self._last_match[1]

    def _shared_length(self, match: Match, workers: int) -> int:
        """Return how much of the matched beginning is common property."""
        return self._tree.shared_length(match, texts=self.shared_fan_out, share=1 / workers)

    def _best_of_batch(self, space: str, prompts: tuple[str, ...], slots: int, workers: int) -> int:
        """Return the owners of the best summed match of *prompts*, 0 when it is too short."""
        matched: dict[int, int] = {}
        total = 0
        for prompt in prompts:
            match = self._tree.match(space, prompt)
            shared = self._shared_length(match, workers)
            total += len(prompt) - shared
            seen = 0
            for node, length in reversed(match.path):
                owners = node.owners & slots & ~seen
                seen |= owners
                for slot in _bits(owners):
                    matched[slot] = matched.get(slot, 0) + max(0, length - shared)
        best = max(matched.values(), default=0)
        if total == 0 or best / total <= self.cache_threshold:
            return 0
        return sum(1 << slot for slot, length in matched.items() if length == best)

    def _slots_of(self, workers: Sequence[Worker]) -> int:
        """Return the slots of *workers* as bits."""
        if 2 * len(workers) < len(self._ordered):
            return sum(1 << self._slots[worker.order] for worker in workers)
        found = (1 << len(self._tree.characters)) - 1
        for worker in absent(workers, self._ordered):
            found &= ~(1 << self._slots[worker.order])
        return found

    def _lowest_load(self, owners: int, rng: random.Random) -> Worker | None:
        found = [self._members[slot] for slot in _bits(owners)]
        return least_loaded(found, rng) if found else None

    def _overloaded(self, load: float, lowest: float) -> bool:
        return (
            load - lowest > self.balance_abs_threshold
            and load > lowest * self.balance_rel_threshold
        )

    def _smallest_tree(self, workers: Sequence[Worker], rng: random.Random) -> Worker:
        if self._weighted or 2 * len(workers) < len(self._ordered):
            sizes = [self._tree.characters[self._slots[w.order]] / w.weight for w in workers]
            return _any_with(workers, sizes, min(sizes), rng)
        sizes = self._tree.characters  # by slot; vacant ones are infinite
        if len(workers) < len(self._ordered):
            sizes = sizes.copy()
            for worker in absent(workers, self._ordered):
                sizes[self._slots[worker.order]] = VACANT
        smallest = min(sizes)
        slot = -1
        for _ in range(1 + int(rng.random() * sizes.count(smallest))):
            slot = sizes.index(smallest, slot + 1)
        return self._members[slot]

    def _evict(self, slot: int) -> None:
        tree = self._tree
        if (
            tree.node_count(slot) > self.max_tree_size
            or tree.characters[slot] > self.max_tree_chars
        ):
            tree.evict(
                slot,
                max_nodes=int(self.max_tree_size * EVICT_TO_RATIO),
                max_characters=int(self.max_tree_chars * EVICT_TO_RATIO),
            )


def _space(content: Content) -> str:
    model = content.model
    if len(model) > MAX_MODEL_CHARS:
        model = f"{hash64(model):x}"
    return f"{'t' if content.tokens else 'c'}:{model}"


def _any_with(
    workers: Sequence[Worker], values: Sequence[float], value: float, rng: random.Random
) -> Worker:
    """Return a worker whose value is *value*, any of them with the same probability."""
    if values.count(value) == 1:
        return workers[values.index(value)]
    return uniform([w for w, v in zip(workers, values, strict=True) if v == value], rng)


def _bits(number: int) -> list[int]:
    """Return the positions of the set bits."""
    found = []
    while number:
        lowest = number & -number
        found.append(lowest.bit_length() - 1)
        number ^= lowest
    return found
