"""Workers by literal address and by name, in virtual time."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing

import pytest

from extproc.address import WorkerUrl
from extproc.discovery import static
from extproc.discovery.static import (
    FIRST_TIMEOUT_S,
    REFRESH_RESOLVED_S,
    RETRY_UNRESOLVED_S,
    TIMEOUT_S,
    watch,
)
from extproc.discovery.updates import Reset, WorkerSpec

pytestmark = pytest.mark.looptime

LITERAL = WorkerUrl.parse("http://10.0.0.5:8000")
NAMED = WorkerUrl.parse("http://worker:8000")


class Names:
    """A resolver whose answers the test sets: an address, an error, or None for silence."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    async def __call__(self, host):
        self.asked.append((host, asyncio.get_running_loop().time()))
        answer = self.answers[host]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Watching:
    """The updates of a watch with the times at which they came, and what it reported."""

    def __init__(self, urls, names, last_known=None):
        self._last_known = last_known
        self.updates = []
        self.reports = []
        self.ended = False
        self._urls = urls
        self._names = names

    async def run(self, seconds):
        """Watch for *seconds* of virtual time."""
        loop = asyncio.get_running_loop()
        report = lambda url, reason: self.reports.append((url, reason))  # noqa: E731
        try:
            async with (
                asyncio.timeout(seconds),
                aclosing(
                    watch(
                        self._urls,
                        report=report,
                        resolver=self._names,
                        last_known=self._last_known,
                    )
                ) as updates,
            ):
                async for update in updates:
                    self.updates.append((loop.time(), update))
                self.ended = True
        except TimeoutError:
            pass


async def at(seconds, function, *arguments):
    await asyncio.sleep(seconds)
    function(*arguments)


def spec(worker, endpoint):
    return WorkerSpec(worker.url, endpoint)


async def test_literal_addresses_come_at_once_and_that_is_all():
    """One reset, in the order given; without names there is nothing to watch for."""
    urls = [
        WorkerUrl.parse(f"http://{host}:80") for host in ("10.0.0.9", "[2001:DB8::1]", "10.0.0.1")
    ]
    watching = Watching(urls, Names())

    await watching.run(1)

    endpoints = ["10.0.0.9:80", "[2001:db8::1]:80", "10.0.0.1:80"]
    specs = tuple(map(spec, urls, endpoints))
    assert watching.updates == [(0, Reset(specs))]
    assert watching.ended


async def test_no_workers_is_an_empty_reset():
    """The pool is told, so that whoever waits for the first update goes on."""
    watching = Watching([], Names())

    await watching.run(1)

    assert watching.updates == [(0, Reset(()))]


async def test_names_that_resolve_are_in_the_first_update():
    """Together with the literal addresses, in the order given."""
    watching = Watching([NAMED, LITERAL], Names(worker="10.0.0.7"))

    await watching.run(1)

    specs = (spec(NAMED, "10.0.0.7:8000"), spec(LITERAL, "10.0.0.5:8000"))
    assert watching.updates == [(0, Reset(specs))]
    assert watching.reports == []


@pytest.mark.parametrize(
    ("answer", "seconds", "reason"),
    [
        (OSError("unknown"), 0, "unknown"),
        (None, FIRST_TIMEOUT_S, "the resolver did not answer in time"),
    ],
    ids=["refused", "silent"],
)
async def test_name_that_does_not_resolve_delays_the_others_for_one_look_up_at_most(
    answer, seconds, reason
):
    """The first update comes without it; the reason is reported."""
    other = WorkerUrl.parse("http://other:1")
    watching = Watching([NAMED, LITERAL, other], Names(worker=answer, other="10.0.0.8"))

    await watching.run(3)

    specs = (spec(LITERAL, "10.0.0.5:8000"), spec(other, "10.0.0.8:1"))
    assert watching.updates == [(seconds, Reset(specs))]
    assert watching.reports[0] == (NAMED.url, reason)


async def test_failing_name_is_tried_again_until_it_resolves():
    """Every two seconds; then it is added, and only looked at now and then."""
    names = Names(worker=OSError("unknown"))
    watching = Watching([NAMED], names)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watching.run(40))
        tasks.create_task(at(5, names.answers.update, {"worker": "10.0.0.7"}))

    assert watching.updates == [(0, Reset(())), (6, Reset((spec(NAMED, "10.0.0.7:8000"),)))]
    assert [time for _, time in names.asked] == [0, 2, 4, 6, 6 + REFRESH_RESOLVED_S]
    assert watching.reports == [(NAMED.url, "unknown")] * 3
    assert RETRY_UNRESOLVED_S == 2


async def test_silent_resolver_is_given_up_and_asked_again():
    """A little longer than the first time, since nobody waits for it."""
    names = Names(worker=None)
    watching = Watching([NAMED], names)

    await watching.run(12)

    assert [time for _, time in names.asked] == [0, 4, 4 + TIMEOUT_S + 2]


async def test_name_that_moves_is_followed():
    """The same worker at another endpoint; an address that stays is not told again."""
    names = Names(worker="10.0.0.7")
    watching = Watching([LITERAL, NAMED], names)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watching.run(70))
        tasks.create_task(at(40, names.answers.update, {"worker": "10.0.0.8"}))

    assert [update for _, update in watching.updates] == [
        Reset((spec(LITERAL, "10.0.0.5:8000"), spec(NAMED, "10.0.0.7:8000"))),
        Reset((spec(LITERAL, "10.0.0.5:8000"), spec(NAMED, "10.0.0.8:8000"))),
    ]
    assert watching.updates[1][0] == 2 * REFRESH_RESOLVED_S


async def test_name_that_fails_later_keeps_its_last_address():
    """A resolver that is away takes no worker away; it is reported and asked again as usual."""
    names = Names(worker="10.0.0.7")
    watching = Watching([NAMED], names)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watching.run(100))
        tasks.create_task(at(10, names.answers.update, {"worker": OSError("away")}))

    assert len(watching.updates) == 1
    assert watching.reports == [(NAMED.url, "away")] * 3
    assert [time for _, time in names.asked] == [0, 30, 60, 90]


async def test_name_that_cannot_be_resolved_after_a_restart_starts_where_it_was():
    """A resolver that is away during a restart takes no worker away; others' places are forgotten."""
    names = Names(worker=OSError("away"))
    last_known = {NAMED.url: "10.0.0.7:8000", "http://gone:1": "10.0.0.9:1"}
    watching = Watching([NAMED], names, last_known)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watching.run(40))
        tasks.create_task(at(5, names.answers.update, {"worker": "10.0.0.8"}))

    assert [update for _, update in watching.updates] == [
        Reset((spec(NAMED, "10.0.0.7:8000"),)),
        Reset((spec(NAMED, "10.0.0.8:8000"),)),
    ]


async def test_one_name_with_two_ports_is_looked_up_once():
    """Two workers on one machine."""
    urls = [WorkerUrl.parse(f"http://worker:{port}") for port in (1, 2)]
    names = Names(worker="10.0.0.7")
    watching = Watching(urls, names)

    await watching.run(1)

    assert watching.updates == [
        (0, Reset((spec(urls[0], "10.0.0.7:1"), spec(urls[1], "10.0.0.7:2"))))
    ]
    assert names.asked == [("worker", 0)]


async def test_fault_of_the_resolver_itself_is_not_hidden():
    """Only what the system says about a name is an answer; a defect ends the watch."""
    watching = Watching([NAMED], Names(worker=RuntimeError("defect")))

    with pytest.raises(RuntimeError, match="defect"):
        await watching.run(1)


@pytest.mark.parametrize(
    ("families", "address"),
    [
        ([socket.AF_INET6, socket.AF_INET], "10.0.0.7"),
        ([socket.AF_INET, socket.AF_INET6], "10.0.0.7"),
        ([socket.AF_INET6], "2001:db8::7"),
    ],
    ids=["IPv6 first", "IPv4 first", "IPv6 only"],
)
async def test_ipv4_is_preferred(monkeypatch, families, address):
    """``localhost`` is often both, and servers of this field listen on IPv4 unless told otherwise."""
    known = {
        socket.AF_INET: ("10.0.0.7", 0),
        socket.AF_INET6: ("2001:db8::7", 0, 0, 0),
    }

    async def getaddrinfo(host, port, **_):
        assert (host, port) == ("worker", None)
        return [(family, socket.SOCK_STREAM, 6, "", known[family]) for family in families]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)

    assert await static.resolve("worker") == address


async def test_of_several_addresses_the_first_is_taken(monkeypatch):
    """The resolver's order counts within a family."""

    async def getaddrinfo(*_, **__):
        return [(socket.AF_INET, 1, 6, "", (f"10.0.0.{n}", 0)) for n in (3, 1, 2)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)

    assert await static.resolve("worker") == "10.0.0.3"
