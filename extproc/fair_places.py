"""Places for look-ups, of which no client address gets more than its share.

Who sends many unknown tokens so takes up its own share, and others find places free. Of an IPv6 address the
network counts (/64): who has one has all its addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
from collections.abc import AsyncIterator

SHARE = 4
"""One address gets a quarter."""

IPV6_NETWORK_BITS = 64


@dataclasses.dataclass(slots=True)
class _Holder:
    places: asyncio.Semaphore
    held: int = 0
    """Look-ups that have a place or wait for one."""


class FairPlaces:
    """*at_once* places, and *in_all* look-ups that have one or wait for one."""

    def __init__(self, at_once: int, in_all: int) -> None:
        """Give each address a quarter of both."""
        self._places = asyncio.Semaphore(at_once)
        self._each_at_once = at_once // SHARE
        self._each_in_all = in_all // SHARE
        self._in_all = in_all
        self._held = 0
        self._holders: dict[str, _Holder] = {}

    def enter(self, holder: str) -> bool:
        """Let one more look-up of *holder* wait for a place; tell whether there was room. ``leave`` ends it."""
        entry = self._holders.get(holder) or _Holder(asyncio.Semaphore(self._each_at_once))
        if self._held >= self._in_all or entry.held >= self._each_in_all:
            return False
        entry.held += 1
        self._held += 1
        self._holders[holder] = entry
        return True

    def leave(self, holder: str) -> None:
        """Give back what ``enter`` took."""
        entry = self._holders[holder]
        entry.held -= 1
        self._held -= 1
        if not entry.held:
            del self._holders[holder]

    @contextlib.asynccontextmanager
    async def place(self, holder: str) -> AsyncIterator[None]:
        """Wait for a place and have it meanwhile. *holder* has entered."""
        async with self._holders[holder].places, self._places:
            yield


def holder_of(address: str) -> str:
    """Return to whom an IP address counts."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed), IPV6_NETWORK_BITS), strict=False))
