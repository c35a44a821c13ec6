"""Workers from a file: real files; in virtual time, the reading thread is done without."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from extproc.address import WorkerUrl
from extproc.discovery import file
from extproc.discovery.file import MAX_FILE_BYTES, RECENT_S, SETTLE_S, load, watch
from extproc.discovery.updates import Reset, WorkerSpec
from extproc.errors import ConfigError

PRIVATE = "hunter2"
ONE, TWO, THREE = "- http://a:1\n", "- http://b:1\n", "- http://c:1\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "workers.yaml"


@pytest.fixture
def without_threads(monkeypatch):
    """Virtual time runs away from threads: what is read is read in the loop."""

    async def inline(function, *arguments):
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)


def urls(update):
    assert isinstance(update, Reset)
    return [spec.key for spec in update.workers]


class Watching:
    """The updates of a watch and its reports, with the times at which they came."""

    def __init__(self, path, **options):
        self.updates = []
        self.reports = []
        self._path = path
        self._options = options

    async def run(self, seconds):
        """Watch for *seconds*."""
        loop = asyncio.get_running_loop()
        start = loop.time()

        def report(reason):
            self.reports.append((round(loop.time() - start, 3), reason))

        try:
            async with (
                asyncio.timeout(seconds),
                aclosing(watch(self._path, report=report, **self._options)) as updates,
            ):
                async for update in updates:
                    self.updates.append((round(loop.time() - start, 3), urls(update)))
        except TimeoutError:
            pass


async def at(seconds, function, *arguments):
    await asyncio.sleep(seconds)
    function(*arguments)


async def scenario(watching, seconds, *events):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watching.run(seconds))
        for event in events:
            tasks.create_task(at(*event))


@pytest.mark.parametrize(
    "content",
    [
        "- http://a:1\n- url: http://b:1\n  weight: 2\n",
        "workers:\n  - http://a:1\n  - {url: http://b:1, weight: 2.0}\n",
        '["http://a:1", {"url": "http://b:1", "weight": 2}]',
        '{\n\t"workers": ["http://a:1",\n\t{"url": "http://b:1", "weight": 2}]\n}\n',
        "{workers: ['http://a:1', {url: 'http://b:1', weight: 2}]}",
        "\ufeff- http://a:1\n- url: http://b:1\n  weight: 2 # twice\n",
    ],
    ids=["YAML", "YAML mapping", "JSON", "JSON with tabs", "YAML flow", "YAML of Windows"],
)
def test_yaml_and_json_are_read_alike(path, content):
    """What ``parse_workers`` takes."""
    path.write_text(content)

    specs = (
        WorkerSpec(WorkerUrl.parse("http://a:1")),
        WorkerSpec(WorkerUrl.parse("http://b:1"), weight=2.0),
    )
    assert load(path) == specs


@pytest.mark.parametrize("content", ["[]", "workers: []", '{"workers":[]}'])
def test_no_workers_is_a_statement(path, content):
    """Unlike an empty file."""
    path.write_text(content)

    assert load(path) == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", " is empty; expected a list of workers, [] if there are none"),
        (b"\n", ": expected a list of workers, or a mapping with the list 'workers', got nothing"),
        (b"# none\n", ": expected a list of workers"),
        (b"workers:\n", ": expected a list of workers"),
        (b"- http://a:1\n- b\n", ": workers[1]: worker URL 'b': expected http://host:port"),
        (
            b"- [",
            " is not YAML: while parsing a flow node, expected the node content, but found '<stream end>' (line 1, column 4)",
        ),
        (b"a: b: c", " is not YAML: mapping values are not allowed here (line 1, column 5)"),
        (b"[1, 2]\n---\n", " is not YAML: expected a single document in the stream, but"),
        (b"- !!python/name:os.system\n", " is not YAML: could not determine a constructor"),
        (b"- \x00", " is not YAML: unexpected characters"),
        (b"- \xff", " is not YAML: unexpected characters"),
        (b"- 2024-99-99", " is not YAML: a value is malformed"),
        (b'- !!int ""', " is not YAML: a value is malformed"),
        (b"- !!bool x", " is not YAML: a value is malformed"),
        (b"- !!timestamp x", " is not YAML: a value is malformed"),
        (b"[" * 1000, " is not YAML: a value is malformed"),
        (b"- " + b"[" * 500 + b"]" * 500, " is not YAML: a value is malformed"),
        (b"&a [*a]", ": workers[0]: expected a URL or a mapping with one, got list"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_file_that_cannot_be_used_is_refused(path, content, message):
    """The file is named, and the place in it."""
    path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        load(path)

    assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.parametrize(
    "content",
    [
        f"- http://user:{PRIVATE}@a:1\n",
        f"- http://user:{PRIVATE}@a:1: [\n",
        f"http://user:{PRIVATE}@a:1: x\n",
        f"- 'http://user:{PRIVATE}@a:1\n",
        f"- http://user:{PRIVATE}@a:1\n\t- x\n",
    ],
)
def test_password_in_a_file_is_never_repeated(path, content):
    """PyYAML shows the text around a fault; we do not."""
    path.write_text(content)

    with pytest.raises(ConfigError) as caught:
        load(path)

    assert PRIVATE not in str(caught.value)


def test_fault_without_a_place_is_told_as_such(path, monkeypatch):
    """Nothing of PyYAML's text goes on that is not known."""

    def safe_load(_):
        raise yaml.YAMLError(PRIVATE)

    monkeypatch.setattr(yaml, "safe_load", safe_load)
    path.write_text("- x")

    with pytest.raises(ConfigError, match=r"is not YAML: malformed$"):
        load(path)


def test_what_is_no_regular_file_is_refused(tmp_path):
    """A pipe without a writer is not waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(ConfigError, match=r"cannot read .*: No such file or directory"):
        load(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read .*pipe: it is no regular file"):
        load(pipe)


def test_largest_file_is_read(path):
    """One byte more is refused before it is parsed."""
    start = b'["http://a:1"]'
    path.write_bytes(start + b" " * (MAX_FILE_BYTES - len(start)))
    assert len(load(path)) == 1

    with path.open("ab") as out:
        out.write(b" ")
    with pytest.raises(ConfigError, match="is larger than 16777216 bytes"):
        load(path)


@pytest.mark.looptime
@pytest.mark.usefixtures("without_threads")
class TestWatch:
    """What a watch says, and when."""

    async def test_file_is_read_at_once_and_again_when_it_changes(self, path):
        """A change is seen at the next look, and believed a moment later."""
        path.write_text(ONE)
        watching = Watching(path)

        await scenario(watching, 5, (0.5, path.write_text, ONE + TWO), (2.5, path.write_text, "[]"))

        assert watching.updates == [
            (0, ["http://a:1"]),
            (1.1, ["http://a:1", "http://b:1"]),
            (3.2, []),
        ]
        assert watching.reports == []
        assert SETTLE_S == 0.1

    async def test_same_meaning_in_other_words_is_no_change(self, path):
        """Comments, the notation, the order of the workers."""
        path.write_text(ONE + TWO)
        watching = Watching(path)

        await scenario(
            watching,
            6,
            (1.5, path.write_text, "# x\n" + ONE + TWO),
            (3.5, path.write_text, json.dumps(["http://B:1/", {"url": "http://a:1"}])),
        )

        assert watching.updates == [(0, ["http://a:1", "http://b:1"])]

    async def test_broken_file_keeps_the_last_good_one(self, path):
        """Each reason is told once, and that it is good again."""
        path.write_text(ONE)
        watching = Watching(path)

        await scenario(
            watching,
            14,
            (0.5, path.write_text, "- ["),
            (2.5, path.write_text, ""),
            (4.5, path.write_text, "- ["),
            (6.5, path.unlink),
            (8.5, path.write_text, ONE),
            (10.7, path.write_text, ""),
        )

        assert watching.updates == [(0, ["http://a:1"])]
        times = [time for time, _ in watching.reports]
        reasons = [reason for _, reason in watching.reports]
        assert times == [1.1, 3.2, 7.4, 9.5, 11.6]
        assert [
            wanted in reason
            for wanted, reason in zip(
                ["not YAML", "is empty", "No such file", "", "is empty"], reasons, strict=True
            )
        ] == [True] * 5
        assert reasons[3] == ""

    async def test_file_that_is_not_there_yet_is_waited_for(self, path):
        """Nothing is said about the workers until then."""
        watching = Watching(path, interval_s=3)

        await scenario(watching, 10, (4, path.write_text, TWO))

        assert watching.updates == [(6.1, ["http://b:1"])]
        assert [time for time, _ in watching.reports] == [0, 6.1]

    async def test_file_that_goes_after_a_long_time_is_missed(self, path):
        """Its last content stays in force."""
        path.write_text(ONE)
        watching = Watching(path)

        await scenario(watching, 40, (29.5, path.unlink))

        assert watching.updates == [(0, ["http://a:1"])]
        assert watching.reports == [(30.1, f"cannot read {path}: No such file or directory")]

    async def test_file_that_is_being_written_is_not_taken_for_a_shorter_one(self, path):
        """Half a list is a valid list: two looks must agree."""
        path.write_text(ONE + TWO)
        watching = Watching(path)

        await scenario(
            watching,
            4,
            (0.95, path.write_text, ""),
            (1.05, path.write_text, ONE),
            (1.15, path.write_text, ONE + TWO + THREE),
        )

        assert watching.updates == [
            (0, ["http://a:1", "http://b:1"]),
            (1.3, ["http://a:1", "http://b:1", "http://c:1"]),
        ]
        assert watching.reports == []

    async def test_replaced_file_is_seen(self, path):
        """Written beside it and renamed, as careful programs do."""
        path.write_text(ONE)
        fresh = path.with_suffix(".new")
        fresh.write_text(TWO)
        watching = Watching(path)

        await scenario(watching, 3, (1.5, fresh.replace, path))

        assert watching.updates == [(0, ["http://a:1"]), (2.1, ["http://b:1"])]

    async def test_configmap_is_followed(self, tmp_path):
        """Kubernetes swaps a directory by a symbolic link; the file itself is never written to."""
        for name, content in (("..1", ONE), ("..2", TWO)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "workers.yaml").write_text(content)
            os.utime(tmp_path / name / "workers.yaml", (0, 0))
        (tmp_path / "..data").symlink_to("..1")
        (tmp_path / "workers.yaml").symlink_to("..data/workers.yaml")
        (tmp_path / "..data_tmp").symlink_to("..2")
        watching = Watching(tmp_path / "workers.yaml")

        await scenario(watching, 6, (3.5, (tmp_path / "..data_tmp").replace, tmp_path / "..data"))

        assert watching.updates == [(0, ["http://a:1"]), (4.1, ["http://b:1"])]

    async def test_change_that_shows_in_no_time_stamp_is_seen_for_a_while(self, path, monkeypatch):
        """Within the steps of a coarse clock the content itself is compared; later it is not read."""
        monkeypatch.setattr(file, "_signature", lambda status: (status.st_size,))
        path.write_text(ONE)
        watching = Watching(path)

        await scenario(
            watching, 10, (1.5, path.write_text, TWO), (RECENT_S + 0.5, path.write_text, THREE)
        )

        assert watching.updates == [(0, ["http://a:1"]), (2.1, ["http://b:1"])]

    async def test_file_at_rest_is_not_read(self, path, monkeypatch):
        """A look at its times is enough, however large it is."""
        reads = []
        read = file._read
        monkeypatch.setattr(file, "_read", lambda path: reads.append(path) or read(path))
        path.write_text(ONE)
        watching = Watching(path)

        await watching.run(60)

        assert len(reads) == RECENT_S + 1

    async def test_broken_file_at_rest_is_not_parsed_again(self, path, monkeypatch):
        """Nor one that was only touched."""
        parsed = []
        parse = file._parse
        monkeypatch.setattr(
            file, "_parse", lambda path, content: parsed.append(path) or parse(path, content)
        )
        path.write_text("- [")
        watching = Watching(path)

        await scenario(watching, 60, (30, path.touch))

        assert len(parsed) == len(watching.reports) == 1

    @given(
        contents=st.lists(
            st.sampled_from([ONE, TWO, ONE + TWO, TWO + ONE, "[]", "", "- [", "x", None])
            | st.text(max_size=3),
            max_size=6,
        )
    )
    async def test_last_good_content_is_what_counts(self, contents):
        """Whatever came between; and what is told is always another than before."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "workers.yaml"
            good = []
            events = []
            for number, content in enumerate(contents):
                if content is None:
                    events.append((2 * number + 0.5, path.unlink, True))
                    continue
                path.write_text(content)
                with suppress(ConfigError):
                    good.append(frozenset(spec.key for spec in load(path)))
                events.append((2 * number + 0.5, path.write_text, content))
            path.unlink(missing_ok=True)
            watching = Watching(path)

            await scenario(watching, 2 * len(contents) + 2, *events)

        told = [frozenset(keys) for _, keys in watching.updates]
        assert told == [
            keys for keys, before in zip(good, [None, *good], strict=False) if keys != before
        ]
        reasons = [reason for _, reason in watching.reports]
        assert all(
            reason or before for reason, before in zip(reasons, ["", *reasons], strict=False)
        )


async def test_loop_goes_on_while_a_file_is_read(path, monkeypatch):
    """Reading and parsing take a thread of their own, in real time."""
    parse = file._parse
    ticks = 0
    meanwhile = []

    def parse_slowly(path, content):
        before = ticks
        time.sleep(0.1)
        meanwhile.append(ticks - before)
        return parse(path, content)

    monkeypatch.setattr(file, "_parse", parse_slowly)
    path.write_text(ONE)
    watching = Watching(path, interval_s=0.01)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watching.run(0.2))
        while not task.done():
            await asyncio.sleep(0.005)
            ticks += 1

    assert [keys for _, keys in watching.updates] == [["http://a:1"]]
    [count] = meanwhile
    assert count > 3
