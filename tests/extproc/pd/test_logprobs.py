"""Log probabilities of the prompt come from the prefill answer."""

from __future__ import annotations

import json
import time

import pytest

from extproc.pd.logprobs import Wanted, merge, wanted
from extproc.pd.paths import Endpoint

CHAT, COMPLETIONS, RESPONSES, GENERATE = Endpoint


@pytest.mark.parametrize(
    ("endpoint", "body", "result"),
    [
        (COMPLETIONS, b'{"echo":true,"logprobs":0}', Wanted(echo=True)),
        (COMPLETIONS, b'{"echo":true,"logprobs":1,"prompt_logprobs":1}', Wanted(echo=True)),
        (COMPLETIONS, b'{"echo":true}', None),
        (COMPLETIONS, b'{"echo":false,"logprobs":1}', None),
        (COMPLETIONS, b'{"echo":true,"logprobs":1,"stream":true}', None),
        (COMPLETIONS, b'{"prompt_logprobs":0,"stream":false}', Wanted()),
        (COMPLETIONS, b'{"prompt_logprobs":null}', None),
        (CHAT, b'{"prompt_logprobs":2}', Wanted()),
        (CHAT, b'{"echo":true,"logprobs":true}', None),
        (CHAT, b'{"logprobs":false}', None),
        (RESPONSES, b'{"prompt_logprobs":2}', None),
        (GENERATE, b'{"sampling_params":{"prompt_logprobs":1}}', Wanted()),
        (GENERATE, b'{"sampling_params":{},"prompt_logprobs":1}', None),
        (GENERATE, b'{"sampling_params":5}', None),
        (CHAT, b"[]", None),
        (CHAT, b"", None),
    ],
)
def test_only_what_is_asked_for_is_merged(endpoint, body, result):
    """Streams, and requests that want nothing of the prompt, need no prefill answer for it."""
    assert wanted(body, endpoint) == result


def test_prompt_logprobs_of_a_chat_are_copied():
    """They stand at the top level; a null makes place, a missing member is added."""
    prefill = b'{"choices":[{"x":1}],"prompt_logprobs":[null, {"1":-0.50}]}'

    assert merge(prefill, b'{"id":"d", "prompt_logprobs":null }', Wanted()) == (
        b'{"id":"d", "prompt_logprobs":[null, {"1":-0.50}] }'
    )
    assert merge(prefill, b'{"id":"d"}', Wanted()) == (
        b'{"prompt_logprobs":[null, {"1":-0.50}],"id":"d"}'
    )


def test_prompt_logprobs_of_completions_are_copied_to_each_choice():
    """One prefill choice serves all of the decode choices for its prompt; without echo nothing else is."""
    prefill = (
        b'{"choices":[{"prompt_logprobs":[null,1.0],"logprobs":{"tokens":["p"]}},'
        b'{"prompt_logprobs":[null,2.0]}]}'
    )
    decode = (
        b'{ "choices" : [ {"index":0,"prompt_logprobs":null,"logprobs":{"tokens":["d"]}} , {"index":1},\n'
        b'{"index":2,"prompt_logprobs":[9]},{"index":3}] }'
    )

    assert merge(prefill, decode, Wanted()) == (
        b'{ "choices" : [ {"index":0,"prompt_logprobs":[null,1.0],"logprobs":{"tokens":["d"]}} ,'
        b' {"prompt_logprobs":[null,1.0],"index":1},\n'
        b'{"index":2,"prompt_logprobs":[null,2.0]},{"prompt_logprobs":[null,2.0],"index":3}] }'
    )


PREFILL = (
    b'{"choices":[{"prompt_logprobs":[null,{},{}],"logprobs":{'
    b'"text_offset":[0,2,7],"token_logprobs":[null,-1.50,-0.1],'
    b'"tokens":["ab","c\\u00e9\xc3\xa9fg","?"],"top_logprobs":[null,{"a":-1.50},{"b":0}]}}]}'
).replace(b"[null,{},{}]", b"[null,{}]")


def test_echoed_lists_begin_with_the_prompt():
    """Offsets of the answer move by the length of the prompt in characters; the prefill's token goes."""
    decode = (
        b'{"choices":[{"text":"abc", "logprobs":{"text_offset":[0,1] ,"token_logprobs":[-2.0, -3e0],'
        b'"tokens":["x","y"],"top_logprobs":[{},{"y":1}]},"finish_reason":"stop"}]}'
    )

    merged = merge(PREFILL, decode, Wanted(echo=True))

    assert merged == (
        b'{"choices":[{"prompt_logprobs":[null,{}],"text":"abc", "logprobs":{"text_offset":[0,2,7,8] ,'
        b'"token_logprobs":[null,-1.50,-2.0,-3e0],"tokens":["ab","c\\u00e9\xc3\xa9fg","x","y"],'
        b'"top_logprobs":[null,{"a":-1.50},{},{"y":1}]},"finish_reason":"stop"}]}'
    )
    assert json.loads(merged)["choices"][0]["logprobs"]["text_offset"][2] == len("abcééfg")


def test_prompt_that_the_decode_worker_repeats_is_not_doubled():
    """Its own lists then begin with the tokens of the prompt, whatever numbers it has for them."""
    decode = (
        b'{"choices":[{"logprobs":{"text_offset":[0,2,7],"token_logprobs":[null,-9,-2.0],'
        b'"tokens":["ab","c\\u00e9\xc3\xa9fg","x"],"top_logprobs":[{"x":1}]}}]}'
    )

    merged = json.loads(merge(PREFILL, decode, Wanted(echo=True)))

    assert merged["choices"][0]["logprobs"] == {
        "text_offset": [0, 2, 7],
        "token_logprobs": [None, -1.5, -2.0],
        "tokens": ["ab", "cééfg", "x"],
        "top_logprobs": [None, {"a": -1.5}, {"x": 1}],
    }


def test_echo_without_generated_tokens_is_the_prompt_alone():
    """A client may ask for no token at all."""
    decode = (
        b'{"choices":[{"logprobs":{"text_offset":[0,2],"token_logprobs":[null,null],'
        b'"tokens":["ab","c\\u00e9\xc3\xa9fg"],"top_logprobs":null}}]}'
    )

    merged = json.loads(merge(PREFILL, decode, Wanted(echo=True)))

    assert merged["choices"][0]["logprobs"] == {
        "text_offset": [0, 2],
        "token_logprobs": [None, -1.5],
        "tokens": ["ab", "cééfg"],
        "top_logprobs": None,
    }


def test_prompt_is_all_but_the_last_token_when_nobody_counted_it():
    """The prefill leg generates exactly one."""
    prefill = b'{"choices":[{"logprobs":{"tokens":["a","b","c"],"text_offset":["x",1,2]}}]}'
    decode = b'{"choices":[{"logprobs":{"tokens":["d"],"text_offset":[0]}}]}'

    assert merge(prefill, decode, Wanted(echo=True)) == (
        b'{"choices":[{"logprobs":{"tokens":["a","b","d"],"text_offset":["x",1,2]}}]}'
    )


@pytest.mark.parametrize(
    ("tokens", "offsets", "answer_offset", "expected"),
    [
        (b'[5,"z"]', b"[0,1]", b"[3]", b"[0,3]"),
        (b'["a","z"]', b'["x",1]', b"[3]", b'["x",3]'),
        (b'["a","z"]', b"[]", b"[3]", b"[3]"),
        (b'["a","z"]', b"[0,1]", b"[null]", b"[0,null]"),
    ],
)
def test_odd_offsets_are_left_as_they_are(tokens, offsets, answer_offset, expected):
    """What cannot be added up is copied."""
    prefill = b'{"choices":[{"logprobs":{"tokens":%b,"text_offset":%b}}]}' % (tokens, offsets)
    decode = b'{"choices":[{"logprobs":{"tokens":["d"],"text_offset":%b}}]}' % answer_offset

    assert b'"text_offset":%b' % expected in merge(prefill, decode, Wanted(echo=True))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (b"", b'{"choices":[{}]}'),
        (b'{"choices":[]}', b'{"choices":[{}]}'),
        (b'{"choices":[{},{}]}', b'{"choices":[{}]}'),
        (b'{"choices":[{"prompt_logprobs":[]}]}', b'{"choices":[]}'),
        (b'{"choices":[{"prompt_logprobs":[]}]}', b'{"choices":5}'),
        (b'{"choices":[{"prompt_logprobs":[]}]}', b'{"choices":[5]}'),
        (b'{"choices":[{"prompt_logprobs":null}],"prompt_logprobs":null}', b'{"choices":[{}]}'),
        (b'{"prompt_logprobs":[1]}', b"[]"),
        (b'{"choices":[{"logprobs":null}]}', b'{"choices":[{"logprobs":{"tokens":[]}}]}'),
        (b'{"choices":[{"logprobs":{"tokens":["a"]}}]}', b'{"choices":[{"logprobs":null}]}'),
        (b'{"choices":[{"logprobs":{"tokens":["a"]}}]}', b'{"choices":[{"logprobs":{}}]}'),
        (b'{"choices":[{"logprobs":{"tokens":[]}}]}', b'{"choices":[{"logprobs":{"tokens":[]}}]}'),
        (b'{"choices":[{"logprobs":5}]}', b'{"choices":[{"logprobs":5}]}'),
    ],
)
def test_answers_without_a_prompt_part_stay(prefill, decode):
    """Nothing is made up."""
    assert merge(prefill, decode, Wanted(echo=True)) is decode


def test_answers_that_are_too_large_stay(monkeypatch):
    """The bound is on both."""
    monkeypatch.setattr("extproc.pd.logprobs.MAX_ANSWER_BYTES", 40)
    decode = b'{"id":1}'

    assert merge(b'{"prompt_logprobs":[1]}', decode, Wanted()) != decode
    assert merge(b'{"prompt_logprobs":[%b]}' % (b"1" * 40), decode, Wanted()) is decode


def test_long_prompts_take_linear_time():
    """A hundred thousand tokens merge in a moment."""
    count = 100_000
    lists = {
        "tokens": ["tok"] * count,
        "token_logprobs": [-1.5] * count,
        "text_offset": [3] * count,
    }
    prefill = json.dumps({"choices": [{"logprobs": lists}]}).encode()
    decode = b'{"choices":[{"logprobs":{"tokens":["d"],"token_logprobs":[0],"text_offset":[0]}}]}'
    start = time.process_time()

    merged = json.loads(merge(prefill, decode, Wanted(echo=True)))

    assert time.process_time() - start < 3
    assert len(merged["choices"][0]["logprobs"]["tokens"]) == count


def test_lists_that_one_side_lacks_stay():
    """Only what both have is joined."""
    prefill = b'{"choices":[{"logprobs":{"tokens":["a","z"],"text_offset":null}}]}'
    decode = b'{"choices":[{"logprobs":{"tokens":["d"],"text_offset":[0],"token_logprobs":[1]}}]}'

    assert merge(prefill, decode, Wanted(echo=True)) == decode.replace(b'["d"]', b'["a","d"]')
