"""Models whose last worker has just been removed: in a rolling update they are back in a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable

MAX_NAMES = 10_000


class AbsentModels:
    """Remembers names for *keep_s* seconds from when nobody served them any more."""

    __slots__ = ("_since", "keep_s")

    def __init__(self, keep_s: float = 0.0) -> None:
        self.keep_s = keep_s
        self._since: dict[str, float] = {}
        """The longest gone first."""

    def __bool__(self) -> bool:
        return bool(self._since)

    def removed(self, names: Iterable[str], now: float) -> None:
        """Note that a worker that served *names* is gone."""
        for name in names:
            if self.keep_s > 0 and name not in self._since:
                self._since[name] = now
        while len(self._since) > MAX_NAMES:
            del self._since[next(iter(self._since))]

    def settle(self, is_served: Callable[[str], bool]) -> None:
        """Forget what is served again."""
        for name in [name for name in self._since if is_served(name)]:
            del self._since[name]

    def expire(self, now: float) -> None:
        """Forget what has been gone for too long."""
        while self._since:
            name, since = next(iter(self._since.items()))
            if now - since < self.keep_s:
                return
            del self._since[name]

    def __contains__(self, name: str) -> bool:
        return name in self._since
