"""One minute of trouble, second by second: how often the server is asked, and what operators see."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable

import pytest

from extproc.discovery.pod_watch import (
    MAX_BACKOFF_S,
    TELL_AFTER,
    Follower,
    List,
    Page,
    RefusedError,
    UnreadableError,
    Wait,
    Watch,
    parse_page,
    parse_refusal,
)

ANSWER_S = 0.01
"""How long the server takes for a list, or to refuse."""

Trouble = Callable[[float], Exception | None]
"""What a request that is sent at a time fails with; None: it works."""


def works(_now: float) -> None:
    """Nothing is wrong."""


def fails(error: Exception, *, begin: float = 0.0, end: float = float("inf")) -> Trouble:
    return lambda now: error if begin <= now < end else None


def page(version: str = "10", more: str = "") -> Page:
    metadata = {"resourceVersion": version, "continue": more}
    return parse_page(json.dumps({"metadata": metadata, "items": []}).encode())


@dataclasses.dataclass
class Run:
    """A follower before a server in trouble."""

    lists: Trouble = works
    watches: Trouble = works
    begun: bool = False
    """Whether a watch that fails is taken up first."""

    lives_s: float = ANSWER_S
    """How long a watch that fails lives."""

    list_interval_s: float = 300.0
    asked: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    failing: list[tuple[float, bool]] = dataclasses.field(default_factory=list)
    """Whether it was failing, whenever that changed."""

    def __post_init__(self) -> None:
        self.follower = Follower(
            list_interval_s=self.list_interval_s, watch_timeout_s=30, rng=random.Random(1)
        )
        self.now = 0.0

    def run(self, until: float) -> Run:
        while self.now < until:
            action = self.follower.next(self.now)
            if isinstance(action, Wait):
                self.now += action.seconds
                continue
            listing = isinstance(action, List)
            self.asked.append((self.now, "list" if listing else f"watch {action.version}"))  # type: ignore[union-attr]
            error = (self.lists if listing else self.watches)(self.now)
            try:
                if isinstance(action, Watch):
                    self._watch(action, error)
                else:
                    self.now += ANSWER_S
                    if error is not None:
                        raise error
                    self.follower.on_page(page(), self.now)
            except (RefusedError, UnreadableError, OSError) as caught:
                self.follower.on_failure(caught, self.now)
            self._note()
        return self

    def _watch(self, action: Watch, error: Exception | None) -> None:
        if error is None or self.begun:
            self.follower.on_begun()
            self._note()
        self.now += action.timeout_s if error is None else self.lives_s
        if error is not None:
            raise error
        self.follower.on_end(self.now)

    def _note(self) -> None:
        if not self.failing or self.failing[-1][1] != self.follower.failing:
            self.failing.append((self.now, self.follower.failing))

    def times(self, what: str) -> list[float]:
        return [time for time, asked in self.asked if asked.startswith(what)]


GONE = parse_refusal(410, b"{}")
KEEPING = [
    RefusedError(403, "forbidden"),
    RefusedError(401, "who?"),
    RefusedError(429, "too many", 1.0),
    RefusedError(500, "etcd"),
    RefusedError(503, ""),
    RefusedError(504, "too large resource version"),
    OSError("refused"),
    TimeoutError(),
]
"""What says nothing about the version."""

DOUBTING = [GONE, RefusedError(400, ""), UnreadableError("")]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("error", [*KEEPING, *DOUBTING], ids=repr)
def test_a_watch_that_fails_for_a_minute_while_lists_work(error: Exception, begun: bool) -> None:
    """The pauses grow although lists work, and the trouble is told once."""
    run = Run(watches=fails(error), begun=begun).run(60)

    allowed = 1 if error in KEEPING else 14
    assert len(run.times("list")) <= allowed
    assert len(run.times("watch")) <= 14
    assert [failing for _, failing in run.failing] == [False, True]
    assert run.failing[-1][0] < 3.0


@pytest.mark.parametrize("error", [*KEEPING, *DOUBTING], ids=repr)
def test_a_watch_that_works_again_ends_the_trouble(error: Exception) -> None:
    """It is taken up after the longest pause at the latest, from a version that is good without a list."""
    run = Run(watches=fails(error, end=60)).run(100)

    (back,) = [time for time, failing in run.failing if time >= 60 and not failing]
    assert back <= 60 + MAX_BACKOFF_S + 1
    if error in KEEPING:
        assert len(run.times("list")) == 1


def test_lists_and_watches_that_fail_are_taken_up_without_another_list() -> None:
    """A server that was away for a moment must not have to list for all routers at once."""
    away = fails(OSError("refused"), begin=40, end=55)
    run = Run(lists=away, watches=away).run(90)

    assert len(run.times("list")) == 1
    assert run.follower.failing is False


def test_a_list_that_is_due_and_fails_does_not_end_a_watch_that_works() -> None:
    """The watch tells the same: it goes on, the list is put off ever longer, and that is told."""
    run = Run(lists=fails(RefusedError(429, ""), begin=200)).run(1500)

    late = [time for time in run.times("watch") if time > 300]
    gaps = [after - before for before, after in itertools.pairwise(late)]
    assert max(gaps) <= 30 + 1
    lists = [time for time in run.times("list") if time > 200]
    assert 4 <= len(lists) <= 10
    assert [failing for _, failing in run.failing] == [False, True]


def test_a_list_that_is_due_and_works_again() -> None:
    """All is well then."""
    run = Run(lists=fails(RefusedError(403, ""), begin=200, end=600)).run(1500)

    assert [failing for _, failing in run.failing] == [False, True, False]
    assert len(run.times("list")) < 12


def test_a_page_of_a_due_list_that_has_expired_puts_off_the_list() -> None:
    """What came before it does not count, and the watch goes on from where it was."""
    follower = Follower(list_interval_s=300, watch_timeout_s=30, rng=random.Random(1))
    follower.next(0)
    follower.on_page(page(), 0)
    assert follower.next(300) == List("")
    follower.on_page(page(version="50", more="t"), 300)
    assert follower.next(300) == List("t")

    follower.on_failure(GONE, 300)

    watch = follower.next(300)
    assert isinstance(watch, Watch)
    assert watch.version == "10"
    assert follower.next(300 + MAX_BACKOFF_S) == List("")


def test_retry_after_of_a_due_list_is_heeded() -> None:
    """Also when it is longer than the pause would be."""
    follower = Follower(list_interval_s=300, watch_timeout_s=30, rng=random.Random(1))
    follower.on_page(page(), 0)
    follower.next(300)
    follower.on_failure(RefusedError(429, "", 100.0), 300)

    assert isinstance(follower.next(399), Watch)
    assert follower.next(400) == List("")


def test_a_connection_that_breaks_now_and_then_alarms_nobody() -> None:
    """A load balancer cuts those that are idle: the watch is begun again at once."""
    run = Run(watches=fails(ConnectionResetError()), begun=True, lives_s=20).run(600)

    assert len(run.times("watch")) >= 600 // 21
    assert [failing for _, failing in run.failing] == [False]
    assert len(run.times("list")) <= 3


def test_two_failures_in_a_row_alarm_nobody() -> None:
    """A server that is renewed is away for a moment."""
    follower = Follower(list_interval_s=300, watch_timeout_s=30, rng=random.Random(1))
    follower.on_page(page(), 0)
    told = []
    for now in range(TELL_AFTER):
        follower.next(now)
        follower.on_failure(OSError(), now)
        told.append(follower.failing)

    assert told == [False, False, True]


@pytest.mark.parametrize("lives_s", [5.0, 35.0])
def test_what_takes_long_to_fail_is_told_at_once(lives_s: float) -> None:
    """A watch that stalls has been deaf for half a minute; it is told until one has worked."""
    run = Run(watches=fails(TimeoutError(), end=100), begun=True, lives_s=lives_s).run(200)

    assert run.failing[1][0] <= lives_s + 1
    assert [failing for _, failing in run.failing] == [False, True, False]
    assert len(run.times("list")) == 1
