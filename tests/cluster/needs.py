"""What a machine must have for the scenarios, and how to get what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

KUBERNETES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
)

LOCAL = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "/usr/lib/cni/host-local": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "ip": "iproute2",
    "unshare": "util-linux",
    "kubectl": "kubernetes-client",
    "openssl": "openssl",
    "gcc": "gcc",
    "/usr/include/signal.h": "libc6-dev",
    "git": "git",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
}
"""Debian's package by the program or file that is needed of it."""

BUILD = {
    "/usr/lib/go-1.19/bin/go": "golang-1.19-go",
    "rsync": "rsync",
    "jq": "jq",
    "make": "make",
    "dpkg-source": "dpkg-dev",
}
"""The same for ``tests/k8s/build.sh``."""

KIND = {
    "docker": "docker: https://docs.docker.com/engine/install/",
    "kind": "kind: https://kind.sigs.k8s.io/docs/user/quick-start/#installation",
    "kubectl": "kubectl: https://kubernetes.io/docs/tasks/tools/",
    "helm": "helm: https://helm.sh/docs/intro/install/",
}
"""What to say of each program when it is missing."""


def local(programs: Path) -> tuple[list[str], list[str]]:
    """Return what keeps the one-node cluster from running, in sentences, and the Debian packages that are missing."""
    packages = missing(LOCAL)
    if not all((programs / name).exists() for name in KUBERNETES):
        packages += missing(BUILD)
    sentences = []
    if os.geteuid() != 0:
        sentences.append("root is needed: it makes namespaces, mounts and cgroups of its own")
    if not Path("/sys/fs/cgroup/memory").is_dir():
        sentences.append(
            "cgroups of version 1 are needed (boot with systemd.unified_cgroup_hierarchy=0);"
            " on others run `make e2e`, in kind"
        )
    return sentences, sorted(set(packages))


def missing(needed: dict[str, str]) -> list[str]:
    """Return what to get for those of *needed* that are not here."""
    return [source for name, source in needed.items() if not is_here(name)]


def is_here(name: str) -> bool:
    """Tell whether a program, or a file by its path, is here."""
    return Path(name).exists() if name.startswith("/") else shutil.which(name) is not None


def tell(sentences: Iterable[str], packages: Iterable[str]) -> str:
    """Return all that is missing as one text, nothing when all is here."""
    lines = list(sentences)
    if names := " ".join(packages):
        lines.append(
            f"Debian packages are missing: apt-get install --no-install-recommends {names}"
        )
    return "\n".join(lines)
