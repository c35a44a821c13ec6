"""The scheduler of one vLLM engine, without a model and without a clock.

``add`` queues a request, ``step`` plans one batch and says how long it takes and which tokens it
yields at its end, ``abort`` forgets a request at once. Whoever drives the engine waits for the
duration (a server), or moves its virtual clock (a simulator), and calls ``step`` again.

One step, in the order of vLLM v1: every decoding sequence gets one token; prefills that were cut
continue with what is left of the token budget; then waiting requests are admitted first come, first
served, while the batch has room and their blocks fit. The head of the queue blocks those behind it.
When a decoding sequence needs a block and none is free, the sequence admitted last is preempted: it
loses its blocks and returns to the head of the queue, to be computed again.

Prompt blocks are registered in the prefix cache at admission, output blocks when they are full. A
sequence that got its last token holds its blocks, and counts as running, until the next ``step``: that
is the end of its own. An abort before that still counts as one.

A prefill worker keeps the blocks of some sequences for another engine (``keep_kv``): they stay in use
until ``take_kv`` hands them out. A decode worker computes only the last token of a prompt whose blocks
came from elsewhere (``received_tokens``); a preemption loses them, and all is computed here.
"""

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from extproc.sim.pace import Pace, Timetable
from extproc.sim.prefix_cache import BLOCK_TOKENS, Allocation, PrefixCache
from extproc.sim.statistics import FinishReason, Statistics
from extproc.sim.step_model import StepModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to compute."""

    id: int
    """Unique among the requests that the engine holds."""

    prompt_tokens: int
    """Tokens of the prompt, at least 1."""

    max_tokens: int
    """Tokens to generate. 0 means prefill only, as an embedding does."""

    block_hashes: Sequence[int] = ()
    """One chained hash per full block of prompt and output together; blocks past its end are never shared."""

    finish_reason: FinishReason = FinishReason.LENGTH
    """Why the sequence ends when it has its tokens."""

    keep_kv: bool = False
    """Whether the blocks outlive the sequence, until ``take_kv`` or ``drop_kv``."""

    received_tokens: int = 0
    """Prompt tokens whose KV came from another engine."""


class Event(NamedTuple):
    """One sequence advanced at the end of a step."""

    request_id: int
    tokens: int
    """New output tokens: 1, or 0 for a request that is prefill only."""
    cached_tokens: int
    """Prompt tokens that were found in the cache when the request was admitted."""
    finish_reason: FinishReason | None
    """Set on the last event of a request."""


class Step(NamedTuple):
    """One planned batch."""

    duration_s: float
    events: list[Event]
    """What has happened when the duration is over."""
    worked: bool
    """False when there was nothing to compute, so that another step is of no use yet."""


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    """A request and how far it is. Its last output token is known but not yet computed."""

    request: EngineRequest
    added_at: float
    target: int
    """Tokens to compute before the next output token; grows when a preemption undoes work."""
    computed: int = 0
    produced: int = 0
    cached_tokens: int = 0
    allocation: Allocation | None = None
    admitted: bool = False
    """Whether it was ever admitted; a preemption does not change that."""
    last_token_at: float | None = None
    due: float = 0.0
    """When the next token is due, in seconds. This and the next two are used with a fixed pace only."""
    scheduled: bool = False
    """Whether the timetable has an entry for it."""
    withheld: bool = False
    """Whether the prefill is done and its token is kept back until it is due."""


@dataclasses.dataclass(slots=True)
class _Batch:
    """What one step computes."""

    budget: int
    """Tokens that may still be added."""
    prefills: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    contexts: list[int] = dataclasses.field(default_factory=list)
    producers: list[_Sequence] = dataclasses.field(default_factory=list)
    """Sequences that yield a token at the end of the step."""


class Engine:
    """One engine; see the module docstring for the model."""

    def __init__(
        self,
        model: StepModel,
        *,
        kv_blocks: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        pace: Pace | None = None,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError(
                f"max_num_seqs and max_num_batched_tokens must be >= 1, got {max_num_seqs!r} and {max_num_batched_tokens!r}"
            )
        self.cache = PrefixCache(model.kv_blocks if kv_blocks is None else kv_blocks)
        self.statistics = Statistics()
        self._model = model
        self._max_num_seqs = max_num_seqs
        # with a fixed pace a step takes no time, so there is nothing to cut it short for
        self._budget = max_num_batched_tokens if pace is None else sys.maxsize
        self._pace = pace
        self._timetable: Timetable[_Sequence] = Timetable()
        # dicts, because they keep the order of arrival and forget one entry in constant time
        self._waiting: OrderedDict[int, _Sequence] = OrderedDict()
        self._prefilling: dict[int, _Sequence] = {}
        self._decoding: dict[int, _Sequence] = {}
        self._ended: dict[int, _Sequence] = {}
        self._held: dict[int, _Sequence] = {}
        self._kept: dict[int, Allocation] = {}
        self.receiving = 0
        """Requests that wait for KV from another engine before they are added."""

    @property
    def paced(self) -> bool:
        """Whether tokens follow a fixed pace instead of the step model."""
        return self._pace is not None

    @property
    def running(self) -> int:
        """Sequences in the batch, as ``vllm:num_requests_running`` counts them."""
        return len(self._prefilling) + len(self._decoding) + len(self._ended)

    @property
    def waiting(self) -> int:
        """Requests not admitted yet, the preempted ones and those whose KV is on its way included."""
        return len(self._waiting) + self.receiving

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.cache.usage_ratio

    def next_due(self) -> float | None:
        """Return when the next token of a fixed pace is due, in seconds; None without one."""
        return self._timetable.next_due()

    def fits(self, *, prompt_tokens: int, max_tokens: int) -> bool:
        """Return whether a request of this size can ever complete on this engine."""
        return prompt_tokens + max_tokens <= self.cache.capacity_blocks * BLOCK_TOKENS

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue *request*; ValueError when it is empty, unfitting or a duplicate."""
        if request.prompt_tokens < 1 or request.max_tokens < 0:
            raise ValueError(
                f"a request needs a prompt and no negative max_tokens, got {request!r}"
            )
        if not self.fits(prompt_tokens=request.prompt_tokens, max_tokens=request.max_tokens):
            raise ValueError(
                f"request {request.id!r} needs more KV blocks than the engine has, {self.cache.capacity_blocks}"
            )
        if request.id in self._held:
            raise ValueError(f"request {request.id!r} is already in the engine")
        sequence = _Sequence(request, added_at=now, target=request.prompt_tokens)
        self._held[request.id] = self._waiting[request.id] = sequence

    def abort(self, request_id: int) -> bool:
        """Forget a request and free its blocks; False when the engine does not hold it."""
        sequence = self._held.pop(request_id, None)
        if sequence is None:
            return False
        for queue in (self._waiting, self._prefilling, self._decoding, self._ended):
            queue.pop(request_id, None)
        self._release(sequence)
        self.statistics.finished[FinishReason.ABORT] += 1
        return True

    def take_kv(self, request_id: int) -> Allocation | None:
        """Hand out the blocks of a request that has ended; None when there are none of it.

        Whoever takes them gives them back with ``cache.release``.
        """
        ended = self._ended.get(request_id)
        if ended is None:
            return self._kept.pop(request_id, None)
        allocation, ended.allocation = ended.allocation, None
        return allocation

    def drop_kv(self, request_id: int) -> None:
        """Free the blocks that were kept of a request and that nobody took."""
        allocation = self._kept.pop(request_id, None)
        if allocation is not None:
            self.cache.release(allocation)

    def step(self, now: float) -> Step:
        """Plan the next batch; it starts at *now*, in seconds."""
        self._retire()
        batch = _Batch(budget=self._budget)
        preemptions = self.statistics.preemptions
        for sequence in self._ready(now):
            self._decode(sequence, batch)
        for sequence in list(self._prefilling.values()):
            self._prefill(sequence, batch)
        # admitting in the step of a preemption would take the blocks the preempted one waits for
        if self.statistics.preemptions == preemptions:
            while batch.budget > 0 and self._waiting and self.running < self._max_num_seqs:
                admitted = self._admit(now)
                if admitted is None:
                    break
                self._prefill(admitted, batch)
        duration = 0.0
        if self._pace is None:
            duration = self._model.step_s(prefills=batch.prefills, decode_contexts=batch.contexts)
        events = [
            self._produce(sequence, now + duration)
            for sequence in batch.producers
            if sequence.allocation is not None
        ]
        return Step(duration, events, worked=bool(batch.prefills or batch.producers))

    def _retire(self) -> None:
        for request_id, sequence in self._ended.items():
            del self._held[request_id]
            if sequence.request.keep_kv and sequence.allocation is not None:
                self._kept[request_id], sequence.allocation = sequence.allocation, None
            self._release(sequence)
            self.statistics.finished[sequence.request.finish_reason] += 1
            self.statistics.e2e.observe((sequence.last_token_at or 0.0) - sequence.added_at)
        self._ended.clear()

    def _ready(self, now: float) -> list[_Sequence]:
        """Return the sequences that may get a token in this step, oldest first."""
        if self._pace is None:
            return list(self._decoding.values())
        due = self._timetable.pop_due(now)
        for sequence in due:
            sequence.scheduled = False
        return [sequence for sequence in due if sequence.request.id in self._decoding]

    def _decode(self, sequence: _Sequence, batch: _Batch) -> None:
        """Compute the last output token of *sequence*, so that it yields the next one."""
        if sequence.withheld:
            sequence.withheld = False
        elif batch.budget == 0 or not self._grow(sequence):
            return
        else:
            sequence.computed += 1
            self._register_output(sequence)
            batch.contexts.append(sequence.computed)
            batch.budget -= 1
        batch.producers.append(sequence)

    def _grow(self, sequence: _Sequence) -> bool:
        """Make room for one more token; False when *sequence* itself had to be preempted for it."""
        while sequence.allocation is not None:
            room = len(sequence.allocation.keys) * BLOCK_TOKENS
            if sequence.computed < room or self.cache.extend(sequence.allocation):
                return True
            admitted_last = next(reversed((self._prefilling or self._decoding).values()))
            self._preempt(admitted_last)
        return False

    def _preempt(self, sequence: _Sequence) -> None:
        request_id = sequence.request.id
        self._prefilling.pop(request_id, None)
        self._decoding.pop(request_id, None)
        self._release(sequence)
        sequence.computed = 0
        sequence.target = sequence.request.prompt_tokens + sequence.produced
        sequence.withheld = False
        self._waiting[request_id] = sequence
        self._waiting.move_to_end(request_id, last=False)
        self.statistics.preemptions += 1

    def _register_output(self, sequence: _Sequence) -> None:
        index, rest = divmod(sequence.computed, BLOCK_TOKENS)
        hashes = sequence.request.block_hashes
        if rest == 0 and index <= len(hashes) and sequence.allocation is not None:
            self.cache.register(sequence.allocation, index - 1, hashes[index - 1])

    def _admit(self, now: float) -> _Sequence | None:
        """Give the head of the queue its blocks; None when they do not fit."""
        request_id, sequence = next(iter(self._waiting.items()))
        sequence.allocation = self.cache.acquire(
            sequence.request.block_hashes,
            tokens=sequence.target,
            count_query=not sequence.admitted,
        )
        if sequence.allocation is None:
            return None
        del self._waiting[request_id]
        self._prefilling[request_id] = sequence
        sequence.computed = sequence.allocation.cached_blocks * BLOCK_TOKENS
        if not sequence.admitted:
            sequence.admitted = True
            self._account_prompt(sequence)
            sequence.cached_tokens = sequence.computed
            self.statistics.queue.observe(now - sequence.added_at)
            if self._pace is not None:
                sequence.due = now + self._pace.ttft_s
        return sequence

    def _account_prompt(self, sequence: _Sequence) -> None:
        """Count the prompt of a sequence just admitted, and skip what was received of it."""
        request, statistics = sequence.request, self.statistics
        local, received = sequence.computed, max(request.received_tokens - sequence.computed, 0)
        statistics.prompt_tokens += request.prompt_tokens
        statistics.cached_prompt_tokens += local
        statistics.received_prompt_tokens += received
        if request.received_tokens:
            statistics.external_queries += request.prompt_tokens - local
        # the result of the last token is the first output
        sequence.computed = max(local, min(request.received_tokens, request.prompt_tokens - 1))

    def _prefill(self, sequence: _Sequence, batch: _Batch) -> None:
        """Compute as much of the prompt as the budget allows; the last chunk yields a token."""
        chunk = min(sequence.target - sequence.computed, batch.budget)
        if chunk == 0:
            return
        batch.prefills.append((chunk, sequence.computed))
        batch.budget -= chunk
        sequence.computed += chunk
        if sequence.computed < sequence.target:
            return
        del self._prefilling[sequence.request.id]
        self._decoding[sequence.request.id] = sequence
        if self._pace is None:
            batch.producers.append(sequence)
        else:
            sequence.withheld = True
            self._schedule(sequence)

    def _produce(self, sequence: _Sequence, at: float) -> Event:
        """Account for the token that *sequence* yields at time *at*."""
        request = sequence.request
        tokens = min(1, request.max_tokens)
        sequence.produced += tokens
        self.statistics.generation_tokens += tokens
        if sequence.last_token_at is None:
            self.statistics.ttft.observe(at - sequence.added_at)
        else:
            self.statistics.itl.observe(at - sequence.last_token_at)
        sequence.last_token_at = at
        reason = None
        if sequence.produced >= request.max_tokens:
            reason = request.finish_reason
            del self._decoding[request.id]
            self._ended[request.id] = sequence
        elif self._pace is not None:
            sequence.due += self._pace.itl_s
            self._schedule(sequence)
        return Event(request.id, tokens, sequence.cached_tokens, reason)

    def _schedule(self, sequence: _Sequence) -> None:
        if not sequence.scheduled:
            sequence.scheduled = True
            self._timetable.add(sequence, sequence.due)

    def _release(self, sequence: _Sequence) -> None:
        if sequence.allocation is not None:
            self.cache.release(sequence.allocation)
            sequence.allocation = None
