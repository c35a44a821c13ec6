"""A queue that is fair to tenants: who asks a thousand times does not delay who asks once.

Strictly by priority, the higher first. Within one priority the tenants take turns, and within one tenant
the order is that of coming. Every operation takes the same time however many wait, apart from the choice
among the priorities in use. Whoever waits may leave at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the order depends on; must not change while it waits."""

    @property
    def tenant(self) -> str:
        """Who asks."""
        ...

    @property
    def priority(self) -> int:
        """Higher goes first."""
        ...


T = TypeVar("T", bound=Waiting)

_Turns = OrderedDict[str, OrderedDict[T, None]]
"""Tenants in the order of their turns, with what each has waiting."""


class FairQueue(Generic[T]):
    """Holds what waits, each item once."""

    __slots__ = ("_classes", "_counts", "_size")

    def __init__(self) -> None:
        self._classes: dict[int, _Turns[T]] = {}
        self._counts: dict[str, int] = {}
        """How many each tenant has waiting."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for turns in self._classes.values():
            for own in turns.values():
                yield from own

    def push(self, item: T) -> None:
        """Let *item* wait behind what its tenant has waiting."""
        turns = self._classes.get(item.priority)
        if turns is None:
            turns = self._classes[item.priority] = OrderedDict()
        own = turns.get(item.tenant)
        if own is None:
            own = turns[item.tenant] = OrderedDict()
        if item not in own:
            own[item] = None
            self._size += 1
            self._counts[item.tenant] = self._counts.get(item.tenant, 0) + 1

    def head(self) -> T:
        """Return whose turn it is. ``LookupError`` when nobody waits."""
        if not self._classes:
            raise LookupError("nobody waits")
        turns = self._classes[max(self._classes)]
        return next(iter(next(iter(turns.values()))))

    def yields_to(self, tenant: str, priority: int) -> T | None:
        """Return whose place in a full queue a newcomer may have, None when there is nobody.

        That is the latest of the tenant who has the most waiting, if the newcomer's has two fewer at least,
        and if it is not more urgent. Takes a look at each tenant.
        """
        if not self._counts:
            return None
        greedy = max(self._counts, key=self._counts.__getitem__)
        if self._counts[greedy] < self._counts.get(tenant, 0) + 2:
            return None
        least = min(p for p, turns in self._classes.items() if greedy in turns)
        if least > priority:
            return None
        return next(reversed(self._classes[least][greedy]))

    def remove(self, item: T, *, served: bool) -> None:
        """Take *item* out; *served*: its tenant has had its turn. ``KeyError`` when it does not wait."""
        turns = self._classes[item.priority]
        own = turns[item.tenant]
        del own[item]
        self._size -= 1
        self._counts[item.tenant] -= 1
        if not self._counts[item.tenant]:
            del self._counts[item.tenant]
        if not own:
            del turns[item.tenant]
            if not turns:
                del self._classes[item.priority]
        elif served:
            turns.move_to_end(item.tenant)
