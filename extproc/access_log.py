"""The access log shell: Envoy reports finished requests in batches; they become metrics."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from extproc.address import join_host_port
from extproc.exchange import ENDPOINT_KEY, METADATA_NAMESPACE
from extproc.h2.grpc import Call, Method, Status
from extproc.log import cap
from extproc.metrics import Metrics
from extproc.xds.model import ADMIN_CLUSTER
from protos.access_log_pb2 import (
    AccessLogCommon,
    HTTPAccessLogEntry,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)

STREAM_ACCESS_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"

log = structlog.get_logger(__name__)


class AccessLogService:
    """Serves ``AccessLogService.StreamAccessLogs``."""

    def __init__(
        self,
        metrics: Metrics,
        worker_url: Callable[[str], str],
        on_failed: Callable[[str], None],
    ) -> None:
        """Make the service.

        *worker_url* maps an endpoint to the worker's URL, or to itself when it is unknown. *on_failed* is
        called with each endpoint that Envoy tried in vain.
        """
        self._on_failed = on_failed
        self._metrics = metrics
        self._worker_url = worker_url

    def methods(self) -> dict[str, Method]:
        """Return what a server registers."""
        return {STREAM_ACCESS_LOGS: self.open}

    def open(self, call: Call) -> _AccessLogStream:
        """Return the handler of one Envoy's stream."""
        return _AccessLogStream(call, self.record)

    def record(self, entry: HTTPAccessLogEntry) -> None:
        """Count one finished request."""
        common = entry.common_properties
        if common.upstream_cluster == ADMIN_CLUSTER:
            return
        metrics = self._metrics
        address = common.upstream_remote_address.socket_address
        worker = (
            self._worker_url(join_host_port(address.address, address.port_value))
            if address.address
            else ""
        )
        metrics.count_request(worker, str(entry.response.response_code.value))
        flags = common.response_flags
        failed = flags.upstream_connection_failure or flags.upstream_remote_reset
        if common.upstream_request_attempt_count > 1 or failed:
            metrics.retries.inc(max(0, common.upstream_request_attempt_count - 1))
            for endpoint in failed_endpoints(common, failed=failed):
                self._on_failed(endpoint)
        if flags.downstream_connection_termination or flags.downstream_remote_reset:
            metrics.client_aborts.inc()
        if common.HasField("time_to_last_downstream_tx_byte"):
            metrics.request_seconds.observe(_seconds(common.time_to_last_downstream_tx_byte))
        if common.HasField("time_to_first_upstream_rx_byte"):
            metrics.first_byte_seconds.observe(_seconds(common.time_to_first_upstream_rx_byte))


def failed_endpoints(common: AccessLogCommon, *, failed: bool) -> list[str]:
    """Return the endpoints of the pick that were tried in vain; *failed*: the last one too."""
    metadata = common.metadata.filter_metadata.get(METADATA_NAMESPACE)
    if metadata is None or ENDPOINT_KEY not in metadata.fields:
        return []
    attempts = max(1, common.upstream_request_attempt_count)
    tried = metadata.fields[ENDPOINT_KEY].string_value.split(",")[:attempts]
    return tried if failed or attempts > len(tried) else tried[:-1]


class _AccessLogStream:
    __slots__ = ("_call", "_record")

    def __init__(self, call: Call, record: Callable[[HTTPAccessLogEntry], None]) -> None:
        self._call = call
        self._record = record

    def on_message(self, message: bytes) -> None:
        try:
            entries = StreamAccessLogsMessage.FromString(message).http_logs.log_entry
        except DecodeError as error:
            log.warning("access log message refused", reason=cap(str(error)))
            self._call.finish(Status.INVALID_ARGUMENT, "not an access log message")
            return
        for entry in entries:
            self._record(entry)

    def on_end(self) -> None:
        self._call.send(StreamAccessLogsResponse().SerializeToString())
        self._call.finish()

    def on_close(self) -> None:
        """Nothing is kept per stream."""


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
