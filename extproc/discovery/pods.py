"""Pods of Kubernetes as workers: what is read of a Pod, and which worker it is.

A Pod is a worker while it is ready, has an address and is not about to end. What it is called and how it
is reached follows from the options, unless its annotations or labels say otherwise:

    vllm-extproc.io/port       port of the worker
    vllm-extproc.io/scheme     http or https
    vllm-extproc.io/tls-name   name that its certificate carries
    vllm-extproc.io/model      the model that it serves
    vllm-extproc.io/weight     share of the traffic relative to others
    vllm-extproc.io/role       regular, prefill or decode
    vllm-extproc.io/zone       where it runs
    vllm-extproc.io/labels     further labels of the worker, as key=value,key=value

An annotation counts more than a label of the same name. What cannot be understood is as if it were not
there, and a complaint about it is returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from extproc.address import join_host_port
from extproc.discovery.spec import MAX_LABELS, parse_worker
from extproc.discovery.updates import WorkerSpec, WorkerType

PREFIX = "vllm-extproc.io/"

ZONE_LABEL = "topology.kubernetes.io/zone"
"""Of nodes; Kubernetes copies it to their Pods from 1.35 on."""

OWN_LABELS = ("namespace", "pod", "node", "zone")
"""Of each worker; its annotation may add as many as leave room for them."""

MAX_TEXT_CHARS = 64
"""Of an annotation that is quoted in a complaint."""


class PodMetadata(msgspec.Struct, rename="camel"):
    """What names and describes an object."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    creation_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class PodCondition(msgspec.Struct):
    """One of the things that are true or not of a Pod."""

    type: str = ""
    status: str = ""


class PodSpec(msgspec.Struct, rename="camel"):
    """What was wanted of a Pod."""

    node_name: str | None = None


class PodStatus(msgspec.Struct, rename={"pod_ip": "podIP"}):
    """What became of a Pod."""

    phase: str | None = None
    pod_ip: str | None = None
    conditions: list[PodCondition] | None = None


class Pod(msgspec.Struct):
    """The few fields of a Pod that are needed, of the hundreds that it has."""

    metadata: PodMetadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def name(self) -> str:
        """Namespace and name, as people know it."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def version(self) -> int:
        """How new this is, compared with others of the same Pod; 0 when that cannot be told."""
        text = self.metadata.resource_version
        return int(text) if text.isdecimal() else 0

    def said(self, name: str) -> str | None:
        """Return what its annotation or label ``vllm-extproc.io/<name>`` says; None when it has none."""
        found = (self.metadata.annotations or {}).get(PREFIX + name)
        return (self.metadata.labels or {}).get(PREFIX + name) if found is None else found


class PodState(StrEnum):
    """Whether a Pod is a worker, and if not, why."""

    WORKER = "worker"
    NOT_READY = "not_ready"
    ENDING = "ending"
    UNUSABLE = "unusable"
    """Nothing can be reached at its address."""


@dataclasses.dataclass(frozen=True, slots=True)
class PodDefaults:
    """What holds for a Pod that says nothing else."""

    port: int = 80
    bootstrap_port_annotation: str = "vllm.ai/bootstrap-port"
    disaggregation: bool = False
    """Whether there are prefill and decode workers; else a worker in such a role would get no request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a Pod is to the router."""

    state: PodState
    worker: WorkerSpec | None = None
    """The worker that it is, with ``PodState.WORKER``."""

    complaints: tuple[str, ...] = ()
    """What of its annotations and labels is ignored, and why."""


def read_pod(pod: Pod, role: WorkerType, defaults: PodDefaults, node_zone: str = "") -> Reading:
    """Return which worker *pod* is: of *role*, unless it says otherwise, in the zone of its node."""
    state = _state(pod)
    if state is not PodState.WORKER:
        return Reading(state)
    complaints: list[str] = []
    described = _described(pod, role, defaults, complaints)
    own = (
        pod.metadata.namespace,
        pod.metadata.name,
        pod.spec.node_name,
        _zone(pod, complaints) or node_zone,
    )
    labels = described.pop("labels", {}) | {
        key: value for key, value in zip(OWN_LABELS, own, strict=True) if value
    }
    try:
        spec = parse_worker(described | {"labels": labels})
    except ValueError as error:
        return Reading(PodState.UNUSABLE, complaints=(*complaints, str(error)))
    spec = dataclasses.replace(spec, instance=pod.metadata.uid)
    return Reading(state, spec, tuple(complaints))


def trim(pod: Pod, defaults: PodDefaults) -> None:
    """Drop the labels and annotations that nobody reads; there may be 256 KiB of them."""
    metadata = pod.metadata
    kept = (ZONE_LABEL, defaults.bootstrap_port_annotation)
    for found in (metadata.labels, metadata.annotations):
        for key in [k for k in found or () if not k.startswith(PREFIX) and k not in kept]:
            if found is not None:
                del found[key]


def needs_zone(pod: Pod) -> bool:
    """Tell whether only the node of *pod* can say in which zone it is."""
    return bool(pod.spec.node_name) and not _zone(pod, [])


def _state(pod: Pod) -> PodState:
    status = pod.status
    # Until a Pod that is deleted is gone it may stay ready for its whole grace period.
    if pod.metadata.deletion_timestamp or status.phase in ("Failed", "Succeeded"):
        return PodState.ENDING
    ready = any(c.type == "Ready" and c.status == "True" for c in status.conditions or ())
    return PodState.WORKER if ready and status.pod_ip else PodState.NOT_READY


def _described(
    pod: Pod, role: WorkerType, defaults: PodDefaults, complaints: list[str]
) -> dict[str, Any]:
    """Return *pod* as users describe a worker, without what cannot be understood."""
    port = _number(pod.said("port"), f"{PREFIX}port", complaints) or defaults.port
    scheme = pod.said("scheme") or "http"
    if scheme not in ("http", "https"):
        complaints.append(f"{PREFIX}scheme: expected http or https, got {_shown(scheme)}")
        scheme = "http"
    host = pod.status.pod_ip or ""
    described: dict[str, Any] = {"url": f"{scheme}://{_authority(host, port)}"}
    role = _role(pod, role, defaults, complaints)
    described["worker_type"] = role.value
    if role is WorkerType.PREFILL:
        name = defaults.bootstrap_port_annotation
        text = (pod.metadata.annotations or {}).get(name)
        if bootstrap_port := _number(text, name, complaints):
            described["bootstrap_port"] = bootstrap_port
    # Each is tried alone, so that one mistake does not take the others away.
    for name, key, value in _optional(pod):
        if fault := _fault(key, value, scheme):
            complaints.append(f"{PREFIX}{name}: {fault}")
        else:
            described[key] = value
    return described


def _role(pod: Pod, role: WorkerType, defaults: PodDefaults, complaints: list[str]) -> WorkerType:
    """Return the role that *pod* asks for if there are such workers, else *role*."""
    text = pod.said("role")
    if text is None:
        return role
    roles = list(WorkerType) if defaults.disaggregation else [WorkerType.REGULAR]
    if text in roles:
        return WorkerType(text)
    hint = "; others need --vllm-pd-disaggregation" if text in list(WorkerType) else ""
    complaints.append(f"{PREFIX}role: expected one of {', '.join(roles)}, got {_shown(text)}{hint}")
    return role


def _zone(pod: Pod, complaints: list[str]) -> str:
    """Return the zone that *pod* itself names; empty: none."""
    text = pod.said("zone") or ""
    if fault := _fault("labels", {"zone": text}):
        complaints.append(f"{PREFIX}zone: {fault}")
        text = ""
    return text or (pod.metadata.labels or {}).get(ZONE_LABEL, "")


def _fault(key: str, value: Any, scheme: str = "http") -> str:
    """Say what is wrong with *value* as the *key* of a worker; empty: nothing."""
    most = MAX_LABELS - len(OWN_LABELS)
    if key == "labels" and len(value) > most:
        return f"expected at most {most}, got {len(value)}"
    try:
        parse_worker({"url": f"{scheme}://127.0.0.1", key: value})
    except ValueError as error:
        return str(error).removeprefix(f"{key}: ")
    return ""


def _optional(pod: Pod) -> Iterator[tuple[str, str, Any]]:
    """Yield what *pod* says of itself: the name of the annotation, the key of a worker, the value."""
    for name, key in (("model", "model"), ("tls-name", "tls_name")):
        if text := pod.said(name):
            yield name, key, text
    if text := pod.said("weight"):
        try:
            yield "weight", "weight", float(text)
        except ValueError:
            yield "weight", "weight", text
    if text := pod.said("labels"):
        pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
        yield "labels", "labels", {key.strip(): value.strip() for key, _, value in pairs}


def _number(text: str | None, name: str, complaints: list[str]) -> int | None:
    if text is None:
        return None
    if text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    complaints.append(f"{name}: expected a port from 1 to 65535, got {_shown(text)}")
    return None


def _authority(host: str, port: int) -> str:
    try:
        return join_host_port(host, port)
    except OSError:  # no address: the URL will be refused, and the reason told
        return f"[{host}]:{port}"


def _shown(text: str) -> str:
    return ascii(text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}...")
