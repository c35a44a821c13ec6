"""How many retries requests may have, so that over time they stay a small share of the requests.

Envoy's own retry budget compares retries under way with requests under way: with streams of a minute and
errors that come in a millisecond it would let a storm through. So the service keeps account in tokens: a
request earns ``ratio`` tokens, a retry costs one. There is a reserve for quiet times, refilled slowly. A request
under way may use what it was granted, so the balance may fall below zero, by as much as the reserve.
"""

from __future__ import annotations

from collections import deque

RESERVE = 20.0
REFILL_PER_S = 1.0
"""Up to the reserve."""

KEPT_S = 60
"""The balance is at most what the requests of so many seconds earned."""

FORGET_RATIO = 0.95
"""What is left after a second of payments in advance: a request whose client leaves between two attempts never
settles for the first one."""

USUAL_RETRIES = 3
"""A request may have so many as long as there is a worker that serves and the budget is not used up: one
worker that fails among good ones is to cost no client anything."""


class RetryBudget:
    """The account. Times are in seconds on any clock, always the same."""

    __slots__ = (
        "_advance",
        "_bucket_at",
        "_buckets",
        "_earned",
        "_now",
        "balance",
        "exhausted",
        "most",
        "ratio",
    )

    def __init__(self, *, ratio: float, most: int) -> None:
        """*ratio*: tokens that a request earns. *most*: retries that any request may have."""
        self.ratio = ratio
        self.most = most
        self.balance = RESERVE
        self._advance = 0.0
        """Paid for attempts of requests that have not ended."""
        self.exhausted = 0
        """Requests that were granted no retry."""
        self._now: float | None = None
        self._buckets: deque[float] = deque([0.0], maxlen=KEPT_S)
        """What was earned in each of the last seconds."""
        self._bucket_at = 0
        self._earned = 0.0
        """The sum of it."""

    def configure(self, *, ratio: float, most: int) -> None:
        """Go by other figures."""
        self.ratio, self.most = ratio, most

    def on_failed(self) -> None:
        """Pay in advance for a retry: an attempt has failed."""
        self._advance += 1

    def on_ended(self, retries: int, *, failed: bool) -> None:
        """Settle for a request that had so many *retries*; *failed*: its last attempt too."""
        self._advance = max(0.0, self._advance - retries - failed)
        self.balance = max(-RESERVE, self.balance - retries)

    def grant(self, in_flight: int, now: float, *, sound: bool) -> int:
        """Count a request and return how many retries it may have.

        *in_flight*: requests under way, this one included, of which each may do the same. *sound*: whether there
        is a worker that served what it was asked last.
        """
        self._earn(now)
        left = self.balance - self._advance
        if left <= 0:
            found = 0
        else:
            found = int(left / max(1, in_flight))
            if sound:
                found = max(found, USUAL_RETRIES)
        found = min(found, self.most)
        if not found and self.most:
            self.exhausted += 1
        return found

    def _earn(self, now: float) -> None:
        if self._now is None:
            self._now, self._bucket_at = now, int(now)
        before, self._now = self._now, now
        if self.balance < RESERVE:
            self.balance = min(RESERVE, self.balance + max(0.0, now - before) * REFILL_PER_S)
        second = int(now)
        ahead = min(second - self._bucket_at, KEPT_S)
        if ahead > 0:
            self._advance *= FORGET_RATIO**ahead
            for _ in range(ahead):
                if len(self._buckets) == KEPT_S:
                    self._earned -= self._buckets[0]
                self._buckets.append(0.0)
            self._bucket_at = second
        self._buckets[-1] += self.ratio
        self._earned += self.ratio
        self.balance = min(self.balance + self.ratio, max(RESERVE, self._earned))
