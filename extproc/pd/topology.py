"""KV blocks are large: prefer, or require, that they stay within one zone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TypeVar

W = TypeVar("W")


class Topology(StrEnum):
    """How much the zones of a prefill and a decode worker matter."""

    IGNORE = "ignore"
    PREFER = "prefer"
    """Another zone only when no worker is in the same one."""

    REQUIRE = "require"
    """Never another zone. A worker without a zone is in none."""


def in_zone(
    workers: Sequence[W], zone_of: Callable[[W], str], zone: str, topology: Topology
) -> Sequence[W]:
    """Return those of *workers* that may be paired with a worker in *zone*, in their order.

    *zone_of* and *zone* are empty where the zone is not known. Only ``REQUIRE`` may leave none.
    """
    if topology is Topology.IGNORE:
        return workers
    same = [worker for worker in workers if zone and zone_of(worker) == zone]
    return same if same or topology is Topology.REQUIRE else workers


def with_partners(
    workers: Sequence[W],
    partners: Sequence[W],
    zone_of: Callable[[W], str],
    topology: Topology,
) -> Sequence[W]:
    """Return those of *workers* whose zone has one of *partners*: for the pick that comes first.

    All of them when none has, unless that is required.
    """
    if topology is Topology.IGNORE:
        return workers
    zones = {zone_of(partner) for partner in partners} - {""}
    paired = [worker for worker in workers if zone_of(worker) in zones]
    return paired if paired or topology is Topology.REQUIRE else workers
