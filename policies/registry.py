"""Names of policies.

A policy is one module of this package with one registered class. ``load_builtin`` imports them all,
so adding a policy touches no other file; policies of other distributions come through the entry
point group ``vllm_extproc.policies`` (each entry names a module to import).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TypeVar

import policies
from policies.base import Policy

ENTRY_POINT_GROUP = "vllm_extproc.policies"
_CONTRACT = frozenset({"base", "registry"})
_registered: dict[str, type[Policy]] = {}

PolicyType = TypeVar("PolicyType", bound=type[Policy])


def register(name: str) -> Callable[[PolicyType], PolicyType]:
    """Make the class known as *name*. Stands above ``dataclass``, since slots create a new class."""

    def add(cls: PolicyType) -> PolicyType:
        if name in _registered and _registered[name].__qualname__ != cls.__qualname__:
            raise ValueError(f"policy {name!r} is registered twice")
        cls.name = name
        _registered[name] = cls
        return cls

    return add


def load_builtin() -> None:
    """Import every policy of this package and of installed plug-ins."""
    for module in pkgutil.iter_modules(policies.__path__):
        if module.name not in _CONTRACT:
            importlib.import_module(f"{policies.__name__}.{module.name}")
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        entry.load()


def registered() -> Mapping[str, type[Policy]]:
    """Return every known policy by name."""
    return MappingProxyType(_registered)


def policy_class(name: str) -> type[Policy]:
    """Return the class behind *name*; ``ValueError`` names the known ones."""
    try:
        return _registered[name]
    except KeyError:
        known = ", ".join(sorted(_registered))
        raise ValueError(f"policy {name!r} is not registered; known: {known}") from None
