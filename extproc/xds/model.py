"""The input of all builders: everything that the generated Envoy configuration depends on."""

from __future__ import annotations

import dataclasses

from extproc.address import Address
from extproc.clusters import ClusterView

ADMIN_CLUSTER = "extproc_admin"
"""Envoy's cluster for this service's HTTP endpoints."""

UNROUTED_CLUSTER = "unrouted"
"""A cluster without endpoints: where requests end that carry no pick when failing closed."""

PROBE_PATHS = ("/health", "/liveness", "/readiness")
"""Answered by Envoy itself while the service is away."""

CREDENTIAL_HEADERS = ("authorization", "cookie", "proxy-authorization", "x-api-key", "api-key")
"""No pick depends on them, so Envoy does not show them to the service."""

HEALTH_LOG = "health.jsonl"
"""Envoy's log of health checks, in the directory for events."""

SYSTEM_CA_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine, Arch, and Envoy's own images
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # macOS, FreeBSD
)
"""Where systems keep the certificates that they trust; Envoy must be given the file."""

LISTENER_NAME = "ingress"
ROUTES_NAME = "ingress"


@dataclasses.dataclass(frozen=True, slots=True)
class HealthChecks:
    """How Envoy checks the health of workers."""

    path: str = "/health"
    interval_s: float = 60.0
    unhealthy_interval_s: float = 5.0
    """Between two checks of a worker that is not healthy."""

    timeout_s: float = 5.0
    failures: int = 3
    successes: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerTls:
    """How Envoy trusts https workers."""

    ca_file: str = SYSTEM_CA_FILES[0]
    """Certificates that vouch for them; empty: there are none, and no https worker is trusted."""

    insecure: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyModel:
    """The whole data plane."""

    host: str
    port: int
    admin_address: Address
    clusters: tuple[ClusterView, ...]
    """The default ones serve while the service is away."""

    max_payload_bytes: int
    idle_timeout_s: float
    decision_timeout_s: float
    fail_closed: bool = False
    full_duplex: bool = False
    health: HealthChecks = HealthChecks()
    tls: WorkerTls = WorkerTls()
    try_unhealthy: bool = False
    """Whether to balance over unhealthy workers when no other is left."""

    events_dir: str = ""
    """Where Envoy logs what it finds of workers; empty: nowhere."""

    @property
    def default_clusters(self) -> tuple[ClusterView, ...]:
        """Where requests go without a pick: the clusters of the first pool, one for each base path."""
        found = tuple(cluster for cluster in self.clusters if cluster.is_default)
        return found or self.clusters[:1]
