"""Proxies of the environment, and who is exempt from them."""

from __future__ import annotations

import pytest

from extproc.discovery.proxies import environment_proxy, goes_direct


@pytest.mark.parametrize(
    ("host", "exceptions", "expected"),
    [
        ("10.96.0.1", "", False),
        ("10.96.0.1", "10.0.0.0/8,.svc", True),
        ("10.96.0.1", " 10.96.0.1 ", True),
        ("10.96.0.1", "10.96.0.1:443", True),
        ("10.96.0.1", "10.96.0.1:80", False),
        ("10.96.0.1", "10.96.0.0/33,nonsense/8,/", False),
        ("10.96.0.1", "fd00::/8", False),
        ("10.96.0.1", "0.1", False),
        ("fd00::1", "fd00::/8", True),
        ("fd00::1", "fd00:0::1", True),
        ("fd00::1", "[fd00::1]:443", True),
        ("fd00::1", "[fd00::1]", True),
        ("fd00::1", "fd00::2,10.0.0.0/8", False),
        ("api.example", "*", True),
        ("api.example", "example", True),
        ("api.example", ".EXAMPLE", True),
        ("api.example", "*.example", True),
        ("api.example", "api.example:443", True),
        ("api.example", "api.example:444", False),
        ("example", ".example", False),
        ("badexample", "example", False),
        ("api.example", "10.0.0.0/8,,.", False),
        ("localhost", "", True),
        ("127.0.0.1", "", True),
        ("::1", "", True),
    ],
)
def test_who_is_reached_without_a_proxy(host, exceptions, expected):
    """Addresses, networks, names and domains, with a port or without; this machine always."""
    assert goes_direct(host, 443, exceptions) is expected


def test_the_proxy_goes_by_the_scheme_of_the_server(monkeypatch):
    """Without a scheme of its own it speaks HTTP."""
    monkeypatch.setenv("https_proxy", "proxy:3128")
    monkeypatch.setenv("http_proxy", "http://other")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")

    servers = ("https://api.example", "http://api.example:80", "https://10.0.0.1:6443")

    assert [environment_proxy(s) for s in servers] == ["http://proxy:3128", "http://other", ""]
