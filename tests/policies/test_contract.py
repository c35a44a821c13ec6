"""What holds for every policy; a new one is tested here without a line being added."""

from __future__ import annotations

import ast
import gc
import inspect
import random
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from policies import registry
from policies.base import (
    BodyChooser,
    Content,
    MembershipObserver,
    Observer,
    Policy,
    Request,
    SessionKeeper,
    Worker,
)

registry.load_builtin()  # parameters are collected before any fixture runs
NAMES = sorted(registry.registered())
STEPS = 10_000
FILES = sorted(Path(next(iter(policies.__path__))).glob("*.py"))


def random_request(rng):
    """Return a request with or without a session, a body, and prompts that begin alike."""
    # A lone surrogate is what a token id may become.
    session = rng.choice(["", "\ud800", *(f"s{n}" for n in range(40))])
    names = ["x-session-id", "x-user-id", "x-request-id", "content-type", "x-a"]
    request = Request(
        rng.choice(["POST", "GET", ""]),
        rng.choice(["/v1/chat/completions", "/v1/models?x=1", ""]),
        {rng.choice(names): rng.choice([session, "multipart/form-data"])}
        if rng.random() < 0.5
        else {},
        rng.choice([None, b"", b"{}", b"\xff\x00"]),
    )
    if rng.random() < 0.7:
        texts = [
            "".join(rng.choices("ab\ud800", [8, 8, 1], k=rng.randrange(20)))
            for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))
        ]
        replies = ()
        if texts and rng.random() < 0.5:  # a part of the first prompt
            begin = rng.randrange(len(texts[0]) + 1)
            replies = ((begin, rng.randrange(begin, len(texts[0]) + 1)),)
        request.content = Content(
            model=rng.choice(["", "m"]),
            session=session,
            prompts=tuple(texts),
            tokens=rng.random() < 0.2,
            replies=replies,
            opening=texts[0][:8] if texts else "",
        )
    return request


# Shrinks less well than a strategy for every field, and costs a hundredth.
requests = st.integers(0, 2**32).map(lambda seed: random_request(random.Random(seed)))
headers = st.dictionaries(
    st.sampled_from(["x-user-id", "x-session-id", "x-a", "content-type"]), st.text(max_size=8)
)
loads = st.lists(st.integers(0, 5), min_size=1, max_size=8)
weights = st.sampled_from([None, None, 1.0, 0.25, 3.0])
seeds = st.integers(0, 2**32)


def make(name, members=()):
    """Return a new policy that has been told its members, as the router does first of all."""
    policy = registry.policy_class(name)()
    joined(policy, members)
    return policy


def fleet(loads, *, first_order=0, weight=None):
    """Return workers with these loads; *weight* is that of every second one."""
    return tuple(
        Worker(
            url=f"http://10.0.0.{order}:8000",
            endpoint=f"10.0.0.{order}:8000",
            order=order,
            in_flight=load,
            weight=weight if weight is not None and order % 2 else 1.0,
        )
        for order, load in enumerate(loads, start=first_order)
    )


def state(worker):
    return (worker.url, worker.endpoint, worker.order, worker.in_flight, worker.weight)


def joined(policy, members):
    if isinstance(policy, MembershipObserver):
        policy.on_workers(tuple(members))


def sent(policy, worker, request, now):
    if isinstance(policy, Observer):
        policy.on_sent(worker, request, now)


def done(policy, worker, now):
    if isinstance(policy, Observer):
        policy.on_done(worker, now)


@pytest.mark.parametrize("name", NAMES)
def test_policy_says_who_it_is(name):
    """It has the name it is registered under, a plain answer on bodies, and a docstring."""
    policy = make(name)

    assert isinstance(policy, Policy)
    assert policy.name == name
    assert isinstance(policy.needs_body, bool)
    assert policy.needs_body or not isinstance(policy, BodyChooser)
    assert inspect.getdoc(type(policy))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(
    loads=loads,
    weight=weights,
    history=st.lists(st.tuples(requests, st.integers(0, 7)), max_size=5),
    request=requests,
    seed=seeds,
)
def test_pick_is_one_of_the_candidates(name, *, loads, weight, history, request, seed):
    """The very object, also when candidates are picked away one by one; no worker is changed."""
    workers = fleet(loads, weight=weight)
    policy, rng = make(name, workers), random.Random(seed)
    for earlier, number in history:
        sent(policy, workers[number % len(workers)], earlier, 0.0)
    before = [state(worker) for worker in workers]
    rest = workers
    while rest:
        picked = policy.pick(request, rest, now=1.0, rng=rng)
        assert any(picked is worker for worker in rest)
        rest = tuple(worker for worker in rest if worker is not picked)

    assert [state(worker) for worker in workers] == before


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(request=requests, seed=seeds, load=st.integers(0, 100), order=st.integers(0, 1000))
def test_the_only_candidate_is_picked(name, request, seed, load, order):
    """However busy it is, and whatever came before."""
    (worker,) = fleet([load], first_order=order)
    policy, rng = make(name, [worker]), random.Random(seed)

    for now in (0.0, 1.0):
        assert policy.pick(request, (worker,), now=now, rng=rng) is worker
        sent(policy, worker, request, now)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(
    loads=loads,
    weight=weights,
    history=st.lists(requests, max_size=6),
    request=requests,
    seed=seeds,
)
def test_asking_does_not_change_the_answer(name, *, loads, weight, history, request, seed):
    """With the same state of the generator the same question has the same answer, always."""
    workers = fleet(loads, weight=weight)
    policy, rng = make(name, workers), random.Random(seed)
    for earlier in history:
        sent(policy, policy.pick(earlier, workers, now=0.0, rng=rng), earlier, 0.0)

    answers = set()
    for others in range(4):
        asking = random.Random(seed + 1)
        answers.add(id(policy.pick(request, workers, now=1.0, rng=asking)))
        fewer = workers[: 1 + others % len(workers)]
        policy.pick(request, fewer, now=1.0, rng=random.Random(others))

    assert len(answers) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(loads=loads, calls=st.lists(requests, max_size=12), seed=seeds)
def test_same_seed_and_calls_give_the_same_picks(name, loads, calls, seed):
    """Two policies of one kind that live through the same decide the same."""
    runs = []
    for _ in range(2):
        workers = fleet(loads)
        policy, rng, picks = make(name, workers), random.Random(seed), []
        for number, request in enumerate(calls):
            picked = policy.pick(request, workers, now=float(number), rng=rng)
            sent(policy, picked, request, float(number))
            if number % 3 == 2:
                done(policy, picked, float(number))
            picks.append(picked.url)
        runs.append(picks)

    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(loads=loads, request=requests, seed=seeds)
def test_no_randomness_but_the_given(name, loads, request, seed):
    """The generator of the process is not touched."""
    workers = fleet(loads)
    policy = make(name, workers)
    before = random.getstate()

    policy.pick(request, workers, now=0.0, rng=random.Random(seed))

    assert random.getstate() == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("by", ["header", "body", "nothing"])
def test_every_worker_can_be_picked(name, seed, by):
    """With equal loads and all kinds of sessions and prompts nobody is left out for ever."""
    workers = fleet([0, 0, 0])
    policy, rng, picked = make(name, workers), random.Random(seed), set()
    for number in range(100):
        text = f"{number:03}"
        request = Request("POST", "/", {"x-session-id": text} if by == "header" else {})
        if by == "body":
            request.content = Content("m", text, (text,), opening=text)
        worker = policy.pick(request, workers, now=0.0, rng=rng)
        sent(policy, worker, request, 0.0)
        done(policy, worker, 0.0)
        picked.add(worker.url)

    assert picked == {worker.url for worker in workers}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_long_life_of_a_policy_never_raises(name, seed):
    """10,000 random joins, removals, picks, sends and ends in any order; every pick is a candidate."""
    rng, picking = random.Random(seed), random.Random(seed)
    workers = list(fleet([0, 0]))
    policy = make(name, workers)
    order = len(workers)
    leases = []
    picks = 0
    for step in range(STEPS):
        now = step * 3.0  # sessions and trees of old requests expire on the way
        action = rng.choice(["join", "leave", *["pick", "send", "end"] * 3, "end again", "finish"])
        if action == "join" and len(workers) < 12:
            # A worker that comes back is a new object, under the same URL or another one.
            (worker,) = fleet([0], first_order=order)
            worker.url = f"http://10.0.0.{rng.randrange(20)}:8000"
            worker.weight = rng.choice([1.0, 1.0, 1.0, 2.5])
            if all(worker.url != other.url for other in workers):
                workers.append(worker)
                order += 1
                joined(policy, workers)
        elif action == "leave" and workers:
            workers.pop(rng.randrange(len(workers)))
            joined(policy, workers)
            if step % 25 == 0:
                assert_nobody_else_is_kept(policy, workers)
        elif action in {"pick", "send"} and workers:
            request = random_request(rng)
            candidates = tuple(w for w in workers if rng.random() < 0.8) or tuple(workers)
            picked = policy.pick(request, candidates, now=now, rng=picking)
            assert any(picked is worker for worker in candidates)
            picks += 1
            if action == "send":
                sent(policy, picked, request, now)
                picked.in_flight += 1
                leases.append(picked)
        elif action == "end" and leases:
            worker = leases.pop(rng.randrange(len(leases)))
            worker.in_flight -= 1
            done(policy, worker, now)
        elif action == "end again" and workers:
            # e.g. a policy that was put in place while requests were under way
            done(policy, rng.choice(workers), now)
        elif action == "finish" and isinstance(policy, SessionKeeper):
            policy.finish_session(f"s{rng.randrange(60)}")

    assert picks > STEPS / 5
    assert_nobody_else_is_kept(policy, workers)
    joined(policy, ())
    assert_nobody_else_is_kept(policy, ())
    assert len(reachable(policy)) < len(reachable(make(name))) + 100, "state of nobody is kept"


def reachable(thing):
    """Return every object that *thing* leads to, code and types left out."""
    found, stack = {}, [thing]
    while stack:
        one = stack.pop()
        if id(one) in found or isinstance(
            one, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType
        ):
            continue
        found[id(one)] = one
        stack += gc.get_referents(one)
    return found.values()


def assert_nobody_else_is_kept(policy, members):
    """Assert that no worker but *members* can be reached from *policy*."""
    kept = {id(one) for one in reachable(policy) if isinstance(one, Worker)}
    assert kept <= {id(worker) for worker in members}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(
    loads=loads,
    weight=weights,
    calls=st.lists(st.tuples(requests, st.integers(0, 7), st.booleans()), min_size=1, max_size=8),
    seed=seeds,
)
def test_questions_leave_no_trace(name, *, loads, weight, calls, seed):
    """Of two policies with the same news the one that is asked all the time answers like the other."""
    workers = fleet(loads, weight=weight)
    quiet, asked = make(name, workers), make(name, workers)
    other = random.Random(seed + 1)
    for number, (request, at, to_it) in enumerate(calls):
        now = float(number)
        asked.pick(request, workers[at % len(workers) :], now=now, rng=other)
        asked.pick(calls[0][0], workers, now=now + 1e6, rng=other)

        one = quiet.pick(request, workers, now=now, rng=random.Random(seed + number))
        two = asked.pick(request, workers, now=now, rng=random.Random(seed + number))

        assert one is two
        for policy in (quiet, asked):
            sent(policy, one if to_it else workers[at % len(workers)], request, now)


@pytest.mark.parametrize("name", NAMES)
def test_two_policies_share_no_state(name):
    """What one has seen does not show in the other: nothing is kept in the class or the module."""
    workers, rng = fleet([0, 0, 0]), random.Random(1)
    calls = [random_request(rng) for _ in range(20)]

    def picks():
        policy, rng = make(name, workers), random.Random(2)
        for call in calls:
            picked = policy.pick(call, workers, now=0.0, rng=rng)
            sent(policy, picked, call, 0.0)
            yield picked.url

    assert list(picks()) == list(picks())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(headers=headers)
def test_whether_the_body_is_wanted_is_a_plain_answer(name, headers):
    """Any headers; the same twice."""
    policy = make(name)
    if isinstance(policy, BodyChooser):
        wanted = policy.wants_body(headers)
        assert wanted is policy.wants_body(dict(headers))
        assert isinstance(wanted, bool)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_policies_import_only_the_standard_library(path):
    """And nothing of it that waits, tells the time or talks."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            imported.add(str(node.module).partition(".")[0])

    assert imported <= sys.stdlib_module_names | {"policies"}
    assert not imported & {"asyncio", "logging", "socket", "threading", "time", "os", "secrets"}
