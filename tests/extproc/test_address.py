"""Addresses of sockets and URLs of workers, right and wrong ones."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.address import (
    MAX_UNIX_PATH_BYTES,
    Address,
    WorkerUrl,
    is_ip,
    is_loopback,
    join_host_port,
    split_host_port,
)

PRIVATE = "hunter2"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/x.sock", Address(path="/run/x.sock")),
        ("127.0.0.1:9002", Address(host="127.0.0.1", port=9002)),
        ("0.0.0.0:65535", Address(host="0.0.0.0", port=65535)),
        ("[::1]:9002", Address(host="::1", port=9002)),
        ("[2001:db8::1]:1", Address(host="2001:db8::1", port=1)),
    ],
)
def test_address_is_read_and_written_alike(text, address):
    """What is printed can be read again."""
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9002",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:-1",
        "127.0.0.1:65536",
        "127.0.0.1:9002x",
        ":9002",
        "[]:9002",
        "[::1:9002",
        "a b:9002",
        "unix:",
        "unix:run/x.sock",
        "unix:/run/\0.sock",
        "localhost:9002",
        "10.0.0:9002",
        "http://127.0.0.1:9002",
    ],
    ids=repr,
)
def test_malformed_address_is_refused(text):
    """The text is in the message."""
    with pytest.raises(ValueError, match="unix") as caught:
        Address.parse(text)

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("character", ["a", "ä"])
def test_unix_path_may_be_as_long_as_the_kernel_takes(character):
    """107 bytes, not characters; one more is refused here and not at bind."""
    longest = "/" + character * ((MAX_UNIX_PATH_BYTES - 1) // len(character.encode()))

    assert MAX_UNIX_PATH_BYTES == 107
    assert Address.parse(f"unix:{longest}").path == longest
    with pytest.raises(ValueError, match="longer than 107 bytes"):
        Address.parse(f"unix:{longest}{character}")


@pytest.mark.parametrize(
    ("text", "url", "host", "port"),
    [
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000", "10.0.0.5", 8000),
        ("http://10.0.0.5:8000/", "http://10.0.0.5:8000", "10.0.0.5", 8000),
        ("http://10.0.0.5", "http://10.0.0.5", "10.0.0.5", 80),
        ("http://10.0.0.5:65535", "http://10.0.0.5:65535", "10.0.0.5", 65535),
        ("http://vllm-0.vllm.default.svc:8000", None, "vllm-0.vllm.default.svc", 8000),
        ("http://Worker_1:8000", None, "worker_1", 8000),
        ("http://example.com.:8000", None, "example.com.", 8000),
        ("http://localhost:8000", None, "localhost", 8000),
        ("http://[::1]:8000", None, "::1", 8000),
        ("http://[2001:DB8::1]", None, "2001:db8::1", 80),
        ("HTTP://10.0.0.5:8000", None, "10.0.0.5", 8000),
        (f"http://{'a' * 63}.{'b' * 63}:1", None, f"{'a' * 63}.{'b' * 63}", 1),
    ],
)
def test_worker_url_is_read(text, url, host, port):
    """Host and port; the identity is the text without a closing slash."""
    assert WorkerUrl.parse(text) == WorkerUrl(url=url or text, host=host, port=port)


MALFORMED = [
    "",
    "worker",
    "worker:8000",
    "10.0.0.5:8000",
    "//10.0.0.5:8000",
    "https://10.0.0.5:8000",
    "grpc://10.0.0.5:8000",
    "unix:/run/worker.sock",
    "http:",
    "http://",
    "http:///",
    "http://:8000",
    "http:10.0.0.5:8000",
    "http://10.0.0.5:8000/v1",
    "http://10.0.0.5:8000//",
    "http://10.0.0.5:8000?x=1",
    "http://10.0.0.5:8000?",
    "http://10.0.0.5:8000#x",
    "http://10.0.0.5:8000#",
    "http://10.0.0.5:0",
    "http://10.0.0.5:65536",
    "http://10.0.0.5:-1",
    "http://10.0.0.5:80a",
    "http://10.0.0.5:+80",
    "http://10.0.0.5:80:90",
    "http://10.0.0.5:\u0668\u0660",
    " http://10.0.0.5:8000",
    "http://10.0.0.5:8000 ",
    "http://10.0.0.5:8000\n",
    "http://10.0.0.5\t:8000",
    "http://10.0.0.5:8000\0",
    "http://wor ker:8000",
    "http://wor%20ker:8000",
    "http://-worker:8000",
    "http://worker-.x:8000/y",
    "http://.worker:8000",
    "http://a..b:8000",
    "http://wörker:8000",
    "http://w\u200borker:8000",
    "http://worker\\x:8000",
    "http://worker,other:8000",
    "http://10.0.0.5,10.0.0.6:8000",
    "http://*:8000",
    f"http://{'a' * 64}:8000",
    "http://2001:db8::1:8000",
    "http://[::1",
    "http://::1]",
    "http://[::1:8000",
    "http://[worker]:8000",
    "http://[10.0.0.5]:8000",
    "http://[v1.x]:8000",
    "http://[::g]:8000",
    "http://[::1]8000",
    "http://[::1]x:8000",
    "http://x[::1]:8000",
    "http://[]:8000",
    "http://\u2100:8000",
]


@pytest.mark.parametrize("text", MALFORMED, ids=ascii)
def test_malformed_worker_url_is_refused(text):
    """The message quotes the text and says what is expected; nothing is guessed."""
    with pytest.raises(ValueError, match="worker URL") as caught:
        WorkerUrl.parse(text)

    assert "expected http://host:port" in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"http://user:{PRIVATE}@10.0.0.5:8000",
        f"http://{PRIVATE}@10.0.0.5:8000",
        f"http://:{PRIVATE}@10.0.0.5:8000",
        f"http://user:{PRIVATE}@10.0.0.5:99999",
        f"http://user:{PRIVATE}@10.0.0.5:8000/v1?x",
        f"http://user:{PRIVATE}@:8000",
        f"http://user:{PRIVATE}@[::1",
        f"https://user:{PRIVATE}@10.0.0.5:8000",
        f"ftp://user:{PRIVATE}@10.0.0.5:8000",
        f"//user:{PRIVATE}@10.0.0.5:8000",
        f" http://user:{PRIVATE}@10.0.0.5:8000",
        f"http://user:{PRIVATE} @10.0.0.5:8000",
        f"http://user:{PRIVATE}@10.0.0.5:8000\n",
        f"http://user:{PRIVATE}@\u2100:8000",
    ],
    ids=ascii,
)
def test_password_in_a_worker_url_is_refused_and_never_repeated(text):
    """The message goes to a log; what else is wrong with the URL does not matter."""
    with pytest.raises(ValueError, match="worker URL") as caught:
        WorkerUrl.parse(text)

    assert PRIVATE not in str(caught.value)


@given(text=st.text(max_size=30).map("http://{}".format))
def test_any_text_is_refused_with_a_value_error_or_read_usably(text):
    """What is read has a host that can be looked up and a port that can be connected to."""
    try:
        worker = WorkerUrl.parse(text)
    except ValueError:
        return
    assert worker.host
    assert 1 <= worker.port <= 65535
    assert split_host_port(join_host_port(worker.host, worker.port))[1] == worker.port


@pytest.mark.parametrize(
    ("host", "ip", "loopback"),
    [
        ("127.0.0.1", True, True),
        ("127.9.9.9", True, True),
        ("::1", True, True),
        ("localhost", False, True),
        ("10.0.0.1", True, False),
        ("0.0.0.0", True, False),
        ("2001:db8::1", True, False),
        ("worker", False, False),
        ("1.2.3", False, False),
        ("[::1]", False, False),
        ("", False, False),
    ],
)
def test_literal_and_loopback_addresses_are_told_apart(host, ip, loopback):
    """Names are no literals; ``localhost`` is the one name that is loopback."""
    assert (is_ip(host), is_loopback(host)) == (ip, loopback)


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("10.0.0.5", "10.0.0.5:80"),
        ("worker", "worker:80"),
        ("::1", "[::1]:80"),
        ("2001:0DB8:0:0:0:0:0:0001", "[2001:db8::1]:80"),
    ],
)
def test_host_and_port_are_joined_as_envoy_writes_them(host, endpoint):
    """IPv6 in brackets and in its shortest form."""
    assert join_host_port(host, 80) == endpoint


@pytest.mark.parametrize(
    "host",
    ["::ffff:10.0.0.5", "::10.0.0.5", "64:ff9b::10.0.0.5", "1:0:0:2::", "::", "1:0:2:3:4:5:6:7"],
)
def test_ipv6_is_written_as_the_system_library_does(host):
    """Envoy compares the text, and it makes its own with ``inet_ntop``."""
    packed = socket.inet_pton(socket.AF_INET6, host)

    assert join_host_port(host, 80) == f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:80"


@given(
    host=st.one_of(st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str)),
    port=st.integers(1, 65535),
)
def test_split_undoes_join(host, port):
    """For every literal address and port."""
    found, same_port = split_host_port(join_host_port(host, port))

    assert (ipaddress.ip_address(found), same_port) == (ipaddress.ip_address(host), port)


def test_rank_of_a_worker_is_refused_as_what_it_is():
    """Whoever comes from vLLM Router is told so, not that a password is wrong."""
    with pytest.raises(ValueError, match="data-parallel ranks are not supported yet"):
        WorkerUrl.parse("http://10.0.0.5:8000@1")
