"""The four questions of a study, and their answers in markdown: the first screen of its page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.collective_study.tables import WORDS, Row, interval_percent, size_label

from .projection import MeasuredMachine, ProjectedStep, step_on

COST = "What does a collective cost here?"
WAYS = "Which way is fastest, and from which size on?"
SHARE = "What share of a step is communication?"
MORE = "What would 8, 64 and 512 ranks do?"
#: bytes, of which the nearest measured size is shown
SHOWN = (4, 64 << 10, 1 << 20, 1 << 40)
RANKS = (8, 64, 512)
#: another way must be faster by this share before it is called faster
MARGIN = 0.05


def by_operation(rows: Sequence[Row]) -> dict[str, dict[int, dict[str, Row]]]:
    """The fastest row of each operation, size and transport."""
    found: dict[str, dict[int, dict[str, Row]]] = {}
    for row in rows:
        ways = found.setdefault(row["operation"], {}).setdefault(row["bytes"], {})
        older = ways.get(row["transport"])
        if older is None or row["seconds"]["p50"] < older["seconds"]["p50"]:
            ways[row["transport"]] = row
    return {operation: dict(sorted(sizes.items())) for operation, sizes in found.items()}


def fastest(ways: dict[str, Row]) -> Row:
    """The row of the fastest way."""
    return min(ways.values(), key=lambda row: float(row["seconds"]["p50"]))


def stretches(sizes: dict[int, dict[str, Row]]) -> list[tuple[int, str]]:
    """(size, way) from which size on each way is the fastest, ascending.

    A way stays the answer until another is faster by more than MARGIN and the 95% intervals do not overlap.
    """
    found: list[tuple[int, str]] = []
    for size, ways in sizes.items():
        best = fastest(ways)
        mine = ways.get(found[-1][1]) if found else None
        if mine is not None:
            close = mine["seconds"]["p50"] <= (1 + MARGIN) * best["seconds"]["p50"]
            if close or (mine.get("ci") and best.get("ci") and mine["ci"][0] <= best["ci"][1]):
                continue
        found.append((size, best["transport"]))
    return found


def cost(rows: Sequence[Row], states: str = "") -> dict[str, str]:
    """What a collective costs: the fastest way at a few sizes. states: of the machine, in a sentence."""
    table = by_operation(rows)
    all_sizes = sorted({size for sizes in table.values() for size in sizes})
    shown = list(dict.fromkeys(_nearest(all_sizes, size) for size in SHOWN))
    lines = [
        f"| operation | {' | '.join(map(size_label, shown))} | busbw at {size_label(shown[-1])} |",
        "|---|" + "---:|" * (len(shown) + 1),
    ]
    marks: set[str] = set()
    for operation, sizes in table.items():
        cells = []
        for size in shown:
            best = fastest(sizes[_nearest(sizes, size)])  # sizes are rounded to whole elements
            mine = ("~" if best.get("disturbed") else "") + ("" if best["converged"] else "*")
            marks.update(mine)
            cells.append(f"{time_label(best['seconds']['p50'])} +-{interval_percent(best):.1f}%{mine}")
        busbw = best["busbw"]  # of the last one
        lines.append(f"| {operation} | {' | '.join(cells)} | {busbw / 1e9:.3g} GB/s |")
    first = rows[0]
    text = (
        f"Medians of the slowest of {first['ranks']} ranks, {first['dtype']}, by the fastest way at each size; +- is "
        "half of the 95% interval."
    )
    text += f" {states}" if states else ""
    if "~" in marks:
        text += " ~: measured in another state only."
    if "*" in marks:
        text += " *: the time was up before there were 20 calls whose median was known to 5%."
    return {"question": COST, "answer": "\n".join([*lines, "", text])}


def ways(rows: Sequence[Row]) -> dict[str, str]:
    """Which way is fastest from which size on."""
    table = by_operation(rows)
    every = [size for sizes in table.values() for size in sizes]
    shown = list(dict.fromkeys((_nearest(every, 1 << 20), max(every))))
    gain = " | ".join(f"gain at {size_label(size)}" for size in shown)
    lines = [f"| operation | the fastest way | without windows | {gain} |", "|---|---|---|" + "---:|" * len(shown)]
    for operation, sizes in table.items():
        private = {size: {way: row for way, row in found.items() if way != "shared"} for size, found in sizes.items()}
        private = {size: found for size, found in private.items() if found}
        begun = [_in_words(stretches(one)) for one in (sizes, private)]
        gains = [_gain(sizes[_nearest(sizes, size)]) for size in shown]
        lines.append(f"| {operation} | {' | '.join([*begun, *gains])} |")
    text = (
        "Engine: its operation on any tensor. Window: the same on a tensor of `Communicator.empty`, which the ranks "
        "of a node share. Plain MPI: mpi4py without the engine. A way counts as faster if it is so by more than 5% "
        "and its interval does not overlap. Gain: plain MPI's time over that of the fastest way"
    )
    missing = [operation for operation, sizes in table.items() if not any("mpi4py" in one for one in sizes.values())]
    text += f"; -: MPI has no {', '.join(missing)} of {rows[0]['dtype']}." if missing else "."
    return {"question": WAYS, "answer": "\n".join([*lines, "", text])}


def _in_words(found: Sequence[tuple[int, str]]) -> str:
    """Stretches in words: "plain MPI, window from 1 MB"."""
    words = [WORDS.get(way, way) for _, way in found]
    later = (f"{word} from {size_label(size)}" for word, (size, _) in zip(words[1:], found[1:], strict=True))
    return ", ".join([*words[:1], *later])


def _gain(found: dict[str, Row]) -> str:
    """How many times as fast as plain MPI the fastest way is."""
    if "mpi4py" not in found:
        return "-"
    return f"{found['mpi4py']['seconds']['p50'] / fastest(found)['seconds']['p50']:.2f}x"


def share(step: dict[str, Any], replay: dict[str, Any] | None, about: str) -> dict[str, str]:
    """What share of a step is communication, and what the same collectives take alone."""
    per_step = {name: _over_ranks(step["seconds"][name]) for name in ("step", "exposed", "skew")}
    seconds = per_step["step"]
    part = _Middle.of([one / all_ for one, all_ in zip(per_step["exposed"], seconds, strict=True)])
    whole, waiting = _Middle.of(seconds), _Middle.of(per_step["exposed"])
    skew = statistics.median(per_step["skew"])
    lines = [
        f"**{part.median:.0%} of a step** ({part.low:.0%} to {part.high:.0%}): it takes {whole.times()}, "
        f"and the ranks wait for collectives for {waiting.times()} of "
        f"it; in {time_label(skew)} they wait for their last rank. {about}.",
        "",
        "| group | operation | count | running | waiting | alone | waiting, of the step |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    alone: dict[tuple[str, str], dict[int, float]] = {}
    for rank, calls in enumerate(replay["ranks"] if replay else ()):
        for call in calls:
            mine = alone.setdefault((call["group"], call["operation"]), {})
            mine[rank] = mine.get(rank, 0.0) + call["isolated_s"]
    sums: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in step["parts"]:
        for rank, values in row["of_ranks"].items():
            none = {"count": 0, "seconds": [0.0] * len(seconds), "exposed": [0.0] * len(seconds)}
            total = sums.setdefault((row["group"], row["operation"], row["ranks"]), {}).setdefault(rank, none)
            total["count"] += row["count"]
            for name in ("seconds", "exposed"):
                total[name] = [one + other for one, other in zip(total[name], values[name], strict=True)]
    for (group, operation, ranks), of_ranks in sums.items():
        running = _over_ranks([total["seconds"] for total in of_ranks.values()])
        waits = _over_ranks([total["exposed"] for total in of_ranks.values()])
        shares = _Middle.of([one / all_ for one, all_ in zip(waits, seconds, strict=True)])
        isolated = alone.get((group, operation))
        lines.append(
            f"| {group} ({ranks}) | {operation} | {max(total['count'] for total in of_ranks.values())} "
            f"| {time_label(statistics.median(running))} | {_Middle.of(waits).times()} "
            f"| {time_label(statistics.fmean(isolated.values())) if isolated else '-'} | {shares.shown('.1%')} |"
        )
    lines += [
        "",
        f"Each number is a mean over the ranks, and of these means the median over the {len(seconds)} traced steps, "
        "with the quartiles in brackets. The tables of the section step are medians over the steps on rank 0; its "
        "picture, and in step in the section replay, are of one step, the median one.",
    ]
    if not step["formulas_hold"]:
        lines += ["", "**The trace differs from the formulas**: see the section step."]
    return {"question": SHARE, "answer": "\n".join(lines)}


def more(
    step: dict[str, Any], machine: MeasuredMachine, largest: int, network: str
) -> tuple[dict[str, str], list[Any]]:
    """What more ranks would do: the answer, and its numbers."""
    here, tensor = step_here(step), step["config"]["tensor_model_parallel_size"]
    seconds = here[0]
    lines = [
        f"| ranks | all-reduce of {size_label(largest)} | a step | waiting | speed of a rank | tokens/s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    numbers, reduced = [], 0.0
    for ranks in RANKS:
        collective = machine.seconds("all_reduce", largest, ranks)
        try:
            found: ProjectedStep = step_on(ranks, step, here, machine)
        except ValueError:
            lines.append(f"| {ranks} | {time_label(collective)} | - | - | - | - |")
            continue
        lines.append(
            f"| {ranks} | {time_label(collective)} | {time_label(found.seconds)} | {found.waiting / found.seconds:.0%} "
            f"| {seconds / found.seconds:.0%} of here | {found.tokens_per_second:,.0f} |"
        )
        reduced = max(reduced, found.largest)
        numbers.append(
            {"ranks": ranks, "all_reduce_s": collective, "step_s": found.seconds, "waiting_s": found.waiting}
        )
    text = (
        f"Computed: the step measured here, with its skew, and the time by which the collectives of more replicas of "
        f"tensor groups of {tensor} are longer; each replica has the work of one here; {network}; nothing more hidden "
        "behind the backward; rings between nodes."
    )
    if reduced > largest:
        needed = 1 << math.ceil(math.log2(max(1, reduced / (1 << 20))))
        text += (
            f" **Extrapolated**: the replicas' largest collective has {reduced / (1 << 20):.3g} MB, and the sweep ends "
            f"at {size_label(largest)}; --max-bytes {needed}M measures it."
        )
    return {"question": MORE, "answer": "\n".join([*lines, "", text])}, numbers


def step_here(step: dict[str, Any]) -> tuple[float, float]:
    """The seconds of the step here, and of them those that wait for collectives."""
    seconds, waiting = (_middle(step["seconds"][name]) for name in ("step", "exposed"))
    return seconds, waiting


def _middle(ranks: Sequence[Sequence[float]]) -> float:
    """The median over the steps of the mean over the ranks."""
    return statistics.median(_over_ranks(ranks))


def _over_ranks(ranks: Sequence[Sequence[float]]) -> list[float]:
    """For each step, the mean over the ranks."""
    return [statistics.fmean(values) for values in zip(*ranks, strict=True)]


@dataclass(frozen=True)
class _Middle:
    """The median of values, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> _Middle:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
        return cls(middle, low, high)

    def shown(self, form: str) -> str:
        """Such as "25% (22% to 29%)"."""
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"

    def times(self) -> str:
        """Such as "20 ms (15 ms to 25 ms)"."""
        return f"{time_label(self.median)} ({time_label(self.low)} to {time_label(self.high)})"


def time_label(seconds: float) -> str:
    """A time with three digits and its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:,.0f} {unit}" if seconds >= 999.5 * scale else f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _nearest(sizes: Iterable[int], wanted: int) -> int:
    """The one of ``sizes`` with the nearest logarithm."""
    return min(sizes, key=lambda size: abs(_log(size) - _log(wanted)))


def _log(size: float) -> float:
    return math.log2(max(size, 1))
