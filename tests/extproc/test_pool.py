"""Workers come and go; leases are counted exactly."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.discovery.updates import Add, Remove, Reset, WorkerSpec
from extproc.pool import Lease, Pool
from policies.base import Worker


def spec(name, endpoint=None):
    return WorkerSpec(f"http://{name}:8000", endpoint or f"{name}:8000")


A, B, C = spec("10.0.0.1"), spec("10.0.0.2"), spec("10.0.0.3")


def urls(pool):
    return [worker.url for worker in pool.candidates]


def test_new_pool_has_nobody():
    """No candidates and nothing in flight."""
    pool = Pool("default")

    assert (pool.name, pool.candidates, pool.in_flight) == ("default", (), 0)


def test_candidates_stand_in_order_of_joining(pool):
    """A worker that joins later stands behind, whatever its address."""
    pool.apply(Add(spec("10.0.0.0")))

    assert urls(pool) == [A.url, B.url, C.url, "http://10.0.0.0:8000"]
    assert [worker.order for worker in pool.candidates] == [0, 1, 2, 3]


def test_reset_keeps_workers_that_stay(pool):
    """Who is named again stays the same object with its leases and its place."""
    first, _, third = pool.candidates
    pool.acquire(first)

    assert pool.apply(Reset((C, A, spec("10.0.0.9"))))

    assert pool.candidates[:2] == (first, third)
    assert urls(pool)[2] == "http://10.0.0.9:8000"
    assert first.in_flight == 1


@pytest.mark.parametrize(
    ("update", "changed", "left"),
    [
        (Reset((A, B, C)), False, [A, B, C]),
        (Reset((C, B, A)), False, [A, B, C]),
        (Reset((B, B)), True, [B]),
        (Reset(()), True, []),
        (Add(B), False, [A, B, C]),
        (Remove(B.url), True, [A, C]),
        (Remove("http://unknown:1"), False, [A, B, C]),
    ],
    ids=["same", "other order", "one twice", "nobody", "known", "removal", "unknown removal"],
)
def test_update_tells_whether_workers_changed(pool, update, changed, left):
    """Envoy is told only of changes, so "unchanged" must be exact."""
    before = pool.candidates

    assert pool.apply(update) is changed

    assert urls(pool) == [s.url for s in left]
    assert (pool.candidates is before) is not changed


@pytest.mark.parametrize("by", [Add, lambda moved: Reset((A, moved, C))], ids=["add", "reset"])
def test_worker_at_another_endpoint_is_a_new_worker(pool, by):
    """It may be another machine: its count starts at zero, and it joins at the end."""
    old = pool.get(B.url)
    lease = pool.acquire(old)

    assert pool.apply(by(spec("10.0.0.2", "10.9.9.9:8000")))

    new = pool.get(B.url)
    assert new is pool.candidates[-1]
    assert (new.endpoint, new.in_flight, old.in_flight) == ("10.9.9.9:8000", 0, 1)
    assert pool.in_flight == 1
    lease.release()
    assert (new.in_flight, old.in_flight, pool.in_flight) == (0, 0, 0)


def test_removed_worker_keeps_its_leases(pool):
    """It is no candidate any more; its requests are still counted until they end."""
    worker = pool.candidates[0]
    lease = pool.acquire(worker)

    pool.apply(Remove(worker.url))

    assert pool.get(worker.url) is None
    assert (worker.in_flight, pool.in_flight) == (1, 1)
    assert lease.release()
    assert (worker.in_flight, pool.in_flight) == (0, 0)


def test_worker_that_comes_back_is_a_new_one(pool):
    """Its old requests do not count against it, and their end does not go below zero."""
    old = pool.candidates[0]
    lease = pool.acquire(old)
    pool.apply(Remove(old.url))

    pool.apply(Add(A))

    new = pool.get(A.url)
    assert new is not old
    lease.release()
    assert (new.in_flight, old.in_flight, pool.in_flight) == (0, 0, 0)


def test_lease_is_released_once(pool):
    """Only the first call says so and counts."""
    worker = pool.candidates[1]
    lease, other = pool.acquire(worker), pool.acquire(worker)

    assert [lease.release(), lease.release(), lease.release()] == [True, False, False]

    assert (worker.in_flight, pool.in_flight) == (1, 1)
    assert other.release()


def test_worker_is_found_by_its_endpoint(pool):
    """Its URL while it is a member; the endpoint itself when nobody is there."""
    assert pool.url_of(B.endpoint) == B.url

    pool.apply(Remove(B.url))
    pool.apply(Add(WorkerSpec(A.url, "10.9.9.9:1")))

    assert pool.url_of(B.endpoint) == B.endpoint
    assert (pool.url_of(A.endpoint), pool.url_of("10.9.9.9:1")) == (A.endpoint, A.url)


def test_reader_never_sees_half_an_update(pool):
    """The tuple that a request holds is not changed by a later update."""
    held = pool.candidates

    pool.apply(Reset((spec("10.0.0.9"),)))

    assert [worker.url for worker in held] == [A.url, B.url, C.url]


def test_subscriber_hears_of_members_now_and_at_each_change(pool):
    """Once for each real change, with all members in order; an update that changes nothing is quiet."""
    heard, heard_later = [], []
    pool.subscribe(lambda workers: heard.append([worker.url for worker in workers]))

    pool.apply(Add(A))
    pool.apply(Remove(B.url))
    pool.subscribe(lambda workers: heard_later.append([worker.url for worker in workers]))
    pool.apply(Reset((C,)))

    assert heard == [[A.url, B.url, C.url], [A.url, C.url], [C.url]]
    assert heard_later == [[A.url, C.url], [C.url]]


@dataclasses.dataclass
class Model:
    """What a pool must look like after the same events, in the simplest words."""

    endpoints: dict[str, str] = dataclasses.field(default_factory=dict)
    leases: list[tuple[Worker, Lease]] = dataclasses.field(default_factory=list)


specs = st.builds(
    spec, st.sampled_from("abcd"), st.sampled_from([None, None, "10.1.1.1:1", "10.1.1.2:1"])
)
events = st.one_of(
    st.builds(Add, specs),
    st.builds(Remove, st.sampled_from("abcde").map(lambda name: spec(name).url)),
    st.builds(Reset, st.lists(specs, max_size=4).map(tuple)),
    st.tuples(st.just("acquire"), st.integers(0, 9)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("release again"), st.integers(0, 9)),
)


@pytest.mark.slow
@settings(max_examples=150)
@given(sequence=st.lists(events, max_size=30))
def test_counts_are_exact_after_any_ordering_of_events(sequence):
    """In flight is the number of open leases at every step, and zero when all are released."""
    pool, model, released = Pool("p"), Model(), []
    for event in sequence:
        before = {worker.url: worker for worker in pool.candidates}
        match event:
            case ("acquire", number) if pool.candidates:
                worker = pool.candidates[number % len(pool.candidates)]
                model.leases.append((worker, pool.acquire(worker)))
            case ("release", number) if model.leases:
                _, lease = model.leases.pop(number % len(model.leases))
                assert lease.release()
                released.append(lease)
            case ("release again", number) if released:
                assert not released[number % len(released)].release()
            case Add(worker):
                changed = pool.apply(event)
                assert changed == (model.endpoints.get(worker.url) != worker.endpoint)
                model.endpoints[worker.url] = worker.endpoint
            case Remove(url):
                assert pool.apply(event) == (model.endpoints.pop(url, None) is not None)
            case Reset(workers):
                wanted = {worker.url: worker.endpoint for worker in workers}
                # Named twice at two endpoints, one of them known: whether it "changed" is open.
                if len(wanted) == len(set(workers)):
                    assert pool.apply(event) == (wanted != model.endpoints)
                else:
                    pool.apply(event)
                model.endpoints = wanted

        assert {w.url: w.endpoint for w in pool.candidates} == model.endpoints
        orders = [worker.order for worker in pool.candidates]
        assert orders == sorted(set(orders))
        for worker in pool.candidates:
            same = before.get(worker.url)
            assert worker is same or same is None or same.endpoint != worker.endpoint
            assert pool.get(worker.url) is worker
        assert pool.in_flight == len(model.leases)
        for worker in {*pool.candidates, *(worker for worker, _ in model.leases)}:
            assert worker.in_flight == sum(w is worker for w, _ in model.leases)

    for _, lease in model.leases:
        lease.release()
    assert pool.in_flight == 0
    assert all(worker.in_flight == 0 for worker, _ in model.leases)


def test_suspended_worker_is_no_candidate_until_it_is_resumed(pool, specs):
    """It stays a member, for policies that keep its sessions."""
    pool.apply(Reset(specs))
    endpoint = pool.members[0].endpoint

    assert pool.suspend(endpoint)
    assert not pool.suspend(endpoint)
    assert pool.candidates == pool.members[1:]
    pool.resume(endpoint)
    assert pool.candidates == pool.members
    assert not pool.suspend("10.9.9.9:9")


def test_when_all_are_suspended_one_must_be_tried(pool, specs):
    """No request is refused because nobody is trusted."""
    pool.apply(Reset(specs))

    for worker in pool.members:
        pool.suspend(worker.endpoint)

    assert pool.candidates == pool.members


def test_worker_with_another_weight_is_a_new_one(pool, specs):
    """Policies that keep something by weight see it come and go."""
    pool.apply(Reset(specs))
    before = pool.members[0]

    pool.apply(Reset((dataclasses.replace(specs[0], weight=2.0), *specs[1:])))

    (heavy,) = [worker for worker in pool.members if worker.url == before.url]
    assert (heavy.weight, heavy is before) == (2.0, False)
