"""What the router may do in the cluster is what its discovery does there, and no more."""

from __future__ import annotations

import pytest

from tests.helm.chart import NAMESPACE, Helm

pytestmark = [pytest.mark.helm, pytest.mark.slow]

PODS = {("", "pods", "list"), ("", "pods", "watch")}
NODES = {("", "nodes", "get")}
"""All that the discovery asks the API server: Pods by label, and the zone of their nodes."""


def rights(objects):
    """Return what the roles allow, by kind of role and its namespace."""
    found: dict[tuple[str, str | None], set[tuple[str, str, str]]] = {}
    for role in objects:
        if role["kind"] in ("Role", "ClusterRole"):
            place = (role["kind"], role["metadata"].get("namespace"))
            found[place] = {
                (group, resource, verb)
                for rule in role["rules"]
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("replicas=2", {("Role", NAMESPACE): PODS}),
        ("discovery.namespace=engines", {("Role", "engines"): PODS}),
        ("discovery.allNamespaces=true", {("ClusterRole", None): PODS}),
        ("discovery.nodeZones=true", {("Role", NAMESPACE): PODS, ("ClusterRole", None): NODES}),
        (
            "discovery.allNamespaces=true,discovery.nodeZones=true",
            {("ClusterRole", None): PODS | NODES},
        ),
        ("rbac.create=false", {}),
        ("discovery.enabled=false", {}),
    ],
)
def test_rights_are_those_that_are_needed(helm: Helm, settings, expected):
    """A role over all namespaces only when asked for."""
    assert rights(helm.render("--set", settings)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        "replicas=2",
        "discovery.namespace=engines",
        "discovery.allNamespaces=true,discovery.nodeZones=true",
        "serviceAccount.name=reader",
        "serviceAccount.create=false",
    ],
)
def test_bindings_give_each_role_to_the_pods_own_account(helm: Helm, settings):
    """In the release's namespace, wherever the role is."""
    objects = helm.render("--set", settings)

    (account,) = {
        o["spec"]["template"]["spec"]["serviceAccountName"]
        for o in objects
        if o["kind"] == "Deployment"
    }
    roles = {
        (o["kind"], o["metadata"]["name"], o["metadata"].get("namespace"))
        for o in objects
        if o["kind"] in ("Role", "ClusterRole")
    }
    bindings = [o for o in objects if o["kind"].endswith("Binding")]
    assert {
        (b["roleRef"]["kind"], b["roleRef"]["name"], b["metadata"].get("namespace"))
        for b in bindings
    } == roles
    for binding in bindings:
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
        ]
