"""Whether an address can be listened on."""

from __future__ import annotations

import socket

from extproc.address import join_host_port
from extproc.errors import ConfigError


def check_free(host: str, port: int, flags: str) -> None:
    """Raise ``ConfigError`` when *host*:*port* is taken or is not ours; *flags* choose another.

    Envoy listens with SO_REUSEPORT, so two routers on one port would share its traffic and not notice.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {join_host_port(host, port)}: {error.strerror};"
                f" choose another with {flags}"
            ) from error
