"""Reads the configuration again on SIGHUP and when its file changes.

A configuration that cannot be used changes nothing: it is refused whole, the log says where the fault is,
and the running one stays.

SIGHUP has an older meaning, too: the terminal is gone. Then the program ends, as it would have without us.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import structlog

from extproc.config import Config
from extproc.errors import ConfigError
from extproc.watched_files import watch_files

log = structlog.get_logger(__name__)


class Reloading:
    """Calls for the configuration anew and hands it on."""

    def __init__(
        self,
        load: Callable[[], Config],
        path: Path | None,
        apply: Callable[[Config], None],
    ) -> None:
        """Prepare.

        *load* reads the configuration as at the start; *path* is its file, None when there is none. *apply*
        takes what was read; it may raise ``ConfigError``, too, and must then have changed nothing.
        """
        self._load = load
        self._path = path
        self._apply = apply
        self._asked = asyncio.Event()
        self._on_terminal = has_terminal()

    async def run(self) -> None:
        """Follow for ever."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        self._asked.set()  # it may have changed since it was read
        async with asyncio.TaskGroup() as tasks:
            if self._path is not None:
                # A relative path is meant from where the program was started.
                path = str(self._path.absolute())
                tasks.create_task(watch_files(lambda: (path,), self._asked.set))
            while True:
                await self._asked.wait()
                self._asked.clear()
                self.reload()

    def _on_hangup(self) -> None:
        if self._on_terminal and not has_terminal():
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._asked.set()

    def reload(self) -> bool:
        """Read and apply; tell whether the configuration could be used."""
        try:
            self._apply(self._load())
        except ConfigError as error:
            log.error("configuration refused; the running one stays", reason=str(error))
            return False
        except Exception:
            # A disk that is full, a value that nobody thought of: no reason to end what runs.
            log.exception("configuration refused; the running one stays")
            return False
        return True


def has_terminal() -> bool:
    """Tell whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
