"""The signals that end a program, or prepare its end."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType

STEP_DOWN = signal.SIGUSR1
"""Tells the service that the router is going to stop: it calls itself not ready, and serves on."""


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set *stop* at each SIGTERM and SIGINT, until the end of the process.

    Not ``loop.add_signal_handler``: the loop takes its handlers away when it closes, and a second signal
    in that last moment would kill the process.
    """
    loop = asyncio.get_running_loop()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
