"""Exchanges of requests that are split, and of their prefill legs, message by message."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission import Admission, Limits
from extproc.discovery.updates import WorkerType
from extproc.exchange import Exchange
from extproc.pd.mooncake import Mooncake
from extproc.pd.nccl import Nccl
from extproc.pd.nixl import Nixl
from extproc.prefill_legs import LEG_HEADER, LegAnswer, PrefillLegs
from extproc.router import Refused, Relayed, Routed, Router, SplitRules
from policies.round_robin import RoundRobin
from tests.extproc.envoy_messages import (
    BUFFERED,
    FULL_DUPLEX,
    POST,
    announce,
    bare,
    common,
    endpoints,
    parse,
    request_body,
    request_headers,
    response_headers,
    set_headers,
)
from tests.fleets import registry_of, remove, spec_of

P1, P2 = "10.0.0.1:8000", "10.0.0.2:8000"
D1, D2 = "10.0.1.1:8000", "10.0.1.2:8000"
BODY = b'{"model": "m", "messages": []}'
PARAMS = b'{"remote_host": "h"}'
ANSWER = LegAnswer(200, b'{"kv_transfer_params":' + PARAMS + b"}", served=P1)
FAILED = LegAnswer(reason="reset")


class Service:
    """What the exchanges of one service share."""

    def __init__(self, connector=None, worker_limit=None, *, zones=False, **rules):
        specs = [
            spec_of(
                f"http://{endpoint}",
                worker_type=WorkerType.PREFILL if endpoint in (P1, P2) else WorkerType.DECODE,
                labels=(("zone", "a" if endpoint in (P1, D1) else "b"),) if zones else (),
            )
            for endpoint in (P1, P2, D1, D2)
        ]
        limits = {} if worker_limit is None else {"worker_limit": worker_limit}
        self.registry = registry_of(*specs, policy=RoundRobin(), splits=True, **limits)
        self.legs = PrefillLegs(random.Random(3), longest_s=100)
        found = SplitRules(connector=connector or Nixl(), **rules)
        aliases = {"alias": "m"}
        self.admission = Admission(Limits(queue=10))
        self.router = Router(self.registry, random.Random(1), aliases=aliases, split_rules=found)

    def exchange(self, **options):
        options.setdefault("admission", self.admission)
        return Exchange(
            self.router,
            ids=random.Random(2),
            max_body_bytes=10**6,
            legs=self.legs,
            **options,
        )

    def begin(self, body=BODY, headers=POST):
        """Return an exchange that has got everything, and the answers to the body."""
        exchange = self.exchange()
        exchange.receive(announce(request_headers(headers), BUFFERED), 0.0)
        return exchange, exchange.receive(request_body(body), 0.0)

    def send(self, leg):
        """Return the exchange of *leg* itself, and Envoy's answer to it."""
        exchange = self.exchange()
        answers = exchange.receive(announce(request_headers(leg.headers), BUFFERED), 0.0)
        return exchange, parse(answers)[0]

    @property
    def in_flight(self):
        return {p.name: p.in_flight for p in self.registry.all_pools() if p.in_flight}


@pytest.fixture
def service():
    return Service()


def test_envoy_is_told_to_wait_for_the_prefill(service):
    """As long as a leg may take; nothing is decided."""
    exchange, answers = service.begin()

    (answer,) = parse(answers)
    assert answer.override_message_timeout.seconds >= 100
    assert exchange.decision is None
    assert json.loads(exchange.leg.leg.body)["max_tokens"] == 1
    assert len(service.legs) == 1


def test_leg_goes_where_it_was_decided_and_counts_there(service):
    """Its token is good once."""
    exchange, _ = service.begin()
    leg = exchange.leg

    own, answer = service.send(leg)
    again, refusal = service.send(leg)

    assert own.is_leg
    assert endpoints(answer) == [P1, P2]
    assert list(service.in_flight.values()) == [1]
    assert again.decision is not None
    assert refusal.immediate_response.status.code == 503
    own.close(1.0)
    assert service.in_flight == {}


def test_decode_worker_gets_the_clients_body_with_the_parameters(service):
    """And one unit in flight, until the stream ends."""
    exchange, _ = service.begin()

    (answer,) = parse(exchange.on_leg(ANSWER, 1.0))

    assert common(answer).body_mutation.body == (
        b'{"kv_transfer_params":' + PARAMS + b"," + BODY[1:]
    )
    assert endpoints(answer) == [D1, D2]
    assert list(service.in_flight.values()) == [1]
    exchange.close(2.0)
    assert service.in_flight == {}


@pytest.mark.parametrize("answer", [ANSWER, FAILED])
@pytest.mark.parametrize("connector", [Nixl, Mooncake])
def test_alias_is_renamed_also_after_the_prefill(connector, answer):
    """Whether the prompt was computed elsewhere or not, and when the request is not split at all."""
    service = Service(connector())
    exchange, answers = service.begin(BODY.replace(b'"m"', b'"alias"'))
    if exchange.leg is not None:
        assert json.loads(exchange.leg.leg.body)["model"] == "m"
        answers = exchange.on_leg(answer, 1.0)

    (last,) = parse(answers)
    assert json.loads(common(last).body_mutation.body)["model"] == "m"
    assert service.router.split_rules is not None


def test_failed_prefill_leaves_the_body_alone(service):
    """The decode worker does all of it."""
    exchange, _ = service.begin()

    (answer,) = parse(exchange.on_leg(FAILED, 1.0))

    assert not common(answer).HasField("body_mutation")
    assert isinstance(exchange.decision, Routed)
    assert endpoints(answer) == [D1, D2]


def test_failed_prefill_is_told_where_that_is_wanted():
    """503, and no worker is occupied."""
    service = Service(fallback=False)
    exchange, _ = service.begin()

    (answer,) = parse(exchange.on_leg(FAILED, 1.0))

    assert isinstance(exchange.decision, Refused)
    assert answer.immediate_response.status.code == 503
    assert service.in_flight == {}


@pytest.mark.parametrize("connector", [Nixl, Nccl])
def test_refusal_of_a_worker_is_relayed(connector):
    """Only when a worker gave it: Envoy's own are failures. Nobody is occupied then."""
    service = Service(connector())
    exchange, _ = service.begin()

    (answer,) = parse(exchange.on_leg(LegAnswer(422, b"no", "text/x", "9", served=P1), 1.0))

    assert isinstance(exchange.decision, Relayed)
    assert answer.immediate_response.status.code == 422
    assert answer.immediate_response.body == b"no"
    assert set_headers(answer.immediate_response.headers) == {
        "content-type": b"text/x",
        "retry-after": b"9",
    }
    exchange.close(2.0)
    assert service.in_flight == {}


def test_both_legs_of_nccl_have_the_id_that_names_both_workers():
    """Nobody else may take the place of either."""
    service = Service(Nccl(), fallback=False)
    exchange, _ = service.begin()
    leg = exchange.leg
    request_id = leg.headers["x-request-id"]

    own, at_prefill = service.send(leg)
    (at_decode,) = parse(exchange.on_leg(ANSWER, 1.0))

    assert f"___prefill_addr_{P1}___decode_addr_{D1}_" in request_id
    assert "x-request-id" not in set_headers(common(at_prefill).header_mutation)
    mutation = set_headers(common(at_decode).header_mutation)
    assert mutation["x-request-id"].decode() == request_id
    assert mutation["x-envoy-max-retries"] == b"0"
    assert set_headers(common(at_prefill).header_mutation)["x-envoy-max-retries"] == b"0"
    own.close(2.0)
    exchange.close(2.0)
    assert service.in_flight == {}


def test_other_prefill_worker_of_nccl_gets_another_leg():
    """With another id and another choice of decode worker; then nobody is left."""
    service = Service(Nccl(), fallback=False)
    exchange, _ = service.begin()
    first = exchange.leg

    assert exchange.on_leg(FAILED, 1.0) == []
    second = exchange.leg
    (answer,) = parse(exchange.on_leg(FAILED, 2.0))

    assert second is not first
    assert f"prefill_addr_{P1}_" in first.headers["x-request-id"]
    assert f"prefill_addr_{P2}_" in second.headers["x-request-id"]
    assert answer.immediate_response.status.code == 503
    exchange.close(3.0)
    assert service.in_flight == {}


def test_internal_headers_of_a_client_are_not_on_the_leg(service):
    """Nor what is about the connection."""
    names = ("x-router-served", "x-envoy-max-retries", "x-gateway-x", "te", "content-length")
    exchange, _ = service.begin(headers={**POST, **dict.fromkeys(names, "1"), "x-tenant-id": "t"})

    headers = exchange.leg.headers
    assert headers["x-tenant-id"] == "t"
    assert headers["x-request-id"] == "client-id"
    assert headers[LEG_HEADER] == exchange.leg.token
    assert set(names) & set(headers) == set()


def test_client_that_leaves_takes_the_leg_along(service):
    """Envoy may still ask about it: it goes nowhere."""
    exchange, _ = service.begin()
    leg = exchange.leg

    exchange.close(1.0)
    _, refusal = service.send(leg)

    assert len(service.legs) == 0
    assert refusal.immediate_response.status.code == 503
    assert service.in_flight == {}


STEPS = st.lists(
    st.sampled_from(["send", "answer", "fail", "refuse", "trailers", "end leg", "close"]),
    max_size=8,
)


@pytest.mark.parametrize("connector", [Nixl, Nccl])
@given(steps=STEPS)
def test_in_flight_is_zero_after_any_order_of_events(connector, steps):
    """Whatever ends first, and however often."""
    service = Service(connector(), fallback=connector is Nixl)
    exchange, _ = service.begin()
    legs = []
    for step in steps:
        match step:
            case "send" if exchange.leg is not None:
                legs.append(service.send(exchange.leg)[0])
            case "answer":
                exchange.on_leg(ANSWER, 1.0)
            case "fail":
                exchange.on_leg(FAILED, 1.0)
            case "refuse":
                exchange.on_leg(LegAnswer(400, served=P1), 1.0)
            case "trailers" if exchange.decision is not None:
                exchange.receive(bare("response_trailers"), 1.0)
            case "end leg" if legs:
                legs.pop().close(1.0)
            case "close":
                exchange.close(1.0)
                break
    for leg in legs:
        leg.close(2.0)
    exchange.close(2.0)

    assert service.in_flight == {}
    assert len(service.legs) == 0


PUSHING = b'{"remote_engine_id":"e","remote_host":"h","remote_port":1,"transfer_mode":"push"}'
PUSHED = LegAnswer(200, b'{"kv_transfer_params":' + PUSHING + b"}", served=P1)


def push(service):
    """Return an exchange whose legs run at the same time."""
    for worker in service.registry.prefill_pools[0].candidates:
        peer = service.router.peer(worker)
        service.router.split_rules.connector.learn(peer, PUSHED.body)
    exchange, answers = service.begin()
    assert exchange.leg.leg.concurrent
    assert exchange.decision is not None
    assert common(parse(answers)[-1]).body_mutation.body
    return exchange


def test_leg_that_pushes_goes_to_no_other_worker(service):
    """The other leg names this one."""
    exchange = push(service)

    _, answer = service.send(exchange.leg)

    assert len(endpoints(answer)) == 1
    assert set_headers(common(answer).header_mutation)["x-envoy-max-retries"] == b"0"


def test_leg_that_pushes_is_sent_again_as_it_was(service):
    """With its id, by which the blocks are known."""
    exchange = push(service)
    first = exchange.leg

    assert exchange.on_leg(FAILED, 1.0) == []

    again = exchange.leg
    assert again is not first
    assert again.token != first.token
    assert (again.leg, again.path, again.decision) == (first.leg, first.path, first.decision)
    assert {**again.headers, LEG_HEADER: ""} == {**first.headers, LEG_HEADER: ""}
    assert exchange.on_leg(PUSHED, 2.0) == []
    assert exchange.leg is None


def test_request_whose_push_fails_is_answered_elsewhere(service):
    """A decode worker gets the client's body, and its answer takes the place of the one that is waited for."""
    exchange = push(service)
    tries = 0
    while exchange.leg.leg.concurrent:
        assert exchange.on_leg(FAILED, 1.0) == []
        tries += 1

    whole = exchange.leg
    assert tries == 3
    assert whole.leg.body == BODY
    assert whole.headers["x-request-id"] == "client-id"
    assert whole.decision.workers[0].endpoint in (D1, D2)
    assert service.in_flight == {"default": 1}
    (answer,) = parse(exchange.on_leg(LegAnswer(200, b"all", "text/x", served=D1), 2.0))
    assert (answer.immediate_response.status.code, answer.immediate_response.body) == (200, b"all")
    exchange.close(3.0)
    assert service.in_flight == {}
    assert len(service.legs) == 0


def test_worker_that_does_not_answer_elsewhere_is_an_error(service):
    """There is nobody left to ask."""
    exchange = push(service)
    while exchange.leg.leg.concurrent:
        exchange.on_leg(FAILED, 1.0)

    (answer,) = parse(exchange.on_leg(FAILED, 2.0))

    assert answer.immediate_response.status.code == 503


def test_push_that_fails_is_told_where_that_is_wanted():
    """Without fallback the client learns of it, rather than wait for nothing."""
    service = Service(fallback=False)
    exchange = push(service)

    answers = []
    while not answers:
        answers = exchange.on_leg(FAILED, 1.0)

    assert parse(answers)[0].immediate_response.status.code == 503


def test_refusal_of_a_worker_that_pushes_is_relayed(service):
    """The other leg waits in vain."""
    exchange = push(service)

    (answer,) = parse(exchange.on_leg(LegAnswer(422, b"no", "text/x", served=P1), 1.0))

    assert (answer.immediate_response.status.code, answer.immediate_response.body) == (422, b"no")


@pytest.mark.parametrize("failed", [FAILED, LegAnswer(422, b"no", served=P1)])
def test_answer_that_has_begun_is_left_alone(service, failed):
    """Whatever becomes of the prefill leg."""
    exchange = push(service)
    exchange.receive(response_headers("200"), 1.0)

    assert exchange.on_leg(failed, 1.0) == []
    assert exchange.leg is None


def test_error_waits_for_the_answer_from_elsewhere(service):
    """A good answer does not, and ends the search."""
    exchange = push(service)
    while exchange.leg.leg.concurrent:
        exchange.on_leg(FAILED, 1.0)

    (answer,) = parse(exchange.receive(response_headers("500"), 1.5))
    assert answer.HasField("override_message_timeout")
    (answer,) = parse(exchange.on_leg(LegAnswer(200, b"all", served=D1), 2.0))
    assert answer.immediate_response.body == b"all"

    exchange = push(service)
    while exchange.leg.leg.concurrent:
        exchange.on_leg(FAILED, 1.0)
    (answer,) = parse(exchange.receive(response_headers("200"), 1.5))
    assert answer.HasField("response_headers")
    assert exchange.leg is None


@pytest.mark.parametrize("status", [408, 429])
@pytest.mark.parametrize("connector", [Nixl, Nccl])
def test_worker_that_has_no_time_is_no_refusal(connector, status):
    """Another one may have, or who generates."""
    service = Service(connector(), fallback=connector is Nixl)
    exchange, _ = service.begin()
    first = exchange.leg.decision.workers[0]

    answers = exchange.on_leg(LegAnswer(status, b"busy", served=first.endpoint), 1.0)

    if connector is Nixl:
        assert isinstance(exchange.decision, Routed)
        assert answers
    else:
        assert exchange.leg.decision.workers[0] is not first


def test_leg_counts_before_envoy_asks_about_it():
    """Whoever picks meanwhile must know; a worker with room for one gets one."""
    service = Service()
    exchanges = [service.begin()[0] for _ in range(4)]

    assert list(service.in_flight.values()) == [4]
    assert [w.in_flight for w in service.registry.prefill_pools[0].candidates] == [2, 2]
    exchanges[0].on_leg(FAILED, 1.0)
    for exchange in exchanges:
        exchange.close(1.0)
    assert service.in_flight == {}


def test_room_is_for_as_many_legs_as_there_is():
    """The next request waits for a prefill worker."""
    service = Service(worker_limit=1)
    exchanges = [service.begin()[0] for _ in range(3)]

    assert [exchange.waiting for exchange in exchanges] == [False, False, True]
    assert all(w.in_flight == 1 for w in service.registry.prefill_pools[0].candidates)


def test_request_is_not_in_its_own_way():
    """The only decode worker has room for one: that which waits for the blocks in vain."""
    service = Service(worker_limit=1)
    remove(service.registry, f"http://{D2}")
    exchange = push(service)

    while exchange.leg is not None and exchange.leg.leg.concurrent:
        exchange.on_leg(FAILED, 1.0)

    assert exchange.leg.whole


def test_request_that_waits_for_a_decode_worker_hears_of_its_push(service):
    """A refusal is told at once; a failure ends with a decode worker that does all of it."""
    service = Service(worker_limit=1)
    remove(service.registry, f"http://{D2}")
    first = push(service)
    waits, _ = service.begin()
    assert waits.waiting
    assert waits.leg.leg.concurrent

    (answer,) = parse(waits.on_leg(LegAnswer(400, b"no", served=P1), 1.0))

    assert answer.immediate_response.status.code == 400
    assert not waits.waiting
    first.close(2.0)


def test_answer_that_comes_after_all_leaves_no_leg_behind(service):
    """Nor the client's headers with it."""
    exchange = push(service)
    while exchange.leg.leg.concurrent:
        exchange.on_leg(FAILED, 1.0)
    assert len(service.legs) == 1

    exchange.receive(response_headers("200"), 1.5)

    assert len(service.legs) == 0
    exchange.close(2.0)
    assert service.in_flight == {}


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/embeddings", "/invocations", "/v1/chat/completions/odd"]
)
def test_engine_of_nccl_gets_nothing_whole(path):
    """It fails on a request whose id does not name both workers."""
    service = Service(Nccl(), fallback=False)
    exchange, answers = service.begin(headers={**POST, ":path": path})

    assert parse(answers)[-1].immediate_response.status.code == 503
    assert isinstance(exchange.decision, Refused)
    exchange, _ = service.begin(headers={**POST, ":path": "/tokenize"})
    assert isinstance(exchange.decision, Routed)


def test_continued_response_does_not_reach_an_engine_of_nccl():
    """It cannot be split."""
    service = Service(Nccl(), fallback=False)
    body = b'{"model": "m", "previous_response_id": "resp_1"}'

    exchange, _ = service.begin(body, {**POST, ":path": "/v1/responses"})

    assert isinstance(exchange.decision, Refused)


def test_both_legs_do_not_run_at_once_in_full_duplex(service):
    """Nothing could be done for a decode worker that waits in vain."""
    push(service)
    exchange = service.exchange()
    exchange.receive(announce(request_headers(POST), FULL_DUPLEX), 0.0)
    exchange.receive(request_body(BODY), 0.0)

    assert not exchange.leg.leg.concurrent


def test_prefill_worker_whose_answer_breaks_off_is_not_the_last(service):
    """Envoy tries no other once an answer has begun."""
    exchange, _ = service.begin()
    first = exchange.leg.decision.workers[0]

    assert exchange.on_leg(LegAnswer(reason="broke off", broken=True), 1.0) == []

    assert exchange.leg.decision.workers[0] is not first


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{}}']
)
@pytest.mark.parametrize("fallback", [True, False])
def test_prefill_that_hands_nothing_over_is_told(fallback, body):
    """To operators, and where the decode worker must not compute prompts to the client."""
    service = Service(fallback=fallback)
    exchange, _ = service.begin()

    (answer,) = parse(exchange.on_leg(LegAnswer(200, body, served=P1), 1.0))

    assert "kv_transfer_params" in exchange.unused
    assert answer.HasField("immediate_response") is not fallback
