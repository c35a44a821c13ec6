"""From a request to a decision: pool, candidates, policy, ordered endpoints."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from operator import attrgetter

from extproc.absent_models import AbsentModels
from extproc.admission import Place, Wait
from extproc.errors import Refusal, refusal_message
from extproc.json_edit import replace_top_level
from extproc.model_name import model_name
from extproc.pd.connector import Connector, Peer
from extproc.pd.paths import phase_of, reaches_engine
from extproc.pd.topology import Topology, in_zone, with_partners
from extproc.pool import Pool
from extproc.registry import Registry
from extproc.retry_budget import RetryBudget
from policies.base import BodyChooser, Policy, Request, Worker

_order = attrgetter("order")

MAX_ENDPOINTS = 3
"""The pick and its fallbacks: each of Envoy's retries takes the next one."""

MAX_NAMES_SHOWN = 50
"""Models that an error names."""

MAX_NAME_SHOWN_CHARS = 128

ONLY_SPLIT = (
    "The workers behind this router serve only what can be split between prefill and decode."
)
_UNREAD = "\0unread"
"""Stands for a model that only workers may serve of whose models nothing is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """Send the request to ``workers[0]``; the others are for retries, in this order."""

    pool: Pool
    workers: tuple[Worker, ...]
    body: bytes | None = None
    """What to send instead of the body that came; None leaves it as it is."""

    request_id: str | None = None
    """What to send for an id; None: the request's own."""

    apart: bool = False
    """Whether it is not where the worker that computed the prompt can hand over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """Answer the client instead."""

    refusal: Refusal
    detail: str = ""
    """A sentence for the client that says more than the refusal's own."""

    retry_after_s: int | None = None
    """When the client should ask again; None: nothing is known of that."""

    @property
    def message(self) -> str:
        """What the client is told."""
        return self.detail or refusal_message(self.refusal)


@dataclasses.dataclass(frozen=True, slots=True)
class Relayed:
    """Answer the client what a prefill worker said of its request."""

    status: int
    body: bytes
    content_type: str
    retry_after: str = ""


Decision = Routed | Refused | Relayed


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Let a prefill worker compute the prompt, then ask again who generates."""

    prefill: Routed
    decode: Routed | None = None
    """Who generates, where the prefill worker must know."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has come that may be split."""

    whole: bool = False
    """Whether it is to be split no more: it has been, or cannot be."""

    near: Worker | None = None
    """Who computed the prompt."""

    failed: tuple[Worker, ...] = ()
    """Prefill workers that it has been to in vain."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """Which requests are split, and how."""

    connector: Connector
    min_prefill_tokens: int = 0
    topology: Topology = Topology.IGNORE
    label: str = ""
    """The label that holds a worker's zone."""

    fallback: bool = True
    """Whether a decode worker does all of it when no prefill worker can."""

    needs_engine_id: bool = False
    """Whether a prefill worker can hand over only when its engine's id is known."""


WHOLE = Progress(whole=True)
BYTES_PER_TOKEN = 4
"""Of English text; for the estimate of a prompt's length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Nobody can take the request now; somebody may in a moment."""

    place: Place


@dataclasses.dataclass(frozen=True, slots=True)
class _Destination:
    """Who may serve a request."""

    pool: Pool
    workers: tuple[Worker, ...]
    instead: str = ""
    """The model to ask for instead of the one that was asked for; empty: no change."""

    model: str = ""
    """The model that is served; empty: any."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be decided."""

    request: Request
    subset: frozenset[str] | None
    ahead: Container[Place]
    now: float


class Router:
    """Finds the pool of a request and applies its policy. Decides synchronously and does no I/O."""

    __slots__ = (
        "_absent",
        "_aliases",
        "_budget",
        "_chooser",
        "_default_model",
        "_registry",
        "_rng",
        "_waits",
        "policy",
        "split_rules",
    )

    def __init__(
        self,
        registry: Registry,
        rng: random.Random,
        *,
        aliases: Mapping[str, str] | None = None,
        default_model: str = "",
        no_worker_s: float = 0.0,
        budget: RetryBudget | None = None,
        split_rules: SplitRules | None = None,
    ) -> None:
        """Make a router.

        *aliases*: names that clients use for models, replaced in the body. *default_model*: serves requests
        for models that nobody serves, and those that name none. *no_worker_s*: how long requests may wait while
        there is no worker; 0: they are refused at once. *budget*: of retries; None: Envoy's own suffices. *split_rules*:
        None: requests are not split between prefill and decode workers.
        """
        self.split_rules = split_rules
        self._registry = registry
        self._budget = budget
        self._aliases = aliases or {}
        self._default_model = default_model
        self._rng = rng
        self._waits = no_worker_s > 0
        self._absent = AbsentModels(no_worker_s)
        # All pools have policies of one kind.
        self.policy: Policy = registry.pools[0].policy
        self._chooser = self.policy if isinstance(self.policy, BodyChooser) else None

    def configure(self, *, aliases: Mapping[str, str], default_model: str) -> None:
        """Use other names for models from the next request on."""
        self._aliases = aliases
        self._default_model = default_model

    def wait_for_workers(self, no_worker_s: float) -> None:
        """Let requests wait so long while there is no worker, from the next one on."""
        self._waits = no_worker_s > 0
        self._absent.keep_s = no_worker_s

    def on_workers(self, removed: Iterable[str], now: float) -> None:
        """Learn that workers changed, and the names of the models that removed ones served."""
        self._absent.removed(removed, now)
        self._absent.settle(self._is_served)

    @property
    def no_worker(self) -> Place | None:
        """Where every request waits, as long as nobody may be picked for any; None: somebody may, or must."""
        if not self._waits:
            return None
        pools = self._registry.pools
        if any(pool.candidates or pool.is_tripped() for pool in pools):
            return None
        return Place(Wait.NO_WORKER)

    def _is_served(self, model: str) -> bool:
        return self._registry.pool_of(model) is not None

    @property
    def decodes_whole(self) -> bool:
        """Whether a decode worker may get a request whose prompt nobody has computed."""
        return self.split_rules is None or self.split_rules.connector.decodes_whole

    @property
    def reads_model(self) -> bool:
        """Whether the model that a request names makes a difference."""
        return bool(self._aliases) or not self._registry.uniform or bool(self._absent)

    @property
    def needs_body(self) -> bool:
        """Whether the body of any request can matter; when not, nothing else is asked."""
        return self.policy.needs_body or self.reads_model or self.split_rules is not None

    def wants_body(self, headers: Mapping[str, str]) -> bool:
        """Tell whether the body of a request with these *headers* would change its pick."""
        if self.split_rules is not None:  # also to take away what clients may not say of transfers
            return True
        if self.reads_model:
            return True
        if not self.policy.needs_body:
            return False
        return self._chooser is None or self._chooser.wants_body(headers)

    def decide(
        self,
        request: Request,
        now: float,
        *,
        subset: frozenset[str] | None = None,
        ahead: Container[Place] = (),
        progress: Progress = WHOLE,
    ) -> Routed | Refused | Held | Split:
        """Pick a worker and its fallbacks for *request*.

        *subset*: the endpoints that a gateway allows for this request, as ``ip:port`` or ``ip``
        (any port); None allows all (Endpoint Picker Protocol 004, subset hint).
        *ahead*: where others wait who came first. A request that is held may be asked about again.
        *progress*: of one that may be split.
        """
        found = (
            self._whole_destination() if not self.reads_model else self._destination(request, now)
        )
        if not isinstance(found, _Destination):
            return found
        if subset is not None:
            allowed = tuple(w for w in found.workers if _allowed(w, subset))
            found = dataclasses.replace(found, workers=allowed)
        if not found.workers:
            if not self._waits or found.pool.is_tripped(found.model):
                return Refused(Refusal.NO_WORKER)
            return Held(_place(Wait.NO_WORKER, found.pool, found.model, subset))
        asked = _Asked(request, subset, ahead, now)
        if progress.whole or self.split_rules is None:
            return self._generate(found, asked, progress.near)
        return self._split(self.split_rules, found, asked, progress)

    def _whole_destination(self) -> _Destination:
        pool = self._registry.pools[0]
        return _Destination(pool, pool.candidates)

    def _generate(
        self, found: _Destination, asked: _Asked, near: Worker | None = None
    ) -> Routed | Held:
        """Pick who answers the request, the whole of it or what follows the prompt; *near*: who computed that."""
        pool, workers, apart = found.pool, found.workers, False
        if near is not None and self.split_rules is not None:
            zone = self._zone_of(near)
            close = tuple(in_zone(workers, self._zone_of, zone, self.split_rules.topology))
            workers, apart = close or workers, not close
        others = workers
        if pool.limited:
            workers = tuple(w for w in others if w.in_flight < w.limit)
            place = _place(Wait.BUSY, pool, found.model, asked.subset)
            if not workers or place in asked.ahead:
                return Held(place)
        workers = self._registry.preferred(workers) or workers
        body = self._rename(asked.request, found.instead) if found.instead else None
        picked = self._pick(pool, workers, others, asked.request, asked.now)
        pool.on_sent(picked[0], asked.request, asked.now)
        return Routed(pool, picked, body, apart=apart)

    def _split(
        self, rules: SplitRules, found: _Destination, asked: _Asked, progress: Progress
    ) -> Routed | Refused | Held | Split:
        """Pick who computes the prompt, and who generates if that one must know."""
        prefill = self._prefill(rules, found, asked, progress)
        if isinstance(prefill, Held | Refused):
            return prefill
        if prefill is None:
            return self._generate(found, asked)
        if not rules.connector.binds_early:
            body = self._rename(asked.request, found.instead) if found.instead else None
            return Split(dataclasses.replace(prefill, body=body))
        decode = self._generate(found, asked, prefill.workers[0])
        if isinstance(decode, Held) or decode.apart:
            return decode
        return Split(dataclasses.replace(prefill, body=decode.body), decode)

    def _zone_of(self, worker: Worker) -> str:
        return (
            ""
            if self.split_rules is None
            else self._registry.label_of(worker, self.split_rules.label)
        )

    def _prefill(
        self, rules: SplitRules, found: _Destination, asked: _Asked, progress: Progress
    ) -> Routed | Refused | Held | None:
        """Pick who computes the prompt; None: whoever generates does it himself."""
        request = asked.request
        if request.body is None or phase_of(request.path) is None:
            if self.decodes_whole or not reaches_engine(request.method, request.path):
                return None
            return Refused(Refusal.PREFILL_FAILED, ONLY_SPLIT)
        if _estimated_tokens(request) < rules.min_prefill_tokens:
            return None
        pool = self._registry.prefill_pool_of(found.model)
        workers: Sequence[Worker] = ()
        if pool is not None:
            workers = [w for w in pool.candidates_for(found.model) if w not in progress.failed]
            if rules.needs_engine_id:
                workers = [w for w in workers if self._registry.has_engine_id(w)]
            workers = with_partners(workers, found.workers, self._zone_of, rules.topology)
        if pool is None or not workers:
            return None if rules.fallback else Refused(Refusal.PREFILL_FAILED)
        others = chosen = tuple(workers)
        if pool.limited:
            chosen = tuple(w for w in others if w.in_flight < w.limit)
            place = _place(Wait.BUSY, pool, found.model, None)
            if not chosen or place in asked.ahead:
                return Held(place)
        chosen = self._registry.preferred(chosen) or chosen
        picked = self._pick(pool, chosen, others, request, asked.now)
        pool.on_sent(picked[0], request, asked.now)
        return Routed(pool, picked)

    def split_again(
        self, request: Request, now: float, progress: Progress
    ) -> Split | Refused | None:
        """Pick who computes the prompt of a *request* once more; None: whoever generates does it himself."""
        rules = self.split_rules
        if progress.whole or rules is None:
            return None
        found = (
            self._whole_destination() if not self.reads_model else self._destination(request, now)
        )
        if not isinstance(found, _Destination):
            return None
        prefill = self._prefill(rules, found, _Asked(request, None, (), now), progress)
        if isinstance(prefill, Refused) or (isinstance(prefill, Held) and not rules.fallback):
            return Refused(Refusal.PREFILL_FAILED)
        return Split(prefill) if isinstance(prefill, Routed) else None

    def has(self, worker: Worker) -> bool:
        """Tell whether *worker* has not been removed."""
        return self._registry.has(worker)

    def may_prefill(self, worker: Worker) -> bool:
        """Tell whether *worker* may be given prompts."""
        return any(worker in pool.candidates for pool in self._registry.prefill_pools)

    def is_apart(self, prefill: Worker, endpoint: str) -> bool:
        """Tell whether the worker at *endpoint* may not fetch blocks from *prefill*."""
        rules = self.split_rules
        if rules is None or rules.topology is not Topology.REQUIRE:
            return False
        zone = self._registry.label_at(endpoint, rules.label)
        return not zone or zone != self._zone_of(prefill)

    def peer(self, worker: Worker) -> Peer:
        """Return *worker* as the other end of a KV transfer."""
        return self._registry.peer(worker)

    def who_served(self, prefill: Routed, endpoint: str) -> Worker:
        """Return who computed a prompt that was sent as *prefill* says and was answered by *endpoint*."""
        for worker in prefill.workers:
            if worker.endpoint == endpoint:
                return worker
        # A retry beyond the list; of an engine's ranks it took any.
        return self._registry.prefill_worker(endpoint, None) or prefill.workers[0]

    def grant_retries(self, decision: Routed, now: float) -> int | None:
        """Learn that the request goes where *decision* says, and return how many retries it may have.

        None: as many as Envoy has been told.
        """
        registry, budget = self._registry, self._budget
        first = decision.workers[0]
        if first.probation:
            registry.on_probe(first)
        if budget is None:
            return None
        in_flight = sum(pool.in_flight for pool in registry.all_pools())
        sound = registry.breakers.any_sound(decision.pool.candidates)
        granted = budget.grant(in_flight, now, sound=sound)
        return None if granted == budget.most else granted

    def _pick(
        self,
        pool: Pool,
        workers: tuple[Worker, ...],
        others: tuple[Worker, ...],
        request: Request,
        now: float,
    ) -> tuple[Worker, ...]:
        """Return one of *workers* and those that may take over from it; *others* too when need be."""
        policy = pool.policy
        first = policy.pick(request, workers, now=now, rng=self._rng)
        picked: tuple[Worker, ...] = (first,)
        workers = _without(workers, first)
        if pool.limited or len(workers) + 1 < len(others):
            workers = _fallbacks(workers, others, first)
        if pool.spread:  # a retry stays within the Envoy cluster
            workers = tuple(w for w in workers if w.cluster == first.cluster)
        while workers and len(picked) < MAX_ENDPOINTS:
            fallback = self._fallback(policy, request, workers, picked, now)
            workers = _without(workers, fallback)
            if all(fallback.endpoint != worker.endpoint for worker in picked):
                picked += (fallback,)
        return picked

    def _destination(  # noqa: PLR0911  one line per rule
        self, request: Request, now: float
    ) -> _Destination | Refused | Held:
        """Find who serves the model that *request* names."""
        if self._absent:
            self._absent.expire(now)
        registry = self._registry
        content = request.content
        asked = model_name(
            request.headers, request.path, request.body, content.model if content else ""
        )
        if not asked:
            pool = registry.pool_of(self._default_model) or registry.pools[0]
            workers = pool.candidates_for(self._default_model)
            return _Destination(pool, workers, model=self._default_model)
        model = self._aliases.get(asked, asked)
        instead = model if model != asked else ""
        serving = registry.pool_of(model)
        if serving is not None:
            return _Destination(serving, serving.candidates_for(model), instead, model)
        default = registry.pool_of(self._default_model)
        if model in self._absent and default is None and not registry.unread_candidates():
            return Held(Place(Wait.NO_WORKER, model=model))
        if len(registry.pools) == 1:  # the worker judges
            return _Destination(registry.pools[0], registry.pools[0].candidates, instead)
        if default is not None:
            workers = default.candidates_for(self._default_model)
            return _Destination(default, workers, self._default_model, self._default_model)
        unread = registry.unread_candidates()
        if unread:
            return _Destination(registry.pools[0], unread, instead, _UNREAD)
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


def _place(kind: Wait, pool: Pool, model: str, subset: frozenset[str] | None) -> Place:
    apart = model == _UNREAD or pool.distinguishes(model)
    return Place(kind, pool, model if apart else "", subset)


def _estimated_tokens(request: Request) -> int:
    content = request.content
    if content is None:  # too large to be read, or not to be understood here
        return sys.maxsize
    if content.tokens:
        return sum(map(len, content.prompts))
    # Bytes, not characters: one of Chinese is a token or nearly.
    return (
        sum(len(prompt.encode("utf-8", "replace")) for prompt in content.prompts) // BYTES_PER_TOKEN
    )


def _fallbacks(
    free: tuple[Worker, ...], others: tuple[Worker, ...], first: Worker
) -> tuple[Worker, ...]:
    """Return who may take over from *first*: workers that have room, any when none has.

    Never one that is on probation: it gets one request at a time, and this would be another.
    """
    found = tuple(worker for worker in free if not worker.probation)
    return found or tuple(w for w in others if w is not first and not w.probation)


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
