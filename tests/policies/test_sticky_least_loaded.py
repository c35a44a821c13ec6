"""Sticky least loaded: sessions are spread by number and stay."""

from __future__ import annotations

import collections

import pytest

from policies.base import Request
from policies.sticky_least_loaded import StickyLeastLoaded
from tests.policies.fleets import Fleet, completion, fleet, named


def pool_of(count, **parameters):
    weights = parameters.pop("weights", None)
    return Fleet(StickyLeastLoaded(**parameters), fleet(count, weights=weights))


def sessions(pool):
    """Return the number of sessions of each worker, in order."""
    kept = collections.Counter(s.worker.order for s in pool.policy._sessions.values())
    assert kept == pool.policy._counts
    return [kept[worker.order] for worker in pool.members]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_new_sessions_are_spread_by_number(count):
    """Never two more on one worker than on another, whatever is in flight."""
    pool = pool_of(count)
    pool.members[0].in_flight = 99
    for number in range(40):
        pool.send(named(f"s{number}"))
        assert max(sessions(pool)) - min(sessions(pool)) <= 1


def test_session_stays_where_it_began():
    """For all its requests, also when others have fewer sessions by then."""
    pool = pool_of(3)
    homes = {f"s{n}": pool.send(named(f"s{n}")) for n in range(9)}
    for session, home in homes.items():
        if home is pool.members[0]:
            pool.policy.finish_session(session)

    for session, home in homes.items():
        if home is not pool.members[0]:
            assert pool.send(named(session)) is home
    assert sessions(pool) == [0, 3, 3]


def test_ties_are_broken_by_chance():
    """The first session does not always go to the same worker."""
    firsts = {
        Fleet(StickyLeastLoaded(), fleet(3), seed=seed).send(named("s")).order for seed in range(40)
    }

    assert firsts == {0, 1, 2}


def test_finished_session_is_forgotten():
    """Once; its place is free for another."""
    pool = pool_of(2)
    home = pool.send(named("a"))
    pool.send(named("b"))

    assert pool.policy.finish_session("a")
    assert not pool.policy.finish_session("a")
    assert not pool.policy.finish_session("never seen")
    assert pool.send(named("c")) is home
    assert sessions(pool) == [1, 1]


def test_session_ends_after_its_time_without_a_request():
    """Each request begins the time anew; one that is exactly so old has ended."""
    pool = pool_of(2, ttl_s=100)
    home = pool.send(named("a"))
    pool.now += 99
    assert pool.send(named("a")) is home
    pool.now += 99
    assert pool.pick(named("a")) is home
    pool.now += 1

    pool.send(named("other"))

    assert list(pool.policy._sessions) == ["other"]
    assert sum(sessions(pool)) == 1


def test_session_in_use_does_not_keep_idle_ones_alive():
    """They end in the order of their last requests, not of their first."""
    pool = pool_of(2, ttl_s=100)
    for session, after in (("a", 10), ("b", 80), ("a", 30)):
        pool.send(named(session))
        pool.now += after

    pool.send(named("c"))

    assert list(pool.policy._sessions) == ["a", "c"]


def test_default_time_is_two_hours():
    """As in vLLM Router."""
    assert StickyLeastLoaded().ttl_s == 7200


def test_sessions_past_their_time_do_not_count():
    """The first new session after a quiet time already goes by what is left."""
    pool = pool_of(2, ttl_s=100)
    for number in range(5):
        pool.send(named(f"old{number}"), to=pool.members[0])
    pool.now += 60
    pool.send(named("live"), to=pool.members[1])
    pool.now += 60

    assert pool.pick(named("new")) is pool.members[0]


def test_session_of_an_unavailable_worker_moves_and_stays():
    """It does not go back: its cache is at the new place."""
    pool = pool_of(3)
    home = pool.send(named("a"))
    pool.send(named("b"))

    moved = pool.send(named("a"), without=(home,))

    assert moved is not home
    assert pool.send(named("a")) is moved
    assert sum(sessions(pool)) == 2


def test_asking_for_fallbacks_moves_nothing():
    """Only what is sent counts."""
    pool = pool_of(3)
    home = pool.send(named("a"))

    pool.pick(named("a"), without=(home,))
    pool.pick(named("unknown"))

    assert pool.pick(named("a")) is home
    assert sum(sessions(pool)) == 1


def test_sessions_of_a_worker_that_leaves_end():
    """Everybody else's stay; a worker under the same URL begins anew."""
    pool = pool_of(3)
    homes = {f"s{n}": pool.send(named(f"s{n}")) for n in range(9)}
    gone = pool.members[1]

    pool.become([w for w in pool.members if w is not gone])

    assert sorted(pool.policy._counts) == [0, 2]
    for session, home in homes.items():
        if home is not gone:
            assert pool.send(named(session)) is home
    (again,) = fleet(1, first=7)
    again.url = gone.url
    pool.become([*pool.members, again])
    assert pool.send(named("new")) is again


def test_request_without_session_goes_to_the_fewest_and_is_not_kept():
    """The opening of its prompt is no id."""
    pool = pool_of(2)
    pool.send(named("a"), to=pool.members[0])

    for request in (completion("hello"), Request("GET", "/", {}, b"")):
        for _ in range(3):
            assert pool.send(request) is pool.members[1]
    assert sessions(pool) == [1, 0]


def test_session_may_be_named_in_the_body():
    """The same id by header or body is one session."""
    pool = pool_of(4)
    home = pool.send(named("a"))
    pool.send(named("b"))

    assert pool.send(completion("x", session_params={"session_id": "a"})) is home
    assert pool.send(completion("y", user="a")) is home
    assert sum(sessions(pool)) == 2


def test_fewest_sessions_is_per_weight():
    """A worker of weight three keeps three times as many."""
    pool = pool_of(2, weights=[1.0, 3.0])

    for number in range(40):
        pool.send(named(f"s{number}"))

    assert sessions(pool) == [10, 30]


def test_body_is_asked_for_only_when_no_header_names_the_session():
    """As for the hashing policies."""
    policy = StickyLeastLoaded(session_headers=("x-chat",))

    assert not policy.wants_body({"x-chat": "1"})
    assert not policy.wants_body({"x-session-id": "1"})
    assert policy.wants_body({})


def test_ttl_must_be_positive():
    """Refused, with the value."""
    with pytest.raises(ValueError, match="ttl_s must be > 0, got 0"):
        StickyLeastLoaded(ttl_s=0)


def test_sessions_are_bounded():
    """Beyond the bound the least recently used session ends."""
    pool = Fleet(StickyLeastLoaded(max_sessions=2), fleet(2))
    for session in ("a", "b", "a", "c"):
        pool.send(named(session))

    assert [pool.policy.finish_session(session) for session in ("a", "b", "c")] == [
        True,
        False,
        True,
    ]
