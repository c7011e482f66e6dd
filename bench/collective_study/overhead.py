"""The time that the engine adds to MPI: all_reduce of a Communicator beside mpi4py's own Allreduce.

    mpiexec -n 2 python -m bench.collectives --only overhead --output bench/results/overhead.md

The two use the same buffer and alternate within a round, in random order. A call is in place, fp32, sum. A cell is the
median over the rounds of the mean time of a call. "Added" is the median over the rounds of the engine's time minus
mpi4py's, with its quartiles. "In window" is the same for the engine on a tensor of `Communicator.empty`, at the sizes
at which such tensors also go by MPI.

The time of a long all-reduce varies by far more than the engine could add to it. "Alone" therefore measures the
addition on a group of one rank, where MPI has nothing to do, after a pass over as many bytes: the caches are then as
cold as after a real all-reduce of this size. In a group on one node, large all-reduces do not go by MPI at all: see
``--only switch-points``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.command.files import Kept, add_files, publish, write_unfinished
from bench.command.machine import environment, heading
from bench.command.parser import new_parser
from bench.timing.sampling import mean_seconds
from bench.timing.turns import Spread, take_turns
from commengine import Communicator, UsageError
from commengine.host.switch_points import SwitchPoints
from commengine.options.parser import OneLineParser
from commengine.options.ranges import SECONDS, between
from commengine.rank_zero import on_rank_zero

COMMAND = "bench.collectives --only overhead"
WINDOW = "commengine in window"
SIZES = (*(8 << shift for shift in range(0, 12, 2)), 16 << 10, *(8 << shift for shift in range(12, 24, 2)), 64 << 20)


def alone(tensor: torch.Tensor, rounds: int) -> list[float]:
    """Microseconds that the engine adds to each of ``rounds`` calls on this rank alone, with cold caches."""
    from mpi4py import MPI

    swept = torch.zeros_like(tensor)

    def turn(call: Callable[[], object]) -> float:
        swept.add_(tensor)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    with Communicator(MPI.COMM_SELF, device="cpu") as single:
        calls = ways_of(single, tensor)
        return added(take_turns({name: partial(turn, call) for name, call in calls.items()}, rounds))


def added(seconds: dict[str, list[float]], way: str = "commengine") -> list[float]:
    """The microseconds by which a way took longer than mpi4py, in each round."""
    return [1e6 * (ours - theirs) for ours, theirs in zip(seconds[way], seconds["mpi4py"], strict=True)]


def ways_of(world: Communicator, tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The same all-reduce by the engine and by mpi4py. Returns the calls by name."""
    from mpi4py import MPI

    buffer = [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.FLOAT]
    return {
        "commengine": lambda: world.all_reduce(tensor),
        "mpi4py": lambda: world.mpi.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM),
    }


def measure(
    world: Communicator, windows: Communicator, size: int, rounds: int, seconds: float, least: float
) -> dict[str, float]:
    """Measure one row: medians over ``rounds`` of the engine, of mpi4py and of the addition, in us.

    windows: a communicator of the same ranks for tensors in windows. It is another one, because a communicator that
    has windows checks for large private tensors where they lie. least: the size in bytes from which a tensor in a
    window does not go by MPI. Collective.
    """
    tensor = torch.zeros(size // 4)
    window = windows.empty((size // 4,)).zero_() if size < least else None
    calls = ways_of(world, tensor)
    if window is not None:
        calls = {WINDOW: partial(windows.all_reduce, window), **calls}
    first = max(mean_seconds(call, 3, world) for call in calls.values())
    count = max(1, min(5000, int(seconds / first)))
    if count < 100:  # the times of long calls vary from one to the next: alternate single calls
        count, rounds = 1, max(rounds, 101)
    turns = {name: partial(mean_seconds, call, count, world) for name, call in calls.items()}
    times = take_turns(turns, rounds, seed=size)  # the same order on every rank
    row = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    row |= {"bytes": size, "rounds": rounds, "calls": count}
    spreads = {"added": added(times), "alone": alone(tensor, max(101, rounds))}
    if window is not None:
        spreads["added_window"] = added(times, WINDOW)
    for name, values in spreads.items():
        spread = Spread.of(values)
        row |= {name: spread.median, f"{name}_low": spread.low, f"{name}_high": spread.high}
    return row


def markdown(result: dict[str, object], rows: list[dict[str, float]]) -> str:
    """The table in markdown."""
    lines = [
        *heading("What the engine adds to an all-reduce", result),
        f"- {result['ranks']} ranks, alternating in random order; microseconds a call",
        "",
        "| bytes | rounds x calls | commengine | mpi4py | ratio | added: median [quartiles] | in window | alone |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        ratio = row["commengine"] / row["mpi4py"]
        added, window, alone = (
            f"{row[name]:+.2f} [{row[f'{name}_low']:+.2f} to {row[f'{name}_high']:+.2f}]" if name in row else ""
            for name in ("added", "added_window", "alone")
        )
        lines.append(
            f"| {row['bytes']:,.0f} | {row['rounds']:.0f} x {row['calls']:.0f} | {row['commengine']:.2f} "
            f"| {row['mpi4py']:.2f} | {ratio:.3f} | {added} | {window} | {alone} |"
        )
    return "\n".join([*lines, ""])


def parser() -> OneLineParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--rounds", type=int, valid=between(2, 10**6), default=15, help="rounds at each size")
    add("--seconds", type=float, valid=SECONDS, default=0.05, help="about the time of each measurement")
    add_files(options)
    return options


def main(world: Communicator, argv: Sequence[str]) -> None:
    """Measure; rank 0 prints and writes. Collective over ``world``."""
    result: dict[str, Any] = environment(COMMAND, argv) | {"ranks": world.size}
    chosen = on_rank_zero(world, lambda: vars(parser().parse_args(argv)))
    if world.size == 1:
        raise UsageError("an all-reduce needs two ranks or more: start it with mpiexec -n 2")
    least = SwitchPoints.load().least
    rows: list[dict[str, float]] = []
    kept = Kept(lambda: write_unfinished(chosen["json"], result | {"rows": rows}))
    with Communicator(world.mpi, device="cpu") as windows:
        for size in SIZES:
            rows.append(measure(world, windows, size, chosen["rounds"], chosen["seconds"], least))
            on_rank_zero(world, kept)
    text = markdown(result, rows)
    files = {"output": chosen["output"], "json_file": chosen["json"]}
    on_rank_zero(world, lambda: publish(text, result | {"rows": rows}, **files))
