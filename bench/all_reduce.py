"""Measure all-reduces of host tensors inside a node: by the engine, by MPI's own Allreduce and by gloo.

    mpiexec -n 2 python -m bench.all_reduce --output all_reduce.md --plot all_reduce.png --json all_reduce.json

The transports alternate in one run: in each round every transport has one turn, in random order, and ratios compare
two times of one round. A turn is one call that is not counted, because the other transports have used the caches, and
then as many calls as --turn-seconds allows. The time of a turn is the median of its calls. The ranks begin each call
together after a barrier, and a call takes as long as on its slowest rank. The operation is a sum in place, and every
element of every transport's result is checked.

MPI has no bfloat16. Two transports stand for it: MPICH's extension MPIX_BFLOAT16, which rounds at every step, and
Allreduce in fp32 between two copies, which rounds once, as the engine does.

The bound is the bandwidth of memory. In an all-reduce of n bytes among p ranks at least p n bytes are read, the
operand of every rank, and p n bytes are written, the result of every rank. The bound is therefore the time in which
the same ranks, all at once, read and write as many bytes in place: each rank passes once over n bytes of its own
window, x <- 1 x (STREAM's scale with one array, because a second array would cost another read). It alternates with
the transports, so at each size it is the bandwidth of the caches or the memory that hold so many bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.collective_study.memory import free_memory
from bench.collective_study.results import FORMAT
from bench.collective_study.tables import bandwidth_plot
from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import progress, run_on_ranks
from bench.command.values import listed, size_of
from bench.timing.sampling import Times, median_interval
from bench.transports.all_reduce_only import Memory, open_transports
from bench.transports.in_process import Bound, Shared, Transport
from bench.transports.operations import DTYPES, CollectiveCall
from commengine import Communicator, UsageError
from commengine.mpi import load_mpi
from commengine.rank_zero import on_rank_zero
from trainers.options import COUNT, SECONDS, SEED

COMMAND = "bench.all_reduce"
SUMMED = ("float32", "bfloat16")
MOST_CALLS = 200  # of a turn
OURS, BOUND = Shared.name, Memory.name
#: (baseline, least speed-up of `shared` over it, from bytes, to bytes) in float32 with two ranks
GOALS = (
    ("mpi4py", 3.0, 4 << 20, 64 << 20),
    ("gloo", 8.0, 4 << 20, 16 << 20),
    ("gloo", 6.0, 64 << 20, 64 << 20),
)
TITLES = {
    "shared": "in window", "engine": "engine, private tensor", "mpi4py": "mpi4py's Allreduce", "gloo": "gloo",
    "mpix-bfloat16": "Allreduce of MPIX_BFLOAT16", "in-fp32": "Allreduce in fp32", "memory": "memory bound",
}  # fmt: skip


# ---- measuring


@dataclass
class Cell:
    """One transport at one size. seconds: of all calls, on the slowest rank. turns: the median of each turn."""

    bound: Bound
    calls: int = 1
    wrong: int = 0
    turns: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def slowest(group: Communicator, bound: Bound, count: int) -> Times:
    """The slowest rank's time of each of ``count`` calls, after one call that is not counted. Collective."""
    group.mpi.Barrier()
    mine = bound.run(1 + count)[1][1:]
    result = np.empty_like(mine)
    group.mpi.Allreduce(mine, result, load_mpi().MAX)
    return result


def measure(
    group: Communicator,
    call: CollectiveCall,
    transports: Sequence[Transport],
    rounds: int,
    turn_seconds: float,
    seed: int,
) -> dict[str, Cell]:
    """Measure every transport that can run ``call``. Returns a cell for each, by name. Collective."""
    cells = {
        one.name: Cell(one.bind(call, in_place=True)) for one in transports if one.refuses(call, in_place=True) is None
    }
    for cell in cells.values():
        first = float(np.median(slowest(group, cell.bound, 2)))
        cell.calls = max(1, min(MOST_CALLS, int(turn_seconds / first)))
    order = random.Random(seed)  # the same on every rank
    for _ in range(rounds):
        for name in order.sample(list(cells), len(cells)):
            cell = cells[name]
            spent = slowest(group, cell.bound, cell.calls)
            cell.turns.append(float(np.median(spent)))
            cell.seconds += spent.tolist()
    for cell in cells.values():
        cell.bound.reset()
        group.mpi.Barrier()
        cell.bound.run(1)
        cell.wrong = int(group.mpi.allreduce(cell.bound.wrong(), load_mpi().SUM))
    return cells


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def rows_of(call: CollectiveCall, cells: dict[str, Cell]) -> list[dict[str, Any]]:
    """The rows of one call, with the keys that bench.collectives writes, and two more.

    turns: [low, median, high] in seconds. speedup: [low, median, high] of the transport's time over the time in the
    window, of the same round.
    """
    rows = []
    for name, cell in cells.items():
        seconds = np.array(cell.seconds)
        p50, p95, p99 = np.quantile(seconds, (0.5, 0.95, 0.99)).tolist()
        row = {
            "operation": "all_reduce", "transport": name, "group": "world", "ranks": call.ranks,
            "dtype": str(call.dtype).removeprefix("torch."), "redop": call.redop, "root": -1, "in_place": True,
            "bytes": call.nbytes, "count": call.count, "iterations": len(seconds), "wrong": cell.wrong,
            "seconds": {"p50": p50, "p95": p95, "p99": p99, "min": float(seconds.min()), "max": float(seconds.max()),
                        "mean": float(seconds.mean())},
            "ci": list(median_interval(seconds)), "turns": quartiles(cell.turns),
            "algbw": call.nbytes / p50, "busbw": call.nbytes / p50 * call.bus_factor,
        }  # fmt: skip
        if OURS in cells:
            pairs = zip(cell.turns, cells[OURS].turns, strict=True)
            row["speedup"] = quartiles([theirs / ours for theirs, ours in pairs])
        rows.append(row)
    return rows


# ---- reporting


def _size(nbytes: int) -> str:
    for unit, power in (("MB", 20), ("KB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):g} {unit}"
    return f"{nbytes} B"


def _spread(values: Sequence[float], scale: float = 1.0) -> str:
    low, middle, high = (_three(scale * value) for value in values)
    return f"{middle} [{low} to {high}]"


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def goals(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The goals for two ranks, each with the least speed-up that was reached."""
    for baseline, least, low, high in GOALS:
        found = [
            row["speedup"][1]
            for row in rows
            if row["transport"] == baseline and row["dtype"] == "float32" and low <= row["bytes"] <= high
        ]
        if found:
            where = _size(low) if low == high else f"{_size(low)} to {_size(high)}"
            reached = "reached" if min(found) >= least else "NOT reached"
            yield f"- goal: {least:g} times as fast as {baseline}, fp32, {where}: {reached}, at least {min(found):.2f}"


def markdown(result: dict[str, Any]) -> str:
    """The tables in markdown."""
    rows, ranks = result["rows"], result["ranks"]
    lines = [
        *heading(f"Host all-reduce, {ranks} ranks", result),
        f"- in place, sum; {result['rounds']} rounds in random order, turns of {1e3 * result['turn_seconds']:g} ms: "
        "median [quartiles] over the rounds; MB are 2^20 bytes",
        "- memory bound: the time in which all ranks at once read and write their own n bytes once, in place: "
        f"2 x {ranks} n bytes",
        f"- wrong elements: {sum(row['wrong'] for row in rows)}",
    ]
    if ranks == 2:
        lines += goals(rows)
    lines += [f"- not measured: {reason}" for reason in result["missing"]]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = [row for row in rows if row["dtype"] == dtype]
        names = list(dict.fromkeys(row["transport"] for row in mine))
        titles = [TITLES.get(name, name) for name in names]
        at = {(row["bytes"], row["transport"]): row for row in mine}
        sizes = sorted({row["bytes"] for row in mine})
        lines += [
            "",
            f"{dtype}, microseconds:",
            "",
            f"| size | {' | '.join(titles)} |",
            "|---:|" + "---:|" * len(names),
        ]
        for size in sizes:
            lines.append(f"| {_size(size)} | {' | '.join(_spread(at[size, name]['turns'], 1e6) for name in names)} |")
        if OURS not in names:
            continue
        lines += [
            "", f"{dtype}, time over that in the window; of the bound, the share that is reached:",
            "", f"| size | {' | '.join(titles[1:])} | GB/s, all ranks in the window | GB/s, bound |",
            "|---:|" + "---:|" * (len(names) + 1),
        ]  # fmt: skip
        for size in sizes:
            speedups = [_spread(at[size, name]["speedup"]) for name in names if name != OURS]
            rates = [_three(2e-9 * ranks * size / at[size, name]["turns"][1]) for name in (OURS, BOUND)]
            lines.append(f"| {_size(size)} | {' | '.join([*speedups, *rates])} |")
    return "\n".join([*lines, ""])


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--min-bytes", default="1K", metavar="SIZE", help="smallest size (default: %(default)s)")
    add("--max-bytes", default="64M", metavar="SIZE", help="largest size (default: %(default)s)")
    add(
        "--dtypes",
        nargs="+",
        default=["float32", "bfloat16"],
        metavar="NAME",
        help=f"some of {', '.join(SUMMED)} (default: both)",
    )
    add("--rounds", type=int, valid=COUNT, default=21, help="rounds at each size (default: %(default)s)")
    add(
        "--turn-seconds",
        type=float,
        valid=SECONDS,
        default=0.02,
        help="about the time of a transport in a round (default: %(default)s)",
    )
    add("--seed", type=int, valid=SEED, default=0, help="seed of the order within a round (default: %(default)s)")
    add_files(
        options,
        json="write every number, as bench.fit reads it",
        plot="draw the bus bandwidth over the size for the first dtype: .png, .svg or .pdf",
    )
    return options


def parse(argv: Sequence[str] | None, memory: dict[str, int]) -> dict[str, Any]:
    """The settings that the command line gives. memory: see `free_memory`.

    Raises ValueError that names the option at fault.
    """
    given = parser().parse_args(argv)
    low, high = size_of("--min-bytes", given.min_bytes), size_of("--max-bytes", given.max_bytes)
    if not 4 <= low <= high:
        raise ValueError(f"--min-bytes {low} and --max-bytes {high}: must be at least 4, and must not fall")
    if 10 * high > memory["available"] or 4 * high > memory["shared"]:
        raise ValueError(
            f"--max-bytes {given.max_bytes}: ten buffers of that size a rank, four of them in shared memory, do not "
            f"fit into what a rank has: {memory['available']} bytes, {memory['shared']} of them shared"
        )
    check_writable(output=given.output, json=given.json, plot=given.plot)
    low = -(-low // 8) * 8  # whole elements of every dtype and of the pass over memory
    chosen = [low << shift for shift in range((high // low).bit_length())]
    return {**vars(given), "dtypes": listed(given.dtypes, SUMMED, "--dtypes"), "sizes": chosen}


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Measure; rank 0 prints and writes. Returns 1 if a result was wrong. Collective over ``world``."""
    result = environment(COMMAND)  # before measuring: the load average is that of other programs
    memory = free_memory(world)
    chosen = on_rank_zero(world, lambda: parse(argv, memory))
    if world.size == 1:
        raise UsageError("an all-reduce needs two ranks or more: start it with mpiexec -n 2")
    calls = [
        CollectiveCall.of("all_reduce", DTYPES[dtype], "sum", 0, world.size, size)
        for dtype in chosen["dtypes"]
        for size in chosen["sizes"]
    ]
    transports, missing = open_transports(world, max(call.nbytes for call in calls))
    rows = []
    with progress(world, len(calls)) as bar:
        for number, call in enumerate(calls):
            cells = measure(world, call, transports, chosen["rounds"], chosen["turn_seconds"], chosen["seed"] + number)
            rows += rows_of(call, cells)
            bar.update()
    del cells  # a window is not freed while a tensor lies in it
    for transport in transports:
        transport.close()
    result |= {"format": FORMAT, "ranks": world.size, "rounds": chosen["rounds"], "missing": missing, "rows": rows}
    result["turn_seconds"] = chosen["turn_seconds"]

    def conclude() -> None:
        publish(markdown(result), result, output=chosen["output"], json_file=chosen["json"])
        if chosen["plot"]:
            drawn = [row for row in rows if row["dtype"] == chosen["dtypes"][0]]
            bandwidth_plot(Path(chosen["plot"]), drawn, TITLES)

    on_rank_zero(world, conclude)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
