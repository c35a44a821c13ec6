"""Where workers were last, across a restart of the service.

A small file beside the service's own socket; in ``launch`` it goes with the router, and in a Pod with the
Pod. Losing it costs nothing but the protection that it gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from extproc.address import Address
from policies.base import Worker


class LastKnown:
    """Endpoints by worker URL, kept in a file when there is a place for one."""

    def __init__(self, socket: Address) -> None:
        self._path = Path(f"{socket.path}.workers") if socket.path else None

    def load(self) -> Mapping[str, str]:
        """Return what was saved; nothing when that cannot be read."""
        if self._path is None:
            return {}
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError):
            return {}

    def save(self, workers: Iterable[Worker]) -> None:
        """Remember where *workers* are. ``OSError`` when that is not possible."""
        if self._path is not None:
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode({w.url: w.endpoint for w in workers}))
            fresh.replace(self._path)
