"""``python -m tests.bench.pick``: what a decision costs, without Envoy and without gRPC.

First table: one ``pick`` of every registered policy, then one ``Router.decide`` (the pick, its
fallbacks and ``on_sent``), by number of workers. Second table: one whole ``Exchange``, from the bytes
of Envoy's messages to the bytes of the answers and the release of the lease.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from extproc.address import WorkerUrl
from extproc.discovery.updates import Reset, WorkerSpec
from extproc.exchange import Exchange
from extproc.pool import Pool
from extproc.registry import Registry, Settings
from extproc.router import Routed, Router
from policies import registry
from policies.base import Policy, Request
from protos.ext_proc_pb2 import ProcessingMode, ProcessingRequest
from tests.bench import serve
from tests.bench.payload import HEADERS, PATH, chat_body

WORKERS = (2, 16, 128, 1024)
BODY = chat_body(4096)
REPEATS = 5
MAX_BODY_BYTES = 1 << 29
BUDGETS_US = {
    "round_robin": 5.0,
    "random": 5.0,
    "power_of_two": 5.0,
    "consistent_hash": 5.0,
    "cache_aware": 60.0,
}
"""DESIGN section 5, for 16 and 1024 workers."""


def ns_per_call(call: Callable[[], object], seconds: float) -> float:
    """Return the CPU time of a call: the least of several loops, which took *seconds* in all."""
    loops = 1
    while (taken := _timed(call, loops)) < seconds / REPEATS / 2:
        loops *= 2
    rounds = [taken, *(_timed(call, loops) for _ in range(REPEATS - 1))]
    return min(rounds) / loops * 1e9


def _timed(call: Callable[[], object], loops: int) -> float:
    started = time.thread_time()
    for _ in range(loops):
        call()
    return time.thread_time() - started


def router_of(policy: Policy, count: int) -> tuple[Router, Pool]:
    """Return a router with *policy* before *count* workers, and their pool."""
    registry = Registry(lambda: policy, Settings(follows_envoy=False, asks_models=False))
    urls = (f"http://10.0.{n >> 8}.{n & 255}:8000" for n in range(1, count + 1))
    registry.apply("static", Reset(tuple(WorkerSpec(WorkerUrl.parse(url)) for url in urls)), 0.0)
    registry.commit(0.0)
    return Router(registry, random.Random(0)), registry.pools[0]


def request_for(policy: Policy) -> Request:
    """Return a chat request as the exchange hands it to *policy*."""
    headers = {":method": "POST", ":path": PATH, ":authority": "router", **HEADERS}
    return Request(
        method="POST", path=PATH, headers=headers, body=BODY if policy.needs_body else None
    )


def bench_policy(cls: type[Policy], count: int, seconds: float) -> tuple[float, float]:
    """Return ns per pick and per decision with *count* workers."""
    policy = cls()
    router, pool = router_of(policy, count)
    request, workers, rng = request_for(policy), pool.candidates, random.Random(0)

    def pick() -> None:
        policy.pick(request, workers, now=1.0, rng=rng)

    def decide() -> None:
        decision = router.decide(request, 1.0)
        assert isinstance(decision, Routed)
        pool.on_done(decision.workers[0], 1.0)

    return ns_per_call(pick, seconds), ns_per_call(decide, seconds)


def messages(*, with_body: bool) -> list[bytes]:
    """Return what Envoy sends for one request."""
    first = ProcessingRequest()
    first.protocol_config.request_body_mode = ProcessingMode.BUFFERED
    pseudo = {
        ":authority": "router",
        ":path": PATH,
        ":method": "POST",
        ":scheme": "http",
        "content-length": str(len(BODY)),
        "x-forwarded-proto": "http",
    }
    for name, value in (pseudo | HEADERS).items():
        header = first.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    found = [first.SerializeToString()]
    if with_body:
        body = ProcessingRequest()
        body.request_body.body = BODY
        body.request_body.end_of_stream = True
        found.append(body.SerializeToString())
    return found


def bench_exchange(cls: type[Policy], seconds: float) -> float:
    """Return ns per exchange with 16 workers."""
    router, _ = router_of(cls(), 16)
    ids = random.Random(0)
    raw_messages = messages(with_body=cls.needs_body)

    def exchange() -> None:
        one = Exchange(router, ids=ids, max_body_bytes=MAX_BODY_BYTES)
        for raw in raw_messages:
            one.receive(ProcessingRequest.FromString(raw), 1.0)
        one.close(1.0)

    return ns_per_call(exchange, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.pick", description="ns per pick, µs per exchange."
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="per figure (0.3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    registry.load_builtin()
    assert serve.BenchPrompt.name in registry.registered()

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    picks = Table(title="ns per pick / per decision with fallbacks", title_justify="left")
    picks.add_column("policy")
    for count in WORKERS:
        picks.add_column(f"{count} workers", justify="right")
    picks.add_column("budget of a pick, ns", justify="right")
    exchanges = Table(title="µs per exchange, 16 workers", title_justify="left")
    exchanges.add_column("policy")
    exchanges.add_column("headers only", justify="right")
    exchanges.add_column("4 KB body", justify="right")

    figures: dict[str, dict[str, object]] = {}
    for name, cls in sorted(registry.registered().items()):
        by_count = {count: bench_policy(cls, count, options.seconds) for count in WORKERS}
        exchange_us = bench_exchange(cls, options.seconds) / 1e3
        cells = [f"{pick:,.0f} / {decide:,.0f}" for pick, decide in by_count.values()]
        picks.add_row(name, *cells, _against(name, by_count))
        shown = f"{exchange_us:.1f}"
        exchanges.add_row(name, *(("", shown) if cls.needs_body else (shown, "")))
        figures[name] = {
            "pick_ns": {count: pick for count, (pick, _) in by_count.items()},
            "decide_ns": {count: decide for count, (_, decide) in by_count.items()},
            "exchange_us": exchange_us,
            "needs_body": cls.needs_body,
        }
    console.print(picks)
    console.print(exchanges)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


def _against(policy: str, by_count: dict[int, tuple[float, float]]) -> str:
    if policy not in BUDGETS_US:
        return ""
    limit_ns = BUDGETS_US[policy] * 1e3
    ok = all(by_count[count][0] <= limit_ns for count in (16, 1024))
    return f"{limit_ns:,.0f} {'ok' if ok else 'over'}"


if __name__ == "__main__":
    sys.exit(main())
