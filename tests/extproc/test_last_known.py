"""Where workers were last, across a restart."""

from __future__ import annotations

import pytest

from extproc.discovery.last_known import LastKnown
from extproc.discovery.updates import WorkerType
from extproc.engine import Known, Memory
from tests.fleets import STATIC, registry_of, remove, reset, say, spec_of

A = Known(spec_of("http://a:1"), "static", "10.0.0.1")
B = Known(
    spec_of(
        "https://b:1/base@3",
        weight=2.0,
        model="m",
        worker_type=WorkerType.PREFILL,
        bootstrap_port=9,
        labels=(("zone", "a"),),
        tls_name="worker.example",
    ),
    "admin",
    "10.0.0.2",
    ("m", "n"),
    ("lora",),
    (0, 1),
)
MEMORY = Memory((A, B), ("http://gone:1",))


def test_what_was_saved_is_known_after_a_restart(tmp_path):
    """By another object, as in another process; the latest counts."""
    place = tmp_path / "extproc.sock"
    LastKnown(place).save(Memory((A,)))
    LastKnown(place).save(MEMORY)

    assert LastKnown(place).load() == MEMORY
    assert [path.name for path in tmp_path.iterdir()] == ["extproc.sock"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"engines": 1}', b"\xff"], ids=repr)
def test_file_that_cannot_be_read_is_nothing_known(tmp_path, content):
    """It is a protection, not a need."""
    (tmp_path / "extproc.sock").write_bytes(content)

    assert LastKnown(tmp_path / "extproc.sock").load() == Memory()


def test_without_a_place_nothing_is_kept():
    """Neither a socket nor a directory for events was configured."""
    last_known = LastKnown(None)

    last_known.save(MEMORY)

    assert last_known.load() == Memory()


def test_file_is_written_only_when_something_changed(tmp_path):
    """Workers change now and then; the rest of the time the disk is left alone."""
    last_known = LastKnown(tmp_path / "extproc.sock")
    last_known.save(MEMORY)
    (tmp_path / "extproc.sock").unlink()

    last_known.save(Memory(MEMORY.engines, MEMORY.removed))
    assert not (tmp_path / "extproc.sock").exists()

    last_known.save(Memory((A,)))
    assert last_known.load() == Memory((A,))


def test_place_that_cannot_be_written_is_an_error(tmp_path):
    """The service goes on, and says so."""
    last_known = LastKnown(tmp_path / "gone" / "extproc.sock")

    with pytest.raises(OSError, match="No such file"):
        last_known.save(MEMORY)


def test_registry_begins_where_the_last_one_ended(tmp_path):
    """Addresses, models, pools and what an administrator did, through the file."""
    last_known = LastKnown(tmp_path / "extproc.sock")
    before = registry_of(asks_models=True)
    before.on_address("a", "10.0.0.1")
    reset(before, "http://a:1", "http://10.0.0.2:1", "http://10.0.0.3:1")
    say(before, "http://a:1", "llama", ["lora"])
    say(before, "http://10.0.0.2:1", "qwen")
    remove(before, "http://10.0.0.3:1")
    last_known.save(before.memory())

    after = registry_of(asks_models=True)
    after.restore(last_known.load(), 0.0, sources={STATIC})
    after.commit(0.0)

    assert [pool.candidates[0].endpoint for pool in after.pools] == ["10.0.0.1:1", "10.0.0.2:1"]
    assert after.model_names() == ["llama", "lora", "qwen"]
    reset(after, "http://a:1", "http://10.0.0.2:1", "http://10.0.0.3:1")
    assert after.get("http://10.0.0.3:1") is None
