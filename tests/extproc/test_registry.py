"""Who the workers are, who of them may be picked, and what Envoy must know."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from extproc.address import WorkerUrl
from extproc.clusters import (
    LINGER_S,
    MAX_POOL_NAME_CHARS,
    RESERVED_NAMES,
    ClusterView,
    EndpointView,
    cluster_name,
    pool_name,
)
from extproc.discovery.updates import Add, Remove, Reset, WorkerSpec, WorkerType
from extproc.engine import PICKABLE, Memory, State
from extproc.errors import WorkerExistsError
from extproc.models import Load, ModelList
from extproc.registry import ADMIN_SOURCE, Change, Registry, Settings
from extproc.verdicts import UNKNOWN
from policies.base import Request, Worker

A, B, C, D = (f"http://10.0.0.{n}:8000" for n in (1, 2, 3, 4))
NAMED = "http://w1:8000"
NOW = 1000.0
MEMBERS = Change(members=True)


@dataclasses.dataclass(slots=True)
class Watching:
    """A policy that keeps what it was told."""

    name: ClassVar[str] = "watching"
    needs_body: ClassVar[bool] = False
    members: list[list[str]] = dataclasses.field(default_factory=list)
    done: list[str] = dataclasses.field(default_factory=list)

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        return workers[0]

    def on_workers(self, workers: Sequence[Worker]) -> None:
        self.members.append([worker.url for worker in workers])

    def on_sent(self, worker: Worker, request: Request, now: float) -> None:
        """Nothing is kept."""

    def on_done(self, worker: Worker, now: float) -> None:
        self.done.append(worker.url)


def spec(url, **fields):
    return WorkerSpec(WorkerUrl.parse(url), **fields)


def specs(*urls):
    return tuple(spec(url) for url in urls)


def host(endpoint):
    address, port = endpoint.rsplit(":", 1)
    return {"socket_address": {"address": address.strip("[]"), "port_value": int(port)}}


class World:
    """A registry, and the verbs of those who tell it things."""

    def __init__(self, *urls, **settings):
        self.registry = Registry(Watching, Settings(**settings))
        self.now = NOW
        if urls:
            self.name(*urls)

    def name(self, *urls, source="static"):
        """Let *source* name these workers, and no others."""
        self.registry.apply(source, Reset(specs(*urls)), self.now)
        return self.commit()

    def commit(self):
        return self.registry.commit(self.now)

    def __getitem__(self, key):
        engine = self.registry.get(key)
        assert engine is not None
        return engine

    def tell(self, key, **event):
        """Let Envoy's log say something of a worker."""
        engine = self[key]
        line = {"cluster_name": engine.cluster, **event}
        if "action" in event:
            line["upstream_url"] = engine.endpoint
        else:
            line["host"] = host(engine.endpoint)
        self.say(line)

    def say(self, line):
        changed = self.registry.verdicts.on_line(msgspec.json.encode(line))
        if changed is not None:
            self.registry.on_events([changed])

    def passes(self, *keys):
        for key in keys:
            self.tell(key, add_healthy_event={"first_check": True})
        self.commit()

    def passes_in(self, cluster, key):
        """Let Envoy find a worker healthy in a cluster that it is to move to."""
        endpoint = self[key].endpoint
        self.say(
            {
                "cluster_name": cluster,
                "host": host(endpoint),
                "add_healthy_event": {"first_check": True},
            }
        )
        self.commit()

    def fails(self, *keys):
        for key in keys:
            self.tell(key, eject_unhealthy_event={"http_status_code": 500})
        self.commit()

    def ejects(self, *keys):
        for key in keys:
            self.tell(key, action="EJECT", enforced=True, type="CONSECUTIVE_5XX")
        self.commit()

    def unejects(self, *keys):
        for key in keys:
            self.tell(key, action="UNEJECT")
        self.commit()

    def learn(self, key, *base, adapters=()):
        """Let a worker say what it serves; nothing: it says nothing."""
        said = ModelList(frozenset(base), frozenset(adapters)) if base else None
        self.registry.on_models(self[key], said)
        self.commit()

    def serve(self, **models):
        """Let workers that are there be healthy and serve these models: ``a="x y"``."""
        for letter, names in models.items():
            self.learn({"a": A, "b": B, "c": C, "d": D}[letter], *names.split())
        self.passes(*(engine.key for engine in self.registry.engines))

    def pools(self):
        """Return the workers of each pool."""
        return {pool.name: [worker.url for worker in pool.members] for pool in self.registry.pools}

    def role_pools(self):
        """Return the workers of each pool that takes no whole requests."""
        return {
            pool.name: [worker.url for worker in pool.members] for pool in self.registry.role_pools
        }

    def candidates(self, model=None, pool=0):
        found = self.registry.pools[pool]
        workers = found.candidates if model is None else found.candidates_for(model)
        return [worker.url for worker in workers]

    def states(self):
        return {engine.key: str(engine.state) for engine in self.registry.engines}

    def endpoints(self):
        """Return the endpoints of each cluster."""
        return {
            view.name: [endpoint.endpoint for endpoint in view.endpoints]
            for view in self.registry.clusters
        }

    def urls(self):
        return [engine.key for engine in self.registry.engines]

    def worker(self, url):
        (found,) = [w for pool in self.registry.pools for w in pool.members if w.url == url]
        return found


def healthy(*urls, **settings):
    """Return a world in which all workers are healthy and say nothing of models."""
    world = World(*urls, **settings)
    world.passes(*urls)
    for url in urls:
        world.learn(url)
    return world


# --- sources


def test_new_registry_has_one_empty_pool():
    """Envoy and the router find a place that is empty, not none."""
    world = World()

    assert world.pools() == {"default": []}
    assert world.registry.clusters == (ClusterView("default", "", (), is_default=True),)
    assert world.registry.uniform
    assert world.commit() == Change()


def test_workers_are_there_in_the_order_in_which_they_are_named():
    """Every one is a member at once, a candidate only when it is healthy."""
    world = World(B, A, C)

    assert world.urls() == [B, A, C]
    assert world.pools() == {"default": [B, A, C]}
    assert world.candidates() == []
    assert set(world.states().values()) == {"starting"}


def test_first_commit_tells_what_it_changed_and_the_second_nothing():
    """Whoever follows acts on changes only."""
    world = World()
    world.registry.apply("static", Reset(specs(A)), NOW)

    change = world.commit()

    assert change == Change(members=True, clusters=True, states=(world[A],))
    assert world.commit() == Change()


def test_worker_is_there_while_any_source_names_it():
    """It stays the same worker when one of two sources forgets it."""
    world = World(A, B)
    world.name(A, source="file")
    engine = world[A]

    world.name(B)
    assert world[A] is engine
    world.name(source="file")
    assert world.urls() == [B]


def test_description_of_the_source_that_started_first_counts():
    """Another takes its place when that one forgets the worker."""
    world = World()
    apply = world.registry.apply
    apply("static", Add(spec(A, weight=2)), NOW)
    apply("file", Add(spec(A, weight=3)), NOW)
    assert (world[A].spec.weight, world[A].source) == (2, "static")

    apply("static", Remove(A), NOW)

    assert (world[A].spec.weight, world[A].source) == (3, "file")


def test_add_and_remove_change_one_worker():
    """Unlike a reset they leave the others alone; removing a stranger is nothing."""
    world = World(A)
    world.registry.apply("static", Add(spec(B)), NOW)
    world.registry.apply("static", Remove(C), NOW)
    world.commit()
    assert world.urls() == [A, B]

    world.registry.apply("static", Remove(A), NOW)

    change = world.commit()
    assert [engine.key for engine in change.removed] == [A]
    assert world.urls() == [B]


def test_new_description_makes_no_new_worker():
    """Labels are not for policies, and a weight changes in place: requests under way stay counted."""
    world = World(A, B)
    before = world.worker(A)

    world.registry.apply("static", Add(spec(A, labels=(("zone", "a"),))), NOW)
    assert world.commit().members
    assert world.worker(A) is before
    assert world[A].spec.labels == (("zone", "a"),)
    world.registry.apply("static", Add(spec(A, weight=2)), NOW)
    world.commit()
    assert (world.worker(A).weight, world.worker(A) is before) == (2, True)
    assert world.pools() == {"default": [A, B]}


def test_worker_that_leaves_and_returns_within_one_commit_is_asked_anew():
    """It is another engine of the registry, though Envoy and the policies notice nothing."""
    world = healthy(A)
    old, worker = world[A], world.worker(A)

    world.registry.apply("static", Reset(()), NOW)
    world.registry.apply("static", Reset(specs(A)), NOW)
    change = world.commit()

    assert change.removed == (old,)
    assert not change.clusters
    assert world.worker(A) is worker
    assert world.states() == {A: "starting"}


def test_worker_without_an_address_is_told_of_when_it_goes():
    """Whoever keeps something per worker hears of each that leaves."""
    world = World(NAMED)
    engine = world[NAMED]

    assert world.name().removed == (engine,)


# --- administrators


def test_administrator_adds_a_worker():
    """It is named by ``admin``, and there until it is removed."""
    world = World(A)

    engine = world.registry.add(spec(B, weight=3), NOW)
    world.commit()

    assert (engine.source, engine.added_at, world.urls()) == (ADMIN_SOURCE, NOW, [A, B])
    assert world.registry.remove(B, NOW)
    world.commit()
    assert world.urls() == [A]
    assert not world.registry.remove(B, NOW)


@pytest.mark.parametrize(
    ("there", "added"),
    [(A, A), (f"{A}@0", f"{A}@0"), (A, f"{A}@0"), (f"{A}@0", A), (f"{A}@3", A)],
)
def test_adding_what_is_there_is_refused(there, added):
    """Itself, or an engine as a whole beside one of its ranks."""
    world = World(there)

    with pytest.raises(WorkerExistsError, match="already exists"):
        world.registry.add(spec(added), NOW)

    assert world.commit() == Change()
    assert world.urls() == [there]


def test_ranks_of_one_engine_are_added_one_by_one():
    """They do not overlap."""
    world = World(f"{A}@0")

    world.registry.add(spec(f"{A}@1"), NOW)
    world.commit()

    assert world.pools() == {"default": [f"{A}@0", f"{A}@1"]}


def test_description_of_an_administrator_counts_before_all_others():
    """A source that names the worker later changes nothing."""
    world = World()
    world.registry.add(spec(A, weight=5), NOW)

    world.name(A)

    assert (world[A].spec.weight, world[A].source) == (5, ADMIN_SOURCE)


def test_removed_worker_stays_out_until_its_source_names_it_anew():
    """Naming it again and again does not bring it back; forgetting it in between does."""
    world = World(A, B)
    world.registry.remove(A, NOW)
    world.commit()

    world.name(A, B)
    world.registry.apply("static", Add(spec(A)), NOW)
    world.registry.apply("file", Add(spec(A)), NOW)
    assert world.urls() == [B]
    world.name(B)
    world.registry.apply("file", Remove(A), NOW)
    world.name(A, B)

    assert world.urls() == [B, A]


@pytest.mark.parametrize("forget", [Reset(()), Remove(A)])
def test_source_that_forgets_a_removed_worker_brings_it_not_back_by_another(forget):
    """As long as some source has named it all along it stays removed."""
    world = World(A)
    world.name(A, source="file")
    world.registry.remove(A, NOW)

    world.registry.apply("static", forget, NOW)

    assert world.urls() == []


def test_administrator_brings_a_removed_worker_back():
    """And removes it again, for good."""
    world = World(A)
    world.registry.remove(A, NOW)

    world.registry.add(spec(A), NOW)
    assert world.urls() == [A]
    world.registry.remove(A, NOW)
    world.name(A)

    assert world.urls() == []


def test_overlapping_sources_agree_on_whole_engines_or_ranks():
    """Who named an engine first counts; two workers never share a rank."""
    world = World(A, f"{B}@0", ranks=2)

    world.name(f"{A}@0", B, f"{B}@1", source="file")
    world.commit()

    both = [f"{A}@0", f"{A}@1", f"{B}@0", f"{B}@1"]
    assert world.pools() == {"default": both}
    assert world.urls() == [A, f"{B}@0", f"{B}@1"]
    world.name()
    assert world.pools() == {"default": [f"{A}@0", f"{B}@0", f"{B}@1"]}
    assert set(world.urls()) == {f"{A}@0", B}


def test_adding_what_is_there_under_another_name_is_refused():
    """The address that a name has counts; another port or base path is another worker."""
    world = World(A, NAMED)
    world.registry.on_address("w1", "10.0.0.9")
    world.commit()

    for url in ("http://10.0.0.9:8000", "https://10.0.0.1:8000"):
        with pytest.raises(WorkerExistsError, match="is at the same address"):
            world.registry.add(spec(url), NOW)
    for url in ("http://10.0.0.9:8001", "http://10.0.0.9:8000/x", "http://w1:8002"):
        world.registry.add(spec(url), NOW)
    with pytest.raises(WorkerExistsError, match="is at the same address"):
        world.registry.add(spec("https://w1:8002"), NOW)


# --- names


def test_worker_with_a_name_is_a_member_when_its_name_is_resolved():
    """Until then it is known, but neither policies nor Envoy see it."""
    world = World(A, NAMED)
    assert world.registry.hosts() == {"w1"}
    assert world.pools() == {"default": [A]}
    assert (world[NAMED].state, world[NAMED].reason) == ("starting", "its name is being resolved")

    world.registry.on_address("w1", "10.0.0.9")
    change = world.commit()

    assert change.members
    assert change.clusters
    assert world.pools() == {"default": [A, NAMED]}
    assert world.endpoints() == {"default": ["10.0.0.1:8000", "10.0.0.9:8000"]}
    assert world.registry.url_of("10.0.0.9:8000") == NAMED


def test_all_workers_of_a_host_follow_its_name():
    """Several ports are several workers; an address that is the same is no news."""
    world = World("http://w1:1", "http://w1:2/x", "http://w2:1")

    world.registry.on_address("w1", "10.0.0.9")
    world.commit()

    assert world.endpoints() == {
        "default": ["10.0.0.9:1"],
        "default~x": ["10.0.0.9:2"],
    }
    world.registry.on_address("w1", "10.0.0.9")
    assert world.commit() == Change()


def test_reason_why_a_name_cannot_be_resolved_is_shown():
    """Also for workers of that host that are named later, and until it can be."""
    world = World("http://w1:1", A)

    world.registry.on_unresolved("w1", "no such name")
    world.name("http://w1:1", A, "http://w1:2")

    for key in ("http://w1:1", "http://w1:2"):
        assert (world[key].state, world[key].reason) == ("starting", "no such name")
    world.now += 600
    world.commit()
    assert world.states()["http://w1:1"] == "unhealthy"
    world.registry.on_address("w1", "10.0.0.9")
    world.commit()
    assert world["http://w1:1"].reason == "its first health check is under way"


def test_worker_that_moves_is_a_new_one_and_asked_again():
    """There may be another machine at the new address, with other models and nothing wrong with it."""
    world = World(NAMED, A)
    world.registry.on_address("w1", "10.0.0.8")
    world.commit()
    world.learn(NAMED, "x")
    world.passes(NAMED)
    world.registry.suspend("10.0.0.8:8000", suspended=True)
    old = world.worker(NAMED)
    lease = world.registry.pools[0].acquire(old)

    world.registry.on_address("w1", "10.0.0.9")
    change = world.commit()

    new = world.worker(NAMED)
    assert new is not old
    assert (new.endpoint, new.in_flight, new.order > old.order) == ("10.0.0.9:8000", 0, True)
    assert change.states == (world[NAMED],)
    assert (world[NAMED].state, world[NAMED].introduced) == ("starting", False)
    assert not world[NAMED].suspended
    assert world.registry.url_of("10.0.0.8:8000") == "10.0.0.8:8000"
    lease.release(NOW)
    assert (old.in_flight, new.in_flight, world.registry.pools[0].in_flight) == (0, 0, 0)


def test_name_that_fails_later_keeps_its_address():
    """A resolver that is away takes no worker away."""
    world = World(NAMED)
    world.registry.on_address("w1", "10.0.0.8")
    world.commit()
    world.passes(NAMED)
    world.learn(NAMED)

    world.registry.on_unresolved("w1", "the resolver is away")
    world.commit()

    assert world.candidates() == [NAMED]


def test_address_of_a_host_that_left_is_forgotten():
    """Whoever follows names tells it anew when the host returns, perhaps elsewhere."""
    world = World(NAMED, A)
    world.registry.on_address("w1", "10.0.0.8")
    world.commit()

    world.name(A)
    world.name(A, NAMED)

    assert world[NAMED].address == ""


def test_address_that_is_known_holds_for_a_worker_that_joins():
    """The second worker of a host need not wait."""
    world = World("http://w1:1")
    world.registry.on_address("w1", "10.0.0.8")

    world.name("http://w1:1", "http://w1:2")

    assert world["http://w1:2"].endpoint == "10.0.0.8:2"


def test_two_names_for_one_address_are_one_worker():
    """Who serves stands for both, as long as it is there; the other says so."""
    world = World(NAMED, A)
    world.registry.on_address("w1", "10.0.0.1")
    world.commit()

    assert world.pools() == {"default": [A]}
    assert world[NAMED].reason == f"it is at the same address as {A}"
    assert world.states()[NAMED] == "unhealthy"
    world.name(NAMED)
    assert world.pools() == {"default": [NAMED]}
    world.name(A, f"{A}/base")
    assert world.endpoints()["default~base"] == ["10.0.0.1:8000"]


# --- what Envoy must know


def test_endpoints_carry_the_name_they_are_asked_by():
    """A host name as it is; with TLS the name of the certificate, the worker's before the setting's."""
    world = World(tls_server_name="fleet.example")
    world.registry.apply(
        "static",
        Reset(
            (
                spec("http://10.0.0.1:1"),
                spec("http://w1:1"),
                spec("https://10.0.0.2:1"),
                spec("https://w1:2"),
                spec("https://10.0.0.3:1", tls_name="own.example"),
            )
        ),
        NOW,
    )
    world.registry.on_address("w1", "10.0.0.9")
    world.commit()

    (view,) = world.registry.clusters
    assert view.endpoints == (
        EndpointView("10.0.0.1:1"),
        EndpointView("10.0.0.2:1", "fleet.example", tls=True),
        EndpointView("10.0.0.3:1", "own.example", tls=True),
        EndpointView("10.0.0.9:1", "w1"),
        EndpointView("10.0.0.9:2", "fleet.example", tls=True),
    )


@pytest.mark.parametrize(("insecure", "name"), [(False, "10.0.0.2"), (True, "")])
def test_certificate_of_an_address_is_asked_for_by_the_address(insecure, name):
    """Unless nobody looks at it: an address is no name to ask a server for."""
    world = World("https://10.0.0.2:1", "https://w1:1", tls_insecure=insecure)
    world.registry.on_address("w1", "10.0.0.9")
    world.commit()

    first, second = world.registry.clusters[0].endpoints
    assert (first.name, first.name_is_ip) == (name, not insecure)
    assert (second.name, second.name_is_ip) == ("w1", False)


def test_base_paths_are_clusters_of_one_pool():
    """A cluster has one path; the pool is spread over them."""
    world = World(f"{A}/x", B, f"{C}/y/z", f"{D}/x")

    assert world.endpoints() == {
        "default": ["10.0.0.2:8000"],
        "default~x": ["10.0.0.1:8000", "10.0.0.4:8000"],
        "default~y/z": ["10.0.0.3:8000"],
    }
    assert world.worker(f"{C}/y/z").cluster == "default~y/z"
    assert [view.path for view in world.registry.clusters] == ["", "/x", "/y/z"]
    assert world.registry.pools[0].spread


def test_cluster_that_nobody_needs_lingers():
    """Requests under way may be retried there; after half a minute Envoy is told that it is gone."""
    world = World(A, f"{B}/x")

    world.name(A)
    assert world.endpoints() == {"default": ["10.0.0.1:8000"], "default~x": ["10.0.0.2:8000"]}
    world.now += LINGER_S - 0.01
    assert world.commit() == Change()
    world.now += 0.01
    assert world.commit() == Change(clusters=True)

    assert world.endpoints() == {"default": ["10.0.0.1:8000"]}


def test_lingering_cluster_that_is_needed_again_is_the_new_one():
    """It ends lingering and does not end half a minute later."""
    world = World(A, f"{B}/x")
    world.name(A)
    world.now += 1

    world.name(A, f"{C}/x")
    assert [view.name for view in world.registry.clusters] == ["default", "default~x"]
    world.now += LINGER_S
    world.commit()

    assert world.endpoints()["default~x"] == ["10.0.0.3:8000"]


def test_pool_stays_when_all_its_workers_are_replaced_at_once():
    """Nothing of them is known yet, and Envoy goes on with the cluster it has."""
    world = World(A, B)
    world.serve(a="x", b="x")
    pool = world.registry.pools[0]

    world.name(C)

    assert world.registry.pools == (pool,)
    assert world.endpoints() == {"default": ["10.0.0.3:8000"]}


def test_without_any_worker_the_pool_stays_and_is_empty():
    """Its cluster loses its endpoints at once, and policies know."""
    world = World(A)
    pool = world.registry.pools[0]

    world.name()

    assert world.registry.pools == (pool,)
    assert world.endpoints() == {"default": []}
    assert pool.policy.members[-1] == []
    world.name(B)
    assert world.registry.pools == (pool,)


# --- health


def test_only_healthy_workers_are_candidates():
    """Each of the others is a member, in its state."""
    world = healthy(A, B, C, D)
    assert world.candidates() == [A, B, C, D]

    world.fails(B)
    world.ejects(C)
    world.registry.drain(D, NOW + 60)
    change = world.commit()

    assert world.candidates() == [A]
    assert world.states() == {A: "healthy", B: "unhealthy", C: "ejected", D: "draining"}
    assert change.states == (world[D],)
    assert world.pools() == {"default": [A, B, C, D]}


def test_worker_that_never_was_healthy_is_starting_for_a_while():
    """Then unhealthy; and healthy as soon as it passes."""
    world = World(A, startup_s=10)
    world.learn(A)
    assert world.states() == {A: "starting"}

    world.now += 10
    change = world.commit()

    assert change == Change(states=(world[A],))
    assert (world[A].state, world[A].since) == (State.UNHEALTHY, NOW + 10)


def test_without_envoys_verdicts_every_worker_that_has_been_asked_is_healthy():
    """There is nobody who judges."""
    world = World(A, B, follows_envoy=False)
    world.learn(A)

    assert world.candidates() == [A]


def test_without_asking_a_worker_is_healthy_when_it_passes():
    """Nothing is waited for that does not come."""
    world = World(A, asks_models=False)

    world.passes(A)

    assert world.candidates() == [A]
    world.fails(A)
    world.passes(A)
    assert world.candidates() == [A]


def test_worker_that_was_asked_before_it_could_answer_is_asked_again_when_it_passes():
    """A server that is loading its model says nothing of it; one that has said needs no second question."""
    world = World(A, B)
    world[A].models_unread = "connection refused"
    world.learn(A)
    world.learn(B, "x")

    world.passes(A, B)

    assert world.states() == {A: "starting", B: "healthy"}
    world.learn(A, "x")
    assert world.states()[A] == "healthy"


def test_worker_that_passes_is_asked_for_its_models_before_it_is_picked():
    """Whether it says something or not."""
    world = World(A, B)
    world.passes(A, B)
    assert world.candidates() == []

    world.learn(A, "x")
    world.learn(B)

    assert world.candidates() == [A, B]


@pytest.mark.parametrize(
    ("leave", "back", "state"),
    [(World.fails, World.passes, "healthy"), (World.ejects, World.unejects, "half_open")],
    ids=["unhealthy", "ejected"],
)
def test_worker_that_returns_is_asked_again_before_it_is_picked(leave, back, state):
    """It may have been started anew with other models."""
    world = World(A, B)
    world.serve(a="x", b="x")
    leave(world, B)

    back(world, B)

    assert (world[B].state, world[B].reason) == ("starting", "it is being asked for its models")
    assert world.candidates() == [A]
    world.learn(B, "y")
    assert (world.states()[B], world[B].cluster, world[B].target) == (state, "default", "y")
    world.passes_in("y", B)
    assert (world.states()[B], world[B].cluster) == (state, "y")


def test_worker_that_is_judged_twice_returns_only_when_both_are_over():
    """Ejected and unhealthy: the end of the ejection alone is not enough."""
    world = healthy(A)
    world.ejects(A)
    world.fails(A)

    world.unejects(A)
    assert world.states() == {A: "unhealthy"}
    world.passes(A)
    world.learn(A)

    assert world.states() == {A: "half_open"}


def test_worker_whose_health_returns_is_tried_though_its_circuit_is_open():
    """It may have been started anew; one that passed all the time stays out for its time."""
    world = healthy(A, B)
    world.ejects(A)
    world.ejects(B)
    world.fails(A)
    assert world.states() == {A: "ejected", B: "ejected"}

    world.passes(A)
    world.passes(B)
    world.learn(A)

    assert world.states() == {A: "half_open", B: "ejected"}


def test_event_of_another_cluster_does_not_concern_a_worker():
    """What Envoy says of a lingering cluster is not about the worker's present one."""
    world = healthy(A, B)
    world.fails(A)

    world.say({"cluster_name": "other", "host": host(world[A].endpoint), "add_healthy_event": {}})
    world.say({"cluster_name": "default", "host": host("10.9.9.9:1"), "add_healthy_event": {}})
    world.commit()

    assert world.states() == {A: "unhealthy", B: "healthy"}
    assert world[A].introduced


def test_suspended_worker_is_left_alone_while_there_are_others():
    """It is a last resort; its state is the same."""
    world = healthy(A, B)
    assert world.registry.suspend("10.0.0.1:8000", suspended=True)
    assert not world.registry.suspend("10.0.0.1:8000", suspended=True)
    world.commit()
    assert (world.candidates(), world.states()[A]) == ([B], "healthy")

    world.fails(B)
    assert world.candidates() == [A]

    assert world.registry.suspend("10.0.0.1:8000", suspended=False)
    assert not world.registry.suspend("10.9.9.9:1", suspended=True)


def refuse(world, key, *, answered=True):
    """Let worker *key* refuse a connection of the service, which it has *answered* before."""
    if answered:
        world.registry.on_answer(world[key], began=0.0, now=0.0, passed=True)
    return world.registry.on_refused(world[key])


def test_worker_that_refuses_connections_is_unhealthy_at_once():
    """Its process is gone, which Envoy finds out after three checks, a minute apart."""
    world = healthy(A, B)
    assert refuse(world, A)
    assert not refuse(world, A, answered=False)
    world.commit()
    assert (world.candidates(), world.states()[A]) == ([B], "unhealthy")
    assert world[A].reason == "it refuses connections"

    assert world.registry.on_answer(world[A], began=1.0, now=1.0, passed=False)
    world.commit()
    assert (world.candidates(), world.states()[A]) == ([A, B], "healthy")


def test_worker_that_never_answered_may_refuse():
    """The service cannot reach it, perhaps, and Envoy can."""
    world = healthy(A)
    assert not refuse(world, A, answered=False)
    world.commit()

    assert world.states()[A] == "healthy"


def test_worker_that_was_gone_and_is_back_is_no_longer_suspended():
    """Whatever the process before it did; a failure since the check began counts."""
    world = healthy(A, B)
    world.registry.suspend("10.0.0.1:8000", suspended=True)
    refuse(world, A)
    world.registry.on_answer(world[A], began=1.0, now=1.0, passed=True)
    assert not world[A].suspended

    refuse(world, A)
    world.registry.suspend("10.0.0.1:8000", suspended=True, unreached_at=100.0)
    world.registry.on_answer(world[A], began=99.0, now=101.0, passed=True)
    assert (world[A].suspended, world[A].refused) == (True, False)


def test_worker_at_another_address_has_refused_nobody():
    """It may be another machine."""
    world = World(NAMED)
    world.registry.on_address("w1", "10.0.0.8")
    world.commit()
    refuse(world, NAMED)
    world.registry.on_address("w1", "10.0.0.77")

    assert (world[NAMED].refused, world[NAMED].answered) == (False, False)


def test_when_none_is_healthy_there_are_no_candidates():
    """Fail fast, rather than try what Envoy has found wanting."""
    world = healthy(A)
    world.fails(A)

    assert world.candidates() == []


def test_when_none_is_healthy_all_may_be_tried_if_it_is_wished():
    """All but those that are being removed."""
    world = healthy(A, B, C, D, try_unhealthy=True)
    world.fails(A)
    assert world.candidates() == [B, C, D]

    world.ejects(B)
    world.fails(C)
    world.registry.drain(D, NOW)
    world.commit()

    assert world.candidates() == [A, B, C]


def test_verdict_of_an_endpoint_that_left_is_forgotten():
    """It is checked anew when it returns, whatever Envoy's log said late."""
    world = healthy(A, B)
    line = {"cluster_name": "default", "host": host("10.0.0.1:8000")}

    world.name(B)
    world.say(line | {"add_healthy_event": {}})
    world.name(A, B)

    assert world.registry.verdicts.get("default", "10.0.0.1:8000") == UNKNOWN
    assert world.registry.verdicts.get("default", "10.0.0.2:8000").good
    world.learn(A)
    assert world.states()[A] == "starting"


def test_good_endpoints_are_those_that_pass():
    """Those that an Envoy that starts anew need not check first."""
    world = World(A, B, f"{C}/x", NAMED)
    world.passes(A, f"{C}/x")
    world.fails(B)

    assert world.registry.good_endpoints() == {
        ("default", "10.0.0.1:8000"),
        ("default~x", "10.0.0.3:8000"),
    }


# --- drains


def test_drain_ends_when_the_worker_is_idle():
    """No pick any more, no end of what is under way; Envoy knows that it is draining."""
    world = healthy(A, B)
    pool = world.registry.pools[0]
    lease = pool.acquire(world.worker(A))

    assert world.registry.drain(A, NOW + 60)
    assert world.commit().clusters
    assert world.candidates() == [B]
    assert [view.draining for view in world.registry.clusters[0].endpoints] == [True, False]
    assert world.registry.end_drains(NOW + 1)
    world.commit()
    assert A in world.states()
    lease.release(NOW)
    assert world.registry.end_drains(NOW + 2)
    world.commit()

    assert world.urls() == [B]
    assert not world.registry.end_drains(NOW + 3)


def test_drain_ends_when_it_is_overdue():
    """What is still under way is counted until it ends, though the worker is gone."""
    world = healthy(A, B)
    pool, worker = world.registry.pools[0], world.worker(A)
    lease = pool.acquire(worker)
    world.registry.drain(A, NOW + 60)

    world.registry.end_drains(NOW + 59)
    assert A in world.urls()
    world.registry.end_drains(NOW + 60)
    world.commit()

    assert world.urls() == [B]
    assert (worker.in_flight, pool.in_flight) == (1, 1)
    assert lease.release(NOW + 61)
    assert (worker.in_flight, pool.in_flight) == (0, 0)
    assert pool.policy.done == [A]


@pytest.mark.parametrize(("instance", "under_way"), [("uid-1", 1), ("uid-2", 0)])
def test_requests_under_way_count_for_the_instance_that_has_them(instance, under_way):
    """One that comes back still has them; another at its address does not."""
    world = World()
    registry = world.registry
    registry.apply("kubernetes", Add(spec(A, instance="uid-1")), NOW)
    world.commit()
    lease = registry.pools[0].acquire(world.worker(A))
    registry.apply("kubernetes", Remove(A), NOW)
    world.commit()

    registry.apply("kubernetes", Add(spec(A, instance=instance)), NOW)
    world.commit()

    assert (world.worker(A).in_flight, registry.pools[0].in_flight) == (under_way, 1)
    lease.release(NOW)
    assert (world.worker(A).in_flight, registry.pools[0].in_flight) == (0, 0)


def test_drained_worker_stays_out_though_its_source_names_it():
    """Draining is removing, only later."""
    world = healthy(A, B)
    world.registry.drain(A, NOW)
    world.registry.end_drains(NOW)

    world.name(A, B)

    assert world.urls() == [B]


def test_adding_a_worker_that_is_being_drained_takes_it_back():
    """With what the administrator says of it; nothing under way is lost."""
    world = healthy(A, B)
    lease = world.registry.pools[0].acquire(world.worker(A))
    world.registry.drain(A, NOW + 60)
    world.commit()

    engine = world.registry.add(spec(A, labels=(("k", "v"),)), NOW)
    world.commit()

    assert (engine.spec.labels, engine.state) == ((("k", "v"),), "healthy")
    assert world.candidates() == [A, B]
    assert not world.registry.end_drains(NOW + 99)
    assert world.worker(A).in_flight == 1
    lease.release(NOW)


def test_draining_a_stranger_is_nothing():
    """It says so."""
    assert not World(A).registry.drain(B, NOW)


def test_worker_without_an_address_is_drained_at_once():
    """Nothing can be under way on it."""
    world = World(NAMED)

    world.registry.drain(NAMED, NOW + 60)
    world.registry.end_drains(NOW)

    assert world.urls() == []


def test_endpoint_of_two_ranks_drains_only_with_both():
    """Envoy knows one endpoint, which is needed as long as one of its workers is."""
    world = World(f"{A}@0", f"{A}@1")
    for key in (f"{A}@0", f"{A}@1"):
        world.registry.drain(key, NOW + 60)
        world.commit()
        (endpoint,) = world.registry.clusters[0].endpoints
        assert endpoint.draining is (key == f"{A}@1")


# --- ranks


@pytest.mark.parametrize(
    ("url", "settings", "metrics", "workers"),
    [
        (A, {}, (0, 1), [(A, None)]),
        (A, {"ranks": 2}, (), [(f"{A}@0", 0), (f"{A}@1", 1)]),
        (A, {"ranks": 2}, (0, 1, 2), [(f"{A}@{n}", n) for n in (0, 1, 2)]),
        (A, {"ranks": 2}, (4, 5), [(f"{A}@0", 0), (f"{A}@1", 1)]),
        (A, {"ranks": 0}, (), [(A, None)]),
        (A, {"ranks": 0}, (0, 1), [(f"{A}@0", 0), (f"{A}@1", 1)]),
        (A, {"ranks": 2, "global_ranks": True}, (4, 5), [(f"{A}@4", 4), (f"{A}@5", 5)]),
        (A, {"ranks": 0, "global_ranks": True}, (), [(A, None)]),
        (f"{A}@3", {}, (), [(f"{A}@3", 3)]),
        (f"{A}@3", {"ranks": 2}, (0, 1), [(f"{A}@3", 3)]),
    ],
)
def test_each_rank_is_a_worker(url, settings, metrics, workers):
    """As many as were said, or as its metrics show; a rank in the URL is that one alone."""
    world = World(url, **settings)
    world.registry.on_loads(world[url], {0: Load(1)}, metrics)
    world.commit()

    assert [(w.url, w.rank) for w in world.registry.pools[0].members] == workers
    assert {w.endpoint for w in world.registry.pools[0].members} == {"10.0.0.1:8000"}
    assert len(world.registry.clusters[0].endpoints) == 1
    assert world[url].loads == {0: Load(1)}


def test_ranks_that_metrics_show_no_more_go():
    """Metrics without ranks say nothing of them; the ranks that stay are the same workers."""
    world = World(A, ranks=0)
    engine = world[A]
    world.registry.on_loads(engine, {}, (0, 1))
    world.commit()
    first = world.worker(f"{A}@0")

    world.registry.on_loads(engine, {}, ())
    assert world.commit() == Change()
    world.registry.on_loads(engine, {}, (0,))
    assert world.commit().members

    assert world.pools() == {"default": [f"{A}@0"]}
    assert world.worker(f"{A}@0") is first


def test_global_ranks_are_numbered_over_the_nodes():
    """A node that leaves makes room for the next one; the others keep their numbers."""
    world = World(A, B, C, ranks=2, global_ranks=True)
    assert world.pools() == {
        "default": [f"{A}@0", f"{A}@1", f"{B}@2", f"{B}@3", f"{C}@4", f"{C}@5"]
    }

    world.name(A, C, D)

    assert set(world.pools()["default"]) == {
        *(f"{A}@0", f"{A}@1"),
        *(f"{C}@4", f"{C}@5"),
        *(f"{D}@2", f"{D}@3"),
    }


def test_ranks_of_one_engine_share_its_state_and_not_its_leases():
    """Each counts its own requests; the engine counts all of them."""
    world = healthy(A, ranks=2)
    pool = world.registry.pools[0]

    lease = pool.acquire(pool.members[1])

    assert [worker.in_flight for worker in pool.members] == [0, 1]
    assert world[A].in_flight == 1
    assert world.candidates() == [f"{A}@0", f"{A}@1"]
    world.fails(A)
    assert world.candidates() == []
    lease.release(NOW)


# --- models and pools


def test_workers_that_serve_the_same_are_one_pool():
    """Whatever is asked for goes there; nothing needs to be read."""
    world = World(A, B)
    world.serve(a="x", b="x")

    assert world.pools() == {"default": [A, B]}
    assert world.registry.uniform
    assert world.registry.model_names() == ["x"]
    assert world.registry.pool_of("x") is world.registry.pools[0]
    assert world.registry.pool_of("y") is None
    assert world.candidates("x") == world.candidates("y") == [A, B]


def test_workers_that_serve_something_else_are_another_pool():
    """The first keeps its name; the other is called after its model, and its workers are checked anew."""
    world = World(A, B, C)
    world.serve(a="x", b="y", c="x")

    assert world.pools() == {"default": [A, C], "y": [B]}
    assert not world.registry.uniform
    assert world.endpoints() == {
        "default": ["10.0.0.1:8000", "10.0.0.3:8000"],
        "y": ["10.0.0.2:8000"],
    }
    assert (world.worker(B).cluster, world.candidates(pool=1)) == ("y", [B])
    assert world.registry.pool_of("y").name == "y"
    assert world.registry.pool_of("x").name == "default"
    assert world.registry.model_names() == ["x", "y"]


def test_worker_that_moves_to_another_pool_is_reached_as_before_until_envoy_knows_it_there():
    """Make before break: the cluster is new to Envoy, and so is the endpoint in it."""
    world = World(A, B)
    world.serve(a="x", b="x")

    world.learn(B, "y")

    assert world.states() == {A: "healthy", B: "healthy"}
    assert (world.candidates(pool=1), world[B].cluster) == ([B], "default")
    assert [
        (view.name, [e.endpoint for e in view.endpoints]) for view in world.registry.clusters
    ] == [
        ("default", [world[A].endpoint, world[B].endpoint]),
        ("y", [world[B].endpoint]),
    ]
    world.passes_in("y", B)
    assert (world.candidates(pool=1), world[B].cluster) == ([B], "y")
    assert [len(view.endpoints) for view in world.registry.clusters] == [1, 1]


def test_worker_moves_only_to_a_cluster_that_a_connected_envoy_has():
    """An Envoy with a static configuration has none but the first."""
    world = World(A, B)
    world.registry.accepts = lambda cluster: cluster == "default"
    world.serve(a="x", b="x")

    world.learn(B, "y")
    world.passes_in("y", B)

    assert (world.candidates(pool=1), world[B].cluster) == ([B], "default")


def test_worker_that_is_ejected_stays_where_it_is():
    """Nobody gets out of an ejection by serving something else."""
    world = World(A, B)
    world.serve(a="x", b="x")
    world.ejects(B)

    world.learn(B, "y")
    world.passes_in("y", B)
    assert (world.states()[B], world[B].cluster) == ("ejected", "default")

    world.unejects(B)
    world.learn(B, "y")
    assert (world.states()[B], world[B].cluster) == ("half_open", "y")


def test_requests_of_a_worker_that_moves_to_another_pool_are_counted_with_it():
    """The lease ends where it began; the worker's count is its own."""
    world = World(A, B)
    world.serve(a="x", b="x")
    old, worker = world.registry.pools[0], world.worker(B)
    lease = old.acquire(worker)

    world.learn(B, "y")

    new = world.registry.pool_of("y")
    assert (world.worker(B), worker.in_flight) == (worker, 1)
    assert (old.in_flight, new.in_flight) == (1, 0)
    lease.release(NOW)
    assert (worker.in_flight, old.in_flight, new.in_flight) == (0, 0, 0)


def test_shared_names_make_one_pool():
    """Also through others; a request for a name goes to those that serve it."""
    world = World(A, B, C)
    world.serve(a="x y", b="y z", c="z")

    assert world.pools() == {"default": [A, B, C]}
    assert not world.registry.uniform
    assert world.candidates("x") == [A]
    assert world.candidates("y") == [A, B]
    assert world.candidates("z") == [B, C]
    assert world.candidates("unknown") == [A, B, C]


def test_name_that_only_an_unhealthy_worker_serves_has_no_candidates():
    """The others do not serve it, and would refuse."""
    world = World(A, B)
    world.serve(a="x y", b="y")
    world.fails(A)

    assert (world.candidates("x"), world.candidates("y")) == ([], [B])


def test_name_that_only_a_suspended_worker_serves_is_asked_of_it():
    """A last resort is better than none, for each name."""
    world = World(A, B)
    world.serve(a="x y", b="y")
    world.registry.suspend("10.0.0.1:8000", suspended=True)
    world.commit()

    assert (world.candidates("x"), world.candidates("y")) == ([A], [B])
    assert world.candidates() == [B]


def test_name_that_only_an_unhealthy_worker_serves_may_be_tried_if_it_is_wished():
    """The choice is between that one and nobody."""
    world = World(A, B, try_unhealthy=True)
    world.serve(a="x y", b="y")
    world.fails(A)

    assert (world.candidates("x"), world.candidates("y")) == ([A], [B])


def test_workers_of_which_nothing_is_known_join_the_first_pool():
    """They judge requests for any model."""
    world = World(A, B, C)
    world.serve(a="x", b="y")

    assert world.pools() == {"default": [A, C], "y": [B]}
    world.learn(C)
    assert world.registry.unread_candidates() == (world.worker(C),)
    world.fails(C)
    assert world.registry.unread_candidates() == ()


def test_one_pool_with_unknown_workers_is_uniform():
    """There is nothing to tell them apart by."""
    world = World(A, B)
    world.serve(a="x")
    world.learn(B)

    assert world.registry.uniform
    assert world.candidates("anything") == [A, B]


def test_declared_model_is_served_whatever_the_worker_says():
    """It is one of its names."""
    world = World()
    world.registry.apply("static", Reset((spec(A, model="gpt"), spec(B))), NOW)
    world.commit()
    world.serve(b="x")
    assert world.pools() == {"default": [A], "x": [B]}

    world.learn(A, "x")

    assert world.pools() == {"default": [A, B]}
    assert world.registry.model_names() == ["gpt", "x"]


def test_adapters_are_asked_of_workers_that_have_them():
    """The base model of any; when none that has it is healthy there is nobody."""
    world = World(A, B)
    world.learn(A, "x", adapters=["sql"])
    world.serve(b="x")

    assert world.registry.pool_of("sql") is world.registry.pools[0]
    assert not world.registry.uniform
    assert (world.candidates("sql"), world.candidates("x")) == ([A], [A, B])
    world.fails(A)
    assert (world.candidates("sql"), world.candidates("x")) == ([], [B])


def test_adapter_may_be_asked_of_others_if_it_is_wished():
    """Only when none that has it is there; a base model is not loaded like that."""
    world = World(A, B, C, lora_any=True)
    world.learn(A, "x y", adapters=["sql"])
    world.registry.on_models(world[A], ModelList(frozenset("xy"), frozenset({"sql"})))
    world.serve(b="y", c="y")
    assert world.candidates("sql") == [A]

    world.fails(A)

    assert world.candidates("sql") == [B, C]
    assert world.candidates("x") == []


def test_adapter_is_asked_of_the_healthy_before_it_is_tried_at_the_unhealthy():
    """A worker that can load it is better than one that has it and fails."""
    world = World(A, B, lora_any=True, try_unhealthy=True)
    world.learn(A, "x", adapters=["sql"])
    world.serve(b="x")
    world.fails(A)
    assert world.candidates("sql") == [B]

    world.fails(B)

    assert world.candidates("sql") == [A, B]


def test_same_adapters_everywhere_make_no_difference():
    """Then nothing needs to be read."""
    world = World(A, B)
    for key in (A, B):
        world.learn(key, "x", adapters=["sql"])

    assert world.registry.uniform


def test_pools_keep_their_names_when_workers_come_and_go():
    """Also when the worker that came first, or the one that gave the name, leaves."""
    world = World(A, B, C, D)
    world.serve(a="x", b="y", c="x", d="y")
    first, second = world.registry.pools

    world.name(C, D)
    assert world.pools() == {"default": [C], "y": [D]}
    world.name(D, A)
    world.serve(a="y")

    assert world.registry.pools[0] is second
    assert world.pools() == {"y": [D, A]}
    assert first.members != ()
    assert world.registry.pools == (second,)


def test_pool_whose_models_get_another_name_is_the_same():
    """The workers serve what they served, under another name beside it, or instead."""
    world = World(A, B)
    world.serve(a="x", b="y")
    pools = world.registry.pools

    world.learn(B, "y", "z")
    assert world.registry.pools == pools
    world.learn(B, "z")

    assert world.registry.pools == pools
    assert world.pools() == {"default": [A], "y": [B]}
    assert world.registry.pool_of("y") is None


def test_worker_that_serves_something_else_leaves_the_pool_to_the_others():
    """Though it came first: who goes on as before stays, and is picked without a break."""
    world = World(A, B, C)
    world.serve(a="x", b="x", c="y")
    default, other = world.registry.pools

    world.learn(A, "y")

    assert world.pools() == {"y": [A, C], "default": [B]}
    assert world.registry.pools == (other, default)
    assert (world.states()[B], world.states()[C]) == ("healthy", "healthy")


def test_worker_that_says_late_what_it_serves_does_not_disturb_the_others():
    """It was a guest in their pool; the first pool is still that of the worker that came first."""
    world = World(A, B, C)
    world.serve(b="x", c="y")
    assert world.pools() == {"default": [A, B], "y": [C]}

    world.learn(A, "z")

    assert world.pools() == {"z": [A], "default": [B], "y": [C]}
    assert (world.states()[B], world.states()[C]) == ("healthy", "healthy")


def test_new_pool_is_named_after_what_is_known():
    """Though a worker of which nothing is known is the first in it."""
    world = World(A, B, C)
    world.serve(c="x")

    world.learn(B, "y")

    assert world.pools() == {"y": [A, B], "default": [C]}


def test_pools_that_turn_out_to_be_one_are_merged():
    """The first stays."""
    world = World(A, B)
    world.serve(a="x", b="y")
    first, _ = world.registry.pools

    world.learn(B, "y", "x")

    assert world.registry.pools == (first,)
    assert world.pools() == {"default": [A, B]}
    assert world.endpoints() == {
        "default": ["10.0.0.1:8000", "10.0.0.2:8000"],
        "y": ["10.0.0.2:8000"],
    }


def test_pool_that_is_gone_is_retired_until_nothing_is_under_way():
    """Its requests are counted to their end."""
    world = World(A, B)
    world.serve(a="x", b="y")
    old = world.registry.pools[1]
    lease = old.acquire(world.worker(B))

    world.name(A)
    assert world.registry.retired == (old,)
    assert world.registry.all_pools() == (world.registry.pools[0], old)
    assert world.commit() == Change()
    lease.release(NOW)
    world.commit()

    assert world.registry.retired == ()


def test_pool_of_the_same_name_goes_on_with_what_is_under_way():
    """Two pools never have the same name, be one of them retired."""
    world = World(A, B)
    world.serve(a="x", b="y")
    old = world.registry.pools[1]
    lease = old.acquire(world.worker(B))
    world.name(A)

    world.name(A, C)
    world.serve(c="y")

    assert world.registry.pools[1] is old
    assert (world.registry.retired, old.in_flight) == ((), 1)
    assert old.policy.members[-1] == [C]
    lease.release(NOW)


def test_answer_without_news_changes_nothing():
    """Entries may differ in what is not a name, such as a time."""
    world = World(A)
    world.serve(a="x")

    same = ModelList(frozenset({"x"}), entries=({"id": "x", "created": 5},))
    world.registry.on_models(world[A], same)

    assert world.commit() == Change()
    assert world[A].models is same


def test_worker_that_does_not_say_what_it_serves_keeps_what_is_known():
    """A busy worker that does not answer in time is not another one."""
    world = World(A, B)
    world.serve(a="x", b="y")
    world[B].models_unread = "no answer within 5 s"

    world.learn(B)
    assert world.pools() == {"default": [A], "y": [B]}
    assert world[B].models_unread == "no answer within 5 s"
    world.learn(B, "y")

    assert world[B].models_unread == ""


def test_policies_hear_of_their_own_workers_only():
    """Each pool has a policy of its own, told of members whenever they change."""
    world = World(A, B)
    world.serve(a="x", b="y")

    first, second = (pool.policy for pool in world.registry.pools)

    assert first is not second
    assert (first.members, second.members) == ([[A, B], [A]], [[B]])


@pytest.mark.parametrize(
    ("model", "taken", "name"),
    [
        ("llama", [], "llama"),
        ("Qwen3-8B.v1_x", ["llama"], "Qwen3-8B.v1_x"),
        ("llama", ["llama"], "llama-fc5a10"),
        ("llama", ["llama", "llama-fc5a10"], "llama-fc5a104"),
        ("Qwen/Qwen3", [], "Qwen_Qwen3-"),
        ("a~b", [], "a_b-"),
        ("模型", [], "_-"),
        ("x" * 300, [], "x" * MAX_POOL_NAME_CHARS + "-"),
    ],
)
def test_name_of_a_pool_says_its_model_and_is_nobody_elses(model, taken, name):
    """Envoy and its statistics take it as it is; a digest tells apart what would be the same."""
    found = pool_name(model, taken)

    assert found.startswith(name)
    assert found not in taken
    assert (found == name) is (not name.endswith("-"))


def test_names_that_differ_in_odd_characters_are_two_pools():
    """Each has its digest."""
    assert pool_name("a/b", []) != pool_name("a:b", [])


@pytest.mark.parametrize("model", ["default", *sorted(RESERVED_NAMES)])
def test_pool_is_not_called_what_envoy_calls_something_else(model):
    """A model may have any name."""
    world = World(A, B)

    world.serve(a="x", b=model)

    names = list(world.endpoints())
    assert names[1].startswith(f"{model}-")


@pytest.mark.parametrize(
    ("path", "name"), [("", "p"), ("/x", "p~x"), ("/x/y", "p~x/y"), ("/a~b", "p~a~b")]
)
def test_name_of_a_cluster_has_the_base_path(path, name):
    """No pool has a tilde in its name."""
    assert cluster_name("p", path) == name


# --- moving to another cluster


def test_worker_stays_where_it_is_until_envoy_has_the_other_cluster():
    """It is picked all the while, and told to Envoy in both."""
    world = World(A, B)
    world.serve(a="x", b="x")
    accepted = set()
    world.registry.accepts = accepted.__contains__

    world.learn(B, "y")
    world.say({"cluster_name": "y", "host": host(world[B].endpoint), "add_healthy_event": {}})
    assert not world.commit().clusters
    assert (world[B].cluster, world[B].target, world.worker(B).cluster) == (
        "default",
        "y",
        "default",
    )
    assert world.candidates(pool=1) == [B]
    assert world.endpoints()["y"] == ["10.0.0.2:8000"]
    assert "10.0.0.2:8000" in world.endpoints()["default"]
    assert world.registry.waits
    accepted.add("y")
    change = world.commit()

    assert change == Change(clusters=True)
    assert (world[B].cluster, world.worker(B).cluster) == ("y", "y")
    assert world.endpoints() == {"default": ["10.0.0.1:8000"], "y": ["10.0.0.2:8000"]}
    assert world.candidates(pool=1) == [B]


def test_worker_that_is_ejected_does_not_get_out_of_it_by_changing_models():
    """It moves when its time is over."""
    world = World(A, B)
    world.serve(a="x", b="x")
    world.ejects(B)

    world.learn(B, "y")
    world.say({"cluster_name": "y", "host": host(world[B].endpoint), "add_healthy_event": {}})
    world.commit()
    assert (world[B].cluster, world.states()[B]) == ("default", "ejected")
    world.unejects(B)

    assert world[B].cluster == "y"


def test_worker_that_is_not_healthy_moves_at_once():
    """There is nothing to be careful of."""
    world = World(A, B)
    world.serve(a="x", b="x")
    world.fails(B)

    world.learn(B, "y")

    assert (world[B].cluster, world.states()[B]) == ("y", "starting")


def test_nobody_is_waited_for_where_nobody_judges():
    """Without verdicts there is no telling whether it is healthy there."""
    world = World(A, B, follows_envoy=False)
    world.learn(A, "x")

    world.learn(B, "y")

    assert (world[B].cluster, world.states()[B]) == ("y", "healthy")


def test_pool_is_spread_while_its_workers_are_in_two_clusters():
    """Retries of a request stay within one."""
    world = World(A, B, C)
    world.serve(a="x", b="x", c="y")
    pool = world.registry.pool_of("y")
    assert not pool.spread

    world.learn(B, "y")
    assert pool.spread
    world.say({"cluster_name": "y", "host": host(world[B].endpoint), "add_healthy_event": {}})
    world.commit()

    assert not pool.spread


# --- roles


def roles(*pairs):
    world = World()
    found = tuple(spec(url, worker_type=WorkerType(role), model="m") for url, role in pairs)
    world.registry.apply("static", Reset(found), NOW)
    world.commit()
    return world


def test_roles_have_pools_of_their_own():
    """They take no whole requests, and nothing is known of their models there."""
    world = roles((A, "prefill"), (B, "regular"), (C, "decode"))

    assert world.pools() == {"default": [B]}
    assert world.role_pools() == {"m.prefill": [A], "m.decode": [C]}
    assert world.registry.pool_of("m") is world.registry.pools[0]
    assert world.registry.uniform
    assert world.endpoints() == {
        "default": ["10.0.0.2:8000"],
        "m.decode": ["10.0.0.3:8000"],
        "m.prefill": ["10.0.0.1:8000"],
    }
    assert [view.name for view in world.registry.clusters if view.is_default] == ["default"]


def test_without_regular_workers_the_first_pool_is_empty():
    """Whole requests find nobody, and Envoy has a cluster to say so."""
    world = roles((A, "prefill"))

    assert world.pools() == {"default": []}
    assert world.endpoints() == {"default": [], "m.prefill": ["10.0.0.1:8000"]}
    assert world.registry.model_names() == []
    assert world.registry.unread_candidates() == ()


def test_worker_that_gets_another_role_is_in_another_pool():
    """No pool has two roles, and no two pools one name."""
    world = roles((A, "regular"))
    pool = world.registry.pools[0]

    changed = spec(A, worker_type=WorkerType.PREFILL, model="m")
    world.registry.apply("static", Reset((changed,)), NOW)
    world.commit()
    assert (world.pools(), world.role_pools()) == ({"default": []}, {"m.prefill": [A]})
    assert world.registry.pools == (pool,)
    world.registry.apply("static", Reset((spec(A, model="m"),)), NOW)
    world.commit()

    assert (world.pools(), world.role_pools()) == ({"default": [A]}, {})
    assert world.registry.pools == (pool,)


def test_pools_of_roles_are_what_they_were_in_another_run():
    """With their names."""
    world = roles((A, "prefill"), (B, "prefill"), (C, "decode"))

    again = restored(world)

    assert (again.pools(), again.role_pools()) == (world.pools(), world.role_pools())
    assert again.registry.clusters == world.registry.clusters


def test_worker_that_is_this_router_is_no_member():
    """Requests would go in circles; by whatever name it is called."""
    world = World(A, NAMED, is_router=lambda address, port: (address, port) == ("10.0.0.9", 8000))
    world.registry.on_address("w1", "10.0.0.9")
    world.commit()

    assert world.pools() == {"default": [A]}
    assert (world[NAMED].state, world[NAMED].reason) == ("unhealthy", "it is this router itself")
    world.registry.on_address("w1", "10.0.0.8")
    world.commit()
    assert world.pools() == {"default": [A, NAMED]}


def test_worker_that_comes_back_has_its_requests_still():
    """They are under way on the same machine."""
    world = healthy(A, B)
    pool, worker = world.registry.pools[0], world.worker(A)
    lease, other = pool.acquire(worker), pool.acquire(worker)
    world.name(B)

    other.release(NOW)
    world.name(B, A)

    assert world.worker(A) is worker
    assert world.worker(A).in_flight == 1
    assert world.pools() == {"default": [B, A]}
    lease.release(NOW)
    world.name(B)
    world.name(B, A)
    assert world.worker(A) is not worker


def test_verdict_that_came_late_does_not_count_for_a_worker_that_returns():
    """Not even until the next commit: it is about the endpoint's earlier life."""
    world = healthy(A, B)
    world.name(B)
    world.say({"cluster_name": "default", "host": host("10.0.0.1:8000"), "add_healthy_event": {}})

    world.registry.apply("static", Reset(specs(A, B)), NOW)
    world.registry.on_models(world[A], None)
    world.commit()

    assert world.states()[A] == "starting"
    assert world.commit() == Change()


# --- memory


def restored(world, *, sources=("static", "file"), **settings):
    """Return a world that begins with what *world* knew, and has committed."""
    memory = msgspec.json.decode(msgspec.json.encode(world.registry.memory()), type=Memory)
    fresh = World(**settings)
    fresh.registry.accepts = lambda _cluster: False  # Envoy has yet to connect
    fresh.registry.restore(memory, fresh.now, sources=sources)
    fresh.commit()
    return fresh


def test_another_run_begins_with_what_the_last_one_knew():
    """Names, models, pools and clusters: Envoy need not be told anything."""
    world = World(A, B, f"{C}/x", NAMED)
    world.registry.on_address("w1", "10.0.0.9")
    world.commit()
    world.learn(A, "x", adapters=["sql"])
    world.learn(B, "y")

    again = restored(world)

    assert again.registry.clusters == world.registry.clusters
    assert again.pools() == world.pools()
    assert again.urls() == world.urls()
    assert again.registry.model_names() == ["sql", "x", "y"]
    assert again[NAMED].endpoint == "10.0.0.9:8000"
    assert [again[key].introduced for key in (A, B, NAMED)] == [True, True, False]
    again.passes(A)
    assert again.candidates() == [A]


def test_pools_are_called_what_they_were_called():
    """Though the worker that gave the name is gone, or the first pool with it."""
    world = World(A, B, C)
    world.serve(a="x", b="y", c="z")
    world.name(B, C)
    world.learn(C, "a")

    again = restored(world)

    assert again.pools() == world.pools() == {"y": [B], "z": [C]}
    assert again.registry.retired == ()


def test_what_administrators_did_stays_done():
    """Who was added is there, who was removed is not, whatever the sources say."""
    world = World(A, B)
    world.registry.add(spec(C, weight=2), NOW)
    world.registry.remove(A, NOW)
    world.commit()

    again = restored(world)

    assert again.urls() == [B, C]
    assert (again[C].source, again[C].spec.weight) == (ADMIN_SOURCE, 2)
    again.registry.apply("file", Reset(()), NOW)
    again.name(A, B)
    assert again.urls() == [B, C]
    again.name(B)
    again.name(A, B)
    assert sorted(again.urls()) == [A, B, C]


def test_source_that_has_spoken_replaces_what_was_remembered():
    """Its workers of another time go, and what was known of the others stays known."""
    world = World(A, B)
    world.serve(a="x", b="y")

    again = restored(world)
    again.name(B, C)

    assert again.urls() == [B, C]
    assert again.registry.model_names() == ["y"]


def test_workers_of_a_source_that_is_no_more_are_forgotten():
    """It will never speak, and they would stay for ever."""
    world = World(A)
    world.name(B, source="file")
    world.registry.add(spec(C), NOW)
    world.commit()

    assert sorted(restored(world, sources=("static",)).urls()) == [A, C]


def test_sources_count_in_the_order_in_which_they_are_started():
    """Not in that of the workers they named."""
    world = World()
    world.name(A, source="file")

    again = restored(world)
    again.registry.apply("static", Add(spec(A, weight=2)), NOW)

    assert (again[A].spec.weight, again[A].source) == (2, "static")


def test_ranks_are_remembered():
    """They need not be asked for again."""
    world = World(A, ranks=0)
    world.registry.on_loads(world[A], {}, (0, 1))
    world.commit()

    again = restored(world, ranks=0)

    assert again.pools() == {"default": [f"{A}@0", f"{A}@1"]}


def test_worker_that_is_removed_and_returns_is_a_stranger():
    """What an earlier run knew counts for its first appearance only."""
    world = World(A)
    world.serve(a="x")
    again = restored(world)
    assert again.registry.model_names() == ["x"]

    again.name()
    again.name(A)

    assert again.registry.model_names() == []


def test_nothing_is_remembered_of_nothing():
    """An empty memory changes nothing."""
    world = restored(World())

    assert world.pools() == {"default": []}
    assert world.registry.memory() == Memory()


def test_worker_that_never_had_an_address_is_remembered_without():
    """It is in no pool, and its name is looked up again."""
    again = restored(World(NAMED))

    assert again.pools() == {"default": []}
    assert again.registry.hosts() == {"w1"}


def test_declared_models_keep_their_pools():
    """They are known without asking."""
    world = World()
    world.registry.apply("static", Reset((spec(A, model="a"), spec(B, model="b"))), NOW)
    world.commit()
    world.registry.apply("static", Remove(A), NOW)
    world.registry.apply("static", Add(spec(C, model="a")), NOW)
    world.commit()
    assert world.pools() == {"b": [B], "a": [C]}

    assert restored(world).pools() == world.pools()


# --- any history

URLS = [A, B, f"{B}@0", f"{B}@1", f"{C}/x", NAMED, "http://w2:8000", "https://10.0.0.1:8000"]
HOSTS = {"w1", "w2"}
ADDRESSES = ["10.0.0.1", "10.0.0.8", "10.0.0.9", "2001:db8::1"]
SPECS = st.builds(
    spec,
    st.sampled_from(URLS),
    weight=st.sampled_from([1.0, 1.0, 2.0]),
    model=st.sampled_from(["", "", "", "x", "z"]),
    worker_type=st.sampled_from([WorkerType.REGULAR] * 4 + [WorkerType.PREFILL]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "try_unhealthy": st.booleans(),
        "lora_any": st.booleans(),
        "ranks": st.sampled_from([1, 1, 0, 2]),
        "follows_envoy": st.sampled_from([True, True, True, False]),
    }
)
SERVED = st.one_of(
    st.none(),
    st.builds(
        ModelList,
        st.frozensets(
            st.sampled_from(["x", "y", "z", "default", "unrouted"]), min_size=1, max_size=2
        ),
        st.frozensets(st.sampled_from(["l1", "l2"]), max_size=1),
    ),
)
EVENTS = st.sampled_from(
    [
        {"add_healthy_event": {}},
        {"add_healthy_event": {}},
        {"eject_unhealthy_event": {"http_status_code": 500}},
        {"health_check_failure_event": {"failure_type": "NETWORK"}},
        {"action": "EJECT", "enforced": True, "type": "CONSECUTIVE_5XX"},
        {"action": "UNEJECT"},
    ]
)


class Histories(RuleBasedStateMachine):
    """Whatever happens in whatever order, the registry makes sense after each commit."""

    def __init__(self):
        super().__init__()
        self.start({})

    def start(self, settings):
        self.settings = settings
        self.world = World(**settings)
        self.registry = self.world.registry
        self.leases = []
        self.workers = set()
        self.where = set()
        self.members = {}
        self.engines = []
        self.accepted = None
        self.registry.accepts = lambda cluster: self.accepted is None or cluster in self.accepted

    @property
    def pools(self):
        return (*self.registry.pools, *self.registry.role_pools)

    @initialize(settings=SETTINGS, named=st.lists(SPECS, min_size=1, max_size=6))
    def settle(self, settings, named):
        self.start(settings)
        self.reset("static", named)
        self.commit(0.0)

    @rule()
    def all_is_well(self):
        """Bring about what is normal, from which all other events lead away."""
        for engine in self.registry.engines:
            for cluster in {engine.cluster, engine.target} - {""}:
                where = {"cluster_name": cluster}
                self.world.say(where | {"host": host(engine.endpoint), "add_healthy_event": {}})
                self.world.say(where | {"upstream_url": engine.endpoint, "action": "UNEJECT"})
            self.registry.on_models(engine, None)
        self.commit(0.0)
        self.acquire_all()

    @rule(accepted=st.sampled_from([None, None, (), ("default", "x", "y")]))
    def accept(self, accepted):
        """Let Envoy have these clusters; None: all."""
        self.accepted = accepted
        self.commit(0.0)

    def acquire_all(self):
        for pool in self.pools:
            for worker in pool.candidates:
                self.leases.append((pool, worker, pool.acquire(worker)))
                self.workers.add(worker)

    @rule(source=st.sampled_from(["static", "file"]), named=st.lists(SPECS, max_size=6))
    def reset(self, source, named):
        self.registry.apply(source, Reset(tuple(named)), self.world.now)

    @rule(source=st.sampled_from(["static", "file"]), added=SPECS)
    def add(self, source, added):
        self.registry.apply(source, Add(added), self.world.now)

    @rule(source=st.sampled_from(["static", "file"]), url=st.sampled_from(URLS))
    def forget(self, source, url):
        self.registry.apply(source, Remove(url), self.world.now)

    @rule(added=SPECS)
    def add_by_hand(self, added):
        known = self.registry.get(added.key)
        before = list(self.registry.engines)
        try:
            engine = self.registry.add(added, self.world.now)
        except WorkerExistsError:
            assert list(self.registry.engines) == before
            return
        assert self.registry.get(added.key) is engine
        assert engine.spec == added
        assert known in (None, engine)
        assert not engine.draining

    @rule(url=st.sampled_from(URLS))
    def remove_by_hand(self, url):
        known = self.registry.get(url) is not None
        assert self.registry.remove(url, self.world.now) is known
        assert self.registry.get(url) is None

    @rule(url=st.sampled_from(URLS), timeout_s=st.sampled_from([0, 50]))
    def drain(self, url, timeout_s):
        known = self.registry.get(url) is not None
        assert self.registry.drain(url, self.world.now + timeout_s) is known

    @rule(host=st.sampled_from(sorted(HOSTS)), address=st.sampled_from(ADDRESSES))
    def resolve(self, host, address):
        self.registry.on_address(host, address)

    @rule(host=st.sampled_from(sorted(HOSTS)))
    def fail_to_resolve(self, host):
        self.registry.on_unresolved(host, "no such name")

    @precondition(lambda self: self.where)
    @rule(event=EVENTS, data=st.data())
    def judge(self, event, data):
        cluster, endpoint = data.draw(st.sampled_from(sorted(self.where)))
        place = {"upstream_url": endpoint} if "action" in event else {"host": host(endpoint)}
        self.world.say({"cluster_name": cluster, **place, **event})
        self.commit(0.0)

    @precondition(lambda self: self.registry.engines)
    @rule(models=SERVED, data=st.data())
    def introduce(self, models, data):
        engine = data.draw(st.sampled_from(list(self.registry.engines)))
        self.registry.on_models(engine, models)
        self.commit(0.0)

    @precondition(lambda self: self.registry.engines)
    @rule(ranks=st.sampled_from([(), (0,), (0, 1), (0, 1, 2)]), data=st.data())
    def measure(self, ranks, data):
        engine = data.draw(st.sampled_from(list(self.registry.engines)))
        self.registry.on_loads(engine, {}, ranks)

    @precondition(lambda self: self.where)
    @rule(suspended=st.booleans(), data=st.data())
    def suspend(self, suspended, data):
        _, endpoint = data.draw(st.sampled_from(sorted(self.where)))
        self.registry.suspend(endpoint, suspended=suspended)
        self.commit(0.0)

    @precondition(lambda self: self.leases)
    @rule(kept=st.integers(0, 3), data=st.data())
    def release(self, kept, data):
        while len(self.leases) > kept:
            index = data.draw(st.integers(0, len(self.leases) - 1))
            _, _, lease = self.leases.pop(index)
            assert lease.release(self.world.now)
            assert not lease.release(self.world.now)

    @rule(passed_s=st.sampled_from([0.0, 0.0, 1.0, 40.0, 700.0]))
    def commit(self, passed_s):
        self.world.now += passed_s
        self.registry.end_drains(self.world.now)
        clusters = self.registry.clusters
        states = {e: (e.state, e.reason) for e in self.registry.engines}

        returns = {
            e
            for e in self.registry.engines
            if e.state in {State.UNHEALTHY, State.EJECTED} and not e.introduced
        }

        change = self.registry.commit(self.world.now)

        registry = self.registry
        assert all(e.state is not State.HEALTHY for e in returns)
        assert registry.commit(self.world.now) == Change()
        assert change.clusters is (registry.clusters != clusters)
        assert set(change.states) == {
            e for e in registry.engines if (e.state, e.reason) != states[e]
        }
        gone = [e for e in self.engines if registry.get(e.key) is not e]
        assert list(change.removed) == gone
        self.engines = list(registry.engines)
        members = {p.name: p.members for p in self.pools}
        assert change.members or members == self.members or not self.members
        self.members = members
        where = {(c.name, e.endpoint) for c in registry.clusters for e in c.endpoints}
        for cluster, endpoint in where - self.where:
            assert registry.verdicts.get(cluster, endpoint) == UNKNOWN
        self.where = where
        self.check_pools()
        self.check_models()
        self.check_clusters()

    def check_pools(self):
        registry = self.registry
        names = [pool.name for pool in (*self.pools, *registry.retired)]
        assert len(names) == len(set(names))
        assert not RESERVED_NAMES & set(names)
        everybody = [worker for pool in self.pools for worker in pool.members]
        assert len({worker.url for worker in everybody}) == len(everybody)
        assert len({worker.order for worker in everybody}) == len(everybody)
        assert {w for e in registry.engines for w in e.workers} == set(everybody)
        for engine in registry.engines:
            assert bool(engine.workers) is (bool(engine.address) and not engine.twin)
            assert {worker.cluster for worker in engine.workers} <= {engine.cluster}
            assert {worker.weight for worker in engine.workers} <= {engine.spec.weight}
            assert bool(engine.cluster) is bool(engine.target) is bool(engine.workers)
        of = {w: e for e in registry.engines for w in e.workers}
        for pool in self.pools:
            assert pool.members or registry.pools == (pool,)
            roles = {of[worker].spec.worker_type for worker in pool.members}
            assert len(roles) <= 1
            assert (pool in registry.role_pools) is (WorkerType.PREFILL in roles)
            assert pool.spread is (len({worker.cluster for worker in pool.members}) > 1)
            orders = [worker.order for worker in pool.members]
            assert orders == sorted(orders)
            told = pool.policy.members[-1] if pool.policy.members else []
            assert told == [worker.url for worker in pool.members]
            assert list(pool.candidates) == [w for w in pool.members if w in pool.candidates]
            picked = [of[w] for w in pool.candidates]
            assert all(e.state is not State.DRAINING for e in picked)
            healthy = [e for e in map(of.get, pool.members) if e.state in PICKABLE]
            if healthy:
                assert all(e.state in PICKABLE for e in picked)
                assert len({e.suspended for e in picked}) == 1
                assert picked[0].suspended is all(e.suspended for e in healthy)
            else:
                assert not picked or self.settings.get("try_unhealthy")

    def check_models(self):
        registry = self.registry
        of = {w: e for e in registry.engines for w in e.workers}
        regular = [of[w] for p in registry.pools for w in p.members]
        known = {engine.names for engine in regular if engine.names}
        assert registry.uniform is (len(known) <= 1 and len(registry.pools) == 1)
        for name in registry.model_names():
            pool = registry.pool_of(name)
            assert pool in registry.pools
            assert any(name in (of[w].names or ()) for w in pool.members)
            found = pool.candidates_for(name)
            assert set(found) <= set(pool.members)
            if found != pool.candidates:
                able = [name in of[w].names if of[w].names else None for w in found]
                assert all(able) or not any(able)
        for name in "xyz":
            serving = {
                p for p in registry.pools for w in p.members if name in (of[w].base_models or ())
            }
            assert len(serving) <= 1

    def check_clusters(self):
        views = self.registry.clusters
        names = [view.name for view in views]
        assert len(names) == len(set(names))
        assert any(view.is_default for view in views)
        for view in views:
            endpoints = [e.endpoint for e in view.endpoints]
            assert endpoints == sorted(set(endpoints))
        live = dict(zip(names, views, strict=True))
        wanted = {}
        for pool in self.pools:
            for engine in self.registry.engines:
                if not set(engine.workers) & set(pool.members):
                    continue
                assert engine.target == cluster_name(pool.name, engine.spec.url.path)
                for name in (engine.cluster, engine.target):
                    assert live[name].path == engine.spec.url.path
                    wanted.setdefault(name, set()).add(engine.endpoint)
        for name, endpoints in wanted.items():
            assert {e.endpoint for e in live[name].endpoints} == endpoints

    @precondition(lambda self: not self.registry._members_changed)
    @rule()
    def restart(self):
        settings = self.settings
        again = restored(self.world, **settings)
        for of in (World.pools, World.role_pools):
            pools = {name: sorted(urls) for name, urls in of(self.world).items() if urls}
            assert {name: sorted(urls) for name, urls in of(again).items() if urls} == pools
        assert again.urls() == self.world.urls()
        for engine in self.registry.engines:
            same = again[engine.key]
            assert (same.cluster, same.target) == (engine.cluster, engine.target)
            assert same.draining is engine.draining

    @invariant()
    def leases_are_counted(self):
        counted = [worker for _, worker, _ in self.leases]
        assert all(worker.in_flight == counted.count(worker) for worker in self.workers)
        pools = [pool for pool, _, _ in self.leases]
        known = {*self.pools, *self.registry.retired}
        assert known >= set(pools)
        assert all(pool.in_flight == pools.count(pool) for pool in known)


@pytest.mark.slow
def test_registry_makes_sense_after_any_history():
    """Members, candidates, clusters, leases and verdicts agree at every commit."""
    run_state_machine_as_test(
        Histories, settings=hypothesis_settings(max_examples=150, stateful_step_count=40)
    )


def play(seed):
    """Return what the registry looks like after a history that *seed* decides."""
    rng = random.Random(seed)
    world = World(*rng.sample(URLS, 5))
    for _ in range(60):
        match rng.randrange(6):
            case 0:
                world.name(
                    *rng.sample(URLS, rng.randrange(7)), source=rng.choice(["static", "file"])
                )
            case 1:
                world.registry.on_address(rng.choice(sorted(HOSTS)), rng.choice(ADDRESSES))
            case 2:
                for engine in list(world.registry.engines):
                    base = frozenset(rng.sample("xyzuvw", rng.randrange(1, 4)))
                    adapters = frozenset(rng.sample(["l1", "l2", "l3"], rng.randrange(3)))
                    world.registry.on_models(engine, ModelList(base, adapters))
            case 3:
                world.registry.remove(rng.choice(URLS), world.now)
            case _:
                placed = [e for e in world.registry.engines if e.workers]
                world.passes(*(engine.key for engine in placed))
        world.commit()
    models = world.registry.model_names()
    return [
        repr(world.registry.clusters),
        repr(world.pools()),
        repr(world.states()),
        repr([(m, [p.candidates_for(m) for p in world.registry.pools]) for m in models]),
        msgspec.json.encode(world.registry.memory()).decode(),
    ]


@pytest.mark.slow
def test_equal_histories_give_equal_views():
    """Whatever the hashes of strings are in a process: replicas agree with each other."""
    script = (
        "import json, runpy, sys; play = runpy.run_path(sys.argv[1])['play'];"
        "print(json.dumps([play(seed) for seed in range(20)]))"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", script, __file__],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
            text=True,
            timeout=50,
        ).stdout
        for seed in ("1", "2")
    ]

    assert json.loads(found[0]) == json.loads(found[1])


def test_source_is_the_one_whose_description_counts():
    """When the first to name a worker forgets it, the next stands there."""
    world = World()
    for source in ("file", "dns x"):
        world.registry.apply(source, Reset(specs(A)), NOW)
    world.commit()
    assert world[A].source == "file"

    world.registry.apply("file", Reset(()), NOW)
    world.commit()

    assert world[A].source == "dns x"


def test_worker_that_an_earlier_run_had_asked_is_picked_at_once_after_a_restart():
    """Whatever it answered then: the service was away, and its workers were not."""
    before = World(A)
    before.passes(A)
    before.registry.on_models(before[A], None)
    before.commit()
    after = World()
    after.registry.restore(before.registry.memory(), NOW, sources=["static"])
    after.commit()

    after.passes(A)

    assert (after.states(), after.candidates()) == ({A: "healthy"}, [A])


def test_pool_is_tripped_while_all_its_circuits_are_open():
    """Ejected for their answers. One that is being drained does not count, one that is down does."""
    world = healthy(A, B, C)
    (pool,) = world.registry.pools
    world.ejects(A, B)
    assert not pool.is_tripped()

    world.registry.drain(C, NOW + 60)
    world.commit()
    assert pool.is_tripped()

    world.fails(B)
    assert world.states()[B] == "ejected"
    assert not pool.is_tripped()


def test_pool_is_tripped_for_a_model_that_only_open_circuits_serve():
    """The others of the pool cannot help."""
    world = World(A, B)
    world.serve(a="x lora", b="x")
    world.ejects(A)
    (pool,) = world.registry.pools

    assert pool.is_tripped("lora")
    assert not pool.is_tripped("x")
    assert not pool.is_tripped()


def test_pool_of_workers_that_are_all_drained_or_gone_is_not_tripped():
    """There is nobody who answers with errors."""
    world = healthy(A)
    (pool,) = world.registry.pools
    world.ejects(A)
    world.registry.drain(A, NOW + 60)
    world.commit()
    assert not pool.is_tripped()

    world.registry.remove(A, NOW)
    world.commit()
    assert not world.registry.pools[0].is_tripped()
