"""Print and draw results of collectives: nccl-tests' columns, CSV, plots."""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.collective_study.measurement import Measurement, SeriesKey, comparable
from bench.transports.names import FRESH, NEW, SAME

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

#: of the times of a row
EDGES = ("p95", "p99", "min", "max")
#: name, unit, width, and text of a row; the first nine columns and their units are nccl-tests'
COLUMNS = (
    ("size", "(B)", 12, lambda row: f"{row.bytes}"),
    ("count", "(elements)", 12, lambda row: f"{row.count}"),
    ("type", "", 8, lambda row: row.dtype),
    ("redop", "", 6, lambda row: row.redop),
    ("root", "", 4, lambda row: f"{row.root}"),
    ("time", "(us, p50)", 10, lambda row: _microseconds(row.p50) + row.signs.rstrip("*")),
    ("algbw", "(GB/s)", 7, lambda row: f"{row.algbw / 1e9:.2f}"),
    ("busbw", "(GB/s)", 7, lambda row: f"{row.busbw / 1e9:.2f}"),
    ("#wrong", "", 6, lambda row: f"{row.wrong}"),
    *((name, "(us)", 10, lambda row, name=name: _microseconds(row.seconds[name])) for name in EDGES),
    ("+-median", "(%)", 8, lambda row: _interval(row) + ("" if row.converged else "*")),
    ("calls", "", 6, lambda row: f"{row.iterations}"),
    ("place", "", 5, lambda row: "in" if row.in_place else "out"),
    ("buffers", "", 7, lambda row: row.buffers or SAME),
    ("transport", "", 10, lambda row: row.transport),
)
#: the transports in words, in pictures and on pages; a transport without an entry has its own name
WORDS = {"mpi4py": "plain MPI", "shared": "window"}
#: of --overlap, for the transport stream
OVERLAP = (
    ("overall", "(us)", 10, lambda row: _of_overlap(row, "overall")),
    ("compute", "(us)", 10, lambda row: _of_overlap(row, "compute")),
    ("pure comm", "(us)", 10, lambda row: _of_overlap(row, "communication")),
    ("overlap", "(%)", 7, lambda row: f"{row.overlap['percent']:.1f}" if row.overlap else "-"),
)
#: the time over that of the transport of --over
OVER = (("over", "(ratio)", 7, lambda row: "-" if row.over is None else f"{row.over:.2f}{row.over_sign or ''}"),)
#: the state of the machine, as `bench.timing.states` numbers it; shown if a table has several
STATE = (("state", "", 7, lambda row: row.state or ""),)


def _of_overlap(row: Measurement, name: str) -> str:
    return _microseconds(row.overlap[name]) if row.overlap else "-"


def _interval(row: Measurement) -> str:
    percent = row.interval_percent
    return f"{percent:.1f}" if math.isfinite(percent) else "-"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < 1e-2 else f"{seconds * 1e6:.0f}"


def alike(rows: Sequence[Measurement], key: Callable[[Measurement], Hashable]) -> list[list[Measurement]]:
    """The rows that have the same ``key``, together."""
    found: defaultdict[Hashable, list[Measurement]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return list(found.values())


def compare(rows: list[Measurement], name: str | None) -> list[Measurement]:
    """The rows with `over`: the median over that of the transport ``name`` for the same call in the same state.

    Of two rows that may be compared (`Measurement.why_not`). If one of them did not converge, `over_sign` is "*".
    """

    def same(row: Measurement) -> tuple[SeriesKey, int]:
        return row.key._replace(transport=None), row.bytes

    theirs = {same(row): row for row in comparable(rows) if row.transport == name}
    found = []
    for row in rows:
        if (base := None if row.why_not else theirs.get(same(row))) is not None:
            late = {"over_sign": "*"} if row.signs + base.signs else {}
            row = row.but(over=row.p50 / base.p50, **late)
        found.append(row)
    return found


def table(rows: Sequence[Measurement]) -> str:
    """The rows of one operation by size, under the two lines of heading that nccl-tests has."""
    several = len({row.state for row in rows}) > 1
    columns: tuple[tuple[str, str, int, Any], ...] = (STATE if several else ()) + COLUMNS
    for key, more in (("overlap", OVERLAP), ("over", OVER)):
        columns += more if any(getattr(row, key) is not None for row in rows) else ()
    first = rows[0]
    lines = [
        f"# {first.operation}, {first.ranks} ranks of group {first.group}"
        + (f", {first.skew} skew" if first.skew else ""),
        "#" + " ".join(f"{name:>{width}}" for name, _, width, _ in columns)[1:],
        "#" + " ".join(f"{unit:>{width}}" for _, unit, width, _ in columns)[1:],
    ]
    ordered = sorted(
        rows, key=lambda row: (row.bytes, row.transport, row.in_place, row.buffers or "", str(row.state or ""))
    )
    lines += [" ".join(f"{cell(row):>{width}}" for _, _, width, cell in columns) for row in ordered]
    return "\n".join(lines)


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a file without nested values: seconds become seconds_p50, and so on."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name == "ci":
            low, high = value or (None, None)
            found |= {"ci_low": low, "ci_high": high}
        elif isinstance(value, dict):
            found |= {f"{name}_{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


def write_csv(path: Path, rows: Sequence[Measurement]) -> None:
    """Write one line for each row. Seconds, bytes, and bytes per second are as in the JSON."""
    flattened = [flat(row.to_json()) for row in rows]
    names = list(dict.fromkeys(name for row in flattened for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flattened)


def crosses(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    """Draw a cross on each (size, seconds) of a row that does not count (`Measurement.why_not`), if there are any.

    The legend of a picture names them.
    """
    if points:
        sizes, seconds = zip(*points, strict=True)
        axes.plot(sizes, [1e6 * one for one in seconds], "kx", markersize=8, label=CROSS)


def line_style(line: SeriesKey, transports: Sequence[str | None], kinds: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """The colour (a transport), the marker (a dtype and reduction) and the dashes (in place) of a line.

    Markers are large for fresh buffers and small for new ones, and hollow in states of the machine other than the
    first. Lines of rows that are skewed are dotted.

    transports, kinds: all that the picture shows, in its order.
    """
    transport, redop, state, skew = line.transport, line.redop, line.state, line.skew
    place = "in place" if line.in_place else "out of place"
    words = [
        WORDS.get(transport or "", transport),
        line.dtype,
        *([redop] if redop not in (None, "none") else []),
        place,
    ]
    words += [f"{line.buffers} buffers"] * bool(line.buffers) + [state] * bool(state) + [f"{skew} skew"] * bool(skew)
    return {
        "color": LINES[transports.index(transport) % len(LINES)],
        "markersize": {FRESH: 8, NEW: 2}.get(line.buffers or SAME, 5),
        "marker": "o^svd*P<>"[kinds.index((line.dtype, redop)) % 9],
        "linestyle": DOTS.get(skew or "", "--" if line.in_place else "-"),
        "fillstyle": "full" if state in (None, "state 1") else "none",
        "label": ", ".join(map(str, words)),
    }  # fmt: skip


def draw(rows: Sequence[Measurement]) -> Figure:
    """Draw the median time and the bus bandwidth over the size: two plots for each operation.

    The time has its confidence interval. All axes are logarithmic. A colour is a transport, a marker a dtype and
    reduction; lines in place are dashed, and each state of the machine and each skew have lines of their own. A cross
    marks a call that does not count.
    """
    lines = alike([row for row in rows if row.bytes > 0], lambda row: row.key)

    def plot(left: Any, right: Any, line: list[Measurement], style: dict[str, Any]) -> None:
        line = sorted(line, key=lambda row: row.bytes)
        sizes = [row.bytes for row in line]
        left.plot(sizes, [row.p50 * 1e6 for row in line], **style)
        ends = [row.ci or (row.p50, row.p50) for row in line]  # of few calls there is none
        low, high = ([one[end] * 1e6 for one in ends] for end in (0, 1))
        crosses(left, [(row.bytes, row.p50) for row in line if row.why_not])
        left.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
        # A group of one rank moves nothing, and a logarithmic axis has no 0.
        right.plot(sizes, [(row.busbw or math.nan) / 1e9 for row in line], **style)
        title = f"{line[0].operation}, {line[0].ranks} ranks"
        for axes, label in ((left, "median time, us"), (right, "bus bandwidth, GB/s")):
            axes.set(yscale="log", ylabel=label, title=title)

    return draw_pairs([(line[0].key, line) for line in lines], plot)


def draw_pairs(series: Sequence[tuple[SeriesKey, T]], plot: Callable[[Any, Any, T, dict[str, Any]], None]) -> Figure:
    """Draw series over the size: two plots for each operation, with a legend beside them, where no line can be.

    series: a way, for `line_style`, and the argument of ``plot``. plot: draws a series into the
    left and the right plot, in a style, and names them. An axis that it made logarithmic gets plain numbers.
    """
    from matplotlib.figure import Figure  # here: it takes a second to load

    ways = [way for way, _ in series]
    operations = list(dict.fromkeys(way.operation for way in ways))
    transports = list(dict.fromkeys(way.transport for way in ways))
    kinds = list(dict.fromkeys((way.dtype, way.redop) for way in ways))
    many = Counter(way.operation for way in ways)
    heights = [max(4.0, 0.9 + LEGEND_LINE * many[operation]) for operation in operations] or [4.0]
    height = sum(heights)
    figure = Figure(figsize=(14, height))
    # matplotlib's own layouts take twice as long as all the rest here
    figure.subplots_adjust(0.065, 0.6 / height, 0.75, 1 - 0.4 / height, wspace=0.22, hspace=0.35)
    rows = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    for way, one in series:
        left, right = rows[operations.index(way.operation)]
        plot(left, right, one, line_style(way, transports, kinds))
    for left, right in rows:
        for axes in (left, right):
            axes.set(xscale="log", xlabel="size")
            readable(axes)
        (handles, labels), others = right.get_legend_handles_labels(), left.get_legend_handles_labels()
        named = dict(zip([*others[1], *labels], [*others[0], *handles], strict=True))
        if CROSS in named:
            handles, labels = [*handles, named[CROSS]], [*labels, CROSS]
        right.legend(
            handles, labels, fontsize="small", bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False, handlelength=3
        )
    return figure


#: the dashes of numbers of rows that differ (bench.transports.skew.NAMES); equal ones have those of other calls
DOTS = {"zipf": ":", "hot": "-."}
#: the legend's words for a cross
CROSS = "does not count (~ another state, ? few calls)"
#: inches of a line of a legend
LEGEND_LINE = 0.18
#: colours that are dark enough on white, and that colour-blind people can tell apart (Okabe & Ito 2008)
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")


def size_label(nbytes: float, _: object = None) -> str:
    """A size in words: 1536 -> 1.5 KB. Units are powers of 1024."""
    power = min(3, max(0, int(math.log2(max(nbytes, 1)) // 10)))
    return f"{nbytes / 1024**power:g} {('B', 'KB', 'MB', 'GB')[power]}"


def readable(axes: Any) -> None:
    """Label axes with plain numbers: sizes with units along x, and no powers of ten along a logarithmic y.

    A decade along y has the labels 1, 2 and 5, or 1 alone on a long axis.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = axes.get_xlim()
    base = 2.0 ** max(1, math.ceil(math.log2(high / low) / 7))
    axes.xaxis.set_major_locator(LogLocator(base=base, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(size_label))
    axes.grid(alpha=0.3)
    if axes.get_yscale() != "log":
        return
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=20))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
