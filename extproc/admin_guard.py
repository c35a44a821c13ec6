"""Who may use the admin API.

With a key: whoever shows it. Without one: programs of this machine, and not a web page that a browser on it
happens to show. Such a page can send requests to a loopback address, but a browser then says where it
comes from (``Origin``, ``Sec-Fetch-Site``), and a name that an attacker lets point here (DNS rebinding)
stands in ``Host``. A proxy on this machine hands on requests of others; most say that they did.
"""

from __future__ import annotations

import dataclasses
import hmac
import re
from collections.abc import Callable, Iterable, Sequence

from extproc.address import is_loopback

DEFAULT_PORTS = {"http": 80, "https": 443}
OWN_FETCH_SITES = frozenset({"same-origin", "none"})

PROXY_HEADERS = ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP")
"""What another proxy adds. Our Envoy adds none of them."""

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")

Headers = Callable[[str], Sequence[str]]
"""Returns the values of a header, none when the request does not have it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Denial:
    """Why a request may not use the admin API."""

    status: int
    code: str
    message: str


def judge(headers: Headers, *, admin_api_key: str, listens_on: Iterable[str]) -> Denial | None:
    """Return why a request with these *headers* is denied, or None.

    *listens_on*: the hosts on which the API can be reached, through Envoy and without it.
    """
    if admin_api_key:
        return _judge_key(headers, admin_api_key)
    if not all(map(is_loopback, listens_on)):
        return _forbidden(
            "the admin API needs a key unless --host and --admin-address are loopback addresses: set"
            " --admin-api-key"
        )
    for name in PROXY_HEADERS:
        if headers(name):
            return _forbidden(
                f"without --admin-api-key the admin API answers no request of another proxy ({name})"
            )
    return _judge_origin(headers)


def _judge_key(headers: Headers, key: str) -> Denial | None:
    shown = headers("Authorization")
    scheme, _, token = shown[0].partition(" ") if len(shown) == 1 else ("", "", "")
    # Compared as bytes: text outside ASCII is a TypeError.
    same = hmac.compare_digest(token.strip().encode(errors="surrogateescape"), key.encode())
    if scheme.lower() == "bearer" and same:
        return None
    wrong = "this is not the admin API key" if shown else "the admin API needs its key"
    return Denial(401, "UNAUTHORIZED", f"{wrong}: send Authorization: Bearer KEY")


def _judge_origin(headers: Headers) -> Denial | None:
    hosts = headers("Host")
    host = hosts[0].lower() if len(hosts) == 1 else ""
    name = _host_of(host)
    if not is_loopback(name):
        return _forbidden(
            "without --admin-api-key the admin API answers only to localhost or a loopback address in"
            " the Host header"
        )
    sites = {site.lower() for site in headers("Sec-Fetch-Site")}
    if not sites <= OWN_FETCH_SITES or not all(
        _is_at(origin.lower(), host) for origin in headers("Origin")
    ):
        return _forbidden("without --admin-api-key the admin API answers no web page of elsewhere")
    return None


def _forbidden(message: str) -> Denial:
    return Denial(403, "FORBIDDEN", message)


def _host_of(host: str) -> str:
    """Return *host* without its port; empty when it is none."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1] or found[2]


def _is_at(origin: str, host: str) -> bool:
    """Tell whether *origin* is a page of *host*; both may leave out the port that goes without saying."""
    scheme, separator, authority = origin.partition("://")
    port = DEFAULT_PORTS.get(scheme)
    if not separator or port is None:  # "null", and what is no page of ours
        return False
    suffix = f":{port}"
    return authority.removesuffix(suffix) == host.removesuffix(suffix)
