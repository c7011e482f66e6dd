"""Draw one traced step: what the caller of each rank did, what it waited for, and what its streams did."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.step_study.spans import Span
from bench.step_study.traced_step import TracedCollective, TracedStep

#: pale colours of the caller's spans: forward, recomputation and backward, and the parts that have no phase
PHASES = {
    "forward": "#cfe3f5", "recompute": "#f6e3b4", "backward": "#d3ecd0", "labels": "#eeeeee", "gradients": "#e3dcef",
    "loss and norm": "#dddddd", "optimizer": "#f0d9d3",
}  # fmt: skip
#: strong colours of collectives: warm for the tensor group, cold for the data group
COLLECTIVES = {
    ("tensor", "all_reduce"): "#c8281e", ("tensor", "all_gather"): "#f08c1e", ("tensor", "reduce_scatter"): "#8c4a14",
    ("data", "all_reduce"): "#5a3fa0", ("data", "all_gather"): "#2f7fc1", ("data", "reduce_scatter"): "#1c3f78",
}  # fmt: skip
OTHER = "#555555"
NAMES = {
    "embedding": "emb", "MLM head": "mlm", "output layer": "out", "pooler": "pool", "loss and norm": "norm",
    "optimizer": "opt", "gradients": "grad",
}  # fmt: skip
WIDTH = 15.0  # inches
CHARACTER = 0.055  # inches of a span's label
TITLE, LINE = 150, 0.19  # characters of a line of the title that fit into WIDTH, and its height in inches


def write_picture(path: Path, steps: Sequence[TracedStep], title: str) -> None:
    """Draw the median step of every rank, with all times on one clock. ``path`` ends in .png, .svg or .pdf.

    A rank has a row for the caller, with a colour for each phase and the collectives for which the caller waits, and a
    row for each stream. The part of a collective before its group's last rank began is hatched.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # here: it takes a second to load

    rows = _rows(steps)
    heights = [0.62 if stream is None else 0.3 for _, stream in rows]
    gaps = [0.22 if stream is None else 0.06 for _, stream in rows]
    waited, seconds = sum(event.exposed for event in steps[0].events), steps[0].seconds
    about = f"the median step, {1e3 * seconds:.0f} ms; in this step rank 0 waits {waited / seconds:.0%} for collectives"
    words = [*textwrap.wrap(title, TITLE), about]
    extra = LINE * (len(words) - 1)
    height = sum(heights) + sum(gaps) + 1.5 + extra
    figure = Figure(figsize=(WIDTH, height))
    figure.subplots_adjust(0.075, 0.5 / height, 0.995, 1 - (0.8 + extra) / height)
    axes = figure.add_subplot()
    origin = min(step.start for step in steps)
    end = max(step.end for step in steps)
    per_inch = 1e3 * (end - origin) / (WIDTH * 0.92)
    spans = [span for step in steps for span in _joined(step.spans)]
    in_words = all(_fits(span.part, span, per_inch) for span in spans if span.part.startswith("layer "))
    marks, top = [], 0.0
    with rc_context({"hatch.linewidth": 0.6}):
        for (rank, stream), thick, gap in zip(rows, heights, gaps, strict=True):
            top -= gap
            bottom, top = top - thick, top - thick
            marks.append(
                (bottom + thick / 2, f"rank {rank}" if stream is None else stream.replace("stream1", "stream"))
            )
            step = steps[rank]
            if stream is None:
                _draw_spans(axes, step.spans, origin, bottom, thick, per_inch, in_words=in_words)
                waits = [(event, event.waited) for event in step.events if event.waited]
                _draw_events(axes, waits, origin, bottom + 0.18 * thick, 0.42 * thick)
            else:
                mine = [(event, (event.start, event.end)) for event in step.events if _stream_of(event) == stream]
                _draw_events(axes, mine, origin, bottom, thick)
        axes.set_yticks([y for y, _ in marks], [name for _, name in marks])
        axes.set(xlim=(0, 1e3 * (end - origin)), ylim=(top - 0.12, 0), xlabel="ms")
        axes.tick_params(length=0, axis="y", labelsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
        _draw_legend(figure, steps, extra)
        figure.suptitle("\n".join(words), fontsize=11, y=1 - 0.1 / height, va="top")
        figure.savefig(path, dpi=130)


def _draw_legend(figure: Any, steps: Sequence[TracedStep], extra: float) -> None:
    """Draw the legend of phases and collectives, two lines below the title, whose other lines take ``extra`` inches."""
    from matplotlib.patches import Patch

    phases = {span.phase or span.part for step in steps for span in step.spans}
    kinds = sorted({(event.group, event.operation) for step in steps for event in step.events}, reverse=True)
    caller = [
        Patch(facecolor=colour, edgecolor="#888888", linewidth=0.4, label=name)
        for name, colour in PHASES.items()
        if name in phases
    ]
    moved = [
        Patch(color=COLLECTIVES.get(kind, OTHER), label=f"{kind[0]} {kind[1].replace('_', '-')}") for kind in kinds
    ]
    moved.append(Patch(facecolor="#999999", edgecolor="white", hatch="//////", label="until the last rank is there"))
    for handles, below in ((caller, 0.33 + extra), (moved, 0.53 + extra)):
        figure.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1 - below / figure.get_figheight()),
            ncols=len(handles), fontsize=8, frameon=False, columnspacing=1.2, handlelength=1.4, handletextpad=0.5,
        )  # fmt: skip


def _rows(steps: Sequence[TracedStep]) -> list[tuple[int, str | None]]:
    """The rows of the picture from the top: (rank, stream, or None for the caller)."""
    found: list[tuple[int, str | None]] = []
    for rank, step in enumerate(steps):
        found.append((rank, None))
        streams = {_stream_of(event) or "" for event in step.events} - {""}
        found += [(rank, stream) for stream in sorted(streams, reverse=True)]  # tensor before data
    return found


def _stream_of(event: TracedCollective) -> str | None:
    return None if event.stream is None else f"{event.group} {event.stream.rpartition('/')[2]}"


def _fits(label: str, span: Span, per_inch: float) -> bool:
    """Whether a label fits into a span. per_inch: milliseconds."""
    return 1e3 * (span.end - span.start) / per_inch > CHARACTER * (len(label) + 1)


def _draw_spans(
    axes: Any, spans: Sequence[Span], origin: float, bottom: float, thick: float, per_inch: float, *, in_words: bool
) -> None:
    """Draw the spans of one caller. in_words: write "layer 3", not "3"."""
    by_phase: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in _joined(spans):
        start, length = 1e3 * (span.start - origin), 1e3 * (span.end - span.start)
        short = NAMES.get(span.part, span.part.removeprefix("layer "))
        names = [span.part, short] if in_words or not span.part.startswith("layer ") else [short]
        fitting = [name for name in names if _fits(name, span, per_inch)]
        if fitting:
            middle = bottom + 0.8 * thick
            axes.text(start + length / 2, middle, fitting[0], ha="center", va="center", fontsize=7, color="#333333")
        by_phase[span.phase or span.part].append((start, length))
    for phase, stretches in by_phase.items():
        colour = PHASES.get(phase, "#ffffff")
        axes.broken_barh(stretches, (bottom, thick), facecolor=colour, edgecolor="#888888", linewidth=0.4)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The spans, with neighbours of the same part and phase joined."""
    found: list[Span] = []
    for span in spans:
        if found and (found[-1].part, found[-1].phase) == (span.part, span.phase):
            found[-1] = Span(found[-1].start, span.end, span.part, span.phase)
        else:
            found.append(span)
    return found


def _draw_events(
    axes: Any,
    events: Sequence[tuple[TracedCollective, tuple[float, float]]],
    origin: float,
    bottom: float,
    thick: float,
) -> None:
    """Draw bars between the given moments, hatched until the last rank begins."""
    solid: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    hatched: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event, (start, end) in events:
        colour = COLLECTIVES.get((event.group, event.operation), OTHER)
        until = min(max(start, event.start + event.skew), end)
        for kind, low, high in ((hatched, start, until), (solid, until, end)):
            if high > low:
                kind[colour].append((1e3 * (low - origin), 1e3 * (high - low)))
    for colour, stretches in solid.items():
        axes.broken_barh(stretches, (bottom, thick), facecolor=colour, edgecolor=colour, linewidth=0.3)
    for colour, stretches in hatched.items():
        axes.broken_barh(stretches, (bottom, thick), facecolor=colour, edgecolor="white", linewidth=0, hatch="//////")


def write_chrome(path: Path, steps: Sequence[TracedStep]) -> None:
    """Write a Chrome trace in microseconds on rank 0's clock: each rank is a process, each stream a thread."""
    entries: list[dict[str, Any]] = []
    for rank, step in enumerate(steps):
        rows = [stream for owner, stream in _rows(steps) if owner == rank]
        entries.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        names = ["parts of the step", *(f"collectives: {stream or 'caller'}" for stream in rows)]
        for number, name in enumerate(names):
            entries.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}})
        for span in step.spans:
            name = f"{span.part} {span.phase}".strip()
            entries.append(_entry(rank, 0, name, "part", span.start, span.end, {}))
        for event in step.events:
            about = {
                "part": event.part, "phase": event.phase, "launched": event.launched, "bytes": event.bytes,
                "dtype": event.dtype, "ranks": list(event.ranks), "skew_us": 1e6 * event.skew,
                "exposed_us": 1e6 * event.exposed,
            }  # fmt: skip
            stream, name = rows.index(_stream_of(event)) + 1, f"{event.operation} {event.group}"
            entries.append(_entry(rank, stream, name, "collective", event.start, event.end, about))
    path.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}), encoding="utf-8")


def _entry(
    rank: int, stream: int, name: str, kind: str, start: float, end: float, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": kind, "pid": rank, "tid": stream, "ts": 1e6 * start, "dur": 1e6 * (end - start),
        "args": about,
    }  # fmt: skip
