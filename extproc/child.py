"""Child processes that never outlive their parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """One running program."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], *, quiet: bool = False) -> Child:
        """Start *command* in a process group of its own, so that Ctrl-C reaches the parent alone.

        *quiet* drops its standard output; standard error is always the parent's.
        """
        parent = os.getpid()

        def prepare() -> None:
            # A child that has just started has no handler yet for what the parent may tell it.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            die_with_parent()

        def die_with_parent() -> None:
            # Without a supervisor a router would serve on, with nobody to stop it. Linux only;
            # elsewhere a killed launcher leaves its children behind.
            if hasattr(_libc, "prctl"):
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != parent:
                    os._exit(1)

        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL if quiet else None,
            preexec_fn=prepare,
            process_group=0,
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end; return the exit status, negative for a signal."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; one that has ended gets none."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end; after *timeout_s* seconds make it."""
        if not self.running:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
