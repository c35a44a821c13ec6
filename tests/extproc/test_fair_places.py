"""Places of which one address gets a quarter."""

from __future__ import annotations

import asyncio

import pytest

from extproc.fair_places import FairPlaces, holder_of


@pytest.mark.looptime
async def test_one_address_has_a_quarter_at_once_and_the_others_wait_for_nothing():
    """Two of eight for the first, though all others are free."""
    places = FairPlaces(8, 80)
    started = asyncio.get_running_loop().time()
    done = []

    async def look_up(holder):
        assert places.enter(holder)
        try:
            async with places.place(holder):
                await asyncio.sleep(1)
        finally:
            places.leave(holder)
        done.append((holder, round(asyncio.get_running_loop().time() - started)))

    async with asyncio.TaskGroup() as tasks:
        for holder in ["a"] * 5 + ["b"] * 2:
            tasks.create_task(look_up(holder))

    assert sorted(done) == [("a", 1), ("a", 1), ("a", 2), ("a", 2), ("a", 3), ("b", 1), ("b", 1)]


@pytest.mark.looptime
async def test_no_more_than_all_places_are_taken_by_many_addresses():
    """Eight, by whomever."""
    places = FairPlaces(8, 80)
    now = most = 0

    async def look_up(holder):
        nonlocal now, most
        assert places.enter(holder)
        async with places.place(holder):
            now += 1
            most = max(most, now)
            await asyncio.sleep(1)
            now -= 1
        places.leave(holder)

    async with asyncio.TaskGroup() as tasks:
        for number in range(40):
            tasks.create_task(look_up(f"{number % 10}"))

    assert most == 8


def test_room_ends_for_one_address_at_a_quarter_and_for_all_at_the_whole():
    """And begins anew with what is given back."""
    places = FairPlaces(8, 16)

    first = [places.enter("a") for _ in range(6)]
    others = [places.enter(f"b{number}") for number in range(13)]
    places.leave("a")
    again = [places.enter("a"), places.enter("a")]

    assert first == [True] * 4 + [False] * 2
    assert others == [True] * 12 + [False]
    assert again == [True, False]


@pytest.mark.parametrize(
    ("address", "holder"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("", ""),
        ("no address", ""),
    ],
)
def test_holder(address, holder):
    """One for each IPv4 address and each IPv6 network."""
    assert holder_of(address) == holder
