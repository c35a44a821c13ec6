"""The models of the golden cases: ``golden/<case>.in.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from extproc.address import Address
from extproc.clusters import ClusterView, EndpointView
from extproc.xds.model import (
    Access,
    ApiKey,
    ApiKeys,
    AskedTokens,
    Breaker,
    Certificates,
    ClientTls,
    EnvoyModel,
    HealthChecks,
    NobodyYet,
    Passwords,
    RateLimits,
    Retries,
    SignedTokens,
    WorkerTls,
)

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name.removesuffix(".in.yaml") for path in GOLDEN.glob("*.in.yaml"))


def read_model(case: str) -> EnvoyModel:
    """Return the model of *case*."""
    values: dict[str, Any] = yaml.safe_load((GOLDEN / f"{case}.in.yaml").read_text())
    values["admin_address"] = Address.parse(values["admin_address"])
    if "prefill_address" in values:
        values["prefill_address"] = Address.parse(values["prefill_address"])
    default, ranked = values.pop("default_pool", "default"), values.pop("ranks", False)
    values["clusters"] = tuple(
        _cluster(value, default=default, ranked=ranked) for value in values["clusters"]
    )
    if "request_id_headers" in values:
        values["request_id_headers"] = tuple(values["request_id_headers"])
    if "health" in values:
        values["health"] = HealthChecks(**values["health"])
    if "retries" in values:
        values["retries"] = Retries(**values["retries"])
    if "breaker" in values:
        values["breaker"] = Breaker(**values["breaker"])
    if "tls" in values:
        values["tls"] = WorkerTls(**values["tls"])
    if "rate_limits" in values:
        values["rate_limits"] = RateLimits(**values["rate_limits"])
    if "client_tls" in values:
        values["client_tls"] = ClientTls(**values["client_tls"])
        values["certificates"] = Certificates(**values["certificates"])
    if "access" in values:
        values["access"] = _access(values["access"])
    return EnvoyModel(**values)


def _access(value: dict[str, Any]) -> Access:
    auth: Any = None
    match value.pop("auth", None):
        case {"keys": keys}:
            auth = ApiKeys(tuple(ApiKey(client, key) for client, key in keys))
        case {"users": users}:
            auth = Passwords(users)
        case {"issuer": issuer, "jwks": jwks, "audiences": audiences}:
            auth = SignedTokens(issuer, jwks, tuple(audiences))
        case {"timeout_s": timeout_s}:
            auth = AskedTokens(timeout_s)
        case "nobody yet":
            auth = NobodyYet()
    if "cors_origins" in value:
        value["cors_origins"] = tuple(value["cors_origins"])
    return Access(auth, **value)


def _cluster(value: dict[str, Any], *, default: str, ranked: bool) -> ClusterView:
    name = value["name"]
    return ClusterView(
        name,
        value.get("path", ""),
        tuple(map(_endpoint, value["endpoints"])),
        is_default=name.partition("~")[0] == default,
        ranked=ranked,
    )


def _endpoint(value: str | dict[str, Any]) -> EndpointView:
    return EndpointView(value) if isinstance(value, str) else EndpointView(**value)
