"""Envoy's event logs as they grow, and its admin endpoint now and then."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from extproc.signals import envoy_events
from extproc.signals.envoy_events import (
    FIRST_RECONCILE_LIMIT_S,
    MAX_LOG_BYTES,
    POLL_S,
    RECONCILE_S,
    EnvoyEvents,
    EventLog,
)
from extproc.verdicts import UNKNOWN, Verdicts

HERE = ("p", "10.0.0.1:8000")
EJECT = (
    b'{"cluster_name":"p","upstream_url":"10.0.0.1:8000","action":"EJECT","enforced":true,'
    b'"type":"CONSECUTIVE_5XX"}\n'
)
UNEJECT = b'{"cluster_name":"p","upstream_url":"10.0.0.1:8000","action":"UNEJECT"}\n'
HEALTHY = (
    b'{"cluster_name":"p","host":{"socket_address":{"address":"10.0.0.1","port_value":8000}},'
    b'"add_healthy_event":{}}\n'
)


def clusters(**health):
    address = {"socket_address": {"address": "10.0.0.1", "port_value": 8000}}
    host = {"address": address, "health_status": health}
    return json.dumps({"cluster_statuses": [{"name": "p", "host_statuses": [host]}]}).encode()


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path):
    """Return where a log is, or will be."""
    return tmp_path / "events.jsonl"


@pytest.fixture
def event_log(path):
    """Make the reader of a log."""
    return EventLog(path)


# --- the file


def test_file_that_is_not_there_has_no_lines(event_log, path):
    """Envoy makes it when it starts, perhaps later."""
    assert event_log.read() == []

    append(path, b"a\n")
    assert event_log.read() == [b"a"]


def test_each_line_is_read_once(event_log, path):
    """As soon as it is whole; empty lines are none."""
    append(path, b"a\nb\n")
    assert event_log.read() == [b"a", b"b"]
    assert event_log.read() == []

    append(path, b"\n  \nc\n")

    assert event_log.read() == [b"c"]


def test_line_is_waited_for_until_it_is_whole(event_log, path):
    """However many pieces it comes in."""
    append(path, b"a\nbe")
    assert event_log.read() == [b"a"]
    append(path, b"gun")
    assert event_log.read() == []

    append(path, b"!\n")

    assert event_log.read() == [b"begun!"]


def test_file_that_was_truncated_is_read_from_its_beginning(event_log, path):
    """What was half a line is forgotten."""
    append(path, b"aaaa\nbb")
    event_log.read()

    path.write_bytes(b"c\n")

    assert event_log.read() == [b"c"]


def test_file_that_was_replaced_is_read_from_its_beginning(event_log, path, tmp_path):
    """Though the new one is longer."""
    append(path, b"a\nbb")
    event_log.read()
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"c\nd\nlonger than before\n")

    fresh.replace(path)

    assert event_log.read() == [b"c", b"d", b"longer than before"]


def test_file_that_goes_away_and_returns_is_read_from_its_beginning(event_log, path, tmp_path):
    """As an Envoy that is started anew leaves it."""
    append(path, b"a\n")
    event_log.read()
    path.rename(tmp_path / "kept")
    assert event_log.read() == []

    append(path, b"b\n")

    assert event_log.read() == [b"b"]


def test_large_file_is_read_in_pieces(event_log, path, monkeypatch):
    """A line that is cut by that is whole all the same."""
    monkeypatch.setattr(envoy_events, "READ_BYTES", 5)
    append(path, b"aaa\nbbb\nccc\n")

    assert [event_log.read() for _ in range(4)] == [[b"aaa"], [b"bbb"], [b"ccc"], []]


def test_file_that_has_grown_long_is_emptied(event_log, path, monkeypatch):
    """When it is read to its end; Envoy, which appends, goes on at the beginning."""
    monkeypatch.setattr(envoy_events, "MAX_LOG_BYTES", 8)
    monkeypatch.setattr(envoy_events, "READ_BYTES", 10)
    with path.open("ab", buffering=0) as envoy:
        envoy.write(b"aaaaaaaaaaa\nbb")
        assert event_log.read() == []
        assert path.stat().st_size == 14
        assert event_log.read() == [b"aaaaaaaaaaa"]
        assert path.stat().st_size == 0
        envoy.write(b"b\nc\n")

        assert event_log.read() == [b"bbb", b"c"]
        envoy.write(b"d\n")
        assert event_log.read() == [b"d"]
        assert path.stat().st_size == 6
    assert MAX_LOG_BYTES >= 2**20


def test_file_of_another_user_is_read_though_it_cannot_be_emptied(event_log, path, monkeypatch):
    """Envoy may run as another one; that is said once, and every line is read once."""
    monkeypatch.setattr(envoy_events, "MAX_LOG_BYTES", 1)
    real = type(path).open

    def only_to_read(self, mode="r", *args, **kwargs):
        if "+" in mode:
            raise PermissionError(13, "Permission denied")
        return real(self, mode, *args, **kwargs)

    append(path, b"a\n")
    with monkeypatch.context() as patch, capture_logs() as entries:
        patch.setattr(type(path), "open", only_to_read)
        assert event_log.read() == [b"a"]
        with real(path, "ab") as file:
            file.write(b"b\n")
        assert event_log.read() == [b"b"]

    assert [entry["event"] for entry in entries] == ["event log of envoy cannot be emptied"]


def test_file_that_cannot_be_read_is_complained_of_once(event_log, path, monkeypatch):
    """Not thirty times a second; it is read when it can be."""
    append(path, b"a\n")

    def refuse(*_args):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, capture_logs() as entries:
        patch.setattr(type(path), "open", refuse)
        assert event_log.read() == []
        assert event_log.read() == []

    assert [(entry["log_level"], entry["event"]) for entry in entries] == [
        ("warning", "event log of envoy cannot be read")
    ]
    assert entries[0]["path"] == str(path)
    assert event_log.read() == [b"a"]


# --- following


class Envoy:
    """An admin endpoint whose answer the test sets; None for no answer."""

    def __init__(self):
        self.answer = None
        self.delay_s = 0.0
        self.asked = []
        self.meanwhile = None

    async def clusters(self):
        loop = asyncio.get_running_loop()
        self.asked.append(loop.time())
        answer = self.answer
        await asyncio.sleep(self.delay_s)
        if self.meanwhile is not None:
            self.meanwhile()
        return answer


@pytest.fixture
def envoy():
    """Make an Envoy."""
    return Envoy()


@pytest.fixture
def verdicts():
    """Make verdicts that know nothing."""
    return Verdicts()


@pytest.fixture
def changed():
    """Return the list of changes that were told."""
    return []


@pytest.fixture
def events(verdicts, envoy, path, changed):
    """Make what is tested; its second log is never there."""
    return EnvoyEvents(verdicts, envoy, [path, path.with_suffix(".none")], changed.append)


@asynccontextmanager
async def following(events):
    """Follow meanwhile."""
    task = asyncio.ensure_future(events.run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def test_lines_become_verdicts(events, verdicts, path, changed):
    """All that came are one change, whoever they concern."""
    append(path, HEALTHY + EJECT + HEALTHY.replace(b"10.0.0.1", b"10.0.0.2"))

    events.read_logs()
    events.read_logs()

    assert changed == [[HERE, HERE, ("p", "10.0.0.2:8000")]]
    assert verdicts.get(*HERE).ejected


def test_line_that_is_no_event_is_skipped(events, verdicts, path, changed):
    """With a warning that shows no more of it than a line of a log bears."""
    append(path, b"{" * 5000 + b"\n" + HEALTHY + b'{"cluster_name":"' + b"x" * 5000 + b'"}\n')

    with capture_logs() as entries:
        events.read_logs()

    assert changed == [[HERE]]
    assert verdicts.get(*HERE).good
    assert [entry["event"] for entry in entries] == ["line of envoy's event log skipped"] * 2
    assert all(len(entry["reason"]) < 300 for entry in entries)


async def test_lines_without_news_are_no_change(events, path, changed):
    """Nobody needs to be told."""
    append(path, UNEJECT)

    events.read_logs()

    assert changed == []


@pytest.mark.looptime
async def test_logs_are_followed_closely(events, verdicts, path):
    """A verdict is known a few hundredths of a second after Envoy has written it."""
    async with following(events):
        await asyncio.sleep(1)
        append(path, HEALTHY)

        await asyncio.sleep(POLL_S + 0.001)

    assert verdicts.get(*HERE).good
    assert POLL_S <= 0.05


@pytest.mark.looptime
async def test_envoy_is_asked_now_and_then(events, envoy, verdicts, changed):
    """What a lost line leaves behind is repaired within seconds."""
    async with following(events):
        await asyncio.sleep(3 * RECONCILE_S + 0.2)
        assert len(envoy.asked) == 3
        assert changed == []

        envoy.answer = clusters(failed_outlier_check=True)
        await asyncio.sleep(RECONCILE_S)

    assert changed == [[HERE]]
    assert verdicts.get(*HERE).ejected


@pytest.mark.looptime
async def test_event_that_comes_while_envoy_is_asked_counts(events, envoy, verdicts, path, changed):
    """Its line may be in the log before the older answer is here."""
    append(path, HEALTHY + EJECT)
    events.read_logs()
    envoy.answer, envoy.delay_s = clusters(failed_outlier_check=True), 1
    envoy.meanwhile = lambda: append(path, UNEJECT)

    await events.reconcile()

    assert not verdicts.get(*HERE).ejected
    assert changed == [[HERE, HERE], [HERE]]
    envoy.meanwhile = None
    await events.reconcile()
    assert verdicts.get(*HERE).ejected


@pytest.mark.parametrize("answer", [None, b"", b"not json", b"[]"])
async def test_answer_that_is_none_changes_nothing(events, envoy, verdicts, path, changed, answer):
    """An Envoy that is away, or something else in its place, makes nobody doubt the workers."""
    append(path, HEALTHY)
    events.read_logs()
    envoy.answer = answer

    with capture_logs() as entries:
        await events.reconcile()

    assert changed == [[HERE]]
    assert verdicts.get(*HERE).good
    assert len(entries) == (answer is not None)


@pytest.mark.looptime
async def test_service_that_starts_beside_an_envoy_learns_what_it_thinks(
    events, envoy, verdicts, path
):
    """From its logs and its own words; an endpoint that fails may have passed before."""
    append(path, HEALTHY.replace(b"10.0.0.1", b"10.0.0.2"))
    envoy.answer = clusters(failed_active_health_check=True)

    await events.catch_up()

    assert verdicts.get("p", "10.0.0.2:8000").good
    assert verdicts.get(*HERE).passing is False


async def test_what_envoy_thought_before_is_no_news(events, envoy, changed, path):
    """A worker that was healthy all along has not come back: it is not asked again for its models."""
    append(path, HEALTHY)
    envoy.answer = clusters()

    await events.catch_up()
    assert changed == [[]]

    append(path, EJECT)
    events.read_logs()
    assert changed == [[], [HERE]]


@pytest.mark.looptime
async def test_envoy_that_does_not_answer_does_not_hold_up_the_start(events, envoy, verdicts):
    """It is said, and the service starts."""
    envoy.delay_s, envoy.answer = 60, clusters()
    loop = asyncio.get_running_loop()
    begin = loop.time()

    with capture_logs() as entries:
        await events.catch_up()

    assert loop.time() - begin == pytest.approx(FIRST_RECONCILE_LIMIT_S)
    assert [entry["event"] for entry in entries] == [
        "envoy does not say what it thinks of the workers"
    ]
    assert verdicts.get(*HERE) == UNKNOWN


@pytest.mark.looptime
async def test_envoy_that_is_not_there_does_not_hold_up_the_start(events):
    """That is the usual case: it is started after the service."""
    loop = asyncio.get_running_loop()
    begin = loop.time()

    await events.catch_up()

    assert loop.time() == begin


@pytest.mark.looptime
async def test_events_are_read_while_envoy_is_being_asked(events, envoy, verdicts, path):
    """An admin endpoint that takes its time delays none of them, and its older answer undoes none."""
    append(path, HEALTHY)
    envoy.answer, envoy.delay_s = clusters(failed_active_health_check=True), 2
    async with following(events):
        await asyncio.sleep(RECONCILE_S + 0.1)
        assert len(envoy.asked) == 1
        append(path, EJECT)

        await asyncio.sleep(POLL_S + 0.001)
        assert verdicts.get(*HERE).ejected

        await asyncio.sleep(2)
        assert verdicts.get(*HERE).ejected
        assert verdicts.get(*HERE).passing
        envoy.delay_s = 0
        await asyncio.sleep(RECONCILE_S)

    assert not verdicts.get(*HERE).ejected
    assert verdicts.get(*HERE).passing is False


@pytest.mark.looptime
async def test_envoy_is_asked_one_question_at_a_time(events, envoy):
    """However long it takes to answer."""
    envoy.delay_s = 10 * RECONCILE_S
    async with following(events):
        await asyncio.sleep(25 * RECONCILE_S)

    assert len(envoy.asked) == 3
