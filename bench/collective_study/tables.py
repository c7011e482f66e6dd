"""Print and draw results of collectives: nccl-tests' columns, CSV, plots."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

#: name, unit, width, and text of a row; the first nine columns and their units are nccl-tests'
COLUMNS = (
    ("size", "(B)", 12, lambda row: f"{row['bytes']}"),
    ("count", "(elements)", 12, lambda row: f"{row['count']}"),
    ("type", "", 8, lambda row: row["dtype"]),
    ("redop", "", 6, lambda row: row["redop"]),
    ("root", "", 4, lambda row: f"{row['root']}"),
    ("time", "(us, p50)", 10, lambda row: _microseconds(row["seconds"]["p50"]) + ("~" if row.get("disturbed") else "")),
    ("algbw", "(GB/s)", 7, lambda row: f"{row['algbw'] / 1e9:.2f}"),
    ("busbw", "(GB/s)", 7, lambda row: f"{row['busbw'] / 1e9:.2f}"),
    ("#wrong", "", 6, lambda row: f"{row['wrong']}"),
    ("p95", "(us)", 10, lambda row: _microseconds(row["seconds"]["p95"])),
    ("p99", "(us)", 10, lambda row: _microseconds(row["seconds"]["p99"])),
    ("min", "(us)", 10, lambda row: _microseconds(row["seconds"]["min"])),
    ("max", "(us)", 10, lambda row: _microseconds(row["seconds"]["max"])),
    ("+-median", "(%)", 8, lambda row: f"{interval_percent(row):.1f}{'' if row['converged'] else '*'}"),
    ("calls", "", 6, lambda row: f"{row['iterations']}"),
    ("place", "", 5, lambda row: "in" if row["in_place"] else "out"),
    ("transport", "", 10, lambda row: row["transport"]),
)
#: the transports in words, in pictures and on pages; a transport without an entry has its own name
WORDS = {"mpi4py": "plain MPI", "shared": "window"}
OVERLAP = (
    ("overall", "(us)", 10, lambda row: _microseconds(row["overlap"]["overall"])),
    ("compute", "(us)", 10, lambda row: _microseconds(row["overlap"]["compute"])),
    ("pure comm", "(us)", 10, lambda row: _microseconds(row["overlap"]["communication"])),
    ("overlap", "(%)", 7, lambda row: f"{row['overlap']['percent']:.1f}"),
)
#: the state of the machine, as `bench.timing.states` numbers it; shown if a table has several
STATE = (("state", "", 7, lambda row: row.get("state") or ""),)


#: the condition that a row with a star did not reach in its time (`bench.timing.sampling.Stopping`)
UNCONVERGED = "they had 20 calls whose median was known well enough"


def interval_percent(row: Row) -> float:
    """Half the confidence interval of the median, in percent of the median."""
    low, high = row["ci"]
    return float(50 * (high - low) / row["seconds"]["p50"])


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < 1e-2 else f"{seconds * 1e6:.0f}"


def table(rows: Sequence[Row]) -> str:
    """The rows of one operation by size, under the two lines of heading that nccl-tests has."""
    several = len({row.get("state") for row in rows}) > 1
    columns: tuple[tuple[str, str, int, Any], ...] = (STATE if several else ()) + COLUMNS
    always = len(columns)
    columns += OVERLAP if any("overlap" in row for row in rows) else ()
    first = rows[0]
    lines = [
        f"# {first['operation']}, {first['ranks']} ranks of group {first['group']}",
        "#" + " ".join(f"{name:>{width}}" for name, _, width, _ in columns)[1:],
        "#" + " ".join(f"{unit:>{width}}" for _, unit, width, _ in columns)[1:],
    ]
    for row in sorted(rows, key=lambda row: (row["bytes"], row["transport"], row["in_place"], row.get("state") or "")):
        shown = [
            f"{cell(row) if 'overlap' in row or index < always else '-':>{width}}"
            for index, (_, _, width, cell) in enumerate(columns)
        ]
        lines.append(" ".join(shown))
    return "\n".join(lines)


def flat(row: Row) -> Row:
    """A row without nested values: seconds become seconds_p50, and so on."""
    found: Row = {}
    for name, value in row.items():
        if name == "ci":
            found |= {"ci_low": value[0], "ci_high": value[1]}
        elif isinstance(value, dict):
            found |= {f"{name}_{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write one line for each row. Seconds, bytes, and bytes per second are as in the JSON."""
    flattened = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flattened for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flattened)


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """See `draw`."""
    draw(rows).savefig(path, dpi=110)


def panels(legends: Sequence[int]) -> tuple[Figure, Any]:
    """A figure with a row of two plots for each operation, and room for a legend beside each row.

    legends: the number of lines that each operation's legend names. Returns the figure and its axes [row, column].
    """
    from matplotlib.figure import Figure  # here: it takes a second to load

    heights = [max(4.0, 0.9 + LEGEND_LINE * lines) for lines in legends] or [4.0]
    height = sum(heights)
    figure = Figure(figsize=(14, height))
    # matplotlib's own layouts take twice as long as all the rest here
    figure.subplots_adjust(0.065, 0.6 / height, 0.75, 1 - 0.4 / height, wspace=0.22, hspace=0.35)
    return figure, figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)


def beside(axes: Any, left: Any) -> None:
    """Put the legend of the right plot of a row beside it, where no line can be; with the crosses of the left one."""
    handles, labels = axes.get_legend_handles_labels()
    for handle, label in zip(*left.get_legend_handles_labels(), strict=True):
        if label == CROSS and label not in labels:
            handles, labels = [*handles, handle], [*labels, label]
    axes.legend(
        handles, labels, fontsize="small", bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False, handlelength=3
    )


def crosses(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    """Draw a cross on each (size, seconds) that was measured in another state only, if there are any.

    The legend of a picture names them, with the sign that tables have for them.
    """
    if points:
        sizes, seconds = zip(*points, strict=True)
        axes.plot(sizes, [1e6 * one for one in seconds], "kx", markersize=8, label=CROSS)


def line_style(row: Row, transports: Sequence[str], kinds: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The colour (a transport), the marker (a dtype and reduction) and the dashes (in place) of a row's line.

    Markers are hollow in states of the machine other than the first.

    transports, kinds: all that the picture shows, in its order.
    """
    transport, dtype, redop = (row[name] for name in ("transport", "dtype", "redop"))
    place = "in place" if row["in_place"] else "out of place"
    state = row.get("state")
    way = WORDS.get(transport, transport)
    words = [way, dtype, *([redop] if redop not in (None, "none") else []), place, *([state] if state else [])]
    return {
        "color": LINES[transports.index(transport) % len(LINES)], "markersize": 5,
        "marker": "o^svd*P<>"[kinds.index((dtype, redop)) % 9],
        "linestyle": "--" if row["in_place"] else "-", "fillstyle": "full" if state in (None, "state 1") else "none",
        "label": ", ".join(map(str, words)),
    }  # fmt: skip


def draw(rows: Sequence[Row]) -> Figure:
    """Draw the median time and the bus bandwidth over the size: two plots for each operation.

    The time has its confidence interval. All axes are logarithmic. A colour is a transport, a marker a dtype and
    reduction; lines in place are dashed, and each state of the machine has lines of its own. A cross marks a call that
    was measured in a state which is not shown.
    """
    shown = [row for row in rows if row["bytes"] > 0]
    operations = list(dict.fromkeys(row["operation"] for row in shown))
    transports = list(dict.fromkeys(row["transport"] for row in shown))
    kinds = list(dict.fromkeys((row["dtype"], row["redop"]) for row in shown))
    lines: defaultdict[str, dict[tuple[Any, ...], list[Row]]] = defaultdict(dict)
    for row in sorted(shown, key=lambda row: int(row["bytes"])):
        key = (row["transport"], row["dtype"], row["redop"], row["in_place"], row.get("state"))
        lines[row["operation"]].setdefault(key, []).append(row)
    figure, axes = panels([len(lines[operation]) for operation in operations])
    for (time_axes, bandwidth_axes), operation in zip(axes, operations, strict=False):
        for line in lines[operation].values():
            style = line_style(line[0], transports, kinds)
            sizes = [row["bytes"] for row in line]
            time_axes.plot(sizes, [row["seconds"]["p50"] * 1e6 for row in line], **style)
            ends = [row.get("ci") or [row["seconds"]["p50"]] * 2 for row in line]
            low, high = ([one[end] * 1e6 for one in ends] for end in (0, 1))
            crosses(time_axes, [(row["bytes"], row["seconds"]["p50"]) for row in line if row.get("disturbed")])
            time_axes.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
            # A group of one rank moves nothing, and a logarithmic axis has no 0.
            bandwidth_axes.plot(sizes, [(row.get("busbw") or math.nan) / 1e9 for row in line], **style)
        ranks = next(row["ranks"] for row in shown if row["operation"] == operation)
        for one, label in ((time_axes, "median time, us"), (bandwidth_axes, "bus bandwidth, GB/s")):
            one.set(xscale="log", yscale="log", xlabel="size", ylabel=label, title=f"{operation}, {ranks} ranks")
            readable(one)
        beside(bandwidth_axes, time_axes)
    return figure


#: the legend's words for a cross
CROSS = "~: in another state only"
#: inches of a line of a legend
LEGEND_LINE = 0.18
#: colours that are dark enough on white, and that colour-blind people can tell apart (Okabe & Ito 2008)
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")


def size_label(nbytes: float, _: object = None) -> str:
    """A size in words: 1536 -> 1.5 KB. Units are powers of 1024."""
    power = min(3, max(0, int(math.log2(max(nbytes, 1)) // 10)))
    return f"{nbytes / 1024**power:g} {('B', 'KB', 'MB', 'GB')[power]}"


def by_size(axes: Any) -> None:
    """Label a logarithmic x axis with sizes and their units."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axes.get_xlim()
    octaves = math.log2(high / low)
    base = 2.0 ** max(1, math.ceil(octaves / 7))
    axes.xaxis.set_major_locator(LogLocator(base=base, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(size_label))


def readable(axes: Any, steps: tuple[int, ...] = ()) -> None:
    """Label logarithmic axes with plain numbers: sizes with units along x, and no powers of ten along y.

    steps: the labels of a decade along y; by default 1, 2 and 5, or 1 alone on a long axis.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    by_size(axes)
    low, high = axes.get_ylim()
    steps = steps or ((1, 2, 5) if high / low < 300 else (1,))
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(alpha=0.3)
