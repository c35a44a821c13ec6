"""The scheduler, driven by a virtual clock."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.sim.engine import Engine, EngineRequest
from extproc.sim.pace import Pace
from extproc.sim.prefix_cache import BLOCK_TOKENS, chain_hashes
from extproc.sim.statistics import FinishReason
from extproc.sim.step_model import HARDWARE

H100 = HARDWARE["h100"]


def request(number, *, prompt=range(20), max_tokens=3, **fields):
    """Return a request whose prompt and answer have block hashes."""
    tokens = [*prompt, *range(1000 * number, 1000 * number + max_tokens)]
    return EngineRequest(
        id=number,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        block_hashes=chain_hashes(tokens),
        **fields,
    )


@dataclasses.dataclass
class Run:
    """An engine and a virtual clock that follows its steps."""

    engine: Engine
    now: float = 0.0
    log: list = dataclasses.field(default_factory=list)
    """Every event as (time, event)."""

    def step(self):
        """Run one step to its end."""
        step = self.engine.step(self.now)
        self.now += step.duration_s
        self.log.extend((self.now, event) for event in step.events)
        return step

    def drain(self):
        """Run until nothing is left to do."""
        for _ in range(100_000):
            if not self.step().worked:
                due = self.engine.next_due()
                if due is None:
                    return
                self.now = max(self.now, due)
        raise AssertionError("the engine does not come to an end")

    def times(self, number):
        """Return when each event of a request happened."""
        return [at for at, event in self.log if event.request_id == number]


def test_one_request_takes_a_prefill_and_then_one_step_a_token():
    """TTFT is the prefill, ITL is the step of a batch of one."""
    run = Run(Engine(H100))
    run.engine.add(request(1, prompt=range(2048), max_tokens=3), 0.0)

    run.drain()

    first, second, third = run.times(1)
    assert first == pytest.approx(0.040, rel=0.02)
    assert second - first == pytest.approx(0.0073, abs=1e-4)
    assert third - second == pytest.approx(0.0073, abs=1e-4)
    assert [event.finish_reason for _, event in run.log] == [None, None, FinishReason.LENGTH]


def test_a_repeated_prompt_computes_only_what_is_not_cached():
    """The second request finds all full blocks but must compute the last token."""
    run = Run(Engine(H100))
    for number in (1, 2):
        run.engine.add(request(number, prompt=range(4096), max_tokens=1), run.now)
        run.drain()

    (first,), (second,) = run.times(1), run.times(2)
    assert run.log[1][1].cached_tokens == 4096 - BLOCK_TOKENS
    assert second - first < 0.1 * first


def test_an_answer_sent_back_in_the_next_turn_is_cached_too():
    """Output blocks are registered as they fill; the last token was never computed."""
    run = Run(Engine(H100))
    run.engine.add(request(1, prompt=range(32), max_tokens=33), 0.0)
    run.drain()
    next_turn = [*range(32), *range(1000, 1033), *range(7)]
    run.engine.add(request(2, prompt=next_turn), run.now)
    run.drain()

    assert run.log[-1][1].cached_tokens == 64


def test_requests_waiting_together_share_blocks_registered_at_admission():
    """The second of two equal prompts in one batch is a hit already."""
    run = Run(Engine(H100))
    for number in (1, 2):
        run.engine.add(request(number, prompt=range(160)), 0.0)

    run.step()

    assert [event.cached_tokens for _, event in run.log] == [0, 144]


def test_long_prompts_are_cut_and_decoding_goes_on_between():
    """A prompt of three budgets takes three steps, in each of which the other request gets a token."""
    run = Run(Engine(H100, max_num_batched_tokens=512))
    run.engine.add(request(1, max_tokens=10), 0.0)
    run.step()
    run.engine.add(request(2, prompt=range(5000, 6500), max_tokens=1), run.now)

    steps = [{event.request_id for event in run.step().events} for _ in range(3)]

    assert steps == [{1}, {1}, {1, 2}]


def test_the_batch_is_bounded_and_the_rest_waits():
    """``max_num_seqs`` sequences run; a finished one leaves its place at the end of its step."""
    run = Run(Engine(H100, max_num_seqs=2))
    for number in range(1, 6):
        run.engine.add(request(number, max_tokens=2), 0.0)

    run.step()
    assert (run.engine.running, run.engine.waiting) == (2, 3)
    run.step()
    assert (run.engine.running, run.engine.waiting) == (2, 3)
    run.step()
    assert (run.engine.running, run.engine.waiting) == (2, 1)
    run.drain()
    assert (run.engine.running, run.engine.waiting) == (0, 0)


def test_the_head_of_the_queue_waits_for_its_blocks_and_others_do_not_overtake():
    """First come, first served, even where a smaller request would fit."""
    run = Run(Engine(H100, kv_blocks=4))
    run.engine.add(request(1, prompt=range(48), max_tokens=8), 0.0)
    run.step()
    run.engine.add(request(2, prompt=range(100, 148), max_tokens=1), run.now)
    run.engine.add(request(3, prompt=range(200, 204), max_tokens=1), run.now)

    run.drain()

    assert [event.request_id for _, event in run.log] == [1] * 8 + [2, 3]


def test_the_last_admitted_is_preempted_when_blocks_run_out_and_still_completes():
    """It is computed again and its tokens are not sent twice."""
    run = Run(Engine(H100, kv_blocks=5))
    for number in (1, 2):
        run.engine.add(
            request(number, prompt=range(100 * number, 100 * number + 30), max_tokens=20), 0.0
        )

    run.drain()

    assert run.engine.statistics.preemptions == 1
    assert [len(run.times(number)) for number in (1, 2)] == [20, 20]
    assert run.times(1)[-1] < run.times(2)[-1]
    assert run.engine.cache.query_tokens == 60  # the second admission is not a query


def test_a_prefill_only_request_ends_without_a_token():
    """An embedding costs its prefill."""
    run = Run(Engine(H100))
    run.engine.add(request(1, max_tokens=0, finish_reason=FinishReason.STOP), 0.0)

    run.drain()

    assert [tuple(event) for _, event in run.log] == [(1, 0, 0, FinishReason.STOP)]
    assert run.engine.statistics.generation_tokens == 0


def test_an_aborted_request_frees_its_blocks_at_once():
    """Waiting, running or in its last step; an unknown id is no error."""
    run = Run(Engine(H100, max_num_seqs=2))
    for number in (1, 2, 3):
        run.engine.add(request(number, prompt=range(100 * number, 100 * number + 50)), 0.0)
    run.step()

    assert [run.engine.abort(number) for number in (1, 2, 3, 4)] == [True, True, True, False]

    assert run.engine.kv_usage_ratio == 0
    assert (run.engine.running, run.engine.waiting) == (0, 0)
    assert run.engine.statistics.finished[FinishReason.ABORT] == 3
    assert not run.step().worked


def test_an_abort_during_the_last_step_is_an_abort():
    """Its last token was planned but is not there yet; it is counted once."""
    run = Run(Engine(H100))
    run.engine.add(request(1, max_tokens=1), 0.0)
    run.engine.step(0.0)

    assert run.engine.running == 1
    assert run.engine.abort(1)

    run.drain()
    finished = run.engine.statistics.finished
    assert (finished[FinishReason.ABORT], finished[FinishReason.LENGTH]) == (1, 0)
    assert run.engine.kv_usage_ratio == 0


def test_a_fixed_pace_ignores_the_load():
    """Each request has its own timetable, from its admission."""
    run = Run(Engine(H100, pace=Pace(ttft_s=0.5, itl_s=0.1)))
    run.engine.add(request(1, prompt=range(9000)), 0.0)
    run.step()
    run.now = 0.25
    run.engine.add(request(2), 0.25)

    run.drain()

    assert run.times(1) == pytest.approx([0.5, 0.6, 0.7])
    assert run.times(2) == pytest.approx([0.75, 0.85, 0.95])


def test_times_are_counted_as_vllm_counts_them():
    """TTFT from arrival, ITL between tokens, end to end and the time in the queue."""
    run = Run(Engine(H100, pace=Pace(ttft_s=0.5, itl_s=0.1), max_num_seqs=1))
    run.engine.add(request(1), 0.0)
    run.engine.add(request(2), 0.0)

    run.drain()

    statistics = run.engine.statistics
    assert statistics.ttft.total == pytest.approx(0.5 + 1.2)
    assert statistics.itl.total == pytest.approx(4 * 0.1)
    assert statistics.e2e.total == pytest.approx(0.7 + 1.4)
    assert statistics.queue.total == pytest.approx(0.7)
    assert (statistics.prompt_tokens, statistics.generation_tokens) == (40, 6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (EngineRequest(id=1, prompt_tokens=0, max_tokens=1), "needs a prompt"),
        (EngineRequest(id=1, prompt_tokens=1, max_tokens=-1), "no negative max_tokens"),
        (EngineRequest(id=1, prompt_tokens=60, max_tokens=5), "more KV blocks"),
        (EngineRequest(id=7, prompt_tokens=1, max_tokens=1), "already in the engine"),
    ],
)
def test_impossible_requests_are_refused(wrong, message):
    """They would never come to an end."""
    engine = Engine(H100, kv_blocks=4)
    engine.add(EngineRequest(id=7, prompt_tokens=1, max_tokens=1), 0.0)

    with pytest.raises(ValueError, match=message):
        engine.add(wrong, 0.0)


def test_a_batch_without_room_is_refused():
    """Both bounds must let something run."""
    with pytest.raises(ValueError, match="must be >= 1, got 0 and 8192"):
        Engine(H100, max_num_seqs=0)


ADD = st.tuples(st.just("add"), st.integers(1, 70), st.integers(0, 25))
ABORT = st.tuples(st.just("abort"), st.integers(0, 30), st.none())
STEP = st.tuples(st.just("step"), st.integers(1, 4), st.none())


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    operations=st.lists(st.one_of(ADD, ABORT, STEP), max_size=60),
    kv_blocks=st.integers(6, 14),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 64),
    pace=st.sampled_from([None, Pace(ttft_s=0.01, itl_s=0.01), Pace(ttft_s=0.0, itl_s=0.0)]),
)
def test_any_history_ends_in_order_and_leaks_no_block(
    operations, kv_blocks, max_num_seqs, budget, pace
):
    """Requests get exactly their tokens, first tokens come in order of arrival, all blocks return."""
    run = Run(
        Engine(
            H100,
            kv_blocks=kv_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            pace=pace,
        )
    )
    wanted, aborted, aborts = {}, set(), 0
    for operation, first, second in operations:
        if operation == "add":
            number = len(wanted) + 1
            # a multiple of the number starts the prompt, so that some prompts share prefixes
            prompt = range(1000 * (number % 3), 1000 * (number % 3) + first)
            added = request(number, prompt=prompt, max_tokens=second)
            wanted[number] = added
            run.engine.add(added, run.now)
        elif operation == "abort":
            aborts += run.engine.abort(first)
            aborted.add(first)
        else:
            for _ in range(first):
                run.step()
        assert run.engine.running <= max_num_seqs
        assert 0 <= run.engine.kv_usage_ratio <= 1
    run.drain()

    ends = [event.request_id for _, event in run.log if event.finish_reason is not None]
    assert len(ends) == len(set(ends))
    for number, added in wanted.items():
        events = [event for _, event in run.log if event.request_id == number]
        if number not in aborted:
            assert number in ends
            assert sum(event.tokens for event in events) == added.max_tokens
        assert len(events) <= max(added.max_tokens, 1)
    firsts = list(dict.fromkeys(event.request_id for _, event in run.log))
    assert firsts == sorted(firsts)
    assert (run.engine.running, run.engine.waiting) == (0, 0)
    assert run.engine.cache.free_blocks == kv_blocks
    finished = run.engine.statistics.finished
    assert finished[FinishReason.ABORT] == aborts
    assert sum(finished.values()) == len(wanted)


def test_kept_blocks_stay_in_use_until_they_are_taken_and_released():
    """The sequence itself has ended."""
    run = Run(Engine(H100, kv_blocks=10))
    run.engine.add(request(1, max_tokens=1, keep_kv=True), 0.0)
    run.drain()
    assert (run.engine.running, run.engine.cache.free_blocks) == (0, 8)

    allocation = run.engine.take_kv(1)

    assert run.engine.take_kv(1) is None
    assert run.engine.cache.free_blocks == 8
    run.engine.cache.release(allocation)
    assert run.engine.cache.free_blocks == 10


def test_kept_blocks_can_be_taken_before_the_next_step():
    """The last token is there, the sequence counts as running until then."""
    run = Run(Engine(H100, kv_blocks=10))
    run.engine.add(request(1, max_tokens=1, keep_kv=True), 0.0)
    run.step()

    allocation = run.engine.take_kv(1)
    run.drain()

    assert run.engine.cache.free_blocks == 8
    run.engine.cache.release(allocation)
    assert run.engine.cache.free_blocks == 10


def test_kept_blocks_can_be_dropped_and_an_abort_keeps_none():
    """Whether or not the prefill is done."""
    run = Run(Engine(H100, kv_blocks=10))
    run.engine.add(request(1, max_tokens=1, keep_kv=True), 0.0)
    run.drain()
    run.engine.add(request(2, prompt=range(100, 120), keep_kv=True), run.now)
    run.step()

    run.engine.abort(2)
    run.engine.drop_kv(1)
    run.engine.drop_kv(1)

    assert run.engine.cache.free_blocks == 10


def test_a_received_prompt_costs_one_token():
    """It is cached but for the last token; what the engine had itself is not counted as received."""
    prompt = range(4000)
    computed, received = Run(Engine(H100)), Run(Engine(H100))
    computed.engine.add(request(1, prompt=prompt), 0.0)
    received.engine.add(request(1, prompt=prompt, received_tokens=4000), 0.0)
    computed.drain()
    received.drain()

    assert received.times(1)[0] < computed.times(1)[0] / 5
    assert [event.cached_tokens for _, event in received.log] == [3999] * 3
    counts = received.engine.statistics
    assert (counts.prompt_tokens, counts.received_prompt_tokens) == (4000, 4000)

    received.engine.add(request(2, prompt=prompt, received_tokens=4000), received.now)
    received.drain()
    assert counts.cached_prompt_tokens == 3984
    assert counts.received_prompt_tokens == 4000 + 16
    assert counts.external_queries == 4000 + 16


def test_a_preempted_sequence_computes_what_it_had_received():
    """Its blocks are gone; it comes to its end all the same."""
    run = Run(Engine(H100, kv_blocks=4))
    for number in (1, 2):
        prompt = range(100 * number, 100 * number + 30)
        run.engine.add(request(number, prompt=prompt, max_tokens=20, received_tokens=30), 0.0)

    run.drain()

    assert run.engine.statistics.preemptions > 0
    assert sum(event.tokens for _, event in run.log) == 40
    assert run.engine.statistics.received_prompt_tokens == 60
    assert run.engine.cache.free_blocks == 4
