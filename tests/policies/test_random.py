"""Random: everybody with the same probability."""

from __future__ import annotations

import collections
import random

import pytest

from policies.base import Worker
from policies.random import Random


def fleet(count):
    return tuple(
        Worker(url=f"http://w{n}", endpoint=f"10.0.0.{n}:80", order=n) for n in range(count)
    )


class Fixed(random.Random):
    """Always the same number."""

    def __init__(self, number):
        super().__init__(0)
        self.number = number

    def random(self):
        return self.number


@pytest.mark.parametrize("count", [2, 3, 7, 16])
@pytest.mark.parametrize("load", [0, 50])
def test_everybody_gets_the_same_share(get, rng, count, load):
    """Within five standard deviations of n/k, however busy the first one is."""
    workers = fleet(count)
    workers[0].in_flight = load
    draws = 4000
    policy = Random()

    got = collections.Counter(
        policy.pick(get, workers, now=0.0, rng=rng).order for _ in range(draws)
    )

    share = draws / count
    margin = 5 * (share * (1 - 1 / count)) ** 0.5
    assert sorted(got) == [*range(count)]
    assert all(abs(number - share) < margin for number in got.values())


def test_pairs_in_a_row_are_uniform_too(get, rng):
    """Independent picks: each of the nine pairs comes as often as any other."""
    policy, workers, draws = Random(), fleet(3), 6000
    picks = [policy.pick(get, workers, now=0.0, rng=rng).order for _ in range(draws)]

    pairs = collections.Counter(zip(picks[::2], picks[1::2], strict=True))

    share = draws / 2 / 9
    assert len(pairs) == 9
    assert all(abs(number - share) < 5 * share**0.5 for number in pairs.values())


@pytest.mark.parametrize(("number", "order"), [(0.0, 0), (0.3334, 1), (0.999_999_999_999, 2)])
def test_ends_of_the_range_are_candidates(get, number, order):
    """The least and the greatest number that a generator makes do not fall outside."""
    assert Random().pick(get, fleet(3), now=0.0, rng=Fixed(number)).order == order


def test_greatest_number_with_many_workers_is_the_last(get):
    """Rounding does not lead beyond the end."""
    assert Random().pick(get, fleet(1024), now=0.0, rng=Fixed(1 - 2**-53)).order == 1023


def test_one_number_a_pick(get):
    """A pick draws once, so picks can be replayed from a seed."""
    used, reference = random.Random(4), random.Random(4)
    reference.random()

    Random().pick(get, fleet(5), now=0.0, rng=used)

    assert used.getstate() == reference.getstate()


def test_shares_follow_the_weights(get, rng):
    """A worker of weight 3 gets three times what one of weight 1 gets."""
    workers = fleet(3)
    workers[1].weight = 3.0
    policy, draws = Random(), 5000
    policy.on_workers(workers)

    got = collections.Counter(
        policy.pick(get, workers, now=0.0, rng=rng).order for _ in range(draws)
    )

    expected = {0: draws / 5, 1: 3 * draws / 5, 2: draws / 5}
    assert all(abs(got[order] - share) < 5 * share**0.5 for order, share in expected.items())
