"""The ext_proc shell: reads Envoy's messages, drives one ``Exchange`` per stream, writes its answers.

Generic handlers with raw bytes, ``context.read`` and ``context.write`` instead of generators: the
cheapest way that grpc.aio has.
"""

from __future__ import annotations

import random
import time

import grpc
import structlog
from google.protobuf.message import DecodeError

from extproc.errors import ProtocolError
from extproc.exchange import Exchange
from extproc.grpc_types import Stream, stream_stream
from extproc.log import cap
from extproc.metrics import Metrics
from extproc.router import Refused, Router
from protos.ext_proc_pb2 import ProcessingRequest

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"

log = structlog.get_logger(__name__)


class ExtProcService:
    """Serves ``ExternalProcessor.Process``."""

    def __init__(
        self, router: Router, metrics: Metrics, *, ids: random.Random, max_body_bytes: int
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._ids = ids
        self._max_body_bytes = max_body_bytes

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a server registers."""
        return stream_stream(SERVICE_NAME, "Process", self.process)

    async def process(self, _requests: object, context: Stream) -> None:
        """Serve one stream: one HTTP request and its response."""
        exchange = Exchange(self._router, ids=self._ids, max_body_bytes=self._max_body_bytes)
        monotonic = time.monotonic
        try:
            while isinstance(raw := await context.read(), bytes):  # else EOF
                started = monotonic()
                undecided = exchange.decision is None
                answers = exchange.receive(ProcessingRequest.FromString(raw), started)
                if undecided and exchange.decision is not None:
                    self._observe(exchange, monotonic() - started)
                del raw
                for answer in answers:
                    await context.write(answer)
                del answers
        except (ProtocolError, DecodeError) as error:
            self._metrics.stream_errors.labels("protocol").inc()
            log.warning("ext_proc message refused", reason=cap(str(error)))
            # Never end with OK here: Envoy takes that for "continue without me", always.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, cap(str(error)))
        except Exception:
            self._metrics.stream_errors.labels("internal").inc()
            log.exception("ext_proc stream failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")
        finally:
            exchange.close(monotonic())

    def _observe(self, exchange: Exchange, duration_s: float) -> None:
        metrics = self._metrics
        metrics.decision_seconds.observe(duration_s)
        decision = exchange.decision
        if isinstance(decision, Refused):
            metrics.refused[decision.refusal].inc()
        else:
            metrics.routed.inc()
