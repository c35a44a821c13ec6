"""The registry as the rest of the service changes it: every change is committed and passed on at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from extproc.discovery.updates import Update, WorkerSpec
from extproc.engine import Engine, State
from extproc.models import Load, ModelList
from extproc.registry import Change, Registry

GATHER_S = 0.005

log = structlog.get_logger(__name__)


class Fleet:
    """Applies what happens to the registry and tells whoever must follow."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        """Make the fleet; *clock* gives Unix time in seconds."""
        self.registry = registry
        self._clock = clock
        self._listeners: list[Callable[[Change], None]] = []
        self.persist: Callable[[], None] = lambda: None
        """Called before an administrator is told that something was done: it must outlive the service."""
        self._changed = asyncio.Event()
        self._commit_due = False

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call *listener* after every commit that changed anything."""
        self._listeners.append(listener)

    def now(self) -> float:
        """Return the Unix time in seconds."""
        return self._clock()

    # --- administrators

    def add(self, spec: WorkerSpec) -> Engine:
        """Add a worker. ``WorkerExistsError`` when it is there already."""
        engine = self.registry.add(spec, self.now())
        self.commit()
        self.persist()
        return engine

    def remove(self, key: str) -> bool:
        """Remove a worker at once; requests under way on it finish. False when it is not there."""
        found = self.registry.remove(key, self.now())
        self.commit()
        self.persist()
        return found

    def drain(self, key: str, timeout_s: float) -> bool:
        """Pick a worker no more and remove it when it is idle, or after *timeout_s* seconds."""
        found = self.registry.drain(key, self.now() + timeout_s)
        self.commit()
        self.persist()
        return found

    async def wait_healthy(self, engine: Engine, timeout_s: float) -> bool:
        """Wait until *engine* is healthy; False when it is not in time, or removed."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.registry.get(engine.key) is engine:
                    if engine.state is State.HEALTHY:
                        return True
                    if engine.twin or engine.is_router:
                        return False  # waiting would not help
                    await self._changed.wait()
        except TimeoutError:
            pass
        return False

    # --- discovery, Envoy and the workers themselves

    def on_update(self, source: str, update: Update) -> None:
        """Take in what a discovery source says."""
        self.registry.apply(source, update, self.now())
        self.commit()

    def on_address(self, host: str, address: str) -> None:
        """Learn the address of a host name."""
        self.registry.on_address(host, address)
        self.commit_soon()

    def on_unresolved(self, host: str, reason: str) -> None:
        """Learn why a host name has no address, or with "" that it has one again."""
        self.registry.on_unresolved(host, reason)
        self.commit_soon()
        if reason:
            log.warning("worker name cannot be resolved", host=host, reason=reason)
        else:
            log.info("worker name can be resolved again", host=host)

    def on_verdicts(self, changed: list[tuple[str, str]]) -> None:
        """Learn that Envoy judges these endpoints (cluster, endpoint) anew."""
        self.registry.on_events(changed)
        self.commit()

    def on_models(self, engine: Engine, models: ModelList | None) -> None:
        """Learn the models of a worker; None when it would not say."""
        before = engine.base_models
        self.registry.on_models(engine, models)
        if before is not None and engine.base_models != before:
            log.info(
                "worker serves other models",
                worker=engine.key,
                models=sorted(engine.base_models or ()),
            )
        self.commit_soon()

    def on_loads(
        self, engine: Engine, loads: dict[int | None, Load], ranks: tuple[int, ...]
    ) -> None:
        """Learn what a worker's metrics say."""
        known = engine.ranks
        self.registry.on_loads(engine, loads, ranks)
        if engine.ranks != known:
            self.commit_soon()

    def on_answer(self, engine: Engine, *, began: float, passed: bool) -> None:
        """Learn that a worker has answered a check that *began* then, Unix time in seconds."""
        was_suspended = engine.suspended
        if self.registry.on_answer(engine, began=began, now=self.now(), passed=passed):
            self.commit_soon()
            if was_suspended and not engine.suspended:
                log.info("worker resumed: a check has passed", worker=engine.key)

    def on_refused(self, engine: Engine) -> None:
        """Learn that a worker refused the connection of a check."""
        if self.registry.on_refused(engine):
            self.commit_soon()

    def tick(self) -> None:
        """Let time have its effects: drains end, starting workers become unhealthy."""
        if self.registry.waits:
            self.registry.end_drains(self.now())
            self.commit()

    def commit_soon(self) -> None:
        """Commit in a moment, together with what else comes in until then: a thousand workers may answer."""
        if not self._commit_due:
            self._commit_due = True
            asyncio.get_running_loop().call_later(GATHER_S, self.commit)

    def commit(self) -> None:
        """Work out what follows, log it and tell the listeners."""
        self._commit_due = False
        change = self.registry.commit(self.now())
        if not any(
            (
                change.members,
                change.clusters,
                change.states,
                change.removed,
                change.circuits,
                change.suspended,
            )
        ):
            return
        for engine in change.states:
            _log_state(engine)
        for engine in change.removed:
            log.info("worker removed", worker=engine.key)
        for listener in self._listeners:
            listener(change)
        # Whoever waits looks again, and waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()


def _log_state(engine: Engine) -> None:
    level = log.warning if engine.state in (State.UNHEALTHY, State.EJECTED) else log.info
    level(
        f"worker {engine.state}",
        worker=engine.key,
        **({"reason": engine.reason} if engine.reason else {}),
    )
