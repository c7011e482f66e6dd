"""Draw one traced step: what the caller of each rank did, what it waited for, and what its streams did."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.step_study.spans import PIPELINE, Span
from bench.step_study.traced_step import TracedCollective, TracedStep

#: pale colours of the caller's spans: forward, recomputation and backward, and the parts that have no phase
PHASES = {
    "forward": "#cfe3f5", "recompute": "#f6e3b4", "backward": "#d3ecd0", "labels": "#eeeeee", PIPELINE: "#ffffff",
    "gradients": "#e3dcef", "loss and norm": "#dddddd", "optimizer": "#f0d9d3",
}  # fmt: skip
#: strong colours of collectives: warm for the tensor group, cold for the data group and the replicas, green for the
#: pipeline, violet for context groups
COLLECTIVES = {
    ("tensor", "all_reduce"): "#c8281e", ("tensor", "all_gather"): "#f08c1e", ("tensor", "reduce_scatter"): "#8c4a14",
    ("data", "all_reduce"): "#5a3fa0", ("data", "all_gather"): "#2f7fc1", ("data", "reduce_scatter"): "#1c3f78",
    ("pipeline", "send"): "#0f7a5a", ("pipeline", "recv"): "#4fb38f", ("pipeline", "all_reduce"): "#7d8f2a",
    ("ends", "all_reduce"): "#b5a12a", ("context", "all_to_all"): "#b0308c", ("context", "sendrecv"): "#d05fb4",
    ("context", "all_gather"): "#d05fb4", ("context", "reduce_scatter"): "#7d1f63",
}  # fmt: skip
COLLECTIVES |= {("replicas", kind): colour for (group, kind), colour in COLLECTIVES.items() if group == "data"}
OTHER = "#555555"
NAMES = {
    "embedding": "emb", "MLM head": "mlm", "output layer": "out", "pooler": "pool", "loss and norm": "norm",
    "optimizer": "opt", "gradients": "grad",
}  # fmt: skip
WIDTH = 15.0  # inches
CHARACTER = 0.055  # inches of a span's label
TITLE = 150  # characters of a line of the title that fit into WIDTH

#: (rank, stream), or None for the caller
Row = tuple[int, str | None]


def write_picture(path: Path, steps: Sequence[TracedStep], title: str) -> None:
    """Draw the median step of every rank, with all times on one clock. ``path`` ends in .png, .svg or .pdf.

    A rank has a row for the caller, with a colour for each phase and the collectives for which the caller waits, and a
    row for each stream. The part of a collective before its group's last rank began is hatched. Steps of a pipeline
    show the micro-batch of a forward or a backward, others the part of the model.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # here: it takes a second to load
    from matplotlib.patches import Patch

    rows = [row for rank, step in enumerate(steps) for row in _rows(rank, step)]
    waited, seconds = sum(event.exposed for event in steps[0].events), steps[0].seconds
    about = f"the median step, {1e3 * seconds:.0f} ms; in this step rank 0 waits {waited / seconds:.0%} for collectives"
    words = [*textwrap.wrap(title, TITLE), about]
    height = sum(0.84 if stream is None else 0.36 for _, stream in rows)
    figure = Figure(figsize=(WIDTH, height + 1.5 + 0.19 * len(words)), layout="constrained")
    axes = figure.add_subplot()
    origin, end = min(step.start for step in steps), max(step.end for step in steps)
    marks, top = [], 0.0
    with rc_context({"hatch.linewidth": 0.6}):
        for rank, stream in rows:
            thick, gap = (0.62, 0.22) if stream is None else (0.3, 0.06)
            top -= gap + thick
            name = f"rank {rank}" if stream is None else stream.replace("stream1", "stream")
            marks.append((top + thick / 2, name))
            events = steps[rank].events
            if stream is None:
                _draw_spans(axes, _joined(steps[rank].spans), origin, (top, thick), (end - origin) / (0.92 * WIDTH))
                waits = [(event, event.waited) for event in events if event.waited]
                _draw_events(axes, waits, origin, (top + 0.18 * thick, 0.42 * thick))
            else:
                mine = [(event, _on_its_way(event)) for event in events if _stream_of(event) == stream]
                _draw_events(axes, mine, origin, (top, thick))
        axes.set_yticks([y for y, _ in marks], [name for _, name in marks])
        axes.set(xlim=(0, 1e3 * (end - origin)), ylim=(top - 0.12, 0), xlabel="ms")
        axes.tick_params(length=0, axis="y", labelsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
        phases = {span.phase or span.part for step in steps for span in step.spans}
        kinds = sorted({(event.group, event.operation) for step in steps for event in step.events}, reverse=True)
        handles = [
            *(Patch(facecolor=PHASES[name], edgecolor="#888888", label=name) for name in PHASES if name in phases),
            *(Patch(color=COLLECTIVES.get(kind, OTHER), label=" ".join(kind).replace("_", "-")) for kind in kinds),
            Patch(facecolor="#999999", edgecolor="white", hatch="//////", label="until the last rank is there"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
        figure.suptitle("\n".join(words), fontsize=11)
        figure.savefig(path, dpi=130)


def _rows(rank: int, step: TracedStep) -> list[Row]:
    """The rows of a rank, from the top."""
    streams = {_stream_of(event) or "" for event in step.events} - {""}
    return [(rank, None), *((rank, stream) for stream in sorted(streams, reverse=True))]  # tensor before data


def _on_its_way(event: TracedCollective) -> tuple[float, float]:
    """From when to when a stream runs the event. A receive begins early, and nothing moves before its sender begins."""
    return event.start + (0.0 if event.peer is None else event.skew), event.end


def _stream_of(event: TracedCollective) -> str | None:
    return None if event.stream is None else f"{event.group} {event.stream.rpartition('/')[2]}"


def _draw_spans(axes: Any, spans: Sequence[Span], origin: float, place: tuple[float, float], inch: float) -> None:
    """Draw the spans of one caller. place: the lower end and the height. inch: its seconds."""
    stretches = [(1e3 * (span.start - origin), 1e3 * (span.end - span.start)) for span in spans]
    colours = [PHASES.get(span.phase or span.part, "#ffffff") for span in spans]
    axes.broken_barh(stretches, place, facecolors=colours, edgecolor="#888888", linewidth=0.4)
    for span, (start, length) in zip(spans, stretches, strict=True):
        for name in (
            () if span.part == PIPELINE else (span.part, NAMES.get(span.part, span.part.removeprefix("layer ")))
        ):
            if (span.end - span.start) / inch > CHARACTER * (len(name) + 1):
                middle = start + length / 2, place[0] + 0.8 * place[1]
                axes.text(*middle, name, ha="center", va="center", fontsize=7, color="#333333")
                break


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The spans, with neighbours of one part and phase joined; in a pipeline, those of one micro-batch and phase."""
    if any(span.part == PIPELINE for span in spans):
        spans = [replace(span, part=str(span.microbatch)) if span.phase else span for span in spans]
    groups = [list(same) for _, same in itertools.groupby(spans, key=lambda span: (span.part, span.phase))]
    return [Span(same[0].start, same[-1].end, same[0].part, same[0].phase) for same in groups]


def _draw_events(
    axes: Any, events: Sequence[tuple[TracedCollective, tuple[float, float]]], origin: float,
    place: tuple[float, float],
) -> None:  # fmt: skip
    """Draw bars between the given moments, hatched until the last rank begins."""
    waiting, moving, colours = [], [], []
    for event, (start, end) in events:
        until = min(max(start, event.start + event.skew), end)
        waiting.append((1e3 * (start - origin), 1e3 * (until - start)))
        moving.append((1e3 * (until - origin), 1e3 * (end - until)))
        colours.append(COLLECTIVES.get((event.group, event.operation), OTHER))
    axes.broken_barh(waiting, place, facecolors=colours, edgecolors="white", linewidth=0.0, hatch="//////")
    axes.broken_barh(moving, place, facecolors=colours, edgecolors=colours, linewidth=0.3)


def write_chrome(path: Path, steps: Sequence[TracedStep]) -> None:
    """Write a Chrome trace in microseconds on rank 0's clock: each rank is a process, each stream a thread."""
    entries: list[dict[str, Any]] = []

    def named(kind: str, name: str, rank: int, **thread: int) -> None:
        entries.append({"ph": "M", "name": f"{kind}_name", "pid": rank, "args": {"name": name}} | thread)

    def bar(rank: int, thread: int, kind: str, name: str, one: Span | TracedCollective, about: dict[str, Any]) -> None:
        when = {"ts": 1e6 * one.start, "dur": 1e6 * (one.end - one.start)}
        entries.append({"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": thread, "args": about} | when)

    for rank, step in enumerate(steps):
        rows = [stream for _, stream in _rows(rank, step)]
        named("process", f"rank {rank}", rank)
        named("thread", "parts of the step", rank, tid=0)
        for number, stream in enumerate(rows, 1):
            named("thread", f"collectives: {stream or 'caller'}", rank, tid=number)
        for span in step.spans:
            of_batch = {} if span.microbatch is None else {"microbatch": span.microbatch}
            bar(rank, 0, "part", f"{span.part} {span.phase}".strip(), span, of_batch)
        for event in step.events:
            about = {
                "part": event.part, "phase": event.phase, "launched": event.launched, "bytes": event.bytes,
                "dtype": event.dtype, "ranks": list(event.ranks), "skew_us": 1e6 * event.skew,
                "exposed_us": 1e6 * event.exposed,
            }  # fmt: skip
            thread = rows.index(_stream_of(event)) + 1
            bar(rank, thread, "collective", f"{event.operation} {event.group}", event, about)
    path.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}), encoding="utf-8")
