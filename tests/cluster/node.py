"""A Kubernetes cluster of one node, of real programs: etcd to kube-proxy, containerd below them.

Everything here happens inside namespaces that ``tests/cluster/local.py`` has made: network, mounts, processes and
cgroups are this cluster's own, so nothing of the machine is touched, and all of it ends with the first process of
the namespaces. Kubernetes is Debian 12's source of 1.20.2 (``tests/k8s/build.sh``), the rest are Debian's packages.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.pause import write_pause_image

ADDRESS = "172.30.0.1"
NODE = "node"
API_PORT = 6443
ETCD = "http://127.0.0.1:2379"
POD_NET = "10.244.0.0/22"
SERVICE_NET = "10.96.0.0/16"
PAUSE = "localhost/pause:e2e"
START_S = 90.0
KERNEL_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
)
"""What the kubelet sets for the whole machine. It sees files of the cluster's own instead."""

CONTAINERD = """\
version = 2
root = "{dir}/containerd"
state = "/run/containerd-state"
oom_score = 0
[grpc]
  address = "/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{dir}/cni"
"""
# Routed rather than bridged: replies between Pods then pass the rules of Services on any kernel.
CNI = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": POD_NET}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}
KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "evictionHard": {"memory.available": "100Mi"},
    "failSwapOn": False,
    "imageGCHighThresholdPercent": 100,
    "oomScoreAdj": 0,
}


class StartError(Exception):
    """A part of the cluster did not come up."""


class Node:
    """The cluster, once ``start`` has returned."""

    def __init__(self, directory: Path, programs: Path) -> None:
        self._dir = directory
        self._programs = programs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.kubeconfig = directory / "kubeconfig"

    def start(self, images: list[Path]) -> None:
        """Start everything and import *images*; StartError tells what failed, with the end of its log."""
        self._prepare()
        self._start_runtime(images)
        self._start_control_plane()
        self._start_node()

    def _prepare(self) -> None:
        for directory in ("/run", "/var/lib", "/var/log"):
            _run("mount", "-t", "tmpfs", "tmpfs", directory)
        _own_cgroups()
        for name in KERNEL_SETTINGS:
            copy = self._dir / name.replace("/", "-")
            copy.write_text(Path("/proc/sys", name).read_text())
            _run("mount", "--bind", str(copy), f"/proc/sys/{name}")
        _run("ip", "link", "set", "lo", "up")
        # A bridge without members: kernels have it even where they lack `dummy`.
        _run("ip", "link", "add", "node0", "type", "bridge")
        _run("ip", "address", "add", f"{ADDRESS}/24", "dev", "node0")
        _run("ip", "link", "set", "node0", "up")
        _run("ip", "route", "add", "default", "dev", "node0")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _start_runtime(self, images: list[Path]) -> None:
        (self._dir / "cni").mkdir()
        (self._dir / "cni" / "pods.conflist").write_text(json.dumps(CNI))
        config = self._dir / "containerd.toml"
        config.write_text(CONTAINERD.format(dir=self._dir, pause=PAUSE))
        self._program("containerd", ["containerd", "--config", str(config)])
        self._until("containerd", lambda: _ctr("version"))
        pause = self._dir / "pause.tar"
        write_pause_image(pause, PAUSE)
        for image in (pause, *images):
            _run(*CTR, "images", "import", str(image))

    def _start_control_plane(self) -> None:
        token = secrets.token_hex(16)
        tokens = self._dir / "tokens.csv"
        tokens.write_text(f'{token},admin,admin,"system:masters"\n')
        key = self._dir / "accounts.key"
        _run("openssl", "genrsa", "-out", str(key), "2048")
        certificates = self._dir / "certificates"
        self._program(
            "etcd",
            [
                "etcd",
                *("--data-dir", "/run/etcd"),
                *("--listen-client-urls", ETCD, "--advertise-client-urls", ETCD),
                *("--listen-peer-urls", "http://127.0.0.1:2380"),
            ],
        )
        self._program(
            "kube-apiserver",
            [
                f"--etcd-servers={ETCD}",
                f"--advertise-address={ADDRESS}",
                f"--secure-port={API_PORT}",
                "--insecure-port=0",
                f"--cert-dir={certificates}",
                f"--service-cluster-ip-range={SERVICE_NET}",
                f"--token-auth-file={tokens}",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}",
                "--kubelet-preferred-address-types=InternalIP",
                "--allow-privileged=false",
            ],
        )
        authority = certificates / "apiserver.crt"
        self._until("kube-apiserver", authority.exists)
        server = f"https://{ADDRESS}:{API_PORT}"
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "e2e",
                    "clusters": [
                        {
                            "name": "e2e",
                            "cluster": {"server": server, "certificate-authority": str(authority)},
                        }
                    ],
                    "users": [{"name": "admin", "user": {"token": token}}],
                    "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "admin"}}],
                }
            )
        )
        self._until("kube-apiserver", lambda: self._kubectl("get", "--raw", "/readyz"))
        self._program(
            "kube-controller-manager",
            [
                f"--kubeconfig={self.kubeconfig}",
                f"--service-account-private-key-file={key}",
                f"--root-ca-file={authority}",
                "--use-service-account-credentials",
                "--leader-elect=false",
            ],
        )
        self._program("kube-scheduler", [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false"])

    def _start_node(self) -> None:
        config = self._dir / "kubelet.json"
        resolver = self._dir / "resolv.conf"
        resolver.write_text("")
        plugins = self._dir / "volume-plugins"
        config.write_text(
            json.dumps({**KUBELET, "resolvConf": str(resolver), "volumePluginDir": str(plugins)})
        )
        socket = "unix:///run/containerd.sock"
        self._program(
            "kubelet",
            [
                f"--config={config}",
                f"--kubeconfig={self.kubeconfig}",
                f"--root-dir={self._dir}/kubelet",
                "--container-runtime=remote",
                f"--container-runtime-endpoint={socket}",
                f"--image-service-endpoint={socket}",
                f"--hostname-override={NODE}",
                f"--node-ip={ADDRESS}",
            ],
        )
        self._program(
            "kube-proxy",
            [
                f"--kubeconfig={self.kubeconfig}",
                f"--hostname-override={NODE}",
                "--proxy-mode=iptables",
                "--conntrack-max-per-core=0",
                "--conntrack-tcp-timeout-established=0",
                "--conntrack-tcp-timeout-close-wait=0",
            ],
        )
        ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        self._until("kubelet", lambda: self._kubectl("get", "node", NODE, "-o", ready) == "True")
        account = ("get", "serviceaccount", "default", "-o", "jsonpath={.secrets[0].name}")
        self._until("kube-controller-manager", lambda: self._kubectl(*account))

    def check(self) -> None:
        """StartError when a program has ended that should run."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise StartError(
                    f"{name} ended with {process.returncode}: {self._end_of_log(name)}"
                )

    def _program(self, name: str, command: list[str]) -> None:
        built = self._programs / name
        if built.exists():
            command = [str(built), *command]
        with (self._dir / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._dir
            )

    def _until(self, name: str, done: Callable[[], object]) -> None:
        end = time.monotonic() + START_S
        while not done():
            self.check()
            if time.monotonic() > end:
                raise StartError(f"{name} is not ready after {START_S} s: {self._end_of_log(name)}")
            time.sleep(0.2)

    def _end_of_log(self, name: str) -> str:
        return (self._dir / f"{name}.log").read_text(errors="replace")[-2000:]

    def _kubectl(self, *arguments: str) -> str:
        """Return what it prints, nothing when it fails."""
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""


CTR = ("ctr", "--address", "/run/containerd.sock", "--namespace", "k8s.io")


def _ctr(*arguments: str) -> bool:
    return subprocess.run([*CTR, *arguments], capture_output=True, check=False).returncode == 0


def _own_cgroups() -> None:
    """Mount each hierarchy again: in this namespace its root is the group that was made for the cluster."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    hierarchies = [(where, options) for _, where, kind, options, *_ in mounts if kind == "cgroup"]
    known = {line.split()[0] for line in Path("/proc/cgroups").read_text().splitlines()[1:]}
    for where, options in hierarchies:
        names = [o for o in options.split(",") if o in known or o.startswith("name=")]
        _run("umount", where)
        _run("mount", "-t", "cgroup", "-o", ",".join(names), "cgroup", where)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
