"""``check`` and ``envoy-config``: configurations without starting anything."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from pathlib import Path

from extproc.address import Address, WorkerUrl, is_ip, join_host_port
from extproc.config import Config
from extproc.envoy_binary import find_envoy
from extproc.errors import ConfigError
from extproc.main import DEFAULT_POOL, envoy_model
from extproc.xds.bootstrap import build_bootstrap, to_yaml
from extproc.xds.model import PoolModel
from extproc.xds.standalone import build_standalone

VALIDATE_TIMEOUT_S = 60.0


def render_envoy_config(config: Config, *, static: bool, envoy_admin: str) -> str:
    """Return the YAML for an Envoy of the user's own."""
    grpc = Address.parse(config.grpc_address)
    try:
        admin = Address.parse(envoy_admin)
    except ValueError as error:
        raise ConfigError(f"--envoy-admin-address: {error}") from error
    if not static:
        return to_yaml(build_bootstrap(grpc, admin))
    endpoints = tuple(_resolve(worker) for worker in config.workers())
    model = envoy_model(config, (PoolModel(DEFAULT_POOL, endpoints),))
    return to_yaml(build_standalone(model, grpc, admin))


def check(config: Config) -> None:
    """Say whether *config* and the Envoy configuration made of it are valid; raise if not."""
    unresolved = []
    endpoints = []
    for worker in config.workers():
        try:
            endpoints.append(_resolve(worker))
        except ConfigError as error:
            unresolved.append(str(error))
    model = envoy_model(config, (PoolModel(DEFAULT_POOL, tuple(endpoints)),))
    text = to_yaml(
        build_standalone(model, Address.parse(config.grpc_address), Address("127.0.0.1", 9901))
    )
    print("configuration: valid")
    for warning in unresolved:
        print(f"warning: {warning}; it is tried again while the router runs")
    if not config.worker_urls:
        print("warning: no worker_urls; every request will be answered with 503")
    try:
        binary = find_envoy(config.envoy_path)
    except ConfigError as error:
        print(f"Envoy configuration: not checked ({error})")
        return
    _validate(binary, text)
    print(f"Envoy configuration: valid ({binary.name} --mode validate)")


def _validate(binary: Path, text: str) -> None:
    with tempfile.TemporaryDirectory(prefix="vllm-extproc-") as directory:
        path = Path(directory) / "envoy.yaml"
        path.write_text(text)
        done = subprocess.run(
            [str(binary), "--mode", "validate", "--log-level", "error", "-c", str(path)],
            capture_output=True,
            text=True,
            timeout=VALIDATE_TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        raise ConfigError(f"Envoy refuses the configuration: {done.stderr.strip()}")


def _resolve(worker: WorkerUrl) -> str:
    if is_ip(worker.host):
        return join_host_port(worker.host, worker.port)
    try:
        found = socket.getaddrinfo(worker.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"worker name {worker.host!r} cannot be resolved: {error}") from error
    address = min(found, key=lambda info: info[0] != socket.AF_INET)[4][0]
    return join_host_port(str(address), worker.port)
