"""Makes the chart's ``values.schema.json``: its own values from ``values.yaml``, the router's options from ``Config``.

The chart's values have their type from their default and their description from the comment above them. What a default
does not tell (which words are allowed, what a list holds) stands in ``DETAILS``.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from extproc.config import SECRETS, Config

CHART = Path(__file__).parents[1] / "helm" / "vllm-extproc"
VALUES = CHART / "values.yaml"

CHART_DECIDES = frozenset(
    {
        "host",
        "port",
        "grpc_address",
        "ext_proc_only",
        "admin_address",
        "prefill_leg_address",
        "envoy_admin_address",
        "envoy_events_dir",
        "envoy_path",
        "envoy_concurrency",
        "envoy_max_memory",
        "log_dir",
        "prometheus_host",
        "prometheus_port",
        "shutdown_delay_s",
        "shutdown_grace_s",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "service_discovery",
        "service_discovery_namespace",
        "service_discovery_port",
        "selector",
        "prefill_selector",
        "decode_selector",
        "bootstrap_port_annotation",
    }
)
"""Options that other values of the chart stand for, or that only `launch` knows."""

STRINGS = {"type": "array", "items": {"type": "string"}}
LABELS = {
    "type": "array",
    "items": {
        "type": "string",
        "pattern": r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?=[A-Za-z0-9_.-]*$",
    },
}
OBJECTS = {"type": "array", "items": {"type": "object"}}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
HIGH_PORT = {"type": "integer", "minimum": 1024, "maximum": 65535}
SECONDS = {"type": "number", "minimum": 0}
WHOLE_SECONDS = {"type": "integer", "minimum": 0}
COUNT = {"type": "integer", "minimum": 0}
SOME = {"type": "integer", "minimum": 1}
RATIO = {"type": "number", "minimum": 0, "maximum": 1}
PULL = {"enum": ["Always", "IfNotPresent", "Never"]}
PODS = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}
DIGEST = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
FREE = {"type": "object"}

DETAILS: dict[str, dict[str, Any]] = {
    "mode": {"enum": ["router", "sidecar-only"]},
    "replicas": COUNT,
    "commonLabels": TEXTS,
    "image.pullPolicy": PULL,
    "image.digest": DIGEST,
    "imagePullSecrets": STRINGS,
    "envoy.image.pullPolicy": PULL,
    "envoy.image.digest": DIGEST,
    "envoy.concurrency": {"type": "integer", "minimum": 1, "maximum": 1024},
    "envoy.maxHeapBytes": COUNT,
    "envoy.maxConnections": SOME,
    "envoy.logLevel": {"enum": ["info", "warning", "error", "critical"]},
    "envoy.extraArgs": STRINGS,
    "envoy.resources": FREE,
    "config": FREE,
    "discovery.selector": LABELS,
    "discovery.prefillSelector": LABELS,
    "discovery.decodeSelector": LABELS,
    "discovery.port": HIGH_PORT,
    "ports.http": HIGH_PORT,
    "ports.metrics": HIGH_PORT,
    "ports.grpc": HIGH_PORT,
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "service.port": PORT,
    "service.nodePort": {"anyOf": [PORT, {"type": "null"}]},
    "service.sessionAffinity": {"enum": ["None", "ClientIP"]},
    "service.annotations": TEXTS,
    "shutdown.delaySeconds": WHOLE_SECONDS,
    "shutdown.graceSeconds": WHOLE_SECONDS,
    "terminationGracePeriodSeconds": {"anyOf": [WHOLE_SECONDS, {"type": "null"}]},
    "probes.readinessPath": {"enum": ["/readiness", "/health", "/liveness"]},
    "probes.readinessPeriodSeconds": SOME,
    "probes.readinessFailureThreshold": SOME,
    "probes.livenessPeriodSeconds": SOME,
    "probes.livenessFailureThreshold": SOME,
    "probes.timeoutSeconds": {"type": "integer", "minimum": 3},
    "probes.startupSeconds": SOME,
    "resources": FREE,
    "extraArgs": STRINGS,
    "extraEnv": OBJECTS,
    "extraVolumes": OBJECTS,
    "extraVolumeMounts": OBJECTS,
    "podAnnotations": TEXTS,
    "podLabels": TEXTS,
    "runAsUser": SOME,
    "nodeSelector": TEXTS,
    "tolerations": OBJECTS,
    "affinity": FREE,
    "topologySpread.whenUnsatisfiable": {"enum": ["ScheduleAnyway", "DoNotSchedule"]},
    "topologySpread.topologyKeys": STRINGS,
    "deployment.maxUnavailable": PODS,
    "deployment.maxSurge": PODS,
    "serviceAccount.annotations": TEXTS,
    "autoscaling.minReplicas": SOME,
    "autoscaling.maxReplicas": SOME,
    "autoscaling.targetCPUUtilizationPercentage": SOME,
    "autoscaling.behavior": FREE,
    "podDisruptionBudget.maxUnavailable": PODS,
    "networkPolicy.clients": OBJECTS,
    "networkPolicy.prometheus": OBJECTS,
    "networkPolicy.apiServerPorts": {"type": "array", "items": PORT},
    "networkPolicy.extraEgress": OBJECTS,
    "podMonitor.labels": TEXTS,
    "serviceMonitor.labels": TEXTS,
    "prometheusRule.labels": TEXTS,
    "prometheusRule.errorRatio": RATIO,
    "prometheusRule.firstByteSeconds": SECONDS,
    "prometheusRule.refusedRatio": RATIO,
    "grafanaDashboard.labels": TEXTS,
    "grafanaDashboard.annotations": TEXTS,
    "ingress.annotations": TEXTS,
    "httpRoute.parentRefs": OBJECTS,
    "httpRoute.hostnames": STRINGS,
    "vllm.image.pullPolicy": PULL,
    "vllm.args": STRINGS,
    "vllm.groups": {
        "type": "array",
        "items": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "role", "replicas"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?$"},
                "role": {"enum": ["regular", "prefill", "decode"]},
                "replicas": COUNT,
                "args": STRINGS,
            },
        },
    },
    "vllm.resources": FREE,
    "vllm.env": OBJECTS,
    "vllm.startupSeconds": SOME,
    "vllm.terminationGracePeriodSeconds": WHOLE_SECONDS,
    "vllm.nodeSelector": TEXTS,
    "vllm.tolerations": OBJECTS,
    "simWorkers.replicas": COUNT,
    "simWorkers.args": STRINGS,
    "simWorkers.resources": FREE,
}
"""What the default of a value does not tell, by its path."""

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def values_schema() -> str:
    """Return the schema as the chart ships it."""
    comments = value_comments(VALUES.read_text())
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart vllm-extproc",
        **_object(yaml.safe_load(VALUES.read_text()), "", comments),
    }
    schema["properties"]["config"] = {
        **config_schema(),
        "description": comments["config"],
    }
    # Helm hands these to every chart.
    schema["properties"]["global"] = {"type": "object"}
    return json.dumps(schema, indent=1) + "\n"


def config_schema() -> dict[str, Any]:
    """Return the part for ``config``: what the router's own types say, without what the chart decides."""
    made = msgspec.json.schema(Config)
    definitions = made["$defs"]
    config = copy.deepcopy(definitions["Config"])
    for name in CHART_DECIDES | SECRETS:
        config["properties"].pop(name, None)
    for name, option in config["properties"].items():
        # A default of the router's that is shown in two places would differ one day.
        option.pop("default", None)
        config["properties"][name] = _inlined(option, definitions)
    config.pop("title", None)
    return config


def value_comments(text: str) -> dict[str, str]:
    """Return the comment above each value of a ``values.yaml``, by the value's path."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if stripped.startswith("# "):
            comment.append(stripped[2:])
        elif match := re.match(r" *([A-Za-z][\w.-]*):( |$)", line):
            while path and path[-1][0] >= indent:
                path.pop()
            path.append((indent, match[1]))
            if comment:
                found[".".join(name for _, name in path)] = " ".join(comment)
            comment = []
        else:
            comment = []
    return found


def _object(values: dict[str, Any], path: str, comments: dict[str, str]) -> dict[str, Any]:
    properties = {}
    for name, value in values.items():
        here = f"{path}.{name}" if path else name
        if here in DETAILS:
            found = copy.deepcopy(DETAILS[here])
        elif isinstance(value, dict) and value:
            found = _object(value, here, comments)
        elif type(value) in TYPES:
            found = {"type": TYPES[type(value)]}
        else:
            raise ValueError(f"{here}: its default {value!r} tells no type; add it to DETAILS")
        if here in comments:
            found["description"] = comments[here]
        properties[name] = found
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return *schema* with its references replaced by what they name."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(part, definitions) for name, part in schema.items() if name != "default"}
