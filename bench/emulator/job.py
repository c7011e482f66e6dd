"""What the ranks of an emulated cluster do: measure it, or train on it.

    mpiexec -n RANKS python -m bench.emulator.job TASK.json

bench.emulator starts it and writes the task: {"machine": ...} and the results that it wants, each with its file:
{"measure": FILE, "tensor": [sizes of tensor groups]}, or {"train": {name of a layout: FILE}}.

It measures what a user measures on a cluster before predicting for it: its collectives, its kernels, and a step without
groups. Nothing of that reads the drawn machine. The times of collectives are rows as bench.collectives writes them, so
bench.study --only fit fits them.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import statistics
import sys
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.clusters.device_rates import measure_rates
from bench.collective_study.measurement import FEWEST
from bench.command.files import replace_json
from bench.emulator.layouts import RUNS, settings
from bench.emulator.machine import EmulatedMachine
from bench.emulator.rank import EmulatedRank, emulated
from bench.emulator.step import cluster, run_steps
from commengine import Communicator, ProcessGrid, launch
from commengine.mpi import load_mpi
from trainers.settings.commands import GPTSettings

WARMUP, STEPS = 1, 3
#: what training steps call most, and sizes in bytes
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = [1 << shift for shift in range(10, 30, 2)]
ROUNDS = FEWEST  # calls: the median of fewer has no interval, and counts in no fit


def main(world: Communicator) -> None:
    """Do the task."""
    torch.set_num_threads(1)
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    machine = EmulatedMachine.load(Path(task["machine"]))
    if "measure" in task:
        with cluster(world, machine, seed=1) as rank:
            found = everything(world, rank, task["tensor"], settings())
        _write(world, Path(task["measure"]), found)
    for run in itertools.chain(*RUNS.values()):
        if run.name in task.get("train", {}):
            with cluster(world, machine, seed=2) as rank:
                steps = run_steps(world, rank, run.config(), WARMUP, STEPS)
            found = {
                "seconds": statistics.median(step.seconds for step in steps),
                "steps": [asdict(one) for one in steps],
            }
            _write(world, Path(task["train"][run.name]), found)


def _write(world: Communicator, path: Path, found: dict[str, Any]) -> None:
    if world.rank == 0:
        replace_json(path, found | {"date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")})


def everything(world: Communicator, rank: EmulatedRank, tensors: Sequence[int], step: GPTSettings) -> dict[str, Any]:
    """All that a prediction needs, as JSON types. Collective over ``world``.

    tensors: sizes of tensor groups. step: of a run without groups, which every rank runs for itself.
    """
    with rank.device:
        mine = measure_rates(partial(kernel_seconds, rank))
    with Communicator(load_mpi().COMM_SELF, device="cpu") as alone:
        seconds = statistics.median(one.seconds for one in run_steps(alone, rank, step, WARMUP, STEPS))
    every = world.mpi.allgather(asdict(mine))
    slowest = min(range(world.size), key=lambda one: (every[one]["products"], one))
    return {
        "ranks": world.size,
        "rates": every[slowest],
        "step": max(world.mpi.allgather(seconds)),
        "collectives": {str(tensor): collectives(world, rank, tensor) for tensor in tensors},
    }


def collectives(world: Communicator, rank: EmulatedRank, tensor: int) -> list[dict[str, Any]]:
    """The rows of the tensor groups of ``tensor`` ranks and of their data groups. Collective over ``world``.

    All groups of a kind run at once, as in a step. A time is that of the slowest rank of all groups.
    """
    rows = []
    with ProcessGrid(world, tensor) as grid:
        for name, group in (("tensor", grid.tensor), ("data", grid.data)):
            if group.size == 1:
                continue
            with emulated(rank, group):
                found = []
                for operation, size in itertools.product(OPERATIONS, SIZES):
                    run = _call(group, operation, size)
                    found.append((operation, size, [_timed(world, rank, run) for _ in range(ROUNDS)]))
            rows += [_row(world, name, group.size, *one) for one in found]
    return rows


def kernel_seconds(rank: EmulatedRank, run: Callable[[], object], rounds: int = 15) -> float:
    """The median of a call's seconds on this rank's device."""
    return statistics.median(timeit.repeat(run, timer=rank.now, repeat=rounds, number=1))


def _call(group: Communicator, operation: str, size: int) -> Callable[[], object]:
    part = torch.empty(size // 4 // group.size)
    whole = torch.empty(part.numel() * group.size)
    if operation == "all_reduce":
        return lambda: group.all_reduce(whole)
    if operation == "reduce_scatter":
        return lambda: group.reduce_scatter(part, whole)
    return lambda: group.all_gather(whole, part)


def _timed(world: Communicator, rank: EmulatedRank, run: Callable[[], object]) -> float:
    with rank.emulating(world):  # all ranks begin at the same time
        return timeit.timeit(run, timer=rank.now, number=1)


def _row(
    world: Communicator, name: str, ranks: int, operation: str, size: int, mine: Sequence[float]
) -> dict[str, Any]:
    slowest = sorted(max(times) for times in zip(*world.mpi.allgather(list(mine)), strict=True))
    return {
        "operation": operation, "transport": "engine", "group": name, "ranks": ranks, "dtype": "float32",
        "redop": "none" if operation == "all_gather" else "sum", "root": -1, "in_place": operation == "all_reduce",
        "bytes": size, "wrong": 0, "ci": [slowest[0], slowest[-1]], "iterations": len(slowest),
        "seconds": {"p50": statistics.median(slowest), "min": slowest[0], "mean": statistics.fmean(slowest)},
    }  # fmt: skip


if __name__ == "__main__":
    launch.run(main, device="cpu")
