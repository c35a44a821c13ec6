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

CLIENT_HEADER = "x-router-client"
"""Who the client is, as Envoy has found out. Clients cannot send it themselves."""

CREDENTIAL_HEADERS = ("authorization", "cookie", "proxy-authorization", "x-api-key", "api-key")
"""No pick depends on them, so Envoy does not show them to the service."""

SHOWN_CREDENTIALS = frozenset({"authorization"})
"""What of it the service must have where requests are split: both workers get it."""

REQUESTS_LOG = "vllm-extproc"
"""Name of the access log of finished requests."""

ATTEMPTS_LOG = "vllm-extproc-attempts"
"""Name of the access log of attempts that failed."""

LEGS_LOG = "vllm-extproc-legs"
"""Name of the access log of prefill legs."""

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
PREFILL_LISTENER_NAME = "prefill"
PREFILL_ROUTES_NAME = "prefill"


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


@dataclasses.dataclass(frozen=True, slots=True)
class Retries:
    """How failures are tried elsewhere."""

    count: int = 5
    """Attempts after the first; 0: none."""

    initial_backoff_s: float = 0.05
    max_backoff_s: float = 30.0
    budget_ratio: float = 0.2
    """Retries under way relative to requests under way, at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Breaker:
    """When Envoy ejects a worker for its answers."""

    failures: int = 10
    """In a row; 0: never."""

    open_s: float = 60.0
    count_429: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RateLimits:
    """How many requests come in; 0: as many as want to."""

    per_second: float = 0.0
    per_key: float = 0.0
    burst: int = 0
    """Requests at once; 0: what a tenth of a second allows."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientTls:
    """How clients are served over HTTPS."""

    cert_file: str
    key_file: str
    client_ca_file: str = ""
    """Certificates that vouch for clients, who must then show one; empty: they need not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Certificates:
    """What the files of ``ClientTls`` hold, in PEM. Nothing shows it."""

    cert: str = dataclasses.field(repr=False)
    key: str = dataclasses.field(repr=False)
    client_ca: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """The key of one client."""

    client: str
    key: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKeys:
    """Clients show a key."""

    keys: tuple[ApiKey, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Passwords:
    """Clients show a user's name and password."""

    users: str = dataclasses.field(repr=False)
    """NAME:{SHA}HASH in each line."""


@dataclasses.dataclass(frozen=True, slots=True)
class SignedTokens:
    """Clients show a token (JWT) that an issuer has signed."""

    issuer: str
    jwks: str = dataclasses.field(repr=False)
    """The issuer's public keys, as JSON."""

    audiences: tuple[str, ...] = ()
    """A token must name one; none: it need not."""


@dataclasses.dataclass(frozen=True, slots=True)
class AskedTokens:
    """Clients show a token, and this service finds out whether it is good."""

    timeout_s: float
    """For its answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class NobodyYet:
    """What clients must show is not known yet: all get 503."""


ClientAuth = ApiKeys | Passwords | SignedTokens | AskedTokens | NobodyYet | None
"""How clients prove who they are; None: they need not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Who gets in, and what is shown to workers and browsers. No listener depends on it."""

    auth: ClientAuth = None
    keep_authorization: bool = False
    """Whether workers get the client's credentials although they were checked here, or though there is a
    key for workers."""

    worker_api_key: str = dataclasses.field(default="", repr=False)
    """What workers are shown as a bearer token; empty: nothing."""

    cors_origins: tuple[str, ...] = ()
    """Origins of pages that browsers let use the router; ``*``: all."""


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

    stream_idle_timeout_s: float = 0.0
    """How long a worker may be silent in one attempt; 0: no limit of its own."""

    retries: Retries = Retries()
    breaker: Breaker = Breaker()
    rate_limits: RateLimits = RateLimits()
    access: Access = Access()
    request_id_headers: tuple[str, ...] = ("x-request-id",)
    """Lower case; the first that a client sent holds the request's id."""

    slow_start_s: float = 0.0
    client_tls: ClientTls | None = None
    """None: clients are served over plain HTTP."""

    certificates: Certificates | None = None
    """What SDS hands out for ``client_tls``."""

    prefill_address: Address | None = None
    """Where this service sends prefill legs; None: requests are not split."""

    events_dir: str = ""
    """Where Envoy logs what it finds of workers; empty: nowhere."""

    @property
    def default_clusters(self) -> tuple[ClusterView, ...]:
        """Where requests go without a pick: the clusters of the first pool, one for each base path."""
        found = tuple(cluster for cluster in self.clusters if cluster.is_default)
        return found or self.clusters[:1]
