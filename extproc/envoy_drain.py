"""Ends an Envoy without cutting what is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from extproc.envoy_admin import EnvoyAdmin

POLL_S = 0.02


async def close_and_wait(admin: EnvoyAdmin, go_on: Callable[[], bool]) -> int | None:
    """Take no new connections and wait for the last request, as long as *go_on* says so.

    Return the requests that are still under way; None when Envoy does not tell.
    """
    # An Envoy that is busy may not answer at once; what it does not answer is not known, not zero.
    closed = False
    active: int | None = None
    while active != 0 or not closed:
        if not closed:
            closed = await admin.fail_health_check() and await admin.close_listeners()
        active = await admin.active_requests()
        if (active == 0 and closed) or not go_on():
            break
        await asyncio.sleep(POLL_S)
    return active
