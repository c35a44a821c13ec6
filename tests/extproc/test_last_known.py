"""Where workers were last, across a restart."""

from __future__ import annotations

import pytest

from extproc.address import Address
from extproc.discovery.last_known import LastKnown
from policies.base import Worker

WORKERS = [Worker("http://a:1", "10.0.0.1:1", 0), Worker("http://b:1", "10.0.0.2:1", 1)]


def test_what_was_saved_is_known_after_a_restart(tmp_path):
    """By another object, as in another process; the latest counts."""
    address = Address(path=str(tmp_path / "extproc.sock"))
    LastKnown(address).save(WORKERS[:1])
    LastKnown(address).save(WORKERS)

    assert LastKnown(address).load() == {"http://a:1": "10.0.0.1:1", "http://b:1": "10.0.0.2:1"}
    assert [path.name for path in tmp_path.iterdir()] == ["extproc.sock.workers"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff"], ids=repr)
def test_file_that_cannot_be_read_is_nothing_known(tmp_path, content):
    """It is a protection, not a need."""
    (tmp_path / "extproc.sock.workers").write_bytes(content)

    assert LastKnown(Address(path=str(tmp_path / "extproc.sock"))).load() == {}


def test_without_a_unix_socket_nothing_is_kept():
    """There is no place that goes with the service."""
    last_known = LastKnown(Address("127.0.0.1", 9002))

    last_known.save(WORKERS)

    assert last_known.load() == {}
