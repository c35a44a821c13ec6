"""Consistent sets of resources, with versions that follow from their content."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.address import Address
from extproc.clusters import ClusterView, EndpointView
from extproc.xds.endpoint import build_endpoints
from extproc.xds.model import (
    Access,
    ApiKey,
    ApiKeys,
    HealthChecks,
    Passwords,
    RateLimits,
    WorkerTls,
)
from extproc.xds.snapshot import (
    CLUSTER_TYPE,
    ENDPOINT_TYPE,
    EXTENSION_TYPE,
    LISTENER_TYPE,
    ROUTE_TYPE,
    SECRET_TYPE,
    TYPES,
    Resources,
    build_snapshot,
    check_consistent,
)
from protos.endpoint_pb2 import ClusterLoadAssignment
from tests.extproc.xds.models import read_model
from tests.fleets import at_endpoints, registry_of, reset


@pytest.fixture(scope="module")
def model():
    return read_model("default")


@pytest.fixture(scope="module")
def snapshot(model):
    return build_snapshot(model)


def versions(snapshot):
    return {type_url: snapshot.resources[type_url].version for type_url in TYPES}


@pytest.mark.slow
def test_same_model_gives_same_bytes_and_versions(model, snapshot):
    """Built twice, from equal models that are not the same object."""
    again = build_snapshot(dataclasses.replace(model))

    assert again == snapshot
    assert list(again.resources) == list(TYPES)


@pytest.mark.slow
def test_another_process_gives_the_same_versions(snapshot):
    """A service that starts again offers what Envoy has: it has nothing to do."""
    program = (
        "from extproc.xds.snapshot import build_snapshot\n"
        "from tests.extproc.xds.models import read_model\n"
        "snapshot = build_snapshot(read_model('default'))\n"
        "print(*(resources.version for resources in snapshot.resources.values()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )

    assert done.stdout.split() == list(versions(snapshot).values())


PLAIN = EndpointView("10.0.0.5:8000")
ALL_BUT_ENDPOINTS = {CLUSTER_TYPE, LISTENER_TYPE, ROUTE_TYPE}
CHANGES = {
    "endpoint": ({"clusters": [("default", "", ["10.0.0.9:1"])]}, {ENDPOINT_TYPE}),
    "one more endpoint": (
        {"clusters": [("default", "", ["10.0.0.5:8000", "10.0.0.6:8000", "10.0.0.7:8000"])]},
        {ENDPOINT_TYPE},
    ),
    "no endpoint": ({"clusters": [("default", "", [])]}, {ENDPOINT_TYPE}),
    "draining": (
        {"clusters": [("default", "", [EndpointView("10.0.0.5:8000", draining=True)])]},
        {ENDPOINT_TYPE},
    ),
    "host name": (
        {"clusters": [("default", "", [EndpointView("10.0.0.5:8000", "worker.example")])]},
        {ENDPOINT_TYPE},
    ),
    "first https worker": (
        {"clusters": [("default", "", [PLAIN, EndpointView("10.0.0.6:1", "a", tls=True)])]},
        {ENDPOINT_TYPE},
    ),
    "name of the pool": (
        {"clusters": [("other", "", ["10.0.0.5:8000", "10.0.0.6:8000"])]},
        {CLUSTER_TYPE, ENDPOINT_TYPE, ROUTE_TYPE},
    ),
    "one more pool": (
        {"clusters": [("default", "", ["10.0.0.5:8000", "10.0.0.6:8000"]), ("b", "", [])]},
        {CLUSTER_TYPE, ENDPOINT_TYPE},
    ),
    "one more base path": (
        {"clusters": [("default", "", ["10.0.0.5:8000", "10.0.0.6:8000"]), ("b~x", "/x", [])]},
        {CLUSTER_TYPE, ENDPOINT_TYPE, ROUTE_TYPE},
    ),
    "health checks": ({"health": HealthChecks(path="/ready")}, {CLUSTER_TYPE}),
    "event log": ({"events_dir": "/run/x"}, {CLUSTER_TYPE}),
    "unhealthy ones are tried": ({"try_unhealthy": True}, {CLUSTER_TYPE}),
    "trust": ({"tls": WorkerTls(insecure=True)}, {CLUSTER_TYPE}),
    "port": ({"port": 1}, {LISTENER_TYPE}),
    "body limit": ({"max_payload_bytes": 1}, {LISTENER_TYPE, ROUTE_TYPE}),
    "decision timeout": ({"decision_timeout_s": 1.0}, {LISTENER_TYPE}),
    "idle timeout": ({"idle_timeout_s": 1.0}, {LISTENER_TYPE, ROUTE_TYPE}),
    "admin address": ({"admin_address": Address("127.0.0.1", 1)}, {CLUSTER_TYPE}),
    "keys of clients": ({"access": Access(ApiKeys((ApiKey("a", "k"),)))}, {EXTENSION_TYPE}),
    "passwords": ({"access": Access(Passwords("a:{SHA}x"))}, {EXTENSION_TYPE, ROUTE_TYPE}),
    "key for workers": ({"access": Access(worker_api_key="k")}, {SECRET_TYPE, ROUTE_TYPE}),
    "web pages": ({"access": Access(cors_origins=("*",))}, {ROUTE_TYPE}),
    "rates": ({"rate_limits": RateLimits(1, 1)}, {EXTENSION_TYPE}),
    "id headers": ({"request_id_headers": ("x-trace-id",)}, {LISTENER_TYPE}),
    "fail closed": ({"fail_closed": True}, ALL_BUT_ENDPOINTS),
    "full duplex": ({"full_duplex": True}, {LISTENER_TYPE}),
}


def clusters_of(listed):
    return tuple(
        ClusterView(
            name,
            path,
            tuple(EndpointView(e) if isinstance(e, str) else e for e in endpoints),
            is_default=name in ("default", "other"),
        )
        for name, path, endpoints in listed
    )


def changed_types(before, after):
    old, new = versions(before), versions(after)
    return {type_url for type_url in TYPES if old[type_url] != new[type_url]}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "changed"), CHANGES.values(), ids=list(CHANGES))
def test_only_what_changed_has_a_new_version(model, snapshot, change, changed):
    """Workers that come and go never touch the listener, and so no connection."""
    if "clusters" in change:
        change = {**change, "clusters": clusters_of(change["clusters"])}

    after = build_snapshot(dataclasses.replace(model, **change))

    assert changed_types(snapshot, after) == changed
    for type_url in set(TYPES) - changed:
        assert after.resources[type_url].by_name == snapshot.resources[type_url].by_name


@pytest.mark.slow
def test_another_key_for_workers_is_another_secret_and_nothing_else(model):
    """The filter that shows it only names it."""
    before, after = (
        build_snapshot(dataclasses.replace(model, access=Access(worker_api_key=key)))
        for key in ("old", "new")
    )

    assert changed_types(before, after) == {SECRET_TYPE}


def by_ip(ip):
    return EndpointView(f"{ip}:8443", ip, tls=True)


BY_NAME = [EndpointView(f"10.0.0.{n}:8443", f"{n}.example", tls=True) for n in (7, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ([PLAIN, BY_NAME[0]], [PLAIN, *BY_NAME], {ENDPOINT_TYPE}),
        ([PLAIN, *BY_NAME], [BY_NAME[1]], {ENDPOINT_TYPE}),
        ([by_ip("10.0.0.7")], [by_ip("10.0.0.7"), PLAIN], {ENDPOINT_TYPE}),
        ([by_ip("10.0.0.7")], [by_ip("10.0.0.8")], {CLUSTER_TYPE, ENDPOINT_TYPE}),
        ([PLAIN, BY_NAME[0]], [PLAIN], {ENDPOINT_TYPE}),
        ([PLAIN], [PLAIN, BY_NAME[0]], {ENDPOINT_TYPE}),
    ],
    ids=[
        "one more name",
        "names go",
        "plain one beside it",
        "another address",
        "the last one goes",
        "the first one comes",
    ],
)
def test_cluster_changes_only_with_https_workers_that_have_no_name(model, before, after, changed):
    """A cluster that changes warms up anew in Envoy: not for each worker of a kind that is there."""

    def snapshot_of(endpoints):
        clusters = (ClusterView("default", "", tuple(endpoints)),)
        return build_snapshot(dataclasses.replace(model, clusters=clusters))

    assert changed_types(snapshot_of(before), snapshot_of(after)) == changed


@pytest.mark.slow
def test_worker_that_joins_at_run_time_changes_nothing_but_endpoints(model):
    """From the registry to the bytes: one more, one that drains, one that goes."""

    def told():
        return build_snapshot(dataclasses.replace(model, clusters=registry.clusters))

    registry = registry_of("http://10.0.0.1:8000", "http://10.0.0.2:8000")
    before = told()
    reset(registry, "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000")
    joined = told()
    registry.drain("http://10.0.0.1:8000", 10.0)
    registry.commit(1.0)
    draining = told()
    reset(registry, "http://10.0.0.2:8000", "http://10.0.0.1:8000")
    back = told()

    assert changed_types(before, joined) == changed_types(joined, draining) == {ENDPOINT_TYPE}
    assert changed_types(joined, back) == {ENDPOINT_TYPE}


def test_resources_stand_under_their_names(model, snapshot):
    """Names are what Envoy asks for, and what stands inside."""
    names = {type_url: sorted(snapshot.resources[type_url].by_name) for type_url in TYPES}

    assert names == {
        CLUSTER_TYPE: ["default", "extproc_admin"],
        ENDPOINT_TYPE: ["default"],
        SECRET_TYPE: ["worker_api_key"],
        LISTENER_TYPE: ["ingress"],
        EXTENSION_TYPE: ["client-auth", "rate-limit"],
        ROUTE_TYPE: ["ingress"],
    }
    raw = snapshot.resources[ENDPOINT_TYPE].by_name["default"]
    assert raw == build_endpoints(model.clusters[0])


def test_version_follows_from_names_and_content():
    """Neither the order of building nor a boundary between two resources can hide a change."""
    one, two = b"1", b"22"
    some = Resources.of({"a": one, "b": two})

    assert Resources.of({"b": two, "a": one}) == some
    others = [{"a": one}, {"a": two, "b": one}, {"a": one, "c": two}, {"ab": one, "": two}, {}]
    others += [{"a": b"12", "b": b"2"}, {"a": b"122"}, {"a": one, "b": b"2", "c": b"2"}]
    assert len({some.version, *(Resources.of(other).version for other in others)}) == 9


@pytest.mark.parametrize(
    ("clusters", "endpoints"),
    [
        (["a", "b"], ["a"]),
        (["a"], ["a", "b"]),
        (["a", "b"], ["a", "b", "c"]),
        ([], []),
        (["a", "b"], ["a", "c"]),
    ],
    ids=["no endpoints", "no cluster", "left over", "nothing", "other"],
)
def test_inconsistent_set_is_not_published(model, clusters, endpoints):
    """Envoy would wait for ever for endpoints that never come."""
    wanted = dataclasses.replace(model, clusters=clusters_of([("a", "", []), ("b", "", [])]))

    with pytest.raises(ValueError, match=r"clusters \['a', 'b'\] but endpoints for \["):
        check_consistent(clusters, endpoints, wanted)


def test_consistent_set_passes(model):
    """Static clusters need no endpoints of their own."""
    wanted = dataclasses.replace(model, clusters=clusters_of([("a", "", [])]))

    check_consistent(["a", "extproc_admin"], ["a"], wanted)


@pytest.mark.parametrize(
    ("endpoints", "addresses"),
    [
        ((), []),
        (("10.0.0.5:8000",), [("10.0.0.5", 8000)]),
        (("[::1]:1", "10.0.0.5:2"), [("10.0.0.5", 2), ("::1", 1)]),
        (("10.0.0.5:2", "10.0.0.5:2"), [("10.0.0.5", 2)]),
    ],
    ids=str,
)
def test_each_endpoint_is_told_once(endpoints, addresses):
    """In an order that does not depend on who joined first; Envoy refuses a host that is named twice."""
    (cluster,) = at_endpoints(*endpoints).clusters

    built = ClusterLoadAssignment.FromString(build_endpoints(cluster))

    found = [
        endpoint.endpoint.address.socket_address
        for locality in built.endpoints
        for endpoint in locality.lb_endpoints
    ]
    assert [(address.address, address.port_value) for address in found] == addresses


def test_only_some_of_the_endpoints_can_be_told():
    """Those that are known to be healthy, by cluster and address; none is a cluster without endpoints."""
    cluster = ClusterView("a", "", (EndpointView("10.0.0.1:1"), EndpointView("10.0.0.2:1")))

    def told(only):
        return build_endpoints(cluster, only=only)

    assert told({("a", "10.0.0.2:1"), ("b", "10.0.0.1:1")}) == build_endpoints(
        ClusterView("a", "", (EndpointView("10.0.0.2:1"),))
    )
    assert told(set()) == build_endpoints(ClusterView("a", "", ()))
    assert told(None) == build_endpoints(cluster)


def test_messages_are_made_without_validators():
    """Building those of pydantic would take a second of every start."""
    script = (
        "import extproc.xds.snapshot, envoy_data_plane.envoy.config.cluster.v3 as messages\n"
        "import pydantic.dataclasses\n"
        "assert not pydantic.dataclasses.is_pydantic_dataclass(messages.Cluster)\n"
        "@pydantic.dataclasses.dataclass\n"
        "class Other: number: int\n"
        "assert Other('1').number == 1\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
