"""What Envoy is told. Pure builders turn ``model.EnvoyModel`` into resources; ``ads`` serves them.

``envoy_data_plane`` declares its messages as pydantic dataclasses. Making the validators of seven hundred classes takes
a second of CPU at every start, and they check what mypy has checked. betterproto2 works with plain dataclasses as
well, and whatever imports this package first gets those (ADR 22).
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pydantic.dataclasses

_MESSAGES = "envoy_data_plane."
_validated = pydantic.dataclasses.dataclass


def _dataclass(*arguments: Any, **options: Any) -> Any:
    module = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001  who asks
    if not module.startswith(_MESSAGES):
        return _validated(*arguments, **options)
    options.pop("config", None)
    return dataclasses.dataclass(*arguments, **options)


pydantic.dataclasses.dataclass = _dataclass
