"""From a request to an ordered list of workers."""

from __future__ import annotations

import collections
import dataclasses
import json
import random

import pytest

from extproc.admission import Place, Wait
from extproc.discovery.updates import Add, Remove
from extproc.errors import Refusal, refusal_message
from extproc.openai import parse_content
from extproc.router import (
    MAX_ENDPOINTS,
    MAX_NAME_SHOWN_CHARS,
    MAX_NAMES_SHOWN,
    Held,
    Refused,
    Routed,
    Router,
)
from policies import registry as policies
from policies.base import Request, Worker
from policies.random import Random
from policies.round_robin import RoundRobin
from tests.extproc.recorder import Recorder
from tests.fleets import STATIC, at_endpoints, registry_of, remove, reset, say, spec_of

ENDPOINTS = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]


policies.load_builtin()  # names are collected before any fixture runs
POLICIES = sorted(policies.registered())


def start(policy, *workers, seed=20_261):
    """Return a router and the pool of the workers at these endpoints (those of ``ENDPOINTS``)."""
    registry = at_endpoints(*(workers or ENDPOINTS), policy=policy)
    return Router(registry, random.Random(seed)), registry.pools[0]


def endpoints_of(count):
    return [f"10.0.0.{n}:8000" for n in range(count)]


def endpoints(decision):
    assert isinstance(decision, Routed)
    return [worker.endpoint for worker in decision.workers]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("policy", [Recorder, RoundRobin, Random])
def test_pick_comes_with_as_many_fallbacks_as_there_are(get, policy, count):
    """Up to three workers of the pool, none twice."""
    router, pool = start(policy(), *endpoints_of(count))

    decision = router.decide(get, 0.0)

    assert decision.pool is pool
    assert len(decision.workers) == min(count, MAX_ENDPOINTS)
    assert len(set(decision.workers)) == len(decision.workers)
    assert set(decision.workers) <= set(pool.candidates)


def test_fallbacks_are_asked_of_the_policy(get):
    """Each is what the policy picks when those before it are not there."""
    policy = RoundRobin()
    router, pool = start(policy)
    policy.on_sent(pool.candidates[1], get, 0.0)

    assert endpoints(router.decide(get, 0.0)) == [ENDPOINTS[2], ENDPOINTS[0], ENDPOINTS[1]]


def test_empty_pool_refuses(rng, get, policy):
    """There is nobody to ask the policy about."""
    decision = Router(registry_of(policy=policy), rng).decide(get, 0.0)

    assert decision == Refused(Refusal.NO_WORKER)
    assert policy.sent == []


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (None, ENDPOINTS),
        (["10.0.0.2:8000"], ["10.0.0.2:8000"]),
        (["10.0.0.2"], ["10.0.0.2:8000"]),
        (["10.0.0.3", "10.0.0.1:8000", "10.0.0.9"], ["10.0.0.1:8000", "10.0.0.3:8000"]),
        (["10.0.0.2:8001"], None),
        (["10.0.0"], None),
        ([""], None),
        ([], None),
    ],
    ids=str,
)
def test_subset_limits_who_is_asked_about(get, subset, expected):
    """``ip:port`` or ``ip``; who is in no entry is no candidate, and none at all is a refusal."""
    router, _ = start(Recorder())

    decision = router.decide(get, 0.0, subset=subset)

    if expected is None:
        assert decision == Refused(Refusal.NO_WORKER)
    else:
        assert endpoints(decision) == expected


@pytest.mark.parametrize("entry", ["[2001:db8::1]:8000", "[2001:db8::1]", "2001:db8::1"])
def test_subset_may_name_ipv6_with_and_without_port(get, entry):
    """Without a port there are no brackets needed."""
    router, _ = start(Recorder(), "[2001:db8::1]:8000", "[2001:db8::2]:8000")

    decision = router.decide(get, 0.0, subset={entry})

    assert decision != Refused(Refusal.NO_WORKER)
    assert endpoints(decision) == ["[2001:db8::1]:8000"]


def test_workers_at_one_endpoint_are_named_once(get):
    """Two names of one machine: a retry must not go where the first attempt failed."""
    router, _ = start(Recorder(), "10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.2:8000")

    decision = router.decide(get, 0.0)

    assert endpoints(decision) == ["10.0.0.1:8000", "10.0.0.2:8000"]


def test_observer_hears_of_the_first_choice_only(registry, pool, policy, rng, get):
    """Once per request with its time; fallbacks and refusals are not sent to."""
    router = Router(registry, rng)

    router.decide(get, 1.5)
    router.decide(get, 2.5, subset=())

    assert policy.sent == [(pool.candidates[0], 1.5)]
    assert policy.done == []


def test_policy_that_observes_nothing_is_not_told(get):
    """``on_sent`` and ``on_done`` are optional."""
    router, pool = start(Random())

    decision = router.decide(get, 0.0)

    assert pool.acquire(decision.workers[0]).release(1.0)


def test_fallbacks_go_to_other_hosts_first(get):
    """What took the first worker down may have taken its host; then the rest, in the policy's order."""
    router, _ = start(
        Recorder(), "10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1", "10.0.0.2:2", "10.0.0.3:1"
    )

    decision = router.decide(get, 0.0)

    assert endpoints(decision) == ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]


def test_fallbacks_stay_on_the_host_when_there_is_no_other(get):
    """One machine with several workers is better than no fallback."""
    router, _ = start(Recorder(), "10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3")

    decision = router.decide(get, 0.0)

    assert endpoints(decision) == ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3"]


class Keeper(Recorder):
    """Knows its members; wants the body of every second request."""

    members = ()

    def on_workers(self, workers):
        self.members = tuple(workers)

    def wants_body(self, headers):
        return "x-session-id" not in headers


def test_policy_that_keeps_something_per_worker_hears_of_members():
    """From the start, and of every change."""
    policy = Keeper()
    registry = at_endpoints(*ENDPOINTS, policy=policy)
    (pool,) = registry.pools
    assert policy.members == pool.candidates

    remove(registry, pool.candidates[0].url)

    assert policy.members == pool.candidates
    assert len(policy.members) == 2


@pytest.mark.parametrize(
    ("policy", "headers", "wanted"),
    [
        (Recorder(needs_body=False), {}, False),
        (Recorder(needs_body=True), {"x-session-id": "s"}, True),
        (Keeper(needs_body=True), {}, True),
        (Keeper(needs_body=True), {"x-session-id": "s"}, False),
        (Keeper(needs_body=False), {}, False),
    ],
    ids=["never", "always", "chosen", "not chosen", "never, though it could choose"],
)
def test_body_is_wanted_when_the_policy_can_use_it(policy, headers, wanted):
    """Asked by header only of a policy that needs bodies at all and can choose."""
    router, _ = start(policy)

    assert router.wants_body(headers) is wanted


@pytest.mark.parametrize("needs_body", [True, False])
def test_router_says_whether_the_policy_reads_bodies(needs_body):
    """The exchange asks the router, not the policy."""
    router, _ = start(Recorder(needs_body=needs_body))

    assert router.needs_body is needs_body


def test_pick_that_is_no_candidate_is_a_fault(get):
    """A policy that breaks its contract must not send a request outside of the pool."""

    class Astray(Recorder):
        def pick(self, request, workers, *, now, rng):
            return Worker(url="http://elsewhere", endpoint="192.168.0.1:1", order=99)

    router, _ = start(Astray())

    with pytest.raises(LookupError, match="no candidate"):
        router.decide(get, 0.0)


def test_time_and_randomness_are_handed_on(get):
    """The policy gets the router's own generator and the caller's time."""
    seen = []

    @dataclasses.dataclass
    class Curious(Recorder):
        def pick(self, request, workers, *, now, rng):
            seen.append((request, now, rng))
            return workers[0]

    rng = random.Random(5)
    Router(at_endpoints(*ENDPOINTS, policy=Curious()), rng).decide(get, 7.25)

    assert seen == [(get, 7.25, rng)] * 3


@pytest.mark.parametrize("rounds", [1, 5])
def test_round_robin_stays_exactly_fair_through_the_router(get, rounds):
    """Asking for fallbacks does not move anybody's turn."""
    router, _ = start(RoundRobin())

    firsts = [endpoints(router.decide(get, 0.0))[0] for _ in range(3 * rounds)]

    assert firsts == ENDPOINTS * rounds


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_workers_that_come_and_go_never_break_a_decision(name, get):
    """Every decision names present workers only, and all of them get their share."""
    rng = random.Random(11)
    registry = registry_of(policy=policies.policy_class(name)())
    router = Router(registry, rng)
    keys = [f"http://10.0.0.{n}" for n in range(1, 7)]
    sent = collections.Counter()
    leases = []
    for step in range(600):
        key = rng.choice(keys)
        update = rng.choice([Add(spec_of(key)), Remove(key)])
        registry.apply(STATIC, update, 0.0)
        registry.commit(0.0)
        (pool,) = registry.pools
        decision = router.decide(get, float(step))
        if not pool.candidates:
            assert decision == Refused(Refusal.NO_WORKER)
            continue
        assert set(decision.workers) <= set(pool.candidates)
        sent[decision.workers[0].url] += 1
        leases.append(pool.acquire(decision.workers[0]))
        if step % 3 == 0:
            leases.pop(rng.randrange(len(leases))).release(float(step))
    for lease in leases:
        lease.release(600.0)

    assert sum(pool.in_flight for pool in (*registry.pools, *registry.retired)) == 0
    assert set(sent) == set(keys)


def hosts(decision):
    return [worker.host for worker in decision.workers]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((8, 8, 8), 3),  # a third host is there
        ((8, 8), 2),
        ((8,), 1),
        ((1, 1, 1, 1), 3),
        ((8, 1), 2),
    ],
    ids=str,
)
def test_fallbacks_are_on_other_hosts_where_there_are_some(name, ranks, expected, get):
    """Data-parallel ranks share an address: what took the first down may have taken its neighbours."""
    listed = [f"10.0.0.{h}:{8000 + r}" for h, count in enumerate(ranks) for r in range(count)]
    router, pool = start(policies.policy_class(name)(), *listed, seed=3)

    for number in range(20):
        get.headers = {"x-session-id": f"s{number}"}
        decision = router.decide(get, float(number))

        assert len(decision.workers) == len(set(decision.workers)) == min(3, sum(ranks))
        assert len(set(hosts(decision))) == expected
        assert set(decision.workers) <= set(pool.candidates)


def test_second_fallback_avoids_both_hosts_before_it(get):
    """Not only that of the first choice."""
    router, _ = start(
        Recorder(), "10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1", "10.0.0.2:2", "10.0.0.3:1"
    )

    decision = router.decide(get, 0.0)

    assert endpoints(decision) == ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]


@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_round_robin_is_exactly_fair_with_fallbacks_on_other_hosts(get, per_host, count):
    """Every worker once a round, in the order of joining."""
    listed = [f"10.0.0.{n // per_host}:{8000 + n % per_host}" for n in range(count)]
    router, _ = start(RoundRobin(), *listed)

    firsts = [endpoints(router.decide(get, 0.0))[0] for _ in range(3 * count)]

    assert firsts == listed * 3


def test_weighted_round_robin_is_exactly_fair_through_the_router(rng, get):
    """Weights 5 : 2 : 1 over every eight requests, with two fallbacks each."""
    weights = zip(ENDPOINTS, (5.0, 2.0, 1.0), strict=True)
    specs = [spec_of(f"http://{endpoint}", weight=weight) for endpoint, weight in weights]
    router = Router(registry_of(*specs, policy=RoundRobin()), rng)

    for _ in range(5):
        got = collections.Counter(endpoints(router.decide(get, 0.0))[0] for _ in range(8))
        assert got == dict(zip(ENDPOINTS, (5, 2, 1), strict=True))


@pytest.mark.parametrize("name", ["consistent_hash", "rendezvous_hash"])
def test_fallback_is_where_the_session_goes_when_its_worker_is_gone(name, get):
    """So that the retry already warms the right cache."""
    router, pool = start(policies.policy_class(name)(), *endpoints_of(8), seed=1)
    for number in range(20):
        get.headers = {"x-session-id": f"s{number}"}
        first, second, third = router.decide(get, 0.0).workers

        others = {w.endpoint for w in pool.candidates} - {first.endpoint}
        assert router.decide(get, 0.0, subset=others).workers[:2] == (second, third)


@pytest.mark.parametrize("name", POLICIES)
def test_subset_of_a_few_is_respected_by_every_policy(name, get):
    """First choice and fallbacks."""
    router, _ = start(policies.policy_class(name)(), *endpoints_of(12), seed=1)
    allowed = {"10.0.0.3", "10.0.0.9:8000"}

    for number in range(30):
        get.headers = {"x-session-id": f"s{number}"}
        decision = router.decide(get, 0.0, subset=allowed)
        assert sorted(hosts(decision)) == ["10.0.0.3", "10.0.0.9"]


# --- which workers a model's requests go to ------------------------------------------------------

LLAMA, QWEN, OTHER, UNREAD = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3, 4))


def chat(model=None, **options):
    """Return a chat request for *model*, as the exchange hands it to the router."""
    fields = {"messages": []} if model is None else {"model": model, "messages": []}
    body = json.dumps(fields).encode()
    return Request(
        **{"method": "POST", "path": "/v1/chat/completions", "headers": {}, **options},
        body=body,
        content=parse_content(body),
    )


def fleet(*, policy=None, aliases=None, default_model="", **settings):
    """Return a router before two pools, llama with two workers and qwen with one, and the registry."""
    registry = registry_of(LLAMA, QWEN, OTHER, policy=policy, **settings)
    say(registry, LLAMA, "llama", ["lora"])
    say(registry, QWEN, ["qwen", "qwen-alias"])
    say(registry, OTHER, "llama")
    router = Router(registry, random.Random(1), aliases=aliases, default_model=default_model)
    return router, registry


def served_by(decision):
    assert isinstance(decision, Routed), decision
    return [worker.url for worker in decision.workers]


def test_with_one_model_nobody_looks_at_it(registry, rng):
    """All workers serve the same: the request goes to one of them, whatever it asks for, unread."""
    for worker in list(registry.engines):
        say(registry, worker.key, "llama")
    router = Router(registry, rng)

    assert (router.reads_model, router.needs_body, router.wants_body({})) == (False, False, False)
    assert len(served_by(router.decide(chat("anything"), 0.0))) == 3


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", [LLAMA, OTHER]),
        ("qwen", [QWEN]),
        ("qwen-alias", [QWEN]),
        ("lora", [LLAMA]),
        (None, [LLAMA, OTHER]),
        ("", [LLAMA, OTHER]),
    ],
)
def test_model_selects_the_pool_and_who_has_the_adapter(model, expected):
    """By any of its names; without one it is the first pool. The body goes as it came."""
    router, registry = fleet()

    decision = router.decide(chat(model), 0.0)

    assert served_by(decision) == expected
    assert decision.body is None
    assert decision.pool is registry.pools[expected == [QWEN]]


def test_models_that_differ_are_read_whatever_the_policy_needs():
    """Also where its chooser would do without the body."""
    router, _ = fleet(policy=Keeper(needs_body=False))

    assert (router.reads_model, router.needs_body) == (True, True)
    assert router.wants_body({"x-session-id": "s"})


def test_models_that_become_the_same_are_read_no_more():
    """It is decided anew for each request."""
    router, registry = fleet()

    reset(registry, QWEN)

    assert not router.reads_model
    assert served_by(router.decide(chat("llama"), 0.0)) == [QWEN]


@pytest.mark.parametrize(
    "request_",
    [
        Request("GET", "/v1/realtime?model=qwen&x=y", {}, b""),
        Request(
            "POST",
            "/v1/audio/transcriptions",
            {"content-type": "multipart/form-data; boundary=b"},
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nqwen\r\n--b--\r\n',
        ),
    ],
    ids=["query", "form"],
)
def test_model_is_found_where_the_endpoint_has_it(request_):
    """In the query string of a WebSocket, in the form of an upload."""
    router, _ = fleet()

    assert served_by(router.decide(request_, 0.0)) == [QWEN]


def test_unknown_model_is_refused_with_the_names_that_are_known():
    """404 with ``model_not_found``; nobody is sent to."""
    policy = Recorder()
    router, _ = fleet(policy=policy, aliases={"gpt-4": "llama"})

    decision = router.decide(chat("gpt-5"), 0.0)

    assert decision == Refused(Refusal.MODEL_NOT_FOUND, decision.detail)
    assert decision.message == (
        "The model 'gpt-5' does not exist. Known models: gpt-4, llama, lora, qwen, qwen-alias."
    )
    assert policy.sent == []


def test_names_in_a_refusal_are_bounded():
    """Neither a client's nor a thousand workers' make an answer of a megabyte."""
    router, registry = fleet()
    say(registry, QWEN, "qwen", [f"adapter-{number:03}" for number in range(200)])

    message = router.decide(chat("x" * 10_000), 0.0).message

    assert "x" * MAX_NAME_SHOWN_CHARS + "...'" in message
    assert message.count("adapter-") == MAX_NAMES_SHOWN
    assert message.endswith(" and 153 more.")
    assert len(message) < 2000


def test_refusal_without_a_detail_says_its_own_sentence():
    """What the refusal means in general."""
    assert Refused(Refusal.NO_WORKER).message == refusal_message(Refusal.NO_WORKER)
    assert Refused(Refusal.MODEL_NOT_FOUND, "x").message == "x"


def test_model_that_is_known_but_served_by_nobody_now_is_no_404():
    """Its workers may come back: 503, retry later."""
    router, registry = fleet()
    registry.drain(QWEN, 10.0)
    registry.commit(1.0)

    assert router.decide(chat("qwen"), 0.0) == Refused(Refusal.NO_WORKER)


def test_adapter_that_differs_within_one_pool_leaves_the_judgement_to_the_worker():
    """One pool: an unknown name goes to any of it, and is not the router's to refuse."""
    registry = registry_of(LLAMA, OTHER)
    say(registry, LLAMA, "llama", ["lora"])
    say(registry, OTHER, "llama")
    router = Router(registry, random.Random(1))

    assert router.reads_model
    assert served_by(router.decide(chat("lora"), 0.0)) == [LLAMA]
    assert served_by(router.decide(chat("unknown"), 0.0)) == [LLAMA, OTHER]


@pytest.mark.parametrize(("lora_any", "expected"), [(False, None), (True, [OTHER])])
def test_worker_without_the_adapter_serves_only_if_it_may_load_it(lora_any, expected):
    """Preferred is who has it; with --lora-any another one is asked when none of them is there."""
    router, registry = fleet(lora_any=lora_any)
    assert served_by(router.decide(chat("lora"), 0.0)) == [LLAMA]

    registry.drain(LLAMA, 10.0)
    registry.commit(1.0)

    decision = router.decide(chat("lora"), 0.0)
    if expected is None:
        assert decision == Refused(Refusal.NO_WORKER)
    else:
        assert served_by(decision) == expected


@pytest.mark.parametrize(("asked", "renamed"), [("gpt-5", True), (None, False)])
def test_default_model_serves_what_nobody_does(asked, renamed):
    """The worker is asked for the default model then; who names none is sent there as it is."""
    router, registry = fleet(default_model="qwen")

    decision = router.decide(chat(asked), 0.0)

    assert served_by(decision) == [QWEN]
    assert decision.pool is registry.pools[1]
    assert decision.body == (b'{"model": "qwen", "messages": []}' if renamed else None)


def test_default_model_may_be_an_adapter():
    """Then it goes to who has that."""
    router, _ = fleet(default_model="lora")

    assert served_by(router.decide(chat(), 0.0)) == [LLAMA]
    assert served_by(router.decide(chat("gpt-5"), 0.0)) == [LLAMA]


def test_default_model_that_nobody_serves_is_as_if_there_were_none():
    """An unknown name is refused, none at all goes to the first pool."""
    router, _ = fleet(default_model="gone")

    assert router.decide(chat("gpt-5"), 0.0).refusal is Refusal.MODEL_NOT_FOUND
    assert served_by(router.decide(chat(), 0.0)) == [LLAMA, OTHER]


@pytest.mark.parametrize(
    ("alias", "expected", "body"),
    [
        ("gpt-4", [QWEN], b'{"model": "qwen", "messages": []}'),
        ("mini", [LLAMA], b'{"model": "lora", "messages": []}'),
        ("caf\u00e9", [LLAMA, OTHER], b'{"model": "llama", "messages": []}'),
    ],
)
def test_alias_is_replaced_and_served_as_the_model_that_it_means(alias, expected, body):
    """Base model or adapter; the policy sees the model that serves, under which prompts are cached."""
    policy = Recorder()
    aliases = {"gpt-4": "qwen", "mini": "lora", "caf\u00e9": "llama"}
    router, _ = fleet(policy=policy, aliases=aliases)

    decision = router.decide(chat(alias), 0.0)

    assert served_by(decision) == expected
    assert decision.body == body
    (request,) = policy.requests
    assert request.content.model == aliases[alias]


def test_alias_is_replaced_with_one_pool_too():
    """Reading is then worth it, whatever the workers serve."""
    registry = registry_of(LLAMA)
    router = Router(registry, random.Random(1), aliases={"gpt-4": 'l"ama'})

    assert router.reads_model
    assert router.wants_body({})
    assert router.decide(chat("gpt-4"), 0.0).body == rb'{"model": "l\"ama", "messages": []}'
    assert router.decide(chat("llama"), 0.0).body is None


def test_alias_of_a_model_that_nobody_serves_is_refused_under_its_own_name():
    """The client reads the name that it sent."""
    router, _ = fleet(aliases={"gpt-4": "gone"})

    decision = router.decide(chat("gpt-4"), 0.0)

    assert decision.refusal is Refusal.MODEL_NOT_FOUND
    assert "'gpt-4' does not exist" in decision.message


def test_default_model_wins_over_an_alias_that_leads_nowhere():
    """The body names the default model, not what the alias meant."""
    router, _ = fleet(aliases={"gpt-4": "gone"}, default_model="qwen")

    decision = router.decide(chat("gpt-4"), 0.0)

    assert decision.body == b'{"model": "qwen", "messages": []}'


def test_alias_in_a_query_cannot_be_replaced():
    """There is no body to change: it is routed by what the alias means."""
    router, _ = fleet(aliases={"gpt-4": "qwen"})

    decision = router.decide(Request("GET", "/v1/realtime?model=gpt-4", {}, b""), 0.0)

    assert (served_by(decision), decision.body) == ([QWEN], None)


def test_workers_that_do_not_say_what_they_serve_take_unknown_models():
    """They judge; what is known to be served elsewhere goes there."""
    registry = registry_of(LLAMA, QWEN, UNREAD)
    say(registry, LLAMA, "llama")
    say(registry, QWEN, "qwen")
    say(registry, UNREAD)
    router = Router(registry, random.Random(1))

    assert served_by(router.decide(chat("gpt-5"), 0.0)) == [UNREAD]
    assert served_by(router.decide(chat("qwen"), 0.0)) == [QWEN]
    assert UNREAD not in served_by(router.decide(chat("qwen"), 0.0))


def test_subset_and_model_both_limit_who_may_serve():
    """A gateway's choice among workers of another model is nobody."""
    router, _ = fleet()

    assert served_by(router.decide(chat("llama"), 0.0, subset={"10.0.0.3:8000"})) == [OTHER]
    assert router.decide(chat("llama"), 0.0, subset={"10.0.0.2:8000"}) == Refused(Refusal.NO_WORKER)


class Chosen(Recorder):
    """Picks the candidate whose URL is asked for, else the first."""

    def pick(self, request, workers, *, now, rng):
        named = [worker for worker in workers if worker.url == request.headers.get("x-worker")]
        return (named or workers)[0]


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("http://10.0.0.1:8000", ["http://10.0.0.1:8000", "http://10.0.0.4:8000"]),
        ("http://10.0.0.4:8000", ["http://10.0.0.4:8000", "http://10.0.0.1:8000"]),
        ("http://10.0.0.2:8000/a", ["http://10.0.0.2:8000/a"]),
        ("http://10.0.0.5:8000/b", ["http://10.0.0.5:8000/b", "http://10.0.0.3:8000/b"]),
    ],
)
def test_fallbacks_stay_within_the_envoy_cluster_of_the_first_pick(get, first, expected):
    """A retry keeps the cluster and so the base path, which is another one elsewhere."""
    urls = ["10.0.0.1:8000", "10.0.0.2:8000/a", "10.0.0.3:8000/b", "10.0.0.4:8000"]
    registry = registry_of(
        *(f"http://{url}" for url in [*urls, "10.0.0.5:8000/b"]), policy=Chosen()
    )
    router = Router(registry, random.Random(1))
    get.headers = {"x-worker": first}

    decision = router.decide(get, 0.0)

    assert served_by(decision) == expected
    assert len({worker.cluster for worker in decision.workers}) == 1


def test_ranks_of_one_engine_are_one_endpoint(get):
    """A retry goes to another engine: to the same one it would be the same attempt again."""
    registry = registry_of("http://10.0.0.1:8000", "http://10.0.0.2:8000", ranks=4)
    router = Router(registry, random.Random(1))

    assert served_by(router.decide(get, 0.0)) == [
        "http://10.0.0.1:8000@0",
        "http://10.0.0.2:8000@0",
    ]


# --- limits of workers ------------------------------------------------------------------------------


def limit(pool, *limits):
    for worker, most in zip(pool.members, limits, strict=True):
        worker.limit = most
    pool.look_at_limits()


def test_worker_at_its_limit_is_not_offered(get, policy):
    """Not to the policy, and as a fallback only when nobody else is left."""
    router, pool = start(policy)
    limit(pool, 1, 2, 2)
    pool.acquire(pool.members[0])

    assert endpoints(router.decide(get, 0.0)) == [ENDPOINTS[1], ENDPOINTS[2]]

    pool.acquire(pool.members[1])
    pool.acquire(pool.members[1])
    assert endpoints(router.decide(get, 0.0)) == [ENDPOINTS[2], ENDPOINTS[0], ENDPOINTS[1]]


def test_without_room_anywhere_the_request_is_held(get, policy):
    """For a worker of that pool; nothing was sent, and it may be asked again."""
    router, pool = start(policy)
    limit(pool, 1, 1, 1)
    leases = [pool.acquire(worker) for worker in pool.members]

    assert router.decide(get, 0.0) == Held(Place(Wait.BUSY, pool))
    assert policy.sent == []

    leases[2].release(1.0)
    assert endpoints(router.decide(get, 1.0))[0] == ENDPOINTS[2]


def test_who_comes_later_is_held_while_others_wait_for_the_same(get, policy):
    """Though there is room."""
    router, pool = start(policy)
    limit(pool, 1, 1, 1)
    place = Place(Wait.BUSY, pool)

    assert router.decide(get, 0.0, ahead={place}) == Held(place)
    assert isinstance(router.decide(get, 0.0, ahead={place._replace(model="x")}), Routed)


def test_worker_on_probation_takes_over_for_nobody(get, policy):
    """It is picked first or not at all, not even when it is all there is besides."""
    router, pool = start(policy)
    limit(pool, 1, 5, 5)
    pool.members[1].probation = pool.members[2].probation = True

    assert endpoints(router.decide(get, 0.0)) == [ENDPOINTS[0]]
    pool.acquire(pool.members[0])
    assert endpoints(router.decide(get, 0.0)) == [ENDPOINTS[1], ENDPOINTS[0]]


def test_place_names_what_makes_a_difference():
    """The model where not every worker of the pool serves it, and the subset of a gateway."""
    router, registry = fleet()
    llama, qwen = registry.pools
    limit(llama, 0, 0)
    limit(qwen, 0)

    assert router.decide(chat("llama"), 0.0) == Held(Place(Wait.BUSY, llama))
    assert router.decide(chat("lora"), 0.0) == Held(Place(Wait.BUSY, llama, "lora"))
    assert router.decide(chat("qwen"), 0.0) == Held(Place(Wait.BUSY, qwen))
    subset = frozenset({"10.0.0.1"})
    held = router.decide(chat("llama"), 0.0, subset=subset)
    assert isinstance(held, Held)
    assert held.place.subset == subset


# --- waiting for workers ----------------------------------------------------------------------------


def waiting_fleet(**options):
    """Return the fleet of ``fleet``, whose requests wait for workers for ten seconds."""
    router, registry = fleet(**options)
    router.wait_for_workers(10.0)
    return router, registry


def drop(router, registry, *keys, now=0.0):
    """Let workers go, as the service hears of it."""
    names = [name for key in keys for name in registry.get(key).names or ()]
    for key in keys:
        remove(registry, key)
    router.on_workers(names, now)


def test_pool_without_candidates_is_waited_for_when_that_is_on():
    """Whether its workers are drained, unhealthy or gone."""
    router, registry = waiting_fleet()
    registry.drain(QWEN, 10.0)
    registry.commit(1.0)

    assert router.decide(chat("qwen"), 0.0) == Held(Place(Wait.NO_WORKER, registry.pools[1]))
    assert served_by(router.decide(chat("llama"), 0.0)) == [LLAMA, OTHER]
    assert router.no_worker is None


def test_pool_whose_circuits_are_open_is_not_waited_for():
    """They are there, and answer with errors."""
    router, registry = waiting_fleet()
    qwen = registry.pools[1]
    qwen.set_candidates((), tripped=True)

    assert router.decide(chat("qwen"), 0.0) == Refused(Refusal.NO_WORKER)


def test_model_whose_workers_are_gone_is_waited_for_until_its_time_is_over():
    """Neither 404 nor a worker of another model; one that never was is still no model."""
    router, registry = waiting_fleet()
    drop(router, registry, QWEN, now=100.0)
    assert registry.uniform is False

    held = Held(Place(Wait.NO_WORKER, model="qwen"))
    assert router.decide(chat("qwen"), 101.0) == held
    assert router.decide(chat("qwen-alias"), 101.0) == Held(
        Place(Wait.NO_WORKER, model="qwen-alias")
    )
    # One pool is left: an unknown name is for its workers to judge.
    assert served_by(router.decide(chat("never"), 101.0)) == [LLAMA, OTHER]
    assert served_by(router.decide(chat("qwen"), 110.0)) == [LLAMA, OTHER]


def test_bodies_are_read_while_a_model_is_absent_though_all_others_are_alike():
    """Else its requests would go to workers of another model."""
    registry = registry_of(LLAMA, QWEN)
    say(registry, LLAMA, "llama")
    say(registry, QWEN, "qwen")
    router = Router(registry, random.Random(1), no_worker_s=10.0)

    drop(router, registry, QWEN, now=0.0)

    assert registry.uniform
    assert router.reads_model
    assert router.decide(chat("qwen"), 1.0) == Held(Place(Wait.NO_WORKER, model="qwen"))
    assert served_by(router.decide(chat("llama"), 11.0)) == [LLAMA]
    assert not router.reads_model


def test_model_that_is_back_is_absent_no_more():
    """Its new worker serves."""
    router, registry = waiting_fleet()
    drop(router, registry, QWEN)
    reset(registry, LLAMA, OTHER, "http://10.0.0.9:8000")
    say(registry, "http://10.0.0.9:8000", "qwen")
    router.on_workers((), 1.0)

    assert served_by(router.decide(chat("qwen"), 1.0)) == ["http://10.0.0.9:8000"]


def test_default_model_serves_what_is_absent():
    """That is what it is for."""
    router, registry = waiting_fleet(default_model="llama")
    drop(router, registry, QWEN)

    assert served_by(router.decide(chat("qwen"), 1.0)) == [LLAMA, OTHER]


def test_with_nobody_at_all_every_request_waits_at_one_place():
    """Known before a body is read."""
    router, registry = waiting_fleet()
    drop(router, registry, LLAMA, QWEN, OTHER)

    assert router.no_worker == Place(Wait.NO_WORKER)
    registry.pools[0].set_candidates((), tripped=True)
    assert router.no_worker is None
    router.wait_for_workers(0)
    registry.pools[0].set_candidates(())
    assert router.no_worker is None
    assert router.decide(chat("qwen"), 0.0) == Refused(Refusal.NO_WORKER)
