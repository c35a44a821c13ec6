"""Which proxy the environment names for a server: HTTP_PROXY, HTTPS_PROXY and NO_PROXY.

As Go does it, and so kubectl: NO_PROXY may name networks, which Python does not heed.
Source: https://pkg.go.dev/golang.org/x/net/http/httpproxy#Config
"""

from __future__ import annotations

import ipaddress
from urllib.request import getproxies_environment

from yarl import URL


def environment_proxy(server: str) -> str:
    """Return the URL of the proxy for the URL *server*; empty: there is none."""
    url = URL(server)
    proxies = getproxies_environment()
    proxy = proxies.get(url.scheme, "")
    if not proxy or goes_direct(url.host or "", url.port or 0, proxies.get("no", "")):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def goes_direct(host: str, port: int, exceptions: str) -> bool:
    """Tell whether *host* is this machine, or one of *exceptions* in the syntax of NO_PROXY."""
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(_fits(host, port, address, text) for text in exceptions.lower().split(","))


def _fits(
    host: str, port: int, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None, text: str
) -> bool:
    """Tell whether *text*, an address, a network, a name or a domain with or without a port, means *host*."""
    entry = text.strip()
    if entry == "*":
        return True
    if address is not None and "/" in entry:
        try:
            return address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    name, of_port = _split(entry)
    if of_port not in ("", str(port)) or not name:
        return False
    if address is not None:
        return address == _address(name)
    domain = name.removeprefix("*").removeprefix(".")
    return host == name or host.endswith(f".{domain}")


def _split(entry: str) -> tuple[str, str]:
    """Return the host and the port of *entry*; an address of IPv6 with a port stands in brackets."""
    if entry.count(":") > 1 and not entry.startswith("["):
        return entry, ""
    host, separator, port = entry.rpartition(":")
    if not separator or entry.endswith("]"):
        host, port = entry, ""
    return host.strip("[]"), port


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
