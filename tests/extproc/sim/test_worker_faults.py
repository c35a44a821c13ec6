"""Faults of a running worker, as flags, as verbs and through ``/_sim/faults``."""

import asyncio

import aiohttp
import pytest

from extproc.sim.faults import Faults
from extproc.sim.recorder import Outcome

CHAT = "/v1/chat/completions"


async def test_the_first_requests_fail_with_the_status_asked_for(start_worker, http, chat_body):
    """Health and models are not counted."""
    worker = await start_worker(faults=Faults(fail_first_n=2, status_code=503))
    await http.get(worker.url + "/health")
    await http.get(worker.url + "/v1/models")

    answers = [await http.post(worker.url + CHAT, json=chat_body()) for _ in range(3)]

    assert [answer.status for answer in answers] == [503, 503, 200]
    error = (await answers[0].json())["error"]
    assert error == {
        "message": "simulated failure",
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }
    assert [arrival.status for arrival in worker.recorder][-3:] == [503, 503, 200]


async def test_a_failure_says_when_to_try_again(start_worker, http, chat_body):
    """Only while the fault says so, and only failed requests do."""
    worker = await start_worker(faults=Faults(fail_first_n=2, status_code=429, retry_after_s=7))

    failed = await http.post(worker.url + CHAT, json=chat_body())
    worker.set_faults(retry_after_s=None, fail_first_n=1)
    others = [await http.post(worker.url + CHAT, json=chat_body()) for _ in range(2)]

    assert failed.headers["Retry-After"] == "7"
    assert [answer.status for answer in others] == [429, 200]
    assert ["Retry-After" in answer.headers for answer in others] == [False, False]


async def test_slowdown_stretches_a_stream_that_has_begun(start_worker, http, chat_body):
    """A token a minute becomes one every 6 ms and back, while the stream is open."""
    worker = await start_worker(itl_ms=6, ttft_ms=0, faults=Faults(slowdown=10_000))
    async with http.post(worker.url + CHAT, json=chat_body(stream=True, max_tokens=6)) as answer:
        await answer.content.readuntil(b"\n\n")
        await answer.content.readuntil(b"\n\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer.content.readany(), 0.05)

        await http.post(worker.url + "/_sim/faults", data=b'{"slowdown": 1}')

        rest = await answer.content.read()
    assert rest.count(b"data: ") == 5 + 1
    assert worker.recorder[-1].outcome is Outcome.ENDED


async def test_a_stalled_stream_stays_open_and_goes_on_when_healed(start_worker, http, chat_body):
    """Three tokens, then silence, then the rest."""
    worker = await start_worker(faults=Faults(stall_after=3))
    async with http.post(worker.url + CHAT, json=chat_body(stream=True, max_tokens=6)) as answer:
        events = [await answer.content.readuntil(b"\n\n") for _ in range(4)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer.content.readany(), 0.05)
        assert worker.state()["requests_active"] == 1

        worker.heal()

        rest = await answer.content.read()
    assert b'"role"' in events[0]
    assert rest.count(b"data: ") == 3 + 1
    assert worker.recorder[-1].outcome is Outcome.ENDED


async def test_an_open_stream_can_be_stalled(start_worker, http, chat_body):
    """The verb acts on what is open already."""
    worker = await start_worker(itl_ms=1)
    async with http.post(worker.url + CHAT, json=chat_body(stream=True, max_tokens=9999)) as answer:
        await answer.content.readline()

        worker.stall()

        async with asyncio.timeout(5):
            while True:
                try:
                    await asyncio.wait_for(answer.content.readany(), 0.05)
                except TimeoutError:
                    break
        answer.close()


async def test_a_stream_is_reset_in_the_middle(start_worker, http, chat_body):
    """The client sees its connection die, the record says the worker did it."""
    worker = await start_worker()
    worker.reset_midstream(after=2)
    answer = await http.post(worker.url + CHAT, json=chat_body(stream=True))

    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
        await answer.read()

    assert worker.recorder[-1].outcome is Outcome.BROKEN
    assert worker.engine.running == 0


async def test_a_crash_resets_everything_and_refuses_what_comes(start_worker, http, chat_body):
    """As when the process is killed."""
    worker = await start_worker(itl_ms=60_000, ttft_ms=0, faults=Faults(crash_on_request=2))
    async with http.post(worker.url + CHAT, json=chat_body(stream=True)) as witness:
        await witness.content.readline()

        with pytest.raises(aiohttp.ClientOSError):
            await http.post(worker.url + CHAT, json=chat_body())

        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
            await witness.read()
    assert worker.crashed.is_set()
    assert {arrival.outcome for arrival in worker.recorder} == {Outcome.BROKEN}
    with pytest.raises(aiohttp.ClientConnectorError):
        await http.get(worker.url + "/health")


async def test_health_can_be_bad_while_requests_are_served(worker, http, chat_body):
    """The two are told apart by whoever checks health."""
    worker.set_health(503)

    assert (await http.get(worker.url + "/health")).status == 503
    assert (await http.post(worker.url + CHAT, json=chat_body())).status == 200


async def test_health_can_hang_while_all_else_answers(worker, http, chat_body):
    """It answers once the fault is gone."""
    await http.post(worker.url + "/_sim/faults", data=b'{"health_hang": true}')
    asked = asyncio.create_task(http.get(worker.url + "/health"))

    done, _ = await asyncio.wait([asked], timeout=0.05)
    others = [
        (await http.get(worker.url + path)).status for path in ("/ping", "/metrics", "/v1/models")
    ]

    assert done == set()
    assert others == [200, 200, 200]
    assert (await http.post(worker.url + CHAT, json=chat_body())).status == 200
    worker.heal()
    assert (await asked).status == 200


async def test_the_list_of_models_can_fail(worker, http, chat_body):
    """An error has no list, another status has it."""
    statuses = []
    for status in (503, 404, 203):
        worker.set_faults(models_status=status)
        answer = await http.get(worker.url + "/v1/models")
        statuses.append(answer.status)
        document = await answer.json()
        assert ("data" in document) is (status == 203)

    assert statuses == [503, 404, 203]
    assert (await http.post(worker.url + CHAT, json=chat_body())).status == 200


async def test_faults_are_changed_over_http(worker, http, chat_body):
    """Fields not named keep their value; a wrong one changes nothing."""
    worker.fail_next(5, status_code=429)

    changed = await http.post(worker.url + "/_sim/faults", data=b'{"fail_first_n": 1}')
    wrong = await http.post(worker.url + "/_sim/faults", data=b'{"fail": 1}')
    shown = await (await http.get(worker.url + "/_sim/faults")).json()

    assert (changed.status, wrong.status) == (200, 400)
    assert (shown["fail_first_n"], shown["status_code"]) == (1, 429)
    answers = [await http.post(worker.url + CHAT, json=chat_body()) for _ in range(2)]
    assert [answer.status for answer in answers] == [429, 200]
