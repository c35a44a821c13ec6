"""The ext_proc shell: drives one ``Exchange`` per call and counts what it decides."""

from __future__ import annotations

import random
import time

import structlog
from google.protobuf.message import DecodeError

from extproc.errors import ProtocolError
from extproc.exchange import DEFAULT_MAX_ROUTED_BYTES, Exchange
from extproc.h2.grpc import Call, Method, Status
from extproc.log import cap
from extproc.metrics import Metrics
from extproc.router import Refused, Router
from protos.ext_proc_pb2 import ProcessingRequest

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

log = structlog.get_logger(__name__)


class ExtProcService:
    """Serves ``ExternalProcessor.Process``."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        *,
        ids: random.Random,
        max_body_bytes: int,
        max_routed_bytes: int = DEFAULT_MAX_ROUTED_BYTES,
    ) -> None:
        self.metrics = metrics
        self._router = router
        self._ids = ids
        self._max_body_bytes = max_body_bytes
        self._max_routed_bytes = max_routed_bytes

    def methods(self) -> dict[str, Method]:
        """Return what a server registers."""
        return {PROCESS: self.open}

    def open(self, call: Call) -> _Process:
        """Return the handler of one call: one HTTP request and its response."""
        exchange = Exchange(
            self._router,
            ids=self._ids,
            max_body_bytes=self._max_body_bytes,
            max_routed_bytes=self._max_routed_bytes,
        )
        return _Process(call, exchange, self.metrics)


class _Process:
    __slots__ = ("_call", "_exchange", "_metrics")

    def __init__(self, call: Call, exchange: Exchange, metrics: Metrics) -> None:
        self._call = call
        self._exchange = exchange
        self._metrics = metrics

    def on_message(self, message: bytes) -> None:
        exchange = self._exchange
        undecided = exchange.decision is None
        started = time.monotonic()
        try:
            answers = exchange.receive(ProcessingRequest.FromString(message), started)
        except (ProtocolError, DecodeError) as error:
            self._metrics.stream_errors.labels("protocol").inc()
            log.warning("ext_proc message refused", reason=cap(str(error)))
            # Never end with OK here: Envoy takes that for "continue without me", always.
            self._call.finish(Status.INVALID_ARGUMENT, cap(str(error)))
            return
        except Exception:
            self._metrics.stream_errors.labels("internal").inc()
            log.exception("ext_proc stream failed")
            self._call.finish(Status.INTERNAL, "internal error")
            return
        if undecided and exchange.decision is not None:
            self._observe(time.monotonic() - started)
        for answer in answers:
            self._call.send(answer)

    def on_end(self) -> None:
        self._call.finish()

    def on_close(self) -> None:
        self._exchange.close(time.monotonic())

    def _observe(self, duration_s: float) -> None:
        metrics = self._metrics
        metrics.decision_seconds.observe(duration_s)
        decision = self._exchange.decision
        if isinstance(decision, Refused):
            metrics.refused[decision.refusal].inc()
        else:
            metrics.routed.inc()
