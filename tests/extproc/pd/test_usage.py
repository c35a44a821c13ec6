"""Usage: the numbers of the prompt change, nothing else."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pd.usage import (
    MAX_ANSWER_BYTES,
    MAX_LINE_BYTES,
    PrefillUsage,
    StreamRewriter,
    needs_rewrite,
    parse_usage,
    rewrite_answer,
)

USAGE = PrefillUsage(100, 64)


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (b'{"usage":{"prompt_tokens":7,"total_tokens":8}}', PrefillUsage(7)),
        (b'{"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}', PrefillUsage(7)),
        (
            b'{"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":0}}}',
            PrefillUsage(7, 0),
        ),
        (
            b'{"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":-1}}}',
            PrefillUsage(7),
        ),
        (
            b'{"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":4}}}',
            PrefillUsage(7, 4),
        ),
        (b'{"usage":{"prompt_tokens":true}}', None),
        (b'{"usage":{"prompt_tokens":"7"}}', None),
        (b'{"usage":{}}', None),
        (b'{"usage":null}', None),
        (b'{"usage":[]}', None),
        (b"{}", None),
        (b"[]", None),
        (b"", None),
    ],
)
def test_prefill_usage_is_read(answer, usage):
    """Both names of the counts; what has another shape counts as not told."""
    assert parse_usage(answer) == usage


def test_usage_is_rewritten_only_when_cached_tokens_are_told():
    """All else the decode worker counts right."""
    assert needs_rewrite(PrefillUsage(7, 0))
    assert not needs_rewrite(PrefillUsage(7))
    assert not needs_rewrite(None)


@pytest.mark.parametrize(
    ("answer", "rewritten"),
    [
        (
            (
                b'{"x":1.50, "usage":{"prompt_tokens":99,"total_tokens" : 104,"completion_tokens":5,'
                b'"prompt_tokens_details":{"audio_tokens":1,"cached_tokens":98}} }'
            ),
            (
                b'{"x":1.50, "usage":{"prompt_tokens":100,"total_tokens" : 105,"completion_tokens":5,'
                b'"prompt_tokens_details":{"audio_tokens":1,"cached_tokens":64}} }'
            ),
        ),
        (
            b'{"usage":{"prompt_tokens":100,"completion_tokens":0,"prompt_tokens_details":null}}',
            (
                b'{"usage":{"prompt_tokens":100,"completion_tokens":0,'
                b'"prompt_tokens_details":{"cached_tokens":64}}}'
            ),
        ),
        (
            b'{"usage":{"prompt_tokens":100,"total_tokens":3}}',
            b'{"usage":{"prompt_tokens_details":{"cached_tokens":64},"prompt_tokens":100,"total_tokens":3}}',
        ),
        (
            (
                b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":-1},"output_tokens":2,'
                b'"total_tokens":11}}'
            ),
            (
                b'{"usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":64},"output_tokens":2,'
                b'"total_tokens":102}}'
            ),
        ),
        (
            (
                b'{"response":{"id":"r","usage":{"input_tokens":9,"input_tokens_details":'
                b'{"cached_tokens":8}, "output_tokens":2,"total_tokens":11}}}'
            ),
            (
                b'{"response":{"id":"r","usage":{"input_tokens":100,"input_tokens_details":'
                b'{"cached_tokens":64}, "output_tokens":2,"total_tokens":102}}}'
            ),
        ),
    ],
)
def test_numbers_of_the_prompt_change(answer, rewritten):
    """Those of the answer, all other members and the white space stay."""
    assert rewrite_answer(answer, USAGE) == rewritten


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[DONE]",
        b'{"usage":null}',
        b'{"choices":[{"delta":{"content":"\\"prompt_tokens\\":1, x_tokens"}}]}',
        b'{"choices":[{"usage":{"prompt_tokens":1}}]}',
        b'{"usage":{"prompt_tokens":null}}',
        b'{"usage":{"completion_tokens":1}}',
        b'{"usage":[{"prompt_tokens":1}]}',
        b'{"response":null,"usage":null,"max_output_tokens":5}',
        b'{"response":{"usage":null,"max_output_tokens":5}}',
        b'{"response":5,"max_output_tokens":5}',
        b'{"usage":{"prompt_tokens":1}',
        b'{"usage":{"prompt_tokens":1},"x":"%b"}' % (b"x" * MAX_ANSWER_BYTES),
    ],
)
def test_answer_without_usage_stays(answer):
    """The very same bytes go out."""
    assert rewrite_answer(answer, USAGE) is answer


def test_without_cached_tokens_the_details_stay():
    """What the prefill worker does not tell is not made up."""
    answer = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}}'

    assert rewrite_answer(answer, PrefillUsage(8)) == answer.replace(b"9", b"8")


LINE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"total_tokens":14,"completion_tokens":5}}'
REWRITTEN = (
    b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":64},"prompt_tokens":100,'
    b'"total_tokens":105,"completion_tokens":5}}'
)
BEFORE = (
    b'event: x\n: comment "usage" \xff\r\ndata: {"choices":[{"delta":{"content":"caf\\u00e9"}}]}\r\n\r\n'
    b'id: {"usage":{"prompt_tokens":1}}\ndata:{"usage":null}\r\r'
)
AFTER = b"\n\ndata: [DONE]\n\ndata: {"


@given(
    cuts=st.lists(st.integers(0, len(BEFORE + LINE + AFTER)), max_size=8),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_events_may_be_split_anywhere(cuts, end):
    """However the stream is cut, one event changes and all other bytes come out in their order."""
    stream = BEFORE + LINE + end + AFTER
    rewriter = StreamRewriter(USAGE)

    out, at = b"", 0
    for cut in [*sorted(cuts), len(stream)]:
        out += rewriter.feed(stream[at:cut])
        at = cut
    held = rewriter.finish()

    assert out == BEFORE + REWRITTEN + end + AFTER.removesuffix(b"data: {")
    assert held == b"data: {"
    assert rewriter.finish() == b""


def test_event_goes_out_with_its_last_byte():
    """Nothing waits for a later event."""
    rewriter = StreamRewriter(USAGE)

    assert rewriter.feed(LINE) == b""
    assert rewriter.feed(b"\n") == REWRITTEN + b"\n"
    assert rewriter.feed(b"\n") == b"\n"


def test_long_lines_pass_as_they_are():
    """What is held back is bounded; the line after a long one is rewritten again."""
    rewriter = StreamRewriter(USAGE)
    long = LINE.replace(b"[]", b'["%b"]' % (b"x" * 2 * MAX_LINE_BYTES))

    first = rewriter.feed(long[:-1000])
    second = rewriter.feed(long[-1000:-10])
    third = rewriter.feed(long[-10:] + b"\n" + LINE + b"\n")
    whole = rewriter.feed(long + b"\n")

    assert first == long[:-1000]
    assert second == long[-1000:-10]
    assert third == long[-10:] + b"\n" + REWRITTEN + b"\n"
    assert whole == long + b"\n"
    assert rewriter.finish() == b""


@pytest.mark.parametrize("size", [1, 7, 2**16])
def test_streams_take_linear_time(size):
    """Neither small chunks nor lines without an end make the work grow."""
    stream = b"data: " + b"x" * (MAX_LINE_BYTES if size < 2**16 else 8 * 2**20)
    stream = stream[: 2**18] if size == 1 else stream
    rewriter = StreamRewriter(USAGE)
    start = time.process_time()

    parts = [rewriter.feed(stream[at : at + size]) for at in range(0, len(stream), size)]

    assert time.process_time() - start < 2
    assert b"".join(parts) + rewriter.finish() == stream


@given(
    members=st.dictionaries(st.text(max_size=4), st.integers() | st.text(), max_size=4),
    counts=st.tuples(st.integers(0, 9999), st.integers(0, 9999), st.integers(-1, 9999)),
    indent=st.none() | st.integers(0, 2),
)
def test_other_members_mean_the_same(members, counts, indent):
    """The rewritten answer differs in exactly three numbers."""
    prompt, completion, cached = counts
    told = {
        **members,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "x": members},
    }
    answer = json.dumps({**members, "usage": told}, indent=indent).encode()

    rewritten = json.loads(rewrite_answer(answer, USAGE))

    told |= {"prompt_tokens": 100, "total_tokens": 100 + completion}
    told["prompt_tokens_details"] = {"cached_tokens": 64, "x": members}
    assert rewritten == {**members, "usage": told}
