"""The ext_proc shell: drives one ``Exchange`` per call, wakes those that wait, counts what is decided."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence

import structlog
from google.protobuf.message import DecodeError

from extproc.admission import Admission, Limits
from extproc.errors import ProtocolError
from extproc.exchange import DEFAULT_MAX_ROUTED_BYTES, Exchange
from extproc.ext_proc_answers import REQUEST_ID_HEADER
from extproc.h2.grpc import Call, Method, Status
from extproc.leg_sender import LegSender
from extproc.log import cap
from extproc.metrics import Metrics
from extproc.next_attempt import NextAttempt, is_next_attempt
from extproc.prefill_legs import LegAnswer, PrefillLeg, PrefillLegs
from extproc.router import Refused, Relayed, Router
from protos.ext_proc_pb2 import ProcessingRequest

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

SLICE = 64
"""Waiting requests that are looked at before anything else gets its turn: a few milliseconds."""

LOOK_AGAIN_S = 0.25
"""Whoever waits looks again after this time though nothing was announced, such as a worker that has
been left alone for long enough."""

UNUSED_QUIET_S = 10.0
"""Between two complaints of prefill workers that hand nothing over."""

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
        admission: Admission | None = None,
        id_headers: Sequence[str] = (REQUEST_ID_HEADER,),
        legs: PrefillLegs | None = None,
        sender: LegSender | None = None,
    ) -> None:
        """*admission*: who may go on, None: everybody. *sender* sends *legs*. See ``Exchange`` for the others."""
        self.sender = sender
        self._legs = legs
        self._tasks: set[asyncio.Task[None]] = set()
        self.metrics = metrics
        self.admission = admission or Admission()
        self.id_headers = tuple(id_headers)
        self._router = router
        self._ids = ids
        self._max_body_bytes = max_body_bytes
        self._max_routed_bytes = max_routed_bytes
        self._unused_quiet_until = 0.0
        self._turn: asyncio.Handle | None = None
        self._look: asyncio.TimerHandle | None = None
        metrics.watch_admission(self.admission)

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
            admission=self.admission,
            id_headers=self.id_headers,
            legs=self._legs,
        )
        return _Process(call, exchange, self)

    def next_attempt(self) -> NextAttempt:
        """Return the state of a further attempt of Envoy's at a request that was split."""
        none = PrefillLegs(self._ids, longest_s=0)
        return NextAttempt(
            self._router,
            none if self._legs is None else self._legs,
            ids=self._ids,
            max_routed_bytes=self._max_routed_bytes,
            admission=self.admission,
        )

    def on_unused(self, leg: PrefillLeg, answer: LegAnswer, reason: str) -> None:
        """Say that a prompt was computed for nothing; once in a while, for each request would be too often."""
        self.metrics.prefills_unused.inc()
        now = time.monotonic()
        if now >= self._unused_quiet_until:
            self._unused_quiet_until = now + UNUSED_QUIET_S
            worker = answer.served or leg.decision.workers[0].url
            log.warning("prefill of no use", worker=worker, reason=reason)

    def set_limits(self, limits: Limits) -> None:
        """Use other *limits* from now on."""
        self.admission.configure(limits)
        self.wake()

    def on_workers(self, removed: Iterable[str] = ()) -> None:
        """Learn that workers changed, and the names of the models that removed ones served."""
        self._router.on_workers(removed, time.monotonic())
        self.look_again()

    def look_again(self) -> None:
        """Let whoever waits look again."""
        if self.admission.places:
            self.admission.stir()
            self.wake()

    def stop(self) -> None:
        """Refuse who waits; nobody waits from now on."""
        self.admission.stopping = True
        for ticket in self.admission.tickets():
            owner = ticket.owner
            if isinstance(owner, _Process):
                owner.give_up()
        for handle in (self._turn, self._look):
            if handle is not None:
                handle.cancel()

    def turn_away_displaced(self) -> None:
        """Answer those who have had to yield their places in a full queue."""
        displaced, self.admission.displaced = self.admission.displaced, []
        for ticket in displaced:
            owner = ticket.owner
            if isinstance(owner, _Process):
                owner.give_up()

    def wake(self) -> None:
        """Give whoever may go on its turn, as soon as what is being done is done."""
        if self._turn is None and self.admission.ready:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turns)

    def keep_looking(self) -> None:
        """Look again after a while, as long as anybody waits."""
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._on_look)

    def run_leg(self, process: _Process, leg: PrefillLeg) -> asyncio.Task[None]:
        """Send *leg* for *process*, which is told the answer."""
        task = asyncio.get_running_loop().create_task(self._run_leg(process, leg))
        self._tasks.add(task)  # else nobody holds it
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_leg(self, process: _Process, leg: PrefillLeg) -> None:
        started = time.monotonic()
        if self.sender is None:
            answer = LegAnswer(reason="nobody sends prefill legs")
        else:
            try:
                answer = await self.sender.send(leg)
            except Exception:
                # Whatever it was: somebody waits for an answer.
                log.exception("prefill leg failed")
                answer = LegAnswer(reason="internal error")
        if leg.whole:
            self.metrics.answered_elsewhere.inc()
        else:
            self.metrics.count_leg(answer.status, time.monotonic() - started)
        worker = leg.decision.workers[0].url
        if answer.refused:  # any client can bring that about
            log.info("prefill refused", worker=worker, reason=answer.reason)
        elif not answer.succeeded:
            log.warning("prefill failed", worker=worker, reason=answer.reason)
        process.on_leg(leg, answer)

    def _on_look(self) -> None:
        self._look = None
        if self.admission.places:
            self.look_again()
            self.keep_looking()

    def _take_turns(self) -> None:
        self._turn = None
        for _ in range(SLICE):
            ticket = self.admission.next()
            if ticket is None:
                return
            owner = ticket.owner
            if isinstance(owner, _Process):
                owner.resume()
        self.wake()


class _Process:
    __slots__ = ("_call", "_exchange", "_leg", "_sending", "_service", "_timer")

    def __init__(self, call: Call, exchange: Exchange, service: ExtProcService) -> None:
        self._call = call
        self._exchange: Exchange | NextAttempt = exchange
        self._service = service
        self._timer: asyncio.TimerHandle | None = None
        self._leg: PrefillLeg | None = None
        self._sending: asyncio.Task[None] | None = None

    def on_message(self, message: bytes) -> None:
        exchange = self._exchange
        undecided = exchange.decision is None
        started = time.monotonic()
        try:
            received = ProcessingRequest.FromString(message)
            if received.attributes and is_next_attempt(received):
                exchange = self._exchange = self._service.next_attempt()
            answers = exchange.receive(received, started)
        except (ProtocolError, DecodeError) as error:
            self._refuse(error)
            return
        except Exception:  # noqa: BLE001 - one stream's fault must not end the others
            self._fail()
            return
        if undecided and exchange.decision is not None:
            self._observe(started)
        for answer in answers:
            self._call.send(answer)
        if exchange.leg is not self._leg:
            self._send_leg()
        if exchange.waiting is not (self._timer is not None):
            if exchange.waiting:
                self._begin_to_wait(started)
                self._service.turn_away_displaced()
            else:
                self._end_wait()

    def on_end(self) -> None:
        self._call.finish()

    def on_close(self) -> None:
        service, exchange = self._service, self._exchange
        left = exchange.waiting
        exchange.close(time.monotonic())
        if self._sending is not None:
            self._sending.cancel()  # Envoy then ends the leg, and the worker its work
        if left:
            self._end_wait()
            self._observe_wait()
        if service.admission.places:
            service.wake()

    def resume(self) -> None:
        """Try to go on: it is this one's turn."""
        self._go_on(self._exchange.resume)

    def give_up(self) -> None:
        """Answer that it has waited long enough, or that nobody may wait any more."""
        self._go_on(self._exchange.give_up)

    def _send_leg(self) -> None:
        if self._sending is not None and self._sending is not asyncio.current_task():
            self._sending.cancel()
        self._leg = leg = self._exchange.leg
        if leg is not None:
            self._sending = self._service.run_leg(self, leg)

    def on_leg(self, leg: PrefillLeg, answer: LegAnswer) -> None:
        """Take the answer to *leg*."""
        if leg is self._exchange.leg:
            self._step(lambda now: self._exchange.on_leg(answer, now))
            if isinstance(self._exchange, Exchange) and self._exchange.unused:
                self._service.on_unused(leg, answer, self._exchange.unused)

    def _go_on(self, step: Callable[[float], list[bytes]]) -> None:
        ticket = self._exchange.ticket
        if ticket is not None and self._exchange.waiting:
            self._step(step)

    def _step(self, step: Callable[[float], list[bytes]]) -> None:
        exchange = self._exchange
        undecided = exchange.decision is None
        place = exchange.ticket.place if exchange.ticket is not None else None
        started = time.monotonic()
        try:
            answers = step(started)
        except (ProtocolError, DecodeError) as error:  # of a message that was kept meanwhile
            self._end_wait()
            self._refuse(error)
            self._call.flush()
            return
        except Exception:  # noqa: BLE001 - see above
            self._end_wait()
            self._fail()
            self._call.flush()
            return
        now_at = exchange.ticket.place if exchange.ticket is not None else None
        if now_at is not place:
            self._end_wait()
            if exchange.waiting:
                self._begin_to_wait(started)
                self._service.turn_away_displaced()
        if exchange.leg is not self._leg:
            self._send_leg()
        if undecided and exchange.decision is not None:
            self._observe(started)
        for answer in answers:
            self._call.send(answer)
        if answers:
            self._call.flush()

    def _begin_to_wait(self, now: float) -> None:
        ticket = self._exchange.ticket
        if ticket is None:
            return
        ticket.owner = self
        delay = max(ticket.deadline - now, 0.0)
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_deadline)
        self._service.keep_looking()

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_deadline(self) -> None:
        self._timer = None
        self.give_up()

    def _refuse(self, error: Exception) -> None:
        self._service.metrics.stream_errors.labels("protocol").inc()
        log.warning("ext_proc message refused", reason=cap(str(error)))
        # Never end with OK here: Envoy takes that for "continue without me", always.
        self._call.finish(Status.INVALID_ARGUMENT, cap(str(error)))

    def _fail(self) -> None:
        self._service.metrics.stream_errors.labels("internal").inc()
        log.exception("ext_proc stream failed")  # noqa: LOG004 - called where it was caught
        self._call.finish(Status.INTERNAL, "internal error")

    def _observe(self, started: float) -> None:
        metrics = self._service.metrics
        metrics.decision_seconds.observe(time.monotonic() - started)
        if self._exchange.is_leg:  # part of a request that is counted
            return
        decision = self._exchange.decision
        if isinstance(decision, Refused):
            metrics.refused[decision.refusal].inc()
        elif isinstance(decision, Relayed):
            metrics.relayed.inc()
        else:
            metrics.routed.inc()
        self._observe_wait()

    def _observe_wait(self) -> None:
        ticket = self._exchange.ticket
        if ticket is not None:
            self._service.metrics.queue_wait_seconds.observe(ticket.waited_s)
