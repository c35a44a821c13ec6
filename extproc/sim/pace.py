"""A timetable that replaces the step model where a test wants tokens at fixed intervals."""

import dataclasses
import heapq
import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When tokens come, whatever else the engine does."""

    ttft_s: float
    """Seconds from admission to the first token."""

    itl_s: float
    """Seconds between tokens. The schedule is absolute, so a late token does not delay the next."""


class Timetable(Generic[T]):
    """Entries ordered by the time at which they are due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._serial = itertools.count()  # ties leave in the order they came; entries need no order

    def add(self, entry: T, due: float) -> None:
        """Schedule *entry* for *due*, in seconds."""
        heapq.heappush(self._heap, (due, next(self._serial), entry))

    def next_due(self) -> float | None:
        """Return the earliest time at which something is due, None when there is nothing."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[T]:
        """Remove and return the entries due at *now*, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
