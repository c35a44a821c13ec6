"""The faults of a running worker: they can change at any time and act on streams already open."""

import asyncio
import random
from collections.abc import Callable

from extproc.sim.exchange import Exchange
from extproc.sim.faults import FaultPlan, Faults, Verdict


class FaultSwitch:
    """Holds the faults in force and wakes what they hold up when they change."""

    def __init__(self, faults: Faults, *, seed: int, set_slowdown: Callable[[float], None]) -> None:
        self._plan = FaultPlan(faults, random.Random(seed))
        self._set_slowdown = set_slowdown
        set_slowdown(faults.slowdown)
        self._changed = asyncio.Event()

    @property
    def faults(self) -> Faults:
        """The faults in force."""
        return self._plan.faults

    def set(self, faults: Faults) -> None:
        """Put *faults* in force; stalled streams go on if these do not stall them."""
        self._plan.replace(faults)
        self._set_slowdown(faults.slowdown)
        self._changed.set()
        self._changed = asyncio.Event()

    def judge(self) -> Verdict:
        """Count one inference request and say what happens to it."""
        return self._plan.judge()

    async def hold_health(self) -> None:
        """Wait until a change of faults lets ``/health`` answer."""
        while self.faults.health_hang:
            await self._changed.wait()

    def spoils_stream(self, sent: int) -> bool:
        """Return whether a stream that has sent *sent* tokens may not go on."""
        faults = self.faults
        return (faults.stall_after is not None and sent >= faults.stall_after) or (
            faults.reset_after is not None and sent >= faults.reset_after
        )

    async def spoil_stream(self, exchange: Exchange, sent: int) -> None:
        """Reset the connection, or wait until a change of faults lets the stream go on."""
        while self.spoils_stream(sent):
            reset_after = self.faults.reset_after
            if reset_after is not None and sent >= reset_after:
                exchange.reset_connection()
            await self._changed.wait()
