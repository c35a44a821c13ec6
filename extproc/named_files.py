"""Whether the files that a configuration names can be used."""

from __future__ import annotations

from pathlib import Path

from extproc.certificates import load_certificates
from extproc.config import Config
from extproc.discovery import file
from extproc.envoy_settings import client_tls
from extproc.key_sources import read_auth
from extproc.worker_client import WorkerClient


def check_files(config: Config) -> None:
    """Raise ``ConfigError`` when a file that *config* names cannot be used."""
    if config.worker_file:
        file.load(Path(config.worker_file))
    if config.worker_ca_file:
        WorkerClient(ca_file=config.worker_ca_file)


def check_certificates(config: Config) -> None:
    """Raise ``ConfigError`` when clients cannot be served with the certificate that *config* names.

    For the start: while the router runs the files are followed for themselves, and one that is broken at a
    moment must not stand in the way of another change.
    """
    tls = client_tls(config)
    if tls is not None:
        load_certificates(tls)


def check_keys(config: Config) -> None:
    """Raise ``ConfigError`` when a file with keys of clients cannot be used. For the start, as above."""
    read_auth(config)
