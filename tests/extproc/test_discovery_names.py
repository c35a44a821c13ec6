"""Names of workers and their addresses, in virtual time with a resolver of the test's."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.discovery.dns import MAX_LOOK_UPS, NO_ANSWER, TIMEOUT_S
from extproc.discovery.names import (
    FIRST_TIMEOUT_S,
    REFRESH_RESOLVED_S,
    RETRY_UNRESOLVED_S,
    Names,
)

pytestmark = pytest.mark.looptime

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
V6, OTHER_V6 = "2001:db8::1", "2001:db8::2"


class Answers:
    """A resolver whose answers the test sets: addresses, an error, or None for silence."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []
        self.most = 0
        self._busy = 0

    async def __call__(self, host):
        self.asked.append((asyncio.get_running_loop().time(), host))
        self._busy += 1
        self.most = max(self.most, self._busy)
        try:
            answer = self.answers[host]
            if answer is None:
                await asyncio.Event().wait()
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self._busy -= 1


class Following:
    """Names with what they told, and when."""

    def __init__(self, resolver):
        self.addresses = []
        self.reports = []
        self.names = Names(self._on_address, self._on_report, resolver=resolver)

    def _on_address(self, host, address):
        self.addresses.append((asyncio.get_running_loop().time(), host, address))

    def _on_report(self, host, reason):
        self.reports.append((asyncio.get_running_loop().time(), host, reason))

    async def run(self, seconds, *events):
        """Follow for *seconds*; *events* are times with what is done then."""
        async with asyncio.TaskGroup() as tasks:
            for event in events:
                tasks.create_task(at(*event))
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.names.run()


async def at(seconds, function, *arguments):
    await asyncio.sleep(seconds)
    function(*arguments)


async def followed(seconds, hosts, resolver, *events):
    following = Following(resolver)
    following.names.want(hosts)
    await following.run(seconds, *events)
    return following


async def test_names_are_looked_up_at_once():
    """Each once, however often it is named; literal addresses need none."""
    answers = Answers(one=[A], two=[B])
    following = await followed(1, ["one", "two", "one", "10.0.0.9", "::1"], answers)

    assert sorted(following.addresses) == [(0, "one", A), (0, "two", B)]
    assert sorted(answers.asked) == [(0, "one"), (0, "two")]
    assert following.reports == []


async def test_hanging_look_up_delays_no_other():
    """It is given up, a little later after the first time, and asked again."""
    answers = Answers(one=None, two=[B])
    following = await followed(20, ["one", "two"], answers)

    assert following.addresses == [(0, "two", B)]
    assert following.reports == [(FIRST_TIMEOUT_S, "one", NO_ANSWER)]
    assert [when for when, host in answers.asked if host == "one"] == [0, 4, 11, 18]
    assert (FIRST_TIMEOUT_S, TIMEOUT_S, RETRY_UNRESOLVED_S) == (2, 5, 2)


async def test_failing_name_is_tried_again_until_it_resolves():
    """Every two seconds; then it is only looked at now and then."""
    answers = Answers(one=OSError("unknown"))
    following = await followed(40, ["one"], answers, (5, answers.answers.update, {"one": [A]}))

    assert following.addresses == [(6, "one", A)]
    assert following.reports == [(0, "one", "unknown"), (6, "one", "")]
    assert [when for when, _ in answers.asked] == [0, 2, 4, 6, 6 + REFRESH_RESOLVED_S]


async def test_name_that_moves_is_followed():
    """An address that stays is not told again."""
    answers = Answers(one=[A])
    following = await followed(100, ["one"], answers, (40, answers.answers.update, {"one": [B]}))

    assert following.addresses == [(0, "one", A), (2 * REFRESH_RESOLVED_S, "one", B)]


@pytest.mark.parametrize("failure", [OSError("away"), [], None, ["169.254.169.254"]], ids=str)
async def test_name_that_fails_later_keeps_its_last_address(failure):
    """A resolver that is away takes no worker away; each reason is told once."""
    answers = Answers(one=[A])
    following = await followed(
        200,
        ["one"],
        answers,
        (10, answers.answers.update, {"one": failure}),
        (130, answers.answers.update, {"one": [A]}),
    )

    assert following.addresses == [(0, "one", A)]
    assert [bool(reason) for _, _, reason in following.reports] == [True, False]


async def test_reasons_that_take_turns_are_told_once_each():
    """No log fills up with them."""
    answers = Answers(one=OSError("x"))
    events = [
        (2 * number + 1, answers.answers.update, {"one": OSError("xy"[number % 2])})
        for number in range(10)
    ]
    following = await followed(60, ["one"], answers, *events)

    assert [reason for _, _, reason in following.reports] == ["x", "y"]


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        ([V6, B, A], B),
        ([A, V6], A),
        ([OTHER_V6, V6], OTHER_V6),
        (["169.254.169.254", "fe80::1%eth0", V6, A], A),
        (["0.0.0.0", V6], V6),
    ],
    ids=str,
)
async def test_first_ipv4_address_is_preferred(addresses, chosen):
    """``localhost`` often has both; where no worker can be is left out."""
    following = await followed(1, ["one"], Answers(one=addresses))

    assert following.addresses == [(0, "one", chosen)]
    assert following.reports == []


async def test_name_with_no_place_for_a_worker_is_unresolved():
    """The address is in the reason."""
    following = await followed(1, ["one"], Answers(one=["169.254.169.254", "fe80::1"]))

    assert following.addresses == []
    [(_, _, reason)] = following.reports
    assert reason.startswith("169.254.169.254 is a link-local")


@given(answers=st.lists(st.permutations([V6, A, B, C]), min_size=1, max_size=6))
async def test_rotated_answers_move_no_worker(answers):
    """It stays where it is while that address is among the answers."""
    script = iter(answers)

    async def rotate(_):
        return next(script, answers[0])

    following = await followed(REFRESH_RESOLVED_S * 8, ["one"], rotate)

    assert len(following.addresses) == 1


async def test_address_that_is_gone_gives_way_to_the_first_left():
    """IPv4 before IPv6 again."""
    answers = Answers(one=[B, A])
    following = await followed(40, ["one"], answers, (1, answers.answers.update, {"one": [V6, A]}))

    assert [address for _, _, address in following.addresses] == [B, A]


async def test_names_can_be_wanted_and_dropped_at_any_time():
    """Before it runs, and while it does."""
    answers = Answers(one=[A], two=[B])
    following = Following(answers)
    want = following.names.want
    want(["none"])
    want(["one"])

    await following.run(
        100, (5, want, ["one", "two"]), (40, want, ["two"]), (70, want, []), (80, want, ["one"])
    )

    assert following.addresses == [(0, "one", A), (5, "two", B), (80, "one", A)]
    assert answers.asked == [
        (0, "one"),
        (5, "two"),
        (30, "one"),
        (35, "two"),
        (65, "two"),
        (80, "one"),
    ]


async def test_nothing_wanted_is_nothing_done():
    """Until there is something."""
    following = await followed(10, [], Answers())

    assert following.addresses == []


async def test_dropped_name_that_is_wanted_again_at_once_is_told_anew():
    """Whoever dropped it has forgotten its address, even if there was no time to notice."""
    following = Following(Answers(one=[A]))

    def drop_and_want():
        following.names.want([])
        following.names.want(["one"])

    following.names.want(["one"])
    await following.run(10, (3, drop_and_want))

    assert following.addresses == [(0, "one", A), (3, "one", A)]


async def test_dropped_name_is_not_told_any_more():
    """Not even by the look-up that ended at that moment."""
    following = None

    async def resolve(_):
        following.names.want([])
        return [A]

    following = Following(resolve)
    following.names.want(["one"])
    await following.run(5)

    assert following.addresses == []
    assert following.reports == []


async def test_names_can_be_wanted_from_within_a_callback():
    """A registry may do so when it learns an address."""
    answers = Answers(one=[A], two=[B])
    following = Following(answers)
    names = Names(
        lambda host, address: (following._on_address(host, address), names.want(["two"])),
        following._on_report,
        resolver=answers,
    )
    following.names = names
    names.want(["one"])

    await following.run(50)

    assert following.addresses == [(0, "one", A), (0, "two", B)]
    assert (30, "one") not in answers.asked


async def test_look_ups_at_the_same_time_are_bounded_and_none_starves():
    """Time counts from when a name is asked for, so waiting for a turn is no failure."""
    silent = {f"s{number:02}": None for number in range(2 * MAX_LOOK_UPS)}
    answers = Answers(**silent, zzz=[A])
    following = await followed(60, [*silent, "zzz"], answers)

    assert answers.most == MAX_LOOK_UPS
    assert following.addresses == [(4, "zzz", A)]
    assert {host for _, host, _ in following.reports} == silent.keys()


async def test_fault_of_the_resolver_itself_is_not_hidden():
    """Only what the system says about a name is an answer; a defect ends it all."""
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="defect"), flatten_subgroups=True):
        await followed(1, ["one"], Answers(one=RuntimeError("defect")))


@given(
    steps=st.lists(
        st.tuples(st.sets(st.sampled_from("abc")), st.sampled_from([0, 0.5, 1, 40])), max_size=8
    )
)
async def test_what_is_wanted_is_known_in_the_end(steps):
    """By someone who forgets what is dropped; and nothing else is."""
    answers = Answers(a=[A], b=[B], c=[C])
    known = {}
    names = Names(known.__setitem__, lambda *_: None, resolver=answers)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(names.run())
        wanted = set()
        for wanted, pause in steps:
            names.want(wanted)
            for host in known.keys() - wanted:
                del known[host]
            await asyncio.sleep(pause)
        await asyncio.sleep(1)
        running.cancel()

    assert known == {host: answers.answers[host][0] for host in wanted}
