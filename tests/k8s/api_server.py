"""A real API server of Kubernetes with its etcd, on free ports of the loopback interface.

There is no kubelet: tests say through the status subresource what became of a Pod. An address such as
127.0.0.5 makes it one that can be reached, where a simulated worker listens.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.harness import Program, free_port, wait_until

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 60.0
HTTP_LIMIT_S = 30.0
ADMIN, ROUTER, STRANGER = "admin-token", "router-token", "stranger-token"
TOKENS = f"""\
{ADMIN},admin,u1,"system:masters"
{ROUTER},router,u2,"routers"
"""


def cache() -> Path:
    """Return where built programs are kept."""
    return Path(os.environ.get("K8S_CACHE", ROOT / ".cache" / "k8s")).absolute()


def missing() -> str:
    """Return what is not there for these tests, and how to get it; empty when all is."""
    for tool, package in (("etcd", "etcd-server"), ("etcdctl", "etcd-client")):
        if shutil.which(tool) is None:
            return f"{tool} is not there; on Debian: apt-get install {package}"
    if not (cache() / "bin" / "kube-apiserver").exists():
        return "kube-apiserver is not there: make test-k8s builds it"
    return ""


class ApiServer:
    """The API server; it may be stopped, killed and started again with what etcd holds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()
        self._etcd_port = free_port()
        peers = f"http://127.0.0.1:{free_port()}"
        self._clients = f"http://127.0.0.1:{self._etcd_port}"
        self._certs = directory / "certs"
        self._tokens = directory / "tokens.csv"
        self._key = directory / "sa.key"
        directory.mkdir(parents=True, exist_ok=True)
        self._tokens.write_text(TOKENS)
        subprocess.run(
            ["openssl", "genrsa", "-out", str(self._key), "2048"], check=True, capture_output=True
        )
        self._etcd = Program(
            "etcd",
            [
                *("etcd", "--data-dir", str(directory / "etcd"), "--unsafe-no-fsync"),
                *("--listen-client-urls", self._clients, "--advertise-client-urls", self._clients),
                *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                *("--initial-cluster", f"default={peers}"),
            ],
            directory,
        )
        self._server: Program | None = None
        self._kept: dict[int, http.client.HTTPSConnection] = {}
        """By thread."""

        self.start()

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it is ready."""
        if self._server is not None and self._server.running:
            return
        self._server = Program(
            f"kube-apiserver-{self.port}",
            [
                str(cache() / "bin" / "kube-apiserver"),
                f"--etcd-servers={self._clients}",
                *("--bind-address=127.0.0.1", f"--secure-port={self.port}", "--insecure-port=0"),
                f"--cert-dir={self._certs}",
                "--service-cluster-ip-range=10.96.0.0/24",
                f"--token-auth-file={self._tokens}",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={self._key}",
                f"--service-account-signing-key-file={self._key}",
                "--disable-admission-plugins=ServiceAccount",
                "--watch-cache-sizes=pods#4000",
            ],
            self._directory,
        )

        def ready() -> bool:
            assert self._server is not None
            assert self._server.running, self._server.describe()
            with contextlib.suppress(OSError):
                return self.ask("GET", "/readyz")[0] == 200
            return False

        wait_until(ready, START_LIMIT_S, "API server ready")

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End the server, and let what etcd holds be."""
        assert self._server is not None
        self._server.send_signal(number)
        self._server.wait(60)

    def end(self) -> None:
        """End all of it."""
        if self._server is not None:
            if self._server.running:
                self.stop()
            self._server.end()
        self._etcd.end()
        for connection in self._kept.values():
            connection.close()

    @property
    def ca_file(self) -> Path:
        """The certificate that vouches for the server: its own."""
        return self._certs / "apiserver.crt"

    def kubeconfig(self, path: Path, token: str = ROUTER, port: int | None = None) -> Path:
        """Write a kubeconfig for the owner of *token*; *port*: where the server is reached instead."""
        server = {
            "server": f"https://127.0.0.1:{port or self.port}",
            "certificate-authority": str(self.ca_file),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def ask(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json"
    ) -> tuple[int, Any]:
        """Send a request as an administrator; return the status and the JSON."""
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": kind}
        text = None if body is None else json.dumps(body)
        thread = threading.get_ident()
        for connection in (self._kept.pop(thread, None), self._connect()):
            if connection is None:
                continue
            try:
                connection.request(method, path, text, headers)
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                continue
            self._kept[thread] = connection
            shown = json.loads(content) if content.startswith(b"{") else content.decode()
            return answer.status, shown
        raise ConnectionError("the API server does not answer")

    def _connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.ca_file))
        return http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=HTTP_LIMIT_S, context=context
        )

    def do(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json"
    ) -> Any:
        """Send a request that must succeed."""
        status, answer = self.ask(method, path, body, kind=kind)
        assert status < 300, (method, path, status, answer)
        return answer

    def compact(self) -> None:
        """Let etcd forget every earlier version."""
        env = {**os.environ, "ETCDCTL_API": "3"}
        base = ["etcdctl", "--endpoints", self._clients]
        found = subprocess.run(
            [*base, "endpoint", "status", "-w", "json"],
            check=True, capture_output=True, env=env, timeout=30,
        )  # fmt: skip
        revision = json.loads(found.stdout)[0]["Status"]["header"]["revision"]
        subprocess.run(
            [*base, "compact", str(revision)], check=True, capture_output=True, env=env, timeout=30
        )

    # --- what tests make

    def namespace(self, name: str) -> str:
        """Make a namespace."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.do("POST", "/api/v1/namespaces", body)
        return name

    def allow(self, *verbs: str, namespace: str = "", resource: str = "pods") -> None:
        """Let the router do *verbs*; in all namespaces when none is given."""
        kind = "Role" if namespace else "ClusterRole"
        group = "rbac.authorization.k8s.io"
        base = f"/apis/{group}/v1" + (f"/namespaces/{namespace}" if namespace else "")
        name = f"router-{resource}"
        role = {
            "apiVersion": f"{group}/v1",
            "kind": kind,
            "metadata": {"name": name},
            "rules": [{"apiGroups": [""], "resources": [resource], "verbs": list(verbs)}],
        }
        binding = {
            "apiVersion": f"{group}/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": kind, "name": name},
            "subjects": [{"kind": "User", "apiGroup": group, "name": "router"}],
        }
        self.do("POST", f"{base}/{kind.lower()}s", role)
        self.do("POST", f"{base}/{kind.lower()}bindings", binding)

    def forbid(self, *, namespace: str = "", resource: str = "pods") -> None:
        """Take back what ``allow`` gave."""
        kind = "rolebindings" if namespace else "clusterrolebindings"
        scope = f"/namespaces/{namespace}" if namespace else ""
        base = f"/apis/rbac.authorization.k8s.io/v1{scope}"
        self.do("DELETE", f"{base}/{kind}/router-{resource}")
        self.do("DELETE", f"{base}/{kind.removesuffix('bindings')}s/router-{resource}")

    def add_pod(
        self,
        namespace: str,
        name: str,
        ip: str = "",
        *,
        ready: bool = True,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        node: str = "",
    ) -> Pod:
        """Make a Pod; with *ip* it runs there, and is *ready* or not."""
        pod = Pod(self, namespace, name)
        spec: dict[str, Any] = {"containers": [{"name": "vllm", "image": "vllm"}]}
        if node:
            spec["nodeName"] = node
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {"app": "vllm"} if labels is None else labels,
                "annotations": annotations or {},
            },
            "spec": spec,
        }
        self.do("POST", f"/api/v1/namespaces/{namespace}/pods", body)
        if ip:
            pod.set(ip=ip, ready=ready)
        return pod

    def add_node(self, name: str, zone: str) -> None:
        """Make a node in *zone*."""
        labels = {"topology.kubernetes.io/zone": zone}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        self.do("POST", "/api/v1/nodes", body)


class Pod:
    """One Pod of a test."""

    def __init__(self, server: ApiServer, namespace: str, name: str) -> None:
        self._server = server
        self.path = f"/api/v1/namespaces/{namespace}/pods/{name}"

    def set(self, *, ip: str | None = None, ready: bool = True, phase: str = "Running") -> None:
        """Say what became of it, as its kubelet would."""
        conditions = [{"type": "Ready", "status": str(ready)}]
        status: dict[str, Any] = {"phase": phase, "conditions": conditions}
        if ip is not None:
            status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
        self._patch(f"{self.path}/status", {"status": status})

    def describe(
        self,
        *,
        labels: dict[str, str | None] | None = None,
        annotations: dict[str, str | None] | None = None,
    ) -> None:
        """Change its labels and annotations; None takes one away."""
        metadata = {"labels": labels or {}, "annotations": annotations or {}}
        self._patch(self.path, {"metadata": metadata})

    def _patch(self, path: str, body: Any) -> None:
        self._server.do("PATCH", path, body, kind="application/merge-patch+json")

    def delete(self, grace_s: int = 0) -> None:
        """Delete it; with a time of grace it is there until it is deleted without one."""
        body = {"gracePeriodSeconds": grace_s}
        self._server.do("DELETE", self.path, body)


@contextlib.contextmanager
def api_server(directory: Path) -> Iterator[ApiServer]:
    """Run an API server."""
    server = ApiServer(directory)
    try:
        yield server
    finally:
        server.end()
