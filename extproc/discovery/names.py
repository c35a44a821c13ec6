"""Where workers are that were named by a host name: names are looked up, and looked up again.

A name with several addresses is one worker at one of them. It stays where it is as long as that address
is among the answers, since servers rotate them; a new one goes to the first IPv4 address or else to the
first IPv6 address: ``localhost`` often has both, and servers of this field listen on IPv4 unless told
otherwise. (A name of which each address is a worker is ``dns``.)

A name that fails keeps its last address: a resolver that is away takes no worker away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from extproc.address import is_ip
from extproc.discovery.dns import (
    MAX_LOOK_UPS,
    TIMEOUT_S,
    Reasons,
    Resolver,
    look_up,
    refused,
    resolve_all,
)

FIRST_TIMEOUT_S = 2.0
RETRY_UNRESOLVED_S = 2.0
REFRESH_RESOLVED_S = 30.0


class Names:
    """Follows host names, each in a task of its own: one that hangs delays no other.

    *on_address* is called with a host and its address when it is first known and whenever it is another;
    *report* with a host and a reason why it cannot be resolved, once each, and with an empty reason when it
    can be again.
    """

    def __init__(
        self,
        on_address: Callable[[str, str], None],
        report: Callable[[str, str], None],
        *,
        resolver: Resolver = resolve_all,
    ) -> None:
        self._on_address = on_address
        self._report = report
        self._resolver = resolver
        self._wanted: frozenset[str] = frozenset()
        self._dropped: set[str] = set()
        self._changed = asyncio.Event()
        self._turn = asyncio.Semaphore(MAX_LOOK_UPS)

    def want(self, hosts: Iterable[str]) -> None:
        """Follow *hosts* and no others; literal addresses among them are left out.

        A name that was dropped is forgotten, even when it is wanted again at once: its address is told anew.
        """
        wanted = frozenset(host for host in hosts if not is_ip(host))
        self._dropped |= self._wanted - wanted
        self._wanted = wanted
        self._changed.set()

    async def run(self) -> None:
        """Follow what is wanted until cancelled."""
        following: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                for host in following.keys() & self._dropped:
                    following.pop(host).cancel()
                self._dropped.clear()
                for host in sorted(self._wanted - following.keys()):
                    following[host] = tasks.create_task(self._follow(host))
                self._changed.clear()
                await self._changed.wait()

    async def _follow(self, host: str) -> None:
        reasons = Reasons(partial(self._report, host))
        told = ""
        timeout_s = FIRST_TIMEOUT_S
        while True:
            address, failed = told, list[str]()
            try:
                async with self._turn:  # the time counts from when it is asked
                    addresses = await look_up(self._resolver, host, timeout_s)
                address = _choose(addresses, told)
            except OSError as error:
                failed.append(str(error))
            if host in self._dropped:  # this task is about to be cancelled
                return
            reasons.tell(*failed)
            if address != told:
                told = address
                self._on_address(host, address)
            timeout_s = TIMEOUT_S
            await asyncio.sleep(REFRESH_RESOLVED_S if told else RETRY_UNRESOLVED_S)


def _choose(addresses: Sequence[str], told: str) -> str:
    """Return the address to use; ``OSError`` when there can be no worker at any."""
    unusable = refused(addresses)
    usable = [address for address in addresses if address not in unusable]
    if not usable:
        raise OSError(next(iter(unusable.values())))
    return told if told in usable else min(usable, key=lambda address: ":" in address)
