"""Follows what Envoy thinks of the workers: its event logs, line by line, and its admin endpoint now and then.

The logs tell within a few hundredths of a second. The admin endpoint repairs what a lost line, a service
that was away or an Envoy that was started again leaves behind.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from extproc.envoy_admin import EnvoyAdmin
from extproc.log import cap
from extproc.verdicts import Key, Verdicts

POLL_S = 0.03
RECONCILE_S = 2.0
FIRST_RECONCILE_LIMIT_S = 2.0
MAX_LOG_BYTES = 4 * 2**20
"""A log that has grown this long and is read to its end is emptied."""

READ_BYTES = 2**20

log = structlog.get_logger(__name__)


class EventLog:
    """One growing file of lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._rest = b""
        self._complained = False

    def read(self) -> list[bytes]:
        """Return the lines that have come since the last call; none when there is no file (yet)."""
        try:
            status = self._path.stat()
        except OSError:
            return []
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset, self._rest = status.st_ino, 0, b""
        if status.st_size == self._offset:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError as error:
            self._complain("event log of envoy cannot be read", error)
            return []
        self._offset += len(data)
        if self._offset >= MAX_LOG_BYTES:
            self._empty()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line.strip()]

    def _empty(self) -> None:
        """Start the file anew if all of it is read. Envoy appends: it goes on at the beginning."""
        try:
            with self._path.open("r+b") as file:
                if os.fstat(file.fileno()).st_size == self._offset:
                    file.truncate(0)
                    self._offset = 0
        except OSError as error:  # Envoy may run as another user
            self._complain("event log of envoy cannot be emptied", error)

    def _complain(self, event: str, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            log.warning(event, path=str(self._path), reason=str(error))


class EnvoyEvents:
    """Keeps the verdicts up to date."""

    def __init__(
        self,
        verdicts: Verdicts,
        admin: EnvoyAdmin,
        logs: list[Path],
        on_changed: Callable[[list[Key]], None],
    ) -> None:
        """Follow the event *logs* and *admin*; *on_changed* is told whose verdicts changed.

        After ``catch_up`` it is told of nobody: what Envoy thought before is no news, and no worker has
        come back.
        """
        self._verdicts = verdicts
        self._admin = admin
        self._logs = [EventLog(path) for path in logs]
        self._on_changed = on_changed
        self._catching_up = False

    async def catch_up(self) -> None:
        """Learn what an Envoy that is running already thinks; return at once when there is none."""
        self._catching_up = True
        while self.read_logs():  # to the end: what Envoy says next is newer than all of it
            pass
        try:
            async with asyncio.timeout(FIRST_RECONCILE_LIMIT_S):
                await self.reconcile(starting=True)
        except TimeoutError:
            log.warning("envoy does not say what it thinks of the workers")
        self._catching_up = False
        self._on_changed([])

    async def run(self) -> None:
        """Follow for ever. The logs are read while Envoy is being asked, too."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reconcile_again_and_again())
            while True:
                self.read_logs()
                await asyncio.sleep(POLL_S)

    async def _reconcile_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(RECONCILE_S)
            await self.reconcile()

    def read_logs(self) -> bool:
        """Take in what the logs have gained; tell whether that was anything."""
        changed: list[Key] = []
        gained = False
        for event_log in self._logs:
            for line in event_log.read():
                gained = True
                try:
                    key = self._verdicts.on_line(line)
                except ValueError as error:
                    log.warning("line of envoy's event log skipped", reason=cap(str(error)))
                    continue
                if key is not None:
                    changed.append(key)
        self._tell(changed)
        return gained

    async def reconcile(self, *, starting: bool = False) -> None:
        """Ask Envoy; what it says replaces what was known, but for events read since it was asked."""
        self._verdicts.begin_reconciliation()
        answer = await self._admin.clusters()
        if answer is None:
            return
        self.read_logs()
        try:
            changed = self._verdicts.reconcile(answer, starting=starting)
        except ValueError as error:
            log.warning("envoy's list of clusters cannot be read", reason=cap(str(error)))
            return
        self._tell(changed)

    def _tell(self, changed: list[Key]) -> None:
        if changed and not self._catching_up:
            self._on_changed(changed)
