"""The four questions of a study, and their answers in markdown: the first screen of its page."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.collective_study.measurement import SIGNS, Measurement
from bench.collective_study.tables import WORDS, size_label

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


def by_operation(rows: Sequence[Measurement]) -> dict[str, dict[int, dict[str, Measurement]]]:
    """The fastest row of each operation, size (ascending) and transport."""
    found: dict[str, dict[int, dict[str, Measurement]]] = {row.operation: {} for row in rows}
    for row in sorted(rows, key=lambda row: (row.bytes, -row.p50)):  # the fastest comes last
        found[row.operation].setdefault(row.bytes, {})[row.transport] = row
    return found


def counted(ways: dict[str, Measurement]) -> dict[str, Measurement]:
    """The rows of one size that may be compared, by way."""
    return {way: row for way, row in ways.items() if not row.why_not}


def fastest(ways: dict[str, Measurement]) -> Measurement:
    """The row of the fastest way."""
    return min(ways.values(), key=lambda row: row.p50)


def stretches(sizes: dict[int, dict[str, Measurement]]) -> list[tuple[int, str]]:
    """(size, way) from which size on each way is the fastest, ascending.

    A way stays the answer until another is faster by more than MARGIN and the 95% intervals do not overlap. Rows that
    may not be compared say nothing: where the way that is the answer has no other row, it stays.
    """
    found: list[tuple[int, str]] = []
    for size, all_ways in sizes.items():
        ways = counted(all_ways)
        if not ways:
            continue
        best = fastest(ways)
        mine = ways.get(found[-1][1]) if found else None
        if mine is None and found and found[-1][1] in all_ways:
            continue
        if mine is not None:
            close = mine.p50 <= (1 + MARGIN) * best.p50
            if close or (mine.ci and best.ci and mine.ci[0] <= best.ci[1]):
                continue
        found.append((size, best.transport))
    return found


def cost(rows: Sequence[Measurement], states: str = "") -> dict[str, str]:
    """What a collective costs: the fastest way at a few sizes. states: of the machine, in a sentence.

    A row that may not be compared stands, with its sign, where there is no other.
    """
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
            here = sizes[_nearest(sizes, size)]  # sizes are rounded to whole elements
            best = fastest(counted(here) or here)
            mine = best.signs
            marks.update(mine)
            known = f" +-{best.interval_percent:.1f}%" if best.ci and "?" not in mine else " "
            cells.append(f"{time_label(best.p50)}{known}{mine}")
        lines.append(f"| {operation} | {' | '.join(cells)} | {(best.busbw or math.nan) / 1e9:.3g} GB/s{mine} |")
    first = rows[0]
    text = (
        f"Medians of the slowest of {first.ranks} ranks, {first.dtype}, by the fastest way at each size; +- is "
        "half of the 95% interval."
    )
    text += f" {states}" if states else ""
    text += "".join(f" {sign}: {words}." for sign, words in SIGNS.items() if sign in marks)
    return {"question": COST, "answer": "\n".join([*lines, "", text])}


def ways(rows: Sequence[Measurement]) -> dict[str, str]:
    """Which way is fastest from which size on."""
    table = by_operation(rows)
    every = [size for sizes in table.values() for size in sizes]
    shown = list(dict.fromkeys((_nearest(every, 1 << 20), max(every))))
    gain = " | ".join(f"gain at {size_label(size)}" for size in shown)
    lines = [f"| operation | the fastest way | without windows | {gain} |", "|---|---|---|" + "---:|" * len(shown)]
    for operation, sizes in table.items():
        without = {size: {way: row for way, row in found.items() if way != "shared"} for size, found in sizes.items()}
        begun = [_in_words(stretches(one), one) for one in (sizes, without)]
        gains = [_gain(sizes[_nearest(sizes, size)]) for size in shown]
        lines.append(f"| {operation} | {' | '.join([*begun, *gains])} |")
    text = (
        "Engine: its operation on any tensor. Window: the same on a tensor of `Communicator.empty`, which the ranks "
        "of a node share. Plain MPI: mpi4py without the engine. A way counts as faster if it is so by more than 5% "
        "and its interval does not overlap. Gain: plain MPI's time over that of the fastest way"
    )
    cells = "".join(lines[2:])
    missing = [operation for operation, sizes in table.items() if not any("mpi4py" in one for one in sizes.values())]
    text += f"; -: MPI has no {', '.join(missing)} of {rows[0].dtype}." if missing else "."
    text += f" *: {SIGNS['*']}." if "*" in cells else ""
    if left := Counter(row.why_not for row in rows if row.why_not):
        said = "; ".join(f"{count}: {why}" for why, count in left.items())
        text += f" {left.total()} of {len(rows)} rows count in no comparison ({said})."
    return {"question": WAYS, "answer": "\n".join([*lines, "", text])}


def _in_words(found: Sequence[tuple[int, str]], sizes: dict[int, dict[str, Measurement]]) -> str:
    """Stretches in words: "plain MPI, window from 1 MB"; a sign is that of the row where the way begins."""
    words = [
        WORDS.get(way, way) + (f" from {size_label(size)}" if number else "") + sizes[size][way].signs
        for number, (size, way) in enumerate(found)
    ]
    return ", ".join(words) or "-"


def _gain(found: dict[str, Measurement]) -> str:
    """How many times as fast as plain MPI the fastest way is, of rows that may be compared."""
    ways = counted(found)
    if "mpi4py" not in ways:
        return "-"
    best = fastest(ways)
    sign = "*" if best.signs or ways["mpi4py"].signs else ""
    return f"{ways['mpi4py'].p50 / best.p50:.2f}x{sign}"


def share(step: dict[str, Any], replay: dict[str, Any], about: str) -> dict[str, str]:
    """What share of a step is communication, and what the same collectives take alone."""
    seconds, exposed, skew = (_over_ranks(step["seconds"][name]) for name in ("step", "exposed", "skew"))
    part, spread = _spread(exposed / seconds, "{:.0%}".format)
    lines = [
        f"**{part} of a step** {spread}: it takes {' '.join(_spread(seconds, time_label))}, "
        f"and the ranks wait for collectives for {' '.join(_spread(exposed, time_label))} of "
        f"it; in {time_label(np.median(skew))} they wait for their last rank. {about}.",
        "",
        "| group | operation | count | running | waiting | alone | waiting, of the step |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    alone: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for rank, calls in enumerate(replay["ranks"]):
        for call in calls:
            alone[call["group"], call["operation"]][rank] += call["isolated_s"]
    sums: defaultdict[tuple[str, str, int], Any] = defaultdict(Counter)
    for row in step["parts"]:
        for rank, values in row["of_ranks"].items():
            counts = [row["count"]] * len(values["seconds"])
            mine = np.array([values["seconds"], values["exposed"], counts])  # [these three, step]
            sums[row["group"], row["operation"], row["ranks"]][rank] += mine
    for (group, operation, ranks), of_ranks in sums.items():
        running, waits, _ = np.mean([*of_ranks.values()], axis=0)
        count, isolated = np.max([*of_ranks.values()], axis=0)[2, 0], alone[group, operation]
        lines.append(
            f"| {group} ({ranks}) | {operation} | {count:.0f} "
            f"| {time_label(np.median(running))} | {' '.join(_spread(waits, time_label))} "
            f"| {time_label(statistics.fmean(isolated.values())) if isolated else '-'} "
            f"| {' '.join(_spread(waits / seconds, '{:.1%}'.format))} |"
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
    lines = [
        f"| ranks | all-reduce of {size_label(largest)} | a step | waiting | speed of a rank | tokens/s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    numbers, reduced = [], 0.0
    for ranks in RANKS:
        try:
            collective = machine.seconds("all_reduce", largest, ranks)
        except ValueError as error:
            return no_answer(str(error))
        try:
            found: ProjectedStep = step_on(ranks, step, here, machine)
        except ValueError:
            lines.append(f"| {ranks} | {time_label(collective)} | - | - | - | - |")
            continue
        lines.append(
            f"| {ranks} | {time_label(collective)} | {time_label(found.seconds)} | {found.waiting / found.seconds:.0%} "
            f"| {here[0] / found.seconds:.0%} of here | {found.tokens_per_second:,.0f} |"
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


def no_answer(why: str) -> tuple[dict[str, str], list[dict[str, float]]]:
    """The answer about more ranks where too few rows may be compared, and no numbers."""
    text = f"No answer: {why}. Too few rows may be compared; give the study more --minutes, or an idle machine."
    return {"question": MORE, "answer": text}, []


def step_here(step: dict[str, Any]) -> tuple[float, float]:
    """The seconds of the step here, and of them those that wait for collectives."""
    seconds, waiting = (float(np.median(_over_ranks(step["seconds"][name]))) for name in ("step", "exposed"))
    return seconds, waiting


def _over_ranks(ranks: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """For each step, the mean over the ranks."""
    found: npt.NDArray[np.float64] = np.mean(np.array(ranks, dtype=np.float64), axis=0)
    return found


def _spread(values: npt.NDArray[np.float64], shown: Callable[[float], str]) -> tuple[str, str]:
    """The median of values, and their quartiles, such as ("20 ms", "(15 ms to 25 ms)")."""
    low, middle, high = map(shown, np.quantile(values, (0.25, 0.5, 0.75)))
    return middle, f"({low} to {high})"


def time_label(seconds: float) -> str:
    """A time with three digits and its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:,.0f} {unit}" if seconds >= 999.5 * scale else f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _nearest(sizes: Iterable[int], wanted: int) -> int:
    """The one of ``sizes`` with the nearest logarithm."""
    return min(sizes, key=lambda size: abs(math.log2(max(size, 1) / wanted)))
