"""The rows of a traced step for JSON and CSV, and its tables in markdown."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.step_study.traced_step import MODEL_PHASES, TracedStep
from bench.step_study.volumes import folded
from commengine import cost
from commengine.operations import OPERATIONS

Ranks = Sequence[Sequence[TracedStep]]  # [rank][step]
#: the times of a row, in seconds, by rank and step
TIMES = ("seconds", "skew", "exposed")


def collective_rows(ranks: Ranks) -> list[dict[str, Any]]:
    """A row for each part, phase, group and kind of collective, with each rank's sums over each step, in seconds.

    bytes: of one collective. algbw, busbw: bytes per second on rank 0 (or the first rank that has the collective), as
    nccl-tests defines them, of the medians over the steps of its time and skew, which the table shows.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            for one in step.events:
                key = (one.part, one.phase, one.group, len(one.ranks), one.operation, one.dtype, one.bytes)
                names = ("part", "phase", "group", "ranks", "operation", "dtype", "bytes")
                begun = dict(zip(names, key, strict=True)) | {"count": 0, "launched": [], "of_ranks": {}}
                row = rows.setdefault(key, begun)
                mine = row["of_ranks"].setdefault(str(rank), {name: [0.0] * len(steps) for name in TIMES})
                for name in TIMES:
                    mine[name][number] += getattr(one, name)
                if number == 0 and str(rank) == next(iter(row["of_ranks"])):
                    row["count"] += 1
                    row["launched"].append(one.launched)
    for row in rows.values():
        mine = next(iter(row["of_ranks"].values()))
        row["algbw"] = _bandwidth(row["count"] * row["bytes"], mine)
        row["busbw"] = row["algbw"] * _bus_factor(row["operation"], row["ranks"])
    return sorted(rows.values(), key=lambda row: _order(row["part"], row["phase"]))


def _bandwidth(nbytes: int, times: dict[str, list[float]]) -> float:
    """Bytes per second without skew, of the median time and the median skew; 0 if all of the time is skew."""
    of_row = _medians(times)
    transfer = of_row["seconds"] - of_row["skew"]
    return nbytes / transfer if transfer > 0 else 0.0


def _bus_factor(operation: str, ranks: int) -> float:
    return cost.bus_factor(OPERATIONS[operation].formula or operation, ranks)


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


#: the places of parts of the model among the numbered layers
HEADS = {"embedding": -1, "MLM head": 1 << 30, "output layer": (1 << 30) + 1, "pooler": (1 << 30) + 2}


def _order(part: str, phase: str) -> tuple[Any, ...]:
    """The sorting key of a part: forward by layers, backward from the last layer to the first, then what follows."""
    number = int(part.split()[1]) if part.startswith("layer ") else HEADS.get(part)
    if phase:
        number = (1 << 31) if number is None else number
        return (1, number) if phase == "forward" else (2, -number, phase == "backward")
    return ({"labels": 0, "gradients": 3, "loss and norm": 4, "optimizer": 5}.get(part, 6),)


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield markdown: medians over the steps on the first rank that has the collective, and the ranks' extremes."""
    yield (
        "| part | phase | group | operation | dtype | count | bytes each | time, ms | of ranks, ms | skew, ms "
        "| algbw, GB/s | busbw, GB/s | exposed, ms | hidden |"
    )
    yield "|---|---|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|"
    for row in rows:
        (first, times), *_ = row["of_ranks"].items()
        mine, every = _medians(times), [statistics.median(one["seconds"]) for one in row["of_ranks"].values()]
        part = row["part"] if first == "0" else f"{row['part']} (rank {first})"
        launched = [name for name in dict.fromkeys(row["launched"]) if name != f"{row['part']} {row['phase']}".strip()]
        phase = row["phase"] or ", ".join(f"in {name}" for name in launched)
        yield (
            f"| {part} | {phase} | {row['group']} ({row['ranks']}) | {row['operation']} | {row['dtype']} "
            f"| {row['count']} | {row['bytes']} | {_ms(mine['seconds'])} | {_ms(min(every))} to {_ms(max(every))} "
            f"| {_ms(mine['skew'])} | {_gb(row['algbw'])} | {_gb(row['busbw'])} | {_ms(mine['exposed'])} "
            f"| {_hidden(times)} |"
        )


def group_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield markdown: rank 0's collectives by group and operation, over the whole step."""
    groups: defaultdict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "0" in row["of_ranks"]:  # and not on other ranks alone
            groups[row["group"], row["ranks"], row["operation"]].append(row)
    yield "| group | operation | count | MB | time, ms | skew, ms | busbw, GB/s | exposed, ms | hidden |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for (group, size, operation), mine in groups.items():
        nbytes = sum(row["count"] * row["bytes"] for row in mine)
        of_rows = [row["of_ranks"]["0"] for row in mine]
        times = {name: np.sum([one[name] for one in of_rows], axis=0).tolist() for name in TIMES}
        shown, busbw = _medians(times), _bandwidth(nbytes, times) * _bus_factor(operation, size)
        yield (
            f"| {group} ({size}) | {operation} | {sum(row['count'] for row in mine)} | {nbytes / 1e6:.3f} "
            f"| {_ms(shown['seconds'])} | {_ms(shown['skew'])} | {_gb(busbw)} "
            f"| {_ms(shown['exposed'])} | {_hidden(times)} |"
        )


def phase_rows(ranks: Ranks) -> list[dict[str, Any]]:
    """For each rank and phase, the seconds in each step, and the part of them that was waiting.

    A part that has no phase is a phase of its own.
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            waits = [one.waited for one in step.events if one.waited]
            for span in step.spans:
                phase = span.phase or span.part
                none = {"rank": rank, "phase": phase, "seconds": [0.0] * len(steps), "exposed": [0.0] * len(steps)}
                row = rows.setdefault((rank, phase), none)
                row["seconds"][number] += span.end - span.start
                row["exposed"][number] += sum(max(0.0, min(b, span.end) - max(a, span.start)) for a, b in waits)
    return list(rows.values())


def phase_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield markdown: medians over the steps on rank 0, and the least and most of all ranks."""
    yield "| phase | time, ms | of ranks, ms | waiting for collectives, ms | share |"
    yield "|---|---:|---|---:|---:|"
    by_phase: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_phase[row["phase"]].append(row)
    for phase in sorted(by_phase, key=_phase_order):
        times = [statistics.median(row["seconds"]) for row in by_phase[phase]]
        waiting = statistics.median(by_phase[phase][0]["exposed"])
        yield (
            f"| {phase} | {_ms(times[0])} | {_ms(min(times))} to {_ms(max(times))} | {_ms(waiting)} "
            f"| {waiting / times[0] if times[0] else 0:.0%} |"
        )


def _phase_order(phase: str) -> int:
    order = ["labels", *MODEL_PHASES, "gradients", "loss and norm", "optimizer"]
    return order.index(phase) if phase in order else len(order)


def summary(ranks: Ranks) -> dict[str, list[list[float]]]:
    """For each rank and step, in seconds: the step, communicating, exposed, and skew.

    communicating: some collective runs. exposed: the caller waits for one. skew: one waits for its last rank.
    """
    return {
        "step": [[step.seconds for step in steps] for steps in ranks],
        "communicating": [[_union([(e.start, e.end) for e in step.events]) for step in steps] for steps in ranks],
        "exposed": [[_union([e.waited for e in step.events if e.waited]) for step in steps] for steps in ranks],
        "skew": [[_union([(e.start, e.start + e.skew) for e in step.events]) for step in steps] for steps in ranks],
    }


def _union(intervals: Sequence[tuple[float, float]]) -> float:
    """The seconds within any of the intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary_lines(sums: dict[str, list[list[float]]]) -> Iterator[str]:
    """Yield lines with the medians over the steps, on rank 0 and over the ranks."""
    medians = {name: [statistics.median(steps) for steps in ranks] for name, ranks in sums.items()}
    step = medians["step"]
    texts = {
        "step": "a step takes",
        "communicating": "collectives run for",
        "exposed": "the caller waits for them for",
        "skew": "collectives wait for their last rank for",
    }
    for name, text in texts.items():
        share = "" if name == "step" else f", {medians[name][0] / step[0]:.1%} of it"
        yield (
            f"- {text} {_ms(medians[name][0])} ms on rank 0{share} "
            f"(ranks: {_ms(min(medians[name]))} to {_ms(max(medians[name]))})"
        )


def volume_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield markdown: formula beside trace."""
    yield (
        "| part | phase | group | operation | bytes each | formula: count | traced | formula: MB | traced | source | |"
    )
    yield "|---|---|---|---|---:|---:|---:|---:|---:|---|---|"
    for row in folded(rows):
        yield (
            f"| {row['part']} | {row['phase']} | {row['group']} | {row['operation']} | {row['bytes']} "
            f"| {row['formula_count']} | {row['traced_count']} | {row['formula_bytes'] / 1e6:.6g} "
            f"| {row['traced_bytes'] / 1e6:.6g} | {row['source']} | {'=' if row['equal'] else '**differs**'} |"
        )
    counts, volumes = (
        [sum(row[f"{who}_{what}"] for row in rows) for who in ("formula", "traced")] for what in ("count", "bytes")
    )
    yield (
        f"| all | | | | | {counts[0]} | {counts[1]} | {volumes[0] / 1e6:.6g} | {volumes[1] / 1e6:.6g} | "
        f"| {'=' if all(row['equal'] for row in rows) else '**differs**'} |"
    )


def _hidden(times: dict[str, list[float]]) -> str:
    """The share of all steps' seconds for which no caller waited."""
    return f"{1 - sum(times['exposed']) / sum(times['seconds']):.0%}" if sum(times["seconds"]) else "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.3g}"
