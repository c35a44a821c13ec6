"""Addresses of our own sockets, and of workers.

``Address`` is where something listens: a Unix socket or an IP address with a port. ``WorkerUrl`` is
how a user names a worker; it becomes an ``ip:port`` endpoint once its host name is resolved.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket

# sockaddr_un.sun_path on Linux holds 108 bytes, the closing zero included.
MAX_UNIX_PATH_BYTES = 107

_HOST_NAME = re.compile(
    r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_-]{1,63})*\.?"
)


_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """A Unix socket (``path``) or an IP socket (``host`` and ``port``)."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``unix:/run/x.sock``, ``127.0.0.1:9002`` or ``[::1]:9002``."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            if not path.startswith("/") or not path.isprintable():
                raise ValueError(f"unix socket path must be absolute and printable, got {text!r}")
            if len(path.encode()) > MAX_UNIX_PATH_BYTES:
                raise ValueError(
                    f"unix socket path is longer than {MAX_UNIX_PATH_BYTES} bytes: {path!r}"
                )
            return cls(path=path)
        found = _AUTHORITY.fullmatch(text)
        host = "" if found is None else found["ipv6"] or found["name"]
        if found is None or not is_ip(host) or found["port"] is None or int(found["port"]) > 65535:
            raise ValueError(f"expected unix:/path or ip:port, got {text!r}")
        return cls(host=host, port=int(found["port"]))

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else join_host_port(self.host, self.port)


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerUrl:
    """A worker as named by a user; ``url`` is its identity."""

    url: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> WorkerUrl:
        """Read ``http://host[:port]``; ``ValueError`` says what is wrong and what is expected."""
        _refuse_at_sign(text)
        hint = f"worker URL {text!r}: expected http://host:port"
        if not text.isprintable() or " " in text:
            raise ValueError(f"{hint}, without spaces or control characters")
        scheme, separator, rest = text.partition("://")
        if not separator or scheme.lower() != "http":
            later = "; https workers are not supported yet" if scheme.lower() == "https" else ""
            raise ValueError(f"{hint}{later}")
        if any(mark in rest.removesuffix("/") for mark in "/?#"):
            raise ValueError(f"{hint}, without path, query or fragment")
        found = _AUTHORITY.fullmatch(rest.removesuffix("/"))
        if found is None:
            raise ValueError(f"{hint}; an IPv6 address stands in brackets, a port is a number")
        host = (found["ipv6"] or found["name"]).lower()
        port = 80 if found["port"] is None else int(found["port"])
        if not 1 <= port <= 65535:
            raise ValueError(f"{hint}; the port is not a number from 1 to 65535")
        if found["ipv6"] is not None:
            if not is_ip(host) or ":" not in host or "%" in host:
                raise ValueError(f"{hint}; {host!r} is not an IPv6 address")
        elif not is_ip(host) and not _HOST_NAME.fullmatch(host):
            raise ValueError(f"{hint}; {host!r} is neither an IP address nor a host name")
        return cls(url=text.rstrip("/"), host=host, port=port)


def _refuse_at_sign(text: str) -> None:
    """Refuse ranks, users and passwords; a password is not repeated."""
    _, at_sign, after = text.rpartition("@")
    if at_sign and after.isdecimal():
        raise ValueError(
            "worker URL with a rank (URL@rank): data-parallel ranks are not supported yet"
        )
    if at_sign:
        raise ValueError("worker URL with a user or password; expected http://host:port")


def is_ip(host: str) -> bool:
    """Tell whether *host* is a literal IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can connect to *host*."""
    return host == "localhost" or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def join_host_port(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 address in brackets and in its shortest form, as Envoy writes it."""
    if ":" in host:
        shortest = socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, host))
        return f"[{shortest}]:{port}"
    return f"{host}:{port}"


def split_host_port(endpoint: str) -> tuple[str, int]:
    """Undo ``join_host_port``."""
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
