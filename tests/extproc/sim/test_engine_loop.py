"""The loop that runs an engine against the clock."""

import asyncio
import time

import pytest

from extproc.sim.engine import Engine
from extproc.sim.engine_loop import EngineLoop, EngineStoppedError
from extproc.sim.pace import Pace
from extproc.sim.statistics import FinishReason
from extproc.sim.step_model import HARDWARE
from extproc.sim.work import plan_answer


def work(tokens=5):
    """Return one answer to generate."""
    return plan_answer("w", range(40), tokens=tokens, finish_reason=FinishReason.LENGTH)


@pytest.fixture
async def start_loop():
    """Return a function that starts a loop at a speed."""
    loops = []

    def start(speed, *, clock=time.monotonic, pace=None):
        loops.append(EngineLoop(Engine(HARDWARE["h100"], pace=pace), speed=speed, clock=clock))
        loops[-1].start()
        return loops[-1]

    yield start
    for loop in loops:
        await loop.stop()


async def test_every_token_is_announced(start_loop):
    """A waiter sees each advance; the last one comes with the reason."""
    generation = start_loop(0).submit([work()])
    (choice,) = generation.choices
    seen = []

    async with asyncio.timeout(5):
        while not generation.done:
            await generation.advanced()
            seen.append((choice.produced, choice.finish_reason))

    assert seen == [(1, None), (2, None), (3, None), (4, None), (5, FinishReason.LENGTH)]
    assert choice.text.startswith("Hello from w.")


async def test_an_aborted_generation_gets_nothing_more(start_loop):
    """The engine forgets it; a second abort is no error."""
    loop = start_loop(1)
    generation = loop.submit([work(1000), work(1000)])
    await generation.advanced()

    loop.abort(generation)
    loop.abort(generation)

    assert loop.engine.running == 0
    assert loop.engine.statistics.finished[FinishReason.ABORT] == 2


async def test_waiters_fail_when_the_loop_stops(start_loop):
    """And so does who comes later."""
    loop = start_loop(1)
    generation = loop.submit([work(1000)])
    waiter = asyncio.ensure_future(generation.finished())
    await asyncio.sleep(0)

    await loop.stop()

    with pytest.raises(EngineStoppedError):
        await waiter
    with pytest.raises(EngineStoppedError):
        await loop.submit([work()]).finished()


@pytest.mark.looptime
@pytest.mark.parametrize("speed", [0.5, 1, 10])
async def test_speed_divides_the_time(start_loop, speed):
    """50 tokens of 7.2 ms, in virtual time."""
    clock = asyncio.get_running_loop().time
    loop = start_loop(speed, clock=clock)
    began = clock()

    await loop.submit([work(50)]).finished()

    assert clock() - began == pytest.approx(50 * 0.00722 / speed, rel=0.02)
    assert loop.engine.statistics.itl.total == pytest.approx(49 * 0.00721, rel=0.01)


@pytest.mark.looptime
@pytest.mark.parametrize("pace", [None, Pace(ttft_s=0.00721, itl_s=0.00721)])
async def test_slowdown_multiplies_the_time(start_loop, pace):
    """From when it is set, in the middle of an answer too, and back; the engine's own figures do not change."""
    clock = asyncio.get_running_loop().time
    loop = start_loop(1, clock=clock, pace=pace)
    generation = loop.submit([work(300)])
    (choice,) = generation.choices
    passed = []
    for part, factor in enumerate((1, 20, 1), start=1):
        loop.set_slowdown(factor)
        began = clock()
        while choice.produced < 100 * part:
            await generation.advanced()
        passed.append(clock() - began)

    assert passed == pytest.approx([0.721, 20 * 0.721, 0.721], rel=0.03)
    assert loop.engine.statistics.itl.total == pytest.approx(299 * 0.00721, rel=0.01)


@pytest.mark.looptime
async def test_end_of_a_slowdown_is_seen_in_the_middle_of_a_step(start_loop):
    """A step that would take hours ends when the fault does."""
    clock = asyncio.get_running_loop().time
    loop = start_loop(1, clock=clock)
    loop.set_slowdown(1_000_000)
    generation = loop.submit([work(2)])
    await asyncio.sleep(60)

    began = clock()
    loop.set_slowdown(1)
    await generation.finished()

    assert clock() - began < 0.2


@pytest.mark.looptime
async def test_an_idle_loop_starts_a_request_when_it_comes(start_loop):
    """The time before does not count as a lag to catch up with."""
    clock = asyncio.get_running_loop().time
    loop = start_loop(1, clock=clock)
    await asyncio.sleep(100.04)
    began = clock()

    await loop.submit([work(1)]).finished()

    assert clock() - began == pytest.approx(0.0072, abs=2e-4)
    assert loop.engine.statistics.ttft.total == pytest.approx(0.0072, abs=2e-4)


@pytest.mark.looptime
async def test_a_fixed_pace_is_kept_whatever_the_speed(start_loop):
    """Two requests that came at different times keep their own schedules."""
    clock = asyncio.get_running_loop().time
    loop = start_loop(0, clock=clock, pace=Pace(ttft_s=0.5, itl_s=0.1))
    began = clock()
    times = []

    async def follow(delay_s):
        await asyncio.sleep(delay_s)
        generation = loop.submit([work(3)])
        while not generation.done:
            await generation.advanced()
            times.append(round(clock() - began, 3))

    await asyncio.gather(follow(0), follow(0.03))

    assert times == [0.5, 0.53, 0.6, 0.63, 0.7, 0.73]
