"""Options of the discovery of Pods in Kubernetes; a part of ``config.Config``."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from extproc.discovery.pods import PodDefaults
from extproc.discovery.updates import WorkerType
from extproc.pd_options import PdOptions

# https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_DNS_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DNS_NAME = rf"(?=[^/]{{1,253}}/){_DNS_LABEL}(?:\.{_DNS_LABEL})*"
_KEY = re.compile(rf"(?:{_DNS_NAME}/)?{_NAME}")
_VALUE = re.compile(rf"(?:{_NAME})?")
_NAMESPACE = re.compile(_DNS_LABEL)


class KubernetesOptions(PdOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which Pods are workers, and how the API server is followed."""

    service_discovery: Annotated[
        bool,
        Meta(
            description="Find workers among the Pods of Kubernetes; needs pip install 'vllm-extproc[kubernetes]'."
        ),
    ] = False
    selector: Annotated[
        tuple[str, ...],
        Meta(description="Labels of the Pods that are workers, as KEY=VALUE; a Pod must have all."),
    ] = ()
    prefill_selector: Annotated[
        tuple[str, ...],
        Meta(description="Labels of the Pods that are prefill workers, as KEY=VALUE."),
    ] = ()
    decode_selector: Annotated[
        tuple[str, ...],
        Meta(description="Labels of the Pods that are decode workers, as KEY=VALUE."),
    ] = ()
    service_discovery_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65535,
            description="Port of the workers in their Pods, unless a Pod names another.",
        ),
    ] = 80
    service_discovery_namespace: Annotated[
        str,
        Meta(
            description="Namespace of the Pods. Empty: all namespaces, which the router must have the right to"
            " read."
        ),
    ] = ""
    bootstrap_port_annotation: Annotated[
        str,
        Meta(
            description="Annotation in which a prefill Pod names the port of its KV connector's bootstrap server."
        ),
    ] = "vllm.ai/bootstrap-port"
    kubeconfig: Annotated[
        str,
        Meta(
            description="File that says how to reach the API server and as whom. Empty: as the service account of"
            " the Pod in which the router runs."
        ),
    ] = ""
    service_discovery_list_interval_secs: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="Seconds between two lists of all Pods, which repair what a watch may have missed.",
        ),
    ] = 300
    service_discovery_watch_timeout_secs: Annotated[
        int,
        Meta(
            ge=1,
            le=3600,
            description="Seconds after which a watch is begun anew; one that has stalled is noticed 5 seconds"
            " later.",
        ),
    ] = 30

    def selectors(self) -> tuple[tuple[WorkerType, str], ...]:
        """Return the label selectors in use, as the API server takes them, by the role that they give.

        Of several that a Pod fits the first counts. ``ValueError`` says what is wrong with one.
        """
        found = (
            (WorkerType.PREFILL, "prefill_selector"),
            (WorkerType.DECODE, "decode_selector"),
            (WorkerType.REGULAR, "selector"),
        )
        return tuple(
            (role, _selector(option, getattr(self, option)))
            for role, option in found
            if getattr(self, option)
        )

    def pod_defaults(self) -> PodDefaults:
        """Return what holds for a Pod that says nothing else."""
        return PodDefaults(
            self.service_discovery_port,
            self.bootstrap_port_annotation,
            self.vllm_pd_disaggregation,
        )

    def check_discovery(self) -> None:
        """Refuse options that do not go together. ``ValueError`` names one and says what is wrong."""
        chosen = self.selectors()
        for option in ("prefill_selector", "decode_selector"):
            if getattr(self, option) and not self.vllm_pd_disaggregation:
                raise ValueError(f"{option}: vllm_pd_disaggregation must be given too")
        if chosen and not self.service_discovery:
            option = next(o for o in _SELECTORS if getattr(self, o))
            raise ValueError(f"{option}: service_discovery must be given too")
        if self.service_discovery and not chosen:
            options = _SELECTORS if self.vllm_pd_disaggregation else _SELECTORS[:1]
            raise ValueError(
                f"service_discovery: {' or '.join(options)} must be given too, to tell which Pods are workers"
            )
        if self.service_discovery_namespace and not _NAMESPACE.fullmatch(
            self.service_discovery_namespace
        ):
            raise ValueError(
                "service_discovery_namespace: expected the name of a namespace, got"
                f" {self.service_discovery_namespace!r}"
            )
        if not _KEY.fullmatch(self.bootstrap_port_annotation):
            raise ValueError(
                "bootstrap_port_annotation: expected the name of an annotation, got"
                f" {self.bootstrap_port_annotation!r}"
            )


_SELECTORS = ("selector", "prefill_selector", "decode_selector")


def _selector(option: str, values: tuple[str, ...]) -> str:
    """Return the pairs in *values*, which stand between spaces or commas, as one label selector."""
    labels: dict[str, str] = {}
    for pair in (pair for text in values for pair in text.replace(",", " ").split()):
        key, separator, value = pair.partition("=")
        if not separator or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ValueError(
                f"{option}: expected KEY=VALUE as in labels of Kubernetes, got {pair!r}"
            )
        if labels.setdefault(key, value) != value:
            raise ValueError(f"{option}: no Pod has two values of {key!r}")
    if not labels:
        raise ValueError(f"{option}: expected KEY=VALUE, got nothing")
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
