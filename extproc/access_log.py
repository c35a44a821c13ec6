"""The access log shell: Envoy reports attempts that failed, at once, and finished requests, in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from extproc.address import join_host_port
from extproc.attempt import Attempt, Outcome
from extproc.ext_proc_answers import HANDOVER_KEY, METADATA_NAMESPACE
from extproc.h2.grpc import Call, Method, Status
from extproc.log import cap
from extproc.metrics import Metrics
from extproc.xds.model import ADMIN_CLUSTER, ATTEMPTS_LOG, LEGS_LOG
from protos.access_log_pb2 import (
    AccessLogCommon,
    HTTPAccessLogEntry,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)

STREAM_ACCESS_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"

FAULTS = (500, 502, 503, 504)
"""Statuses that speak against a worker. Others from 500 on, 501 and 505 above all, are about what was asked."""

REFUSALS = (408, 429)
SWITCHING_PROTOCOLS = 101
MAX_DOUBTFUL = 10_000

log = structlog.get_logger(__name__)


class Listener(Protocol):
    """Whoever must know what became of requests."""

    def on_failed(self, attempt: Attempt) -> None:
        """Learn that *attempt* failed; its request may still be tried elsewhere."""
        ...

    def on_doubtful(self) -> None:
        """Learn that an attempt failed of which it cannot be told yet whether the worker is to blame."""
        ...

    def on_blamed(self, attempt: Attempt) -> None:
        """Learn that it was the worker's fault."""
        ...

    def on_ended(self, last: Attempt | None, *, retries: int, failed: bool) -> None:
        """Learn that a request is over.

        *last*: its last attempt, which failed only if ``on_failed`` has told; None: no worker was asked.
        *retries*: attempts after the first one. *failed*: whether the last one is among those that failed.
        """
        ...


class AccessLogService:
    """Serves ``AccessLogService.StreamAccessLogs``."""

    def __init__(
        self,
        metrics: Metrics,
        worker_url: Callable[[str], str],
        listener: Listener,
        fetches: Callable[[str], bool] | None = None,
        renewed: Callable[[str], bool] = bool,
    ) -> None:
        """Make the service; *worker_url* maps an endpoint to the worker's URL, or to itself when it is unknown.

        *fetches* tells whether the worker at an endpoint fetches KV blocks from others, and so may fail because
        there are none; None: nobody does. *renewed* tells whether a request, by the token of its handover, was given
        other blocks for a later attempt.
        """
        self._renewed = renewed
        self._fetches = fetches
        self._doubtful: dict[str, list[Attempt]] = {}
        """Errors of workers that fetch, by the id of the request, until it has ended: the log of attempts does not
        tell whether there was anything to fetch."""
        self._listener = listener
        self._metrics = metrics
        self._worker_url = worker_url

    def methods(self) -> dict[str, Method]:
        """Return what a server registers."""
        return {STREAM_ACCESS_LOGS: self.open}

    def open(self, call: Call) -> _AccessLogStream:
        """Return the handler of one Envoy's stream."""
        return _AccessLogStream(call, self)

    def record_attempt(self, entry: HTTPAccessLogEntry) -> None:
        """Pass on an attempt that failed."""
        common = entry.common_properties
        endpoint = endpoint_of(common)
        outcome = outcome_of(entry)
        if common.upstream_cluster == ADMIN_CLUSTER or not endpoint or not _has_failed(outcome):
            return
        started = _start(common)
        status = entry.response.response_code.value
        attempt = Attempt(endpoint, outcome, status, started)
        request_id = entry.request.request_id
        if (
            outcome is Outcome.FAILED
            and request_id
            and self._fetches is not None
            and self._fetches(endpoint)
        ):
            if request_id not in self._doubtful and len(self._doubtful) >= MAX_DOUBTFUL:
                del self._doubtful[
                    next(iter(self._doubtful))
                ]  # an Envoy that ended told no end of it
            self._doubtful.setdefault(request_id, []).append(attempt)
            self._listener.on_doubtful()
        else:
            self._listener.on_failed(attempt)

    def record(self, entry: HTTPAccessLogEntry) -> None:
        """Count one finished request and pass on how it ended."""
        common = entry.common_properties
        if common.upstream_cluster == ADMIN_CLUSTER:
            return
        metrics = self._metrics
        endpoint = endpoint_of(common)
        status = entry.response.response_code.value
        metrics.count_request(self._worker_url(endpoint) if endpoint else "", str(status))
        flags = common.response_flags
        if flags.downstream_connection_termination or flags.downstream_remote_reset:
            metrics.client_aborts.inc()
        if common.HasField("time_to_last_downstream_tx_byte"):
            metrics.request_seconds.observe(_seconds(common.time_to_last_downstream_tx_byte))
        if common.HasField("time_to_first_upstream_rx_byte"):
            metrics.first_byte_seconds.observe(_seconds(common.time_to_first_upstream_rx_byte))
        self._pass_on(entry)
        if self._doubtful:
            self._blame(entry)

    def _blame(self, entry: HTTPAccessLogEntry) -> None:
        """Tell whose fault the errors of a request were that has ended."""
        doubtful = self._doubtful.pop(entry.request.request_id, ())
        common = entry.common_properties
        fields = common.metadata.filter_metadata[METADATA_NAMESPACE].fields
        token = fields[HANDOVER_KEY].string_value if HANDOVER_KEY in fields else ""
        served = outcome_of(entry) is Outcome.SUCCEEDED
        # Another worker could do it with the same blocks, so they were there.
        if not token or (served and not self._renewed(token)):
            for attempt in doubtful:
                self._listener.on_blamed(attempt)

    def record_leg(self, entry: HTTPAccessLogEntry) -> None:
        """Pass on how a prefill leg ended; it is counted where it was sent."""
        self._pass_on(entry)

    def _pass_on(self, entry: HTTPAccessLogEntry) -> None:
        common = entry.common_properties
        endpoint, flags = endpoint_of(common), common.response_flags
        retries = max(0, common.upstream_request_attempt_count - 1)
        if retries:
            self._metrics.retries.inc(retries)
        last, failed = None, False
        if endpoint:
            outcome = outcome_of(entry)
            # Envoy's own limit for a whole stream does not show in the log of attempts.
            failed = _has_failed(outcome) and not flags.stream_idle_timeout
            if outcome is not Outcome.SUCCEEDED:
                outcome = Outcome.UNKNOWN
            total_s = first_s = 0.0
            if common.HasField("time_to_last_downstream_tx_byte"):
                total_s = _seconds(common.time_to_last_downstream_tx_byte)
            if common.HasField("time_to_first_upstream_tx_byte"):
                first_s = _seconds(common.time_to_first_upstream_tx_byte)
            started, status = _start(common), entry.response.response_code.value
            last = Attempt(endpoint, outcome, status, started + first_s, started + total_s)
        self._listener.on_ended(last, retries=retries, failed=failed)


def outcome_of(entry: HTTPAccessLogEntry) -> Outcome:
    """Return how an attempt ended, or the last one of a request."""
    status = entry.response.response_code.value
    flags = entry.common_properties.response_flags
    if status == SWITCHING_PROTOCOLS:  # a WebSocket ends with its connection, whoever closes it
        return Outcome.SUCCEEDED
    if flags.upstream_connection_failure:
        return Outcome.UNREACHABLE
    if (
        flags.upstream_connection_termination
        or flags.upstream_remote_reset
        or flags.upstream_protocol_error
        or flags.upstream_request_timeout
        or flags.local_reset
        or flags.stream_idle_timeout
    ):
        return Outcome.LOST
    if status in FAULTS or status in REFUSALS:
        return Outcome.FAILED if status in FAULTS else Outcome.REFUSED
    if not status or flags.downstream_connection_termination or flags.downstream_remote_reset:
        return Outcome.UNKNOWN
    return Outcome.SUCCEEDED


def endpoint_of(common: AccessLogCommon) -> str:
    """Return the endpoint that was asked, "" when none was."""
    address = common.upstream_remote_address.socket_address
    return join_host_port(address.address, address.port_value) if address.address else ""


def _has_failed(outcome: Outcome) -> bool:
    return outcome not in (Outcome.SUCCEEDED, Outcome.UNKNOWN)


class _AccessLogStream:
    __slots__ = ("_call", "_record", "_service")

    def __init__(self, call: Call, service: AccessLogService) -> None:
        self._call = call
        self._service = service
        self._record = service.record

    def on_message(self, message: bytes) -> None:
        try:
            decoded = StreamAccessLogsMessage.FromString(message)
        except DecodeError as error:
            log.warning("access log message refused", reason=cap(str(error)))
            self._call.finish(Status.INVALID_ARGUMENT, "not an access log message")
            return
        if decoded.identifier.log_name == ATTEMPTS_LOG:  # only the first message has a name
            self._record = self._service.record_attempt
        elif decoded.identifier.log_name == LEGS_LOG:
            self._record = self._service.record_leg
        for entry in decoded.http_logs.log_entry:
            self._record(entry)

    def on_end(self) -> None:
        self._call.send(StreamAccessLogsResponse().SerializeToString())
        self._call.finish()

    def on_close(self) -> None:
        """Nothing is kept per stream."""


def _start(common: AccessLogCommon) -> float:
    return common.start_time.seconds + common.start_time.nanos / 1e9


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
