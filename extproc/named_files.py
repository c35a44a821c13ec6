"""Whether the files that a configuration names can be used."""

from __future__ import annotations

from pathlib import Path

from extproc.config import Config
from extproc.discovery import file
from extproc.worker_client import WorkerClient


def check_files(config: Config) -> None:
    """Raise ``ConfigError`` when a file that *config* names cannot be used."""
    if config.worker_file:
        file.load(Path(config.worker_file))
    if config.worker_ca_file:
        WorkerClient(ca_file=config.worker_ca_file)
