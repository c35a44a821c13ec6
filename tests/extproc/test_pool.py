"""Workers come and go; leases are counted exactly. The pool is as the registry keeps it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.discovery.updates import Add, Remove, Reset
from extproc.pool import Lease, Pool
from policies.base import Worker
from tests.extproc.recorder import Recorder
from tests.fleets import STATIC, registry_of, remove, reset, spec_of

A, B, C = (spec_of(f"http://10.0.0.{number}:8000") for number in (1, 2, 3))
NEW = spec_of("http://10.0.0.0:8000")


def urls(pool):
    return [worker.url for worker in pool.candidates]


def apply(registry, update):
    registry.apply(STATIC, update, 0.0)
    return registry.commit(0.0).members


def member(pool, spec):
    (found,) = [worker for worker in pool.members if worker.url == spec.key]
    return found


def test_new_pool_has_nobody():
    """No members, no candidates and nothing in flight."""
    pool = Pool("default", Recorder())

    assert (pool.name, pool.members, pool.candidates) == ("default", (), ())
    assert (pool.in_flight, pool.spread) == (0, False)


def test_candidates_stand_in_order_of_joining(registry, pool):
    """A worker that joins later stands behind, whatever its address."""
    apply(registry, Add(NEW))

    assert urls(pool) == [A.key, B.key, C.key, NEW.key]
    assert [worker.order for worker in pool.candidates] == [0, 1, 2, 3]


def test_reset_keeps_workers_that_stay(registry, pool):
    """Who is named again stays the same object with its leases and its place."""
    first, _, third = pool.candidates
    pool.acquire(first)

    assert apply(registry, Reset((C, A, NEW)))

    assert pool.candidates[:2] == (first, third)
    assert urls(pool)[2] == NEW.key
    assert first.in_flight == 1


@pytest.mark.parametrize(
    ("update", "changed", "left"),
    [
        (Reset((A, B, C)), False, [A, B, C]),
        (Reset((C, B, A)), False, [A, B, C]),
        (Reset((B, B)), True, [B]),
        (Reset(()), True, []),
        (Add(B), False, [A, B, C]),
        (Remove(B.key), True, [A, C]),
        (Remove("http://unknown:1"), False, [A, B, C]),
    ],
    ids=["same", "other order", "one twice", "nobody", "known", "removal", "unknown removal"],
)
def test_update_tells_whether_workers_changed(registry, pool, update, changed, left):
    """Envoy is told only of changes, so "unchanged" must be exact."""
    before = pool.members

    assert apply(registry, update) is changed

    assert urls(pool) == [spec.key for spec in left]
    assert (pool.members is before) is not changed


def test_worker_at_another_endpoint_is_a_new_worker():
    """It may be another machine: its count starts at zero, and it joins at the end."""
    registry = registry_of("http://10.0.0.1:8000")
    registry.on_address("b", "10.0.0.2")
    reset(registry, "http://10.0.0.1:8000", "http://b:8000", "http://10.0.0.3:8000")
    pool = registry.pools[0]
    old = member(pool, spec_of("http://b:8000"))
    lease = pool.acquire(old)

    registry.on_address("b", "10.9.9.9")
    assert registry.commit(0.0).members

    new = member(pool, spec_of("http://b:8000"))
    assert new is pool.candidates[-1]
    assert (new.endpoint, new.in_flight, old.in_flight) == ("10.9.9.9:8000", 0, 1)
    assert pool.in_flight == 1
    lease.release(1.0)
    assert (new.in_flight, old.in_flight, pool.in_flight) == (0, 0, 0)


def test_removed_worker_keeps_its_leases(registry, pool):
    """It is no candidate any more; its requests are still counted until they end."""
    worker = pool.candidates[0]
    lease = pool.acquire(worker)

    remove(registry, worker.url)

    assert worker not in pool.members
    assert (worker.in_flight, pool.in_flight) == (1, 1)
    assert lease.release(1.0)
    assert (worker.in_flight, pool.in_flight) == (0, 0)


def test_worker_that_comes_back_still_has_its_requests_under_way(registry, pool):
    """The engine still works on them; to policies it has just joined."""
    old = pool.candidates[0]
    lease = pool.acquire(old)
    apply(registry, Remove(old.url))

    apply(registry, Add(A))

    new = member(pool, A)
    assert (new.in_flight, pool.members[-1]) == (1, new)
    lease.release(1.0)
    assert (new.in_flight, pool.in_flight) == (0, 0)


def test_worker_that_comes_back_idle_is_a_new_one(registry, pool):
    """Nothing of the old one is left."""
    old = pool.candidates[0]
    apply(registry, Remove(old.url))

    apply(registry, Add(A))

    assert member(pool, A) is not old


def test_lease_is_released_once(pool):
    """Only the first call says so and counts."""
    worker = pool.candidates[1]
    lease, other = pool.acquire(worker), pool.acquire(worker)

    assert [lease.release(1.0), lease.release(2.0), lease.release(3.0)] == [True, False, False]

    assert (worker.in_flight, pool.in_flight) == (1, 1)
    assert other.release(4.0)


def test_policy_hears_once_that_a_lease_ended(pool, policy):
    """With the worker and the time of the end, also when the worker is long gone."""
    worker = pool.candidates[1]
    lease = pool.acquire(worker)

    lease.release(1.5)
    lease.release(2.5)

    assert policy.done == [(worker, 1.5)]


class Silent:
    """A policy that wants to hear nothing."""

    name = "silent"
    needs_body = False

    def pick(self, request, workers, *, now, rng):
        return workers[0]


def test_policy_that_observes_nothing_is_not_told(get):
    """``on_sent``, ``on_done`` and ``on_workers`` are optional."""
    pool = Pool("default", Silent())
    worker = Worker("http://a", "10.0.0.1:80", 0)

    pool.set_members((worker,))
    pool.on_sent(worker, get, 0.0)

    assert pool.acquire(worker).release(1.0)


def test_worker_is_found_by_its_endpoint(registry):
    """Its URL while it is a member; the endpoint itself when nobody is there."""
    assert registry.url_of("10.0.0.2:8000") == B.key

    apply(registry, Remove(B.key))

    assert registry.url_of("10.0.0.2:8000") == "10.0.0.2:8000"
    assert registry.url_of("10.0.0.1:8000") == A.key


def test_reader_never_sees_half_an_update(registry, pool):
    """The tuple that a request holds is not changed by a later update."""
    held = pool.candidates

    apply(registry, Reset((NEW,)))

    assert [worker.url for worker in held] == [A.key, B.key, C.key]


class Member(Recorder):
    """Keeps what it hears of members."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def on_workers(self, workers):
        self.heard.append([worker.url for worker in workers])


def test_policy_hears_of_members_at_each_change():
    """Once for each real change, with all members in order; an update that changes nothing is quiet."""
    policy = Member()
    registry = registry_of(A, B, C, policy=policy)

    apply(registry, Add(A))
    apply(registry, Remove(B.key))
    apply(registry, Reset((C,)))

    assert [heard for heard in policy.heard if heard] == [
        [A.key, B.key, C.key],
        [A.key, C.key],
        [C.key],
    ]


def test_candidates_by_name_are_those_that_serve_it(pool):
    """A name that makes no difference has them all; one that nobody can serve now has none."""
    first, second, third = pool.candidates

    pool.set_candidates((first, second, third), {"adapter": (second,), "gone": ()})

    assert pool.candidates_for("adapter") == (second,)
    assert pool.candidates_for("gone") == ()
    assert pool.candidates_for("any") == pool.candidates_for("") == (first, second, third)


@pytest.mark.parametrize(
    ("paths", "spread"), [(("", ""), False), (("/a", "/a"), False), (("", "/a"), True)], ids=str
)
def test_pool_knows_whether_its_workers_are_in_several_clusters(paths, spread):
    """Retries must then stay in the cluster of the first pick."""
    registry = registry_of(*(f"http://10.0.0.{n}{path}" for n, path in enumerate(paths, start=1)))

    assert registry.pools[0].spread is spread


@dataclasses.dataclass
class Model:
    """What a pool must look like after the same events, in the simplest words."""

    endpoints: dict[str, str] = dataclasses.field(default_factory=dict)
    leases: list[tuple[Worker, Lease]] = dataclasses.field(default_factory=list)


NAMES = "abcd"
specs = st.sampled_from(NAMES).map(lambda name: spec_of(f"http://{name}:8000"))
events = st.one_of(
    st.builds(Add, specs),
    st.builds(Remove, st.sampled_from("abcde").map(lambda name: f"http://{name}:8000")),
    st.builds(Reset, st.lists(specs, max_size=4).map(tuple)),
    st.tuples(st.just("move"), st.sampled_from(NAMES), st.integers(0, 2)),
    st.tuples(st.just("acquire"), st.integers(0, 9)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("release again"), st.integers(0, 9)),
)


@pytest.mark.slow
@settings(max_examples=150)
@given(sequence=st.lists(events, max_size=30))
def test_counts_are_exact_after_any_ordering_of_events(sequence):
    """In flight is the number of open leases at every step, and zero when all are released."""
    registry, model, released = registry_of(), Model(), []
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(NAMES)}

    def in_flight():
        return sum(pool.in_flight for pool in (*registry.pools, *registry.retired))

    for event in sequence:
        pool = registry.pools[0]
        before = {worker.url: worker for worker in pool.candidates}
        wanted = set(model.endpoints)
        for name, address in addresses.items():
            registry.on_address(name, address)
        match event:
            case ("acquire", number):
                if pool.candidates:
                    worker = pool.candidates[number % len(pool.candidates)]
                    model.leases.append((worker, pool.acquire(worker)))
            case ("release", number):
                if model.leases:
                    _, lease = model.leases.pop(number % len(model.leases))
                    assert lease.release(1.0)
                    released.append(lease)
            case ("release again", number):
                assert not released or not released[number % len(released)].release(1.0)
            case ("move", name, number):
                addresses[name] = f"10.{number}.0.{NAMES.index(name)}"
                registry.on_address(name, addresses[name])
            case Add(worker):
                wanted.add(worker.key)
                registry.apply(STATIC, event, 0.0)
            case Remove(key):
                wanted.discard(key)
                registry.apply(STATIC, event, 0.0)
            case Reset(workers):
                wanted = {worker.key for worker in workers}
                registry.apply(STATIC, event, 0.0)
        endpoints = {url: f"{addresses[url[7]]}:8000" for url in wanted}
        changed = registry.commit(0.0).members
        assert changed == (endpoints != model.endpoints)
        model.endpoints = endpoints

        assert {w.url: w.endpoint for w in pool.candidates} == model.endpoints
        orders = [worker.order for worker in pool.candidates]
        assert orders == sorted(set(orders))
        for worker in pool.candidates:
            same = before.get(worker.url)
            assert worker is same or same is None or same.endpoint != worker.endpoint
        assert in_flight() == len(model.leases)
        for worker in {*pool.candidates, *(worker for worker, _ in model.leases)}:
            assert worker.in_flight == sum(w is worker for w, _ in model.leases)

    for _, lease in model.leases:
        lease.release(1.0)
    assert in_flight() == 0
    assert all(worker.in_flight == 0 for worker, _ in model.leases)


def test_suspended_worker_is_no_candidate_until_it_is_resumed(registry, pool):
    """It stays a member, for policies that keep its sessions."""
    endpoint = pool.members[0].endpoint

    assert registry.suspend(endpoint, suspended=True)
    assert not registry.suspend(endpoint, suspended=True)
    registry.commit(0.0)
    assert pool.candidates == pool.members[1:]

    assert registry.suspend(endpoint, suspended=False)
    registry.commit(0.0)
    assert pool.candidates == pool.members
    assert not registry.suspend("10.9.9.9:9", suspended=True)


def test_when_all_are_suspended_one_must_be_tried(registry, pool):
    """No request is refused because nobody is trusted."""
    for worker in pool.members:
        registry.suspend(worker.endpoint, suspended=True)
    registry.commit(0.0)

    assert pool.candidates == pool.members


def test_worker_with_another_weight_is_the_same(registry, pool):
    """Requests under way stay counted; policies are told, for they may keep something by weight."""
    before = pool.members[0]

    apply(registry, Reset((dataclasses.replace(A, weight=2.0), B, C)))

    heavy = member(pool, A)
    assert (heavy.weight, heavy is before) == (2.0, True)


def test_pool_knows_whether_any_candidate_has_a_limit(pool):
    """Only then is anybody looked at one by one."""
    assert not pool.limited

    pool.members[1].limit = 3
    pool.look_at_limits()
    assert pool.limited

    pool.set_candidates(pool.members[2:])
    assert not pool.limited


def test_pool_tells_who_is_offered_for_a_model(pool):
    """Candidates only, of the model where it makes a difference."""
    first, second, third = pool.members
    pool.set_candidates((first, second), {"adapter": (second,)})

    assert [pool.offers(worker) for worker in (first, second, third)] == [True, True, False]
    assert [pool.offers(worker, "adapter") for worker in (first, second)] == [False, True]
    assert pool.distinguishes("adapter")
    assert not pool.distinguishes("other")


def test_open_circuits_may_be_those_of_one_model(pool):
    """Or those of all workers."""
    assert not pool.is_tripped("a")

    pool.set_candidates((), {"a": ()}, tripped=frozenset({"a"}))
    assert (pool.is_tripped("a"), pool.is_tripped("b"), pool.is_tripped()) == (True, False, False)

    pool.set_candidates((), tripped=True)
    assert pool.is_tripped("b")
