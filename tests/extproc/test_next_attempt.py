"""Further attempts of Envoy's at requests that were split, message by message."""

from __future__ import annotations

import json
import random

import pytest

from extproc.admission import Admission
from extproc.errors import ProtocolError
from extproc.ext_proc_answers import (
    ADDRESS_ATTRIBUTE,
    ATTEMPT_ATTRIBUTE,
    EXT_PROC_ATTRIBUTES,
    HANDOVER_KEY,
    LENGTH_KEY,
)
from extproc.next_attempt import NextAttempt, is_next_attempt
from extproc.pd.nixl import Nixl
from extproc.pd.topology import Topology
from extproc.prefill_legs import LegAnswer
from protos.ext_proc_pb2 import ProcessingMode, ProcessingRequest
from tests.extproc.envoy_messages import BUFFERED, POST, announce, parse, request_body
from tests.extproc.test_exchange_legs import ANSWER, BODY, D1, D2, P1, P2, PARAMS, Service
from tests.fleets import remove

FRESH = b'{"remote_host": "other", "n": 1.50}'
AGAIN = LegAnswer(200, b'{"kv_transfer_params":' + FRESH + b"}", served=P2)
HEADERS = {**POST, "content-length": str(len(BODY)), "x-request-id": "id-1"}


class Attempts:
    """A request whose prompt was computed, and Envoy's attempts at it."""

    def __init__(self, connector=None, answer=ANSWER, **rules):
        self.service = Service(connector, **rules)
        self.exchange, _ = self.service.begin(headers=HEADERS)
        (said,) = parse(self.exchange.on_leg(answer, 1.0))
        self.metadata = said.dynamic_metadata.fields["envoy.lb"].struct_value
        self.body = said.request_body.response.body_mutation.body or BODY

    def headers(self, number, at):
        """Return what Envoy says first of attempt *number*, which is about to go to *at*."""
        message = ProcessingRequest()
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = "x-request-id", b"id-1"
        message.metadata_context.filter_metadata["envoy.lb"].CopyFrom(self.metadata)
        attributes = message.attributes[EXT_PROC_ATTRIBUTES].fields
        attributes[ATTEMPT_ATTRIBUTE].number_value = number
        attributes[ADDRESS_ATTRIBUTE].string_value = at
        return announce(message, BUFFERED)

    def begin(self, number, at=D2):
        """Return attempt *number*, and the answer to its headers."""
        service = self.service
        attempt = NextAttempt(
            service.router,
            service.legs,
            ids=random.Random(5),
            max_routed_bytes=10**6,
            admission=Admission(),
        )
        message = self.headers(number, at)
        assert is_next_attempt(message)
        (answer,) = parse(attempt.receive(message, 2.0))
        return attempt, answer

    def third(self):
        """Return the third attempt, for which the prompt is being computed."""
        attempt, answer = self.begin(3)
        assert not answer.HasField("mode_override")
        (patience,) = parse(attempt.receive(request_body(self.body), 2.0))
        assert patience.override_message_timeout.seconds >= 100
        return attempt


@pytest.fixture
def attempts():
    return Attempts()


def unchanged(answer):
    """Tell whether an attempt goes on as it is, its body unseen."""
    return (
        answer.HasField("request_headers")
        and answer.HasField("mode_override")
        and answer.mode_override.request_body_mode == ProcessingMode.NONE
    )


def sent(answer):
    """Return the body and the headers with which an attempt goes on."""
    common = answer.request_body.response
    headers = {h.header.key: h.header.raw_value for h in common.header_mutation.set_headers}
    return common.body_mutation.body, headers


def test_message_of_the_first_attempt_is_none_of_a_further_one():
    """Those have no attributes."""
    assert not is_next_attempt(announce(request_body(b""), BUFFERED))


def test_second_attempt_has_the_same_blocks(attempts):
    """Whoever refused the request has not fetched them."""
    attempt, answer = attempts.begin(2)

    assert unchanged(answer)
    assert attempt.leg is None


def test_prompt_is_computed_anew_for_the_third(attempts):
    """The new parameters stand where the old ones did; every other byte is the client's."""
    attempt = attempts.third()
    leg = attempt.leg

    assert json.loads(leg.leg.body)["max_tokens"] == 1
    assert leg.headers["x-request-id"] == "id-1"
    (answer,) = parse(attempt.on_leg(AGAIN, 3.0))
    body, headers = sent(answer)
    assert body == attempts.body.replace(PARAMS, FRESH)
    assert headers == {"content-length": str(len(body)).encode()}
    assert attempt.leg is None


def test_leg_of_a_further_attempt_is_sent_like_any(attempts):
    """It has a lease of its own for as long as it lasts."""
    attempt = attempts.third()

    own, _ = attempts.service.send(attempt.leg)

    assert sum(attempts.service.in_flight.values()) == 2
    own.close(3.0)
    attempt.close(3.0)
    attempts.exchange.close(3.0)
    assert attempts.service.in_flight == {}


def test_second_attempt_has_other_blocks_when_the_prefill_worker_is_out(attempts):
    """Nobody can fetch what it had."""
    remove(attempts.service.registry, f"http://{P1}")

    _, answer = attempts.begin(2)

    assert not unchanged(answer)


@pytest.mark.parametrize(
    "answer", [LegAnswer(reason="reset"), LegAnswer(500, b"no", served=P1)], ids=["reset", "500"]
)
def test_decode_worker_does_all_of_it_when_no_prefill_worker_can(attempts, answer):
    """The body is the client's again, and so is its length."""
    attempt = attempts.third()

    (last,) = parse(attempt.on_leg(answer, 3.0))

    assert sent(last) == (BODY, {"content-length": str(len(BODY)).encode()})


def test_without_fallback_the_attempt_goes_on_as_it_was():
    """It may fail; but a refusal of the attempt is not the service's to give."""
    attempts = Attempts(fallback=False)
    attempt = attempts.third()

    (last,) = parse(attempt.on_leg(LegAnswer(reason="reset"), 3.0))

    assert last.HasField("request_body")
    assert not last.request_body.response.HasField("body_mutation")


def test_without_fallback_and_prefill_workers_the_attempt_goes_on_as_it_was():
    """A decode worker is not to compute the prompt."""
    attempts = Attempts(fallback=False)
    for worker in (P1, P2):
        remove(attempts.service.registry, f"http://{worker}")
    attempt, _ = attempts.begin(2)

    (last,) = parse(attempt.receive(request_body(attempts.body), 2.0))

    assert attempt.leg is None
    assert not last.request_body.response.HasField("body_mutation")


def test_envoy_knows_the_length_that_every_attempt_begins_with(attempts):
    """Attempts share their headers, and the service may be away when one has to go on as it was."""
    assert attempts.metadata.fields[LENGTH_KEY].string_value == str(len(attempts.body))


def test_answer_is_put_right_by_the_last_prefill():
    """Its usage is that of the worker whose blocks are used."""
    usage = b'"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":%d}},'
    first = LegAnswer(
        200, b'{"kv_transfer_params":' + PARAMS + b"," + usage[:-1] % 3 + b"}", served=P1
    )
    attempts = Attempts(answer=first)
    (handover,) = attempts.service.legs._handovers.values()
    before = handover.merge
    attempt = attempts.third()

    attempt.on_leg(AGAIN, 3.0)

    assert before is not None
    assert handover.merge is not before
    assert handover.prefill.endpoint == P2


def test_worker_that_pushes_is_asked_without_haste():
    """Its legs would run at once, and the blocks might come to nobody."""
    connector = Nixl()
    pushing = b'{"remote_engine_id":"e","remote_host":"h","remote_port":1,"transfer_mode":"push"}'
    answer = LegAnswer(200, b'{"kv_transfer_params":' + pushing + b"}", served=P1)
    attempts = Attempts(connector, answer)
    assert connector.identities.known

    attempt = attempts.third()

    assert not attempt.leg.leg.concurrent
    assert connector.identities.known, "others go on as before"
    assert b"kv_transfer_params" in attempt.leg.leg.body


@pytest.mark.parametrize("number", [2, 3, 6])
def test_request_that_was_not_split_goes_on(attempts, number):
    """Also one whose exchange has ended, and one with a token that was never given."""
    attempts.exchange.close(2.0)
    assert unchanged(attempts.begin(number)[1])
    attempts.metadata.fields[HANDOVER_KEY].string_value = "0" * 32
    assert unchanged(attempts.begin(number)[1])
    attempts.metadata.Clear()
    assert unchanged(attempts.begin(number)[1])


def test_attempt_that_is_given_up_leaves_nothing(attempts):
    """Neither a leg nor what was known of the request."""
    attempt = attempts.third()

    attempt.close(3.0)
    attempts.exchange.close(3.0)

    assert len(attempts.service.legs) == 0
    assert attempts.service.legs._handovers == {}


def test_message_out_of_turn_is_refused(attempts):
    """As in any exchange."""
    attempt, _ = attempts.begin(2)
    with pytest.raises(ProtocolError):
        attempt.receive(request_body(b"{}"), 3.0)


def test_attempt_in_another_zone_fetches_nothing():
    """Where pairs must be in one zone it does all of the request, whatever its number."""
    attempts = Attempts(topology=Topology.REQUIRE, label="zone", zones=True)
    near = attempts.exchange.decision.workers[0].endpoint
    far = D2 if near == D1 else D1

    assert unchanged(attempts.begin(2, near)[1])
    attempt, answer = attempts.begin(2, far)
    assert not unchanged(answer)
    (answer,) = parse(attempt.receive(request_body(attempts.body), 2.0))
    assert attempt.leg is None
    assert sent(answer)[0] == BODY
