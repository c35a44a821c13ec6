"""Runs an ``Engine`` against the clock: one task per worker, asleep while there is nothing to do.

Handlers call ``submit`` and wait on the ``Generation`` they get; each waiter is woken by a future of
its own. ``abort`` takes effect at once, in the middle of a step too.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable

import structlog

from extproc.sim.engine import Engine, EngineRequest, Event
from extproc.sim.prefix_cache import Allocation
from extproc.sim.work import Choice, Work

MAX_LAG_S = 0.1
"""How far the engine may fall behind the clock and still catch up by shorter waits, in real seconds."""

MIN_IDLE_S = 1e-6
"""Shortest timer, in real seconds: a shorter one might not move a clock, and the engine would spin."""

MAX_PAUSE_S = 0.1
"""How long the engine may sleep until it sees that its slowdown has changed, in real seconds."""

log = structlog.get_logger(__name__)


class EngineStoppedError(RuntimeError):
    """The engine loop ended while a request was in it."""


class Generation:
    """The sequences of one HTTP request."""

    def __init__(self, works: Iterable[Work]) -> None:
        self.choices = [Choice(index, work) for index, work in enumerate(works)]
        self.ids: list[int] = []
        self.failed = False
        self._open = len(self.choices)
        self._changed = False
        self._waiter: asyncio.Future[None] | None = None
        self._wants_tokens = False

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return self._open == 0

    async def advanced(self) -> None:
        """Wait until there is a token that was not there at the last call, or the end."""
        self._wants_tokens = True
        if not self._changed:
            await self._wait()
        self._changed = False

    async def finished(self) -> None:
        """Wait until every sequence has ended."""
        self._wants_tokens = False
        while not self.done:
            await self._wait()

    def on_event(self, choice: Choice, event: Event) -> None:
        """Account for *event*; called by the loop."""
        choice.produced += event.tokens
        choice.cached_tokens = event.cached_tokens
        if event.finish_reason is not None:
            choice.finish_reason = event.finish_reason
            self._open -= 1
        self._changed = True
        if self._wants_tokens or self.done:
            self._wake()

    def fail(self) -> None:
        """Let the waiter raise ``EngineStoppedError``."""
        self.failed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if not self.failed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.failed:
            raise EngineStoppedError("the engine loop has ended")


class EngineLoop:
    """Drives *engine*; *speed* is simulated seconds per second, 0 for no waiting at all.

    An engine with a fixed pace runs in real time whatever *speed* is. A slowdown lets the engine's own
    time pass more slowly from there on: what is under way is stretched, and nothing is due twice.
    """

    def __init__(
        self, engine: Engine, *, speed: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine = engine
        self._full_speed = self._speed = 1.0 if engine.paced else speed
        # a fixed pace keeps its own schedule, and without waiting there is nothing to catch up with
        self._catch_up_s = 0.0 if engine.paced else MAX_LAG_S * speed
        self._clock = clock  # not the event loop's: uvloop counts in milliseconds
        self._origin = clock()
        self._origin_s = 0.0
        self._ids = itertools.count(1)
        self._owners: dict[int, tuple[Generation, Choice]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def now(self) -> float:
        """Return the engine's time, in simulated seconds."""
        return self._origin_s + (self._clock() - self._origin) * (self._speed or 1.0)

    def set_slowdown(self, factor: float) -> None:
        """Let everything take *factor* times as long as at full speed, from this moment on."""
        self._origin_s, self._origin = self.now(), self._clock()
        self._speed = self._full_speed / factor
        self._wake.set()  # what is due next is due at another time

    def real_s(self, engine_s: float) -> float:
        """Return how long *engine_s* seconds of engine time take, in real seconds; 0 without waiting."""
        return engine_s / self._speed if self._speed else 0.0

    def start(self) -> None:
        """Start the loop task."""
        self._task = asyncio.create_task(self._run(), name="engine loop")
        self._task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        """End the loop task; generations still in it fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def submit(self, works: Iterable[Work], *, arrived: float | None = None) -> Generation:
        """Queue all *works* as one generation; they *arrived* at that engine time, None for now."""
        generation = Generation(works)
        if self._task is None or self._task.done():
            generation.fail()
            return generation
        now = self.now() if arrived is None else arrived
        for choice in generation.choices:
            request_id = next(self._ids)
            self.engine.add(
                EngineRequest(
                    id=request_id,
                    prompt_tokens=choice.work.prompt_tokens,
                    max_tokens=len(choice.work.pieces),
                    block_hashes=choice.work.block_hashes,
                    finish_reason=choice.work.finish_reason,
                    keep_kv=choice.work.keep_kv,
                    received_tokens=choice.work.received_tokens,
                ),
                now,
            )
            self._owners[request_id] = (generation, choice)
            generation.ids.append(request_id)
        self._wake.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """Forget what is left of *generation*; nothing happens when it is done."""
        for request_id in generation.ids:
            if self._owners.pop(request_id, None) is not None:
                self.engine.abort(request_id)
            else:
                self.engine.drop_kv(request_id)
        self._wake.set()  # freed blocks may admit the head of the queue

    def take_kv(self, generation: Generation) -> Allocation:
        """Hand out the blocks kept of *generation*, one sequence that has ended."""
        allocation = self.engine.take_kv(generation.ids[0])
        if allocation is None:
            raise EngineStoppedError("the blocks of the request were not kept")
        return allocation

    def release(self, allocation: Allocation) -> None:
        """Give back blocks that were taken."""
        self.engine.cache.release(allocation)
        self._wake.set()  # they may admit the head of the queue

    async def _run(self) -> None:
        free_at = self.now()
        while True:
            now = self.now()
            # a step starts where the last one ended, so that late timers do not add up
            start = free_at if 0 <= now - free_at <= self._catch_up_s else now
            self._wake.clear()
            step = self.engine.step(start)
            free_at = start + step.duration_s
            if not step.worked:
                await self._idle(self.engine.next_due())
                free_at = self.now()
                continue
            await self._pause(free_at)
            for event in step.events:
                self._deliver(event)

    async def _pause(self, until: float) -> None:
        while True:
            delay_s = (until - self.now()) / self._speed if self._speed else 0.0
            await asyncio.sleep(min(max(delay_s, 0.0), MAX_PAUSE_S))
            if delay_s <= MAX_PAUSE_S:
                return

    async def _idle(self, until: float | None) -> None:
        """Wait for a request, an abort, or engine time *until*."""
        if until is None:
            await self._wake.wait()
            return
        loop = asyncio.get_running_loop()
        delay_s = max((until - self.now()) / (self._speed or 1.0), MIN_IDLE_S)
        timer = loop.call_later(delay_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _deliver(self, event: Event) -> None:
        owner = self._owners.get(event.request_id)
        if owner is None:
            return  # aborted while the step ran
        generation, choice = owner
        if event.finish_reason is not None:
            del self._owners[event.request_id]
        generation.on_event(choice, event)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        for generation, _ in list(self._owners.values()):
            generation.fail()
        self._owners.clear()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine loop failed", exc_info=error)
