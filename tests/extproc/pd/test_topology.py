"""Which workers may be paired."""

from __future__ import annotations

import pytest

from extproc.pd.topology import Topology, in_zone, with_partners

ZONES = {"a1": "a", "a2": "a", "b1": "b", "x": ""}


@pytest.mark.parametrize(
    ("topology", "zone", "kept"),
    [
        (Topology.IGNORE, "a", ["b1", "a1", "x", "a2"]),
        (Topology.PREFER, "a", ["a1", "a2"]),
        (Topology.PREFER, "c", ["b1", "a1", "x", "a2"]),
        (Topology.PREFER, "", ["b1", "a1", "x", "a2"]),
        (Topology.REQUIRE, "a", ["a1", "a2"]),
        (Topology.REQUIRE, "c", []),
        (Topology.REQUIRE, "", []),
    ],
)
def test_workers_in_the_zone(topology, zone, kept):
    """In their order; a worker without a zone is in none."""
    assert in_zone(["b1", "a1", "x", "a2"], ZONES.__getitem__, zone, topology) == kept


@pytest.mark.parametrize(
    ("topology", "partners", "kept"),
    [
        (Topology.IGNORE, ["a2"], ["b1", "a1", "x"]),
        (Topology.PREFER, ["a2"], ["a1"]),
        (Topology.PREFER, ["x"], ["b1", "a1", "x"]),
        (Topology.PREFER, [], ["b1", "a1", "x"]),
        (Topology.REQUIRE, ["a2", "x"], ["a1"]),
        (Topology.REQUIRE, ["x"], []),
    ],
)
def test_workers_with_a_partner_in_their_zone(topology, partners, kept):
    """The first pick leaves out those that the second could not be near to."""
    assert with_partners(["b1", "a1", "x"], partners, ZONES.__getitem__, topology) == kept
