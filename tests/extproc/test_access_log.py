"""Envoy's reports become metrics."""

from __future__ import annotations

import grpc.aio
import pytest

from extproc.access_log import STREAM_ACCESS_LOGS, AccessLogService
from extproc.address import Address
from extproc.grpc_server import GrpcServer
from extproc.metrics import Metrics
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


@pytest.fixture
def failed_now():
    """Collect the endpoints that are reported as tried in vain."""
    return []


@pytest.fixture
def service(metrics, failed_now):
    urls = {"10.0.0.5:8000": URL, "[2001:db8::1]:8000": "http://six:8000"}
    return AccessLogService(
        metrics, lambda endpoint: urls.get(endpoint, endpoint), failed_now.append
    )


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


PICK = "10.0.0.1:1,10.0.0.2:1,10.0.0.3:1"


@pytest.mark.parametrize(
    ("pick", "attempts", "flag", "expected"),
    [
        (PICK, 1, "", []),
        (PICK, 2, "", ["10.0.0.1:1"]),
        (PICK, 3, "", ["10.0.0.1:1", "10.0.0.2:1"]),
        (PICK, 5, "", ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]),
        (PICK, 2, "upstream_connection_failure", ["10.0.0.1:1", "10.0.0.2:1"]),
        (PICK, 1, "upstream_connection_failure", ["10.0.0.1:1"]),
        ("", 3, "upstream_connection_failure", []),
    ],
)
def test_endpoints_tried_in_vain_are_reported(service, failed_now, pick, attempts, flag, expected):
    """Those of the pick before the one that served, or all that were tried when none did."""
    entry = HTTPAccessLogEntry()
    common = entry.common_properties
    common.upstream_request_attempt_count = attempts
    if flag:
        setattr(common.response_flags, flag, True)
    if pick:
        fields = common.metadata.filter_metadata["envoy.lb"].fields
        fields["x-gateway-destination-endpoint"].string_value = pick

    service.record(entry)

    assert failed_now == expected
