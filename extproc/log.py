"""Logging: one constant event per line plus keys; readable on a terminal, JSON elsewhere.

Prompts, bodies and credentials are never logged. Text from outside is capped with ``cap``.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import structlog

from extproc.errors import ConfigError

MAX_FOREIGN_CHARS = 256


def cap(text: str) -> str:
    """Shorten text that came from outside."""
    return text if len(text) <= MAX_FOREIGN_CHARS else f"{text[:MAX_FOREIGN_CHARS]}..."


def configure(level: str, directory: str, name: str) -> None:
    """Send log entries of *level* and above to standard error and, if set, to *directory*/*name*.log."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if directory:
        path = Path(directory)
        try:
            path.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(path / f"{name}.log"))
        except OSError as error:
            raise ConfigError(
                f"--log-dir: cannot write to {directory}: {error.strerror}"
            ) from error

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    for handler in handlers:
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=shared,
                processors=[
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    *_renderers(handler),
                ],
            )
        )
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)


def _renderers(handler: logging.Handler) -> list[structlog.typing.Processor]:
    on_terminal = type(handler) is logging.StreamHandler and sys.stderr.isatty()
    if on_terminal:
        # Not the pretty traceback: it prints local variables, message bytes and prompts among them.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
