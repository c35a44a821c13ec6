"""The models of the golden cases: ``golden/<case>.in.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from extproc.address import Address
from extproc.xds.model import EnvoyModel, PoolModel

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name.removesuffix(".in.yaml") for path in GOLDEN.glob("*.in.yaml"))


def read_model(case: str) -> EnvoyModel:
    """Return the model of *case*."""
    values: dict[str, Any] = yaml.safe_load((GOLDEN / f"{case}.in.yaml").read_text())
    values["admin_address"] = Address.parse(values["admin_address"])
    values["pools"] = tuple(
        PoolModel(pool["name"], tuple(pool["endpoints"])) for pool in values["pools"]
    )
    return EnvoyModel(**values)
