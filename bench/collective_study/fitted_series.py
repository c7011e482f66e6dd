"""Series with their fits: the model that they make, its file, its tables and its plot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.collective_study.piecewise import MISS, FittedSegment, PiecewiseFit, deviations
from bench.collective_study.results import KEY, Series
from bench.collective_study.tables import beside, by_size, crosses, line_style, panels, readable
from commengine.cost import ALGORITHMS, OPERATIONS, FittedModel, Segment, collective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: operations that cost one message, because a rank sends and receives at once (commengine/cost/collectives.py)
MESSAGES = ("send", "sendrecv", "ping_pong")


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


def model_of(fitted: Sequence[FittedSeries]) -> tuple[FittedModel, list[FittedSeries]]:
    """The model for `commengine.cost`, and the series from which it is made, but for those of windows."""
    used: dict[tuple[str, int], FittedSeries] = {}
    windows: dict[tuple[str, int], FittedSeries] = {}
    transports = [one.series.key["transport"] for one in fitted]
    for one in sorted(fitted, key=lambda one: (transports.index(one.series.key["transport"]), not one.series.in_place)):
        if one.operation in OPERATIONS:
            used.setdefault((one.operation, one.series.ranks), one)
            if one.series.key["transport"] == "shared":
                windows.setdefault((one.operation, one.series.ranks), one)
    return FittedModel(_segments(used), _segments(windows)), list(used.values())


def _segments(used: dict[tuple[str, int], FittedSeries]) -> dict[str, tuple[Segment, ...]]:
    collectives: dict[str, tuple[Segment, ...]] = {}
    for operation, ranks in sorted(used):
        segments = used[operation, ranks].fit.segments
        rows = tuple(Segment(ranks, part.from_bytes, part.alpha, part.beta) for part in segments)
        collectives[operation] = collectives.get(operation, ()) + rows
    return collectives


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
    fitted: Sequence[FittedSeries], source: dict[str, Any], path: Path, surroundings: dict[str, Any]
) -> dict[str, Any]:
    """The contents of a model file.

    source, path: the file of results, and its name. surroundings: of the fit.
    """
    model, used = model_of(fitted)
    rows = []
    for one in fitted:
        points = zip(one.series.sizes, one.series.seconds, one.fit.residuals, one.series.errors, strict=True)
        rows.append({
            **one.series.key,
            "in_model": any(one is other for other in used),
            "bic": one.fit.bic,
            "missed": one.fit.missed,
            "segments": [
                asdict(part) | {"links": links(one.operation, one.series.ranks, part)} for part in one.fit.segments
            ],
            "points": [
                {"bytes": size, "seconds": spent, "residual": residual, "error": error,
                 **({"disturbed": True} if size in one.series.disturbed else {})}
                for size, spent, residual, error in points
            ],
        })  # fmt: skip
    measured = {name: source.get(name) for name in ("command", "date", "hardware", "versions")}
    result = {**model.to_json(), **surroundings, "results": str(path), "measured": measured, "series": rows}
    found: dict[str, Any] = finite(result)
    return found


def finite(value: Any) -> Any:
    """``value`` with None in place of infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables(fitted: Sequence[FittedSeries]) -> Iterator[str]:
    """Yield markdown: the fits, then every size."""
    yield "| operation | ranks | measured as | from bytes | alpha, us | 1 / beta, GB/s | residuals: rms | largest |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|"
    for one in fitted:
        bounds = [*(part.from_bytes for part in one.fit.segments[1:]), float("inf")]
        for part, end in zip(one.fit.segments, bounds, strict=True):
            pairs = zip(one.series.sizes, one.fit.residuals, strict=True)
            errors = [error for size, error in pairs if part.from_bytes <= size < end]
            rms = (sum(error**2 for error in errors) / len(errors)) ** 0.5
            start = interval(part.from_bytes, part.from_interval, ",.0f") if part.from_bytes else "0"
            low, high = (bandwidth(beta) for beta in reversed(part.beta_interval))
            yield (
                f"| {one.series.operation} | {one.series.ranks} | {one.series.variant} | {start} "
                f"| {interval(1e6 * part.alpha, tuple(1e6 * x for x in part.alpha_interval), '.4g')} "
                f"| {bandwidth(part.beta)} [{low} to {high}] | {rms:.1%} | {max(errors, key=abs):+.1%} |"
            )
    if said := [line for one in fitted for line in in_words(one)]:
        yield from ("", *said)
    for one in fitted:
        yield from ("", f"{one.title}:", "", "| bytes | measured, us | fit, us | residual |", "|---:|---:|---:|---:|")
        for size, spent, error in zip(one.series.sizes, one.series.seconds, one.fit.residuals, strict=True):
            yield f"| {size:.0f} | {1e6 * spent:.4g} | {1e6 * spent * (1 - error):.4g} | {error:+.1%} |"


def in_words(one: FittedSeries) -> Iterator[str]:
    """Yield a list item where the series does not follow alpha + n beta, or has a residual above MISS."""
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
    if words:
        yield f"- {one.title}: {'; '.join(words)}."


def interval(value: float, ends: Sequence[float], form: str = ".4g") -> str:
    """A number with its interval; an end that the data do not bound reads 0 or infinity."""
    low, high = (f"{end:{form}}" if math.isfinite(end) else "infinity" for end in ends)
    return f"{value:{form}} [{low} to {high}]"


def bandwidth(beta: float) -> str:
    """The GB/s of ``beta`` seconds a byte."""
    return f"{1e-9 / beta:.4g}" if beta else "infinity"


def fits_of(data: dict[str, Any]) -> list[FittedSeries]:
    """The fits in a model file. Raises KeyError, TypeError or ValueError if it is not one."""

    def bounds(ends: Sequence[float | None]) -> tuple[float, float]:
        low, high = ends
        return 0.0 if low is None else float(low), math.inf if high is None else float(high)

    found = []
    for one in data.get("series", ()):
        segments = tuple(
            FittedSegment(
                part["from_bytes"], bounds(part["from_interval"]), part["alpha"], bounds(part["alpha_interval"]),
                part["beta"], bounds(part["beta_interval"]),
            )
            for part in one["segments"]
        )  # fmt: skip
        sizes, spent, residuals, errors = (
            np.array([float(point[name]) for point in one["points"]])
            for name in ("bytes", "seconds", "residual", "error")
        )
        disturbed = frozenset(float(point["bytes"]) for point in one["points"] if point.get("disturbed"))
        series = Series({name: one.get(name) for name in KEY}, sizes, spent, errors, disturbed)
        found.append(
            FittedSeries(series, PiecewiseFit(segments, tuple(residuals.tolist()), one["bic"], one.get("missed", 0.0)))
        )
    return found


def draw(fitted: Sequence[FittedSeries]) -> Figure:
    """Draw each fit over its data, on logarithmic axes, and beside it the residuals: two plots for each operation.

    Colours, markers and dashes are those of bench.collectives; dotted lines are the switch points.
    """
    operations = list(dict.fromkeys(one.series.operation for one in fitted))
    transports = list(dict.fromkeys(one.series.key["transport"] for one in fitted))
    kinds = list(dict.fromkeys((one.series.key["dtype"], one.series.key["redop"]) for one in fitted))
    of_operation = {name: [one for one in fitted if one.series.operation == name] for name in operations}
    figure, axes = panels([len(mine) for mine in of_operation.values()])
    for (left, right), (operation, mine) in zip(axes, of_operation.items(), strict=True):
        for one in mine:
            style, shown = line_style(one.series.key, transports, kinds), one.series.sizes > 0
            style["label"] = f"{one.series.ranks} ranks, {style['label']}"
            sizes, seconds = one.series.sizes[shown], 1e6 * one.series.seconds[shown]
            # An interval of a factor, because one of plus or minus may reach 0, where a logarithmic axis has no place.
            factor = 1 + 1.96 * one.series.errors[shown]
            left.errorbar(
                sizes, seconds, [seconds - seconds / factor, seconds * factor - seconds], fmt=style["marker"],
                color=style["color"], markersize=4,
            )  # fmt: skip
            points = zip(one.series.sizes.tolist(), one.series.seconds.tolist(), strict=True)
            crosses(left, [point for point in points if point[0] > 0 and point[0] in one.series.disturbed])
            starts = [0.0] if one.fit.missed else [part.from_bytes for part in one.fit.segments]
            for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
                inside = sizes[(sizes >= start) & (sizes < end)]
                line = [inside[0] * (inside[-1] / inside[0]) ** (k / 100) for k in range(101)]  # a line curves here
                curve = [1e6 * one.fit.seconds(size) for size in line]
                left.plot(line, curve, color=style["color"], linestyle=style["linestyle"])
                if start:
                    left.axvline(start, color=style["color"], linestyle=":", linewidth=0.8)
            errors = [100 * error for error, keep in zip(one.fit.residuals, shown, strict=True) if keep]
            right.plot(sizes, errors, linewidth=0.8, **style)
        left.set(title=operation, xscale="log", yscale="log", xlabel="size", ylabel="time, us")
        readable(left)
        right.axhline(0, color="black", linewidth=0.6)
        right.set(title=f"{operation}, residuals", xscale="log", xlabel="size", ylabel="(measured - fit) / measured, %")
        by_size(right)
        right.grid(alpha=0.3)
        beside(right, left)
    return figure
