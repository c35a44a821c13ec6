"""Workers as users write them, right and wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.address import WorkerUrl
from extproc.discovery.spec import MAX_WORKERS, parse_worker, parse_workers
from extproc.discovery.updates import WorkerSpec, WorkerType

URL = "http://10.0.0.5:8000"
PRIVATE = "hunter2"


def worker(**fields):
    return {"url": URL, **fields}


def test_url_alone_is_a_worker():
    """With the defaults of ``WorkerSpec``, as text or as a mapping."""
    expected = WorkerSpec(WorkerUrl.parse(URL))

    assert parse_worker(URL) == expected
    assert parse_worker({"url": URL}) == expected


def test_everything_that_is_known_about_a_worker_is_read():
    """Labels are sorted by key, the name of the certificate is written as DNS compares it."""
    spec = parse_worker(
        {
            "url": "https://Prefill-0:8443/llama",
            "weight": 2,
            "model": "Qwen/Qwen3 8B",
            "worker_type": "prefill",
            "bootstrap_port": 8998,
            "labels": {"zone": "a", "rack": ""},
            "tls_name": "Workers.Example.",
        }
    )

    assert spec == WorkerSpec(
        WorkerUrl.parse("https://prefill-0:8443/llama"),
        weight=2.0,
        model="Qwen/Qwen3 8B",
        worker_type=WorkerType.PREFILL,
        bootstrap_port=8998,
        labels=(("rack", ""), ("zone", "a")),
        tls_name="workers.example",
    )


def test_body_for_vllm_router_is_understood():
    """``model_id`` is the model, ``priority`` and ``cost`` mean nothing here, null is unknown."""
    spec = parse_worker(
        worker(
            model_id="m",
            priority=50,
            cost={"any": "thing"},
            worker_type="decode",
            bootstrap_port=None,
            labels={},
        )
    )

    assert spec == WorkerSpec(WorkerUrl.parse(URL), model="m", worker_type=WorkerType.DECODE)
    assert parse_worker(worker(model_id=None, worker_type=None)) == parse_worker(URL)
    assert parse_worker(worker(model="m", model_id="m")).model == "m"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"weight": 0.01}, "weight"),
        ({"weight": 100}, "weight"),
        ({"model": "m" * 256}, "model"),
        ({"worker_type": "prefill", "bootstrap_port": 1}, "bootstrap_port"),
        ({"worker_type": "prefill", "bootstrap_port": 65535}, "bootstrap_port"),
        ({"labels": {str(number): "" for number in range(32)}}, "labels"),
        ({"labels": {"k" * 63: "v" * 256}}, "labels"),
        ({"url": "https://w", "tls_name": "10.0.0.5"}, "tls_name"),
        ({"url": "https://w", "tls_name": "2001:db8::1"}, "tls_name"),
        ({"url": "https://10.0.0.5", "tls_name": "a"}, "tls_name"),
    ],
)
def test_bounds_themselves_are_allowed(fields, part):
    """What stands there is what comes out."""
    value = getattr(parse_worker(worker(**fields)), part)

    assert value == (tuple(sorted(fields[part].items())) if part == "labels" else fields[part])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": 0.009}, "Expected `float` >= 0.01 - at `weight`"),
        ({"weight": 100.1}, "Expected `float` <= 100"),
        ({"weight": math.nan}, "Expected `float` >= 0.01 - at `weight`"),
        ({"weight": math.inf}, "at `weight`"),
        ({"weight": 10**400}, "at `weight`"),
        ({"weight": True}, "Expected `float`, got `bool` - at `weight`"),
        ({"weight": "2"}, "Expected `float`, got `str` - at `weight`"),
        ({"weight": None}, "Expected `float`, got `null` - at `weight`"),
        ({"model": ""}, "at `model`"),
        ({"model": "m" * 257}, "at `model`"),
        ({"model": 7}, "at `model`"),
        ({"model_id": ""}, "at `model_id`"),
        ({"model": "a\nb"}, "model: expected printable characters, got 'a\\nb'"),
        ({"model": "a\ud800"}, "model: expected printable characters, got 'a\\ud800'"),
        ({"model": "a", "model_id": "b"}, "model and model_id differ"),
        ({"worker_type": "Prefill"}, "Invalid enum value 'Prefill' - at `worker_type`"),
        ({"worker_type": "\ud800"}, "lone surrogate"),
        ({"worker_type": "prefill", "bootstrap_port": 0}, "at `bootstrap_port`"),
        ({"worker_type": "prefill", "bootstrap_port": 65536}, "at `bootstrap_port`"),
        ({"worker_type": "prefill", "bootstrap_port": 1.0}, "at `bootstrap_port`"),
        ({"bootstrap_port": 8998}, "bootstrap_port: expected only with worker_type 'prefill'"),
        ({"worker_type": "decode", "bootstrap_port": 1}, "only with worker_type 'prefill'"),
        ({"labels": {str(number): "" for number in range(33)}}, "length <= 32 - at `labels`"),
        ({"labels": {"": "v"}}, "`labels`"),
        ({"labels": {"k" * 64: "v"}}, "`labels`"),
        ({"labels": {"k": "v" * 257}}, "`labels"),
        ({"labels": {"k": 1}}, "Expected `str`, got `int` - at `labels[...]`"),
        ({"labels": {1: "v"}}, "`labels`"),
        ({"labels": ["k"]}, "Expected `object`, got `array` - at `labels`"),
        ({"labels": None}, "at `labels`"),
        ({"labels": {"k\n": "v"}}, "labels: expected printable characters, got others in 'k\\n'"),
        ({"labels": {"k": "\x1b[1m"}}, "labels: expected printable characters, got others in 'k'"),
        ({"tls_name": "a"}, "tls_name: expected only with an https URL"),
        ({"url": "https://w", "tls_name": ""}, "at `tls_name`"),
        ({"url": "https://w", "tls_name": "a:443"}, "tls_name: expected a host name"),
        ({"url": "https://w", "tls_name": "*.a"}, "tls_name: expected a host name"),
        ({"url": "https://w", "tls_name": "[::1]"}, "tls_name: expected a host name"),
        ({"url": "https://w", "tls_name": "fe80::1%eth0"}, "tls_name: expected a host name"),
        ({"url": "https://w", "tls_name": "127.1"}, "tls_name: expected a host name"),
        ({"url": "https://w", "tls_name": "\u212a"}, "tls_name: expected a host name"),
        ({"url": None}, "Expected `str`, got `null` - at `url`"),
        ({"url": "10.0.0.5:8000"}, "worker URL '10.0.0.5:8000': expected http://host:port"),
        ({"Weight": 2}, "unknown key 'Weight': expected bootstrap_port, labels, model, model_id,"),
        ({1: 2}, "a key that is none: expected bootstrap_port"),
        ({"\ud800": 2}, "a key that is none: expected bootstrap_port"),
    ],
    ids=ascii,
)
def test_wrong_field_is_refused_with_what_is_expected(fields, message):
    """The item is named, then the field."""
    with pytest.raises(ValueError, match=r"^workers\[1\]: ") as caught:
        parse_workers(["http://10.0.0.6:8000", {"url": URL} | fields])

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind"), [(None, "nothing"), (7, "int"), ([URL], "list"), (b"x", "bytes")]
)
def test_what_is_neither_a_url_nor_a_mapping_is_refused(value, kind):
    """A list in a list is easily written in YAML."""
    with pytest.raises(ValueError, match=f"expected a URL or a mapping with one, got {kind}"):
        parse_worker(value)


def test_url_is_needed():
    """A mapping without one names no worker."""
    with pytest.raises(ValueError, match="missing required field `url`"):
        parse_worker({"weight": 2})


@pytest.mark.parametrize("wrap", [list, tuple, lambda items: {"workers": items}])
def test_list_is_read_bare_and_under_its_name(wrap):
    """In its order."""
    specs = parse_workers(wrap(["http://b:1", worker(weight=2), "http://a:1"]))

    assert [spec.key for spec in specs] == ["http://b:1", URL, "http://a:1"]


@pytest.mark.parametrize("value", [[], {"workers": []}])
def test_no_workers_can_be_said(value):
    """An empty list is a statement."""
    assert parse_workers(value) == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "expected a list of workers, or a mapping with the list 'workers', got nothing"),
        (URL, "got str"),
        ({}, "got nothing"),
        ({"workers": None}, "got nothing"),
        ({"workers": {"url": URL}}, "got dict"),
        ({"workers": [], "version": 1}, "unknown key 'version': expected workers"),
        ({"url": URL}, "unknown key 'url': expected workers"),
        ({URL: None}, "a key that is none: expected workers"),
    ],
)
def test_what_holds_no_list_is_refused(value, message):
    """Nothing at all is no list, either."""
    with pytest.raises(ValueError, match="expected") as caught:
        parse_workers(value)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (URL, f"{URL}/", f"workers[2]: {URL} is workers[1] already"),
        ("http://W:80", {"url": "http://w"}, "workers[2]: http://w is workers[1] already"),
        (f"{URL}@1", f"{URL}@01", f"workers[2]: {URL}@1 is workers[1] already"),
        (URL, f"{URL}@0", f"workers[2]: {URL}@0 overlaps with workers[1], {URL};"),
        (f"{URL}@3", URL, f"workers[2]: {URL} overlaps with workers[1], {URL}@3;"),
    ],
)
def test_same_worker_twice_is_refused(first, second, message):
    """However it is written; an engine is named as a whole or by its ranks."""
    with pytest.raises(ValueError, match=r"workers\[2\]") as caught:
        parse_workers(["http://other:1", first, second])

    assert message in str(caught.value)


def test_what_only_looks_alike_are_different_workers():
    """Ranks of one engine, the schemes, paths."""
    urls = [f"{URL}@0", f"{URL}@1", f"{URL}/a", f"{URL}/A", "https://10.0.0.5:8000"]

    assert [spec.key for spec in parse_workers(urls)] == urls


def test_as_many_workers_as_allowed_are_read():
    """One more is refused at once."""
    urls = [f"http://w{number}:1" for number in range(MAX_WORKERS)]

    assert len(parse_workers(urls)) == MAX_WORKERS == 10_000
    with pytest.raises(ValueError, match="10001 workers: expected at most 10000"):
        parse_workers([*urls, "junk"])


@pytest.mark.parametrize(
    "value",
    [
        [f"http://user:{PRIVATE}@10.0.0.5:8000"],
        [f"http://user:{PRIVATE}@5"],
        [{"url": f"http://user:{PRIVATE}@10.0.0.5:8000"}],
        [{f"http://user:{PRIVATE}@10.0.0.5:8000": None}],
        {f"http://user:{PRIVATE}@10.0.0.5:8000": None},
        [{"url": "https://w", "tls_name": f"https://user:{PRIVATE}@w"}],
        [["http", f"user:{PRIVATE}@10.0.0.5"]],
        f"http://user:{PRIVATE}@10.0.0.5:8000",
    ],
    ids=str,
)
def test_password_is_never_repeated(value):
    """Wherever the URL stands."""
    with pytest.raises(ValueError, match="expected") as caught:
        parse_workers(value)

    assert PRIVATE not in str(caught.value)


KEYS = ["url", "weight", "model", "model_id", "worker_type", "bootstrap_port", "labels", "tls_name"]
URLS = st.sampled_from(["http://a", "https://a", "http://a@1", "http://10.0.0.5:8000", "x"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | URLS
    | st.sampled_from(["prefill", "regular"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*KEYS, "workers", "priority"]) | st.text(max_size=4), inner, max_size=4
        )
        | st.fixed_dictionaries({"url": URLS}, optional=dict.fromkeys(KEYS[1:], inner))
    ),
    max_leaves=12,
)


@given(value=VALUES | st.lists(VALUES, max_size=3))
def test_any_value_is_read_or_refused_with_a_value_error(value):
    """What is read can be told apart, and describes itself."""
    try:
        specs = parse_workers(value)
    except ValueError:
        return
    assert len({spec.key for spec in specs}) == len(specs)
    again = [
        {
            "url": spec.key,
            "weight": spec.weight,
            "model": spec.model or None,
            "worker_type": spec.worker_type.value,
            "bootstrap_port": spec.bootstrap_port,
            "labels": dict(spec.labels),
            "tls_name": spec.tls_name or None,
        }
        for spec in specs
    ]
    assert parse_workers(again) == specs
