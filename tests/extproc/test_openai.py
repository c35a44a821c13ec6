"""What routing reads out of bodies: every endpoint's shape, and anything else without complaint."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.openai import (
    MAX_PROMPT_CHARS,
    MAX_PROMPTS,
    OPENING_CHARS,
    parse_content,
)
from policies.base import Content


def parsed(**fields):
    """Return the content of a body with *fields*."""
    content = parse_content(json.dumps(fields).encode())
    assert content is not None
    return content


def one(**fields):
    """Return the only prompt."""
    (prompt,) = parsed(**fields).prompts
    return prompt


def chat(*messages, **fields):
    """Return the content of a chat; *messages* are (role, content)."""
    return parsed(messages=[{"role": r, "content": c} for r, c in messages], **fields)


# Chat completions


def test_chat_is_flattened_with_its_roles():
    """In order; the opening ends with the first message of the user, replies are marked."""
    content = chat(("system", "S"), ("user", "U1"), ("assistant", "A1"), ("user", "U2"), model="m")

    (prompt,) = content.prompts
    assert prompt == "\x1esystem\x1fS\x1euser\x1fU1\x1eassistant\x1fA1\x1euser\x1fU2"
    assert content.opening == "\x1esystem\x1fS\x1euser\x1fU1"
    assert [prompt[a:b] for a, b in content.replies] == ["\x1eassistant\x1fA1"]
    assert (content.model, content.tokens, content.session) == ("m", False, "")


def test_roles_tell_messages_apart():
    """The same text said by another, or cut in two messages, is another prompt."""
    texts = [
        chat(("user", "ab")).prompts,
        chat(("system", "ab")).prompts,
        chat(("user", "a"), ("user", "b")).prompts,
        chat(("user", "a"), ("assistant", "b")).prompts,
    ]

    assert len(set(texts)) == len(texts)


def test_longer_conversation_begins_with_the_shorter_one():
    """Turn by turn: that is what makes prefixes match; the opening stays the same."""
    turns = [("system", "S" * 50), ("user", "first"), ("assistant", "a"), ("user", "second")]
    turns += [("tool", "result"), ("assistant", "b"), ("user", "third")]
    earlier = chat(*turns[:2])
    for count in range(3, len(turns) + 1):
        later = chat(*turns[:count])
        assert later.prompts[0].startswith(earlier.prompts[0])
        assert later.opening == earlier.opening
        earlier = later


def test_tools_stand_before_everything():
    """As chat templates print them; other tools make another prompt from the start."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    content = chat(("user", "hi"), tools=tools)

    assert content.prompts[0].startswith(json.dumps(tools))
    assert content.prompts[0].endswith("\x1euser\x1fhi")
    assert content.opening == content.prompts[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (["a", "b"], "ab"),
        ([{"type": "input_text", "text": "a"}, "b", None], "ab"),
        (5, "5"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (True, "true"),
    ],
    ids=str,
)
def test_content_of_any_kind(content, text):
    """Text, nothing, parts; anything else as JSON."""
    assert chat(("user", content)).prompts == (f"\x1euser\x1f{text}",)


def test_content_as_text_and_as_one_part_is_the_same():
    """Clients switch between the two."""
    assert chat(("user", "hello")) == chat(("user", [{"type": "text", "text": "hello"}]))


def test_message_without_content_or_role():
    """Neither is needed."""
    assert one(messages=[{}]) == "\x1e\x1f"
    assert one(messages=[{"role": "assistant"}]) == "\x1eassistant\x1f"
    assert one(messages=[{"role": 5, "content": "x"}]) == "\x1e\x1fx"


def test_tool_calls_and_their_results():
    """They are part of the prompt; another argument is another prompt."""

    def with_call(arguments, output="4"):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return parsed(
            messages=[
                {"role": "user", "content": "2+2"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": output},
            ]
        )

    content = with_call('{"x": 1}')

    assert content == with_call('{"x": 1}')
    assert content.prompts != with_call('{"x": 2}').prompts
    assert content.prompts != with_call('{"x": 1}', output="5").prompts
    assert content.prompts[0].endswith("\x1etool\x1f4\x1fc1")
    ((start, end),) = content.replies
    assert content.prompts[0][start:end].startswith("\x1eassistant\x1f\x1f\x1cfunction:")


def test_reasoning_and_names_count():
    """What templates print beside the content."""
    plain = one(messages=[{"role": "user", "content": "x"}])

    for field in ("reasoning_content", "name"):
        assert one(messages=[{"role": "user", "content": "x", field: "y"}]) == f"{plain}\x1fy"


def image(data, **fields):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **fields}}


def audio(data):
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


BLOB = "".join(chr(65 + (n * n + n // 7) % 26) for n in range(5 * 4096))


@pytest.mark.parametrize("kind", [image, audio])
@pytest.mark.parametrize("size", [3, len(BLOB)])
def test_equal_media_are_equal_text_and_others_are_not(kind, size):
    """A short mark instead of megabytes; a change at either end, in the middle or of length shows."""
    data = BLOB[:size]
    variants = [data, "!" + data[1:], data[:-1] + "!", data + "=", data[:-1]]
    variants += [data[: size // 2] + "!" + data[size // 2 + 1 :]]

    def text(data):
        return chat(("user", [kind(data), {"type": "text", "text": "what is this"}])).prompts[0]

    assert text(data) == text(data)
    assert len({text(variant) for variant in variants}) == len(set(variants))
    assert len(text(data)) < 80
    assert text(data).endswith("what is this")


def test_media_of_another_length_are_other_media():
    """Also where every part looks the same, as in silence or a blank page."""
    sizes = (10, 8193, 20_000, 20_001, 30_000)

    assert len({chat(("user", [audio("A" * size)])).prompts for size in sizes}) == len(sizes)


def test_change_anywhere_in_an_image_shows():
    """A screenshot that is not compressed differs where the cursor is, not at its ends."""
    changed = BLOB[: len(BLOB) // 3] + "!!!!" + BLOB[len(BLOB) // 3 + 4 :]

    assert chat(("user", [image(BLOB)])) != chat(("user", [image(changed)]))


def test_order_and_number_of_images_count():
    """Two images are not one, nor the other way round."""
    first, second = image("AAAA"), image("BBBB")

    texts = [
        chat(("user", parts)).prompts
        for parts in (
            [first],
            [first, first],
            [first, second],
            [second, first],
            [image("AAAA", detail="low")],
        )
    ]

    assert len(set(texts)) == len(texts)


# Completions, embeddings, rerank, generate


@pytest.mark.parametrize("field", ["prompt", "input", "text", "query"])
@pytest.mark.parametrize(
    ("value", "prompts", "tokens"),
    [
        ("hello", ("hello",), False),
        ("", (), False),
        (["a", "b"], ("a", "b"), False),
        (["a", "", 5, "b"], ("a", "b"), False),
        ([72, 105], ("Hi",), True),
        ([[72, 105], [33]], ("Hi", "!"), True),
        ([[], [33]], ("!",), True),
        ([], (), False),
        ([200_000, 0xD800, 0x10FFFF], ("\U00030d40\ud800\U0010ffff",), True),
        ([0x110000], (), False),
        ([-1], (), False),
        ([1, "a"], (), False),
        ([1.5], (), False),
        (None, (), False),
        (5, (), False),
        ({"a": 1}, (), False),
    ],
    ids=str,
)
def test_prompts_of_any_kind(field, value, prompts, tokens):
    """Text, token ids, or a list of either."""
    content = parsed(**{field: value})
    if field == "input" and isinstance(value, str) and value:
        prompts = (f"\x1euser\x1f{value}",)  # as the message that later turns make of it

    assert content.prompts == prompts
    assert content.tokens is (tokens and bool(prompts))
    assert content.opening == (prompts[0][:OPENING_CHARS] if prompts else "")
    assert content.replies == ()


def test_tokens_of_a_vocabulary_of_any_size_are_one_character_each():
    """So lengths are in tokens."""
    ids = [0, 1, 127, 128, 255, 256, 55_296, 65_535, 65_536, 151_642, 262_143]

    (prompt,) = parsed(prompt=ids).prompts

    assert [ord(character) for character in prompt] == ids


def test_generate_by_tokens_or_text():
    """``input_ids`` or ``text`` beside sampling parameters."""
    sampling = {"temperature": 0.5, "max_new_tokens": 5, "stop": ["x"]}

    assert parsed(input_ids=[72, 105], sampling_params=sampling).prompts == ("Hi",)
    assert parsed(input_ids=[[72], [105]], sampling_params=sampling).prompts == ("H", "i")
    assert parsed(token_ids=[72, 105], sampling_params=sampling).tokens
    assert parsed(token_ids=[72, 105], sampling_params=sampling).prompts == ("Hi",)
    assert parsed(text="Hi", sampling_params=sampling).prompts == ("Hi",)
    assert parsed(text=["H", "i"], sampling_params=sampling, stream=True).prompts == ("H", "i")


def test_opening_of_a_plain_prompt_is_its_beginning():
    """A longer one with the same beginning has the same opening."""
    short, long = "x" * OPENING_CHARS, "x" * OPENING_CHARS + "more"

    assert parsed(prompt=short).opening == parsed(prompt=long).opening == short


def test_rerank_goes_by_the_query():
    """The documents come after it."""
    content = parsed(model="r", query="what", documents=["a", "b"], top_n=1)

    assert (content.model, content.prompts) == ("r", ("what",))


# Responses


def test_responses_with_text():
    """Instructions stand before it."""
    assert one(input="hi", instructions="be brief") == "be brief\x1euser\x1fhi"
    assert one(input="hi") == "\x1euser\x1fhi"
    assert one(input=["a"], instructions="I") == "I\x1fa"


def test_responses_with_items():
    """Messages, calls and their outputs; replies are marked."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yo"}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c", "output": "result"},
    ]

    content = parsed(input=items, instructions="I")

    (prompt,) = content.prompts
    assert prompt.startswith("I\x1euser\x1fhi\x1eassistant\x1fyo")
    assert "result" in prompt
    assert '{"x":1}' in prompt
    assert content.opening == "I\x1euser\x1fhi"
    assert [prompt[a:b] for a, b in content.replies] == ["\x1eassistant\x1fyo"]


def test_responses_text_is_the_first_message_of_later_turns():
    """``input: "hi"`` and ``input: [{"role": "user", "content": "hi"}]`` are the same prompt."""
    text = parsed(input="hi", instructions="I")
    item = parsed(input=[{"role": "user", "content": "hi"}], instructions="I")

    assert text.prompts == item.prompts
    assert text.opening == item.opening


# Messages (Anthropic)


@pytest.mark.parametrize("system", ["be brief", [{"type": "text", "text": "be brief"}]], ids=type)
def test_system_prompt_beside_the_messages(system):
    """It stands first, whichever way it is written."""
    content = parsed(system=system, messages=[{"role": "user", "content": "hi"}])

    assert content.prompts == ("be brief\x1euser\x1fhi",)
    assert content.opening == content.prompts[0]


def test_tool_use_and_results_of_messages():
    """Parts without text are told apart by their content."""

    def with_result(result):
        part = {"type": "tool_result", "tool_use_id": "t", "content": result}
        return one(messages=[{"role": "user", "content": [part]}])

    assert with_result("4") == with_result("4")
    assert len({with_result(r) for r in ("4", "5", [{"type": "text", "text": "4"}], None)}) == 4


# Sessions


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"session_params": {"session_id": "p"}, "user": "u"}, "p"),
        ({"session_params": {"session_id": ""}, "user": "u"}, "u"),
        ({"session_params": {}, "session_id": "s", "user_id": "i"}, "s"),
        ({"user": "u", "session_id": "s", "user_id": "i"}, "u"),
        ({"session_params": None, "user": None, "user_id": "i"}, "i"),
        ({"session_params": "text", "user": ["u"], "session_id": {"a": 1}, "user_id": "i"}, "i"),
        ({"session_params": {"session_id": 7}}, "7"),
        ({"user": 0}, "0"),
        ({"user": -12345678901234567890}, "-12345678901234567890"),
        ({"user": True, "session_id": False, "user_id": 1.5}, ""),
        ({"user": ""}, ""),
        ({}, ""),
        ({"metadata": {"user": "x"}, "messages": [{"role": "user", "user": "x"}]}, ""),
        ({"prompt": '", "user": "x", "session_id": "y'}, ""),
        ({"messages": [{"role": "user", "content": '"user":"x"'}]}, ""),
        ({"tools": [{"user": "x"}], "messages": [{"role": "user", "content": "hi"}]}, ""),
        ({"User": "x", "USER_ID": "y"}, ""),
    ],
    ids=str,
)
def test_session_is_a_top_level_value(fields, session):
    """The first non-empty of four; integers as their digits; never text inside a prompt."""
    assert parsed(**fields).session == session


def test_session_next_to_any_prompt():
    """It does not matter where in the body it stands."""
    for body in (
        b'{"user": "u", "prompt": "hi"}',
        b'{"prompt": "\\"user\\":\\"x\\"", "user": "u"}',
        b'{"messages": [{"role": "user", "content": "{\\"user\\": \\"x\\"}"}], "user": "u"}',
    ):
        assert parse_content(body).session == "u"


# Odd bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"5",
        b'"text"',
        b"[]",
        b'[{"prompt": "x"}]',
        b"{",
        b'{"prompt": "x"',
        b'{"prompt": "x"} {}',
        b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "x"}',
        '{"prompt": "x"}'.encode("utf-16"),
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "other": NaN}',
        b"--boundary\r\nContent-Disposition: form-data\r\n",
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"user": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_json_object_has_no_content(body):
    """None, and no exception: such a request is routed by its headers and by load."""
    assert parse_content(body) is None


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        (b'{"prompt": "x", "prompt": "y"}', ("y",)),
        (b'{"prompt": "x", "temperature": 1e308, "n": 99999999999999999999}', ("x",)),
        (b' \n{"prompt" : "x"}\r\n', ("x",)),
        (b'{"\\u0070rompt": "x"}', ("x",)),
        (b'{"prompt": "\\u00e9\\ud83d\\ude00"}', ("\xe9\U0001f600",)),
        (b'{"messages": [], "prompt": "x"}', ("x",)),
        (b'{"messages": "x", "prompt": "y"}', ("y",)),
        (b'{"messages": [null, {"role": "user"}], "prompt": "y"}', ("y",)),
        (b'{"messages": [{"role": "user"}, null, "x", 5]}', ("\x1euser\x1fx5",)),
        (
            b'{"tools": null, "messages": [{"role": "user", "content": "x"}]}',
            ("null\x1euser\x1fx",),
        ),
        (b"{}", ()),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_odd_but_json_is_read_as_far_as_it_goes(body, prompts):
    """Duplicate keys as Python reads them, escaped keys, members of another type."""
    assert parse_content(body).prompts == prompts


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(allow_nan=False),
    st.text(max_size=8),
)
KEYS = ("role", "content", "type", "text", "tool_calls", "session_id", "output", "name")
keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=3))
values = scalars
for _ in range(4):  # st.recursive would do, but warns now and then that it did not recurse
    values = st.one_of(
        scalars, st.lists(values, max_size=3), st.dictionaries(keys, values, max_size=3)
    )
FIELDS = ("model", "messages", "tools", "system", "instructions", "prompt", "input", "input_ids")
FIELDS += ("text", "query", "session_params", "user", "session_id", "user_id", "stream")


def check(content):
    """Assert what policies rely on."""
    assert isinstance(content, Content)
    assert isinstance(content.model, str)
    assert isinstance(content.session, str)
    assert all(isinstance(prompt, str) and prompt for prompt in content.prompts)
    assert isinstance(content.opening, str)
    if content.prompts:
        assert content.prompts[0].startswith(content.opening)
        assert content.opening
    end = 0
    for start, stop in content.replies:
        assert len(content.prompts) == 1
        assert end <= start < stop <= len(content.prompts[0])
        end = stop


@pytest.mark.slow
@settings(max_examples=250)
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_any_json_in_any_field_is_read(fields):
    """Without an exception; prompts are text that is not empty."""
    content = parse_content(json.dumps(fields).encode())

    if content is not None:  # lone surrogates, say
        check(content)


@given(st.binary(max_size=60))
def test_any_bytes_are_read(body):
    """Without an exception."""
    content = parse_content(body)

    assert content is None or isinstance(content, Content)


@given(
    st.text(alphabet='{}[]",:\\ aeu01.-', max_size=30),
    st.sampled_from(["messages", "prompt", "user", "tools"]),
)
def test_any_broken_json_is_read(text, field):
    """Nearly JSON, in each kind of field."""
    content = parse_content(f'{{"{field}": {text}}}'.encode())

    if content is not None:
        check(content)


@pytest.mark.slow
@pytest.mark.parametrize("open_and_close", [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
@pytest.mark.parametrize(
    "around",
    [
        '{{"messages": [{{"role": "user", "content": [{{"type": "x", "y": {}}}]}}]}}',
        '{{"messages": [{{"role": "user", "content": {{"y": {}}}}}]}}',
        '{{"messages": [{{"role": "user", "tool_calls": [{{"y": {}}}]}}]}}',
        '{{"tools": {}, "messages": [{{"role": "user"}}]}}',
        '{{"prompt": {}}}',
        '{{"user": {}, "prompt": "x"}}',
    ],
    ids=["part", "content", "call", "tools", "prompt", "user"],
)
def test_nesting_of_any_depth_is_read(open_and_close, around):
    """Around the depth at which the decoder gives up too, and from deep down in a stack of calls."""
    opening, closing = open_and_close
    limit, failed = sys.getrecursionlimit(), []
    for depth in (1, 50, *range(limit - 130, limit + 10)):
        nested = opening * depth + ("1" if opening != "[" else "") + closing * depth
        try:
            content = parse_content(around.format(nested).encode())
        except RecursionError:  # its traceback would take a minute to show
            failed.append(depth)
        else:
            assert content is None or check(content) is None

    assert failed == []


def test_long_text_is_not_cut():
    """A megabyte of prompt is the prompt."""
    text = "x\u4e2d" * 500_000

    assert one(prompt=text) == text
    assert one(messages=[{"role": "user", "content": text}]).endswith(text)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b'"00000",' * 400_000 + b'"1"]}',
        b'{"prompt":[' + b"[1]," * 400_000 + b"[1]]}",
        b'{"messages":[{"role":"user","content":[' + b'{"a":1},' * 200_000 + b"{}]}]}",
        b'{"messages":[' + b'{"role":"user","content":"x"},' * 60_000 + b"{}]}",
    ],
    ids=["prompts", "token prompts", "parts", "messages"],
)
def test_what_is_looked_at_is_bounded(body):
    """A request of megabytes of small pieces costs the others no more than a long prompt."""
    content = parse_content(body)

    assert content is not None
    assert len(content.prompts) <= MAX_PROMPTS
    assert sum(map(len, content.prompts)) <= MAX_PROMPT_CHARS + 64
