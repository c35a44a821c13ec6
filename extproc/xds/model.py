"""The input of all builders: everything that the generated Envoy configuration depends on."""

from __future__ import annotations

import dataclasses

from extproc.address import Address

ADMIN_CLUSTER = "extproc_admin"
"""Envoy's cluster for this service's HTTP endpoints."""

UNROUTED_CLUSTER = "unrouted"
"""A cluster without endpoints: where requests end that carry no pick when failing closed."""

CREDENTIAL_HEADERS = ("authorization", "cookie", "proxy-authorization", "x-api-key", "api-key")
"""No pick depends on them, so Envoy does not show them to the service."""

LISTENER_NAME = "ingress"
ROUTES_NAME = "ingress"


@dataclasses.dataclass(frozen=True, slots=True)
class PoolModel:
    """One pool of workers: an Envoy cluster."""

    name: str
    endpoints: tuple[str, ...]
    """``ip:port`` each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyModel:
    """The whole data plane."""

    host: str
    port: int
    admin_address: Address
    pools: tuple[PoolModel, ...]
    """The first is the default pool, which serves while the service is away."""

    max_payload_bytes: int
    idle_timeout_s: float
    decision_timeout_s: float
    fail_closed: bool = False
    full_duplex: bool = False
