"""Kubernetes takes what the chart makes, from 1.20 on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from tests.helm.chart import CACHE, CHART, NEW, OLD, PRESETS, Helm, container, one, pod_specs

pytestmark = [pytest.mark.helm, pytest.mark.slow]

VALIDATOR = str(CACHE / "lib" / "bin" / "kubernetes-validate")
FOREIGN = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "HTTPRoute"}
"""Kinds that others bring."""

# https://kubernetes.io/docs/reference/using-api/deprecation-guide/
KNOWN_TO_1_20 = {
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "Service": "v1",
    "ServiceAccount": "v1",
    "ConfigMap": "v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "ClusterRole": "rbac.authorization.k8s.io/v1",
    "ClusterRoleBinding": "rbac.authorization.k8s.io/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Ingress": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1beta1",
    "HorizontalPodAutoscaler": "autoscaling/v2beta2",
}
LATER = {
    "grpc": "probes by gRPC came with 1.24",
    "sleep": "the sleep action came with 1.29",
    "internalTrafficPolicy": "1.21",
    "matchLabelKeys": "1.25",
    "nodeAffinityPolicy": "1.25",
    "nodeTaintsPolicy": "1.25",
    "minDomains": "1.24",
    "unhealthyPodEvictionPolicy": "1.26",
    "persistentVolumeClaimRetentionPolicy": "1.23",
    "ipFamilyPolicy": "dual-stack was off by default in 1.20",
    "loadBalancerClass": "1.21",
    "suspend": "1.21",
    "appArmorProfile": "1.30",
    "restartPolicy": "of init containers: 1.28",
}
"""Keys that 1.20 does not know, and since when they are there."""


@pytest.mark.parametrize("case", PRESETS)
def test_lint_finds_nothing(each_helm: Helm, case):
    """Warnings count."""
    done = each_helm.run("lint", "--strict", str(CHART), *PRESETS[case], check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "warning" not in done.stderr.lower()


@pytest.mark.parametrize("kube", ["1.27.0", NEW])
@pytest.mark.parametrize("case", PRESETS)
def test_objects_are_valid_by_the_schemas_of_kubernetes(helm: Helm, case, kube, tmp_path):
    """No key that is unknown, none that is missing."""
    if not (CACHE / "lib").exists():
        pytest.skip("kubernetes-validate is not here: `make test-helm` fetches it")
    objects = [o for o in helm.render(*PRESETS[case], kube=kube) if o["kind"] not in FOREIGN]
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects))

    done = subprocess.run(
        [sys.executable, VALIDATOR, "--strict", "-k", kube, str(path)],
        env={"PYTHONPATH": str(CACHE / "lib")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARN" not in done.stdout + done.stderr


@pytest.mark.parametrize("case", PRESETS)
def test_objects_are_of_kinds_that_1_20_knows(helm: Helm, case):
    """So are their keys."""
    objects = [o for o in helm.render(*PRESETS[case], kube=OLD) if o["kind"] not in FOREIGN]

    assert {o["kind"]: o["apiVersion"] for o in objects}.items() <= KNOWN_TO_1_20.items()
    assert not set(LATER) & set(keys(objects))


def keys(value):
    """Yield every key of nested mappings and lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name != "data":
                yield name
                yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_older_kubernetes_is_refused(helm: Helm):
    """1.19 lacks what the Pods need."""
    assert "requires kubeVersion: >=1.20.0-0" in helm.refusal("--kube-version", "1.19.0")


def test_http_route_is_of_the_version_that_the_cluster_has(helm: Helm):
    """A cluster with an older Gateway API has v1beta1 alone."""
    arguments = ["--set", "httpRoute.enabled=true,httpRoute.parentRefs[0].name=gateway"]

    new = one(helm.render(*arguments), "HTTPRoute")
    done = helm.run(
        *("template", "router", str(CHART), "--api-versions", "gateway.networking.k8s.io/v1beta1"),
        *("--show-only", "templates/ingress.yaml", *arguments),
    )

    assert new["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert yaml.safe_load(done.stdout)["apiVersion"] == "gateway.networking.k8s.io/v1beta1"


@pytest.mark.parametrize("case", PRESETS)
def test_containers_of_ours_may_do_nothing(helm: Helm, case):
    """Not root, no capability, nothing to write; engines of others cannot do without writing."""
    found = 0
    for _, spec in pod_specs(helm.render(*PRESETS[case])):
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for one_of_them in spec["containers"]:
            context = one_of_them["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert context["privileged"] is False
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            for quantities in one_of_them["resources"].values():
                assert all(isinstance(quantity, str) for quantity in quantities.values())
            if one_of_them["name"] != "vllm":
                found += 1
                assert context["readOnlyRootFilesystem"] is True
                assert context["runAsNonRoot"] is True
                assert (context["runAsUser"], context["runAsGroup"]) == (65532, 65532)
    assert found >= 1


@pytest.mark.parametrize("value", ["resources", "vllm.resources", "simWorkers.resources"])
def test_containers_may_ask_for_no_resources(helm: Helm, value):
    """None at all, or no limits; engines without a GPU for example."""
    name = {"resources": "extproc", "vllm.resources": "vllm", "simWorkers.resources": "sim-worker"}
    for setting in (f"{value}=null", f"{value}.limits=null"):
        objects = helm.render("--set", f"vllm.enabled=true,simWorkers.enabled=true,{setting}")
        (found,) = [
            c
            for _, spec in pod_specs(objects)
            for c in spec["containers"]
            if c["name"] == name[value]
        ]
        assert "limits" not in found["resources"]


@pytest.mark.parametrize("case", PRESETS)
def test_streams_of_workers_may_finish_when_their_pod_ends(helm: Helm, case):
    """Kubernetes stops a worker only when the router has long heard of it and streams had time."""
    for _, spec in pod_specs(helm.render(*PRESETS[case])):
        for found in spec["containers"]:
            if found["name"] in ("vllm", "sim-worker"):
                assert found["lifecycle"]["preStop"]["exec"]["command"][-1] == "sleep 10"
                assert spec.get("terminationGracePeriodSeconds", 30) > 20


@pytest.mark.parametrize("case", PRESETS)
def test_every_container_has_three_probes_on_a_port_of_its_own(helm: Helm, case):
    """A probe names a port that the container has. Beside an Envoy the service has none of readiness.

    Envoy says whether requests are served, also while the service hangs.
    """
    for _, spec in pod_specs(helm.render(*PRESETS[case])):
        names = {one_of_them["name"] for one_of_them in spec["containers"]}
        for one_of_them in spec["containers"]:
            ports = {port["name"] for port in one_of_them["ports"]}
            kinds = ["startupProbe", "livenessProbe", "readinessProbe"]
            if one_of_them["name"] == "extproc" and "envoy" in names:
                assert kinds.pop() not in one_of_them
            for kind in kinds:
                probe = one_of_them[kind]
                assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports


@pytest.mark.parametrize("kube", [OLD, NEW])
def test_pod_without_an_envoy_is_ready_when_there_are_workers(helm: Helm, kube):
    """`/metrics` would be answered whether there are any or not."""
    probe = container(helm.render(*PRESETS["sidecar-only"], kube=kube), "extproc")["readinessProbe"]

    assert probe["httpGet"] == {"path": "/readiness", "port": "metrics"}


@pytest.mark.parametrize("case", PRESETS)
def test_every_port_names_its_protocol(helm: Helm, case):
    """Helm 4 applies on the server, and that of 1.20 takes no list of ports without it."""
    objects = helm.render(*PRESETS[case])
    ports = [port for o in objects if o["kind"] == "Service" for port in o["spec"]["ports"]]
    for _, spec in pod_specs(objects):
        ports += [port for one_of_them in spec["containers"] for port in one_of_them["ports"]]

    assert ports
    assert all(port["protocol"] == "TCP" for port in ports)


def test_token_reaches_the_service_alone(helm: Helm):
    """Envoy, which speaks to clients, cannot ask the API server."""
    objects = helm.render()

    mounts = {
        name: {mount["name"] for mount in container(objects, name)["volumeMounts"]}
        for name in ("extproc", "envoy")
    }
    assert "token" in mounts["extproc"]
    assert mounts["envoy"] == {"run", "config"}


@pytest.mark.parametrize("case", PRESETS)
def test_volumes_that_are_mounted_are_there(helm: Helm, case):
    """And none is there in vain."""
    for found in helm.render(*PRESETS[case]):
        if found["kind"] not in ("Deployment", "StatefulSet"):
            continue
        spec = found["spec"]["template"]["spec"]
        claims = found["spec"].get("volumeClaimTemplates", [])
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        volumes += [claim["metadata"]["name"] for claim in claims]
        mounted = {m["name"] for c in spec["containers"] for m in c.get("volumeMounts", [])}
        assert len(volumes) == len(set(volumes))
        assert set(volumes) == mounted


@pytest.mark.parametrize("case", PRESETS)
def test_selectors_choose_the_pods_that_they_are_for(helm: Helm, case):
    """Services, budgets and policies find the router; workers carry the labels of the discovery."""
    objects = helm.render(*PRESETS[case])
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]

    chosen = [one(objects, "Service")["spec"]["selector"]]
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for found in objects:
            if found["kind"] == kind:
                selector = found["spec"].get("selector") or found["spec"]["podSelector"]
                chosen.append(selector["matchLabels"])
    for selector in chosen:
        assert selector.items() <= labels.items()
    workers = [
        o["spec"]["template"]["metadata"]["labels"]
        for o in objects
        if o["kind"] in ("Deployment", "StatefulSet")
        and o["metadata"]["name"] != "router-vllm-extproc"
    ]
    for found in workers:
        assert found["app"] == "vllm"
        assert not chosen[0].items() <= found.items()
    if case == "pd":
        assert [found["vllm.ai/role"] for found in workers] == ["decode", "prefill"]


def test_numbers_stay_whole(helm: Helm):
    """Helm reads every number as a float; a large one must not come out as 1.073741824e+09."""
    config = one(helm.render(*PRESETS["everything"]), "ConfigMap")["data"]["config.yaml"]

    assert "max_payload_size: 1073741824\n" in config


def test_dashboard_is_json(helm: Helm):
    """Each panel asks something."""
    data = one(helm.render(*PRESETS["everything"]), "ConfigMap", "-dashboard")["data"]

    panels = json.loads(data["vllm-extproc.json"])["panels"]
    assert all(panel["targets"] for panel in panels if panel["type"] != "row")
