"""The four questions of a study, and their answers in markdown: the first screen of its page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench.collective_study.tables import interval_percent, size_label

from .projection import MeasuredMachine, ProjectedStep, step_on

COST = "What does a collective cost here?"
WAYS = "Which way is fastest, and from which size on?"
SHARE = "What share of a step is communication?"
MORE = "What would 8, 64 and 512 ranks do?"
#: the ways of a collective in words, by the transports that measure them
WORDS = {"engine": "engine", "mpi4py": "plain MPI", "shared": "window"}
#: bytes, of which the nearest measured size is shown
SHOWN = (4, 64 << 10, 1 << 20, 1 << 40)
RANKS = (8, 64, 512)
#: another way must be faster by this share before it is called faster
MARGIN = 0.05

Row = dict[str, Any]


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


def cost(rows: Sequence[Row]) -> dict[str, str]:
    """What a collective costs: the fastest way at a few sizes."""
    table = by_operation(rows)
    all_sizes = sorted({size for sizes in table.values() for size in sizes})
    shown = list(dict.fromkeys(min(all_sizes, key=lambda size: abs(_log(size) - _log(near))) for near in SHOWN))
    lines = [
        f"| operation | {' | '.join(map(size_label, shown))} | busbw at {size_label(shown[-1])} |",
        "|---|" + "---:|" * (len(shown) + 1),
    ]
    starred = False
    for operation, sizes in table.items():
        cells = []
        for size in shown:
            near = min(sizes, key=lambda one: abs(_log(one) - _log(size)))  # sizes are rounded to whole elements
            best = fastest(sizes[near])
            starred |= not best["converged"]
            star = "" if best["converged"] else "*"
            cells.append(f"{time_label(best['seconds']['p50'])} +-{interval_percent(best):.1f}%{star}")
        lines.append(f"| {operation} | {' | '.join(cells)} | {fastest(sizes[near])['busbw'] / 1e9:.3g} GB/s |")
    first = rows[0]
    text = (
        f"Medians of the slowest of {first['ranks']} ranks, {first['dtype']}, by the fastest way at each size; +- is "
        "half of the 95% interval."
    )
    if starred:
        text += " *: the time was up before the median was known to 5%."
    return {"question": COST, "answer": "\n".join([*lines, "", text])}


def ways(rows: Sequence[Row]) -> dict[str, str]:
    """Which way is fastest from which size on."""
    table = by_operation(rows)
    every = [size for sizes in table.values() for size in sizes]
    near = min(every, key=lambda size: abs(_log(size) - 20))
    shown = list(dict.fromkeys((near, max(every))))  # about 1 MB, and the largest
    gain = " | ".join(f"gain at {size_label(size)}" for size in shown)
    lines = [f"| operation | the fastest way | without windows | {gain} |", "|---|---|---|" + "---:|" * len(shown)]
    for operation, sizes in table.items():
        private = {size: {way: row for way, row in found.items() if way != "shared"} for size, found in sizes.items()}
        private = {size: found for size, found in private.items() if found}
        begun = [_in_words(stretches(one)) for one in (sizes, private)]
        gains = [_gain(sizes[min(sizes, key=lambda one: abs(_log(one) - _log(size)))]) for size in shown]
        lines.append(f"| {operation} | {' | '.join([*begun, *gains])} |")
    text = (
        "Engine: its operation on any tensor. Window: the same on a tensor of `Communicator.empty`, which the ranks "
        "of a node share. Plain MPI: mpi4py without the engine. A way counts as faster if it is so by more than 5% "
        "and its interval does not overlap. Gain: plain MPI's time over that of the fastest way."
    )
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
    seconds, waiting = step_here(step)
    skew = _middle(step["seconds"]["skew"])
    lines = [
        f"**{waiting / seconds:.0%} of a step**: it takes {time_label(seconds)}, and the ranks wait for collectives "
        f"for {time_label(waiting)} of it; in {time_label(skew)} they wait for their last rank. {about}.",
        "",
        "| group | operation | count | time on rank 0 | alone | of the step |",
        "|---|---|---:|---:|---:|---:|",
    ]
    alone: dict[tuple[str, str], float] = {}
    for call in replay["ranks"][0] if replay else ():
        key = (call["group"], call["operation"])
        alone[key] = alone.get(key, 0.0) + call["isolated_s"]
    sums: dict[tuple[str, str, int], list[float]] = {}
    for row in step["parts"]:
        if mine := row["of_ranks"].get("0"):
            total = sums.setdefault((row["group"], row["operation"], row["ranks"]), [0.0, 0.0])
            total[0] += row["count"]
            total[1] += statistics.median(mine["seconds"])
    for (group, operation, ranks), (count, spent) in sums.items():
        isolated = time_label(alone[group, operation]) if (group, operation) in alone else "-"
        lines.append(
            f"| {group} ({ranks}) | {operation} | {count:.0f} | {time_label(spent)} | {isolated} "
            f"| {spent / seconds:.1%} |"
        )
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
    """The mean over the ranks of the median over the steps."""
    return statistics.fmean(statistics.median(steps) for steps in ranks)


def time_label(seconds: float) -> str:
    """A time with three digits and its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:,.0f} {unit}" if seconds >= 999.5 * scale else f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _log(size: float) -> float:
    return math.log2(max(size, 1))
