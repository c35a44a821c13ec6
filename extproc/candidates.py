"""Who of a pool may be picked, for any model and for the names that not all of its workers serve.

The index of names is made when workers or their models change, the choice whenever a state does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from extproc.engine import PICKABLE, Engine, State
from policies.base import Worker

HEALTHY_TIERS = 2
"""How many of the tiers hold healthy workers only."""


@dataclasses.dataclass(frozen=True, slots=True)
class Roster:
    """The workers of one pool with their engines, and who serves what."""

    members: tuple[tuple[Worker, Engine], ...]
    """Sorted by the worker's ``order``."""

    serving: Mapping[str, tuple[Worker, ...]]
    """The workers that serve a name, for names that not all of them serve; sorted by ``order``."""

    adapters: frozenset[str]
    """LoRA adapters that some worker has loaded."""

    unread: frozenset[int]
    """Order of the workers of whose models nothing is known."""


def make_roster(members: Sequence[tuple[Worker, Engine]], *, alone: bool) -> Roster:
    """Index the *members* of a pool, sorted; *alone*: there is no other pool."""
    names = [(worker, engine.names) for worker, engine in members]
    unread = frozenset(worker.order for worker, own in names if own is None)
    distinct = {own for _, own in names if own is not None}
    # Where there are other pools, a worker that does not say what it serves may belong to any of them.
    common = (
        frozenset.intersection(*distinct) if distinct and (alone or not unread) else frozenset()
    )
    found: dict[str, list[Worker]] = {}
    for worker, own in names:
        for name in (own or frozenset()) - common:
            found.setdefault(name, []).append(worker)
    adapters = frozenset[str]().union(*(engine.adapters for _, engine in members))
    serving = {name: tuple(workers) for name, workers in found.items()}
    return Roster(tuple(members), serving, adapters, unread)


def find_tripped(
    roster: Roster,
    serving: Mapping[str, tuple[Worker, ...]],
    is_down: Callable[[Engine], bool],
) -> bool | frozenset[str]:
    """Tell whether the circuits of all workers are open, or for which names nobody else is left.

    *serving*: the candidates of each name. A worker that *is_down* is not one with an open circuit: like one
    that is being drained it may be about to be replaced.
    """
    states = {engine.state for _, engine in roster.members}
    if State.EJECTED not in states:
        return False

    def all_open(engines: Iterable[Engine]) -> bool:
        left = [e for e in engines if e.state is not State.DRAINING]
        return bool(left) and all(e.state is State.EJECTED and not is_down(e) for e in left)

    if all_open(engine for _, engine in roster.members):
        return True
    engines = {worker.order: engine for worker, engine in roster.members}
    return frozenset(
        name
        for name, candidates in serving.items()
        if not candidates and all_open(engines[worker.order] for worker in roster.serving[name])
    )


def choose(
    roster: Roster, *, try_unhealthy: bool, lora_any: bool
) -> tuple[tuple[Worker, ...], dict[str, tuple[Worker, ...]]]:
    """Return the candidates for any model, and those for each name of the roster's index."""
    healthy = [(w, e) for w, e in roster.members if e.state in PICKABLE]
    # One that could not be reached a moment ago is left alone, as long as there are others.
    tiers = [tuple(w for w, e in healthy if not e.suspended), tuple(w for w, _ in healthy)]
    if try_unhealthy:
        tiers.append(tuple(w for w, e in roster.members if e.state is not State.DRAINING))
    everybody = next(filter(None, tiers), ())
    if not roster.serving:
        return everybody, {}
    orders = [frozenset(worker.order for worker in tier) for tier in tiers]
    unread = tuple(worker for worker in everybody if worker.order in roster.unread)
    serving = {}
    for name, workers in roster.serving.items():
        choices = [tuple(w for w in workers if w.order in tier) for tier in orders]
        if lora_any and name in roster.adapters:
            choices.insert(HEALTHY_TIERS, everybody)
        serving[name] = next(filter(None, choices), unread)
    return everybody, serving
