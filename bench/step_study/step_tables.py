"""The rows of a traced step for JSON and CSV, and its tables in markdown."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.step_study.traced_step import MODEL_PHASES, TracedCollective, TracedStep
from bench.step_study.volumes import folded
from commengine import cost

Ranks = Sequence[Sequence[TracedStep]]  # [rank][step]
Key = tuple[str, str, str, int, str, str, int]


def _key(event: TracedCollective) -> Key:
    size = len(event.ranks)
    return event.part, event.phase, event.group, size, event.operation, event.dtype, event.bytes


def collective_rows(ranks: Ranks) -> list[dict[str, Any]]:
    """A row for each part, phase, group and kind of collective, with each rank's sums over each step, in seconds.

    bytes: of one collective. algbw, busbw: bytes per second on rank 0 (or the first rank that has the collective),
    without skew, as nccl-tests defines them; the median over the steps of the sum over a step.
    """
    sums: dict[Key, dict[int, list[dict[str, Any]]]] = {}
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            for event in step.events:
                none = {"count": 0, "seconds": 0.0, "skew": 0.0, "exposed": 0.0, "launched": []}
                of_rank = sums.setdefault(_key(event), {})
                mine = of_rank.setdefault(rank, [none | {"launched": []} for _ in steps])[number]
                mine["count"] += 1
                for name in ("seconds", "skew", "exposed"):
                    mine[name] += getattr(event, name)
                mine["launched"].append(event.launched)
    rows = []
    for key, of_ranks in sums.items():
        part, phase, group, size, operation, dtype, nbytes = key
        shown = of_ranks[min(of_ranks)]
        row = {
            "part": part, "phase": phase, "group": group, "ranks": size, "operation": operation, "dtype": dtype,
            "bytes": nbytes, "count": shown[0]["count"], "launched": shown[0]["launched"],
        }  # fmt: skip
        row["algbw"] = statistics.median(_bandwidth(one, nbytes) for one in shown)
        row["busbw"] = row["algbw"] * cost.bus_factor(operation, size)
        row["of_ranks"] = {
            str(rank): {name: [one[name] for one in steps] for name in ("seconds", "skew", "exposed")}
            for rank, steps in of_ranks.items()
        }
        rows.append(row)
    return sorted(rows, key=lambda row: _order(row["part"], row["phase"]))


def _bandwidth(sums: dict[str, Any], nbytes: int) -> float:
    transfer = sums["seconds"] - sums["skew"]
    return sums["count"] * nbytes / transfer if transfer > 0 else 0.0


#: the places of parts of the model among the numbered layers
HEADS = {"embedding": -1, "MLM head": 1 << 30, "output layer": (1 << 30) + 1, "pooler": (1 << 30) + 2}


def _order(part: str, phase: str) -> tuple[Any, ...]:
    """The sorting key of a part: forward by layers, backward from the last layer to the first, then what follows."""
    number = int(part.split()[1]) if part.startswith("layer ") else HEADS.get(part)
    if phase:
        number = (1 << 31) if number is None else number
        return (1, number) if phase == "forward" else (2, -number, phase == "backward")
    return ({"labels": 0, "gradients": 3, "loss and norm": 4, "optimizer": 5}.get(part, 6),)


def csv_rows(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A line for each row and rank: medians over the steps, in seconds."""
    for row in rows:
        fixed = {name: value for name, value in row.items() if name not in ("of_ranks", "launched")}
        for rank, sums in row["of_ranks"].items():
            yield fixed | {"rank": int(rank)} | {name: statistics.median(sums[name]) for name in sums}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield markdown: medians over the steps on the first rank that has the collective, and the ranks' extremes."""
    yield (
        "| part | phase | group | operation | dtype | count | bytes each | time, ms | of ranks, ms | skew, ms "
        "| algbw, GB/s | busbw, GB/s | exposed, ms | hidden |"
    )
    yield "|---|---|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|"
    for row in rows:
        of_ranks = {
            rank: {name: statistics.median(values) for name, values in sums.items()}
            for rank, sums in row["of_ranks"].items()
        }
        first = next(iter(of_ranks))
        mine, times = of_ranks[first], [one["seconds"] for one in of_ranks.values()]
        sums = row["of_ranks"][first]
        part = row["part"] if first == "0" else f"{row['part']} (rank {first})"
        launched = [name for name in dict.fromkeys(row["launched"]) if name != f"{row['part']} {row['phase']}".strip()]
        phase = row["phase"] or ", ".join(f"in {name}" for name in launched)
        yield (
            f"| {part} | {phase} | {row['group']} ({row['ranks']}) | {row['operation']} | {row['dtype']} "
            f"| {row['count']} | {row['bytes']} | {_ms(mine['seconds'])} | {_ms(min(times))} to {_ms(max(times))} "
            f"| {_ms(mine['skew'])} | {_gb(row['algbw'])} | {_gb(row['busbw'])} | {_ms(mine['exposed'])} "
            f"| {_hidden(sums['seconds'], sums['exposed'])} |"
        )


def group_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield markdown: rank 0's collectives by group and operation, over the whole step."""
    sums: dict[tuple[str, int, str], dict[str, Any]] = {}
    for row in rows:
        if (mine := row["of_ranks"].get("0")) is None:  # on other ranks alone
            continue
        none = {"count": 0, "bytes": 0} | {name: [0.0] * len(values) for name, values in mine.items()}
        total = sums.setdefault((row["group"], row["ranks"], row["operation"]), none)
        total["count"] += row["count"]
        total["bytes"] += row["count"] * row["bytes"]
        for name, values in mine.items():
            total[name] = [one + other for one, other in zip(total[name], values, strict=True)]
    yield "| group | operation | count | MB | time, ms | skew, ms | busbw, GB/s | exposed, ms | hidden |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for (group, size, operation), total in sums.items():
        seconds, skew, exposed = (total[name] for name in ("seconds", "skew", "exposed"))
        transfer = statistics.median(one - other for one, other in zip(seconds, skew, strict=True))
        busbw = cost.bus_bandwidth(operation, total["bytes"], transfer, size) if transfer > 0 else 0.0
        yield (
            f"| {group} ({size}) | {operation} | {total['count']} | {total['bytes'] / 1e6:.3f} "
            f"| {_ms(statistics.median(seconds))} | {_ms(statistics.median(skew))} | {_gb(busbw)} "
            f"| {_ms(statistics.median(exposed))} | {_hidden(seconds, exposed)} |"
        )


def phase_rows(ranks: Ranks) -> list[dict[str, Any]]:
    """For each rank and phase, the seconds in each step, and the part of them that was waiting.

    A part that has no phase is a phase of its own.
    """
    rows = []
    for rank, steps in enumerate(ranks):
        found: dict[str, dict[str, list[float]]] = {}
        for number, step in enumerate(steps):
            for span in step.spans:
                sums = found.setdefault(
                    span.phase or span.part, {name: [0.0] * len(steps) for name in ("seconds", "exposed")}
                )
                sums["seconds"][number] += span.end - span.start
                sums["exposed"][number] += sum(
                    max(0.0, min(one.waited[1], span.end) - max(one.waited[0], span.start))
                    for one in step.events
                    if one.waited
                )
        rows += [{"rank": rank, "phase": phase} | sums for phase, sums in found.items()]
    return rows


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

    communicating: some collective runs. exposed: the caller waits for one. skew: the sum over the collectives.
    """
    return {
        "step": [[step.seconds for step in steps] for steps in ranks],
        "communicating": [[_union([(e.start, e.end) for e in step.events]) for step in steps] for steps in ranks],
        "exposed": [[_union([e.waited for e in step.events if e.waited]) for step in steps] for steps in ranks],
        "skew": [[sum(e.skew for e in step.events) for step in steps] for steps in ranks],
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


def _hidden(seconds: Sequence[float], exposed: Sequence[float]) -> str:
    """The share of all steps' seconds for which no caller waited."""
    return f"{1 - sum(exposed) / sum(seconds):.0%}" if sum(seconds) else "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.3g}"
