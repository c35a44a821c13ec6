"""Workers from a file that is read again whenever it changes.

A file that cannot be used, because it is missing, broken or only half written, changes nothing: the last
good one stays in force. It is enough to look at the file now and then: notifications miss what happens on
another machine, and a Kubernetes ConfigMap is not written to but swapped by a symbolic link.

A change counts when two looks shortly after one another find the same, so that a file which is being
written in place is not taken for a shorter one. (Whoever writes beside it and renames is safer still.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from extproc.discovery.spec import parse_workers
from extproc.discovery.updates import Reset, Update, WorkerSpec
from extproc.errors import ConfigError

MAX_FILE_BYTES = 16 * 2**20
SETTLE_S = 0.1
"""Between two looks that must find the same. Editors and shells write a file within milliseconds."""

RECENT_S = 2.0
"""How long after a change the content is compared even if size and times are the same: the coarsest
time stamps, those of FAT, have steps of two seconds."""

# What PyYAML raises for malformed input, beside its own errors: `!!int ""`, `!!bool x`, `!!timestamp x`,
# a date that there is not, brackets nested a thousand deep.
_YAML_FAULTS = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError)


def load(path: Path) -> tuple[WorkerSpec, ...]:
    """Read the workers of a YAML or JSON file; ``ConfigError`` names the file and the reason."""
    return _parse(path, _read(path)[1])


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """What the file was at one time."""

    signature: tuple[int, ...]
    """What changes when it is written to or swapped; empty when there is no file."""

    digest: bytes
    workers: tuple[WorkerSpec, ...]
    reason: str
    """Why it cannot be used; empty when it can."""

    def same(self, other: _Look) -> bool:
        """Whether both found the same content, or no file for the same reason."""
        return (self.digest, self.reason) == (other.digest, other.reason)


async def watch(
    path: Path, *, report: Callable[[str], None], interval_s: float = 1.0
) -> AsyncIterator[Update]:
    """Yield a ``Reset`` with the workers of *path*, and another whenever it means something else.

    *report* is called once with each reason why the file cannot be used, and with an empty one when it can
    be used again. The order of the workers means nothing.
    """
    loop = asyncio.get_running_loop()
    told: frozenset[WorkerSpec] | None = None
    reported: set[str] = set()
    last: _Look | None = None
    looked_at = recent_until = loop.time()
    while True:
        # The content is compared once more after the time is over in which stamps may hide a change.
        trusted = last if looked_at >= recent_until else None
        looked_at = loop.time()
        look = await asyncio.to_thread(_look, path, last, trusted)
        if last is None or look.signature != last.signature:
            recent_until = loop.time() + RECENT_S
        settled = last is None or look.same(last)
        last = look
        if settled and look.reason:
            if look.reason not in reported:
                reported.add(look.reason)
                report(look.reason)
        elif settled:
            if reported:
                reported.clear()
                report("")
            workers = frozenset(look.workers)
            if workers != told:
                told = workers
                yield Reset(look.workers)
        await asyncio.sleep(interval_s if settled else min(SETTLE_S, interval_s))


def _look(path: Path, last: _Look | None, trusted: _Look | None) -> _Look:
    """Look at the file; neither read what *trusted* has seen nor parse again what *last* has parsed."""
    if trusted is not None and trusted.signature and trusted.signature == _stat(path):
        return trusted
    try:
        signature, content = _read(path)
    except ConfigError as error:
        return _Look((), b"", (), str(error))
    digest = hashlib.sha256(content).digest()
    if last is not None and last.digest == digest:
        return dataclasses.replace(last, signature=signature)
    try:
        return _Look(signature, digest, _parse(path, content), "")
    except ConfigError as error:
        return _Look(signature, digest, (), str(error))


def _stat(path: Path) -> tuple[int, ...]:
    try:
        return _signature(path.stat())
    except OSError:
        return ()


def _signature(status: os.stat_result) -> tuple[int, ...]:
    # ctime moves with every write, even where a tool puts mtime back
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _read(path: Path) -> tuple[tuple[int, ...], bytes]:
    """Return the signature of the file and its content, of the same moment as far as possible."""
    try:
        # Without waiting for the writer of a pipe, should it be one.
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"cannot read {path}: it is no regular file")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return _signature(status), content


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _parse(path: Path, content: bytes) -> tuple[WorkerSpec, ...]:
    if not content:
        raise ConfigError(f"{path} is empty; expected a list of workers, [] if there are none")
    value = _decode(path, content)
    try:
        return parse_workers(value)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _decode(path: Path, content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)  # a thousand times faster, and most generated files are
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_yaml_reason(error)}") from error
    except _YAML_FAULTS as error:
        raise ConfigError(f"{path} is not YAML: a value is malformed") from error


def _yaml_reason(error: yaml.YAMLError) -> str:
    """Return what is wrong and where, without the text around it: a URL in it may hold a password."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        what = ", ".join(filter(None, (error.context, error.problem)))
        return f"{what} (line {mark.line + 1}, column {mark.column + 1})"
    return "unexpected characters" if isinstance(error, yaml.reader.ReaderError) else "malformed"
