"""Who may go on now, who waits and for what, and who is refused.

There are two stages. At the *gate* every request is counted from its headers to the end of its stream;
while as many are under way as may be, others wait there, before anything of their bodies is read. A
request that has passed it may find, when its worker is to be picked, that all workers are *busy* (at
their limits), or that there is *no worker* at all: it then waits for that.

A ``Place`` is what a request waits for; all who wait at one place need the same, so that none of them
can go on when the one whose turn it is cannot, and nobody is held up by somebody who waits at another.
Each place has a fair queue. A place is *stirred* when what is waited for there may have come; ``next``
then names whose turn it is, until that one says that it is ``stuck``. That bounds the work per change, and
leaves it to the caller when to do it.

Invariants: ``admitted`` is the number of requests that have passed the gate and are not closed; while
anybody waits at the gate nobody who comes later passes it; a ticket is in one queue at most. When there
is room and somebody waits for it, the place is stirred.

Nothing here waits: the service asks, keeps the time and wakes.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from enum import StrEnum
from itertools import islice
from typing import NamedTuple, assert_never

from extproc.errors import Refusal
from extproc.fair_queue import FairQueue
from extproc.pool import Pool
from policies.base import Worker

PRIORITY_HEADER = "x-request-priority"
"""An integer; the higher goes first."""

CLIENT_HEADER = "x-router-client"
"""Who the client is, as Envoy has found out; clients cannot send it."""

TENANT_HEADER = "x-tenant-id"
"""Who the client says it is; counts when Envoy does not know."""

MAX_PRIORITY = 100
MAX_TENANT_CHARS = 128
"""More than that of a name is not told apart, so that no queue grows by long names."""

MAX_PLACES_COMPARED = 16
"""Of the places that are stirred, so many are compared by priority."""

PACE_S = 5.0
"""Over how long, at least, the rate of ends is taken, for Retry-After."""


class Wait(StrEnum):
    """What a request waits for; also the label of the metric."""

    LIMIT = "limit"
    """To pass the gate."""

    BUSY = "busy"
    """A worker that has room."""

    NO_WORKER = "no_worker"
    """A worker."""


class Place(NamedTuple):
    """Where requests wait that need the same."""

    kind: Wait
    pool: Pool | None = None
    model: str = ""
    """The model that they ask for, where not every worker of the pool serves it."""

    subset: frozenset[str] | None = None
    """The endpoints that a gateway allows."""


GATE = Place(Wait.LIMIT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many go on and wait, and how long."""

    concurrent: int = sys.maxsize
    """Requests under way at the same time."""

    queue: int = 0
    """Requests that may wait at the gate, and in each pool for a worker with room."""

    queue_s: float = 60.0
    """How long a request waits in queues, all together."""

    no_worker_s: float = 0.0
    """How long a request waits while there is no worker; 0: not at all."""

    grace_s: float = 5.0
    """What is added to the longest wait when Envoy is told to be patient."""

    @property
    def patience_s(self) -> float:
        """How long Envoy must wait for an answer."""
        return self.queue_s + self.no_worker_s + self.grace_s


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """One request that has had to wait."""

    tenant: str
    priority: int
    queue_left_s: float
    """How long it may still wait in queues."""

    no_worker_left_s: float
    """How long it may still wait for a worker to be there."""

    place: Place | None = None
    """Where it waits; None: it does not."""

    since: float = 0.0
    """When it began to wait there."""

    deadline: float = 0.0
    """When it has waited there long enough."""

    waited_s: float = 0.0
    """How long it has waited so far, at all places."""

    displaced: bool = False
    """Whether another tenant's request has got its place."""

    owner: object = None
    """Of the caller: how to find the request again."""


def priority_of(headers: Mapping[str, str]) -> int:
    """Return the priority that a client asks for; 0 when it does not, or not in a way that can be read."""
    text = headers.get(PRIORITY_HEADER, "").strip()
    if not text.isascii() or not text.removeprefix("-").isdecimal() or len(text) > 4:
        return 0
    value = int(text)
    return value if -MAX_PRIORITY <= value <= MAX_PRIORITY else 0


def tenant_of(headers: Mapping[str, str]) -> str:
    """Return who asks; "" for everybody who says nothing."""
    tenant = headers.get(CLIENT_HEADER) or headers.get(TENANT_HEADER) or ""
    return tenant[:MAX_TENANT_CHARS]


class Pace:
    """How fast something happens, as far as that is known."""

    __slots__ = ("_later", "_mark", "_since", "count")

    def __init__(self) -> None:
        self.count = self._mark = self._later = 0
        """How often it has happened."""
        self._since: tuple[float, float] | None = None

    def look(self, now: float) -> float:
        """Return how many there were per second since about ``PACE_S``, as seen by whoever looks often."""
        if self._since is None:
            self._since = now, now
            self._mark = self._later = self.count
        earlier, later = self._since
        if now - later >= PACE_S:
            # An interval that nobody looked at tells of other times.
            stale = now - later >= 2 * PACE_S
            self._since = (now, now) if stale else (later, now)
            self._mark = self.count if stale else self._later
            self._later = self.count
            earlier, later = self._since
        passed = now - earlier
        return (self.count - self._mark) / passed if passed > 0 else 0.0


class Admission:
    """The counts and the queues."""

    __slots__ = (
        "_busy",
        "_cap",
        "_ends",
        "_limits",
        "_paces",
        "_stirred",
        "admitted",
        "displaced",
        "places",
        "stopping",
        "waiting",
    )

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._cap = self._limits.concurrent
        self.admitted = 0
        """Requests under way: past the gate and not closed."""

        self.waiting: dict[Wait, int] = dict.fromkeys(Wait, 0)
        """Requests that wait, by what for."""

        self.places: dict[Place, FairQueue[Ticket]] = {}
        """Where anybody waits."""

        self.stopping = False
        """Whether nobody may wait any more."""

        self.displaced: list[Ticket] = []
        """Who has had to yield its place to another tenant's request and must be told so now."""

        self._stirred: dict[Place, None] = {}
        self._busy: dict[Pool, int] = {}
        """How many wait in each pool for a worker that has room."""

        self._ends = Pace()
        """Of requests."""

        self._paces: dict[Pool | None, Pace] = {None: self._ends}
        """The same, and those of requests in pools where somebody waits."""

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return self._limits

    def configure(self, limits: Limits) -> None:
        """Use other *limits* from now on; who waits keeps the time that it was given."""
        self._limits = limits
        self._cap = limits.concurrent
        self.stir()

    @property
    def ready(self) -> bool:
        """Whether ``next`` would name anybody."""
        return bool(self._stirred) or (GATE in self.places and self.admitted < self._cap)

    # --- the gate

    def enter(self) -> bool:
        """Let a request pass the gate; False when it must wait there."""
        if self.admitted >= self._cap or (self.places and GATE in self.places):
            return False
        self.admitted += 1
        return True

    def release(self) -> None:
        """Note that a request that had passed the gate is closed."""
        self.admitted -= 1
        self._ends.count += 1

    # --- waiting

    def ticket(self, headers: Mapping[str, str]) -> Ticket:
        """Return the ticket of a request with these *headers*."""
        limits = self._limits
        return Ticket(tenant_of(headers), priority_of(headers), limits.queue_s, limits.no_worker_s)

    def wait(
        self, ticket: Ticket, place: Place, now: float, *, moved: bool = False
    ) -> Refusal | None:
        """Let a request that does not wait begin to, or say why it must not.

        *moved*: it has just waited elsewhere, and is not sent away because others wait here, too.
        """
        if self.stopping:
            return Refusal.NO_WORKER
        match place.kind:
            case Wait.NO_WORKER:
                left = ticket.no_worker_left_s
                if left <= 0:
                    return Refusal.NO_WORKER
            case Wait.LIMIT | Wait.BUSY:
                left = ticket.queue_left_s
                if left <= 0:
                    return Refusal.QUEUE_TIMEOUT
                if not (moved or self._make_room(ticket, place)):
                    return Refusal.QUEUE_FULL
            case _:
                assert_never(place.kind)
        queue = self.places.get(place)
        if queue is None:
            queue = self.places[place] = FairQueue()
        queue.push(ticket)
        ticket.place, ticket.since, ticket.deadline = place, now, now + left
        self.waiting[place.kind] += 1
        if place.kind is Wait.LIMIT:
            self._paces[None].look(now)
        elif place.kind is Wait.BUSY and place.pool is not None:
            self._busy[place.pool] = self._busy.get(place.pool, 0) + 1
            self._paces.setdefault(place.pool, Pace()).look(now)
        return None

    def _make_room(self, ticket: Ticket, place: Place) -> bool:
        """Find room for a newcomer, if need be at the cost of a tenant that has more waiting."""
        if self._crowd(place) < self._limits.queue:
            return True
        queue = self.places.get(place)
        found = None if queue is None else queue.yields_to(ticket.tenant, ticket.priority)
        if found is None:
            return False
        found.displaced = True
        self.displaced.append(found)
        return True

    def leave(self, ticket: Ticket, now: float, *, served: bool = False) -> None:
        """Take a request out of its queue; *served*: it goes on."""
        place = ticket.place
        if place is None:
            return
        ticket.place = None
        waited = max(now - ticket.since, 0.0)
        ticket.waited_s += waited
        if place.kind is Wait.NO_WORKER:
            ticket.no_worker_left_s -= waited
        else:
            ticket.queue_left_s -= waited
        queue = self.places[place]
        queue.remove(ticket, served=served)
        self.waiting[place.kind] -= 1
        if not queue:
            del self.places[place]
            self._stirred.pop(place, None)
        elif (
            served and place in self._stirred
        ):  # the others at this place are next after other places
            del self._stirred[place]
            self._stirred[place] = None
        if place.kind is Wait.BUSY and place.pool is not None:
            self._busy[place.pool] -= 1
            if not self._busy[place.pool]:
                del self._busy[place.pool], self._paces[place.pool]

    def pass_gate(self, ticket: Ticket, now: float) -> None:
        """Let the request whose turn it is at the gate go on."""
        self.leave(ticket, now, served=True)
        self.admitted += 1

    def expired(self, ticket: Ticket) -> Refusal:
        """Say why a request is refused that has waited long enough where it is."""
        place = ticket.place
        if ticket.displaced:
            return Refusal.QUEUE_FULL
        if self.stopping or (place is not None and place.kind is Wait.NO_WORKER):
            return Refusal.NO_WORKER
        return Refusal.QUEUE_TIMEOUT

    def retry_after_s(self, pool: Pool | None, now: float) -> int:
        """Say when a queue that is full now may have moved on, in whole seconds.

        *pool*: None for the gate.
        """
        most = max(1, math.floor(self._limits.queue_s))
        pace = self._paces.get(pool)
        rate = pace.look(now) if pace is not None else 0.0
        if rate <= 0:
            return most
        ahead = self.waiting[Wait.LIMIT] if pool is None else self._busy.get(pool, 0)
        return min(max(1, math.ceil((ahead + 1) / rate)), most)

    # --- waking

    def stir(self) -> None:
        """Note that workers, models or limits may have changed: whoever waits for them looks again."""
        self._stirred.update(dict.fromkeys(place for place in self.places if place is not GATE))

    def on_room(self, worker: Worker) -> None:
        """Note that *worker* has one request less under way."""
        for pool in self._busy:
            if pool.offers(worker):
                self._paces[pool].count += 1
                for place in self.places:
                    if place.pool is pool and pool.offers(worker, place.model):
                        self._stirred[place] = None

    def next(self) -> Ticket | None:
        """Return whose turn it is to try, or None. It stays where it waits until it leaves or is stuck."""
        gate = self.places.get(GATE)
        if gate is not None and self.admitted < self._cap:
            return gate.head()
        heads = [self.places[place].head() for place in islice(self._stirred, MAX_PLACES_COMPARED)]
        # Of equals the one whose place has not had a turn for longest.
        return max(heads, key=lambda head: head.priority, default=None)

    def stuck(self, ticket: Ticket) -> None:
        """Note that there is still nothing for whoever waits where *ticket* does."""
        if ticket.place is not None:
            self._stirred.pop(ticket.place, None)

    def tickets(self) -> list[Ticket]:
        """Return whoever waits."""
        return [ticket for queue in self.places.values() for ticket in queue]

    def _crowd(self, place: Place) -> int:
        if place.kind is Wait.BUSY and place.pool is not None:
            return self._busy.get(place.pool, 0)
        return self.waiting[place.kind]
