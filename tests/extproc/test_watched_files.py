"""Files whose change is noticed, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest

from extproc.watched_files import INTERVAL_S, watch_files

LOOKS = 3 * INTERVAL_S


@pytest.fixture(autouse=True)
def files_read_at_once(monkeypatch):
    """Read in this thread: another takes real time, of which there is none here."""

    async def call(function, *arguments):
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)


@contextlib.asynccontextmanager
async def watched(*paths):
    """Yield the list that grows with each change noticed."""
    changes = []
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(
            watch_files(lambda: [str(path) for path in paths], lambda: changes.append(1))
        )
        await asyncio.sleep(LOOKS)
        yield changes
        task.cancel()


@pytest.mark.looptime
async def test_file_that_stays_is_no_change(tmp_path):
    """However often it is looked at."""
    (tmp_path / "a").write_text("1")

    async with watched(tmp_path / "a") as changes:
        await asyncio.sleep(100)

    assert changes == []


@pytest.mark.looptime
@pytest.mark.parametrize("text", ["2", "", "11"])
async def test_other_content_is_one_change(tmp_path, text):
    """Also with the same length and the same time stamps."""
    path = tmp_path / "a"
    path.write_text("1")
    stamps = path.stat()

    async with watched(path) as changes:
        path.write_text(text)
        os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
        await asyncio.sleep(100)

    assert changes == [1]


@pytest.mark.looptime
async def test_file_that_comes_or_goes_is_a_change(tmp_path):
    """Both ways, each once."""
    path = tmp_path / "a"

    async with watched(path) as changes:
        path.write_text("1")
        await asyncio.sleep(LOOKS)
        assert changes == [1]
        path.unlink()
        await asyncio.sleep(LOOKS)

    assert changes == [1, 1]


@pytest.mark.looptime
async def test_link_that_is_swapped_is_a_change(tmp_path):
    """As Kubernetes does with Secrets."""
    for name in "12":
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(name)
    data = tmp_path / "data"
    data.symlink_to(tmp_path / "1")

    async with watched(data / "key") as changes:
        fresh = tmp_path / "fresh"
        fresh.symlink_to(tmp_path / "2")
        fresh.rename(data)
        await asyncio.sleep(LOOKS)

    assert changes == [1]


@pytest.mark.looptime
async def test_file_that_is_being_written_is_waited_for(tmp_path):
    """Two looks must find the same."""
    path = tmp_path / "a"
    path.write_text("1")

    async with watched(path) as changes:
        for step in range(40):
            path.write_text(str(step))
            await asyncio.sleep(0.05)
        before = len(changes)
        await asyncio.sleep(LOOKS)

    assert before == 0
    assert changes == [1]
