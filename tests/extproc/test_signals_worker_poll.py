"""Workers are asked what they serve, each by a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time

import pytest
from structlog.testing import capture_logs

from extproc.address import WorkerUrl
from extproc.discovery.updates import Reset, WorkerSpec
from extproc.engine import State
from extproc.fleet import Fleet
from extproc.models import Load, ModelList
from extproc.registry import Registry, Settings
from extproc.signals.worker_poll import FIRST_TIMEOUT_S, TIMEOUT_S, WorkerPoll
from extproc.sim.config import SimConfig
from extproc.sim.worker import SimWorker
from extproc.worker_client import (
    Answer,
    WorkerClient,
    WorkerRefusedError,
    WorkerUnreachableError,
)
from tests.extproc.recorder import Recorder

A, B, NAMED = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://w1:8000"
INTERVAL_S = 10.0
PATIENCE_S = 10


def spec(url):
    return WorkerSpec(WorkerUrl.parse(url))


def make_fleet(**settings):
    settings = {"follows_envoy": False, **settings}
    return Fleet(Registry(Recorder, Settings(**settings)), time.time)


def ranks_of(fleet):
    return [worker.url for pool in fleet.registry.pools for worker in pool.members]


def poll_tasks():
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith("WorkerPoll.")]


@contextlib.asynccontextmanager
async def polling(fleet, client, interval_s=INTERVAL_S):
    """Poll meanwhile; afterwards no task of it is left."""
    poll = WorkerPoll(fleet, client, interval_s=interval_s, rng=random.Random(1))
    task = asyncio.ensure_future(poll.run())
    try:
        await asyncio.sleep(0)
        yield poll
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert not poll_tasks()


class Answers:
    """A client whose answers the test sets, in virtual time."""

    def __init__(self):
        self.models = {}
        """Names by worker; an error to raise, or a status."""
        self.metrics = {}
        self.delay_s = {}
        self.asked = []

    async def request(self, engine, method, path, *, timeout_s, max_bytes):
        loop = asyncio.get_running_loop()
        self.asked.append((loop.time(), engine.key, path, timeout_s))
        delay_s = self.delay_s.get(engine.key, 0)
        await asyncio.sleep(min(delay_s, timeout_s))
        if delay_s >= timeout_s:
            raise WorkerUnreachableError(f"no answer within {timeout_s:g} s")
        answer = (self.models if path == "/v1/models" else self.metrics).get(engine.key, b"")
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Answer) else Answer(200, answer)

    def serve(self, key, *names):
        entries = ",".join(f'{{"id":"{name}"}}' for name in names)
        self.models[key] = f'{{"data":[{entries}]}}'.encode()

    def times(self, key, path="/v1/models"):
        return [at for at, asked, where, _ in self.asked if (asked, where) == (key, path)]


@pytest.fixture
def answers():
    """Make a client without answers."""
    return Answers()


# --- when workers are asked


@pytest.mark.looptime
async def test_worker_that_is_there_is_asked_at_once(answers):
    """And picked when it has said what it serves."""
    fleet = make_fleet()
    engine = fleet.add(spec(A))
    answers.serve(A, "x")

    async with polling(fleet, answers):
        await asyncio.sleep(0.1)

    assert (engine.base_models, engine.state) == ({"x"}, State.HEALTHY)
    assert [path for *_, path, _ in answers.asked] == ["/v1/models", "/metrics"]


@pytest.mark.looptime
async def test_worker_that_joins_is_asked_at_once(answers):
    """It need not wait for the others' turn."""
    fleet = make_fleet()
    fleet.add(spec(A))
    answers.serve(B, "x")
    async with polling(fleet, answers):
        await asyncio.sleep(1)
        engine = fleet.add(spec(B))
        await asyncio.sleep(0.1)

    assert engine.state is State.HEALTHY
    assert len(answers.times(A)) == len(answers.times(B)) == 1


@pytest.mark.looptime
async def test_workers_are_asked_again_and_again(answers):
    """About once in an interval, never all in the same moment."""
    fleet = make_fleet()
    for url in (A, B):
        fleet.add(spec(url))

    async with polling(fleet, answers):
        await asyncio.sleep(10.5 * INTERVAL_S)

    for url in (A, B):
        times = answers.times(url)
        gaps = [after - at for at, after in itertools.pairwise(times)]
        assert 0.5 * INTERVAL_S <= gaps[0] <= 1.51 * INTERVAL_S
        assert all(0.8 * INTERVAL_S <= gap <= 1.21 * INTERVAL_S for gap in gaps[1:])
        assert 8 <= len(gaps) <= 13
    assert not set(answers.times(A)[1:]) & set(answers.times(B)[1:])


@pytest.mark.looptime
async def test_worker_that_comes_back_is_asked_at_once(answers):
    """It may have been started anew with other models, and is not picked before it has said so."""
    fleet = make_fleet(follows_envoy=True)
    engine = fleet.add(spec(A))
    answers.serve(A, "x")
    place = (
        b'{"cluster_name":"default","upstream_url":"10.0.0.1:8000","action":"%s","enforced":true}'
    )
    passes = (
        b'{"cluster_name":"default","host":{"socket_address":{"address":"10.0.0.1",'
        b'"port_value":8000}},"add_healthy_event":{}}'
    )

    def tell(line):
        fleet.on_verdicts([fleet.registry.verdicts.on_line(line)])

    async with polling(fleet, answers):
        tell(passes)
        await asyncio.sleep(1)
        assert engine.state is State.HEALTHY
        tell(place % b"EJECT")
        answers.serve(A, "y")
        await asyncio.sleep(1)
        assert engine.base_models == {"x"}
        tell(place % b"UNEJECT")
        assert engine.state is State.STARTING
        await asyncio.sleep(0.1)

    assert (engine.base_models, engine.state) == ({"y"}, State.HALF_OPEN)


@pytest.mark.looptime
async def test_worker_without_an_address_is_asked_when_it_has_one(answers):
    """At once, and again when it moves."""
    fleet = make_fleet()
    engine = fleet.add(spec(NAMED))
    answers.serve(NAMED, "x")

    async with polling(fleet, answers):
        await asyncio.sleep(2 * INTERVAL_S)
        assert answers.asked == []
        fleet.on_address("w1", "10.0.0.9")
        await asyncio.sleep(0.1)
        assert engine.state is State.HEALTHY
        answers.serve(NAMED, "y")
        fleet.on_address("w1", "10.0.0.8")
        await asyncio.sleep(0.1)

    assert engine.base_models == {"y"}
    assert len(answers.times(NAMED)) == 2


@pytest.mark.looptime
@pytest.mark.parametrize("ranks", [1, 0])
async def test_answer_of_the_machine_that_was_there_before_does_not_count(answers, ranks):
    """Its name has moved while it was asked; who is there now is asked at once, and must answer itself."""
    fleet = make_fleet(ranks=ranks)
    engine = fleet.add(spec(NAMED))
    answers.serve(NAMED, "old")
    answers.metrics[NAMED] = b"vllm:num_requests_running 3\n"

    async with polling(fleet, answers):
        fleet.on_address("w1", "10.0.0.9")
        await asyncio.sleep(1)
        assert engine.base_models == {"old"}
        answers.delay_s[NAMED] = 2
        await asyncio.sleep(1.6 * INTERVAL_S)
        for _ in range(50):  # in the middle of a question, whichever it is
            answers.serve(NAMED, "older")
            fleet.on_address("w1", "10.0.0.8")
            await asyncio.sleep(0.5)
            assert not engine.introduced
            answers.serve(NAMED, "old")
            fleet.on_address("w1", "10.0.0.9")
            await asyncio.sleep(0.5)
            assert (engine.introduced, engine.base_models) == (False, {"old"})
        answers.serve(NAMED, "new")
        fleet.on_address("w1", "10.0.0.7")
        moved_at = asyncio.get_running_loop().time()
        await asyncio.sleep(4.1)

    assert (engine.state, engine.base_models) == (State.HEALTHY, {"new"})
    first = "/metrics" if ranks == 0 else "/v1/models"
    assert answers.times(NAMED, first)[-1] == pytest.approx(moved_at, abs=0.02)


@pytest.mark.looptime
@pytest.mark.parametrize("ranks", [1, 0])
async def test_move_that_is_not_told_yet_counts(answers, ranks):
    """Changes are gathered for a moment; an answer that comes just then is one of the old machine."""
    fleet = make_fleet(ranks=ranks)
    engine = fleet.add(spec(NAMED))
    answers.serve(NAMED, "old")
    answers.metrics[NAMED] = b"vllm:num_requests_running 3\n"
    answers.delay_s[NAMED] = 1

    async with polling(fleet, answers):
        fleet.on_address("w1", "10.0.0.9")
        await asyncio.sleep(0.9)
        fleet.registry.on_address("w1", "10.0.0.8")
        await asyncio.sleep(0.2)
        assert (engine.introduced, engine.models, engine.loads) == (False, None, {})
        answers.serve(NAMED, "new")
        await asyncio.sleep(0.1)
        fleet.commit()
        await asyncio.sleep(2)

    assert (engine.state, engine.base_models, engine.loads) == (
        State.HEALTHY,
        {"new"},
        {None: Load(3)},
    )
    first = "/metrics" if ranks == 0 else "/v1/models"
    assert answers.times(NAMED, first) == pytest.approx([0, 1], abs=0.02)


@pytest.mark.looptime
async def test_worker_that_comes_back_while_it_is_asked_is_asked_again(answers):
    """The question may have gone to the process that died; its answer, or its silence, says nothing."""
    fleet = make_fleet()
    engine = fleet.add(spec(A))
    answers.serve(A, "x")

    async with polling(fleet, answers):
        await asyncio.sleep(1)
        answers.delay_s[A] = 3600
        await asyncio.sleep(1.6 * INTERVAL_S)
        answers.delay_s[A] = 0
        answers.serve(A, "y")
        engine.introduced = False  # as the registry does when Envoy calls it healthy again
        fleet.commit()
        await asyncio.sleep(0.1)

    assert (engine.state, engine.base_models) == (State.HEALTHY, {"y"})


@pytest.mark.looptime
async def test_workers_that_come_together_are_spread_over_the_interval(answers):
    """Each is asked at once, but a thousand of them not in the same moment again."""
    fleet = make_fleet()
    urls = [f"http://10.0.1.{number}:8000" for number in range(100)]
    fleet.on_update("static", Reset(tuple(map(spec, urls))))

    async with polling(fleet, answers):
        await asyncio.sleep(1.6 * INTERVAL_S)

    assert {answers.times(url)[0] for url in urls} == {answers.times(urls[0])[0]}
    second = sorted(answers.times(url)[1] for url in urls)
    for tenth in range(10):
        begin = (0.5 + tenth / 10) * INTERVAL_S
        assert 2 <= sum(begin <= at < begin + INTERVAL_S / 10 for at in second) <= 25


@pytest.mark.looptime
async def test_worker_that_is_known_already_is_asked_too(answers):
    """What an earlier run knew may be old."""
    first = make_fleet()
    first.registry.on_models(first.add(spec(A)), ModelList(frozenset({"x"})))
    fleet = make_fleet()
    fleet.registry.restore(first.registry.memory(), 0, sources=["admin"])
    fleet.commit()
    assert fleet.registry.get(A).state is State.HEALTHY
    answers.serve(A, "y")

    async with polling(fleet, answers):
        await asyncio.sleep(0.1)

    assert fleet.registry.get(A).base_models == {"y"}


@pytest.mark.looptime
async def test_other_changes_do_not_make_a_worker_be_asked(answers):
    """An update of a thousand workers must not ask a thousand."""
    fleet = make_fleet()
    for url in (A, B):
        fleet.add(spec(url))
    async with polling(fleet, answers):
        await asyncio.sleep(0.1)
        fleet.remove(B)
        fleet.add(spec(NAMED))
        await asyncio.sleep(1)

    assert len(answers.times(A)) == 1


# --- who does not answer


@pytest.mark.looptime
async def test_worker_that_hangs_delays_no_other(answers):
    """It is picked itself when it has been waited for long enough."""
    fleet = make_fleet()
    slow, quick = fleet.add(spec(A)), fleet.add(spec(B))
    answers.delay_s[A] = 3600
    answers.serve(B, "x")

    async with polling(fleet, answers):
        await asyncio.sleep(0.1)
        assert (slow.state, quick.state) == (State.STARTING, State.HEALTHY)
        await asyncio.sleep(FIRST_TIMEOUT_S)
        assert slow.state is State.HEALTHY
        assert slow.base_models is None
        assert slow.models_unread == f"no answer within {FIRST_TIMEOUT_S:g} s"
        assert slow.loads == {}
        await asyncio.sleep(2 * INTERVAL_S)

    assert [timeout_s for *_, key, _, timeout_s in answers.asked if key == A][:3] == [
        FIRST_TIMEOUT_S,
        TIMEOUT_S,
        TIMEOUT_S,
    ]


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (WorkerUnreachableError("connection refused"), "connection refused"),
        (Answer(404, b""), "it answers 404"),
        (b"<html>", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"data":[]}', "it names no base model"),
        (b'{"data":"' + b"x" * 9999, "not JSON"),
    ],
)
async def test_worker_whose_models_cannot_be_read_still_serves(answers, answer, reason):
    """Why is kept, said once, and forgotten when they can be."""
    fleet = make_fleet()
    engine = fleet.add(spec(A))
    answers.models[A] = answer

    with capture_logs() as entries:
        async with polling(fleet, answers):
            await asyncio.sleep(3 * INTERVAL_S)
            assert engine.state is State.HEALTHY
            assert reason in engine.models_unread
            assert len(engine.models_unread) < 300
            answers.serve(A, "x")
            await asyncio.sleep(2 * INTERVAL_S)

    assert (engine.models_unread, engine.base_models) == ("", {"x"})
    said = [entry for entry in entries if entry["event"] == "worker does not say what it serves"]
    assert [entry["worker"] for entry in said] == [A]
    assert reason in said[0]["reason"]


@pytest.mark.looptime
async def test_worker_that_does_not_answer_for_a_while_keeps_its_models(answers):
    """But not its load, which is old."""
    fleet = make_fleet()
    engine = fleet.add(spec(A))
    answers.serve(A, "x")
    answers.metrics[A] = b"vllm:num_requests_running 3\n"

    async with polling(fleet, answers):
        await asyncio.sleep(1)
        assert engine.loads == {None: Load(3)}
        answers.models[A] = answers.metrics[A] = WorkerUnreachableError("gone")
        await asyncio.sleep(2 * INTERVAL_S)

    assert (engine.base_models, engine.loads, engine.models_unread) == ({"x"}, {}, "gone")


@pytest.mark.looptime
async def test_metrics_that_are_refused_or_senseless_do_no_harm(answers):
    """The worker serves without."""
    fleet = make_fleet()
    engine = fleet.add(spec(A))
    answers.serve(A, "x")

    async with polling(fleet, answers):
        for metrics in (
            Answer(404, b"vllm:num_requests_running 3\n"),
            b"\xff\x00",
            b"vllm:num_requests_running 1e308\n" * 2,
        ):
            answers.metrics[A] = metrics
            await asyncio.sleep(2 * INTERVAL_S)

    assert engine.state is State.HEALTHY


@pytest.mark.looptime
async def test_answers_have_bounds_of_their_own(answers, monkeypatch):
    """A list of models is short; metrics of many ranks are not."""
    fleet = make_fleet()
    fleet.add(spec(A))
    bounds = {}
    ask = answers.request

    async def request(engine, method, path, *, timeout_s, max_bytes):
        bounds[path] = max_bytes
        return await ask(engine, method, path, timeout_s=timeout_s, max_bytes=max_bytes)

    monkeypatch.setattr(answers, "request", request)
    async with polling(fleet, answers):
        await asyncio.sleep(0.1)

    assert bounds == {"/v1/models": 256 * 1024, "/metrics": 4 * 2**20}


# --- workers that are gone


REFUSED = WorkerRefusedError("connection refused")


@pytest.mark.looptime
@pytest.mark.parametrize("back", [b'{"data":[{"id":"y"}]}', Answer(503, b"")])
async def test_worker_that_is_gone_is_unhealthy_until_it_answers(answers, back):
    """It is asked every second meanwhile."""
    fleet = make_fleet()
    engine = fleet.add(spec(A))
    answers.serve(A, "x")
    async with polling(fleet, answers):
        await asyncio.sleep(1)
        answers.models[A] = answers.metrics[A] = REFUSED
        await asyncio.sleep(3 * INTERVAL_S)
        assert (engine.state, engine.reason) == (State.UNHEALTHY, "it refuses connections")
        asked = len(answers.times(A))
        await asyncio.sleep(5)
        assert len(answers.times(A)) == asked + 5
        answers.models[A], answers.metrics[A] = back, b""
        await asyncio.sleep(1.1)
        assert engine.state is State.HEALTHY
        asked = len(answers.times(A))
        await asyncio.sleep(5)
        assert len(answers.times(A)) == asked

    assert engine.base_models == ({"y"} if isinstance(back, bytes) else {"x"})


@pytest.mark.looptime
@pytest.mark.parametrize("failure", [WorkerUnreachableError("no answer"), Answer(500, b"")])
async def test_worker_that_is_slow_or_answers_errors_is_for_envoy_to_judge(answers, failure):
    """After as many checks as are configured."""
    fleet = make_fleet()
    engine = fleet.add(spec(A))
    answers.serve(A, "x")
    async with polling(fleet, answers):
        await asyncio.sleep(1)
        answers.models[A] = failure
        await asyncio.sleep(5 * INTERVAL_S)

    assert engine.state is State.HEALTHY


@pytest.mark.looptime
async def test_worker_that_a_request_did_not_reach_is_asked_at_once(answers):
    """It is back in the choice when it answers, and out of it when it is gone."""
    fleet = make_fleet()
    engine, gone = fleet.add(spec(A)), fleet.add(spec(B))
    answers.serve(A, "x")
    answers.serve(B, "x")
    async with polling(fleet, answers):
        await asyncio.sleep(1)
        answers.models[B] = REFUSED
        for endpoint in ("10.0.0.1:8000", "10.0.0.2:8000"):
            fleet.registry.suspend(endpoint, suspended=True, unreached_at=fleet.now())
        fleet.commit()
        await asyncio.sleep(0.1)

    assert len(answers.times(A)) == len(answers.times(B)) == 2
    assert (engine.suspended, engine.state) == (False, State.HEALTHY)
    assert (gone.suspended, gone.state) == (True, State.UNHEALTHY)


# --- ranks


@pytest.mark.looptime
async def test_ranks_are_read_before_a_worker_is_picked(answers):
    """Or its first requests would go to the engine as a whole."""
    fleet = make_fleet(ranks=0)
    picked = []
    fleet.subscribe(
        lambda _: picked.append([w.url for pool in fleet.registry.pools for w in pool.candidates])
    )
    answers.serve(A, "x")
    answers.metrics[A] = b"".join(
        b'vllm:num_requests_running{engine="%d"} %d\n' % (rank, rank + 5) for rank in (0, 1)
    )

    async with polling(fleet, answers):
        engine = fleet.add(spec(A))
        await asyncio.sleep(0.1)

    assert [path for *_, path, _ in answers.asked] == ["/metrics", "/v1/models"]
    assert [found for found in picked if found] == [[f"{A}@0", f"{A}@1"]]
    assert engine.loads == {0: Load(5), 1: Load(6)}


# --- tasks


@pytest.mark.looptime
async def test_worker_that_leaves_is_asked_no_more(answers):
    """Its task ends, though it is in the middle of a question."""
    fleet = make_fleet()
    fleet.on_update("static", Reset((spec(A), spec(B))))
    answers.delay_s[A] = 2
    async with polling(fleet, answers):
        await asyncio.sleep(1)
        assert len(poll_tasks()) == 3
        fleet.remove(A)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(poll_tasks()) == 2
        await asyncio.sleep(3 * INTERVAL_S)

    assert len(answers.times(A)) == 1
    assert len(answers.times(B)) > 1


@pytest.mark.looptime
async def test_worker_that_leaves_and_returns_at_once_is_asked_anew(answers):
    """It is another engine, whose task is another."""
    fleet = make_fleet()
    fleet.on_update("static", Reset((spec(A),)))
    answers.delay_s[A] = 1
    answers.serve(A, "x")
    async with polling(fleet, answers):
        await asyncio.sleep(0.5)
        fleet.remove(A)
        engine = fleet.add(spec(A))
        await asyncio.sleep(1.1)

    assert engine.state is State.HEALTHY
    assert len(answers.times(A)) == 2


@pytest.mark.looptime
async def test_workers_that_come_and_go_leave_nothing_behind(answers):
    """However often, and whatever they were doing."""
    fleet = make_fleet()
    answers.delay_s[A] = 0.7
    async with polling(fleet, answers) as poll:
        for _ in range(100):
            fleet.add(spec(A))
            await asyncio.sleep(0.3)
            fleet.remove(A)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert poll_tasks() == ["WorkerPoll.run"]
        assert not poll._followed


@pytest.mark.looptime
async def test_change_after_the_end_starts_nothing(answers):
    """While the service is stopping, workers may still come and go."""
    fleet = make_fleet()
    async with polling(fleet, answers):
        await asyncio.sleep(0.1)

    fleet.add(spec(A))
    await asyncio.sleep(1)
    fleet.remove(A)

    assert answers.asked == []


# --- real connections


@contextlib.asynccontextmanager
async def sim(**settings):
    """Start a simulated worker."""
    worker = SimWorker(SimConfig(**{"speed": 0.0, **settings}))
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_simulated_workers_say_what_they_serve():
    """Models, adapters, a key, a base path and ranks; one that hangs delays none of them."""

    async def hang(reader, writer):
        await reader.read()
        writer.close()

    fleet = make_fleet(ranks=0)
    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = hanging.sockets[0].getsockname()[1]
    async with (
        sim(models=("x",), api_key="secret", data_parallel_size=2) as first,
        sim(models=("y", "z"), api_key="secret", lora_modules=("sql",), root_path="/b") as second,
        WorkerClient(api_key="secret") as client,
        polling(fleet, client, interval_s=0.05),
    ):
        stuck = fleet.add(spec(f"http://127.0.0.1:{port}"))
        fleet.add(spec(first.url))
        engine = fleet.add(spec(second.url))
        await until(lambda: fleet.registry.model_names() == ["sql", "x", "y", "z"])
        assert set(ranks_of(fleet)) >= {f"{first.url}@0", f"{first.url}@1", f"{second.url}@0"}
        assert engine.adapters == {"sql"}
        assert stuck.state is State.STARTING

        second.set_faults(models_status=500)
        await until(lambda: engine.models_unread == "it answers 500")
        assert engine.base_models == {"y", "z"}
        await second.stop()
        await until(lambda: engine.models_unread == "connection refused")
    hanging.close()
    await hanging.wait_closed()


@pytest.mark.slow
async def test_worker_that_is_started_anew_with_other_models_is_noticed():
    """On the same address, by the next poll."""
    fleet = make_fleet()
    async with WorkerClient() as client, polling(fleet, client, interval_s=0.05):
        async with sim(models=("x",)) as worker:
            engine = fleet.add(spec(worker.url))
            await until(lambda: engine.base_models == {"x"})
        async with sim(models=("y",), port=worker.port):
            await until(lambda: engine.base_models == {"y"})
