"""Rate, latency and CPU: every variant in turn, several rounds, the median of each figure.

Rounds run forwards and backwards in turn, so that what changes on the machine during the run falls on
all variants alike.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.bench.load import run_load
from tests.bench.processes import cpu_s, loop_ms, machine_busy_s
from tests.bench.stack import Stack

SETTLE_S = 0.3
"""Envoy reports finished requests to the service every 0.25 s."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of request."""

    name: str
    title: str
    body_bytes: int
    policy: str
    budget_us: float | None = None
    """CPU of the service per request, DESIGN section 5."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One run against one variant."""

    rate: float
    p50_ms: float
    p99_ms: float
    envoy_us: float
    """CPU per request."""

    service_us: float
    picked_ratio: float
    """Requests whose worker the service picked; less than 1: Envoy balanced the rest by itself."""

    errors: int
    others_cores: float
    """CPU used by processes that are not ours."""

    loop_ms: float
    """CPU time of a fixed loop right before: a virtual machine's speed depends on its neighbours."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One scenario at one number of clients, all medians over the rounds."""

    scenario: str
    clients: int
    alone_rate: float
    routed_rate: float
    rate_ratio: float
    alone_p50_ms: float
    routed_p50_ms: float
    added_p50_ms: float
    alone_p99_ms: float
    routed_p99_ms: float
    added_p99_ms: float
    alone_envoy_us: float
    routed_envoy_us: float
    envoy_ratio: float
    service_us: float
    service_us_min: float
    service_us_max: float
    service_ratio: float
    """To the CPU of Envoy alone: hardly depends on how fast the machine is at the moment."""

    picked_ratio: float
    errors: int
    others_cores: float
    loop_ms_min: float
    loop_ms_max: float


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    scenarios: tuple[Scenario, ...]
    clients: tuple[int, ...]
    rounds: int
    seconds: float
    client: str

    @property
    def runs(self) -> int:
        """Runs of the load generator in all, without the one that warms up each variant."""
        return len(self.clients) * self.rounds * len(self.variants)

    @property
    def variants(self) -> list[tuple[str, int]]:
        """Every (policy, body size); no policy is Envoy alone, measured once per size."""
        sizes = dict.fromkeys(scenario.body_bytes for scenario in self.scenarios)
        return [("", size) for size in sizes] + [
            (scenario.policy, scenario.body_bytes) for scenario in self.scenarios
        ]


Key = tuple[str, int, int]


async def measure(
    plan: Plan,
    stacks: Mapping[str, Stack],
    bodies: Mapping[int, Path],
    others: Sequence[int],
    advance: Callable[[str], None],
) -> list[Row]:
    """Run *plan*. *stacks*: by policy, "" is Envoy alone. *others*: pids of ours beside them."""
    samples: dict[Key, list[Sample]] = {}
    pids = [*others, os.getpid()]
    for stack in stacks.values():
        pids += [stack.envoy.pid, *([stack.service.pid] if stack.service else [])]
    for policy, size in plan.variants:
        await run_load(
            plan.client,
            stacks[policy].port,
            clients=max(plan.clients),
            seconds=min(plan.seconds, 0.5),
            body=bodies[size],
        )
    for number in range(plan.rounds):
        for clients in plan.clients:
            for policy, size in plan.variants[:: -1 if number % 2 else 1]:
                advance(f"{policy or 'Envoy alone'}, {size // 1024} KB, {clients} clients")
                sample = await _sample(plan, stacks[policy], bodies[size], clients, pids)
                samples.setdefault((policy, size, clients), []).append(sample)
    return [
        _row(
            scenario,
            clients,
            samples[("", scenario.body_bytes, clients)],
            samples[(scenario.policy, scenario.body_bytes, clients)],
        )
        for scenario in plan.scenarios
        for clients in plan.clients
    ]


async def _sample(
    plan: Plan, stack: Stack, body: Path, clients: int, pids: Sequence[int]
) -> Sample:
    loop = loop_ms()
    picked = await stack.metric("vllm_extproc_decisions_total") if stack.service else 0
    started, busy, ours = time.monotonic(), machine_busy_s(), _ours_s(pids)
    envoy, service = cpu_s(stack.envoy.pid), cpu_s(stack.service.pid) if stack.service else 0.0

    load = await run_load(plan.client, stack.port, clients=clients, seconds=plan.seconds, body=body)
    await asyncio.sleep(SETTLE_S)

    envoy = cpu_s(stack.envoy.pid) - envoy
    service = cpu_s(stack.service.pid) - service if stack.service else 0.0
    others = machine_busy_s() - busy - (_ours_s(pids) - ours)
    wall_s = time.monotonic() - started
    if stack.service:
        picked = await stack.metric("vllm_extproc_decisions_total") - picked
    requests = max(load.requests, 1)
    return Sample(
        rate=load.rate,
        p50_ms=load.p50_ms,
        p99_ms=load.p99_ms,
        envoy_us=envoy / requests * 1e6,
        service_us=service / requests * 1e6,
        # Requests cut at the end of the run were picked, and are not in the count of the client.
        picked_ratio=min(picked / requests, 1.0),
        errors=load.errors,
        others_cores=max(others / wall_s, 0.0),
        loop_ms=loop,
    )


def _ours_s(pids: Sequence[int]) -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(map(cpu_s, pids)) + ended.ru_utime + ended.ru_stime


def _row(
    scenario: Scenario, clients: int, alone: Sequence[Sample], routed: Sequence[Sample]
) -> Row:
    def median(values: Sequence[Sample], name: str) -> float:
        return statistics.median(getattr(sample, name) for sample in values)

    def paired(name: str, combine: Callable[[float, float], float]) -> float:
        return statistics.median(
            combine(getattr(ours, name), getattr(base, name))
            for ours, base in zip(routed, alone, strict=True)
        )

    def ratio(ours: float, base: float) -> float:
        return ours / base if base else 0.0

    def difference(ours: float, base: float) -> float:
        return ours - base

    service = [sample.service_us for sample in routed]
    return Row(
        scenario=scenario.name,
        clients=clients,
        alone_rate=median(alone, "rate"),
        routed_rate=median(routed, "rate"),
        rate_ratio=paired("rate", ratio),
        alone_p50_ms=median(alone, "p50_ms"),
        routed_p50_ms=median(routed, "p50_ms"),
        added_p50_ms=paired("p50_ms", difference),
        alone_p99_ms=median(alone, "p99_ms"),
        routed_p99_ms=median(routed, "p99_ms"),
        added_p99_ms=paired("p99_ms", difference),
        alone_envoy_us=median(alone, "envoy_us"),
        routed_envoy_us=median(routed, "envoy_us"),
        envoy_ratio=paired("envoy_us", ratio),
        service_us=statistics.median(service),
        service_us_min=min(service),
        service_us_max=max(service),
        service_ratio=statistics.median(
            ratio(ours.service_us, base.envoy_us) for ours, base in zip(routed, alone, strict=True)
        ),
        picked_ratio=min(sample.picked_ratio for sample in routed),
        errors=sum(sample.errors for sample in (*alone, *routed)),
        others_cores=statistics.median(s.others_cores for s in (*alone, *routed)),
        loop_ms_min=min(s.loop_ms for s in (*alone, *routed)),
        loop_ms_max=max(s.loop_ms for s in (*alone, *routed)),
    )
