"""Registries with workers, as discovery, Envoy and the workers themselves would make them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from extproc.address import WorkerUrl
from extproc.discovery.updates import Reset, WorkerSpec
from extproc.models import ModelList
from extproc.registry import Registry, Settings
from policies.base import Policy
from tests.extproc.recorder import Recorder

STATIC = "static"


def spec_of(url: str, **options: Any) -> WorkerSpec:
    """Return the description of the worker at *url*."""
    return WorkerSpec(WorkerUrl.parse(url), **options)


def registry_of(
    *workers: str | WorkerSpec, policy: Policy | None = None, **settings: Any
) -> Registry:
    """Return a registry of *workers*, all healthy unless *settings* say otherwise.

    Every pool has *policy*, a ``Recorder`` without one.
    """
    chosen = policy or Recorder()
    settings = {"follows_envoy": False, "asks_models": False, **settings}
    registry = Registry(lambda: chosen, Settings(**settings))
    reset(registry, *workers)
    return registry


def at_endpoints(*endpoints: str, policy: Policy | None = None, **settings: Any) -> Registry:
    """Return a registry of workers at *endpoints*, each under a name of its own.

    Two may be at one endpoint.
    """
    registry = registry_of(policy=policy, **settings)
    named = [f"http://worker-{n}:{e.rpartition(':')[2]}" for n, e in enumerate(endpoints, start=1)]
    for url, endpoint in zip(named, endpoints, strict=True):
        address = endpoint.rpartition(":")[0].strip("[]")
        registry.on_address(WorkerUrl.parse(url).host, address)
    reset(registry, *named)
    return registry


def reset(registry: Registry, *workers: str | WorkerSpec) -> None:
    """Let *workers* be all there are, on behalf of the command line."""
    specs = tuple(spec_of(w) if isinstance(w, str) else w for w in workers)
    registry.apply(STATIC, Reset(specs), 0.0)
    registry.commit(0.0)


def remove(registry: Registry, key: str) -> None:
    """Remove a worker, as an administrator does."""
    assert registry.remove(key, 0.0)
    registry.commit(0.0)


def say(
    registry: Registry, key: str, base: str | Iterable[str] = (), adapters: Iterable[str] = ()
) -> None:
    """Let the worker *key* name its models; no base model: it would not say."""
    names = frozenset([base] if isinstance(base, str) else base)
    engine = registry.get(key)
    assert engine is not None
    models = ModelList(names, frozenset(adapters)) if names else None
    registry.on_models(engine, models)
    registry.commit(0.0)


def lines_of(*passing: tuple[str, str]) -> Iterable[bytes]:
    """Return the lines of Envoy's log of health checks that say that *passing* (cluster, endpoint) pass."""
    for cluster, endpoint in passing:
        host, _, port = endpoint.rpartition(":")
        yield (
            f'{{"cluster_name": "{cluster}", "add_healthy_event": {{"first_check": true}},'
            f' "host": {{"socket_address": {{"address": "{host}", "port_value": {port}}}}}}}'
        ).encode()


def urls(count: int, port: int = 8000) -> list[str]:
    """Return the URLs of *count* workers on hosts of their own."""
    numbers = itertools.islice(itertools.count(1), count)
    return [f"http://10.0.{n >> 8}.{n & 255}:{port}" for n in numbers]
