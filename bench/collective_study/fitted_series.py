"""Series with their fits: the model that they make, its file, its tables and its plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.collective_study.kind_of_rows import KindOfRows
from bench.collective_study.piecewise import MISS, FittedSegment, PiecewiseFit, deviations
from bench.collective_study.results import Series
from bench.collective_study.tables import crosses, draw_pairs
from commengine.cost import ALGORITHMS, OPERATIONS, FittedModel, Segment, collective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: operations that cost one message, the nearest to it first: in a sendrecv a rank also receives at the same time
MESSAGES = ("send", "ping_pong", "sendrecv")


@dataclass(frozen=True)
class FittedSeries:
    """A series with its fit."""

    series: Series
    fit: PiecewiseFit

    @property
    def operation(self) -> str:
        """The operation's name in `commengine.cost`."""
        return "p2p" if self.series.operation in MESSAGES else self.series.operation

    @property
    def title(self) -> str:
        """The series in words."""
        return f"{self.series.operation}, {self.series.ranks} ranks, {self.series.variant}"


def model_of(
    fitted: Sequence[FittedSeries], given: Mapping[str, str | None] | None = None
) -> tuple[FittedModel, list[FittedSeries], list[str]]:
    """The model for `commengine.cost`, the series from which it is made, and what a reader has to know of them.

    given: the dtype, redop and state of the model, where they are chosen; see `KindOfRows.of`, which raises UsageError.
    Of these series the first transport counts, in place where it was measured; for p2p the first one of MESSAGES.
    """
    of_cost = [one for one in fitted if one.operation in OPERATIONS]
    kind = KindOfRows.of(((one.series.key, one.series.calls) for one in of_cost), **(given or {}))
    used: dict[tuple[str, int], FittedSeries] = {}
    transports = [one.series.key.transport for one in fitted]

    def order(one: FittedSeries) -> tuple[int, int, bool]:
        operation = one.series.operation
        message = MESSAGES.index(operation) if operation in MESSAGES else 0
        return transports.index(one.series.key.transport), message, not one.series.in_place

    for one in sorted(of_cost, key=order):
        if kind.has(one.series.key):
            used.setdefault((one.operation, one.series.ranks), one)
    notes = [kind.words] if kind.words else []
    for (operation, ranks), one in used.items():
        if operation == "p2p" and one.series.operation != MESSAGES[0]:
            notes.append(f"p2p on {ranks} ranks is {one.series.operation}, because no send was fitted")
    collectives: dict[str, tuple[Segment, ...]] = {}
    for operation, ranks in sorted(used):
        segments = used[operation, ranks].fit.segments
        rows = tuple(Segment(ranks, part.from_bytes, part.alpha, part.beta) for part in segments)
        collectives[operation] = collectives.get(operation, ()) + rows
    return FittedModel(collectives), list(used.values()), notes


def links(operation: str, ranks: int, segment: FittedSegment) -> dict[str, dict[str, float]]:
    """For each algorithm the alpha and beta of a link on which its formula gives this segment, with free arithmetic.

    None gives a segment with a negative alpha, as lines between measured points have.
    """
    found: dict[str, dict[str, float]] = {}
    if segment.alpha < 0:
        return found
    for name in ALGORITHMS.get(operation, {}):
        try:
            cost = collective(operation, name, 1.0, ranks)
        except ValueError:  # needs a power of two
            continue
        found[name] = {"alpha": segment.alpha / cost.steps, "beta": segment.beta / cost.path_bytes}
    return found


def as_json(
    fitted: Sequence[FittedSeries], source: dict[str, Any], path: Path, surroundings: dict[str, Any],
    given: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The contents of a model file.

    source, path: the file of results, and its name. surroundings: of the fit. given: as in `model_of`.
    """
    model, used, notes = model_of(fitted, given)
    rows = []
    for one in fitted:
        points = zip(one.series.sizes, one.series.seconds, one.fit.residuals, one.series.errors, strict=True)
        rows.append({
            **one.series.key._asdict(),
            "in_model": any(one is other for other in used),
            "bic": one.fit.bic,
            "missed": one.fit.missed,
            "left_out": [asdict(row) for row in one.series.left_out],
            "segments": [
                asdict(part) | {"links": links(one.operation, one.series.ranks, part)} for part in one.fit.segments
            ],
            "points": [
                {"bytes": size, "seconds": spent, "residual": residual, "error": error}
                for size, spent, residual, error in points
            ],
        })  # fmt: skip
    measured = {name: source.get(name) for name in ("command", "date", "hardware", "versions")}
    result = {
        **model.to_json(), **surroundings, "results": str(path), "measured": measured, "notes": notes, "series": rows
    }  # fmt: skip
    # JSON has no infinity: null in its place.
    found: dict[str, Any] = json.loads(json.dumps(result), parse_constant=lambda _: None)
    return found


def tables(fitted: Sequence[FittedSeries]) -> Iterator[str]:
    """Yield markdown: the fits, then every size."""
    yield "| operation | ranks | measured as | from bytes | alpha, us | 1 / beta, GB/s | residuals: rms | largest |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|"
    for one in fitted:
        bounds = [*(part.from_bytes for part in one.fit.segments[1:]), float("inf")]
        for part, end in zip(one.fit.segments, bounds, strict=True):
            errors = np.array(one.fit.residuals)[(one.series.sizes >= part.from_bytes) & (one.series.sizes < end)]
            seen = "- | -"  # a line may be short enough to have no measured size
            if len(errors):
                seen = f"{np.sqrt(np.mean(errors**2)):.1%} | {max(errors, key=abs):+.1%}"
            start = interval(part.from_bytes, part.from_interval, ",.0f") if part.from_bytes else "0"
            low, high = (bandwidth(beta) for beta in reversed(part.beta_interval))
            yield (
                f"| {one.series.operation} | {one.series.ranks} | {one.series.variant} | {start} "
                f"| {interval(1e6 * part.alpha, tuple(1e6 * x for x in part.alpha_interval), '.4g')} "
                f"| {bandwidth(part.beta)} [{low} to {high}] | {seen} |"
            )
    if said := [line for one in fitted for line in in_words(one)]:
        yield from ("", *said)
    for one in fitted:
        yield from ("", f"{one.title}:", "", "| bytes | measured, us | fit, us | residual |", "|---:|---:|---:|---:|")
        for size, spent, error in zip(one.series.sizes, one.series.seconds, one.fit.residuals, strict=True):
            yield f"| {size:.0f} | {1e6 * spent:.4g} | {1e6 * spent * (1 - error):.4g} | {error:+.1%} |"


def in_words(one: FittedSeries) -> Iterator[str]:
    """Yield a list item where the series does not follow alpha + n beta, has a residual above MISS, or lacks rows."""
    words = []
    if one.fit.missed:
        words.append(
            f"alpha + n beta misses measured times by up to {abs(one.fit.missed):.0%}, and the model is lines between "
            "measured sizes in its place, whose alphas and betas describe no algorithm"
        )
    left = np.array(one.fit.residuals)
    worst = int(np.argmax(deviations(left)))
    size, spent, error = one.series.sizes[worst], 1e6 * one.series.seconds[worst], one.series.errors[worst]
    if abs(left[worst]) > MISS:
        modelled = spent * (1 - left[worst])
        words.append(
            f"at {size:,.0f} bytes the residual is {left[worst]:+.0%} (measured {spent:.4g} us +-{1.96 * error:.0%}, "
            f"model {modelled:.4g} us)"
        )
    if one.series.unconverged:
        words.append(f"{one.series.unconverged} of {len(left)} rows did not converge, and count with their intervals")
    if one.series.left_out:
        rows = ", ".join(f"{row.size:,.0f} bytes ({row.why})" for row in one.series.left_out)
        words.append(f"left out: {rows}")
    if words:
        yield f"- {one.title}: {'; '.join(words)}."


def interval(value: float, ends: Sequence[float], form: str = ".4g") -> str:
    """A number with its interval; an end that the data do not bound reads 0 or infinity."""
    low, high = (f"{end:{form}}" if math.isfinite(end) else "infinity" for end in ends)
    return f"{value:{form}} [{low} to {high}]"


def bandwidth(beta: float) -> str:
    """The GB/s of ``beta`` seconds a byte."""
    return f"{1e-9 / beta:.4g}" if beta else "infinity"


def draw(fitted: Sequence[FittedSeries]) -> Figure:
    """Draw each fit over its data, on logarithmic axes, and beside it the residuals: two plots for each operation.

    Colours, markers and dashes are those of bench.collectives; dotted lines are the switch points.
    """

    def plot(left: Any, right: Any, one: FittedSeries, style: dict[str, Any]) -> None:
        shown = one.series.sizes > 0
        style["label"] = f"{one.series.ranks} ranks, {style['label']}"
        sizes, seconds = one.series.sizes[shown], 1e6 * one.series.seconds[shown]
        # An interval of a factor, because one of plus or minus may reach 0, where a logarithmic axis has no place.
        factor = 1 + 1.96 * one.series.errors[shown]
        left.errorbar(
            sizes, seconds, [seconds - seconds / factor, seconds * factor - seconds], fmt=style["marker"],
            color=style["color"], markersize=4,
        )  # fmt: skip
        crosses(left, [(row.size, row.seconds) for row in one.series.left_out if row.size > 0])
        starts = [0.0] if one.fit.missed else [part.from_bytes for part in one.fit.segments]
        for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
            inside = sizes[(sizes >= start) & (sizes < end)]
            line = [inside[0] * (inside[-1] / inside[0]) ** (k / 100) for k in range(101)]  # a line curves here
            curve = [1e6 * one.fit.seconds(size) for size in line]
            left.plot(line, curve, color=style["color"], linestyle=style["linestyle"])
            if start:
                left.axvline(start, color=style["color"], linestyle=":", linewidth=0.8)
        right.plot(sizes, 100 * np.array(one.fit.residuals)[shown], linewidth=0.8, **style)
        right.axhline(0, color="black", linewidth=0.6)
        left.set(title=one.series.operation, yscale="log", ylabel="time, us")
        right.set(title=f"{one.series.operation}, residuals", ylabel="(measured - fit) / measured, %")

    return draw_pairs([(one.series.key, one) for one in fitted], plot)
