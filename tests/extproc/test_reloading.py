"""When the configuration is read again, and what becomes of one that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from extproc.config import Config, load
from extproc.errors import ConfigError
from extproc.reloading import Reloading

LIMIT_S = 10.0


class Program:
    """What a program would do with each configuration."""

    def __init__(self, path):
        self.path = path
        self.applied = asyncio.Queue()
        self.reloading = Reloading(self.read, path, self.applied.put_nowait)
        self.reads = 0

    def read(self):
        self.reads += 1
        return load(self.path, {"port": 5})

    async def next(self):
        async with asyncio.timeout(LIMIT_S):
            return await self.applied.get()


@contextlib.asynccontextmanager
async def running(program):
    """Run the reloading for as long as the block lasts."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(program.reloading.run())
        await asyncio.sleep(0)
        yield
        task.cancel()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


async def test_file_that_changes_is_read_again(tmp_path):
    """Without a signal; flags still win."""
    path = tmp_path / "router.yaml"
    path.write_text("queue_size: 1\nport: 6\n")
    program = Program(path)

    async with running(program):
        await asyncio.sleep(0.3)
        assert (
            await program.next()
        ).queue_size == 1  # at once: it may have changed since it was read
        path.write_text("queue_size: 2\nport: 7\n")
        config = await program.next()

    assert (config.queue_size, config.port) == (2, 5)


@pytest.mark.parametrize("file", [True, False])
async def test_sighup_reads_again(tmp_path, file):
    """Also when nothing has changed, or there is no file: environment and other files may have."""
    path = tmp_path / "router.yaml" if file else None
    if path:
        path.write_text("queue_size: 1\n")
    program = Program(path)

    async with running(program):
        await program.next()
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await program.next()).port == 5


async def test_broken_file_is_refused_whole_and_the_line_named(tmp_path, capsys):
    """Of three changes two are good; none is applied."""
    path = tmp_path / "router.yaml"
    path.write_text("queue_size: 1\n")
    program = Program(path)
    path.write_text("queue_size: 2\nqueue_timeout_secs: -1\nmax_concurrent_requests: 3\n")

    assert not program.reloading.reload()

    assert program.applied.empty()
    shown = capsys.readouterr()
    assert f"{path}, line 2" in shown.out + shown.err


def test_apply_may_refuse():
    """As when a file that the configuration names is missing."""

    def refuse(_config):
        raise ConfigError("no such file")

    async def check():
        assert not Reloading(Config, None, refuse).reload()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("before", "now", "ends"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
async def test_hangup_of_the_terminal_ends_the_program(monkeypatch, before, now, ends):
    """What SIGHUP meant first; a program without a terminal cannot lose it."""
    terminal = [before]
    monkeypatch.setattr("extproc.reloading.has_terminal", lambda: terminal[0])
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    program = Program(None)
    terminal[0] = now

    async with running(program):
        await program.next()
        os.kill(os.getpid(), signal.SIGHUP)
        if ends:
            async with asyncio.timeout(LIMIT_S):
                await ended.wait()
            assert program.applied.empty()
        else:
            await program.next()
            assert not ended.is_set()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("?"), TypeError("?")])
def test_fault_that_nobody_thought_of_ends_nothing(error):
    """A disk that is full, say: the running configuration stays, and the program goes on."""

    def fail(_config):
        raise error

    async def check():
        assert not Reloading(Config, None, fail).reload()

    asyncio.run(check())
