"""Who may use the admin API."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from extproc.admin_guard import judge

KEY = "s3cret"


def judged(*headers, key="", listens_on=("127.0.0.1",)):
    given = CIMultiDict(headers)
    denial = judge(lambda name: given.getall(name, []), admin_api_key=key, listens_on=listens_on)
    return None if denial is None else denial.status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", "Bearer s3cret")], None),
        ([("authorization", "bearer s3cret")], None),
        ([("Authorization", "Bearer  s3cret ")], None),
        ([], 401),
        ([("Authorization", "")], 401),
        ([("Authorization", "Bearer")], 401),
        ([("Authorization", "Bearer ")], 401),
        ([("Authorization", "Bearer s3cre")], 401),
        ([("Authorization", "Bearer s3crett")], 401),
        ([("Authorization", "Basic s3cret")], 401),
        ([("Authorization", "s3cret")], 401),
        ([("Authorization", "Bearer s\xe9cret")], 401),
        ([("Authorization", "Bearer \udcff")], 401),
        ([("Authorization", "Bearer s3cret"), ("Authorization", "Bearer x")], 401),
    ],
    ids=str,
)
@pytest.mark.parametrize("listens_on", [["127.0.0.1"], ["0.0.0.0"], ["127.0.0.1", "10.0.0.1"]])
def test_with_a_key_the_key_is_what_counts(headers, status, listens_on):
    """Wherever the router listens, and whoever asks."""
    elsewhere = [("Origin", "http://evil"), ("Host", "evil"), ("Sec-Fetch-Site", "cross-site")]
    elsewhere.append(("Via", "1.1 proxy"))

    assert judged(*headers, key=KEY, listens_on=listens_on) == status
    assert judged(*headers, *elsewhere, key=KEY, listens_on=listens_on) == status


@pytest.mark.parametrize(
    ("listens_on", "status"),
    [
        (["127.0.0.1"], None),
        (["127.8.9.1"], None),
        (["::1"], None),
        (["localhost"], None),
        (["127.0.0.1", "::1"], None),
        (["0.0.0.0"], 403),
        (["::"], 403),
        (["10.0.0.1"], 403),
        (["127.0.0.1", "0.0.0.0"], 403),
        (["0.0.0.0", "127.0.0.1"], 403),
        (["::1", "10.0.0.1"], 403),
    ],
)
def test_without_a_key_the_router_must_listen_on_loopback(listens_on, status):
    """Everywhere, or anybody in the network could send requests to workers of their own."""
    assert judged(("Host", "127.0.0.1:30000"), listens_on=listens_on) == status


def test_denial_says_how_to_get_in():
    """By its flag; the key itself is told to nobody."""
    open_to_all = judge(lambda _: [], admin_api_key="", listens_on=["0.0.0.0"])
    wrong = judge(lambda _: ["Bearer x"], admin_api_key=KEY, listens_on=["::1"])

    assert "set --admin-api-key" in open_to_all.message
    assert wrong.message == "this is not the admin API key: send Authorization: Bearer KEY"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:30000", None),
        ("127.0.0.1", None),
        ("10.1.2.3:80", 403),
        ("[::1]:30000", None),
        ("localhost", None),
        ("LOCALHOST:30000", None),
        ("", 403),
        ("evil.example", 403),
        ("evil.example:30000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("evil.example@127.0.0.1", 403),
        ("127.0.0.1/evil", 403),
        ("::1", 403),
        ("[::1", 403),
        ("[evil]", 403),
        ("127.1", 403),
        ("\udcff", 403),
    ],
)
def test_without_a_key_only_loopback_is_answered(host, status):
    """A name may be one that an attacker lets point here."""
    assert judged(("Host", host)) == status


def test_host_is_given_once():
    """None, or two of them, is nothing that a browser sends."""
    assert judged() == 403
    assert judged(("Host", "127.0.0.1"), ("Host", "evil")) == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:30000", None),
        ("HTTP://127.0.0.1:30000", None),
        ("https://127.0.0.1:30000", None),
        ("http://127.0.0.1:3000", 403),
        ("http://127.0.0.1", 403),
        ("http://localhost:30000", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("file://", 403),
        ("127.0.0.1:30000", 403),
        ("", 403),
    ],
)
def test_without_a_key_pages_of_elsewhere_are_denied(origin, status):
    """Another port of this machine is elsewhere."""
    assert judged(("Host", "127.0.0.1:30000"), ("Origin", origin)) == status


@pytest.mark.parametrize(
    ("origin", "host"),
    [("http://[::1]", "[::1]:80"), ("https://127.0.0.1:443", "127.0.0.1")],
)
def test_port_that_goes_without_saying_may_be_said(origin, host):
    """The origin's scheme decides which it is."""
    assert judged(("Host", host), ("Origin", origin)) is None


@pytest.mark.parametrize(
    ("site", "status"),
    [("same-origin", None), ("none", None), ("same-site", 403), ("cross-site", 403), ("x", 403)],
)
def test_without_a_key_the_browser_says_where_a_request_comes_from(site, status):
    """Also for requests without an origin, such as images."""
    assert judged(("Host", "localhost"), ("Sec-Fetch-Site", site)) == status


@pytest.mark.parametrize(
    "header",
    [
        ("X-Forwarded-For", "203.0.113.5"),
        ("x-forwarded-for", "127.0.0.1"),
        ("X-Forwarded-For", ""),
        ("Forwarded", "for=127.0.0.1"),
        ("Via", "1.1 proxy"),
        ("X-Real-IP", "127.0.0.1"),
    ],
    ids=str,
)
def test_without_a_key_what_came_through_another_proxy_is_denied(header):
    """A proxy of this machine hands on requests of others; nobody can tell whose they were."""
    assert judged(("Host", "127.0.0.1:30000"), header) == 403
    assert judged(("Host", "127.0.0.1:30000"), ("X-Forwarded-Proto", "http")) is None
