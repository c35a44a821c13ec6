"""Children of the launcher."""

from __future__ import annotations

import asyncio
import signal
import sys

from extproc.child import Child

PROGRAM = "import sys; sys.stdin.close(); import time; time.sleep(60)"


async def test_signal_before_there_is_a_handler_harms_nobody():
    """The launcher may tell the service to step down while that is still starting."""
    child = await Child.start("a", [sys.executable, "-c", PROGRAM], quiet=True)
    try:
        child.signal(signal.SIGUSR1)
        done, _ = await asyncio.wait([asyncio.ensure_future(child.wait())], timeout=0.2)

        assert not done
        assert child.running
    finally:
        await child.stop(5)
    assert await child.wait() == -signal.SIGTERM
