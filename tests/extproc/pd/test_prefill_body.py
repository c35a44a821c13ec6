"""The body of the prefill leg: few members change, every other byte stays."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.json_edit import MAX_MEMBERS
from extproc.pd.paths import Endpoint, phase_of
from extproc.pd.prefill_body import build_prefill_body, strip_client_params, with_params

CHAT, COMPLETIONS, RESPONSES, GENERATE = Endpoint


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/v1/chat/completions?a=/v1/completions", CHAT),
        ("/v1/completions", COMPLETIONS),
        ("/v1/completions/?x", COMPLETIONS),
        ("/v1/responses", RESPONSES),
        ("/inference/v1/generate", GENERATE),
        ("/v1/completions//", None),
        ("/v1/responses/resp_1", None),
        ("/v1/embeddings", None),
        ("/v1/messages", None),
        ("/generate", None),
        ("/V1/completions", None),
        ("v1/completions", None),
        ("/x?/v1/completions", None),
        ("/", None),
        ("", None),
    ],
)
def test_path_tells_the_endpoint(path, endpoint):
    """Query and one closing slash do not matter; all else is not split."""
    assert phase_of(path) is endpoint


@pytest.mark.parametrize(
    ("endpoint", "body", "edited"),
    [
        (
            CHAT,
            b'{"model":"m","messages":[]}',
            b'{"kv_transfer_params":K,"max_tokens":1,"min_tokens":1,"stream":false,"model":"m","messages":[]}',
        ),
        (
            COMPLETIONS,
            (
                b' {\n"prompt" : "\\u00e9",\n"max_tokens" : 1e2 , "stream":true,'
                b'"stream_options":{"include_usage":true} }\n'
            ),
            (
                b' {"kv_transfer_params":K,"min_tokens":1,\n"prompt" : "\\u00e9",\n"max_tokens" : 1 ,'
                b' "stream":false }\n'
            ),
        ),
        (
            CHAT,
            b'{"max_completion_tokens":7,"max_tokens":9,"n":3,"best_of":4,"min_tokens":0,"stream":null}',
            (
                b'{"kv_transfer_params":K,"max_completion_tokens":1,"max_tokens":1,"n":1,"best_of":1,'
                b'"min_tokens":1,"stream":false}'
            ),
        ),
        (
            CHAT,
            b'{"stream_options":null,"n":1.0,"kv_transfer_params":{"remote_host":"x"},"tools":[{"n":2}]}',
            b'{"max_tokens":1,"min_tokens":1,"stream":false,"n":1,"kv_transfer_params":K,"tools":[{"n":2}]}',
        ),
        (
            COMPLETIONS,
            b'{"n":2,"n":3,"strea\\u006d":true,"x":1.50,"x":-0,"stream_options":{},"stream_options":1}',
            (
                b'{"kv_transfer_params":K,"max_tokens":1,"min_tokens":1,"n":1,"n":1,"strea\\u006d":false,'
                b'"x":1.50,"x":-0}'
            ),
        ),
        (
            CHAT,
            b'{"vllm_xargs":{"a":1,"kv_transfer_params":"x"},"stream":false}',
            b'{"kv_transfer_params":K,"max_tokens":1,"min_tokens":1,"vllm_xargs":{"a":1},"stream":false}',
        ),
        (
            RESPONSES,
            b'{"input":"hi","max_output_tokens":500,"stream":true,"background":true}',
            b'{"kv_transfer_params":K,"input":"hi","max_output_tokens":1,"stream":false,"background":false}',
        ),
        (
            RESPONSES,
            b'{"input":"hi","previous_response_id":null}',
            (
                b'{"kv_transfer_params":K,"max_output_tokens":1,"stream":false,"input":"hi",'
                b'"previous_response_id":null}'
            ),
        ),
        (
            GENERATE,
            (
                b'{"token_ids":[1, 2],"sampling_params":{"max_tokens":9, "n":2, "extra_args":'
                b'{"kv_transfer_params":{}}},"stream":true}'
            ),
            (
                b'{"kv_transfer_params":K,"token_ids":[1, 2],"sampling_params":{"min_tokens":1,"max_tokens":1,'
                b' "n":1, "extra_args":{}},"stream":false}'
            ),
        ),
        (
            GENERATE,
            b'{"token_ids":[]}',
            (
                b'{"kv_transfer_params":K,"sampling_params":{"max_tokens":1,"min_tokens":1},"stream":false,'
                b'"token_ids":[]}'
            ),
        ),
        (
            GENERATE,
            b'{"sampling_params":null}',
            b'{"kv_transfer_params":K,"stream":false,"sampling_params":{"max_tokens":1,"min_tokens":1}}',
        ),
        (
            GENERATE,
            b'{"sampling_params":{},"sampling_params":[1],"max_tokens":5}',
            (
                b'{"kv_transfer_params":K,"stream":false,"sampling_params":{"max_tokens":1,"min_tokens":1},'
                b'"sampling_params":[1],"max_tokens":5}'
            ),
        ),
    ],
)
def test_prefill_asks_for_one_token(endpoint, body, edited):
    """One token, one answer, no stream; the rest is the client's."""
    assert build_prefill_body(body, endpoint, b'{"k":1}') == edited.replace(b"K", b'{"k":1}')


def test_prefill_without_params_takes_the_clients_away():
    """Some connectors say nothing in the body; a client may not either."""
    body = b'{"kv_transfer_params":{"remote_host":"x"},"max_tokens":2,"min_tokens":2,"stream":true}'

    edited = build_prefill_body(body, CHAT, None)

    assert edited == b'{"max_tokens":1,"min_tokens":1,"stream":false}'


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b'{"a":NaN}', b'{"a":1', b"\xff", b'{"a":1}']
)
def test_unreadable_body_is_not_split(endpoint, body):
    """Only a JSON object can be edited."""
    readable = body == b'{"a":1}'

    assert (build_prefill_body(body, endpoint, b"{}") is not None) is readable
    assert (with_params(body, b"{}") is not None) is readable


def test_continued_response_is_not_split():
    """The earlier response is on one worker, which is not the prefill worker."""
    body = b'{"input":"hi","previous_response_id":"resp_1"}'

    assert build_prefill_body(body, RESPONSES, b"{}") is None
    assert build_prefill_body(body, CHAT, b"{}") is not None


@pytest.mark.parametrize(
    ("body", "stripped"),
    [
        (b'{"kv_transfer_params":{"remote_host":"x"}}', b"{}"),
        (b'{ "kv_transfer_params" : null , "a":1}', b'{ "a":1}'),
        (b'{"a":1 , "kv_transfer_params":1 ,"b":2}', b'{"a":1 ,"b":2}'),
        (b'{"kv_transfer_params":1,"a":1,"kv_transfer_params":2}', b'{"a":1}'),
        (b'{"kv\\u005ftransfer\\u005Fparams":1,"a":"\\u00e9"}', b'{"a":"\\u00e9"}'),
        (b'{"vllm_xargs":{"kv_transfer_params":"x"}}', b'{"vllm_xargs":{}}'),
        (
            b'{"sampling_params":{"extra_args":{"a":1,"kv_transfer_params":{}}}}',
            b'{"sampling_params":{"extra_args":{"a":1}}}',
        ),
    ],
)
def test_clients_params_are_stripped(body, stripped):
    """At the top level, and where vLLM would take them from, however the key is written."""
    assert strip_client_params(body) == stripped


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'{"a":1}',
        b'{"a":"\\u00e9 kv_transfer_params"}',
        b'{"messages":[{"kv_transfer_params":1}]}',
        b'{"a":NaN}',
        b'{"a":NaN,"b":"kv_transfer_params and \\u00e9"}',
        b'{"a":"\\ud83d","b":"\\u00e9"}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_body_without_params_stays(body):
    """Also one that cannot be read here, when no parser could find the key in it."""
    assert strip_client_params(body) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":{},"a":NaN}',
        b'{"kv_tr\\u0061nsfer_par\\u0061ms":{},"a":NaN}',
        b'{"kv_transfer_params":{},"a":"\\ud800"}',
        b'\xef\xbb\xbf{"kv_transfer_params":{}}',
        '{"kv_transfer_params":{}}'.encode("utf-16"),
        '{"kv_transfer_params":{}}'.encode("utf-16-le"),
        '{"kv_transfer_params":{}}'.encode("utf-32-be"),
        b'{"kv_transfer_params":1' + b',"x":1' * MAX_MEMBERS + b"}",
        b'{"sampling_params":{"extra_args":{"kv_transfer_params":1'
        + b',"x":1' * MAX_MEMBERS
        + b"}}}",
    ],
)
def test_params_that_only_another_parser_would_find_are_refused(body):
    """What cannot be edited must not reach a worker that might read it."""
    assert strip_client_params(body) is None


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_keys = st.text(max_size=4) | st.sampled_from(
    [
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "best_of",
        "stream",
        "stream_options",
        "kv_transfer_params",
        "model",
        "messages",
    ]
)


@given(
    members=st.dictionaries(_keys, _values, max_size=8),
    indent=st.none() | st.integers(0, 2) | st.just("\t"),
    ascii_only=st.booleans(),
)
def test_only_what_has_to_changes(members, indent, ascii_only):
    """The prefill body means the expected object, and the other members are the same bytes in order."""
    body = json.dumps(members, indent=indent, ensure_ascii=ascii_only).encode()

    edited = build_prefill_body(body, CHAT, b'{"k":1}')
    stripped = strip_client_params(body)

    expected = {**members, "max_tokens": 1, "min_tokens": 1, "stream": False}
    expected["kv_transfer_params"] = {"k": 1}
    expected |= {key: 1 for key in ("max_completion_tokens", "n", "best_of") if key in members}
    expected.pop("stream_options", None)
    assert edited is not None
    assert json.loads(edited) == expected
    at = 0
    for key, value in members.items():
        if key in expected and expected[key] is value:
            member = json.dumps({key: value}, indent=indent, ensure_ascii=ascii_only)[1:-1].strip()
            at = edited.index(member.encode(), at) + len(member.encode())
    assert stripped is not None
    members.pop("kv_transfer_params", None)
    assert json.loads(stripped) == members


def test_large_bodies_take_linear_time():
    """Eight megabytes are edited in a fraction of a second, whatever they consist of."""
    for filling in (b"x", b"\\n", b"\\u00e9", b"[", b'kv_transfer_params\\"'):
        text = filling * (8 * 2**20 // len(filling))
        body = b'{"messages":"%b","stream_options":{},"kv_transfer_params":{}}' % text
        start = time.process_time()

        edited = build_prefill_body(body, CHAT, b"{}")
        stripped = strip_client_params(body)

        assert time.process_time() - start < 2
        assert edited is not None
        assert stripped == b'{"messages":"%b","stream_options":{}}' % text


def test_large_unreadable_bodies_take_linear_time():
    """Neither does the search for an escaped key go back and forth."""
    for filling in (b'"kv_transfer_param', b"\\u006b\\u0076\\u005f", b'"' + b"\\u006b" * 7):
        body = filling * (8 * 2**20 // len(filling))
        start = time.process_time()

        assert strip_client_params(body) == body
        assert time.process_time() - start < 4
