"""Pods as workers, and following them: values in, updates out."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from extproc.discovery.pod_watch import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_LINE_BYTES,
    Drop,
    Follower,
    Lines,
    List,
    Page,
    PodWorkers,
    Put,
    RefusedError,
    Replace,
    UnreadableError,
    Wait,
    Watch,
    parse_page,
    parse_refusal,
)
from extproc.discovery.pods import Pod, PodDefaults, PodState, read_pod
from extproc.discovery.updates import Add, Remove, Reset, WorkerSpec, WorkerType

REGULAR, PREFILL, DECODE = WorkerType.REGULAR, WorkerType.PREFILL, WorkerType.DECODE
DEFAULTS = PodDefaults(8000)
APART = PodDefaults(8000, disaggregation=True)


def described(
    name: str = "p",
    ip: str | None = "10.0.0.1",
    *,
    uid: str = "",
    version: int = 1,
    ready: bool = True,
    phase: str = "Running",
    ending: bool = False,
    created: str = "2026-01-01T00:00:00Z",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    node: str | None = None,
) -> dict[str, Any]:
    """Return a Pod as the API server writes it, with fields that nobody reads."""
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            "creationTimestamp": created,
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
            **({"deletionTimestamp": "2026-01-01T00:01:00Z"} if ending else {}),
            **({"labels": labels} if labels is not None else {}),
            **({"annotations": annotations} if annotations is not None else {}),
        },
        "spec": {"nodeName": node, "containers": [{"name": "vllm"}]},
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": [
                {"type": "Initialized", "status": "True", "lastProbeTime": None},
                {"type": "Ready", "status": str(ready)},
            ],
        },
    }


def pod(*arguments: Any, **options: Any) -> Pod:
    return msgspec.convert(described(*arguments, **options), Pod)


def line(kind: str, value: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": value}).encode()


# --- which worker a Pod is


def test_a_ready_pod_is_a_worker():
    """Its address, its uid, and where it runs are taken over."""
    reading = read_pod(pod(node="n1"), REGULAR, DEFAULTS, "zone-a")

    assert reading.state is PodState.WORKER
    spec = reading.worker
    assert spec is not None
    assert (spec.key, spec.instance, spec.worker_type) == ("http://10.0.0.1:8000", "uid-p", REGULAR)
    assert dict(spec.labels) == {"namespace": "ns", "node": "n1", "pod": "p", "zone": "zone-a"}
    assert reading.complaints == ()


def test_an_address_of_ipv6_stands_in_brackets():
    """Else its end is taken for a port."""
    spec = read_pod(pod(ip="fd00::5"), REGULAR, DEFAULTS).worker

    assert spec is not None
    assert spec.key == "http://[fd00::5]:8000"


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({"ready": False}, PodState.NOT_READY),
        ({"ip": None}, PodState.NOT_READY),
        ({"ip": ""}, PodState.NOT_READY),
        ({"ending": True}, PodState.ENDING),
        ({"phase": "Failed"}, PodState.ENDING),
        ({"phase": "Succeeded"}, PodState.ENDING),
        ({"ip": "169.254.1.1"}, PodState.UNUSABLE),
        ({"ip": "no address"}, PodState.UNUSABLE),
    ],
)
def test_other_pods_are_no_workers(options, state):
    """Ready alone is not enough: a Pod that is being deleted stays ready for a while."""
    reading = read_pod(pod(**options), REGULAR, DEFAULTS)

    assert (reading.state, reading.worker) == (state, None)
    assert bool(reading.complaints) is (state is PodState.UNUSABLE)


def test_a_pod_without_any_optional_field_is_read():
    """The API server leaves out what is empty, and writes null here and there."""
    bare = msgspec.convert({"metadata": {"uid": "u"}}, Pod)
    nulls = {"metadata": {"uid": "u", "labels": None}, "status": {"conditions": None}}

    assert read_pod(bare, REGULAR, DEFAULTS).state is PodState.NOT_READY
    assert read_pod(msgspec.convert(nulls, Pod), REGULAR, DEFAULTS).state is PodState.NOT_READY


def test_annotations_describe_the_worker():
    """Each of them is heeded."""
    annotations = {
        "vllm-extproc.io/port": "9000",
        "vllm-extproc.io/scheme": "https",
        "vllm-extproc.io/tls-name": "worker.example",
        "vllm-extproc.io/model": "org/model",
        "vllm-extproc.io/weight": "2.5",
        "vllm-extproc.io/role": "prefill",
        "vllm-extproc.io/zone": "b",
        "vllm-extproc.io/labels": "rack=r1, row = 7",
        "vllm.ai/bootstrap-port": "8998",
    }
    reading = read_pod(pod(annotations=annotations), REGULAR, APART, "a")

    spec = reading.worker
    assert spec is not None
    assert (spec.key, spec.tls_name, spec.model) == (
        "https://10.0.0.1:9000",
        "worker.example",
        "org/model",
    )
    assert (spec.weight, spec.worker_type, spec.bootstrap_port) == (2.5, PREFILL, 8998)
    labels = dict(spec.labels)
    assert (labels["zone"], labels["rack"], labels["row"]) == ("b", "r1", "7")
    assert reading.complaints == ()


def test_an_annotation_counts_more_than_a_label():
    """Labels serve other ends, too."""
    both = pod(labels={"vllm-extproc.io/port": "1"}, annotations={"vllm-extproc.io/port": "2"})
    label = pod(labels={"vllm-extproc.io/port": "1", "topology.kubernetes.io/zone": "z"})

    found = [read_pod(p, REGULAR, DEFAULTS).worker for p in (both, label)]

    assert [spec and spec.url.port for spec in found] == [2, 1]
    assert found[1] is not None
    assert dict(found[1].labels)["zone"] == "z"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "0"),
        ("port", "65536"),
        ("port", "http"),
        ("port", "٣"),
        ("scheme", "ftp"),
        ("model", "a\nb"),
        ("weight", "heavy"),
        ("weight", "nan"),
        ("weight", "1e9"),
        ("role", "cook"),
        ("role", "prefill"),  # there are none
        ("role", "decode"),
        ("zone", "a\n"),
        ("zone", "z" * 300),
        ("labels", "=x"),
        ("labels", "a=b\x00"),
        ("labels", ",".join(f"l{n}=v" for n in range(29))),
        ("tls-name", "a.example"),  # without https
    ],
)
def test_what_an_annotation_says_wrong_is_told_and_ignored(name, value):
    """The worker is there as if it were not; the complaint names the annotation."""
    annotations = {f"vllm-extproc.io/{name}": value}

    told = read_pod(pod(node="n", annotations=annotations), REGULAR, DEFAULTS, "z")

    assert told.worker == read_pod(pod(node="n"), REGULAR, DEFAULTS, "z").worker
    (complaint,) = told.complaints
    assert complaint.startswith(f"vllm-extproc.io/{name}: ")


def test_as_many_labels_as_leave_room_for_its_own():
    """A zone that becomes known later must not make a worker unusable."""
    annotations = {"vllm-extproc.io/labels": ",".join(f"l{n}=v" for n in range(28))}

    reading = read_pod(pod(node="n", annotations=annotations), REGULAR, DEFAULTS, "z")

    assert reading.worker is not None
    assert len(reading.worker.labels) == 32
    assert reading.complaints == ()


def test_the_role_of_the_selector_stays_when_there_is_none_such():
    """The complaint says what would be needed."""
    wanted = pod(annotations={"vllm-extproc.io/role": "prefill"})

    alone, apart = (read_pod(wanted, REGULAR, defaults) for defaults in (DEFAULTS, APART))

    assert alone.worker is not None
    assert apart.worker is not None
    assert (alone.worker.worker_type, apart.worker.worker_type) == (REGULAR, PREFILL)
    assert alone.complaints == (
        "vllm-extproc.io/role: expected one of regular, got 'prefill'; others need --vllm-pd-disaggregation",
    )


def test_one_mistake_does_not_take_the_rest_away():
    """Each annotation is judged by itself."""
    annotations = {"vllm-extproc.io/weight": "x", "vllm-extproc.io/model": "m"}

    reading = read_pod(pod(annotations=annotations), REGULAR, DEFAULTS)

    assert reading.worker is not None
    assert (reading.worker.model, reading.worker.weight) == ("m", 1.0)
    assert len(reading.complaints) == 1


def test_a_bootstrap_port_is_for_prefill_workers():
    """The name of its annotation can be chosen; a bad one is told and ignored."""
    defaults = PodDefaults(8000, "example.com/bp")
    good = pod(annotations={"example.com/bp": "8998", "vllm.ai/bootstrap-port": "1"})
    bad = pod(annotations={"example.com/bp": "none"})

    prefill, decode = (read_pod(good, role, defaults) for role in (PREFILL, DECODE))
    wrong = read_pod(bad, PREFILL, defaults)

    assert prefill.worker is not None
    assert decode.worker is not None
    assert wrong.worker is not None
    assert (prefill.worker.bootstrap_port, decode.worker.bootstrap_port) == (8998, None)
    assert (wrong.worker.bootstrap_port, len(wrong.complaints)) == (None, 1)


# --- the workers of several selectors


def told(workers: PodWorkers) -> list[Any]:
    """Return all that it has to say."""
    return list(iter(workers.changes, None))


def applied(specs: dict[str, WorkerSpec], updates: list[Any]) -> dict[str, WorkerSpec]:
    """Return what a registry would have after *updates*."""
    for update in updates:
        match update:
            case Reset(workers):
                specs = {spec.key: spec for spec in workers}
            case Add(worker):
                specs = specs | {worker.key: worker}
            case Remove(key):
                specs = {k: spec for k, spec in specs.items() if k != key}
    return specs


def test_one_change_is_told_as_one():
    """Coming, changing and going; saying the same again is nothing."""
    workers = PodWorkers([REGULAR], DEFAULTS)
    workers.on_happening(0, Put(pod()))
    first = told(workers)
    workers.on_happening(0, Put(pod(version=2)))
    again = told(workers)
    workers.on_happening(0, Put(pod(version=3, annotations={"vllm-extproc.io/weight": "3"})))
    changed = told(workers)
    workers.on_happening(0, Put(pod(version=4, ending=True)))
    ending = told(workers)
    workers.on_happening(0, Drop(pod(version=5)))

    assert [type(update) for update in (*first, *changed, *ending)] == [Add, Add, Remove]
    assert changed[0].worker.weight == 3.0
    assert again == []
    assert told(workers) == []
    assert workers.states == {}


def test_another_pod_at_an_address_is_told_after_the_end_of_the_first():
    """Else it would inherit the state of the worker that was there."""
    workers = PodWorkers([REGULAR], DEFAULTS)
    workers.on_happening(0, Put(pod("a")))
    told(workers)

    workers.on_happening(0, Replace((pod("b", version=7),)))
    updates = told(workers)

    key = "http://10.0.0.1:8000"
    assert updates[0] == Remove(key)
    assert (updates[1].worker.key, updates[1].worker.instance) == (key, "uid-b")


def test_workers_of_an_earlier_run_are_compared_with():
    """The same Pod stays untouched, another one at its address does not."""
    workers = PodWorkers([REGULAR], DEFAULTS)
    workers.on_happening(0, Replace((pod("a"), pod("b", "10.0.0.2"))))
    known = workers.workers.values()

    later = PodWorkers([REGULAR], DEFAULTS, known)
    later.on_happening(0, Replace((pod("a"), pod("c", "10.0.0.2"))))

    assert [type(update) for update in told(later)] == [Remove, Add]


def test_of_two_pods_at_an_address_the_younger_one_is_there():
    """The order in which they are heard of makes no difference."""
    old, young = pod("a"), pod("b", created="2026-02-01T00:00:00Z")
    for order in ((old, young), (young, old)):
        workers = PodWorkers([REGULAR], DEFAULTS)
        for one in order:
            workers.on_happening(0, Put(one))
        (spec,) = workers.workers.values()
        assert spec.instance == "uid-b"


def test_the_first_selector_decides_on_the_role_and_the_newest_word_on_the_rest():
    """One stream may be behind the other."""
    workers = PodWorkers([PREFILL, DECODE], DEFAULTS)
    workers.on_happening(1, Put(pod(version=5)))
    workers.on_happening(0, Put(pod(version=4, ready=False)))
    both = told(workers)
    workers.on_happening(1, Put(pod(version=6)))
    workers.on_happening(0, Drop(pod(version=6)))
    decode = told(workers)

    key = "http://10.0.0.1:8000"
    assert [update.worker.worker_type for update in both] == [PREFILL]
    assert decode[0] == Remove(key)  # in another role it is another worker
    assert decode[1].worker.worker_type is DECODE


@pytest.mark.parametrize("ending", [True, False])
def test_a_pod_that_is_gone_does_not_come_back_by_a_selector_that_is_behind(ending):
    """Neither as what it was, nor in the role that the other selector gives."""
    workers = PodWorkers([PREFILL, REGULAR], DEFAULTS)
    for selector in (0, 1):
        workers.on_happening(selector, Put(pod(version=5)))
    first = told(workers)
    if ending:  # else it is deleted by force
        workers.on_happening(0, Put(pod(version=6, ending=True)))
    workers.on_happening(0, Drop(pod(version=7, ending=ending)))
    gone = told(workers)
    workers.on_happening(1, Put(pod(version=5)))  # said once more
    late = told(workers)
    workers.on_happening(1, Drop(pod(version=7, ending=ending)))

    assert [update.worker.worker_type for update in first] == [PREFILL]
    assert gone == [Remove("http://10.0.0.1:8000")]
    assert late == []
    assert told(workers) == []


def test_a_pod_that_is_missing_on_a_list_does_not_come_back_either():
    """A list is a word of its selector as well."""
    workers = PodWorkers([PREFILL, REGULAR], DEFAULTS)
    for selector in (0, 1):
        workers.on_happening(selector, Put(pod(version=5)))
    workers.on_happening(0, Replace(()))

    assert workers.workers == {}
    assert workers.states == {PodState.ENDING: 1}


def test_a_pod_that_a_selector_hears_of_only_after_its_end_is_no_worker():
    """The other one has nothing of it any more."""
    workers = PodWorkers([PREFILL, REGULAR], DEFAULTS)
    workers.on_happening(0, Put(pod(version=5)))
    workers.on_happening(0, Drop(pod(version=7, ending=True)))
    workers.on_happening(1, Put(pod(version=5)))

    assert workers.workers == {}


def test_a_selector_is_behind_until_it_has_heard_of_the_latest_loss():
    """That it lost the Pod for a while earlier is something else."""
    workers = PodWorkers([PREFILL, REGULAR], DEFAULTS)
    for selector in (0, 1):
        workers.on_happening(selector, Put(pod(version=4)))
    workers.on_happening(0, Drop(pod(version=7)))
    workers.on_happening(1, Drop(pod(version=5)))
    workers.on_happening(1, Put(pod(version=6)))
    between = dict(workers.workers)
    workers.on_happening(1, Put(pod(version=7)))

    assert between == {}
    assert len(workers.workers) == 1


@pytest.mark.parametrize("word", [Put(pod(version=6)), Replace((pod(version=6),))])
def test_a_pod_that_lost_the_labels_of_one_selector_goes_on_with_the_word_of_the_other(word):
    """That one says at least the version of the loss."""
    workers = PodWorkers([PREFILL, REGULAR], DEFAULTS)
    for selector in (0, 1):
        workers.on_happening(selector, Put(pod(version=5)))
    workers.on_happening(0, Drop(pod(version=6)))
    between = dict(workers.workers)
    workers.on_happening(1, word)

    (spec,) = workers.workers.values()
    assert between == {}
    assert spec.worker_type is REGULAR


def test_lists_of_all_selectors_count_more_than_what_was_heard_before():
    """A server that was restored from a copy has smaller versions than before."""
    workers = PodWorkers([PREFILL, REGULAR], DEFAULTS)
    workers.on_happening(1, Put(pod(version=50)))
    workers.on_happening(0, Put(pod(version=50)))
    workers.on_happening(0, Drop(pod(version=60)))
    for selector in (0, 1):
        workers.on_happening(selector, Replace((pod(version=40),)))

    (spec,) = workers.workers.values()
    assert spec.worker_type is PREFILL
    assert workers._dropped == {}


def test_zones_come_from_nodes_when_pods_name_none():
    """A node is asked for once; one without a zone again when it is time for that."""
    workers = PodWorkers([REGULAR], DEFAULTS)
    zoned = pod("z", "10.0.0.9", node="n2", labels={"topology.kubernetes.io/zone": "c"})
    workers.on_happening(0, Replace((pod(node="n1"), zoned)))
    asked = set(workers.nodes_without_zone)
    told(workers)
    workers.on_zone("n1", "a")
    (update,) = told(workers)

    assert asked == {"n1"}
    assert dict(update.worker.labels)["zone"] == "a"
    assert set(workers.nodes_without_zone) == set()
    workers.on_zone("n1", "")
    workers.forget_zones(missing=False)
    assert set(workers.nodes_without_zone) == set()
    workers.forget_zones(missing=True)
    assert set(workers.nodes_without_zone) == {"n1"}


def test_a_zone_that_cannot_be_is_asked_of_the_node():
    """As if the Pod named none."""
    workers = PodWorkers([REGULAR], DEFAULTS)
    workers.on_happening(0, Put(pod(node="n1", annotations={"vllm-extproc.io/zone": "a\n"})))
    asked = set(workers.nodes_without_zone)
    workers.on_zone("n1", "b")

    (spec,) = workers.workers.values()
    assert asked == {"n1"}
    assert dict(spec.labels)["zone"] == "b"


def test_complaints_last_until_the_pod_says_better():
    """They name the Pod."""
    workers = PodWorkers([REGULAR], DEFAULTS)
    workers.on_happening(0, Put(pod(annotations={"vllm-extproc.io/weight": "x"})))
    complaints = list(workers.complaints)
    workers.on_happening(0, Put(pod(version=2)))

    assert [name for name, _ in complaints] == ["ns/p"]
    assert list(workers.complaints) == []


# --- what to ask the server


def follower(**options: Any) -> Follower:
    defaults: dict[str, Any] = {"list_interval_s": 300.0, "watch_timeout_s": 30}
    return Follower(**(defaults | options), rng=random.Random(1))


def page(*pods: Pod, version: str = "10", more: str = "") -> Page:
    found = {"metadata": {"resourceVersion": version, "continue": more}, "items": []}
    result = parse_page(json.dumps(found).encode())
    result.items = list(pods)
    return result


def watching(now: float = 0.0, **options: Any) -> Follower:
    found = follower(**options)
    found.next(now)
    found.on_page(page(), now)
    assert isinstance(found.next(now), Watch)
    return found


def test_a_list_comes_in_pages_and_counts_when_it_is_complete():
    """The watch goes on from its version."""
    one = follower()

    assert one.next(0) == List("")
    assert one.on_page(page(pod("a"), more="t"), 0) is None
    assert one.next(0) == List("t")
    replace = one.on_page(page(pod("b"), version="12"), 0)
    assert replace is not None
    assert [p.metadata.name for p in replace.pods] == ["a", "b"]
    assert one.next(0) == Watch("12", 30)


def test_a_watch_is_taken_up_where_it_ended():
    """Events and bookmarks move the version on."""
    one = watching()

    put = one.on_line(line("ADDED", described(version=20)))
    bookmark = one.on_line(line("BOOKMARK", {"metadata": {"resourceVersion": "25"}}))
    one.on_end(30)

    assert isinstance(put, Put)
    assert bookmark is None
    assert one.next(30) == Watch("25", 30)
    assert one.failing is False


def test_pods_are_listed_anew_now_and_then():
    """The watch before ends in time for it."""
    one = watching()

    one.on_end(269)
    watch = one.next(269)
    assert isinstance(watch, Watch)
    assert 1 <= watch.timeout_s <= 31
    assert one.next(301) == List("")


def test_a_version_that_is_gone_leads_to_a_list_at_once():
    """Whether HTTP says so or the stream; when that happens again and again there are pauses."""
    one = watching()
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}

    with pytest.raises(RefusedError) as refused:
        one.on_line(line("ERROR", gone))
    one.on_failure(refused.value, 1)
    assert one.next(1) == List("")
    one.on_page(page(version="50"), 1)
    assert one.next(1) == Watch("50", 30)
    one.on_failure(parse_refusal(410, b"{}"), 1)
    assert isinstance(one.next(1), Wait)
    assert one.next(1 + FIRST_BACKOFF_S) == List("")


def test_a_page_that_has_expired_leads_to_a_new_list():
    """What came before it must not count."""
    one = follower()
    one.on_page(page(pod("a"), more="t"), 0)
    one.on_failure(parse_refusal(410, b""), 0)

    assert one.next(0) == List("")
    replace = one.on_page(page(pod("b")), 0)
    assert replace is not None
    assert [p.metadata.name for p in replace.pods] == ["b"]


def test_failures_are_waited_out_ever_longer():
    """The version stays as good as it was, and a watch that is taken up ends the trouble."""
    one = watching()
    now, waits = 0.0, []
    for _ in range(12):
        one.on_failure(OSError("refused"), now)
        action = one.next(now)
        assert isinstance(action, Wait)
        waits.append(action.seconds)
        now += action.seconds + 1e-6
    assert one.failing is True
    assert waits[0] <= FIRST_BACKOFF_S
    assert MAX_BACKOFF_S / 2 <= waits[-1] <= MAX_BACKOFF_S
    watch = one.next(now)
    assert isinstance(watch, Watch)
    assert watch.version == "10"
    one.on_begun()
    assert one.failing is False


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (OSError(), "watch"),
        (TimeoutError(), "watch"),
        (RefusedError(429, ""), "watch"),
        (RefusedError(403, ""), "watch"),
        (RefusedError(504, "too large resource version"), "watch"),
        (RefusedError(400, "bad"), "list"),
        (UnreadableError(""), "list"),
    ],
)
def test_what_follows_from_a_failure(error, again):
    """The version is kept unless it may be what is wrong."""
    one = watching()
    one.on_failure(error, 0)

    action = one.next(FIRST_BACKOFF_S)

    assert isinstance(action, List if again == "list" else Watch)


def test_retry_after_is_heeded_within_bounds():
    """A server may ask for more time, not for a day."""
    for asked, expected in (("3", 3.0), ("86400", MAX_BACKOFF_S)):
        one = watching()
        one.on_failure(parse_refusal(429, b"", asked), 0)
        assert one.next(0) == Wait(expected)


def test_a_watch_that_is_taken_up_is_well_though_nothing_happens():
    """A quiet fleet must not look like a failure."""
    one = watching()
    for now in range(4):
        one.on_failure(OSError(), now)
        one.next(now + MAX_BACKOFF_S)
    assert one.failing is True
    one.on_begun()

    assert one.failing is False


def test_a_watch_that_ends_at_once_is_not_begun_again_at_once():
    """It would be a loop without end; being taken up proves nothing any more, until one lasts."""
    one = watching()
    now, waits = 0.0, []
    for _ in range(8):
        one.on_begun()
        with pytest.raises(ConnectionError) as too_soon:
            one.on_end(now + 0.01)
        one.on_failure(too_soon.value, now + 0.01)
        action = one.next(now + 0.01)
        assert isinstance(action, Wait)
        waits.append(action.seconds)
        now += 0.01 + action.seconds + 1e-6
        assert isinstance(one.next(now), Watch)

    assert waits[-1] > 2.0
    assert one.failing is True
    one.on_begun()
    assert one.failing is True
    one.on_end(now + 30)
    assert one.failing is False


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": 5}',
        b'{"type": "ADDED", "object": {"metadata": {"uid": "u"}}}',
        b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "5"}}}',
        b'{"type": "ADDED", "object": {"metadata": {"uid": 5, "resourceVersion": "5"}}}',
        b'{"type": "ERROR", "object": 7}',
        b'{"type": "ADDED", "object": ' + b"[" * 10_000,
        b"\xff",
    ],
)
def test_lines_that_make_no_sense_are_told(text):
    """Never another error, since that would end the router."""
    with pytest.raises(UnreadableError):
        watching().on_line(text)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"{}", b'{"metadata": {}}', b'{"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {}}]}'],
)  # fmt: skip
def test_lists_that_make_no_sense_are_told(body):
    """A half list would take workers away."""
    with pytest.raises(UnreadableError):
        parse_page(body)


def test_what_a_server_refuses_with_is_read_if_it_can():
    """A proxy in between answers with a page."""
    status = b'{"message": "pods is forbidden", "reason": "Forbidden", "code": 403}'

    assert str(parse_refusal(403, status)) == "pods is forbidden (403)"
    assert str(parse_refusal(502, b"<html>")) == "status 502"
    assert parse_refusal(503, b"", "Wed, 21 Oct").retry_after_s == 0


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_lines_do_not_depend_on_how_the_stream_is_cut(data, cuts):
    """Chunks come as the network likes it."""
    whole = [part for part in data.split(b"\n")[:-1] if part.strip()]
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    lines = Lines()

    found = [
        one for begin, end in itertools.pairwise(places) for one in lines.feed(data[begin:end])
    ]

    assert found == whole


def test_a_line_without_an_end_is_not_kept():
    """Memory is bounded."""
    lines = Lines()
    with pytest.raises(UnreadableError):
        lines.feed(b"x" * (MAX_LINE_BYTES + 1))


# --- whatever happens, it ends with the truth

NAMES = ("a", "b", "c", "d")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")

STEPS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from(["put", "put", "ending", "delete", "delete"]),
        st.sampled_from(ADDRESSES),
        st.booleans(),  # ready
        st.sampled_from(
            [(), ("prefill",), ("decode",), ("prefill", "decode")]
        ),  # roles in its labels
        st.sampled_from(["watch", "repeat", "lose", "list", "tell"]),
    ),
    max_size=40,
)


class Truth:
    """The API server: what Pods there are, and since when."""

    def __init__(self) -> None:
        self.pods: dict[str, tuple[Pod, tuple[str, ...]]] = {}
        self._version = 0
        self._lives = 0

    def step(self, name, what, ip, ready, roles):
        """Change a Pod; return what each selector's watch says."""
        self._version += 1
        before, old_roles = self.pods.get(name, (None, ()))
        after = gone = None
        if before is not None:
            # As it was, but for the version.
            metadata = structs.replace(before.metadata, resource_version=str(self._version))
            gone = structs.replace(before, metadata=metadata)
        if what == "delete":
            self.pods.pop(name, None)
        else:
            if before is None:
                self._lives += 1
                uid = f"{name}{self._lives}"
                created = f"2026-01-01T00:{self._lives:02}:00Z"
            else:
                uid, created = before.metadata.uid, before.metadata.creation_timestamp or ""
            options = {"uid": uid, "version": self._version, "created": created}
            after = pod(name, ip, ready=ready, ending=what == "ending", **options)
            self.pods[name] = after, roles
        said = []
        for index, role in enumerate(("prefill", "decode")):
            if after is not None and role in roles:
                said.append((index, Put(after)))
            elif role in old_roles:
                said.append((index, Drop(after or gone)))
        return said

    def listed(self, role):
        return Replace(tuple(p for p, roles in self.pods.values() if role in roles))


@given(STEPS)
def test_random_histories_end_with_the_truth(steps):
    """Repeated and lost events, lists in between and pauses: after a list of each selector all is right."""
    truth = Truth()
    workers = PodWorkers([PREFILL, DECODE], DEFAULTS)
    specs: dict[str, WorkerSpec] = {}
    for name, what, ip, ready, roles, heard in steps:
        said = truth.step(name, what, ip, ready, roles)
        for index, happening in said if heard != "lose" else ():
            for _ in range(2 if heard == "repeat" else 1):
                workers.on_happening(index, happening)
        if heard == "list":
            workers.on_happening(1, truth.listed("decode"))
        if heard == "tell" and (update := workers.changes()) is not None:
            before = specs
            specs = applied(specs, [update])
            # Nobody takes the place of another without that one's end in between.
            assert all(
                before[key].instance == spec.instance
                for key, spec in specs.items()
                if key in before
            )
    for index, role in enumerate(("prefill", "decode")):
        workers.on_happening(index, truth.listed(role))
    specs = applied(specs, told(workers))

    fresh = PodWorkers([PREFILL, DECODE], DEFAULTS)
    for index, role in enumerate(("prefill", "decode")):
        fresh.on_happening(index, truth.listed(role))
    assert specs == dict(fresh.workers)
    serving = [p for p, roles in truth.pods.values() if roles and not p.metadata.deletion_timestamp]
    ready = {
        f"http://{p.status.pod_ip}:8000"
        for p in serving
        if any(c.type == "Ready" and c.status == "True" for c in p.status.conditions or ())
    }
    assert specs.keys() == ready


@given(STEPS)
def test_an_undisturbed_watch_needs_no_list(steps):
    """Every event once, in order: the workers are right after each of them."""
    truth = Truth()
    workers = PodWorkers([PREFILL, DECODE], DEFAULTS)
    specs: dict[str, WorkerSpec] = {}
    for name, what, ip, ready, roles, _ in steps:
        for index, happening in truth.step(name, what, ip, ready, roles):
            workers.on_happening(index, happening)
        specs = applied(specs, told(workers))
        fresh = PodWorkers([PREFILL, DECODE], DEFAULTS)
        for index, role in enumerate(("prefill", "decode")):
            fresh.on_happening(index, truth.listed(role))
        assert specs == dict(fresh.workers)


HEARINGS = st.tuples(st.sampled_from([None, 0, 1]), st.integers(1, 4), st.sampled_from([0, 0, 1]))
"""Which selector hears then, how much of what it has missed, and whether it is by a list."""

LAGGING_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "ending", "delete", "delete"]),
        st.sampled_from([("prefill",), ("decode",), ("prefill", "decode"), ("prefill", "decode")]),
        HEARINGS,
        HEARINGS,
    ),
    max_size=20,
)


@settings(max_examples=300)
@given(LAGGING_STEPS)
def test_selectors_that_are_behind_one_another_bring_nobody_back(steps):
    """Each hears all in order, but when it likes: of a Pod counts the newest that either has heard."""
    roles = (PREFILL, DECODE)
    truth = Truth()
    workers = PodWorkers(roles, DEFAULTS)
    specs: dict[str, WorkerSpec] = {}
    missed: list[list[Put | Drop]] = [[], []]
    over: dict[str, int] = {}
    """By uid, the newest version of which a selector has heard that the Pod is over, or no longer its own."""

    there: dict[str, int] = {}
    """By uid, the newest version in which it was there."""

    def on_happening(selector: int, happening: Put | Drop) -> None:
        one = happening.pod
        ended = isinstance(happening, Drop) or one.metadata.deletion_timestamp
        known = over if ended else there
        known[one.metadata.uid] = max(known.get(one.metadata.uid, 0), one.version)
        workers.on_happening(selector, happening)

    def check() -> None:
        nonlocal specs
        specs = applied(specs, told(workers))
        for spec in specs.values():
            assert there[spec.instance] >= over.get(spec.instance, 0)

    for what, labelled, *hearings in steps:
        for index, happening in truth.step("a", what, ADDRESSES[0], True, labelled):
            missed[index].append(happening)
        for selector, count, by_list in hearings:
            if selector is None:
                continue
            if by_list:
                missed[selector].clear()
                replace = truth.listed(roles[selector].value)
                for one in replace.pods:
                    on_happening(selector, Put(one))
                workers.on_happening(selector, replace)
            else:
                for happening in missed[selector][:count]:
                    on_happening(selector, happening)
                del missed[selector][:count]
            check()
    for selector in (0, 1):
        for happening in missed[selector]:
            on_happening(selector, happening)
        check()

    fresh = PodWorkers(roles, DEFAULTS)
    for index, role in enumerate(roles):
        for pods in (fresh, workers):
            pods.on_happening(index, truth.listed(role.value))
    assert specs == dict(fresh.workers) == dict(workers.workers)
    assert workers._dropped == {}, "memory is bounded"
