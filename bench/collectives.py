"""Measure every collective, by every transport, in place and out of place, on any group of a grid.

    mpiexec -n 2 python -m bench.collectives --max-bytes 64M --json results.json --plot results.png
    mpiexec -n 4 python -m bench.collectives --tensor-model-parallel-size 2 --group tensor --transports stream --overlap

Size, count, algorithm bandwidth and bus bandwidth are defined as in nccl-tests, with the size of the group. At each
size all transports alternate, in place and out of place (bench/timing/sampling.py). If the machine has several states,
each has its own rows (bench/timing/states.py). The ranks begin each call together: inside a node after MPI's barrier,
between nodes at an agreed time of their clocks (bench/timing/starting.py). A call's time is that of its slowest rank.
If several groups run at the same time, the slowest group is reported. The exit status is 1 if a result was wrong.

Transports: engine (the Communicator's operations), mpi4py (without the engine), shared (the engine on tensors of
Communicator.empty), stream (the engine on a stream, to the end of the wait), nccl and staged (the engine on a GPU; not
yet run), gloo and torch-nccl (torch.distributed, in a process beside each rank).
"""

from __future__ import annotations

import json
import math
import random
import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.collective_study.measuring import GroupSetup, measure_call
from bench.collective_study.memory import free_memory
from bench.collective_study.results import FORMAT
from bench.collective_study.shown_states import disturbed_lines, final_tables, of_shown_states
from bench.collective_study.tables import UNCONVERGED, table, write_csv, write_plot
from bench.command.files import add_files, check_writable
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import progress, run_on_ranks
from bench.command.values import listed, one_of, size_of
from bench.timing.clocks import Offset, synchronise
from bench.timing.sampling import Stopping
from bench.timing.starting import spans_nodes
from bench.timing.states import States
from bench.transports.in_process import LOCAL, Transport
from bench.transports.operations import DTYPES, OPERATIONS, REDOPS, REDUCING, CollectiveCall
from bench.transports.peer_process import PEERS, PeerTransport
from commengine import CollectiveError, Communicator, GridLayout, ProcessGrid, UsageError
from commengine.dtypes import reduction_error
from commengine.mpi import load_mpi
from commengine.rank_zero import on_rank_zero
from trainers.options import AT_LEAST_ONE, COUNT, OPEN_FRACTION, SECONDS, SEED, ValidRange, between

COMMAND = "bench.collectives"
GROUPS = ("world", "tensor", "data")
STARTS = ("auto", "barrier", "clock")
#: by default all buffers together take at most 1 / MEMORY_SHARE of the memory
MEMORY_SHARE = 8
#: the transports that every machine has
DEFAULT_TRANSPORTS = ("engine", "mpi4py", "shared", "stream")


@dataclass(frozen=True)
class Settings:
    """The settings of a run, as JSON types."""

    operations: list[str]
    transports: list[str]
    dtypes: list[str]
    redop: list[str]
    root: int
    sizes: list[int]
    variants: list[bool]
    tensor_model_parallel_size: int
    group: str
    stopping: dict[str, Any]
    overlap: bool
    start: str
    seed: int
    json: str | None
    csv: str | None
    plot: str | None
    output: str | None

    def series(self, ranks: int) -> Iterator[list[CollectiveCall]]:
        """Yield the calls of each operation, dtype and reduction: all sizes, ascending, without repetitions."""
        for operation in self.operations:
            for dtype in self.dtypes if operation != "barrier" else self.dtypes[:1]:
                for redop in self.redop if operation in REDUCING else ["none"]:
                    calls = [
                        CollectiveCall.of(operation, DTYPES[dtype], redop, self.root, ranks, size)
                        for size in self.sizes
                    ]
                    yield list({call.nbytes: call for call in calls}.values())


#: a smaller factor would make so many sizes that the first is not measured
STEP_FACTOR = ValidRange(lambda factor: 1.01 <= factor <= 10**6, "must be a number above 1, from 1.01 to 1000000")


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    transports = [*LOCAL, *PEERS]
    add("--operations", nargs="+", default=list(OPERATIONS), metavar="NAME",
        help=f"some of {', '.join(OPERATIONS)} (default: all)")  # fmt: skip
    add("--transports", nargs="+", default=list(DEFAULT_TRANSPORTS), metavar="NAME",
        help=f"some of {', '.join(transports)} (default: {', '.join(DEFAULT_TRANSPORTS)})")  # fmt: skip
    add(
        "--dtypes",
        nargs="+",
        default=["float32"],
        metavar="NAME",
        help=f"some of {', '.join(DTYPES)} (default: float32)",
    )
    add("--redop", nargs="+", default=["sum"], metavar="NAME", help=f"some of {', '.join(REDOPS)} (default: sum)")
    add(
        "--root",
        type=int,
        valid=between(0, 2**31),
        default=0,
        help="root of the rooted operations, a rank of the group (default: %(default)s)",
    )
    add("--min-bytes", default="1", metavar="SIZE",
        help="smallest size, rounded up to whole elements of every rank (default: %(default)s)")  # fmt: skip
    add(
        "--max-bytes",
        metavar="SIZE",
        help="largest size, such as 64M (default: all buffers together take an eighth of the memory)",
    )
    add("--step-factor", type=float, valid=STEP_FACTOR, default=2.0,
        help="factor from one size to the next (default: %(default)s)")  # fmt: skip
    add("--in-place", action=BooleanOptionalAction, default=True, help="also run in place, where an operation can")
    add("--out-of-place", action=BooleanOptionalAction, default=True,
        help="also run out of place; operations that have no other form always are")  # fmt: skip
    add("--tensor-model-parallel-size", type=int, valid=AT_LEAST_ONE, default=1,
        help="ranks of a tensor group; the data groups follow from it (default: %(default)s)")  # fmt: skip
    add("--group", default="world",
        help="world, tensor or data: all groups of this kind run at the same time (default: %(default)s)")  # fmt: skip
    add("--confidence", type=float, valid=OPEN_FRACTION, default=0.05,
        help="measure until the 95%% interval of the median is +-this share (default: %(default)s)")  # fmt: skip
    add("--time-limit", type=float, valid=SECONDS, default=0.5,
        help="seconds for one transport at one size and place, converged or not (default: %(default)s)")  # fmt: skip
    add("--warmup", type=int, valid=COUNT, default=5, help="calls before those that count (default: %(default)s)")
    add(
        "--overlap",
        action="store_true",
        help="for the transport stream: the share that is hidden behind as much compute",
    )
    add("--start", default="auto", metavar="HOW",
        help="start of a call: barrier, clock, or auto: clock between nodes (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, valid=SEED, default=0,
        help="seed of the order of the sizes, and of the transports within a round (default: %(default)s)")  # fmt: skip
    add_files(
        options,
        json="write every number, as bench.fit reads it",
        csv="write a line for each row of the tables",
        plot="draw time and bus bandwidth over the size: .png, .svg or .pdf",
    )
    return options


def settings(argv: Sequence[str] | None, world_size: int, memory: dict[str, int]) -> Settings:
    """The settings that the command line gives.

    memory: see `free_memory`. Raises ValueError that names the option at fault.
    """
    given = parser().parse_args(argv)
    operations = listed(given.operations, OPERATIONS, "--operations")
    transports = listed(given.transports, [*LOCAL, *PEERS], "--transports")
    dtypes = listed(given.dtypes, list(DTYPES), "--dtypes")
    redop = listed(given.redop, REDOPS, "--redop")
    one_of(given.start, STARTS, "--start")
    one_of(given.group, GROUPS, "--group")
    tensor = given.tensor_model_parallel_size
    try:
        layout = GridLayout(world_size, tensor)
    except CollectiveError as error:
        raise ValueError(f"--tensor-model-parallel-size {tensor}: {error}") from None
    ranks = {"world": world_size, "tensor": layout.tensor, "data": layout.data}[given.group]
    if not 0 <= given.root < ranks:
        raise ValueError(f"--root {given.root}: the group {given.group} has the ranks 0 to {ranks - 1}")
    for name in dtypes:
        for op in redop:
            if REDUCING & set(operations) and (problem := reduction_error(DTYPES[name], op)):
                raise ValueError(f"--redop {op} with --dtypes {name}: {problem}")
    variants = [in_place for in_place, wanted in ((False, given.out_of_place), (True, given.in_place)) if wanted]
    if not variants:
        raise ValueError("--no-in-place and --no-out-of-place leave nothing to measure")
    if given.overlap and "stream" not in transports:
        raise ValueError("--overlap measures the transport stream: add it to --transports")
    check_writable(output=given.output, json=given.json, csv=given.csv, plot=given.plot)
    return Settings(
        operations, transports, dtypes, redop, given.root, _sizes(given, transports, memory), variants, tensor,
        given.group, {"confidence": given.confidence, "seconds": given.time_limit, "warmup": given.warmup},
        given.overlap, given.start, given.seed, given.json, given.csv, given.plot, given.output,
    )  # fmt: skip


def _sizes(given: Any, transports: Sequence[str], memory: dict[str, int]) -> list[int]:
    """The sizes from --min-bytes to --max-bytes, in bytes, not yet rounded to elements."""
    buffers = 2 * len(transports)
    most = memory["available"] // buffers
    if "shared" in transports:
        most = min(most, memory["shared"] // 2)
    default = 1 << max(0, (most // MEMORY_SHARE).bit_length() - 1)
    least = size_of("--min-bytes", given.min_bytes)
    largest = default if given.max_bytes is None else size_of("--max-bytes", given.max_bytes)
    if not 1 <= least <= largest:
        raise ValueError(f"--min-bytes {least} and --max-bytes {largest}: must be at least 1, and must not fall")
    if largest > most:
        raise ValueError(
            f"--max-bytes {given.max_bytes}: {buffers} buffers of that size; at most {most} bytes each fit into "
            f"the memory that a rank has ({memory['available']} bytes, {memory['shared']} of them shared)"
        )
    if not 1 < given.step_factor < math.inf:
        raise ValueError(f"--step-factor {given.step_factor}: must be a number above 1")
    found, size = [], float(least)
    while size <= largest:
        found.append(round(size))
        size *= given.step_factor
    return found


def open_transports(
    place: GroupSetup, names: Sequence[str], capacity: int
) -> tuple[list[Transport], list[dict[str, str]]]:
    """Open the transports that work on every rank here, and say why the others do not. Collective."""
    opened, skipped = [], []
    for name in names:

        def make(name: str = name) -> Transport:
            return PeerTransport(name, place.group, capacity) if name in PEERS else LOCAL[name](place.group, capacity)

        try:
            opened.append(place.agreed(make))
        except CollectiveError as error:
            skipped.append({"transport": name, "reason": str(error)})
    return opened, skipped


def clock_summary(first: list[Offset], last: list[Offset], seconds: float) -> dict[str, Any]:
    """The clocks' entry of the JSON: seconds, by rank.

    drift: the largest change of an offset during the run, in seconds per second. drift_uncertainty: the part of the
    drift that the uncertainty of the offsets explains.
    """
    pairs = list(zip(first, last, strict=True))
    moved = max(abs(after.seconds - before.seconds) for before, after in pairs)
    unknown = max(after.uncertainty + before.uncertainty for before, after in pairs)
    return {
        "reference_rank": 0,
        "offsets": [one.seconds for one in last],
        "uncertainties": [one.uncertainty for one in last],
        "drift": moved / seconds,
        "drift_uncertainty": unknown / seconds,
    }


def measure(
    place: GroupSetup, chosen: Settings, transports: Sequence[Transport], show: Callable[[str], None], bar: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure everything. Returns all rows (on rank 0), and what was skipped and why. Collective over the world.

    A row's "state" is a number of ``place.states``, or None; `of_shown_states` makes the rows that results have.
    """
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for number, calls in enumerate(chosen.series(place.group.size)):
        random.Random(f"{chosen.seed} {number}").shuffle(calls)
        found = []
        for index, call in enumerate(calls):
            bar.set_description(f"{call.operation} {call.nbytes} B")
            came = measure_call(place, call, transports, chosen.variants, chosen.seed + index)
            found += came.rows
            skipped += came.skipped
            bar.update()
        found.sort(key=lambda row: (row["bytes"], row["transport"], row["in_place"]))
        if found:
            show(table(of_shown_states(found, place.states)))  # by the states that have been seen so far
        rows += found
    return rows, skipped


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Measure; rank 0 prints and writes. Returns 1 if a result was wrong. Collective over ``world``."""
    surroundings = environment(COMMAND, argv)  # before measuring: the load average is that of other programs
    memory = free_memory(world)
    chosen = Settings(**on_rank_zero(world, lambda: asdict(settings(argv, world.size, memory))))
    with ExitStack() as stack:
        grid = stack.enter_context(ProcessGrid(world, chosen.tensor_model_parallel_size))
        group = {"world": world, "tensor": grid.tensor, "data": grid.data}[chosen.group]
        by_clock = chosen.start == "clock" or (chosen.start == "auto" and spans_nodes(world.mpi))
        states = None if by_clock else States(world.mpi)
        place = GroupSetup(world, group, chosen.group, Stopping(**chosen.stopping), chosen.overlap, by_clock, states)
        calls = [call for series in chosen.series(group.size) for call in series]
        transports, unopened = open_transports(place, chosen.transports, max(call.nbytes for call in calls))
        for transport in transports:
            stack.push(partial(_close, transport))
        if not transports:
            reasons = "; ".join(f"{one['transport']} {one['reason']}" for one in unopened)
            raise UsageError(f"--transports: none of them works here: {reasons}")
        began, first = load_mpi().Wtime(), synchronise(world.mpi)
        bar = stack.enter_context(progress(world, len(calls)))
        tables: list[str] = []

        def show(text: str) -> None:
            tables.append(text)
            bar.write(f"{text}\n", file=sys.stdout)

        rows, skipped = measure(place, chosen, transports, show, bar)
        rows = of_shown_states(rows, states)
        tables = final_tables(rows, tables, show_again=lambda text: bar.write(f"{text}\n", file=sys.stdout))
        last = synchronise(world.mpi)
        clock = clock_summary(first, last, load_mpi().Wtime() - began)
    result = {"format": FORMAT, **surroundings, "ranks": world.size, "clock": clock, "rows": rows}
    result["skipped"] = [*unopened, *skipped]
    result["states"] = [] if states is None else states.lines()
    result["start"] = "clock" if by_clock else "barrier"
    wrong = int(world.mpi.bcast(sum(row["wrong"] for row in rows)))
    if world.rank == 0:
        conclude(result, chosen, tables)
    return 1 if wrong else 0


def _close(transport: Transport, failed: type[BaseException] | None, *_: object) -> None:
    """Close a transport unless the measurement failed: then the other ranks may not take part."""
    if failed is None:
        transport.close()


def conclude(result: dict[str, Any], chosen: Settings, tables: Sequence[str]) -> None:
    """Print the remarks on the tables, which are printed already, and write the files."""
    clock, rows = result["clock"], result["rows"]
    remarks = list(
        dict.fromkeys(
            f"# not measured: {one['transport']}{' ' + one['operation'] if 'operation' in one else ''}: {one['reason']}"
            for one in result["skipped"]
        )
    )
    remarks.append(
        f"# clocks: offsets to rank 0 of at most {max(map(abs, clock['offsets'])) * 1e6:.2f} us, known within "
        f"+-{max(clock['uncertainties']) * 1e6:.2f} us; "
        f"drift {clock['drift'] * 1e6:.2f} +-{clock['drift_uncertainty'] * 1e6:.2f} us/s"
    )
    remarks += [f"# {line.removeprefix('- ')}" for line in [*result["states"], *disturbed_lines(rows)]]
    if late := sum(row["late"] for row in rows):
        remarks.append(f"# {late} calls are not counted, because a rank began late")
    if slow := sum(not row["converged"] for row in rows):
        remarks.append(f"# *: {slow} of {len(rows)} rows ran into --time-limit before {UNCONVERGED}")
    remarks.append(f"# {sum(row['wrong'] for row in rows)} wrong elements")
    print("\n".join(remarks))
    if chosen.output:
        lines = [*heading("Collectives", result), "", "```", "\n\n".join(tables), "", *remarks, "```", ""]
        Path(chosen.output).write_text("\n".join(lines), encoding="utf-8")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    if chosen.csv:
        write_csv(Path(chosen.csv), rows)
    if chosen.plot:
        write_plot(Path(chosen.plot), rows)


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
