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

MAX_URL_CHARS = 512
MAX_RANK = 4095
DEFAULT_PORTS = {"http": 80, "https": 443}

MAX_HOST_NAME_CHARS = 253

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_BASE_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+")
_LOOKS_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?")
_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")

_METADATA = frozenset(
    {
        ipaddress.ip_address("fd00:ec2::254"),  # AWS
        ipaddress.ip_address("fd00:ec2::23"),  # AWS, EKS Pod Identity
        ipaddress.ip_address("fd20:ce::254"),  # Google Cloud
        ipaddress.ip_address("168.63.129.16"),  # Azure
        ipaddress.ip_address("100.100.100.200"),  # Alibaba Cloud
        ipaddress.ip_address("192.0.0.192"),  # Oracle Cloud
    }
)
"""Where clouds serve instance credentials, beside the link-local addresses."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


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
        if (
            found is None
            or not is_ip(host)
            or "%" in host
            or (":" in host) != (found["ipv6"] is not None)
            or found["port"] is None
            or int(found["port"]) > 65535
        ):
            raise ValueError(f"expected unix:/path or ip:port, got {text!r}")
        return cls(host=host, port=int(found["port"]))

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else join_host_port(self.host, self.port)


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerUrl:
    """A worker as named by a user; ``url`` is its identity."""

    url: str
    """Scheme and host in lower case, no port that goes without saying, no closing slash, no rank."""

    host: str
    port: int
    scheme: str = "http"
    path: str = ""
    """What stands before every path of the worker, such as ``/llama``."""

    rank: int | None = None
    """Data-parallel rank, when one of the engine's was named (``URL@rank``)."""

    @classmethod
    def parse(cls, text: str) -> WorkerUrl:
        """Read ``http[s]://host[:port][/base/path][@rank]``.

        ``ValueError`` says what is wrong and what is expected.
        """
        if len(text) > MAX_URL_CHARS:
            raise ValueError(
                f"worker URL longer than {MAX_URL_CHARS} characters: expected http://host:port"
            )
        base, rank = _split_rank(text)
        # What stands before an @ is not repeated: in http://user:secret@5 it is a password.
        shown = repr(text) if rank is None else f"with rank {rank}"
        hint = f"worker URL {shown}: expected http://host:port or https://host:port"
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError(f"{hint}, in ASCII, without spaces or control characters")
        scheme, separator, rest = base.partition("://")
        scheme = scheme.lower()
        if not separator or scheme not in DEFAULT_PORTS:
            raise ValueError(hint)
        if any(mark in rest for mark in "?#"):
            raise ValueError(f"{hint}, without query or fragment")
        authority, slash, path = rest.partition("/")
        path = f"/{path}".removesuffix("/") if slash else ""
        if path and not _BASE_PATH.fullmatch(path):
            raise ValueError(f"{hint}; the path is not one of plain segments such as /llama")
        host, port = _host_and_port(authority, DEFAULT_PORTS[scheme], hint)
        shown = f"[{host}]" if ":" in host else host
        if port != DEFAULT_PORTS[scheme]:
            shown = f"{shown}:{port}"
        return cls(f"{scheme}://{shown}{path}", host, port, scheme, path, rank)

    @property
    def is_named(self) -> bool:
        """Whether the host is a name, not an address."""
        return not is_ip(self.host)

    def __str__(self) -> str:
        return self.url if self.rank is None else f"{self.url}@{self.rank}"


def _host_and_port(authority: str, default_port: int, hint: str) -> tuple[str, int]:
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        raise ValueError(f"{hint}; an IPv6 address stands in brackets, a port is a number")
    host = (found["ipv6"] or found["name"]).lower()
    port = default_port if found["port"] is None else int(found["port"])
    if not 1 <= port <= 65535:
        raise ValueError(f"{hint}; the port is not a number from 1 to 65535")
    if found["ipv6"] is not None:
        if not is_ip(host) or ":" not in host or "%" in host:
            raise ValueError(f"{hint}; {host!r} is not an IPv6 address")
        host = socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, host))
    elif not is_ip(host) and not is_host_name(host):
        raise ValueError(f"{hint}; {host!r} is neither an IP address nor a host name")
    if is_ip(host) and (reason := check_reachable(host)):
        raise ValueError(f"{hint}; {host} is {reason}, no worker can be there")
    return host, port


def is_host_name(host: str) -> bool:
    """Tell whether *host* is a name in lower case, and nothing that a resolver reads as an address.

    Resolvers read ``127.1`` and ``0x7f000001`` as addresses; an address that is meant is written out.
    """
    return (
        len(host.removesuffix(".")) <= MAX_HOST_NAME_CHARS
        and _HOST_NAME.fullmatch(host) is not None
        and _LOOKS_NUMERIC.fullmatch(host) is None
    )


def check_reachable(host: str) -> str:
    """Return why no worker can be at the address *host*; empty when one can."""
    ip = ipaddress.ip_address(host)
    return _unreachable(ip) or next(filter(None, map(_unreachable, _embedded(ip))), "")


def _unreachable(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if ip.is_unspecified or (ip.version == 4 and ip.packed[0] == 0):
        return "no address of a single host"
    if ip.is_multicast or ip == ipaddress.IPv4Address("255.255.255.255"):
        return "a multicast or broadcast address"
    if ip.is_link_local or ip in _METADATA:
        return "a link-local or metadata address, where clouds serve instance credentials"
    if "%" in str(ip):
        return "an address with a zone"
    return ""


def _embedded(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses that connections to *ip* may end at: mapped, 6to4 or NAT64."""
    if isinstance(ip, ipaddress.IPv4Address):
        return []
    found = [ip.ipv4_mapped, ip.sixtofour]
    if ip in _NAT64:
        found.append(ipaddress.IPv4Address(ip.packed[-4:]))
    return [address for address in found if address is not None]


def _split_rank(text: str) -> tuple[str, int | None]:
    """Take ``@rank`` off; refuse users and passwords, which are not repeated."""
    base, at_sign, after = text.rpartition("@")
    if not at_sign:
        return text, None
    if "@" in base or not (after.isascii() and after.isdecimal()):
        raise ValueError(
            "worker URL with a user or password: expected http://host:port without either, a rank"
            " at the end as in http://host:port@1"
        )
    rank = int(after)
    if rank > MAX_RANK:
        raise ValueError(f"worker URL with a rank above {MAX_RANK}: expected http://host:port@1")
    return base, rank


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
