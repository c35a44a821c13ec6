"""``make bench-policies``: what a pick costs, what the prefix tree costs, and what both bring.

    python -m tests.bench.policies                      about a minute and a half
    python -m tests.bench.policies --quick              a look, in a quarter of that
    python -m tests.bench.policies --plot               also writes docs/img/*.png
    python -m tests.bench.policies --trace FILE         replays a trace of Mooncake's format, too
    python -m tests.bench.policies --json FILE          for comparing runs

CPU time of one thread, the least of several loops. Figures next to the budgets of DESIGN section 5; a
budget that is missed is reported, it is no failure. Nothing is sent anywhere: no Envoy, no gRPC.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from extproc.openai import parse_content
from policies import registry
from policies.base import Observer, Policy, Request
from policies.cache_aware import CacheAware
from policies.consistent_hash import ConsistentHash
from policies.least_load import LeastLoad
from policies.power_of_two import PowerOfTwo
from policies.prefix_tree import PrefixTree
from policies.random import Random
from policies.rendezvous_hash import RendezvousHash
from policies.round_robin import RoundRobin
from policies.sticky_least_loaded import StickyLeastLoaded
from tests.bench import policies_memory, policies_plot, policies_replay
from tests.bench.policies_memory import Memory
from tests.bench.policies_replay import Outcome
from tests.bench.policies_work import (
    TURNS,
    BlockIndex,
    Prose,
    body,
    conversations,
    fleet,
    join,
    ns_each,
    ns_per_call,
    request,
    stored_count,
)

WORKERS = (2, 16, 128, 1024)
SIZES = (200, 4096, 32_768, 262_144)
"""Characters of a prompt."""

BUDGET_NS = 5_000
BUDGETED = ("round_robin", "random", "power_of_two", "consistent_hash")
CACHE_AWARE_BUDGET_NS = 60_000
INDEX_BUDGET_NS = 200_000
INDEX_BUDGET_MB = 250
INDEX_BLOCKS = 1_000_000
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "img"


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A policy with parameters, as it is shown."""

    title: str
    make: Callable[[], Policy]
    session: bool = True
    """Whether a header names the session; else the policy reads the prompt."""

    weighted: bool = False


CONTENDERS = (
    Contender("round_robin", RoundRobin),
    Contender("round_robin, weights", RoundRobin, weighted=True),
    Contender("random", Random),
    Contender("random, weights", Random, weighted=True),
    Contender("power_of_two", PowerOfTwo),
    Contender("least_load", LeastLoad),
    Contender("consistent_hash", ConsistentHash),
    Contender("consistent_hash, by prompt", ConsistentHash, session=False),
    Contender("consistent_hash, bounded", lambda: ConsistentHash(balance_factor=1.25)),
    Contender("rendezvous_hash", RendezvousHash),
    Contender("rendezvous_hash, by prompt", RendezvousHash, session=False),
    Contender("sticky_least_loaded", StickyLeastLoaded),
    Contender("cache_aware", CacheAware, session=False),
)


class Pick(msgspec.Struct, frozen=True):
    """Cost of one pick."""

    policy: str
    workers: int
    size: int
    ns: float


class Index(msgspec.Struct, frozen=True):
    """Cost of one operation of an index, by size of the prompt."""

    operation: str
    size: int
    tree_ns: float
    dict_ns: float | None


class Parse(msgspec.Struct, frozen=True):
    """Cost of reading one body."""

    what: str
    size: int
    ns: float


class Figures(msgspec.Struct):
    """Everything that was measured."""

    picks: list[Pick] = []
    index: list[Index] = []
    parse: list[Parse] = []
    memory: list[Memory] = []
    replay: list[Outcome] = []


def bench_pick(contender: Contender, count: int, size: int, seconds: float) -> Pick:
    """Measure picks for the next turns of conversations that the policy knows."""
    workers, rng = fleet(count, weighted=contender.weighted), random.Random(1)
    policy = contender.make()
    join(policy, workers)
    observer = policy if isinstance(policy, Observer) else None
    number = stored_count(size, count)
    asked: list[Request] = []
    for at, talk in enumerate(conversations(size, number, Prose(size), turns=TURNS)):
        session = f"session-{at}" if contender.session else ""
        if observer:
            worker = workers[at % count]
            # The tree is the same as if each turn had been sent: the last holds all others.
            observer.on_sent(worker, request(talk.turn(TURNS), session=session), 1.0)
        if len(asked) < 64:
            asked.append(request(talk.last, session=session))
    turns = iter(_for_ever(asked))

    def pick() -> None:
        policy.pick(next(turns), workers, now=1.0, rng=rng)

    return Pick(contender.title, count, size, ns_per_call(pick, seconds))


def _for_ever(items: Sequence[Request]) -> Iterator[Request]:
    while True:
        yield from items


def bench_index(size: int) -> list[Index]:
    """Measure tree and dict with a quarter of the conversations of a fleet of 16."""
    workers = 16
    talks = list(conversations(size, stored_count(size, workers), Prose(size), turns=TURNS))
    space = "c:bench-model"

    def text(messages: Sequence[tuple[str, str]]) -> str:
        (prompt,) = request(messages).content.prompts  # type: ignore[union-attr]
        return prompt

    known = [text(talk.turn(TURNS)) for talk in talks]
    following = [text(talk.last) for talk in talks]
    fresh = [
        f"{prompt[: len(prompt) // 4]}#{prompt[len(prompt) // 4 + 1 :]}" for prompt in following
    ]
    tree, blocks = PrefixTree(), BlockIndex()
    for _ in range(workers):
        tree.add_slot()
    for at, prompt in enumerate(known):
        tree.insert(space, prompt, at % workers)
        blocks.insert(prompt, at % workers)

    def calls(
        method: Callable[[str, int], object], prompts: Sequence[str], *, shift: int = 0
    ) -> list[Callable[[], object]]:
        return [
            lambda at=at, prompt=prompt: method(prompt, (at + shift) % workers)  # type: ignore[misc]
            for at, prompt in enumerate(prompts)
        ]

    def tree_match(prompt: str, _: int) -> object:
        return tree.match(space, prompt).longest((1 << workers) - 1)

    def tree_insert(prompt: str, slot: int) -> None:
        tree.insert(space, prompt, slot)

    def dict_match(prompt: str, _: int) -> object:
        return blocks.match(prompt)

    def dict_insert(prompt: str, slot: int) -> None:
        blocks.insert(prompt, slot)

    found = []
    for operation, prompts, methods, shift in (
        ("match, next turn", following, (tree_match, dict_match), 0),
        ("insert, next turn", following, (tree_insert, dict_insert), 0),
        ("insert, known", following, (tree_insert, dict_insert), 0),
        ("match, leaves at a quarter", fresh, (tree_match, dict_match), 0),
        ("insert, leaves at a quarter", fresh, (tree_insert, dict_insert), 0),
        ("insert, for another worker", following, (tree_insert, dict_insert), 1),
    ):
        ours, theirs = (ns_each(calls(method, prompts, shift=shift)) for method in methods)
        found.append(Index(operation, size, ours, theirs))
    nodes = tree.node_count(0)
    taken = ns_each([lambda: tree.remove_slot(0)])
    found.append(Index("forget a worker, per node", size, taken / nodes, None))
    return found


def bench_parse(size: int, seconds: float) -> list[Parse]:
    """Measure chats in English, with one emoji, and in Chinese; and token ids."""
    prose = Prose(size)
    chinese = Prose(size, "".join(map(chr, range(0x4E00, 0x5E00))))
    plain = next(conversations(size, 1, prose)).last
    bodies = {
        "chat, English": body(plain),
        "chat, one emoji in it": body([*plain[:-1], ("user", plain[-1][1] + "\U0001f600")]),
        "chat, Chinese": body(next(conversations(size, 1, chinese)).last),
        "completion, token ids": msgspec.json.encode(
            {"model": "m", "prompt": [n * 7919 % 150_000 for n in range(size)]}
        ),
    }
    return [
        Parse(what, size, ns_per_call(lambda raw=raw: parse_content(raw), seconds))  # type: ignore[misc]
        for what, raw in bodies.items()
    ]


def budgets(figures: Figures) -> list[tuple[str, float, float, str]]:
    """Return what was measured next to its budget: (what, measured, limit, unit)."""
    found = []
    for pick in figures.picks:
        if pick.size == 4096 and pick.workers in (16, 1024):
            what = f"pick, {pick.workers} workers: {pick.policy}"
            if pick.policy in BUDGETED:
                found.append((what, pick.ns / 1e3, BUDGET_NS / 1e3, "µs"))
            elif pick.policy == "cache_aware":
                found.append((what, pick.ns / 1e3, CACHE_AWARE_BUDGET_NS / 1e3, "µs"))
    at_32k = {i.operation: i.tree_ns for i in figures.index if i.size == 32_768}
    for pair in (("match, next turn", "insert, next turn"), MATCH_AND_INSERT_NEW):
        if pair[0] in at_32k:
            what = f"prefix tree, 32 KB: {pair[0]} + {pair[1]}"
            found.append(
                (what, sum(at_32k[one] for one in pair) / 1e3, INDEX_BUDGET_NS / 1e3, "µs")
            )
    for memory in figures.memory:
        if memory.kind in ("nodes", "turns", "long"):
            measured = memory.bytes_per_block * INDEX_BLOCKS / 1e6
            what = f"1 M blocks: {policies_memory.KINDS[memory.kind]}"
            found.append((what, measured, INDEX_BUDGET_MB, "MB"))
    return found


MATCH_AND_INSERT_NEW = ("match, leaves at a quarter", "insert, leaves at a quarter")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    options = _parser().parse_args(arguments)
    registry.load_builtin()
    seconds = 0.02 if options.quick else 0.06
    blocks = 100_000 if options.quick else INDEX_BLOCKS
    figures = Figures()
    workers = (16, 1024) if options.quick else WORKERS
    contenders = policies_replay.contenders() if options.trace else {}
    steps = len(CONTENDERS) + 2 * len(SIZES) + len(policies_memory.KINDS)
    steps += len(contenders) * len(policies_replay.CACHE_BLOCKS)
    best = 0.0
    with _progress() as progress:
        task = progress.add_task("", total=steps)

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        for contender in CONTENDERS:
            advance(contender.title)
            for count in workers:
                for size in SIZES if not contender.session else (4096,):
                    figures.picks.append(bench_pick(contender, count, size, seconds))
        for size in SIZES:
            advance(f"prefix tree, {_size(size)}")
            figures.index += bench_index(size)
        for size in SIZES:
            advance(f"parse, {_size(size)}")
            figures.parse += bench_parse(size, seconds)
        for kind in policies_memory.KINDS:
            advance(f"memory, {kind}")
            figures.memory.append(policies_memory.measure(kind, blocks))
        if options.trace:
            lines = policies_replay.read(options.trace)
            best = policies_replay.best_hit_ratio(lines)
            for cache_blocks in policies_replay.CACHE_BLOCKS:
                for name, make in contenders.items():
                    advance(f"trace, {name}")
                    figures.replay.append(policies_replay.replay(name, make(), lines, cache_blocks))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for table in tables(figures, best):
        console.print(table)
    if options.plot:
        for path in policies_plot.write(figures, IMAGES):
            console.print(f"wrote {path.relative_to(IMAGES.parents[1])}")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    return 0


def tables(figures: Figures, best: float) -> Iterator[Table]:
    """Yield everything as tables."""
    counts = sorted({pick.workers for pick in figures.picks})
    cells = {(p.policy, p.workers, p.size): p.ns for p in figures.picks}
    table = _table("ns per pick, prompt of 4 KB", "policy", *(f"{n} workers" for n in counts))
    for contender in CONTENDERS:
        table.add_row(
            contender.title, *(f"{cells[(contender.title, n, 4096)]:,.0f}" for n in counts)
        )
    yield table
    table = _table(
        "ns per pick by what is read of the prompt", "policy", "workers", *map(_size, SIZES)
    )
    for contender in CONTENDERS:
        if not contender.session:
            for count in counts:
                row = (f"{cells[(contender.title, count, size)]:,.0f}" for size in SIZES)
                table.add_row(contender.title, str(count), *row)
    yield table
    table = _table(
        "µs per operation, 16 workers: prefix tree / dict of block hashes",
        "operation",
        *map(_size, SIZES),
    )
    operations = {(i.operation, i.size): i for i in figures.index}
    for operation in dict.fromkeys(i.operation for i in figures.index):
        table.add_row(operation, *(_pair(operations[(operation, size)]) for size in SIZES))
    yield table
    table = _table("µs per body that is parsed", "body", *map(_size, SIZES))
    parsed = {(p.what, p.size): p.ns for p in figures.parse}
    for what in dict.fromkeys(p.what for p in figures.parse):
        table.add_row(what, *(f"{parsed[(what, size)] / 1e3:,.1f}" for size in SIZES))
    yield table
    table = _table(
        "memory (resident, a process each)",
        "what",
        "blocks",
        "nodes",
        "M chars",
        "MB",
        "bytes a block",
        "GC pass ms",
    )
    for memory in figures.memory:
        table.add_row(
            policies_memory.KINDS[memory.kind],
            f"{memory.blocks:,}",
            f"{memory.nodes:,}" if memory.nodes else "",
            f"{memory.characters / 1e6:.1f}" if memory.characters else "",
            f"{memory.points[-1][1] / 1e6:,.0f}",
            f"{memory.bytes_per_block:,.0f}",
            f"{memory.collect_ms:,.0f}",
        )
    yield table
    if figures.replay:
        yield _replay_table(figures.replay, best)
    table = _table("budgets of DESIGN section 5", "what", "measured", "budget", "")
    for what, measured, limit, unit in budgets(figures):
        mark = "[green]ok[/]" if measured <= limit else "[red]over[/]"
        table.add_row(what, f"{measured:,.1f} {unit}", f"{limit:,.0f} {unit}", mark)
    yield table


def _replay_table(outcomes: Sequence[Outcome], best: float) -> Table:
    table = _table(
        f"trace on {policies_replay.WORKERS} workers; one cache without end hits {best:.1%}",
        "policy",
        *(
            f"{heading}, {size:,} blocks"
            for size in policies_replay.CACHE_BLOCKS
            for heading in ("hits", "requests max/mean", "prefill max/mean")
        ),
    )
    for name in dict.fromkeys(outcome.policy for outcome in outcomes):
        row: list[str] = []
        for outcome in outcomes:
            if outcome.policy == name:
                row += [
                    f"{outcome.hit_ratio:.1%}",
                    f"{outcome.requests_spread:.2f}",
                    f"{outcome.work_spread:.2f}",
                ]
        table.add_row(name, *row)
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for other in others:
        table.add_column(other, justify="right")
    return table


def _pair(index: Index) -> str:
    ours = f"{index.tree_ns / 1e3:,.1f}"
    return ours if index.dict_ns is None else f"{ours} / {index.dict_ns / 1e3:,.1f}"


def _size(characters: int) -> str:
    return f"{characters / 1024:.1f} KB" if characters < 1024 else f"{characters // 1024} KB"


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.policies",
        description="What policies cost, and what they bring.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, less precise")
    parser.add_argument("--plot", action="store_true", help="write docs/img/*.png")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also replay this trace")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
