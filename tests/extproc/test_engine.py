"""The state of a worker follows from what is known of it."""

from __future__ import annotations

import pytest

from extproc.address import WorkerUrl
from extproc.attempt import Attempt, Outcome
from extproc.circuit import Circuit, CircuitRules
from extproc.discovery.updates import WorkerSpec
from extproc.engine import Engine, State
from extproc.models import ModelList
from extproc.verdicts import UNKNOWN, Verdict
from policies.base import Worker

PASSING = Verdict(passing=True)
FAILING = Verdict(passing=False, failure="its health check answers 500")
EJECTED = Verdict(passing=True, ejected=True, ejection="errors in a row (5xx)")


OPEN_REASON = "1 failure, the last one: status 500; it is tried again at 1970-01-01T00:02:00Z"
HALF_OPEN_REASON = "it is tried with one request at a time: 0 of 3 succeeded"


def open_circuit():
    """Return a circuit that is open from 60 to 120."""
    circuit = Circuit(CircuitRules(failures=1))
    circuit.on_attempt(Attempt("", Outcome.FAILED, 500, 60.0), 60.0)
    return circuit


def half_open_circuit():
    """Return a circuit that is half-open."""
    circuit = open_circuit()
    circuit.advance(120.0, 0)
    return circuit


def make(url="http://10.0.0.1:8000", **fields):
    spec = WorkerSpec(WorkerUrl.parse(url), model=fields.pop("model", ""))
    fields = {"added_at": 100.0, "since": 100.0, "address": "10.0.0.1", **fields}
    return Engine(spec, "static", **{"introduced": True, **fields})


@pytest.mark.parametrize(
    ("fields", "verdict", "now", "state", "reason"),
    [
        ({}, PASSING, 101, State.HEALTHY, ""),
        ({}, None, 101, State.HEALTHY, ""),
        ({}, UNKNOWN, 101, State.STARTING, "its first health check is under way"),
        ({}, UNKNOWN, 160, State.UNHEALTHY, "its first health check is under way"),
        ({}, Verdict(failure="no"), 101, State.STARTING, "no"),
        ({}, Verdict(failure="no"), 160, State.UNHEALTHY, "no"),
        ({}, FAILING, 101, State.UNHEALTHY, "its health check answers 500"),
        ({"circuit": open_circuit()}, PASSING, 101, State.EJECTED, OPEN_REASON),
        ({"circuit": open_circuit()}, FAILING, 101, State.EJECTED, OPEN_REASON),
        ({"circuit": open_circuit()}, None, 101, State.EJECTED, OPEN_REASON),
        ({"circuit": half_open_circuit()}, PASSING, 101, State.HALF_OPEN, HALF_OPEN_REASON),
        ({"circuit": half_open_circuit()}, EJECTED, 101, State.HALF_OPEN, HALF_OPEN_REASON),
        ({"circuit": half_open_circuit()}, FAILING, 101, State.UNHEALTHY, FAILING.failure),
        ({"circuit": Circuit(CircuitRules())}, EJECTED, 101, State.HEALTHY, ""),
        ({"introduced": False}, PASSING, 101, State.STARTING, "it is being asked for its models"),
        ({"introduced": False}, None, 999, State.STARTING, "it is being asked for its models"),
        ({"introduced": False}, FAILING, 101, State.UNHEALTHY, "its health check answers 500"),
        ({"introduced": False, "circuit": open_circuit()}, None, 101, State.EJECTED, OPEN_REASON),
        (
            {"introduced": False, "circuit": half_open_circuit()},
            PASSING,
            101,
            State.STARTING,
            "it is being asked for its models",
        ),
        (
            {"draining": True, "circuit": open_circuit()},
            None,
            101,
            State.DRAINING,
            "it is being removed",
        ),
        ({"address": ""}, UNKNOWN, 101, State.STARTING, "its name is being resolved"),
        ({"address": "", "unresolved": "no such name"}, None, 101, State.STARTING, "no such name"),
        ({"address": "", "unresolved": "x"}, None, 160, State.UNHEALTHY, "x"),
        ({"draining": True}, PASSING, 101, State.DRAINING, "it is being removed"),
        ({"draining": True}, FAILING, 160, State.DRAINING, "it is being removed"),
        ({"draining": True, "address": ""}, None, 101, State.DRAINING, "it is being removed"),
        (
            {"models_unread": "its certificate is refused: expired"},
            Verdict(failure="it cannot be reached"),
            101,
            State.STARTING,
            "its certificate is refused: expired",
        ),
        ({"models_unread": "connection refused"}, Verdict(failure="no"), 101, State.STARTING, "no"),
        ({"is_router": True}, None, 101, State.UNHEALTHY, "it is this router itself"),
        (
            {"twin": "http://a:1"},
            PASSING,
            101,
            State.UNHEALTHY,
            "it is at the same address as http://a:1",
        ),
    ],
)
def test_state_and_reason_follow_from_what_is_known(fields, verdict, now, state, reason):
    """Draining counts first, then the address, the circuit, Envoy's checks, and last its own answer."""
    engine = make(**fields)

    engine.judge(verdict, now, startup_s=60)

    assert (engine.state, engine.reason) == (state, reason)


def test_judging_tells_of_changes_only():
    """A new reason is a change, too, but the state has begun when it began."""
    engine = make()

    assert engine.judge(UNKNOWN, 110, startup_s=60)
    assert engine.since == 100
    assert not engine.judge(UNKNOWN, 120, startup_s=60)
    assert engine.judge(PASSING, 130, startup_s=60)
    assert engine.since == 130
    assert engine.judge(FAILING, 140, startup_s=60)
    assert engine.judge(Verdict(passing=False, failure="other"), 150, startup_s=60)
    assert (engine.since, engine.reason) == (140, "other")


def test_worker_that_passed_once_is_never_called_starting_for_its_age():
    """Once it has passed, failing makes it unhealthy however young it is."""
    engine = make()
    engine.judge(PASSING, 101, startup_s=60)

    engine.judge(FAILING, 102, startup_s=60)

    assert engine.state is State.UNHEALTHY


@pytest.mark.parametrize(
    ("url", "address", "endpoint"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1", "10.0.0.1:8000"),
        ("http://w1:8000", "", ""),
        ("http://w1", "10.0.0.9", "10.0.0.9:80"),
        ("https://w1/x", "2001:db8:0::1", "[2001:db8::1]:443"),
    ],
)
def test_endpoint_is_the_address_that_envoy_knows(url, address, endpoint):
    """Empty while the name is not resolved, IPv6 in its shortest form."""
    assert make(url, address=address).endpoint == endpoint


def test_cluster_and_requests_are_those_of_its_workers():
    """The requests of all its ranks count; it is in a cluster when it is put into one."""
    ranks = [Worker(f"u@{n}", "10.0.0.1:8000", n, rank=n, cluster="default") for n in (0, 1)]
    ranks[0].in_flight, ranks[1].in_flight = 2, 3

    assert (make().cluster, make().target, make().in_flight) == ("", "", 0)
    assert make(workers=tuple(ranks)).in_flight == 5


@pytest.mark.parametrize(
    ("model", "said", "base", "adapters", "model_id"),
    [
        ("", None, None, set(), "unknown"),
        ("gpt", None, {"gpt"}, set(), "gpt"),
        ("", ModelList(frozenset({"a"}), frozenset({"l"}), ({"id": "a"},)), {"a"}, {"l"}, "a"),
        ("", ModelList(frozenset({"a", "b"}), frozenset(), ({"id": "b"},)), {"a", "b"}, set(), "b"),
        ("gpt", ModelList(frozenset({"a"})), {"a", "gpt"}, set(), "gpt"),
        ("", ModelList(frozenset({"a"})), {"a"}, set(), "unknown"),
        ("", ModelList(frozenset()), None, set(), "unknown"),
    ],
)
def test_models_are_those_it_says_and_the_one_it_is_known_for(
    model, said, base, adapters, model_id
):
    """The declared name counts beside what it says, and stands for the others in a list."""
    engine = make(model=model, models=said)

    assert (engine.base_models, engine.adapters) == (base, adapters)
    assert engine.model_id == model_id
    for name in ("a", "b", "l", "gpt", "x"):
        assert (name in (engine.names or ())) is (
            base is not None and (name in adapters or name in base)
        )


def test_what_is_known_is_what_another_run_needs():
    """Models in a fixed order, the address, the ranks and the pool; the key is the URL with its rank."""
    engine = make("http://w1:8000@3", models=ModelList(frozenset("ba"), frozenset("z")), ranks=(0,))

    known = engine.known("default")

    assert engine.key == "http://w1:8000@3"
    assert (known.spec, known.source, known.address) == (engine.spec, "static", "10.0.0.1")
    assert (known.base, known.adapters, known.ranks) == (("a", "b"), ("z",), (0,))
    assert known.pool == "default"
    assert make().known("").base == ()
