"""Every change of the registry is committed and passed on."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from extproc.address import WorkerUrl
from extproc.discovery.updates import Remove, Reset, WorkerSpec
from extproc.engine import State
from extproc.errors import WorkerExistsError
from extproc.fleet import GATHER_S, Fleet
from extproc.models import Load, ModelList
from extproc.registry import Change, Registry
from tests.extproc.recorder import Recorder

pytestmark = pytest.mark.looptime

A, B, NAMED = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://w1:8000"
PLACE = ("default", "10.0.0.1:8000")
X = ModelList(frozenset({"x"}))
PASSES = (
    b'{"cluster_name":"default","host":{"socket_address":{"address":"10.0.0.1","port_value":8000}},'
    b'"add_healthy_event":{}}'
)
FAILS = PASSES.replace(b'"add_healthy_event":{}', b'"eject_unhealthy_event":{}')
EJECTS = (
    b'{"cluster_name":"default","upstream_url":"10.0.0.1:8000","action":"EJECT","enforced":true,'
    b'"type":"CONSECUTIVE_5XX"}'
)


def spec(url, **fields):
    return WorkerSpec(WorkerUrl.parse(url), **fields)


class Clock:
    """A clock that stands until it is moved."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    """Make a clock."""
    return Clock()


@pytest.fixture
def fleet(clock):
    """Make a fleet that has no workers."""
    return Fleet(Registry(Recorder), clock)


@pytest.fixture
def changes(fleet):
    """Return the list that the changes of *fleet* are put in."""
    found: list[Change] = []
    fleet.subscribe(found.append)
    return found


def tell(fleet, line):
    """Let Envoy's log say *line*."""
    key = fleet.registry.verdicts.on_line(line)
    fleet.on_verdicts([key])


def test_administrators_change_the_fleet_at_once(fleet, changes, clock):
    """Listeners hear of each change when it has happened."""
    engine = fleet.add(spec(A))
    assert changes.pop() == Change(members=True, clusters=True, states=(engine,))
    assert engine.added_at == clock.now
    assert [worker.url for worker in fleet.registry.pools[0].members] == [A]

    assert fleet.remove(A)
    assert changes.pop() == Change(members=True, clusters=True, removed=(engine,))
    assert not fleet.remove(A)
    assert not fleet.drain(A, 1)
    assert changes == []


def test_worker_that_is_there_is_not_added(fleet, changes):
    """The error is the registry's, and nothing changes."""
    fleet.add(spec(A))
    changes.clear()

    with pytest.raises(WorkerExistsError):
        fleet.add(spec(A))

    assert changes == []


def test_drain_ends_in_time(fleet, changes, clock):
    """At the next tick when nothing is under way, else with its time."""
    engine = fleet.add(spec(A))
    pool = fleet.registry.pools[0]
    lease = pool.acquire(pool.members[0])
    assert fleet.drain(A, 30)
    assert changes[-1].states == (engine,)

    clock.now += 29
    fleet.tick()
    assert fleet.registry.get(A) is engine
    clock.now += 1
    fleet.tick()

    assert fleet.registry.get(A) is None
    assert changes[-1].removed == (engine,)
    lease.release(clock.now)


async def test_time_does_nothing_to_workers_that_wait_for_nothing(fleet, changes, monkeypatch):
    """A tick comes every second, whatever the number of workers."""
    fleet.on_models(fleet.add(spec(A)), X)
    tell(fleet, PASSES)
    await asyncio.sleep(2 * GATHER_S)
    changes.clear()
    commits = []
    monkeypatch.setattr(fleet.registry, "commit", commits.append)

    fleet.tick()

    assert (commits, changes) == ([], [])


def test_time_makes_a_starting_worker_unhealthy(fleet, changes, clock):
    """And a tick without effects is quiet."""
    engine = fleet.add(spec(A))
    changes.clear()
    fleet.tick()
    assert changes == []

    clock.now += 600
    fleet.tick()

    assert changes == [Change(states=(engine,))]
    assert (engine.state, engine.since) == (State.UNHEALTHY, clock.now)


async def test_sources_and_names_change_the_fleet(fleet, changes):
    """An update at once; addresses and reasons, of which many come together, in a moment."""
    fleet.on_update("static", Reset((spec(NAMED),)))
    engine = fleet.registry.get(NAMED)
    assert changes.pop() == Change(members=True, states=(engine,))

    fleet.on_unresolved("w1", "no such name")
    assert changes == []
    await asyncio.sleep(2 * GATHER_S)
    assert changes.pop() == Change(states=(engine,))
    fleet.on_unresolved("w1", "no such name")
    await asyncio.sleep(2 * GATHER_S)
    assert changes == []
    fleet.on_address("w1", "10.0.0.9")
    await asyncio.sleep(2 * GATHER_S)
    assert changes.pop() == Change(members=True, clusters=True, states=(engine,))
    fleet.on_update("static", Remove(NAMED))
    assert changes.pop() == Change(members=True, clusters=True, removed=(engine,))


async def test_verdicts_of_envoy_change_the_fleet_at_once(fleet, changes):
    """A worker that Envoy gives up is no candidate any more when the call returns."""
    engine = fleet.add(spec(A))
    fleet.on_models(engine, X)
    await asyncio.sleep(GATHER_S)

    tell(fleet, PASSES)
    assert [w.url for w in fleet.registry.pools[0].candidates] == [A]
    tell(fleet, FAILS)

    assert fleet.registry.pools[0].candidates == ()
    assert changes[-1] == Change(states=(engine,))


async def test_answers_of_many_workers_are_one_commit(fleet, changes):
    """A thousand workers that answer together do not make a thousand updates."""
    engines = [fleet.add(spec(f"http://10.0.{n}.1:8000")) for n in range(50)]
    changes.clear()

    for engine in engines[:25]:
        fleet.on_models(engine, X)
    await asyncio.sleep(GATHER_S / 2)
    for engine in engines[25:]:
        fleet.on_models(engine, X)
    assert changes == []
    await asyncio.sleep(GATHER_S / 2)
    await asyncio.sleep(0)

    assert [change.members for change in changes] == [True]
    await asyncio.sleep(10 * GATHER_S)
    assert len(changes) == 1
    assert {engine.base_models for engine in engines} == {frozenset({"x"})}


async def test_window_opens_anew_after_a_commit(fleet, changes):
    """What comes later waits for a commit of its own."""
    engine = fleet.add(spec(A))
    changes.clear()
    for name in ("x", "y"):
        fleet.on_models(engine, ModelList(frozenset({name})))
        await asyncio.sleep(2 * GATHER_S)

    assert len(changes) == 2
    assert fleet.registry.model_names() == ["y"]


async def test_commit_in_between_takes_the_waiting_answers_along(fleet, changes):
    """The one that was due then finds nothing to do."""
    engine = fleet.add(spec(A))
    changes.clear()

    fleet.on_models(engine, X)
    fleet.on_update("static", Reset((spec(B),)))
    assert fleet.registry.model_names() == ["x"]
    await asyncio.sleep(2 * GATHER_S)

    assert len(changes) == 1


async def test_loads_are_no_change_unless_they_show_other_ranks(changes, clock):
    """Figures come every few seconds from every worker."""
    fleet = Fleet(Registry(Recorder), clock)
    fleet.subscribe(changes.append)
    engine = fleet.add(spec(A))
    fleet.on_loads(engine, {0: Load(1)}, (0,))
    await asyncio.sleep(2 * GATHER_S)
    changes.clear()

    fleet.on_loads(engine, {0: Load(2)}, (0,))
    await asyncio.sleep(2 * GATHER_S)
    assert changes == []
    assert engine.loads == {0: Load(2)}
    fleet.on_loads(engine, {}, (0, 1))
    await asyncio.sleep(2 * GATHER_S)

    assert [change.members for change in changes] == [True]


# --- waiting


async def test_waiting_ends_when_the_worker_is_healthy(fleet):
    """At once, and at once again when it is."""
    loop = asyncio.get_running_loop()
    engine = fleet.add(spec(A))
    loop.call_later(1, fleet.on_models, engine, X)
    loop.call_later(2, tell, fleet, PASSES)
    begin = loop.time()

    assert await fleet.wait_healthy(engine, 10)
    assert loop.time() - begin == pytest.approx(2)
    assert await fleet.wait_healthy(engine, 10)
    assert loop.time() - begin == pytest.approx(2)


async def test_waiting_ends_with_its_time(fleet):
    """Whatever else happens meanwhile."""
    loop = asyncio.get_running_loop()
    engine = fleet.add(spec(A))
    loop.call_later(1, fleet.add, spec(B))
    begin = loop.time()

    assert not await fleet.wait_healthy(engine, 5)

    assert loop.time() - begin == pytest.approx(5)


async def test_waiting_ends_when_the_worker_is_removed(fleet):
    """It will not be healthy any more, even if one at the same URL is."""
    loop = asyncio.get_running_loop()
    engine = fleet.add(spec(A))
    loop.call_later(1, fleet.remove, A)
    loop.call_later(2, fleet.add, spec(A))
    begin = loop.time()

    assert not await fleet.wait_healthy(engine, 5)
    assert loop.time() - begin == pytest.approx(1)
    assert not await fleet.wait_healthy(engine, 5)


async def test_worker_that_was_healthy_and_is_removed_is_not_waited_for(fleet):
    """Its last state does not count."""
    engine = fleet.add(spec(A))
    fleet.on_models(engine, X)
    tell(fleet, PASSES)
    assert engine.state is State.HEALTHY
    fleet.remove(A)

    assert not await fleet.wait_healthy(engine, 5)


async def test_several_may_wait(fleet):
    """Each for its own worker."""
    loop = asyncio.get_running_loop()
    first, second = fleet.add(spec(A)), fleet.add(spec(B))
    fleet.on_models(first, X)
    loop.call_later(1, tell, fleet, PASSES)
    loop.call_later(2, fleet.remove, B)

    found = await asyncio.gather(
        *(fleet.wait_healthy(engine, 10) for engine in (first, first, second))
    )

    assert found == [True, True, False]


# --- logs


async def test_changes_are_logged(fleet):
    """State changes with their reason, what is bad as a warning; nothing twice."""
    with capture_logs() as entries:
        engine = fleet.add(spec(A))
        fleet.on_models(engine, X)
        tell(fleet, PASSES)
        tell(fleet, EJECTS)
        fleet.commit()
        fleet.remove(A)

    assert [(e["log_level"], e["event"], e.get("reason", "")) for e in entries] == [
        ("info", "worker starting", "its first health check is under way"),
        ("info", "worker healthy", ""),
        ("warning", "worker ejected", entries[2]["reason"]),
        ("info", "worker removed", ""),
    ]
    assert entries[2]["reason"].startswith("errors in a row (5xx); it is tried again at ")
    assert {e["worker"] for e in entries} == {A}


async def test_other_models_are_logged(fleet):
    """Not those of the first answer, and not the same ones again."""
    engine = fleet.add(spec(A))
    with capture_logs() as entries:
        for models in (X, X, None, ModelList(frozenset({"z", "y"}))):
            fleet.on_models(engine, models)

    assert entries == [
        {
            "log_level": "info",
            "event": "worker serves other models",
            "worker": A,
            "models": ["y", "z"],
        }
    ]


async def test_name_that_cannot_be_resolved_is_logged(fleet):
    """And that it can be again."""
    fleet.add(spec(NAMED))
    with capture_logs() as entries:
        fleet.on_unresolved("w1", "no such name")
        fleet.on_unresolved("w1", "")

    assert entries == [
        {
            "log_level": "warning",
            "event": "worker name cannot be resolved",
            "host": "w1",
            "reason": "no such name",
        },
        {"log_level": "info", "event": "worker name can be resolved again", "host": "w1"},
    ]


async def test_what_an_administrator_did_is_saved_before_it_is_answered(fleet):
    """The service may be killed right after the answer."""
    saved = []
    fleet.persist = lambda: saved.append(fleet.registry.memory())

    fleet.add(spec(A))
    assert [known.spec.key for known in saved[-1].engines] == [A]
    fleet.drain(A, 60.0)
    assert saved[-1].engines[0].drain_deadline == fleet.now() + 60.0
    fleet.remove(A)
    assert (len(saved), saved[-1].engines) == (3, ())


async def test_worker_that_another_stands_for_is_not_waited_for(fleet):
    """It becomes healthy only when the other goes; whoever added it should know now."""
    fleet.add(spec(A))
    engine = fleet.add(spec(NAMED))
    fleet.on_address("w1", "10.0.0.1")

    async with asyncio.timeout(1):
        assert not await fleet.wait_healthy(engine, 600.0)
    assert engine.reason == f"it is at the same address as {A}"
