"""Values: each explained, each used, and wrong ones refused in words that help."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from extproc.config import SECRETS, Config
from extproc.gateway_options import ENVOY_ONLY
from tests.chart_schema import CHART_DECIDES, DETAILS, config_schema, value_comments
from tests.helm.chart import CHART, PRESETS, Helm, container, dotted, service_config

VALUES = (CHART / "values.yaml").read_text()
PATHS = dict(dotted(yaml.safe_load(VALUES)))
LEAVES = [
    path
    for path, value in PATHS.items()
    if not (isinstance(value, dict) and value and path not in DETAILS)
    and not any(path.startswith(f"{free}.") for free in DETAILS)
]
"""Values that hold no others by themselves."""

CHOSEN_BY_DISCOVERY = frozenset(
    {
        "service_discovery",
        "service_discovery_namespace",
        "service_discovery_port",
        "selector",
        "prefill_selector",
        "decode_selector",
        "bootstrap_port_annotation",
    }
)


@pytest.mark.parametrize("path", LEAVES)
def test_every_value_is_explained(path):
    """By a comment right above it, in a sentence."""
    comment = value_comments(VALUES).get(path, "")

    assert comment.endswith("."), f"{path}: {comment!r}"


def test_every_value_is_used():
    """What nothing reads would be set in vain."""
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())

    for path in LEAVES:
        head, _, last = path.rpartition(".")
        whole = f".Values.{path}" in templates
        # `with .Values.auth.apiKey` and a variable for a part make the rest of the path short.
        part = re.search(rf"[.$]\w*\.?{re.escape(last)}\b", templates)
        known = not head or head.split(".")[0] in templates
        assert whole or (part and known), path


def test_every_detail_is_about_a_value():
    """Else it would be left over."""
    assert set(DETAILS) <= set(PATHS)


def test_schema_has_every_option_of_the_router_that_is_the_users():
    """What the chart decides is missing, secrets too: they must not lie in a ConfigMap."""
    options = set(config_schema()["properties"])

    assert options == set(Config.__struct_fields__) - CHART_DECIDES - SECRETS
    assert set(Config.__struct_fields__) >= CHART_DECIDES - CHOSEN_BY_DISCOVERY
    assert "policy" in options


def test_schema_refers_to_nothing_outside():
    """Helm would fetch it."""
    text = (CHART / "values.schema.json").read_text()

    assert "$ref" not in text
    assert json.loads(text)["additionalProperties"] is False


WRONG = {
    "config.prot=80": ["config", "prot"],
    "config.queue_size=-1": ["config", "queue_size", "0"],
    "config.policy=7": ["config", "policy"],
    "config.retry_budget_ratio=2": ["retry_budget_ratio", "1"],
    "config.api_key=secret": ["config", "api_key"],
    "config.port=80": ["config", "port"],
    "mode=proxy": ["mode"],
    "replica=2": ["replica"],
    "replicas=two": ["replicas", "integer"],
    "image.digest=sha256:12": ["image", "digest"],
    "discovery.selector[0]=app": ["discovery", "selector"],
    "ports.http=80": ["ports", "http"],
    "service.type=ExternalName": ["service", "type"],
    "vllm.groups[0].name=x": ["groups", "role"],
    "envoy.logLevel=debug": ["envoy", "logLevel"],
    "envoy.maxHeapBytes=lots": ["envoy", "maxHeapBytes"],
}


@pytest.mark.helm
@pytest.mark.slow
@pytest.mark.parametrize("setting", WRONG)
def test_wrong_value_is_refused_by_its_name(each_helm: Helm, setting):
    """Before anything is rendered."""
    words = each_helm.refusal("--set", setting)

    assert "schema" in words
    for word in WRONG[setting]:
        assert word in words


IMPOSSIBLE = {
    "discovery.selector=null": "discovery.selector: at least one label is needed",
    "config.vllm_pd_disaggregation=true": "prefillSelector and decodeSelector must be given",
    "discovery.allNamespaces=true,discovery.namespace=x": "namespace or allNamespaces, not both",
    "tls.clientCa.existingSecret=x": "tls.existingSecret must be given too",
    "mode=sidecar-only,auth.apiKey.existingSecret=x": "are the gateway's matter",
    "mode=sidecar-only,auth.apiKeysFile.existingSecret=x": "are the gateway's matter",
    "mode=sidecar-only,auth.htpasswdFile.existingSecret=x": "are the gateway's matter",
    "mode=sidecar-only,auth.jwks.existingSecret=x,config.jwt_issuer=y": "are the gateway's matter",
    "mode=sidecar-only,tls.existingSecret=x": "are the gateway's matter",
    "mode=sidecar-only,adminApiKey.existingSecret=x": "empty adminApiKey",
    "mode=sidecar-only,config.jwt_issuer=https://x,config.jwt_jwks=https://x/k": "carries out config.jwt_issuer, config.jwt_jwks",
    "mode=sidecar-only,config.fail_closed=true": "carries out config.fail_closed",
    "mode=sidecar-only,config.vllm_pd_disaggregation=true,discovery.prefillSelector={a=b},discovery.decodeSelector={a=c}": "take mode router",
    "mode=sidecar-only,ingress.enabled=true": "turn ingress and httpRoute off",
    "auth.apiKey.existingSecret=x,auth.htpasswdFile.existingSecret=y": "choose one of them",
    "auth.apiKeysFile.existingSecret=x,config.api_key_validation_urls={http://x}": "choose one",
    "auth.jwks.existingSecret=x": "config.jwt_issuer must be given too",
    "envoy.resources=null": "set resources.limits.memory or maxHeapBytes",
    "envoy.resources.limits=null": "set resources.limits.memory or maxHeapBytes",
    "envoy.resources.limits.memory=2Xi": "the unit of",
    "httpRoute.enabled=true": "httpRoute.parentRefs: name the Gateway",
}


@pytest.mark.helm
@pytest.mark.slow
@pytest.mark.parametrize("settings", IMPOSSIBLE)
def test_values_that_do_not_go_together_are_refused(helm: Helm, settings):
    """In a sentence of ours."""
    assert IMPOSSIBLE[settings] in helm.refusal("--set", settings)


OF_A_KIND = {
    "string": "x",
    "boolean": True,
    "integer": 7,
    "number": 0.5,
    "array": ["x"],
}


@pytest.mark.helm
@pytest.mark.slow
def test_options_that_need_the_routers_own_envoy_are_refused_beside_a_gateway(helm: Helm, tmp_path):
    """All that the schema takes, each by its name: nobody must think that clients are asked for keys."""
    options = config_schema()["properties"]
    # A Secret, the chart and another line of the check stand for the others.
    named = sorted(ENVOY_ONLY & set(options) - {"vllm_pd_disaggregation"})
    assert set(ENVOY_ONLY) - set(named) <= CHART_DECIDES | SECRETS | {"vllm_pd_disaggregation"}
    values = tmp_path / "values.yaml"
    config = {name: example(options[name]) for name in named}
    # Of the ways to authenticate one.
    alone = {"api_keys_file", "htpasswd_file", "api_key_validation_urls"}
    for chosen in ({*named} - alone, *({name} for name in alone)):
        values.write_text(yaml.safe_dump({"config": {name: config[name] for name in chosen}}))

        words = helm.refusal("--set", "mode=sidecar-only", "-f", str(values))

        assert {f"config.{name}" for name in chosen} == set(re.findall(r"config\.\w+", words))


def example(schema):
    """Return a value that an option takes."""
    if "enum" in schema:
        return schema["enum"][-1]
    if schema["type"] in ("integer", "number"):
        return schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    return OF_A_KIND[schema["type"]]


@pytest.mark.helm
@pytest.mark.slow
def test_workers_are_asked_with_their_key_beside_a_gateway(helm: Helm):
    """Engines answer 401 without; the certificates that vouch for them are used, too."""
    objects = helm.render(
        "--set", "mode=sidecar-only,workerApiKey.existingSecret=x,workerCa.existingSecret=y"
    )

    names = {entry["name"] for entry in container(objects, "extproc")["env"]}
    assert "VLLM_EXTPROC_WORKER_API_KEY" in names
    config = service_config(objects)
    assert config["worker_ca_file"] == "/etc/vllm-extproc/worker-ca/ca.crt"
    assert config["ext_proc_only"] is True


@pytest.mark.helm
@pytest.mark.slow
def test_one_key_and_a_file_of_keys_go_together(helm: Helm):
    """Both are keys."""
    settings = "auth.apiKey.existingSecret=x,auth.apiKeysFile.existingSecret=y"

    assert helm.render("--set", settings)


@pytest.mark.helm
def test_simulated_workers_take_the_roles_of_prefill_and_decode(helm: Helm):
    """Those of each role are found by its selector, and reach each other at their Pods' addresses."""
    deployments = {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in helm.render(*PRESETS["try-out-pd"])
        if one["kind"] == "Deployment" and "-sim-" in one["metadata"]["name"]
    }

    assert len(deployments) == 2
    for role in ("prefill", "decode"):
        template = next(found for name, found in deployments.items() if name.endswith(role))
        assert template["metadata"]["labels"]["vllm.ai/role"] == role
        (container,) = template["spec"]["containers"]
        assert {f"--role={role}", "--kv-connector=nixl", "--kv-host=$(POD_IP)"} <= set(
            container["args"]
        )
        assert "POD_IP" in {one["name"] for one in container["env"]}
