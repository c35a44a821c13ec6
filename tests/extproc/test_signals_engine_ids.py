"""Prefill workers with Mooncake are asked what their engines are called, and get no prompts before they say."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest
from structlog.testing import capture_logs

from extproc.address import WorkerUrl
from extproc.discovery.updates import Reset, WorkerSpec, WorkerType
from extproc.fleet import Fleet
from extproc.pd.mooncake import Mooncake
from extproc.registry import Registry, Settings
from extproc.router import Progress, Refused, Routed, Router, Split, SplitRules
from extproc.signals.worker_poll import WorkerPoll
from extproc.worker_client import Answer, WorkerRefusedError, WorkerUnreachableError
from policies.base import Request
from tests.extproc.recorder import Recorder

P1, P2, D1 = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"
SILENT = "prefill worker does not say its engine id"
INTERVAL_S = 10.0
REQUEST = Request("POST", "/v1/chat/completions", {}, b'{"model":"x","messages":[]}')


class Answers:
    """A client whose answers to ``/query`` the test sets."""

    def __init__(self):
        self.ids = {}
        self.asked = []

    async def request(self, engine, method, path, *, timeout_s, max_bytes, side_port=None):
        await asyncio.sleep(0)
        if path == "/query":
            self.asked.append((asyncio.get_running_loop().time(), engine.key, side_port))
            answer = self.ids.get(engine.key, WorkerRefusedError("connection refused"))
            if isinstance(answer, Exception):
                raise answer
            return answer if isinstance(answer, Answer) else Answer(200, answer)
        assert side_port is None
        return Answer(200, b'{"data":[{"id":"x"}]}' if path == "/v1/models" else b"")

    def times(self, key):
        return [at for at, asked, _ in self.asked if asked == key]


@pytest.fixture
def answers():
    return Answers()


def spec(url, role, port=None):
    return WorkerSpec(WorkerUrl.parse(url), worker_type=role, bootstrap_port=port)


@contextlib.asynccontextmanager
async def polling(answers, *specs, asks=True, **settings):
    fleet = Fleet(
        Registry(Recorder, Settings(follows_envoy=False, splits=True, **settings)), time.time
    )
    fleet.on_update("static", Reset(specs))
    poll = WorkerPoll(
        fleet, answers, interval_s=INTERVAL_S, rng=random.Random(1), asks_engine_ids=asks
    )
    task = asyncio.ensure_future(poll.run())
    try:
        await asyncio.sleep(0.1)
        yield fleet
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def ask(fleet, *, fallback=True):
    rules = SplitRules(connector=Mooncake(), needs_engine_id=True, fallback=fallback)
    router = Router(fleet.registry, random.Random(1), split_rules=rules)
    return router.decide(REQUEST, 0.0, progress=Progress())


@pytest.mark.looptime
async def test_prefill_workers_are_asked(answers):
    """At their bootstrap port, again and again; decode workers are not."""
    answers.ids = {
        P1: b'{"0":{"engine_id":"a"},"1":{"engine_id":"b"}}',
        P2: b'{"0":{"engine_id":"c"}}',
    }
    prefill = WorkerType.PREFILL
    workers = (spec(P1, prefill, 9001), spec(P2, prefill), spec(D1, WorkerType.DECODE))
    async with polling(answers, *workers, prefill_ranks=2) as fleet:
        first, second, _ = fleet.registry.engines
        assert first.kv_engine_ids == {0: "a", 1: "b"}
        assert [fleet.registry.peer(worker).engine_id for worker in first.workers] == ["a", "b"]
        assert [fleet.registry.has_engine_id(worker) for worker in second.workers] == [True, False]
        answers.ids[P1] = b'{"0":{"engine_id":"z"}}'
        await asyncio.sleep(1.5 * INTERVAL_S)
        assert first.kv_engine_ids == {0: "z"}
    assert {(key, port) for _, key, port in answers.asked} == {(P1, 9001), (P2, 8998)}
    assert len(answers.times(P1)) in {2, 3}


@pytest.mark.looptime
async def test_other_connectors_ask_nobody(answers):
    """Their workers have no bootstrap server."""
    async with polling(answers, spec(P1, WorkerType.PREFILL), asks=False):
        pass
    assert answers.asked == []


@pytest.mark.looptime
async def test_worker_without_an_id_gets_no_prompts(answers):
    """Those that have one do; when nobody has, the decode worker does all of it, or nobody."""
    prefill = WorkerType.PREFILL
    workers = (spec(P1, prefill), spec(P2, prefill), spec(D1, WorkerType.DECODE))
    with capture_logs() as logs:
        async with polling(answers, *workers) as fleet:
            alone = ask(fleet)
            nobody = ask(fleet, fallback=False)
            answers.ids[P2] = b'{"0":{"engine_id":"c"}}'
            await asyncio.sleep(1.1)
            split = [ask(fleet) for _ in range(4)]

    assert isinstance(alone, Routed)
    assert alone.workers[0].url == D1
    assert isinstance(nobody, Refused)
    assert all(isinstance(decision, Split) for decision in split)
    assert {worker.url for decision in split for worker in decision.prefill.workers} == {P2}
    said = [(e["worker"], e["reason"]) for e in logs if e["event"] == SILENT]
    assert sorted(said) == [(P1, "connection refused"), (P2, "connection refused")]


@pytest.mark.looptime
async def test_silent_worker_is_asked_every_second(answers):
    """Until it says; the log says so once for each reason."""
    with capture_logs() as logs:
        async with polling(answers, spec(P1, WorkerType.PREFILL)):
            await asyncio.sleep(5)
            answers.ids[P1] = Answer(503, b"")
            await asyncio.sleep(5)
            answers.ids[P1] = b"{}"
            await asyncio.sleep(5)
            asked = len(answers.asked)
            answers.ids[P1] = b'{"0":{"engine_id":"c"}}'
            await asyncio.sleep(30)
    assert asked >= 14
    assert len(answers.asked) - asked <= 5
    reasons = [entry["reason"] for entry in logs if entry["event"] == SILENT]
    assert reasons[:2] == ["connection refused", "it answers 503"]
    assert len(reasons) == 3


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("failure", "kept"),
    [
        (WorkerUnreachableError("no answer within 5 s"), {0: "c"}),
        (WorkerRefusedError("connection refused"), {}),
        (Answer(500, b""), {}),
        (b"garbage", {}),
    ],
)
async def test_id_is_forgotten_when_it_is_no_longer_there(answers, failure, kept):
    """A server that is merely slow proves nothing."""
    answers.ids[P1] = b'{"0":{"engine_id":"c"}}'
    async with polling(answers, spec(P1, WorkerType.PREFILL)) as fleet:
        (engine,) = fleet.registry.engines
        assert engine.kv_engine_ids == {0: "c"}
        answers.ids[P1] = failure
        await asyncio.sleep(2 * INTERVAL_S)
        assert engine.kv_engine_ids == kept


@pytest.mark.looptime
async def test_worker_that_comes_back_is_asked_at_once(answers):
    """It may be another process, with another id."""
    answers.ids[P1] = b'{"0":{"engine_id":"c"}}'
    async with polling(answers, spec(P1, WorkerType.PREFILL)) as fleet:
        (engine,) = fleet.registry.engines
        answers.ids[P1] = b'{"0":{"engine_id":"d"}}'
        engine.introduced = False
        fleet.on_update(
            "static", Reset((spec(P1, WorkerType.PREFILL), spec(D1, WorkerType.DECODE)))
        )
        await asyncio.sleep(0.1)
        assert engine.kv_engine_ids == {0: "d"}
