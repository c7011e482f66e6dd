"""The tables and the picture of bench.all_reduce: times, and how many times as fast as MPI each transport is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench.collective_study.tables import LINES, Row, readable, size_label
from bench.command.machine import heading
from bench.transports.all_reduce_only import BesideWindows, Memory
from bench.transports.in_process import Shared
from bench.transports.operations import IN_PLACE

OURS, BOUND = Shared.name, Memory.name
PRIVATE = ("engine", BesideWindows.name)
#: with two ranks, in float32: private tensors may take so many seconds, or so large a share, longer than by mpi4py
PRIVATE_GOAL = (3e-6, 0.08)
#: with two ranks, in float32: an all-reduce in windows is so many times as fast as mpi4py, in the fastest state and in
#: the others, from bytes, to bytes
WINDOW_GOAL = (1.8, 4.0, 1 << 20, 16 << 20)
TITLES = {
    "shared": "in window", "engine": "private", "beside-windows": "private, group has windows", "mpi4py": "mpi4py",
    "gloo": "gloo", "mpix-bfloat16": "MPIX_BFLOAT16", "in-fp32": "MPI in fp32 with copies", "memory": "memory bound",
}  # fmt: skip

#: the transports that are drawn, in this order, and the two that they are compared with: MPI does not sum bfloat16
DRAWN = ("shared", "engine", "beside-windows", "gloo")
BASELINES = ("mpi4py", "in-fp32")


def _spread(values: Sequence[float], scale: float = 1.0) -> str:
    low, middle, high = (_three(scale * value) for value in values)
    return f"{middle} [{low} to {high}]"


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def goals(rows: Sequence[Row], slower: bool) -> Iterator[str]:
    """The goals for two ranks in one state, each with what was reached. slower: it is not the fastest state."""
    at = {(row["transport"], row["bytes"]): row["turns"][1] for row in rows if row["dtype"] == "float32"}
    sizes = sorted({size for name, size in at if name == "mpi4py"})
    most, share = PRIVATE_GOAL
    for name in PRIVATE:
        over = {
            size: (at[name, size] - at["mpi4py", size], at[name, size] / at["mpi4py", size] - 1)
            for size in sizes
            if (name, size) in at
        }
        late = [
            f"{size_label(size)} {1e6 * t:+.1f} us, {s:+.0%}" for size, (t, s) in over.items() if t > most and s > share
        ]
        if over:
            reached = f"NOT reached at {'; '.join(late)}" if late else "reached"
            yield f"- goal: {TITLES[name]}, fp32, at most {1e6 * most:g} us or {share:.0%} over mpi4py: {reached}"
    least, low, high = WINDOW_GOAL[slower], *WINDOW_GOAL[2:]
    ratios = [at["mpi4py", size] / at[OURS, size] for size in sizes if low <= size <= high and (OURS, size) in at]
    if ratios and rows[0]["operation"] == "all_reduce":
        reached = "reached" if min(ratios) >= least else "NOT reached"
        where = f"{size_label(low)} to {size_label(high)}"
        found = f"{reached}, at least {min(ratios):.2f}"
        yield f"- goal: in windows {least:g} times as fast as mpi4py, fp32, {where}: {found}"


def markdown(result: dict[str, Any]) -> str:
    """The tables in markdown."""
    rows, ranks, operation = result["rows"], result["ranks"], result["operation"]
    states = list(dict.fromkeys(row["state"] for row in rows))
    lines = [
        *heading(f"Host {operation.replace('_', '-')}, {ranks} ranks", result),
        f"- {'in place, ' if operation in IN_PLACE else ''}{result['rounds']} rounds in random order, turns of "
        f"{1e3 * result['turn_seconds']:g} ms: median [quartiles] over the rounds; MB are 2^20 bytes",
        *result["states"],
        f"- wrong elements: {sum(row['wrong'] for row in rows)}",
    ]
    if operation == "all_reduce":
        lines.append(
            "- memory bound: the time in which all ranks at once read and write their own n bytes once, in place: "
            f"2 x {ranks} n bytes"
        )
    lines += [f"- not measured: {reason}" for reason in result["missing"]]
    for place, state in enumerate(states):
        mine = [row for row in rows if row["state"] == state]
        heads = ["", f"## {state[0].upper()}{state[1:]}"] if state else []
        met = list(goals(mine, place > 0)) if ranks == 2 else []
        lines += [*heads, *([""] if heads and met else []), *met]
        for dtype in dict.fromkeys(row["dtype"] for row in mine):
            lines += tables([row for row in mine if row["dtype"] == dtype], ranks)
    return "\n".join([*lines, ""])


def tables(rows: Sequence[Row], ranks: int) -> Iterator[str]:
    """The tables of one dtype in one state: times, and times over that in the window."""
    names = [name for name in TITLES if any(row["transport"] == name for row in rows)]
    titles = [TITLES.get(name, name) for name in names]
    at = {(row["bytes"], row["transport"]): row for row in rows}
    sizes = sorted({row["bytes"] for row in rows})
    dtype = rows[0]["dtype"]

    def line(size: int, cells: Sequence[str]) -> str:
        return f"| {size_label(size)} | {' | '.join(cells)} |"

    def cell(size: int, name: str, what: str, scale: float = 1.0) -> str:
        found = at.get((size, name), {}).get(what)
        return "" if found is None else _spread(found, scale)

    yield from ("", f"{dtype}, microseconds:", "", line_of_heads(titles), "|---:|" + "---:|" * len(names))
    for size in sizes:
        yield line(size, [cell(size, name, "turns", 1e6) for name in names])
    others = [name for name in names if name != OURS]
    if OURS not in names:
        return
    rated = BOUND in names
    yield from ("", f"{dtype}, time over that in the window{'; of the bound, the share that is reached' * rated}:", "")
    heads = [TITLES.get(name, name) for name in others]
    rates = ["GB/s, all ranks in the window", "GB/s, bound"] if rated else []
    yield from (line_of_heads([*heads, *rates]), "|---:|" + "---:|" * (len(heads) + len(rates)))
    for size in sizes:
        reached = [
            _three(2e-9 * ranks * size / at[size, name]["turns"][1]) if (size, name) in at else ""
            for name in ((OURS, BOUND) if rated else ())
        ]
        yield line(size, [*(cell(size, name, "speedup") for name in others), *reached])


def line_of_heads(titles: Sequence[str]) -> str:
    """The first line of a table by size."""
    return f"| size | {' | '.join(titles)} |"


def ratio_plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw MPI's time over each transport's, with quartiles: a column for each dtype, a row for each state.

    rows: of one operation and number of ranks, as bench.all_reduce writes them.
    """
    from matplotlib.figure import Figure  # here: it takes a second to load

    dtypes, states = (list(dict.fromkeys(row.get(name) for row in rows)) for name in ("dtype", "state"))
    figure = Figure(figsize=(2.4 + 5.0 * len(dtypes), 1.2 + 3.4 * len(states)), layout="constrained")
    drawn = figure.subplots(len(states), len(dtypes), squeeze=False, sharex=True, sharey=True)
    first = rows[0]
    for axes, (state, dtype) in zip(drawn.flat, product(states, dtypes), strict=True):
        mine = [row for row in rows if (row["dtype"], row.get("state")) == (dtype, state)]
        baseline = next((name for name in BASELINES if any(row["transport"] == name for row in mine)), None)
        theirs = {row["bytes"]: row["turns"][1] for row in mine if row["transport"] == baseline}
        for number, name in enumerate(DRAWN):
            line = sorted((row for row in mine if row["transport"] == name), key=lambda row: int(row["bytes"]))
            line = [row for row in line if row["bytes"] in theirs]
            if not line:
                continue
            sizes = [row["bytes"] for row in line]
            low, middle, high = ([theirs[row["bytes"]] / row["turns"][at] for row in line] for at in (2, 1, 0))
            style = {"color": LINES[number], "marker": "os^d"[number], "markersize": 4, "linewidth": 1.6}
            axes.plot(sizes, middle, label=TITLES.get(name, name), **style)
            axes.fill_between(sizes, low, high, color=LINES[number], alpha=0.18, linewidth=0)
        axes.axhline(1, color="#555555", linewidth=1.2, linestyle="--")
        axes.set(xscale="log", yscale="log")
        axes.set_title(
            ", ".join(filter(None, (dtype, state, f"over {TITLES.get(str(baseline), baseline)}"))), fontsize=10
        )
        readable(axes, (1, 2, 5))
        axes.tick_params(labelsize=8)
    figure.supxlabel("size of the tensor", fontsize=10)
    figure.supylabel("times as fast as MPI", fontsize=10)
    figure.suptitle(f"Host {first['operation'].replace('_', '-')}, {first['ranks']} ranks of one node", fontsize=11)
    named = [pair for axes in drawn.flat for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    of_name = {label: line for line, label in named}
    # Beside the plots it covers no line.
    figure.legend(of_name.values(), of_name, loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(path, dpi=130)
