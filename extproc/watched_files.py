"""Notices when the content of files changes: keys, certificates, the configuration.

Looking now and then is enough: notifications miss what happens on another machine, and Kubernetes swaps
files by symbolic links. The content itself is compared, not the time stamps, so these files are small. A
change counts when two looks shortly after one another find the same: a file that is being written is not
taken for a shorter one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

INTERVAL_S = 1.0
SETTLE_S = 0.1
"""Between two looks that must find the same. Editors and shells write a file within milliseconds."""

MAX_FILE_BYTES = 64 * 2**20
"""What is beyond is not looked at."""


async def watch_files(
    paths: Callable[[], Iterable[str]],
    on_change: Callable[[], None],
    *,
    interval_s: float = INTERVAL_S,
) -> None:
    """Call *on_change* whenever the files that *paths* names at that time hold something else; never return.

    What they held at the call of this function is known to the caller. A file that comes or goes has
    changed, and so have the files when others are named.
    """
    known = last = await asyncio.to_thread(look, tuple(paths()))
    while True:
        await asyncio.sleep(interval_s if last == known else min(SETTLE_S, interval_s))
        found = await asyncio.to_thread(look, tuple(paths()))
        if found == last != known:
            known = found
            on_change()
        last = found


def look(paths: tuple[str, ...]) -> dict[str, bytes]:
    """Return a digest of each file's content, empty for one that cannot be read."""
    return {path: _digest(path) for path in paths}


def _digest(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return hashlib.sha256(file.read(MAX_FILE_BYTES)).digest()
    except OSError:
        return b""
