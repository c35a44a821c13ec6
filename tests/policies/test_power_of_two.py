"""Power of two choices: nearly as even as the least loaded, at the price of a random one."""

from __future__ import annotations

import collections
import math
import random

import pytest

from policies.power_of_two import PowerOfTwo
from policies.random import Random
from tests.policies.fleets import Fleet, fleet

BALLS = 10_000


def highest_load(policy, bins, balls, get, seed):
    """Throw *balls*, one after the other, and return the highest load above the mean."""
    workers, rng = fleet(bins), random.Random(seed)
    for _ in range(balls):
        policy.pick(get, workers, now=0.0, rng=rng).in_flight += 1
    return max(worker.in_flight for worker in workers) - balls / bins


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_highest_load_of_n_balls_in_n_bins_is_about_log_log_n(get, seed):
    """At most log log n / log 2 + 2 for two choices; one choice has more than half again of that."""
    bound = math.log(math.log(BALLS)) / math.log(2)

    two = highest_load(PowerOfTwo(), BALLS, BALLS, get, seed)
    one = highest_load(Random(), BALLS, BALLS, get, seed)

    assert two + 1 <= bound + 2
    assert one >= two + 2


@pytest.mark.parametrize("bins", [10, 100])
def test_gap_does_not_grow_with_the_number_of_balls(get, bins):
    """10,000 balls in few bins: within log log n / log 2 + 2 of the mean; at random it is dozens."""
    bound = math.log(math.log(bins)) / math.log(2)

    two = highest_load(PowerOfTwo(), bins, BALLS, get, 5)
    one = highest_load(Random(), bins, BALLS, get, 5)

    assert two <= bound + 2
    assert one > 3 * two


def test_more_choices_are_more_even(get):
    """Four of a hundred beat two."""
    assert highest_load(PowerOfTwo(choices=4), 1000, 5000, get, 3) <= highest_load(
        PowerOfTwo(), 1000, 5000, get, 3
    )


@pytest.mark.parametrize("choices", [2, 3, 8])
def test_busiest_of_all_is_never_picked_among_two_or_more(get, choices):
    """It always meets somebody less busy; the idlest wins whenever it is drawn."""
    pool = Fleet(PowerOfTwo(choices=choices), fleet(3))
    for worker, load in zip(pool.members, (0, 5, 9), strict=True):
        worker.in_flight = load

    got = collections.Counter(pool.pick(get).order for _ in range(600))

    assert got[2] == 0
    assert got[0] > got[1]
    assert (got[1] == 0) is (choices >= 3)


@pytest.mark.parametrize("choices", [2, 3])
def test_equal_loads_are_drawn_evenly(get, choices):
    """Within five standard deviations."""
    pool = Fleet(PowerOfTwo(choices=choices), fleet(5))

    got = collections.Counter(pool.pick(get).order for _ in range(2000))

    assert all(abs(number - 400) < 5 * math.sqrt(400 * 0.8) for number in got.values())


def test_two_that_are_drawn_differ(get):
    """With two workers the idle one always gets it: it is always one of the two."""
    pool = Fleet(PowerOfTwo(), fleet(2))
    pool.members[1].in_flight = 1

    assert {pool.pick(get).order for _ in range(200)} == {0}


def test_load_is_per_weight(get):
    """Six requests on a worker of weight three are fewer than three on one of weight one."""
    pool = Fleet(PowerOfTwo(), fleet(2, weights=[3.0, 1.0]))
    pool.members[0].in_flight, pool.members[1].in_flight = 6, 3

    assert {pool.pick(get).order for _ in range(50)} == {0}


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("count", [1, 2, 1024])
def test_ends_of_the_range_are_candidates(get, number, count):
    """The least and the greatest number that a generator makes do not fall outside."""

    class Fixed(random.Random):
        def random(self):
            return number

    workers = fleet(count)

    assert PowerOfTwo().pick(get, workers, now=0.0, rng=Fixed()) in workers


def test_one_choice_is_no_choice():
    """Refused, with the value."""
    with pytest.raises(ValueError, match="choices must be >= 2, got 1"):
        PowerOfTwo(choices=1)
