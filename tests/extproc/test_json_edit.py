"""Edits of JSON: the one member changes, every other byte stays."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.json_edit import (
    MAX_MEMBERS,
    Remove,
    Replace,
    Set,
    edit_members,
    element_spans,
    replace_top_level,
    set_top_level,
    top_level_span,
    top_level_value,
)

NEW = b'{"new":[1]}'


def replaced(body):
    return replace_top_level(body, "model", NEW)


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b'{"model":"m"}', b'{"model":%b}'),
        (b'{"model":1}', b'{"model":%b}'),
        (b'{"model":-1.50e+07 }', b'{"model":%b }'),
        (b'{"model":null,"x":1.0}', b'{"model":%b,"x":1.0}'),
        (b'{"model":[{}, [1]] ,"x":[]}', b'{"model":%b ,"x":[]}'),
        (b'{"model":{"model":1}}', b'{"model":%b}'),
        (b'{"model":""}', b'{"model":%b}'),
        (b'{"x":1E2,"model":"m","y":1e2}', b'{"x":1E2,"model":%b,"y":1e2}'),
    ],
)
def test_value_of_any_kind_is_replaced(body, result):
    """Scalars, strings, arrays and objects end where they end."""
    assert replaced(body) == result.replace(b"%b", NEW)


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b'{"model":1,"model":2}', b'{"model":%b,"model":%b}'),
        (
            b'{"model":[1,2],"x":"\\u00e9","model":{},"x":2,"model":3}',
            b'{"model":%b,"x":"\\u00e9","model":%b,"x":2,"model":%b}',
        ),
        (b'{"mod\\u0065l":"a"}', b'{"mod\\u0065l":%b}'),
        (
            b'{"\\u006D\\u006f\\u0064\\u0065\\u006c":1,"model":1}',
            b'{"\\u006D\\u006f\\u0064\\u0065\\u006c":%b,"model":%b}',
        ),
    ],
)
def test_every_occurrence_is_replaced(body, result):
    """Duplicates, and keys with escapes, are the same member."""
    assert replaced(body) == result.replace(b"%b", NEW)


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b'{"x":{"model":1},"model":2}', b'{"x":{"model":1},"model":%b}'),
        (b'{"x":[{"model":1}],"model":2}', b'{"x":[{"model":1}],"model":%b}'),
        (b'{"x":"\\"model\\":1","model":2}', b'{"x":"\\"model\\":1","model":%b}'),
        (b'{"x":"}","model":2,"y":"]{,"}', b'{"x":"}","model":%b,"y":"]{,"}'),
        (b'{"x":"\\\\","model":2,"y":"\\\\\\""}', b'{"x":"\\\\","model":%b,"y":"\\\\\\""}'),
        (b'{"x":"model","model":2}', b'{"x":"model","model":%b}'),
        (b'{"x\\"model":1,"model":2}', b'{"x\\"model":1,"model":%b}'),
        (b'{",\\"":1,":":2,"{":3,"model":2}', b'{",\\"":1,":":2,"{":3,"model":%b}'),
        (b'{"Model":1,"model ":2,"model":2}', b'{"Model":1,"model ":2,"model":%b}'),
    ],
)
def test_nothing_else_is_touched(body, result):
    """Nested members, text in strings and similar keys stay."""
    assert replaced(body) == result.replace(b"%b", NEW)


def test_white_space_stays():
    """White space may stand between any two tokens."""
    body = b'\r\n\t { \n"a" \t: [ 1 , { } ]\r\n, "model"\n:\n"m"\n,"b" :2 } \n'

    assert replaced(body) == body.replace(b'"m"', NEW)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b" { \n} ",
        b'{"x":1}',
        b'{"x":{"model":1}}',
        b'{"x":"\\"model\\":1"}',
        b'{"":1}',
        b'{"mode":1,"model2":2,"MODEL":3}',
        b'{"mod\\\\u0065l":1}',
    ],
)
def test_object_without_the_member_has_nothing_to_replace(body):
    """None tells that there is no such member."""
    assert replaced(body) is None
    assert top_level_span(body, "model") == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"1",
        b"null",
        b'"model"',
        b'["model",1]',
        b'[{"model":1}]',
        b'{"model":1',
        b'{"model":1,',
        b'{"model":"m',
        b'{"model":"m\\',
        b'{"model":"m\\u00',
        b'{"model"',
        b"{",
        b'{"model":1}}',
        b'{"model":1}{}',
        b'{"model":1,}',
        b'{"model" 1}',
        b'{"model":}',
        b'{"model":01}',
        b'{"model":NaN}',
        b"{'model':1}",
        b"{model:1}",
        b'{"model":1 "x":2}',
        b'{"x":{]},"model":1}',
        b'{"x":"a\nb","model":1}',
        b'{"x":"\\q","model":1}',
        b'{"x":"\\ud800","model":1}',
        b'{"\xff":1,"model":1}',
        b'\xef\xbb\xbf{"model":1}',
        '{"model":1}'.encode("utf-16"),
        '{"model":1}'.encode("utf-16-le"),
        '{"model":1}'.encode("utf-32-be"),
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n',
    ],
)
def test_what_is_no_json_object_is_left_alone(body):
    """Neither is a member replaced in it, nor is one added."""
    assert top_level_span(body, "model") is None
    assert replaced(body) is None
    assert set_top_level(body, "model", NEW) is None


def test_bytes_that_are_not_utf8_stay_in_values():
    """What routing does not read is the worker's to judge."""
    assert replaced(b'{"x":"\xff","model":1}') == b'{"x":"\xff","model":' + NEW + b"}"


def test_any_key_can_be_named():
    """Keys compare by what they mean, not by how they are written."""
    body = b'{"":1,"a\\"b":2,"a\\\\b":3,"\\b":4,"\\ud83d\\ude00":5,"\xc3\xa9":6,"a\\/":7,"12":8}'

    for value, key in enumerate(["", 'a"b', "a\\b", "\b", "😀", "é", "a/", "12"], 1):
        digit = b":%d" % value
        assert replace_top_level(body, key, b"0") == body.replace(digit, b":0")
        assert set_top_level(body, key, b"0") == body.replace(digit, b":0")


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b"{}", b'{"model":%b}'),
        (b" { \n} ", b' {"model":%b \n} '),
        (b'{"x":1}', b'{"model":%b,"x":1}'),
        (b'\n{ "x" : "model" }', b'\n{"model":%b, "x" : "model" }'),
        (b'{"x":{"model":1}}', b'{"model":%b,"x":{"model":1}}'),
        (b'{"x":1,"model":2,"model":3}', b'{"x":1,"model":%b,"model":%b}'),
    ],
)
def test_missing_member_is_added(body, result):
    """It comes first; one that is there gets the value where it is."""
    assert set_top_level(body, "model", NEW) == result.replace(b"%b", NEW)


def test_added_key_is_written_as_json():
    """Quotes and control characters of a key are escaped."""
    edited = set_top_level(b"{}", 'a"\n', b"1")

    assert edited is not None
    assert json.loads(edited) == {'a"\n': 1}


def test_members_are_bounded():
    """An object of nothing but members costs no more than a bounded one."""
    most = b"{" + b'"x":1,' * (MAX_MEMBERS - 1) + b'"model":1}'

    assert replaced(most) == most.replace(b'"model":1', b'"model":' + NEW)
    assert replaced(b'{"x":1,' + most[1:]) is None


def test_depth_is_bounded():
    """Reasonable depth works, absurd depth is refused and crashes nothing."""
    deep = b'{"x":' + b"[" * 500 + b"]" * 500 + b',"model":1}'

    assert replaced(deep) == deep.replace(b'"model":1', b'"model":' + NEW)
    assert replaced(b'{"model":' * 100_000) is None
    assert replaced(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"model":1}') is None


@pytest.mark.parametrize(
    "text",
    [b"[" * 2**20, b"\\" * 2**20, b'"' * 2**20, b"{" * 2**20, b'{"model":' * 2**17, b" " * 2**20],
    ids=["arrays", "backslashes", "quotes", "braces", "nested", "blank"],
)
def test_hostile_text_is_refused(text):
    """None of it is JSON."""
    assert replaced(text) is None


@pytest.mark.parametrize(
    "filling",
    [b"\\\\" * 2**19, b"\\n" * 2**19, b"x" * 2**20, b'\\"model\\":1,' * 2**16, b"[{" * 2**19],
    ids=["backslashes", "escapes", "plain", "members", "brackets"],
)
def test_long_strings_and_keys_are_stepped_over(filling):
    """Nothing in a string counts, be it a value or a key."""
    for body in (b'{"x":"%b","model":"m"}' % filling, b'{"%b":1,"model":"m"}' % filling):
        assert replaced(body) == body[: -len(b'"m"}')] + NEW + b"}"


_keys = st.sampled_from(["model", "x", 'mo"del', "é", "\\", "[", ""]) | st.text(max_size=5)
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(['"model":1', "\\", "}", ",", '{"model":"']),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_keys | st.just("model"), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(
    members=st.dictionaries(_keys, _values, max_size=6),
    key=_keys,
    value=_values,
    indent=st.none() | st.integers(0, 3) | st.just("\t"),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\r\n", "\t:\n ")]),
    ascii_only=st.booleans(),
)
def test_only_the_member_changes(members, key, value, indent, separators, ascii_only):
    """The result decodes to the object with the new value; outside of it all bytes are the same."""
    text = json.dumps(members, indent=indent, separators=separators, ensure_ascii=ascii_only)
    body, new = text.encode(), json.dumps(value).encode()

    edited = replace_top_level(body, key, new)
    with_member = set_top_level(body, key, new)

    assert with_member is not None
    assert json.loads(with_member) == {**members, key: value}
    if key not in members:
        assert edited is None
        at = body.index(b"{") + 1
        assert with_member[:at] + with_member[len(with_member) - len(body) + at :] == body
    else:
        assert edited == with_member
        assert list(json.loads(edited)) == list(members)
        assert without(edited, key) == without(body, key)


def without(body, key):
    """Return *body* without the one value of *key*."""
    spans = top_level_span(body, key)
    assert spans is not None
    ((begin, end),) = spans
    return body[:begin] + b"\0" + body[end:]


_blank = st.text(" \t\r\n", max_size=3)


def _escaped(text):
    """Return *text* as a JSON string with an escape for every character."""
    units = text.encode("utf-16-be").hex()
    return '"' + "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)) + '"'


@st.composite
def _objects(draw):
    """Return a body written token by token, and what replacing ``model`` makes of it."""
    before, after, found = [], [], False
    for index in range(draw(st.integers(0, 5))):
        key = draw(_keys)
        dump = draw(
            st.sampled_from([json.dumps, _escaped, lambda k: json.dumps(k, ensure_ascii=False)])
        )
        lead = f"{',' if index else ''}{draw(_blank)}{dump(key)}{draw(_blank)}:{draw(_blank)}"
        old = json.dumps(draw(_values), ensure_ascii=draw(st.booleans()))
        tail = draw(_blank)
        before.append(lead + old + tail)
        after.append(lead + (NEW.decode() if key == "model" else old) + tail)
        found |= key == "model"
    head, tail = f"{draw(_blank)}{{{draw(_blank)}", f"}}{draw(_blank)}"
    written, edited = ((head + "".join(text) + tail).encode() for text in (before, after))
    return written, edited if found else None


@given(_objects())
def test_duplicates_escapes_and_white_space_stay(bodies):
    """Bodies as no encoder writes them come out as expected, byte for byte."""
    before, after = bodies

    assert replaced(before) == after


@given(st.binary(max_size=40) | st.text('{}[]":,\\model01 ', max_size=40).map(str.encode))
def test_any_bytes_are_bearable(body):
    """Never an exception, and an object exactly when msgspec says so."""
    spans = top_level_span(body, "model")
    added = set_top_level(body, "model", NEW)

    assert (spans is None) == (added is None)
    assert (replaced(body) is None) == (not spans)


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b'{"a":1}', b"{}"),
        (b'{ "a" : 1 }', b"{  }"),
        (b'{ "a":1 , "b":2 }', b'{ "b":2 }'),
        (b'{"b":2 , "a":1 }', b'{"b":2 }'),
        (b'{"b":2 , "a":1 , "c":3}', b'{"b":2 , "c":3}'),
        (b'{"a":1,\n"\\u0061":2,\n"b":3,\n"a":4,"a":5,\n"c":6,"a":7 }', b'{"b":3,\n"c":6 }'),
        (b'{"a":1,"a":2}', b"{}"),
        (b'{"b":{"a":1}}', b'{"b":{"a":1}}'),
    ],
)
def test_member_is_removed_with_one_comma(body, result):
    """Of the white space around it, what stands before it at the beginning and after it elsewhere stays."""
    assert edit_members(body, [Remove(("a",))]) == result


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b"{}", b'{"s":0,"o":{"i":{"s":1}}}'),
        (b'{"r":9,"x":1}', b'{"s":0,"o":{"i":{"s":1}},"r":2}'),
        (b'{"o":{}}', b'{"s":0,"o":{"i":{"s":1}}}'),
        (b'{"o":null}', b'{"s":0,"o":{"i":{"s":1}}}'),
        (b'{"o": {"i":{"r":9 ,"x":8, "s":7}} }', b'{"s":0,"o": {"i":{"r":3, "s":1}} }'),
        (b'{"o":[1]}', b'{"s":0,"o":[1]}'),
        (b'{"o":{"i":5}}', b'{"s":0,"o":{"i":5}}'),
        (
            b'{"o":{"i":{"s":0}},"o":{"i":{"s":2},"i":{}}}',
            b'{"s":0,"o":{"i":{"s":1}},"o":{"i":{"s":1},"i":{"s":1}}}',
        ),
    ],
)
def test_edits_reach_into_objects(body, result):
    """A missing object comes with what is set in it; what is no object stays."""
    edits = [
        Set(("s",), b"0"),
        Set(("o", "i", "s"), b"1"),
        Replace(("r",), b"2"),
        Replace(("o", "i", "r"), b"3"),
        Remove(("x",)),
        Remove(("o", "i", "x")),
    ]

    assert edit_members(body, edits) == result


def test_last_edit_of_a_path_counts():
    """What lies within a member that is set or removed does not."""
    edits = [Set(("a", "b"), b"1"), Set(("a",), b"2"), Remove(("c",)), Set(("c",), b"3")]

    assert edit_members(b'{"a":{}}', edits) == b'{"c":3,"a":2}'
    assert edit_members(b'{"c":0}', [*edits, Remove(("a",))]) == b'{"c":3}'


def test_removed_null_object_stays_null():
    """There is nothing in it to remove or to replace."""
    body = b'{"a":null}'

    assert edit_members(body, [Remove(("a", "b")), Replace(("a", "c"), b"1")]) == body


def test_body_without_changes_is_the_same_object():
    """Nothing is copied."""
    body = b'{"a":1,"b":{"c":2}}'

    assert edit_members(body, [Set(("a",), b"1"), Remove(("b", "x")), Remove(("y",))]) is body


def test_members_of_inner_objects_are_bounded():
    """An edit that would have to read more than that is refused."""
    body = b'{"a":{"x":1' + b',"x":1' * MAX_MEMBERS + b"}}"

    assert edit_members(body, [Remove(("a", "x"))]) is None
    assert edit_members(body, [Remove(("b", "x"))]) == body


@given(
    members=st.dictionaries(_keys, _values, max_size=6),
    removed=st.sets(_keys, max_size=3),
    added=st.dictionaries(_keys, _values, max_size=3),
    indent=st.none() | st.integers(0, 3),
)
def test_edits_of_many_members_at_once(members, removed, added, indent):
    """The result decodes to what a dict would be after the same edits, and is stable."""
    body = json.dumps(members, indent=indent).encode()
    edits = [Remove((key,)) for key in removed] + [
        Set((key,), json.dumps(value).encode()) for key, value in added.items()
    ]

    edited = edit_members(body, edits)

    assert edited is not None
    kept = {key: value for key, value in members.items() if key not in removed}
    assert json.loads(edited) == {**kept, **added}
    assert edit_members(edited, edits) is edited


def test_elements_are_found():
    """Spans leave out white space and commas; what is no array has none."""
    array = b' [ 1.50 , "a,]" ,[2, 3],{} ] '
    spans = element_spans(array)

    assert spans is not None
    assert [array[begin:end] for begin, end in spans] == [b"1.50", b'"a,]"', b"[2, 3]", b"{}"]
    assert element_spans(b"[]") == []
    assert element_spans(b"{}") is None
    assert element_spans(b"[1") is None


def test_last_value_of_a_key_is_taken():
    """As most parsers do."""
    assert top_level_value(b'{"a":1,"a": [2 ] }', "a") == b"[2 ]"
    assert top_level_value(b'{"a":1}', "b") is None
    assert top_level_value(b"[]", "b") is None
