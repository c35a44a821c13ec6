"""From an HTTP request to the handler of its route: admit, read, record, spoil or serve, map errors."""

import asyncio
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import structlog
from aiohttp import web

from extproc.sim.api_errors import ApiError, invalid
from extproc.sim.control import PREFIX as CONTROL_PREFIX
from extproc.sim.engine_loop import EngineStoppedError
from extproc.sim.exchange import Exchange, Replies, Route, Routes
from extproc.sim.fault_switch import FaultSwitch
from extproc.sim.faults import Verdict
from extproc.sim.gate import Gate
from extproc.sim.recorder import Arrival, Outcome, Recorder
from extproc.sim.tokens import TooManyTokensError

PROBES = frozenset({"/health", "/ping", "/metrics"})
"""Paths counted but not recorded: they come every second and would push out what matters."""

log = structlog.get_logger(__name__)


class Dispatcher:
    """Serves every request of one worker; *crash* ends the worker when a fault says so."""

    def __init__(
        self,
        gate: Gate,
        recorder: Recorder,
        faults: FaultSwitch,
        replies: Replies,
        *,
        crash: Callable[[], None],
    ) -> None:
        self.probes: Counter[str] = Counter()
        """Requests to each of ``PROBES``."""
        self.received = 0
        """Inference requests so far."""
        self.active = 0
        """Inference requests whose response has not ended."""
        self.stopping = False
        """Whether the worker cuts its responses itself."""
        self._gate = gate
        self._recorder = recorder
        self._faults = faults
        self._replies = replies
        self._crash = crash
        self._routes: Routes = {}
        self._paths: frozenset[str] = frozenset()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unknown = Route(self._not_found, keep_body=False)

    def serve(self, routes: Routes) -> None:
        """Answer *routes* from here on."""
        self._routes = routes
        self._paths = frozenset(path for _, path in routes)

    async def cancel_all(self, timeout: float) -> None:
        """Cancel every request being handled and wait for that, at most *timeout* seconds."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())  # aiohttp runs handlers in tasks
        path = self._gate.inner_path(request.raw_path)
        route = self._routes.get((request.method, path), self._unknown)
        exchange = Exchange(request, path, self._record(request, path))
        self._tasks.add(task)
        self.active += route.inference
        try:
            await _receive(exchange, keep=route.keep_body)
            response = await self._answer(exchange, route)
        except asyncio.CancelledError:
            exchange.cut(Outcome.BROKEN if self.stopping else Outcome.CANCELLED)
            raise
        except (ConnectionResetError, web.RequestPayloadError):
            # the client went away while it was read from or written to; nobody reads this answer
            exchange.cut(Outcome.CANCELLED)
            return self._replies.plain(b"", status=HTTPStatus.BAD_REQUEST)
        except Exception:
            exchange.cut(Outcome.BROKEN)
            raise  # aiohttp logs it and answers 500, or closes a response already begun
        finally:
            self.active -= route.inference
            self._tasks.discard(task)
        exchange.ended(response.status)
        return response

    def _record(self, request: web.BaseRequest, path: str) -> Arrival | None:
        if path in PROBES:
            self.probes[path] += 1
            return None
        if path.startswith(CONTROL_PREFIX) or not self._recorder.enabled:
            return None
        version = request.version
        return self._recorder.open(
            method=request.method,
            raw_path=request.raw_path,
            raw_headers=request.raw_headers,
            http_version=f"{version.major}.{version.minor}",
        )

    async def _answer(self, exchange: Exchange, route: Route) -> web.StreamResponse:
        if not self._gate.admits(exchange.request, exchange.path):
            return self._replies.json(b'{"error":"Unauthorized"}', status=HTTPStatus.UNAUTHORIZED)
        try:
            if route.inference:
                self.received += 1
                await self._spoil(exchange)
            return await route.handler(exchange)
        except ApiError as error:
            response = self._replies.json(error.body(), status=error.status)
            if error.retry_after_s is not None:
                response.headers["Retry-After"] = str(error.retry_after_s)
            return response
        except TooManyTokensError as error:
            return self._replies.json(invalid(str(error)).body(), status=HTTPStatus.BAD_REQUEST)
        except EngineStoppedError as error:
            if exchange.head_sent:
                raise
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            return self._replies.json(ApiError(status, str(error)).body(), status=status)

    async def _spoil(self, exchange: Exchange) -> None:
        if self._gate.loading:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the model is still loading")
        match self._faults.judge():
            case Verdict.SERVE:
                return
            case Verdict.FAIL:
                faults = self._faults.faults
                raise ApiError(
                    faults.status_code, "simulated failure", retry_after_s=faults.retry_after_s
                )
            case Verdict.CRASH:
                log.warning("crashing on request", path=exchange.request.path)
                self._crash()
                # the reset of this connection cancels this task
                await asyncio.get_running_loop().create_future()

    async def _not_found(self, exchange: Exchange) -> web.StreamResponse:
        if exchange.path in self._paths:
            return self._replies.json(
                b'{"detail":"Method Not Allowed"}', status=HTTPStatus.METHOD_NOT_ALLOWED
            )
        return self._replies.json(b'{"detail":"Not Found"}', status=HTTPStatus.NOT_FOUND)


async def _receive(exchange: Exchange, *, keep: bool) -> None:
    """Read the body to its end, into the record and, if *keep*, into memory."""
    request, arrival = exchange.request, exchange.arrival
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # that was no part of the response
    if request.body_exists:
        async for chunk in request.content.iter_any():
            exchange.body_bytes += len(chunk)
            if arrival is not None:
                arrival.feed(chunk)
            if not keep:
                continue
            if not exchange.body:
                exchange.body = chunk  # nearly every body comes in one piece
            elif isinstance(exchange.body, bytearray):
                exchange.body += chunk
            else:
                exchange.body = bytearray(exchange.body) + chunk
    if arrival is not None:
        arrival.complete = True
