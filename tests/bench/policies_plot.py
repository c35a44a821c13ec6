"""Plots of the bench of policies, for the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

if TYPE_CHECKING:
    from tests.bench.policies import Figures

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Okabe and Ito: told apart by everybody."""

MARKERS = "os^Dv<>P"
SHOWN = (
    "cache_aware",
    "least_load",
    "rendezvous_hash",
    "consistent_hash",
    "sticky_least_loaded",
    "power_of_two",
    "round_robin",
    "random",
)


def write(figures: Figures, folder: Path) -> list[Path]:
    """Write both pictures; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "policies-pick.png", folder / "prefix-tree.png"]
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        _picks(figures, paths[0])
        _tree(figures, paths[1])
    return paths


def _picks(figures: Figures, path: Path) -> None:
    drawn, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for style, policy in zip(_styles(), SHOWN, strict=True):
        by_workers = {
            p.workers: p.ns / 1e3 for p in figures.picks if (p.policy, p.size) == (policy, 4096)
        }
        left.plot(*zip(*sorted(by_workers.items()), strict=True), label=policy, **style)
    counts = sorted({p.workers for p in figures.picks})
    _log_axes(left, "workers", "CPU time of a pick (µs)")
    left.set_xticks(counts, [f"{n:,}" for n in counts])
    left.set_title("A pick, by number of workers (prompt of 4 KB)", loc="left", fontsize=9)
    _budget(left, 60, "budget of cache_aware, 60 µs")
    _budget(left, 5, "budget of the hash ring and O(1) picks, 5 µs", ":")
    left.legend(frameon=False, fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.16))

    read = ("cache_aware", "consistent_hash, by prompt", "rendezvous_hash, by prompt")
    sizes = sorted({p.size for p in figures.picks})
    for style, policy in zip(_styles(), read, strict=False):
        by_size = {
            p.size: p.ns / 1e3 for p in figures.picks if (p.policy, p.workers) == (policy, 16)
        }
        right.plot(*zip(*sorted(by_size.items()), strict=True), label=f"{policy}: pick", **style)
    by_size = {p.size: p.ns / 1e3 for p in figures.parse if p.what == "chat, English"}
    right.plot(
        *zip(*sorted(by_size.items()), strict=True), color="#444444", marker="x", label="JSON parse"
    )
    _log_axes(right, "length of the prompt", "CPU time (µs)")
    right.set_xticks(
        sizes, [f"{n / 1024:.1f} KB" if n < 1024 else f"{n // 1024} KB" for n in sizes]
    )
    right.set_title("What grows with the prompt (16 workers)", loc="left", fontsize=9)
    right.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16))
    _save(drawn, path)


def _tree(figures: Figures, path: Path) -> None:
    drawn, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    sizes = sorted({i.size for i in figures.index})
    operations = ("match, next turn", "insert, next turn")
    for colour, operation in zip(COLOURS, operations, strict=False):
        rows = sorted((i.size, i) for i in figures.index if i.operation == operation)
        left.plot(
            [size for size, _ in rows],
            [i.tree_ns / 1e3 for _, i in rows],
            color=colour,
            marker="o",
            label=f"tree: {operation}",
        )
        left.plot(
            [size for size, _ in rows],
            [(i.dict_ns or 0) / 1e3 for _, i in rows],
            color=colour,
            marker="o",
            markerfacecolor="white",
            linestyle=":",
            label=f"dict of block hashes: {operation}",
        )
    _log_axes(left, "length of the prompt", "CPU time (µs)")
    left.set_xticks(sizes, [f"{n / 1024:.1f} KB" if n < 1024 else f"{n // 1024} KB" for n in sizes])
    _budget(left, 200, "budget of match + insert at 32 KB, 200 µs")
    left.set_title("The next turn of a known conversation (16 workers)", loc="left", fontsize=9)
    left.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16))

    labels = {
        "nodes": "tree: every block a node (worst case)",
        "dict": "dict of block hashes",
        "turns": "tree: conversations",
        "long": "tree: long prompts",
    }
    by_kind = {memory.kind: memory for memory in figures.memory}
    for style, (kind, label) in zip(_styles(), labels.items(), strict=False):
        points = by_kind[kind].points
        right.plot(
            [blocks * 16 for blocks, _ in points],
            [size / 1e6 for _, size in points],
            label=f"{label}, {by_kind[kind].bytes_per_block:.0f} bytes a block",
            **style,
        )
    _log_axes(right, "stored characters (blocks of 16)", "resident memory (MB)")
    most = 16 * max(memory.blocks for memory in figures.memory if memory.kind in labels)
    ticks = [most / 8, most / 4, most / 2, most]
    right.set_xticks(ticks, [f"{n / 1e6:.3g} M" for n in ticks])
    if by_kind["nodes"].blocks >= 1_000_000:
        _budget(right, 250, "budget of 1 M blocks, 250 MB")
    right.set_title("Memory of the index", loc="left", fontsize=9)
    right.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16))
    _save(drawn, path)


def _styles() -> list[dict[str, str]]:
    return [
        {"color": colour, "marker": marker} for colour, marker in zip(COLOURS, MARKERS, strict=True)
    ]


def _log_axes(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}" if n >= 1 else f"{n:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)


def _budget(axes: Axes, limit: float, text: str, dashes: str = "--") -> None:
    axes.axhline(limit, color="#777777", linewidth=1, linestyle=dashes, label=text)


def _save(drawn: plt.Figure, path: Path) -> None:
    drawn.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(drawn)
