"""From a request to a decision: pool, candidates, policy, ordered endpoints."""

from __future__ import annotations

import dataclasses
import json
import random
from bisect import bisect_left
from collections.abc import Collection, Mapping
from operator import attrgetter

from extproc.errors import Refusal, refusal_message
from extproc.json_edit import replace_top_level
from extproc.model_name import model_name
from extproc.pool import Pool
from extproc.registry import Registry
from policies.base import BodyChooser, Policy, Request, Worker

_order = attrgetter("order")

MAX_ENDPOINTS = 3
"""The pick and its fallbacks: each of Envoy's retries takes the next one."""

MAX_NAMES_SHOWN = 50
"""Models that an error names."""

MAX_NAME_SHOWN_CHARS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """Send the request to ``workers[0]``; the others are for retries, in this order."""

    pool: Pool
    workers: tuple[Worker, ...]
    body: bytes | None = None
    """What to send instead of the body that came; None leaves it as it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """Answer the client instead."""

    refusal: Refusal
    detail: str = ""
    """A sentence for the client that says more than the refusal's own."""

    @property
    def message(self) -> str:
        """What the client is told."""
        return self.detail or refusal_message(self.refusal)


Decision = Routed | Refused


@dataclasses.dataclass(frozen=True, slots=True)
class _Destination:
    """Who may serve a request."""

    pool: Pool
    workers: tuple[Worker, ...]
    model: str = ""
    """The model to ask for instead of the one that was asked for; empty: no change."""


class Router:
    """Finds the pool of a request and applies its policy. Decides synchronously and does no I/O."""

    __slots__ = ("_aliases", "_chooser", "_default_model", "_registry", "_rng", "policy")

    def __init__(
        self,
        registry: Registry,
        rng: random.Random,
        *,
        aliases: Mapping[str, str] | None = None,
        default_model: str = "",
    ) -> None:
        """Make a router.

        *aliases*: names that clients use for models, replaced in the body. *default_model*: serves requests
        for models that nobody serves, and those that name none.
        """
        self._registry = registry
        self._aliases = aliases or {}
        self._default_model = default_model
        self._rng = rng
        # All pools have policies of one kind.
        self.policy: Policy = registry.pools[0].policy
        self._chooser = self.policy if isinstance(self.policy, BodyChooser) else None

    @property
    def reads_model(self) -> bool:
        """Whether the model that a request names makes a difference."""
        return bool(self._aliases) or not self._registry.uniform

    @property
    def needs_body(self) -> bool:
        """Whether the body of any request can matter; when not, nothing else is asked."""
        return self.policy.needs_body or self.reads_model

    def wants_body(self, headers: Mapping[str, str]) -> bool:
        """Tell whether the body of a request with these *headers* would change its pick."""
        if self.reads_model:
            return True
        if not self.policy.needs_body:
            return False
        return self._chooser is None or self._chooser.wants_body(headers)

    def decide(
        self, request: Request, now: float, *, subset: Collection[str] | None = None
    ) -> Decision:
        """Pick a worker and its fallbacks for *request*.

        *subset*: the endpoints that a gateway allows for this request, as ``ip:port`` or ``ip``
        (any port); None allows all (Endpoint Picker Protocol 004, subset hint).
        """
        body = None
        if self.reads_model:
            found = self._destination(request)
            if isinstance(found, Refused):
                return found
            pool, workers = found.pool, found.workers
            if found.model:
                body = self._rename(request, found.model)
        else:
            pool = self._registry.pools[0]
            workers = pool.candidates
        if subset is not None:
            workers = tuple(w for w in workers if _allowed(w, subset))
        if not workers:
            return Refused(Refusal.NO_WORKER)

        policy = pool.policy
        first = policy.pick(request, workers, now=now, rng=self._rng)
        picked: tuple[Worker, ...] = (first,)
        workers = _without(workers, first)
        if pool.spread:  # a retry stays within the Envoy cluster
            workers = tuple(w for w in workers if w.cluster == first.cluster)
        while workers and len(picked) < MAX_ENDPOINTS:
            fallback = self._fallback(policy, request, workers, picked, now)
            workers = _without(workers, fallback)
            if all(fallback.endpoint != worker.endpoint for worker in picked):
                picked += (fallback,)
        pool.on_sent(first, request, now)
        return Routed(pool, picked, body)

    def _destination(self, request: Request) -> _Destination | Refused:
        """Find who serves the model that *request* names."""
        registry = self._registry
        content = request.content
        asked = model_name(
            request.headers, request.path, request.body, content.model if content else ""
        )
        if not asked:
            pool = registry.pool_of(self._default_model) or registry.pools[0]
            return _Destination(pool, pool.candidates_for(self._default_model))
        model = self._aliases.get(asked, asked)
        instead = model if model != asked else ""
        serving = registry.pool_of(model)
        if serving is not None:
            return _Destination(serving, serving.candidates_for(model), instead)
        if len(registry.pools) == 1:  # the worker judges
            return _Destination(registry.pools[0], registry.pools[0].candidates, instead)
        default = registry.pool_of(self._default_model)
        if default is not None:
            workers = default.candidates_for(self._default_model)
            return _Destination(default, workers, self._default_model)
        unread = registry.unread_candidates()
        if unread:
            return _Destination(registry.pools[0], unread, instead)
        return Refused(Refusal.MODEL_NOT_FOUND, self._not_found(asked))

    def _not_found(self, model: str) -> str:
        names = sorted({*self._registry.model_names(), *self._aliases})
        shown = ", ".join(names[:MAX_NAMES_SHOWN])
        more = len(names) - MAX_NAMES_SHOWN
        rest = f" and {more} more" if more > 0 else ""
        name = model if len(model) <= MAX_NAME_SHOWN_CHARS else f"{model[:MAX_NAME_SHOWN_CHARS]}..."
        return f"The model {name!r} does not exist. Known models: {shown}{rest}."

    @staticmethod
    def _rename(request: Request, model: str) -> bytes | None:
        """Let *request* ask for *model*; return its new body, None when it names none as JSON does."""
        if request.content is not None:
            # A prompt is cached under the model that serves it, whatever clients call that.
            request.content = dataclasses.replace(request.content, model=model)
        if not request.body:
            return None
        return replace_top_level(request.body, "model", json.dumps(model).encode())

    def _fallback(
        self,
        policy: Policy,
        request: Request,
        workers: tuple[Worker, ...],
        picked: tuple[Worker, ...],
        now: float,
    ) -> Worker:
        """Pick one of *workers*, on another host than *picked* where there is one."""
        fallback = policy.pick(request, workers, now=now, rng=self._rng)
        if any(fallback.host == worker.host for worker in picked):
            # What took the first worker down may have taken its host.
            elsewhere = _on_other_hosts(workers, picked)
            if elsewhere:
                return policy.pick(request, elsewhere, now=now, rng=self._rng)
        return fallback


def _allowed(worker: Worker, subset: Collection[str]) -> bool:
    host = worker.host
    return worker.endpoint in subset or host in subset or host.strip("[]") in subset


def _on_other_hosts(workers: tuple[Worker, ...], picked: tuple[Worker, ...]) -> tuple[Worker, ...]:
    hosts = {worker.host for worker in picked}
    return tuple(worker for worker in workers if worker.host not in hosts)


def _without(workers: tuple[Worker, ...], worker: Worker) -> tuple[Worker, ...]:
    position = bisect_left(workers, worker.order, key=_order)
    if position == len(workers) or workers[position] is not worker:
        raise LookupError(f"the policy picked {worker!r}, which is no candidate")
    return workers[:position] + workers[position + 1 :]
