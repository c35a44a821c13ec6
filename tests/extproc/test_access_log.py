"""Envoy's reports become metrics."""

from __future__ import annotations

import dataclasses

import grpc.aio
import pytest

from extproc.access_log import MAX_DOUBTFUL, STREAM_ACCESS_LOGS, AccessLogService
from extproc.address import Address
from extproc.attempt import Attempt, Outcome
from extproc.ext_proc_answers import HANDOVER_KEY
from extproc.grpc_server import GrpcServer
from extproc.metrics import Metrics
from extproc.xds.model import ATTEMPTS_LOG, REQUESTS_LOG
from protos.access_log_pb2 import (
    HTTPAccessLogEntry,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)

URL = "http://worker:8000"
SECONDS = "vllm_extproc_request_duration_seconds"
FIRST_BYTE = "vllm_extproc_time_to_first_byte_seconds"


@pytest.fixture
def metrics(registry):
    return Metrics("random", registry)


@dataclasses.dataclass
class Ended:
    last: Attempt | None
    retries: int
    failed: bool


class Recorder:
    """Writes down what it is told."""

    def __init__(self):
        self.heard = []
        self.doubtful = 0
        self.blamed = []

    def on_failed(self, attempt):
        self.heard.append(attempt)

    def on_doubtful(self):
        self.doubtful += 1

    def on_blamed(self, attempt):
        self.blamed.append(attempt)

    def on_ended(self, last, *, retries, failed):
        self.heard.append(Ended(last, retries, failed))


@pytest.fixture
def listener():
    return Recorder()


@pytest.fixture
def heard(listener):
    """Return what was passed on so far."""
    return listener.heard


@pytest.fixture
def service(metrics, listener):
    urls = {"10.0.0.5:8000": URL, "[2001:db8::1]:8000": "http://six:8000"}
    return AccessLogService(metrics, lambda endpoint: urls.get(endpoint, endpoint), listener)


def entry(address="10.0.0.5", code=200, cluster="default", attempts=1):
    found = HTTPAccessLogEntry()
    common = found.common_properties
    common.upstream_cluster = cluster
    common.upstream_request_attempt_count = attempts
    if address:
        common.upstream_remote_address.socket_address.address = address
        common.upstream_remote_address.socket_address.port_value = 8000
    if code:
        found.response.response_code.value = code
    return found


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("address", "code", "worker", "label"),
    [
        ("10.0.0.5", 200, URL, "200"),
        ("10.0.0.5", 503, URL, "503"),
        ("2001:DB8:0::1", 200, "http://six:8000", "200"),
        ("10.9.9.9", 200, "10.9.9.9:8000", "200"),
        ("", 503, "", "503"),
        ("", 0, "", "0"),
    ],
    ids=["worker", "its error", "IPv6", "removed worker", "none served", "client left"],
)
def test_request_is_counted_by_worker_and_status(service, metrics, *, address, code, worker, label):
    """By the URL where it is known, else by the endpoint, else under no name."""
    service.record(entry(address=address, code=code))

    assert value(metrics, "vllm_extproc_requests_total", worker=worker, code=label) == 1


def test_probes_are_not_counted(service, metrics):
    """Requests to the service's own endpoints are no work of a worker."""
    service.record(entry(cluster="extproc_admin"))

    assert value(metrics, "vllm_extproc_requests_total", worker=URL, code="200") is None


@pytest.mark.parametrize(("attempts", "retries"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_attempts_after_the_first_are_retries(service, metrics, attempts, retries):
    """A request that never left for a worker has no attempt at all."""
    service.record(entry(attempts=attempts))

    assert value(metrics, "vllm_extproc_retries_total") == retries


@pytest.mark.parametrize(
    ("flag", "aborts"),
    [
        ("downstream_connection_termination", 1),
        ("downstream_remote_reset", 1),
        ("upstream_remote_reset", 0),
        ("upstream_connection_failure", 0),
        ("upstream_connection_termination", 0),
    ],
)
def test_only_a_client_that_left_is_an_abort(service, metrics, flag, aborts):
    """HTTP/1.1 and HTTP/2 have a flag each; a worker's failure is none."""
    report = entry()
    setattr(report.common_properties.response_flags, flag, True)

    service.record(report)

    assert value(metrics, "vllm_extproc_client_aborts_total") == aborts


def test_durations_are_observed_in_seconds(service, metrics):
    """Seconds and nanoseconds together."""
    report = entry()
    report.common_properties.time_to_last_downstream_tx_byte.FromMilliseconds(2500)
    report.common_properties.time_to_first_upstream_rx_byte.FromNanoseconds(250_000_000)

    service.record(report)

    assert value(metrics, f"{SECONDS}_sum") == 2.5
    assert value(metrics, f"{FIRST_BYTE}_sum") == 0.25


def test_durations_that_are_not_known_are_not_observed(service, metrics):
    """No zero that would pull an average down."""
    service.record(entry())

    assert value(metrics, f"{SECONDS}_count") == 0
    assert value(metrics, f"{FIRST_BYTE}_count") == 0


@pytest.fixture
async def call(service, tmp_path):
    """Return a caller of a server with the service, over a Unix socket."""
    server = GrpcServer(service.methods(), max_message_bytes=100_000)
    await server.start(Address(path=f"{tmp_path}/s"))
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        method = channel.stream_unary(STREAM_ACCESS_LOGS)
        yield lambda messages: method(iter(messages), timeout=10)
    await server.stop()


async def test_batches_are_counted_until_envoy_goes(call, metrics):
    """Several messages with several entries; the answer is empty."""
    batch = StreamAccessLogsMessage()
    batch.http_logs.log_entry.extend([entry(), entry(code=404)])
    raw = batch.SerializeToString()

    answer = await call([raw, StreamAccessLogsMessage().SerializeToString(), raw])

    assert StreamAccessLogsResponse.FromString(answer) == StreamAccessLogsResponse()
    for code in ("200", "404"):
        assert value(metrics, "vllm_extproc_requests_total", worker=URL, code=code) == 2


async def test_garbage_ends_the_stream_with_invalid_argument(call, metrics):
    """What came before it counts, and the next stream is served."""
    good = StreamAccessLogsMessage()
    good.http_logs.log_entry.add().CopyFrom(entry())

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call([good.SerializeToString(), b"\xff\xff"])
    await call([good.SerializeToString()])

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert value(metrics, "vllm_extproc_requests_total", worker=URL, code="200") == 2


async def test_first_message_says_which_log_it_is(call, metrics, heard):
    """The later ones of the stream are of the same; the name of a log that nobody knows is that of requests."""
    for name in (ATTEMPTS_LOG, REQUESTS_LOG, "other"):
        first, later = StreamAccessLogsMessage(), StreamAccessLogsMessage()
        first.identifier.log_name = name
        for message in (first, later):
            message.http_logs.log_entry.append(entry(code=500))

        await call([first.SerializeToString(), later.SerializeToString()])

    assert value(metrics, "vllm_extproc_requests_total", worker=URL, code="500") == 4
    assert [type(event) for event in heard] == [Attempt] * 2 + [Ended] * 4


def flagged(flag="", *, code=0, **options):
    report = entry(code=code, **options)
    if flag:
        setattr(report.common_properties.response_flags, flag, True)
    return report


@pytest.mark.parametrize(
    ("flag", "code", "outcome"),
    [
        ("", 500, Outcome.FAILED),
        ("", 502, Outcome.FAILED),
        ("", 503, Outcome.FAILED),
        ("", 504, Outcome.FAILED),
        ("", 501, None),
        ("", 505, None),
        ("", 599, None),
        ("upstream_connection_termination", 501, Outcome.LOST),
        ("", 429, Outcome.REFUSED),
        ("", 408, Outcome.REFUSED),
        ("upstream_connection_failure", 0, Outcome.UNREACHABLE),
        ("upstream_connection_termination", 0, Outcome.LOST),
        ("upstream_connection_termination", 200, Outcome.LOST),
        ("upstream_remote_reset", 0, Outcome.LOST),
        ("upstream_protocol_error", 200, Outcome.LOST),
        ("upstream_request_timeout", 0, Outcome.LOST),
        ("stream_idle_timeout", 0, Outcome.LOST),
        ("stream_idle_timeout", 200, Outcome.LOST),
        ("local_reset", 0, Outcome.LOST),
        ("", 0, None),
        ("", 200, None),
        ("", 404, None),
        ("upstream_connection_termination", 101, None),
    ],
)
def test_failed_attempt_is_passed_on(service, heard, *, flag, code, outcome):
    """With the endpoint, the status and when it began; what is no failure of the worker is not."""
    report = flagged(flag, code=code)
    report.common_properties.start_time.FromMilliseconds(1_500)

    service.record_attempt(report)

    expected = [] if outcome is None else [Attempt("10.0.0.5:8000", outcome, code, 1.5)]
    assert heard == expected


def test_attempts_at_nobody_are_none(service, heard):
    """Envoy had no worker to ask, or asked the service itself."""
    service.record_attempt(flagged(code=503, address=""))
    service.record_attempt(flagged(code=503, cluster="extproc_admin"))

    assert heard == []


@pytest.mark.parametrize(
    ("flag", "code", "outcome", "failed"),
    [
        ("", 200, Outcome.SUCCEEDED, False),
        ("", 404, Outcome.SUCCEEDED, False),
        ("", 501, Outcome.SUCCEEDED, False),
        ("", 505, Outcome.SUCCEEDED, False),
        ("", 101, Outcome.SUCCEEDED, False),
        ("upstream_connection_termination", 101, Outcome.SUCCEEDED, False),
        ("downstream_connection_termination", 101, Outcome.SUCCEEDED, False),
        ("downstream_connection_termination", 200, Outcome.UNKNOWN, False),
        ("downstream_remote_reset", 0, Outcome.UNKNOWN, False),
        ("", 500, Outcome.UNKNOWN, True),
        ("", 429, Outcome.UNKNOWN, True),
        ("upstream_protocol_error", 200, Outcome.UNKNOWN, True),
        ("upstream_connection_failure", 503, Outcome.UNKNOWN, True),
        ("upstream_request_timeout", 504, Outcome.UNKNOWN, True),
        ("stream_idle_timeout", 504, Outcome.UNKNOWN, False),
    ],
)
def test_end_of_a_request_is_passed_on(service, heard, *, flag, code, outcome, failed):
    """Successes; failures are known by then. With the time at which the worker was asked last."""
    report = flagged(flag, code=code, attempts=3)
    common = report.common_properties
    common.start_time.FromSeconds(100)
    common.time_to_first_upstream_tx_byte.FromMilliseconds(2_500)
    common.time_to_last_downstream_tx_byte.FromSeconds(7)

    service.record(report)

    last = Attempt("10.0.0.5:8000", outcome, code, 102.5, 107.0)
    assert heard == [Ended(last, retries=2, failed=failed)]


def test_request_that_no_worker_was_asked_for_has_no_last_attempt(service, heard):
    """Refused by the service, or without a worker."""
    service.record(flagged(code=503, address="", attempts=0))

    assert heard == [Ended(None, retries=0, failed=False)]


@pytest.fixture
def fetching(metrics, listener):
    """Return the service before workers that fetch KV blocks, but for one that prefills."""
    return AccessLogService(
        *(metrics, str, listener, lambda endpoint: endpoint != "10.0.0.9:8000"),
        lambda token: token == RENEWED,
    )


RENEWED = "token of a request that was given other blocks"


def of_request(found, *, handed=True, request_id="r", token="t"):  # noqa: S107  a name
    """Make it one of a request; *handed*: whose prompt another worker computed."""
    found.request.request_id = request_id
    if handed:
        metadata = found.common_properties.metadata.filter_metadata["envoy.lb"]
        metadata.fields[HANDOVER_KEY].string_value = token
    return found


@pytest.mark.parametrize(
    ("errors", "code", "handed", "blamed"),
    [
        (1, 200, True, 1),
        (1, 500, True, 0),
        (2, 500, True, 0),
        (0, 200, True, 0),
        (2, 200, False, 2),
        (1, 500, False, 1),
    ],
)
def test_error_counts_only_if_blocks_were_there(
    fetching, listener, *, errors, code, handed, blamed
):
    """Else there may have been nothing to fetch, which is not the fault of the worker that was to do it."""
    for _ in range(errors):
        fetching.record_attempt(of_request(entry(code=500), handed=False))
    assert listener.doubtful == errors
    assert listener.heard == []

    end = entry(address="10.0.0.6", code=code, attempts=errors + 1)
    fetching.record(of_request(end, handed=handed))
    fetching.record(of_request(entry(address="10.0.0.6", attempts=2)))

    assert [attempt.endpoint for attempt in listener.blamed] == ["10.0.0.5:8000"] * blamed


@pytest.mark.parametrize("errors", [1, 2])
def test_error_does_not_count_where_the_blocks_were_renewed(fetching, listener, errors):
    """Those of before may have been gone."""
    for _ in range(errors):
        fetching.record_attempt(of_request(entry(code=500), handed=False))

    fetching.record(of_request(entry(address="10.0.0.6", attempts=errors + 1), token=RENEWED))

    assert listener.blamed == []


def test_error_of_a_prefill_worker_counts_at_once(fetching, listener):
    """It fetches nothing."""
    fetching.record_attempt(of_request(entry(address="10.0.0.9", code=500), handed=False))

    assert len(listener.heard) == 1


def test_connection_that_breaks_counts_at_once(fetching, listener):
    """Whatever the request was."""
    broken = of_request(entry(code=0))
    broken.common_properties.response_flags.upstream_remote_reset = True

    fetching.record_attempt(broken)

    assert len(listener.heard) == 1
    assert listener.doubtful == 0


def test_doubts_are_bounded(fetching, listener):
    """An Envoy that is killed never tells how its requests ended."""
    for number in range(MAX_DOUBTFUL + 5):
        fetching.record_attempt(of_request(entry(code=500), request_id=str(number)))

    fetching.record(of_request(entry(code=500), handed=False, request_id="0"))
    fetching.record(of_request(entry(code=500), handed=False, request_id="5"))

    assert len(listener.blamed) == 1
