"""``check`` and ``envoy-config``: configurations without starting anything."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from extproc.address import Address
from extproc.config import Config
from extproc.discovery import file
from extproc.discovery.updates import Reset
from extproc.envoy_binary import find_envoy
from extproc.envoy_settings import build_registry, envoy_model
from extproc.errors import ConfigError
from extproc.key_sources import read_auth
from extproc.named_files import check_certificates, check_files
from extproc.xds.bootstrap import build_bootstrap, to_yaml
from extproc.xds.model import ApiKeys, EnvoyModel, NobodyYet, Passwords
from extproc.xds.snapshot import build_snapshot
from extproc.xds.standalone import build_standalone

VALIDATE_TIMEOUT_S = 60.0
DEFAULT_ENVOY_ADMIN = "127.0.0.1:9901"


def render_envoy_config(config: Config, *, static: bool) -> str:
    """Return the YAML for an Envoy of the user's own."""
    grpc = Address.parse(config.grpc_address)
    admin = Address.parse(config.envoy_admin_address or DEFAULT_ENVOY_ADMIN)
    if not static:
        return to_yaml(build_bootstrap(grpc, admin, config.envoy_events_dir))
    model, problems = _model(config)
    if problems:
        raise ConfigError(problems[0])
    if isinstance(model.access.auth, NobodyYet):
        raise ConfigError(
            "jwt_jwks: --static needs the issuer's keys in a file: without the service nobody fetches them"
        )
    return to_yaml(build_standalone(model, grpc, admin))


def check(config: Config) -> None:
    """Say whether *config* and the Envoy configuration made of it are valid; raise if not."""
    model, problems = _model(config)
    grpc = Address.parse(config.grpc_address)
    text = to_yaml(build_standalone(model, grpc, Address.parse(DEFAULT_ENVOY_ADMIN)))
    print("configuration: valid")
    for problem in problems:
        print(f"warning: {problem}; it is tried again while the router runs")
    if config.service_discovery:
        _check_kubernetes(config)
    sources = problems or config.worker_dns or config.service_discovery
    if not model.clusters[0].endpoints and not sources:
        print("warning: no workers; every request will be answered with 503 until one is added")
    try:
        binary = find_envoy(config.envoy_path)
    except ConfigError as error:
        print(f"Envoy configuration: not checked ({error})")
        return
    _validate(binary, text, secrets_of(model))
    print(f"Envoy configuration: valid ({binary.name} --mode validate)")


def _check_kubernetes(config: Config) -> None:
    """Say how many Pods are workers. ``ConfigError`` when they may not be read."""
    from extproc.discovery import kubernetes  # noqa: PLC0415  few need it

    try:
        states = asyncio.run(kubernetes.look_once(config))
    except OSError as error:
        print(f"warning: {error}; it is tried again while the router runs")
        return
    found = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.items())
    print(f"Pods of the selectors: {found or 'none'}")


def secrets_of(model: EnvoyModel) -> list[str]:
    """Return what of *model* nobody may see, the longest first."""
    access = model.access
    found = [access.worker_api_key]
    match access.auth:
        case ApiKeys(keys):
            found += [key.key for key in keys]
        case Passwords(users):
            found += [line.partition(":")[2] for line in users.splitlines()]
        case _:
            pass
    return sorted(filter(None, found), key=len, reverse=True)


def check_buildable(config: Config) -> None:
    """Raise ``ConfigError`` when what Envoy must be told cannot even be written down."""
    registry = build_registry(config)
    registry.apply("static", Reset(config.specs()), 0)
    registry.commit(0)
    auth = read_auth(config)
    try:
        build_snapshot(envoy_model(config, registry.clusters, None, auth))
    except Exception as error:
        # Not its text: it may show a secret.
        raise ConfigError(f"an option cannot be told to Envoy: {type(error).__name__}") from error


def _model(config: Config) -> tuple[EnvoyModel, list[str]]:
    """Return the data plane of the workers that the configuration names, and what stands in the way."""
    registry = build_registry(config)
    registry.apply("static", Reset(config.specs()), 0)
    if config.worker_file:
        registry.apply("file", Reset(file.load(Path(config.worker_file))), 0)
    problems = []
    for host in sorted(registry.hosts()):
        try:
            registry.on_address(host, _resolve(host))
        except ConfigError as error:
            problems.append(str(error))
    registry.commit(0)
    check_files(config)
    check_certificates(config)
    auth = read_auth(config)
    return envoy_model(config, registry.clusters, auth=auth), problems


def _validate(binary: Path, text: str, secrets: Collection[str]) -> None:
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
        # Envoy may quote what it refuses, keys and all.
        words = done.stderr.strip()
        for secret in secrets:
            words = words.replace(secret, "***")
        raise ConfigError(f"Envoy refuses the configuration: {words}")


def _resolve(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"worker name {host!r} cannot be resolved: {error}") from error
    return str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])
