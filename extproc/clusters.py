"""Envoy's clusters of workers, as values: which endpoints are in which."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection

from extproc.address import is_ip
from extproc.engine import Engine

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
MAX_POOL_NAME_CHARS = 80
LINGER_S = 30.0

RESERVED_NAMES = frozenset({"extproc", "extproc_admin", "unrouted"})
"""Envoy clusters that are no pools."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointView:
    """An endpoint as Envoy must know it."""

    endpoint: str
    """``ip:port``."""

    name: str = ""
    """Host name or, for TLS, the name that its certificate carries; empty for a plain address."""

    tls: bool = False
    draining: bool = False

    @property
    def name_is_ip(self) -> bool:
        """Whether ``name`` is an address, which is nothing to ask a server for."""
        return is_ip(self.name)


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterView:
    """An Envoy cluster: the endpoints of one pool under one base path."""

    name: str
    path: str
    endpoints: tuple[EndpointView, ...]
    is_default: bool = False
    """Whether requests go there that carry no pick."""

    ranked: bool = False
    """Whether workers may be data-parallel ranks, which a request names in a header."""


class Lingering:
    """Clusters that no worker needs any more: requests under way may still be retried there."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[ClusterView, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def extend(
        self, views: tuple[ClusterView, ...], before: tuple[ClusterView, ...], now: float
    ) -> tuple[ClusterView, ...]:
        """Return *views* and the clusters of *before* that have gone a short while ago."""
        names = {view.name for view in views}
        for view in before:
            if view.name not in names:
                gone = dataclasses.replace(view, is_default=False)
                self._until.setdefault(view.name, (gone, now + LINGER_S))
        for name in [n for n, (_, until) in self._until.items() if n in names or until <= now]:
            del self._until[name]
        return views + tuple(view for view, _ in self._until.values())


def cluster_name(pool: str, path: str) -> str:
    """Return the name of the Envoy cluster for the workers of *pool* under the base path *path*."""
    return f"{pool}~{path.strip('/')}" if path else pool


def pool_name(model: str, taken: Collection[str]) -> str:
    """Return a name for the pool of *model* that is none of *taken*."""
    name = _NOT_IN_A_NAME.sub("_", model)[:MAX_POOL_NAME_CHARS]
    if name == model and name not in taken:
        return name
    digest = hashlib.sha256(model.encode()).hexdigest()
    return next(
        candidate
        for length in range(6, len(digest))
        if (candidate := f"{name}-{digest[:length]}") not in taken
    )


def view_endpoint(engine: Engine, *, tls_server_name: str, tls_insecure: bool) -> EndpointView:
    """Return the endpoint of *engine*."""
    spec = engine.spec
    tls = spec.url.scheme == "https"
    name = spec.url.host if spec.url.is_named else ""
    if tls:
        name = spec.tls_name or tls_server_name or spec.url.host
        if tls_insecure and is_ip(name):
            name = ""
    return EndpointView(engine.endpoint, name, tls, engine.draining)
