"""The answers of workers, read into values."""

from __future__ import annotations

import contextlib

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import models
from extproc.models import (
    MAX_COUNT,
    MAX_METRICS_BYTES,
    MAX_MODELS,
    MAX_MODELS_BYTES,
    MAX_NAME_CHARS,
    MAX_PARSED_BYTES,
    MAX_SERIES,
    MAX_TEXT_CHARS,
    Load,
    ModelList,
    is_model_name,
    parse_metrics,
    parse_models,
)
from extproc.sim.config import SimConfig
from extproc.sim.worker import SimWorker


def listing(*entries):
    return msgspec.json.encode({"object": "list", "data": list(entries)})


def test_base_models_and_adapters_are_told_apart():
    """What has a parent is an adapter; the entries are kept in their order."""
    base = {"id": "llama", "object": "model", "root": "/m", "parent": None, "created": 5}
    alias = {"id": "gpt-4", "object": "model", "root": "/m"}
    adapter = {"id": "sql", "object": "model", "root": "/l", "parent": "llama"}

    found = parse_models(listing(base, alias, adapter))

    assert found == ModelList(
        frozenset({"llama", "gpt-4"}), frozenset({"sql"}), (base, alias, adapter)
    )


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        "llama",
        [],
        {},
        {"id": None},
        {"id": 5},
        {"id": ""},
        {"id": "a\nb"},
        {"id": "a\x00"},
        {"id": "x" * (MAX_NAME_CHARS + 1)},
    ],
)
def test_entry_that_is_no_model_is_left_out(entry):
    """The others count."""
    found = parse_models(listing(entry, {"id": "llama"}))

    assert (found.base, found.adapters) == ({"llama"}, frozenset())
    assert found.entries == ({"id": "llama"},)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b'{"data": [}', "not JSON"),
        (b'{"data": [{"id": "\xff"}]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"data":' * 100_000, "not JSON"),
        (b"[]", 'expected {"data": [...]}'),
        (b"null", 'expected {"data": [...]}'),
        (b"{}", 'expected {"data": [...]}'),
        (b'{"data": {}}', 'expected {"data": [...]}'),
        (b'{"data": []}', "names no base model"),
        (b'{"data": [{"id": "sql", "parent": "llama"}]}', "names no base model"),
    ],
)
def test_answer_that_lists_no_model_is_refused(body, reason):
    """The error says what is wrong with it."""
    with pytest.raises(ValueError, match=r".") as caught:
        parse_models(body)

    assert reason in str(caught.value)


def test_models_beyond_the_bound_are_left_out():
    """A worker cannot make the service keep more than that."""
    found = parse_models(listing(*({"id": f"m{n}"} for n in range(MAX_MODELS + 5))))

    assert len(found.base) == len(found.entries) == MAX_MODELS
    assert f"m{MAX_MODELS}" not in found.base


def test_documented_fields_of_an_entry_are_kept_and_no_others():
    """Whatever else a worker says would stay in memory, and be shown to clients."""
    entry = {
        "id": "llama",
        "object": "model",
        "created": 5,
        "owned_by": "vllm",
        "root": "/m",
        "parent": None,
        "max_model_len": 40960,
    }
    more = {"secret": "x", "permission": [{"id": "modelperm-1", "allow_view": True}], "a": [1] * 99}

    (kept,) = parse_models(listing(entry | more)).entries

    assert kept == entry | {"permission": []}


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("root", "r" * MAX_TEXT_CHARS, "r" * MAX_TEXT_CHARS),
        ("root", "r" * (MAX_TEXT_CHARS + 1), "r" * MAX_TEXT_CHARS),
        ("created", 1.5, 1.5),
        ("created", True, True),
        ("max_model_len", 2**63 - 1, 2**63 - 1),
        ("parent", None, None),
    ],
)
def test_value_of_an_entry_is_cut_to_a_sensible_size(field, value, kept):
    """Numbers are as they are, texts have an end."""
    assert parse_models(listing({"id": "m", field: value})).entries == ({"id": "m", field: kept},)


@pytest.mark.parametrize(
    "fields",
    [
        b'"max_model_len": 1' + b"0" * 400,
        b'"max_model_len": 9223372036854775808',
        b'"owned_by": ["a", "b"]',
        b'"root": {"a": {"b": 1}}',
        b'"permission": {"a": 1}',
        b'"permission": "x"',
    ],
)
def test_value_that_is_no_scalar_is_left_out(fields):
    """The rest of the entry counts, and all that is kept can be written as JSON again."""
    found = parse_models(b'{"data": [{"id": "m", ' + fields + b"}]}")

    assert found.entries == ({"id": "m"},)


def test_little_is_kept_of_the_longest_answer():
    """Not what makes it long."""
    entries = [{"id": f"m{n}", "root": "r" * 300, f"x{n}": "y" * 9000} for n in range(1000)]

    found = parse_models(listing(*entries))

    assert len(msgspec.json.encode(found.entries)) < MAX_MODELS_BYTES


@given(st.binary(max_size=80))
def test_junk_is_a_value_error_and_nothing_else(body):
    """Nothing that a worker answers can break its reader."""
    with contextlib.suppress(ValueError):
        parse_models(body)
    parse_metrics(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
entries = st.fixed_dictionaries({"id": json_values}, optional={"parent": json_values})


@given(st.lists(entries | json_values, max_size=5))
def test_whatever_is_accepted_has_names_that_can_be_shown(data):
    """Names are printable, short, and each belongs to an entry."""
    try:
        found = parse_models(msgspec.json.encode({"data": data}))
    except ValueError:
        return

    assert found.base
    assert all(is_model_name(name) for name in found.base | found.adapters)
    assert found.base | found.adapters == {entry["id"] for entry in found.entries}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("llama", True),
        ("Qwen/Qwen3-8B", True),
        ("Größe ä 模型", True),
        ("x" * MAX_NAME_CHARS, True),
        ("x" * (MAX_NAME_CHARS + 1), False),
        ("", False),
        ("a\tb", False),
        ("a\x7f", False),
        ("\u202e", False),
    ],
)
def test_name_of_a_model_is_printable_and_of_sensible_length(text, good):
    """What cannot be shown to a user names no model."""
    assert is_model_name(text) is good


METRICS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="llama"} 3.0
vllm:num_requests_running{engine="1",model_name="llama"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="llama"} 1.0
vllm:num_requests_waiting{engine="1",model_name="llama"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="llama"} 5e-1
vllm:num_requests_running_total{engine="0"} 99
other:num_requests_running{engine="7"} 1
"""


def test_loads_are_read_by_rank():
    """Running, waiting and KV cache of each engine label; similar names do not count."""
    assert parse_metrics(METRICS) == ({0: Load(3, 1, 0.25), 1: Load(4, 0, 0.5)}, (0, 1))


def test_engine_without_the_label_has_one_load():
    """Old versions know no ranks, and name the cache otherwise."""
    metrics = (
        b"vllm:num_requests_running 2\n"
        b'vllm:num_requests_waiting{model_name="llama"} 5\n'
        b'vllm:gpu_cache_usage_perc{model_name="llama"} 0.75\n'
    )

    assert parse_metrics(metrics) == ({None: Load(2, 5, 0.75)}, ())


def test_series_of_several_model_names_add_up():
    """Requests are counted together; of the cache the highest share counts."""
    metrics = (
        b'vllm:num_requests_running{engine="0",model_name="a"} 2\n'
        b'vllm:num_requests_running{engine="0",model_name="b"} 3\n'
        b'vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.5\n'
        b'vllm:kv_cache_usage_perc{engine="0",model_name="b"} 0.25\n'
    )

    assert parse_metrics(metrics)[0] == {0: Load(5, 0, 0.5)}


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"1e999", b"-", b"1.2.3", b"e", b"", b"9" * 99])
def test_value_that_is_no_number_is_left_out(value):
    """Others of the same answer are read."""
    metrics = (
        b'vllm:num_requests_running{engine="0"} ' + value + b"\n"
        b'vllm:num_requests_waiting{engine="1"} 4\n'
    )

    assert parse_metrics(metrics)[0] == {1: Load(0, 4, 0.0)}


def test_counts_too_large_to_add_do_no_harm():
    """The sum of two finite numbers may be infinite, and that is no integer."""
    metrics = b'vllm:num_requests_running{engine="0"} 1e308\n' * 2

    assert parse_metrics(metrics)[0] == {0: Load(running=int(MAX_COUNT))}


def test_ranks_are_sorted_as_numbers_and_named_once():
    """10 comes after 9; histograms of the same engine add nothing."""
    metrics = b"".join(
        b'vllm:num_requests_running{model_name="m",engine="%d"} 0\n' % rank
        for rank in (10, 9, 11, 9)
    )

    assert parse_metrics(metrics)[1] == (9, 10, 11)
    assert parse_metrics(b'vllm:num_requests_running{engine="12345"} 0\n')[1] == ()


def test_rank_without_a_number_is_a_rank():
    """It is there, though its load cannot be read."""
    metrics = b'vllm:num_requests_running{engine="3"} NaN\n'

    assert parse_metrics(metrics) == ({}, (3,))


def test_timestamps_and_line_ends_of_other_systems_do_no_harm():
    """The exposition format allows the former."""
    metrics = b"vllm:num_requests_running 2 1769860800000\r\nvllm:num_requests_waiting 5\r\n"

    assert parse_metrics(metrics)[0] == {None: Load(2, 5)}


HOSTILE = {
    "labels without an end": b"vllm:num_requests_running{"
    + b'engine="1",' * (MAX_PARSED_BYTES // 11),
    "such labels on many lines": (b"vllm:num_requests_running{" + b'engine="1",' * 9 + b"\n")
    * 9000,
    "labels without an engine": b"vllm:num_requests_running{" + b' engine="x' * 99_000 + b"} 1\n",
    "digits": b"vllm:num_requests_running " + b"1" * MAX_PARSED_BYTES,
    "blanks": b"vllm:num_requests_running" + b" " * MAX_PARSED_BYTES,
    "braces": b"vllm:num_requests_running" + b"{" * MAX_PARSED_BYTES,
    "half a name": b"\nvllm:num_requests_runnin" * 40_000,
    "names": b"\nvllm:num_requests_running" * 40_000,
    "lines": b"\n" * MAX_PARSED_BYTES,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_metrics_are_read_in_one_pass(text):
    """1 MiB of them would take minutes if anything were tried twice, and this test would time out."""
    assert set(parse_metrics(text)[0]) <= {None}


def test_lines_without_an_end_are_looked_at_once_each(monkeypatch):
    """The work grows with the text and not with its square."""
    looked_at = []

    class Sample:
        def match(self, text, at, end):
            found = real.match(text, at, end)
            line = text.find(b"\n", at)
            looked_at.append((line if line >= 0 else end) - at)
            return found

    real = models._SAMPLE
    monkeypatch.setattr(models, "_SAMPLE", Sample())
    text = (b"vllm:num_requests_running{" + b'engine="1",' * 99 + b"\n") * 400
    for times in (1, 2):
        looked_at.clear()
        parse_metrics(text * times)

        assert len(looked_at) == 400 * times
        assert sum(looked_at) < len(text) * times


def test_series_beyond_the_bound_are_not_looked_at():
    """Nobody has that many ranks."""
    series = b"".join(
        b'vllm:num_requests_running{engine="%d"} 1\n' % rank for rank in range(MAX_SERIES + 9)
    )

    loads, ranks = parse_metrics(series)

    assert len(loads) == len(ranks) == MAX_SERIES


def test_what_comes_after_the_first_mebibyte_is_not_looked_at():
    """A number that is cut there would be another number; the answer may be longer than that."""
    series = b"vllm:num_requests_running 12\nvllm:num_requests_waiting 345\n"
    for missing, load in ((1, Load(12)), (2, Load(12)), (30, Load(12)), (31, None), (33, None)):
        filling = b"#" * (MAX_PARSED_BYTES - len(series) - 1 + missing) + b"\n"

        assert parse_metrics(filling + series)[0].get(None) == load
    assert parse_metrics(series + b"#" * MAX_PARSED_BYTES)[0] == {None: Load(12, 345)}
    assert MAX_METRICS_BYTES > MAX_PARSED_BYTES


async def test_answers_of_the_simulated_worker_are_read():
    """It publishes what vLLM publishes."""
    worker = SimWorker(
        SimConfig(speed=0.0, models=("llama", "gpt-4"), lora_modules=("sql",), data_parallel_size=2)
    )
    found = parse_models(await _get(worker, "/v1/models"))
    metrics = await _get(worker, "/metrics")

    assert (found.base, found.adapters) == ({"llama", "gpt-4"}, {"sql"})
    assert parse_metrics(metrics) == ({0: Load(), 1: Load()}, (0, 1))


async def _get(worker, path):
    await worker.start()
    try:
        async with aiohttp.ClientSession() as session, session.get(worker.url + path) as answer:
            return await answer.read()
    finally:
        await worker.stop()
