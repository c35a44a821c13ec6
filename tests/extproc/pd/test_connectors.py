"""The two legs of every connector, byte for byte."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pd.connector import PREFILL_FAILED, Handoff, Leg, Peer
from extproc.pd.mooncake import Mooncake, bootstrap_url, parse_query
from extproc.pd.nccl import Nccl, is_transfer_id
from extproc.pd.nixl import PREFILL_PARAMS, Identities, Nixl

PREFILL = Peer("10.0.0.1:8000", rank=1, bootstrap_port=9001, engine_id="e1")
DECODE = Peer("[fd00::2]:8000", zmq_address="10.0.0.2:21001")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, GENERATE = "/v1/responses", "/inference/v1/generate"

BODIES = {
    CHAT: b'{"model":"m", "stream":true,"kv_transfer_params":{"remote_host":"evil"}}',
    COMPLETIONS: b'{"prompt":"p","max_tokens":0.5e1}',
    RESPONSES: b'{ "input":"i" }',
    GENERATE: b'{"token_ids":[1],"sampling_params":{"max_tokens":5}}',
}
PREFILLS = {
    CHAT: b'{"max_tokens":1,"min_tokens":1,"model":"m", "stream":false,"kv_transfer_params":K}',
    COMPLETIONS: b'{"kv_transfer_params":K,"min_tokens":1,"stream":false,"prompt":"p","max_tokens":1}',
    RESPONSES: b'{"kv_transfer_params":K,"max_output_tokens":1,"stream":false, "input":"i" }',
    GENERATE: b'{"kv_transfer_params":K,"stream":false,"token_ids":[1],'
    b'"sampling_params":{"min_tokens":1,"max_tokens":1}}',
}
DECODES = {
    CHAT: b'{"model":"m", "stream":true,"kv_transfer_params":K}',
    COMPLETIONS: b'{"kv_transfer_params":K,"prompt":"p","max_tokens":0.5e1}',
    RESPONSES: b'{"kv_transfer_params":K, "input":"i" }',
    GENERATE: b'{"kv_transfer_params":K,"token_ids":[1],"sampling_params":{"max_tokens":5}}',
}
STRIPPED = {CHAT: b'{"model":"m", "stream":true}'}
BARE_PREFILLS = {
    CHAT: b'{"max_tokens":1,"min_tokens":1,"model":"m", "stream":false}',
    COMPLETIONS: b'{"min_tokens":1,"stream":false,"prompt":"p","max_tokens":1}',
    RESPONSES: b'{"max_output_tokens":1,"stream":false, "input":"i" }',
    GENERATE: b'{"stream":false,"token_ids":[1],"sampling_params":{"min_tokens":1,"max_tokens":1}}',
}

PUSH = (
    b'{"kv_transfer_params":{"remote_engine_id":"e","remote_host":"10.0.0.1","remote_port":5600,'
    b'"tp_size":2,"transfer_mode":"push"}}'
)


@pytest.fixture
def ids():
    return random.Random(1)


@pytest.mark.parametrize("path", BODIES)
def test_nixl_pulls_what_the_answer_tells(path, ids):
    """The parameters of the answer are spliced in as they came, over the client's own."""
    nixl, params = Nixl(), b'{ "remote_block_ids":[[1, 2]],"x":1.50e0,"transfer_mode":"pull" }'
    answer = b'{"id":"1", "kv_transfer_params" : %b ,"usage":{"kv_transfer_params":0}}' % params

    leg = nixl.prefill(BODIES[path], path, PREFILL, None, ids)
    assert leg is not None
    handoff = nixl.decode(BODIES[path], leg, answer, PREFILL, DECODE)

    assert leg == Leg(PREFILLS[path].replace(b"K", PREFILL_PARAMS))
    assert handoff == Handoff(DECODES[path].replace(b"K", params))
    assert nixl.identities.known == {}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, PREFILL_FAILED),
        (b"", "the prefill answer has no kv_transfer_params"),
        (b"<html>", "the prefill answer has no kv_transfer_params"),
        (b'{"id":1}', "the prefill answer has no kv_transfer_params"),
        (b'{"kv_transfer_params":null}', "the prefill answer has no kv_transfer_params"),
        (b'{"kv_transfer_params":{}}', "the prefill answer has no kv_transfer_params"),
        (b'{"kv_transfer_params":[1]}', "the prefill answer has no kv_transfer_params"),
    ],
)
def test_nixl_decodes_alone_after_a_useless_answer(path, answer, reason, ids):
    """The decode worker computes the prompt; the client's own parameters go all the same."""
    nixl = Nixl()
    leg = nixl.prefill(BODIES[path], path, PREFILL, DECODE, ids)
    assert leg is not None

    assert nixl.decode(BODIES[path], leg, answer, PREFILL, DECODE) == Handoff(
        STRIPPED.get(path), reason=reason
    )


@pytest.mark.parametrize("path", BODIES)
def test_nixl_that_pushes_runs_both_legs_at_once(path, ids):
    """After the first answer the prefill worker is known; the decode leg names it and the prefill leg."""
    nixl = Nixl()
    first = nixl.prefill(BODIES[path], path, PREFILL, DECODE, ids)
    assert first is not None
    assert not first.concurrent
    nixl.decode(BODIES[path], first, PUSH, PREFILL, DECODE)

    leg = nixl.prefill(BODIES[path], path, PREFILL, DECODE, ids)
    assert leg is not None
    handoff = nixl.decode(BODIES[path], leg, None, PREFILL, DECODE)

    assert leg.concurrent
    assert leg.request_id is not None
    assert re.fullmatch("[0-9a-f]{32}", leg.request_id)
    assert leg.body == PREFILLS[path].replace(b"K", PREFILL_PARAMS)
    params = (
        b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e",'
        b'"remote_host":"10.0.0.1","remote_port":5600,"tp_size":2,"remote_request_id":"%b"}'
    ) % leg.request_id.encode()
    assert handoff == Handoff(DECODES[path].replace(b"K", params), leg.request_id)


def test_identity_belongs_to_a_rank():
    """Another rank, or another worker, is another engine."""
    nixl = Nixl()
    nixl.learn(PREFILL, PUSH)

    assert nixl.identities.of(PREFILL) is not None
    assert nixl.identities.of(Peer(PREFILL.authority)) is None
    assert nixl.identities.of(Peer("10.0.0.3:8000", rank=1)) is None


@pytest.mark.parametrize(
    "answer", [None, b"", b"{}", PUSH.replace(b"push", b"pull"), b'{"kv_transfer_params":1}']
)
def test_identity_is_forgotten_when_the_worker_no_longer_pushes(answer):
    """A failed leg may be a restart, after which the engine has another id."""
    nixl = Nixl()
    nixl.learn(PREFILL, PUSH)

    nixl.learn(PREFILL, answer)

    assert nixl.identities.known == {}


def test_identities_of_workers_that_left_are_dropped():
    """What is kept is bounded by the workers there are."""
    identities = Identities()
    nixl = Nixl(identities)
    nixl.learn(PREFILL, PUSH)
    nixl.learn(DECODE, PUSH)

    identities.keep({PREFILL.authority})

    assert list(identities.known) == [("10.0.0.1:8000", 1)]


@pytest.mark.parametrize("path", BODIES)
def test_mooncake_names_the_transfer_on_both_legs(path, ids):
    """The decode leg has the same transfer id, and where the prefill worker is."""
    mooncake = Mooncake()

    leg = mooncake.prefill(BODIES[path], path, PREFILL, None, ids)
    assert leg is not None
    handoff = mooncake.decode(BODIES[path], leg, b"unused", PREFILL, DECODE)

    found = re.search(rb'"(xfer-[0-9a-f-]{36})"', leg.body)
    assert found is not None
    source = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%b"}' % found[1]
    target = (
        b'{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":"%b",'
        b'"remote_bootstrap_addr":"http://10.0.0.1:9001","remote_engine_id":"e1"}'
    ) % found[1]
    assert leg.body == PREFILLS[path].replace(b"K", source)
    assert (leg.request_id, leg.concurrent) == (None, False)
    assert handoff == Handoff(DECODES[path].replace(b"K", target))
    mooncake.learn(PREFILL, b"")


def test_mooncake_without_an_engine_id_is_not_split(ids):
    """The decode worker could not tell where to fetch from."""
    assert Mooncake().prefill(BODIES[CHAT], CHAT, DECODE, None, ids) is None


def test_mooncake_decodes_alone_after_a_failure(ids):
    """Nothing of the transfer is mentioned."""
    leg = Mooncake().prefill(BODIES[CHAT], CHAT, PREFILL, None, ids)
    assert leg is not None

    handoff = Mooncake().decode(BODIES[CHAT], leg, None, PREFILL, DECODE)

    assert handoff == Handoff(STRIPPED[CHAT], reason=PREFILL_FAILED)


def test_mooncake_names_who_computed_the_prompt(ids):
    """The leg may have been retried at another worker; of one without an id nothing can be fetched."""
    leg = Mooncake().prefill(BODIES[CHAT], CHAT, PREFILL, None, ids)
    assert leg is not None
    other = Peer("10.0.0.9:8000", engine_id="e9")

    found = Mooncake().decode(BODIES[CHAT], leg, b"", other, DECODE)
    unknown = Mooncake().decode(BODIES[CHAT], leg, b"", Peer("10.0.0.9:8000"), DECODE)

    assert b'"http://10.0.0.9:8998","remote_engine_id":"e9"}' in (found.body or b"")
    assert (unknown.body, bool(unknown.reason)) == (STRIPPED[CHAT], True)


def test_bootstrap_server_has_a_default_port():
    """IPv6 stays in brackets."""
    assert bootstrap_url(DECODE) == "http://[fd00::2]:8998"


def test_query_tells_the_engine_of_each_rank():
    """What else it says does not matter."""
    answer = b'{"0":{"engine_id":"a","worker_addr":{"0":{"0":"tcp://x"}}},"1":{"engine_id":"b"}}'

    assert parse_query(answer) == {0: "a", 1: "b"}


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b"[]", b'{"x":{"engine_id":"a"}}', b'{"0":{}}', b'{"0":{"engine_id":1}}']
)
def test_query_without_engines_is_an_error(answer):
    """A bootstrap server that nobody has registered at is not ready."""
    with pytest.raises(ValueError, match="engine"):
        parse_query(answer)


@pytest.mark.parametrize("path", BODIES)
def test_nccl_says_it_all_in_the_request_id(path, ids):
    """ZeroMQ addresses where they are known, else those of the HTTP servers; the same id on both legs."""
    nccl = Nccl()

    leg = nccl.prefill(BODIES[path], path, PREFILL, DECODE, ids)
    assert leg is not None
    handoff = nccl.decode(BODIES[path], leg, b"", PREFILL, DECODE)

    assert leg.body == BARE_PREFILLS[path]
    assert leg.request_id is not None
    assert is_transfer_id(leg.request_id)
    assert re.fullmatch(
        "___prefill_addr_10.0.0.1:8000___decode_addr_10.0.0.2:21001_[0-9a-f]{32}", leg.request_id
    )
    # As vLLM's connector reads it.
    assert re.search(r"___decode_addr_(.*):(\d+)", f"cmpl-{leg.request_id}-0").groups() == (
        "10.0.0.2",
        "21001",
    )
    assert re.search(r"___prefill_addr_(.*):(\d+)___", leg.request_id).groups() == (
        "10.0.0.1",
        "8000",
    )
    assert handoff == Handoff(STRIPPED.get(path), leg.request_id)
    nccl.learn(PREFILL, b"")


def test_nccl_decodes_alone_after_a_failure(ids):
    """Under the id the decode worker would wait for blocks that nobody sends."""
    leg = Nccl().prefill(BODIES[COMPLETIONS], COMPLETIONS, PREFILL, DECODE, ids)
    assert leg is not None

    handoff = Nccl().decode(BODIES[COMPLETIONS], leg, None, PREFILL, DECODE)

    assert handoff == Handoff(reason=PREFILL_FAILED)


def test_nccl_needs_the_decode_worker_first(ids):
    """A caller that has none made a mistake."""
    with pytest.raises(ValueError, match="decode worker"):
        Nccl().prefill(b"{}", CHAT, PREFILL, None, ids)


def test_ordinary_request_ids_are_no_transfer_ids():
    """Clients may name requests as they like but for that."""
    assert not is_transfer_id("req-prefill_addr_1")
    assert is_transfer_id("x___decode_addr_169.254.169.254:80")


@pytest.mark.parametrize("connector", [Nixl(), Mooncake(), Nccl()], ids=lambda one: one.name)
@pytest.mark.parametrize(("path", "body"), [("/v1/embeddings", b"{}"), (CHAT, b"[]"), (CHAT, b"")])
def test_other_paths_and_bodies_are_not_split(connector, path, body, ids):
    """They go to one worker."""
    assert connector.prefill(body, path, PREFILL, DECODE, ids) is None


def test_ids_come_from_the_given_source():
    """The same seed gives the same legs, and no two legs share an id."""
    for connector in (Mooncake(), Nccl()):
        twice = [
            [connector.prefill(b"{}", CHAT, PREFILL, DECODE, ids) for _ in range(2)]
            for ids in (random.Random(5), random.Random(5))
        ]
        assert twice[0] == twice[1]
        assert twice[0][0] != twice[0][1]


@given(
    members=st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(), max_size=5),
    own=st.booleans(),
    spaced=st.booleans(),
)
def test_decode_body_is_the_clients_plus_params(members, own, spaced):
    """Without the spliced member it is the client's without its own."""
    if own:
        members = {**members, "kv_transfer_params": {"remote_host": "evil"}}
    body = json.dumps(members, indent=1 if spaced else None).encode()
    answer = b'{"kv_transfer_params":{"remote_host": "h"}}'

    handoff = Nixl().decode(body, Leg(b""), answer, PREFILL, DECODE)

    assert handoff.body is not None
    assert json.loads(handoff.body) == {**members, "kv_transfer_params": {"remote_host": "h"}}
