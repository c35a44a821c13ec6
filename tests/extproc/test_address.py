"""Addresses of sockets and URLs of workers, right and wrong ones."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.address import (
    MAX_HOST_NAME_CHARS,
    MAX_RANK,
    MAX_UNIX_PATH_BYTES,
    MAX_URL_CHARS,
    Address,
    WorkerUrl,
    check_reachable,
    is_host_name,
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
        "[10.0.0.5]:9002",
        "[fe80::1%eth0]:9002",
        "[fe80::1%]:9002",
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
        ("http://10.0.0.5:80", "http://10.0.0.5", "10.0.0.5", 80),
        ("http://10.0.0.5:00080/", "http://10.0.0.5", "10.0.0.5", 80),
        ("http://10.0.0.5:443", "http://10.0.0.5:443", "10.0.0.5", 443),
        ("http://10.0.0.5:65535", "http://10.0.0.5:65535", "10.0.0.5", 65535),
        ("http://vllm-0.vllm.default.svc:8000", None, "vllm-0.vllm.default.svc", 8000),
        ("http://Worker_1:8000", "http://worker_1:8000", "worker_1", 8000),
        ("http://example.com.:8000", None, "example.com.", 8000),
        ("http://localhost:8000", None, "localhost", 8000),
        ("http://[::1]:8000", None, "::1", 8000),
        ("http://[2001:DB8::1]", "http://[2001:db8::1]", "2001:db8::1", 80),
        ("http://[2001:db8:0:0:0::1]:80", "http://[2001:db8::1]", "2001:db8::1", 80),
        ("http://[::ffff:a00:5]:1", "http://[::ffff:10.0.0.5]:1", "::ffff:10.0.0.5", 1),
        ("HTTP://10.0.0.5:8000", "http://10.0.0.5:8000", "10.0.0.5", 8000),
        ("http://1and1.example:1", None, "1and1.example", 1),
        ("http://0xcafe.example:1", None, "0xcafe.example", 1),
        (f"http://{'a' * 63}.{'b' * 63}:1", None, f"{'a' * 63}.{'b' * 63}", 1),
        (f"http://{'a.' * 126}b", None, f"{'a.' * 126}b", 80),
        (f"http://{'a.' * 126}b.", None, f"{'a.' * 126}b.", 80),
    ],
)
def test_worker_url_is_read(text, url, host, port):
    """Host and port; the identity is written in one way only, whatever way it was given in."""
    worker = WorkerUrl.parse(text)

    assert worker == WorkerUrl(url=url or text, host=host, port=port)
    assert worker.is_named == (not is_ip(host))
    assert str(worker) == worker.url


@pytest.mark.parametrize(
    ("text", "worker"),
    [
        ("https://w", WorkerUrl("https://w", "w", 443, "https")),
        ("HTTPS://W:443/", WorkerUrl("https://w", "w", 443, "https")),
        ("https://w:80", WorkerUrl("https://w:80", "w", 80, "https")),
        ("https://[::1]:8443", WorkerUrl("https://[::1]:8443", "::1", 8443, "https")),
        ("http://w/llama", WorkerUrl("http://w/llama", "w", 80, path="/llama")),
        ("http://w/Llama/v1.5/", WorkerUrl("http://w/Llama/v1.5", "w", 80, path="/Llama/v1.5")),
        ("http://w:1/~a_b-c", WorkerUrl("http://w:1/~a_b-c", "w", 1, path="/~a_b-c")),
        ("http://w/...", WorkerUrl("http://w/...", "w", 80, path="/...")),
        ("http://w/.a/..b", WorkerUrl("http://w/.a/..b", "w", 80, path="/.a/..b")),
        ("http://w@0", WorkerUrl("http://w", "w", 80, rank=0)),
        ("http://w:8000/@07", WorkerUrl("http://w:8000", "w", 8000, rank=7)),
        (f"http://w/a@{MAX_RANK}", WorkerUrl("http://w/a", "w", 80, path="/a", rank=4095)),
        ("https://[::1]@1", WorkerUrl("https://[::1]", "::1", 443, "https", rank=1)),
    ],
    ids=str,
)
def test_scheme_base_path_and_rank_are_read(text, worker):
    """The rank is no part of the URL; what is printed reads as the same."""
    assert WorkerUrl.parse(text) == worker
    assert WorkerUrl.parse(str(worker)) == worker
    assert str(worker) == worker.url + ("" if worker.rank is None else f"@{worker.rank}")


MALFORMED = [
    "",
    "worker",
    "worker:8000",
    "10.0.0.5:8000",
    "//10.0.0.5:8000",
    "https://",
    "https:///llama",
    "https:10.0.0.5",
    "http+unix://x",
    " https://w",
    "grpc://10.0.0.5:8000",
    "unix:/run/worker.sock",
    "http:",
    "http://",
    "http:///",
    "http://:8000",
    "http:10.0.0.5:8000",
    "http:///llama",
    "http://10.0.0.5:8000/a//",
    "http://10.0.0.5:8000//a",
    "http://10.0.0.5:8000/a//b",
    "http://10.0.0.5:8000/.",
    "http://10.0.0.5:8000/..",
    "http://10.0.0.5:8000/a/../b",
    "http://10.0.0.5:8000/a/./",
    "http://10.0.0.5:8000/%2e%2e/b",
    "http://10.0.0.5:8000/a;b",
    "http://10.0.0.5:8000/a:b",
    "http://10.0.0.5:8000/a\\b",
    "http://10.0.0.5:8000/ä",
    "http://10.0.0.5:8000/a b",
    "http://10.0.0.5:8000/a?x=1",
    "http://10.0.0.5:8000/a#x",
    "http://10.0.0.5:",
    "http://10.0.0.5:/a",
    "http://10.0.0.5:000080",
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
    "http://\u212a:8000",
    "http://\uff11\uff10.0.0.5:8000",
    "http://w\ud800:8000",
    "http://a.-b:8000",
    "http://a.b-:8000",
    f"http://a.{'b' * 64}",
    f"http://{'a.' * 126}bc",
    "http://..",
    "http://.",
    "http://[::1%eth0]",
    "http://[fe80::1%1]",
    "http://[1.2.3.4]",
]

NUMERIC = ["127.1", "127.0.1", "2130706433", "0x7f000001", "0X7F000001", "0x7f.1", "0177.0.0.1"]
NUMERIC += ["010.0.0.5", "10.0.0.5.", "1.2.3.4.5", "256.1.1.1", "0", "1.", "0x", "a.0x", "a.b.1"]

NO_PLACE = ["0.0.0.0", "0.1.2.3", "[::]", "224.0.0.1", "239.255.255.250", "255.255.255.255"]
NO_PLACE += ["[ff02::1]", "[ff0e::1]", "169.254.0.0", "169.254.169.254", "169.254.255.255"]
NO_PLACE += ["[fe80::1]", "[FEBF::1]", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]"]
NO_PLACE += ["[::ffff:0.0.0.0]", "[::FFFF:224.0.0.1]", "[::ffff:255.255.255.255]"]
NO_PLACE += ["[64:ff9b::169.254.169.254]", "[2002:a9fe:a9fe::1]", "[2002:0::]"]
NO_PLACE += ["[fd00:ec2::254]", "[fd20:ce::254]", "168.63.129.16", "[::ffff:100.100.100.200]"]

A_PLACE = ["10.0.0.5", "127.0.0.1", "169.253.255.255", "169.255.0.1", "1.0.0.0", "223.255.255.255"]
A_PLACE += ["240.0.0.1", "[::1]", "[fd00::1]", "[fec0::1]", "[::ffff:10.0.0.5]", "[64:ff9b::a00:5]"]
A_PLACE += ["[2002:a00:5::1]", "[2001:db8::a9fe:a9fe]"]


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
        f"http://user:{PRIVATE}@5",
        f"http://user:{PRIVATE}@2130706433",
        f"https://:{PRIVATE}@5",
        f"http://user:{PRIVATE}\n@5",
        f"http://user?{PRIVATE}@5",
        f"http://user:{PRIVATE}/@5",
        f"ftp://user:{PRIVATE}@5",
        f"http://user:a@{PRIVATE}@5",
        f"http://user:{PRIVATE}@{'a' * 600}",
    ],
    ids=ascii,
)
def test_password_in_a_worker_url_is_refused_and_never_repeated(text):
    """The message goes to a log; what else is wrong with the URL does not matter."""
    with pytest.raises(ValueError, match="worker URL") as caught:
        WorkerUrl.parse(text)

    assert PRIVATE not in str(caught.value)


@pytest.mark.parametrize("host", NUMERIC)
@pytest.mark.parametrize("form", ["http://{}", "https://{}:8000/llama", "http://{}@1"])
def test_number_that_resolvers_read_as_an_address_is_no_host_name(host, form):
    """It would lead past every check of addresses; so WHATWG's URLs have it, too."""
    with pytest.raises(ValueError, match="neither an IP address nor a host name"):
        WorkerUrl.parse(form.format(host))

    assert not is_host_name(host.lower())


@pytest.mark.parametrize("host", NO_PLACE)
def test_address_where_no_worker_can_be_is_refused(host):
    """However it is written: a router must not be led to a cloud's credentials."""
    with pytest.raises(ValueError, match="no worker can be there"):
        WorkerUrl.parse(f"http://{host}:8000")

    assert check_reachable(host.strip("[]"))


@pytest.mark.parametrize("host", A_PLACE)
def test_address_where_a_worker_can_be_is_taken(host):
    """Private, loopback, reserved ones: what is beside those refused."""
    assert check_reachable(WorkerUrl.parse(f"http://{host}:8000").host) == ""


@pytest.mark.parametrize("host", ["fe80::1%eth0", "2001:db8::1%1", "ff02::1%eth0", "::%1"])
def test_address_with_a_zone_is_no_place(host):
    """A resolver may answer so; Envoy does not know zones."""
    assert check_reachable(host)


def test_longest_host_name_and_url():
    """As many characters as DNS takes, and a bound for the whole."""
    host = f"{'a.' * 126}b"
    url = f"http://w/{'a' * (MAX_URL_CHARS - 9)}"

    assert len(host) == MAX_HOST_NAME_CHARS
    assert is_host_name(f"{host}.")
    assert not is_host_name(f"{host}c")
    assert str(WorkerUrl.parse(url)) == url
    with pytest.raises(ValueError, match="longer than 512 characters") as caught:
        WorkerUrl.parse(f"{url}a")
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("rank", ["4096", "99999", "0000004096", "1" * 400])
def test_rank_beyond_any_engine_is_refused(rank):
    """Leading zeros do not help."""
    with pytest.raises(ValueError, match="rank above 4095"):
        WorkerUrl.parse(f"http://w@{rank}")


@pytest.mark.parametrize("rank", ["", "-1", "+1", " 1", "1_0", "0x1", "\u0661", "\u00b2", "1/a"])
def test_what_is_no_rank_is_taken_for_a_password(rank):
    """Nothing of it is repeated, and ranks are explained."""
    with pytest.raises(ValueError, match="a rank at the end as in http://host:port@1"):
        WorkerUrl.parse(f"http://w@{rank}")


@given(text=st.text(max_size=30).map("http://{}".format))
def test_any_text_is_refused_with_a_value_error_or_read_usably(text):
    """What is read has a host that can be looked up and a port that can be connected to."""
    try:
        worker = WorkerUrl.parse(text)
    except ValueError:
        return
    assert worker.host
    assert WorkerUrl.parse(str(worker)) == worker
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


PIECES = [
    "http://",
    "HTTPS://",
    "w",
    "10.0.0.5",
    "127.1",
    "[::1]",
    "[",
    "]",
    ":",
    "80",
    "8000",
    "/",
]
PIECES += ["a", "..", ".", "@", "1", "%", "?", "#", "-", "0x", "169.254.0.1", "\n", "K", "\u212a"]


@given(text=st.lists(st.sampled_from(PIECES), max_size=7).map("".join))
def test_what_is_read_has_one_form(text):
    """Reading what was printed gives the same again, and a place where a worker can be."""
    try:
        worker = WorkerUrl.parse(text)
    except ValueError:
        return
    assert WorkerUrl.parse(str(worker)) == worker
    assert str(worker).isascii()
    assert is_host_name(worker.host) if worker.is_named else not check_reachable(worker.host)
