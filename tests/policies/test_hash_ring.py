"""The ring: who moves when somebody comes or goes, how even it is, and that routers agree."""

from __future__ import annotations

import collections
import random

import pytest

from policies.base import Worker
from policies.hash_ring import POINTS_PER_NODE, HashRing
from policies.hashing import hash32, hash64
from tests.policies.fleets import fleet

VIRTUAL_NODES = 160
KEYS = [hash32(f"session-{number}") for number in range(100_000)]


def ring_of(workers, virtual_nodes=VIRTUAL_NODES):
    ring = HashRing(virtual_nodes)
    ring.set_members(workers)
    return ring


def owners(ring, keys=KEYS):
    """Return the owner of each key, by URL."""
    walk = ring.walk
    return [next(walk(key)).url for key in keys]


def random_fleet(rng):
    """Return 2 to 50 workers with URLs of some style."""
    count = rng.randint(2, 50)
    style = rng.choice(
        [
            "http://10.0.0.{}:8000",
            "http://10.{0}.0.1:8000",
            "http://vllm-{}.vllm.default.svc.cluster.local:8000",
            "http://host:{}",
            "http://[2001:db8::{:x}]:8000",
        ]
    )
    numbers = rng.sample(range(1, 60_000), count)
    return tuple(Worker(style.format(n), f"10.0.0.1:{n}", order) for order, n in enumerate(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 10, 50])
def test_worker_that_joins_or_leaves_moves_its_share_only(count):
    """At most 1.3/N of 100,000 keys, all of them to or from that worker; and back."""
    workers = fleet(count + 1)
    ring = ring_of(workers[:count])
    before = owners(ring)

    ring.set_members(workers)
    joined = owners(ring)
    ring.set_members(workers[:count])

    moved = [after for old, after in zip(before, joined, strict=True) if old != after]
    assert set(moved) == {workers[count].url}
    assert 0 < len(moved) <= 1.3 / (count + 1) * len(KEYS)
    assert owners(ring) == before

    ring.set_members(workers[1:count])
    left = owners(ring)
    moved = [old for old, after in zip(before, left, strict=True) if old != after]
    assert set(moved) == {workers[0].url}
    assert 0 < len(moved) <= 1.3 / count * len(KEYS)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_even(seed):
    """Within 15 % of the mean by length of arcs, whatever the URLs look like."""
    workers = random_fleet(random.Random(seed))

    shares = arcs(ring_of(workers))

    mean = EVENLY / len(workers)
    assert len(shares) == len(workers)
    assert max(shares.values()) <= 1.15 * mean
    assert min(shares.values()) >= 0.85 * mean


EVENLY = 1 << 15


def arcs(ring):
    """Return how many of evenly spaced places each worker owns: shares without the noise of keys."""
    return collections.Counter(owners(ring, range(0, 1 << 32, (1 << 32) // EVENLY)))


@pytest.mark.slow
def test_keys_follow_the_arcs():
    """100,000 sessions with ids like a counter: within 15 % of the mean on ten workers."""
    got = collections.Counter(owners(ring_of(fleet(10))))

    assert max(got.values()) <= 1.15 * len(KEYS) / 10
    assert min(got.values()) >= 0.85 * len(KEYS) / 10


@pytest.mark.parametrize("seed", range(4))
def test_order_of_joining_makes_no_difference(seed):
    """Routers that saw the same workers come in another order, or some of them leave, agree."""
    rng = random.Random(seed)
    workers = random_fleet(rng)
    other = rng.sample(workers, len(workers))
    other = tuple(Worker(w.url, w.endpoint, order) for order, w in enumerate(other, start=100))
    extra = Worker("http://gone:1", "10.0.0.9:1", 99)
    first, second = HashRing(VIRTUAL_NODES), HashRing(VIRTUAL_NODES)

    first.set_members(workers)
    for count in range(len(other) + 1):
        second.set_members((extra, *other[:count]))
    second.set_members(other)

    assert owners(first, KEYS[:5000]) == owners(second, KEYS[:5000])


@pytest.mark.slow
def test_routers_agree_also_where_two_workers_have_one_position():
    """32 bits are few: of 256,000 positions some collide, and who owns them is not a matter of age."""
    workers = fleet(400)
    reversed_ = tuple(Worker(w.url, w.endpoint, order) for order, w in enumerate(reversed(workers)))
    ours, theirs = (ring_of(members).walk(0) for members in (workers, reversed_))
    differ = sum(a.url != b.url for a, b in zip(ours, theirs, strict=True))

    assert differ == 0


def test_walk_goes_once_round_and_names_everybody():
    """From any place, clockwise; neighbours differ from key to key."""
    workers = fleet(6)
    ring = ring_of(workers, virtual_nodes=8)

    for key in (0, 1, 2**31, 2**32 - 1, *KEYS[:20]):
        walked = list(ring.walk(key))
        assert len(walked) == len(ring) == 6 * 8 * POINTS_PER_NODE
        assert set(walked) == set(workers)


def test_nobody_on_an_empty_ring():
    """Nothing to walk along."""
    ring = HashRing(VIRTUAL_NODES)

    assert list(ring.walk(5)) == []
    ring.set_members(fleet(2))
    ring.set_members(())
    assert list(ring.walk(5)) == []
    assert len(ring) == 0


def test_worker_that_comes_back_gets_its_old_places():
    """It is a new worker to the pool, but its URL is what counts."""
    workers = fleet(4)
    ring = ring_of(workers)
    before = owners(ring, KEYS[:2000])
    again = Worker(workers[2].url, workers[2].endpoint, 77)

    ring.set_members((workers[0], workers[1], workers[3]))
    ring.set_members((workers[0], workers[1], workers[3], again))

    assert owners(ring, KEYS[:2000]) == before
    assert any(worker is again for worker in ring.walk(0))


@pytest.mark.parametrize(("weight", "share"), [(3.0, 0.6), (0.5, 0.2), (1.0, 1 / 3)])
def test_share_follows_the_weight(weight, share):
    """Three workers, one of them of another weight."""
    workers = fleet(3, weights=[1.0, weight, 1.0])

    got = arcs(ring_of(workers))

    assert got[workers[1].url] / EVENLY == pytest.approx(share, rel=0.15)


def test_least_weight_still_has_a_place():
    """Rounded to no virtual node at all, a worker would be a member that nobody can reach."""
    workers = fleet(2, weights=[1.0, 1e-9])

    assert set(ring_of(workers).walk(0)) == set(workers)


def test_hashes_are_the_same_for_ever():
    """In every process and version: sessions would move with an upgrade otherwise."""
    ring = ring_of(fleet(5))
    positions = [int(url[len("http://10.0.0.") : -len(":8000")]) for url in owners(ring, KEYS[:12])]

    assert hash64("session") == 0x24F8_9FA1_8D88_A5B5
    assert hash32("session") == hash64("session") >> 32
    assert hash64("\ud800") != hash64("\ud801")
    assert positions == GOLDEN


GOLDEN = [0, 3, 3, 3, 3, 1, 1, 0, 0, 3, 3, 1]


@pytest.mark.parametrize("others", [0, 20])
def test_worker_whose_weight_changes_gets_its_new_share(others):
    """As a ring that never knew the old weight, whether it is built anew or patched."""
    workers = fleet(1 + others)
    ring = HashRing(40)
    ring.set_members(workers)

    workers[0].weight = 3.0
    ring.set_members(workers)

    fresh = HashRing(40)
    fresh.set_members(workers)
    positions = [number * 2**20 for number in range(4096)]
    assert [ring.owner(at) for at in positions] == [fresh.owner(at) for at in positions]
    assert len(ring) == len(fresh) == 40 * 4 * (3 + others)
