"""Workers behind one name, in virtual time with a resolver of the test's; the system's in real time."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import aclosing, suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.address import WorkerUrl
from extproc.discovery.dns import NO_ANSWER, TIMEOUT_S, SystemResolver, look_up, resolve_all, watch
from extproc.discovery.updates import Reset

A, B, C, D = (f"10.0.0.{number}" for number in (1, 2, 3, 4))
NO_ADDRESS = socket.gaierror(socket.EAI_NODATA, "No address associated with hostname")


class Script:
    """A resolver that gives one answer after the other; the last one stays. None is silence."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def __call__(self, host):
        self.asked.append((host, asyncio.get_running_loop().time()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Watching:
    """The updates of a watch and its reports, with the times at which they came."""

    def __init__(self, url, resolver):
        self.updates = []
        self.reports = []
        self.ended = False
        self._url = WorkerUrl.parse(url)
        self._resolver = resolver

    async def run(self, seconds):
        """Watch for *seconds*."""
        loop = asyncio.get_running_loop()
        start = loop.time()

        def report(reason):
            self.reports.append((loop.time() - start, reason))

        with suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds),
                aclosing(watch(self._url, report=report, resolver=self._resolver)) as updates,
            ):
                async for update in updates:
                    assert isinstance(update, Reset)
                    self.updates.append((loop.time() - start, update.workers))
                self.ended = True

    @property
    def hosts(self):
        """When there were which hosts."""
        return [(time, [spec.url.host for spec in specs]) for time, specs in self.updates]


async def watched(seconds, *answers, url="http://workers:8000"):
    watching = Watching(url, Script(*answers))
    await watching.run(seconds)
    return watching


@pytest.mark.looptime
class TestWatch:
    """What a watch says, and when."""

    async def test_each_address_is_a_worker(self):
        """IPv4 and IPv6, sorted, with the port, the path and the rank of the URL."""
        watching = await watched(
            1, [B, "2001:DB8:0::1", A, B], url="http://workers.default.svc:8000/llama@3"
        )

        [(when, specs)] = watching.updates
        assert when == 0
        assert [spec.key for spec in specs] == [
            "http://10.0.0.1:8000/llama@3",
            "http://10.0.0.2:8000/llama@3",
            "http://[2001:db8::1]:8000/llama@3",
        ]
        assert [spec.tls_name for spec in specs] == [""] * 3
        assert watching.reports == []

    @pytest.mark.parametrize("host", ["workers.example", "Workers.Example."])
    async def test_https_worker_must_carry_the_name(self, host):
        """Its certificate is for the name, not for the address."""
        watching = await watched(1, [A], url=f"https://{host}")

        [(_, [spec])] = watching.updates
        assert (spec.key, spec.tls_name) == ("https://10.0.0.1", "workers.example")

    @pytest.mark.parametrize(
        "url", ["http://10.0.0.5:8000", "https://[2001:db8::1]:8000/llama", "http://10.0.0.5@1"]
    )
    async def test_address_is_one_worker_and_nothing_is_asked(self, url):
        """That is all there will be."""
        watching = await watched(1, RuntimeError("asked"), url=url)

        [(when, [spec])] = watching.updates
        assert (when, spec.key, spec.tls_name) == (0, url, "")
        assert watching.ended

    async def test_new_address_is_added_at_once(self):
        """At the next look-up, every five seconds."""
        watching = await watched(11, [A], [A], [B, A])

        assert watching.hosts == [(0, [A]), (10, [A, B])]

    async def test_address_must_be_missing_twice_to_be_dropped(self):
        """An answer may be cut short."""
        watching = await watched(
            60, [A, B, C], [A, B], [C], [A, B, C], [A, B], [A, B, C], [A, B], [A]
        )

        # C is missing from the 5th, there again, missing from the 7th and the 8th; B from then on
        assert watching.hosts == [(0, [A, B, C]), (35, [A, B]), (40, [A])]

    async def test_all_addresses_replaced_are_both_for_one_look_up(self):
        """As when a set of Pods is recreated."""
        watching = await watched(60, [A, B], [C, D])

        assert watching.hosts == [(0, [A, B]), (5, [A, B, C, D]), (10, [C, D])]

    @given(
        answers=st.lists(
            st.permutations([A, B, C, "2001:db8::1"]).flatmap(
                lambda order: st.sampled_from([order, order * 2])
            ),
            min_size=1,
            max_size=8,
        )
    )
    async def test_rotated_answers_are_no_update(self, answers):
        """Nor are addresses that are given twice."""
        watching = await watched(60, *answers)

        assert len(watching.updates) == 1
        assert watching.reports == []

    @given(answers=st.lists(st.sets(st.sampled_from([A, B, C]), min_size=1), min_size=1))
    async def test_no_address_flaps(self, answers):
        """What is there was in one of the last two answers, and what was in the last is there."""
        watching = Watching("http://workers:8000", Script(*(list(answer) for answer in answers)))
        await watching.run(5 * len(answers) - 1)

        told = dict(watching.hosts)
        current, before = set(), set()
        for number, answer in enumerate(answers):
            current = set(told.get(5 * number, current))
            assert answer <= current <= answer | before
            before = answer
        sets = [frozenset(hosts) for _, hosts in watching.hosts]
        assert all(one != other for one, other in pairwise(sets))

    @pytest.mark.parametrize(
        ("failure", "delay", "reason"),
        [
            (OSError("broken"), 0, "broken"),
            (OSError(), 0, "OSError"),
            (NO_ADDRESS, 0, "No address associated with hostname"),
            (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), 0, "Name or service"),
            ([], 0, "the name has no address"),
            (None, TIMEOUT_S, NO_ANSWER),
            (["169.254.169.254"], 0, "169.254.169.254 is a link-local"),
        ],
        ids=str,
    )
    async def test_failure_keeps_the_last_workers(self, failure, delay, reason):
        """It is told once, and once that it is over."""
        watching = await watched(60, [A], failure, failure, [A, B], [B], failure, [B])

        assert [hosts for _, hosts in watching.hosts] == [[A], [A, B], [B]]
        times = [when for when, _ in watching.reports]
        assert times == [5 + delay, 15 + 2 * delay, 25 + 3 * delay, 30 + 3 * delay]
        assert [bool(text) for _, text in watching.reports] == [True, False, True, False]
        assert watching.reports[0][1].startswith(reason)

    async def test_failures_do_not_count_as_misses(self):
        """Only an answer says that an address is gone."""
        watching = await watched(60, [A, B], [A], OSError("x"), OSError("x"), [A, B])

        assert watching.hosts == [(0, [A, B])]

    async def test_nothing_is_said_until_there_is_an_answer(self):
        """Each reason is told once, however they take turns."""
        watching = await watched(26, OSError("x"), OSError("y"), OSError("x"), OSError("y"), [A])

        assert watching.hosts == [(20, [A])]
        assert watching.reports == [(0, "x"), (5, "y"), (20, "")]

    async def test_address_where_no_worker_can_be_is_dropped(self):
        """The others are used."""
        watching = await watched(60, [A, "fe80::1%eth0", "0.0.0.0"], ["224.0.0.1", B, A], [A, B])

        assert watching.hosts == [(0, [A]), (5, [A, B])]
        assert [(when, reason.split()[0]) for when, reason in watching.reports[:-1]] == [
            (0, "fe80::1%eth0"),
            (0, "0.0.0.0"),
            (5, "224.0.0.1"),
        ]
        assert watching.reports[-1] == (10, "")

    async def test_fault_of_the_resolver_itself_is_not_hidden(self):
        """Only what the system says about a name is an answer; a defect ends the watch."""
        with pytest.raises(RuntimeError, match="defect"):
            await watched(1, RuntimeError("defect"))


class System:
    """Stands in for ``socket.getaddrinfo``, which runs in a thread; a host waits until it is let go."""

    def __init__(self, monkeypatch, **answers):
        self.answers = answers
        self.asked = []
        self.held = {}
        self.most = 0
        self._busy = 0
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def hold(self, *hosts):
        self.held |= {host: threading.Event() for host in hosts}

    def __call__(self, host, port, *, type):  # noqa: A002
        assert (port, type) == (None, socket.SOCK_STREAM)
        self.asked.append(host)
        self._busy += 1
        self.most = max(self.most, self._busy)
        if host in self.held:
            assert self.held[host].wait(5)
        self._busy -= 1
        answer = self.answers.get(host, [A])
        if isinstance(answer, Exception):
            raise answer
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in answer]
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, 0))
            for family, address in zip(families, answer, strict=True)
        ]


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what happens in a thread is polled
            await asyncio.sleep(0.001)


async def test_system_is_asked_for_all_addresses(monkeypatch):
    """In its order, each once."""
    System(monkeypatch, worker=["2001:db8::1", B, A, B])

    assert await SystemResolver()("worker") == ("2001:db8::1", B, A)


async def test_system_resolver_knows_this_machine():
    """For real; a literal address is its own."""
    assert set(await resolve_all("localhost")) <= {"127.0.0.1", "::1"}
    assert await resolve_all("127.0.0.1") == ("127.0.0.1",)


@pytest.mark.parametrize("fault", [NO_ADDRESS, ValueError("defect")])
async def test_fault_in_the_thread_is_for_who_asked(monkeypatch, fault):
    """The next one is served by the same thread."""
    System(monkeypatch, bad=fault)
    resolver = SystemResolver(1)

    with pytest.raises(type(fault)):
        await resolver("bad")
    assert await resolver("good") == (A,)


async def test_hanging_look_up_delays_no_other_and_is_not_repeated(monkeypatch):
    """Who asks again waits for the one under way, and gets its answer."""
    system = System(monkeypatch)
    system.hold("slow")
    resolver = SystemResolver(2)

    with pytest.raises(OSError, match=NO_ANSWER):
        await look_up(resolver, "slow", 0.01)
    async with asyncio.TaskGroup() as tasks:
        again = [tasks.create_task(resolver("slow")) for _ in range(2)]
        assert await resolver("fast") == (A,)
        system.held["slow"].set()

    assert [task.result() for task in again] == [(A,)] * 2
    assert system.asked == ["slow", "fast"]


async def test_look_ups_at_the_same_time_are_bounded(monkeypatch):
    """The others wait their turn."""
    system = System(monkeypatch)
    hosts = [f"w{number}" for number in range(20)]
    system.hold(*hosts)
    resolver = SystemResolver(3)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(resolver(host)) for host in hosts]
        await until(lambda: len(system.asked) == 3)
        await asyncio.sleep(0.01)
        for event in system.held.values():
            event.set()

    assert [task.result() for task in asked] == [(A,)] * 20
    assert system.most == 3


async def test_look_up_that_nobody_waits_for_any_more_is_not_begun(monkeypatch):
    """Unless it is wanted again before its turn."""
    system = System(monkeypatch)
    system.hold("slow")
    resolver = SystemResolver(1)

    async with asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(resolver("slow"))
        await until(lambda: system.asked)
        for host in ("dropped", "again"):
            with pytest.raises(OSError, match=NO_ANSWER):
                await look_up(resolver, host, 0.001)
        again = tasks.create_task(resolver("again"))
        await asyncio.sleep(0)
        system.held["slow"].set()

    assert (slow.result(), again.result()) == ((A,), (A,))
    assert system.asked == ["slow", "again"]
    assert await resolver("dropped") == (A,)


def test_end_of_the_loop_waits_for_no_look_up(monkeypatch):
    """Nor does the answer that comes after it do any harm."""
    system = System(monkeypatch)
    system.hold("slow")
    resolver = SystemResolver()
    start = time.monotonic()

    with pytest.raises(OSError, match=NO_ANSWER):
        asyncio.run(look_up(resolver, "slow", 0.01))

    assert time.monotonic() - start < 2
    system.held["slow"].set()
    assert asyncio.run(resolver("slow")) == (A,)
