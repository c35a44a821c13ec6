"""The data-parallel ranks of a worker: an engine each, and which of them serves a request.

As in vLLM, a request without the rank header goes to the rank with the fewest requests, the lowest
rank on a tie. Unlike vLLM, which ignores a header that is no integer, and takes the first of several,
the simulation refuses both: a router that sends them has a fault that a test should see.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from extproc.sim.api_errors import invalid
from extproc.sim.engine import Engine
from extproc.sim.engine_loop import EngineLoop, Generation
from extproc.sim.exchange import Exchange
from extproc.sim.work import Work

RANK_HEADER = "X-data-parallel-rank"


@dataclasses.dataclass(slots=True, eq=False)
class Rank:
    """One engine, and how many requests it was given."""

    number: int
    """Its label in the metrics, counted over all workers of a deployment."""
    engine_loop: EngineLoop
    served: int = 0

    @property
    def engine(self) -> Engine:
        """The engine that the loop drives."""
        return self.engine_loop.engine

    def submit(self, works: Iterable[Work], *, arrived: float | None = None) -> Generation:
        """Compute *works*, the sequences of one request that *arrived* at that engine time."""
        self.served += 1
        return self.engine_loop.submit(works, arrived=arrived)


class Ranks:
    """All ranks of one worker, in order."""

    def __init__(self, engine_loops: Sequence[EngineLoop], *, start: int) -> None:
        self._ranks = [Rank(start + index, loop) for index, loop in enumerate(engine_loops)]
        self._start = start
        self._end = start + len(engine_loops)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def choose(self, exchange: Exchange) -> Rank:
        """Return the rank that is to serve; ApiError 400 when the request does not name one of them."""
        asked = exchange.request.headers.getall(RANK_HEADER, [])
        if not asked:
            return min(self._ranks, key=lambda rank: rank.engine.running + rank.engine.waiting)
        if len(asked) > 1:
            raise invalid(f"{RANK_HEADER} was sent {len(asked)} times: {', '.join(asked)}")
        try:
            number = int(asked[0])
        except ValueError:
            raise invalid(f"{RANK_HEADER} must be an integer, got {asked[0]!r}") from None
        if not self._start <= number < self._end:
            raise invalid(
                f"data_parallel_rank {number} is out of range [{self._start}, {self._end})."
            )
        return self._ranks[number - self._start]

    def start(self) -> None:
        """Start every engine."""
        for rank in self._ranks:
            rank.engine_loop.start()

    def set_slowdown(self, factor: float) -> None:
        """Let every engine take *factor* times as long."""
        for rank in self._ranks:
            rank.engine_loop.set_slowdown(factor)

    async def stop(self) -> None:
        """Stop every engine; generations still in them fail."""
        for rank in self._ranks:
            await rank.engine_loop.stop()
