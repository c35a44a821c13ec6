"""Consistent sets of resources, with versions that follow from their content."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment
from envoy_data_plane.envoy.config.listener.v3 import Listener

from extproc.address import Address
from extproc.xds.endpoint import build_endpoints
from extproc.xds.model import PoolModel
from extproc.xds.snapshot import (
    CLUSTER_TYPE,
    ENDPOINT_TYPE,
    LISTENER_TYPE,
    ROUTE_TYPE,
    TYPES,
    Resources,
    build_snapshot,
    check_consistent,
)
from extproc.xds.wire import endpoint_addresses
from tests.extproc.xds.models import read_model

EDS, STATIC = ClusterDiscoveryType.EDS, ClusterDiscoveryType.STATIC


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"pools": (PoolModel("default", ("10.0.0.9:1",)),)}, {ENDPOINT_TYPE}),
        ({"pools": (PoolModel("other", ("10.0.0.5:8000", "10.0.0.6:8000")),)},
         {CLUSTER_TYPE, ENDPOINT_TYPE, ROUTE_TYPE}),
        ({"port": 1}, {LISTENER_TYPE}),
        ({"max_payload_bytes": 1}, {LISTENER_TYPE, ROUTE_TYPE}),
        ({"decision_timeout_s": 1.0}, {LISTENER_TYPE}),
        ({"idle_timeout_s": 1.0}, {LISTENER_TYPE, ROUTE_TYPE}),
        ({"admin_address": Address("127.0.0.1", 1)}, {CLUSTER_TYPE}),
        ({"fail_closed": True}, {CLUSTER_TYPE, LISTENER_TYPE, ROUTE_TYPE}),
        ({"full_duplex": True}, {LISTENER_TYPE}),
    ],
    ids=[
        "endpoint",
        "name of the pool",
        "port",
        "body limit",
        "decision timeout",
        "idle timeout",
        "admin address",
        "fail closed",
        "full duplex",
    ],
)  # fmt: skip
def test_only_what_changed_has_a_new_version(model, snapshot, change, changed):
    """Workers that come and go never touch the listener, and so no connection."""
    before = versions(snapshot)

    after = versions(build_snapshot(dataclasses.replace(model, **change)))

    assert {type_url for type_url in TYPES if after[type_url] != before[type_url]} == changed


def test_resources_stand_under_their_names(model, snapshot):
    """Names are what Envoy asks for, and what stands inside."""
    names = {type_url: sorted(snapshot.resources[type_url].by_name) for type_url in TYPES}

    assert names == {
        CLUSTER_TYPE: ["default", "extproc_admin"],
        ENDPOINT_TYPE: ["default"],
        LISTENER_TYPE: ["ingress"],
        ROUTE_TYPE: ["ingress"],
    }
    raw = snapshot.resources[ENDPOINT_TYPE].by_name["default"]
    assert ClusterLoadAssignment.parse(raw) == build_endpoints(model.pools[0])


def test_version_follows_from_names_and_content():
    """Neither the order of building nor a boundary between two resources can hide a change."""
    one, two = Listener(name="1"), Listener(name="2")
    some = Resources.of({"a": one, "b": two})

    assert Resources.of({"b": two, "a": one}) == some
    others = [{"a": one}, {"a": two, "b": one}, {"a": one, "c": two}, {"ab": one, "": two}, {}]
    assert len({some.version, *(Resources.of(other).version for other in others)}) == 6


@pytest.mark.parametrize(
    ("clusters", "endpoints", "message"),
    [
        ({"a": EDS}, [], r"EDS clusters \['a'\] but endpoints for \[\]"),
        ({}, ["a"], r"EDS clusters \[\] but endpoints for \['a'\]"),
        ({"a": STATIC}, ["a"], r"EDS clusters \[\] but endpoints for \['a'\]"),
        ({"a": EDS, "b": EDS}, ["b", "c"], r"EDS clusters \['a', 'b'\] .* \['b', 'c'\]"),
    ],
    ids=["missing", "left over", "static", "other"],
)
def test_inconsistent_set_is_not_published(clusters, endpoints, message):
    """Envoy would wait for ever for endpoints that never come."""
    built = {name: Cluster(name=name, type=kind) for name, kind in clusters.items()}
    assignments = {name: ClusterLoadAssignment(cluster_name=name) for name in endpoints}

    with pytest.raises(ValueError, match=message):
        check_consistent(built, assignments)


def test_consistent_set_passes():
    """Static clusters need no endpoints of their own."""
    clusters = {"a": Cluster(name="a", type=EDS), "b": Cluster(name="b", type=STATIC)}

    check_consistent(clusters, {"a": ClusterLoadAssignment(cluster_name="a")})


@pytest.mark.parametrize(
    ("endpoints", "addresses"),
    [
        ((), []),
        (("10.0.0.5:8000",), [Address("10.0.0.5", 8000)]),
        (("[::1]:1", "10.0.0.5:2"), [Address("::1", 1), Address("10.0.0.5", 2)]),
        (("10.0.0.5:2", "10.0.0.5:2"), [Address("10.0.0.5", 2)]),
    ],
    ids=str,
)
def test_each_endpoint_is_told_once(endpoints, addresses):
    """In order; Envoy refuses a host that is named twice."""
    assert endpoint_addresses(endpoints) == addresses
