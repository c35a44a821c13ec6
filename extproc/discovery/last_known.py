"""What was known of workers, across a restart of the service.

Envoy may go on serving while the service is away: a service that comes back must not tell it of fewer
workers than it has, nor of other pools, and what an administrator has added must not be lost. A small
file beside the service's own socket, or Envoy's event logs; in ``launch`` it goes with the router.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from extproc.engine import Memory


class LastKnown:
    """The memory of an earlier run, kept in a file when there is a place for one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._saved = b""

    def load(self) -> Memory:
        """Return what was saved; nothing when that cannot be read."""
        if self._path is None:
            return Memory()
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Memory)
        except (OSError, msgspec.DecodeError):
            return Memory()

    def save(self, memory: Memory) -> None:
        """Remember *memory*. ``OSError`` when that is not possible."""
        if self._path is None:
            return
        data = msgspec.json.encode(memory)
        if data != self._saved:
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.replace(self._path)
            self._saved = data
