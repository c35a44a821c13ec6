"""Workers named on the command line or in the configuration file: known once and for all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from extproc.discovery.updates import Reset, Update, WorkerSpec


async def watch(specs: Sequence[WorkerSpec]) -> AsyncIterator[Update]:
    """Yield one ``Reset`` with *specs*, in their order; of no workers, too."""
    yield Reset(tuple(specs))
