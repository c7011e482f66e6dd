"""Measure a large collective of host tensors inside a node: by the engine, by MPI itself and by gloo.

    mpiexec -n 2 python -m bench.all_reduce --output all_reduce.md --plot all_reduce.png --json all_reduce.json
    mpiexec -n 2 python -m bench.all_reduce --operation reduce_scatter --output reduce_scatter.md

The operations are all_reduce, reduce_scatter, all_gather and broadcast: those that have ways through a node's memory.
The transports alternate in one run: in each round every transport has one turn, in random order, and ratios compare two
times of one round. A turn is one call that is not counted, because the other transports have used the caches, and then
as many calls as --turn-seconds allows. The time of a turn is the median of its calls. The ranks begin each call
together after a barrier, and a call takes as long as on its slowest rank. A sum is in place where the operation can be,
and every element of every transport's result is checked.

A machine may have several states, in which its memory is faster or slower as a whole (bench/timing/states.py). Each
turn is counted for its state, a ratio compares two turns of one state, and each state has its own tables.

MPI has no bfloat16. Two transports stand for its sums: MPICH's extension MPIX_BFLOAT16, which rounds at every step, and
the collective in fp32 between two copies, which rounds once, as the engine does.

The bound of an all-reduce is the bandwidth of memory. In an all-reduce of n bytes among p ranks at least p n bytes are
read, the operand of every rank, and p n bytes are written, the result of every rank. The bound is therefore the time in
which the same ranks, all at once, read and write as many bytes in place: each rank passes once over n bytes of its own
window, x <- 1 x (STREAM's scale with one array, because a second array would cost another read). It alternates with
the transports, so at each size it is the bandwidth of the caches or the memory that hold so many bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.collective_study.memory import free_memory
from bench.collective_study.ratios import OURS, markdown, ratio_plot
from bench.collective_study.results import FORMAT
from bench.collective_study.tables import Row
from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment
from bench.command.parser import CommandParser, new_parser
from bench.command.start import progress, run_on_ranks
from bench.command.values import listed, size_of
from bench.timing.sampling import Times, median_interval
from bench.timing.states import States, name_states
from bench.transports.all_reduce_only import open_transports
from bench.transports.in_process import Bound, Transport
from bench.transports.operations import DTYPES, IN_PLACE, CollectiveCall
from commengine import Communicator, UsageError
from commengine.mpi import load_mpi
from commengine.operations import IN_MEMORY
from commengine.rank_zero import on_rank_zero
from trainers.options import COUNT, SECONDS, SEED

COMMAND = "bench.all_reduce"
MEASURED_DTYPES = ("float32", "bfloat16")
MOST_CALLS = 200  # of a turn


@dataclass
class Cell:
    """One transport at one size.

    turns: by round, the seconds of the turn's calls on the slowest rank. states: of the turns; None: it is not shown.
    """

    calls: int = 1
    wrong: int = 0
    turns: list[Times] = field(default_factory=list)
    states: list[int | None] = field(default_factory=list)

    def medians(self, state: int) -> dict[int, float]:
        """By round, the medians of the turns of a state."""
        pairs = enumerate(zip(self.turns, self.states, strict=True))
        return {number: float(np.median(turn)) for number, (turn, mine) in pairs if mine == state}


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
    states: States,
    chosen: dict[str, Any],
    seed: int,
) -> dict[str, Cell]:
    """Measure every transport that can run ``call``. Returns a cell for each, by name. Collective."""
    in_place = call.operation in IN_PLACE
    bounds = {one.name: one.bind(call, in_place) for one in transports if one.refuses(call, in_place) is None}
    cells = {name: Cell() for name in bounds}
    for name, cell in cells.items():
        first = float(np.median(slowest(group, bounds[name], 2)))
        cell.calls = max(1, min(MOST_CALLS, int(chosen["turn_seconds"] / first)))
    order = random.Random(seed)  # the same on every rank
    for _ in range(chosen["rounds"]):
        for name in order.sample(list(cells), len(cells)):
            cell = cells[name]
            spent, state = states.turn(partial(slowest, group, bounds[name], cell.calls))
            cell.turns.append(spent)
            cell.states.append(state)
    for name, cell in cells.items():
        bounds[name].reset()
        group.mpi.Barrier()
        bounds[name].run(1)
        cell.wrong = int(group.mpi.allreduce(bounds[name].wrong(), load_mpi().SUM))
    return cells


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def rows_of(call: CollectiveCall, cells: dict[str, Cell], state: int, name_of_state: str | None) -> list[Row]:
    """The rows of one call in one state, with the keys that bench.collectives writes, and two more.

    turns: [low, median, high] in seconds. speedup: [low, median, high] of the transport's time over the time in the
    window, of the same round.
    """
    rows = []
    for name, cell in cells.items():
        medians = cell.medians(state)
        if not medians:
            continue
        seconds = np.concatenate([cell.turns[number] for number in medians])
        p50, p95, p99 = np.quantile(seconds, (0.5, 0.95, 0.99)).tolist()
        row = {
            "operation": call.operation, "transport": name, "group": "world", "ranks": call.ranks,
            "dtype": str(call.dtype).removeprefix("torch."), "redop": call.redop, "root": call.root,
            "in_place": call.operation in IN_PLACE, "state": name_of_state,
            "bytes": call.nbytes, "count": call.count, "iterations": len(seconds), "wrong": cell.wrong,
            "seconds": {"p50": p50, "p95": p95, "p99": p99, "min": float(seconds.min()), "max": float(seconds.max()),
                        "mean": float(seconds.mean())},
            "ci": list(median_interval(seconds)), "turns": quartiles(list(medians.values())),
            "algbw": call.nbytes / p50, "busbw": call.nbytes / p50 * call.bus_factor,
        }  # fmt: skip
        ours = cells[OURS].medians(state) if OURS in cells else {}
        if ratios := [medians[number] / ours[number] for number in medians if number in ours]:
            row["speedup"] = quartiles(ratios)
        rows.append(row)
    return rows


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add(
        "--operation",
        choices=IN_MEMORY,
        default="all_reduce",
        help="the collective: all_reduce, reduce_scatter, all_gather or broadcast (default: %(default)s)",
    )
    add("--min-bytes", default="1", metavar="SIZE", help="smallest size (default: %(default)s)")
    add("--max-bytes", default="64M", metavar="SIZE", help="largest size (default: %(default)s)")
    add(
        "--dtypes",
        nargs="+",
        default=["float32", "bfloat16"],
        metavar="NAME",
        help=f"some of {', '.join(MEASURED_DTYPES)} (default: both)",
    )
    add("--rounds", type=int, valid=COUNT, default=11, help="rounds at each size (default: %(default)s)")
    add(
        "--turn-seconds",
        type=float,
        valid=SECONDS,
        default=0.005,
        help="about the time of a transport in a round (default: %(default)s)",
    )
    add("--seed", type=int, valid=SEED, default=0, help="seed of the order within a round (default: %(default)s)")
    add_files(
        options,
        json="write every number, as bench.fit reads it",
        plot="draw how many times as fast as MPI the engine and gloo are, over the size: .png, .svg or .pdf",
    )
    return options


def parse(argv: Sequence[str] | None, memory: dict[str, int]) -> dict[str, Any]:
    """The settings that the command line gives. memory: see `free_memory`.

    Raises ValueError that names the option at fault.
    """
    given = parser().parse_args(argv)
    low, high = size_of("--min-bytes", given.min_bytes), size_of("--max-bytes", given.max_bytes)
    if not 1 <= low <= high:
        raise ValueError(f"--min-bytes {low} and --max-bytes {high}: must be at least 1, and must not fall")
    if 20 * high > memory["available"] or 4 * high > memory["shared"]:
        raise ValueError(
            f"--max-bytes {given.max_bytes}: 20 buffers of that size a rank, four of them in shared memory, do not "
            f"fit into what a rank has: {memory['available']} bytes, {memory['shared']} of them shared"
        )
    check_writable(output=given.output, json=given.json, plot=given.plot)
    chosen = [low << shift for shift in range((high // low).bit_length())]
    return {**vars(given), "dtypes": listed(given.dtypes, MEASURED_DTYPES, "--dtypes"), "sizes": chosen}


def calls_of(chosen: dict[str, Any], ranks: int) -> list[CollectiveCall]:
    """The calls of every dtype and size, without repetitions."""
    calls = (
        CollectiveCall.of(chosen["operation"], DTYPES[dtype], "sum", 0, ranks, size)
        for dtype in chosen["dtypes"]
        for size in chosen["sizes"]
    )
    return list({(call.dtype, call.nbytes): call for call in calls}.values())


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Measure; rank 0 prints and writes. Returns 1 if a result was wrong. Collective over ``world``."""
    result = environment(COMMAND)  # before measuring: the load average is that of other programs
    memory = free_memory(world)
    chosen = on_rank_zero(world, lambda: parse(argv, memory))
    if world.size == 1:
        raise UsageError("an all-reduce needs two ranks or more: start it with mpiexec -n 2")
    calls = calls_of(chosen, world.size)
    transports, missing = open_transports(world, max(call.nbytes for call in calls))
    states = States(world.mpi)
    found = []
    with progress(world, len(calls)) as bar:
        for number, call in enumerate(calls):
            found.append((call, measure(world, call, transports, states, chosen, chosen["seed"] + number)))
            bar.update()
    for transport in transports:
        transport.close()
    for _, cells in found:
        for cell in cells.values():
            cell.states = states.assigned([number or 0 for number in cell.states])
    shown = states.shown()
    names = name_states(shown) if len(shown) > 1 else {}
    rows = [row for state in shown for call, cells in found for row in rows_of(call, cells, state, names.get(state))]
    result |= {"format": FORMAT, "operation": chosen["operation"], "ranks": world.size, "rounds": chosen["rounds"]}
    result |= {"turn_seconds": chosen["turn_seconds"], "missing": missing, "states": states.lines(), "rows": rows}

    def conclude() -> None:
        publish(markdown(result), result, output=chosen["output"], json_file=chosen["json"])
        if chosen["plot"]:
            ratio_plot(Path(chosen["plot"]), rows)

    on_rank_zero(world, conclude)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
