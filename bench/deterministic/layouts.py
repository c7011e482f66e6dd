"""Compare tiny deterministic runs at every layout: each must have the bits of the run on one rank.

    mpiexec -n 16 python -m bench.deterministic.layouts --output layouts.md --json layouts.json
    mpiexec -n 4 python -m bench.deterministic.layouts --models gpt --steps 5

A run trains a GPT, a BERT or a Llama of two layers, with dropout and clipping. Its digests are those of the loss, the
gradient's norm and the weights of each step, and of every parameter, master and moment after the last one. The layouts
are all with 1, 2 and 4 tensor-parallel and 1, 2 and 4 data-parallel ranks for which there are ranks, each with several
sets of options. The command's status is 1 if a run differs, or if ordinary runs do not differ.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import progress, run_on_ranks
from commengine import Communicator
from commengine.mpi import load_mpi
from commengine.rank_zero import on_rank_zero
from trainers.options import COUNT
from trainers.run.startup import fix_products

from .tiny_run import MODELS, PRECISIONS, Digests, RunLayout, run, unlike

COMMAND = "bench.deterministic.layouts"
ALONE = RunLayout(1, 1)
SIZES = (1, 2, 4)

#: sets of options that change no bit; each layout of the grid has all of them, but sequence parallelism on one rank
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch_size": 2, "use_distributed_optimizer": True, "recompute_granularity": "selective"},
    {"micro_batch_size": 4, "sequence_parallel": True, "overlap_grad_reduce": True, "ddp_bucket_size": 1000,
     "async_tensor_model_parallel_allreduce": True},
    {"sequence_parallel": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
     "recompute_granularity": "full", "ddp_bucket_size": 700},
)  # fmt: skip


def grid(ranks: int) -> Iterator[RunLayout]:
    """The layouts that fit ``ranks`` ranks."""
    for tensor, data in itertools.product(SIZES, SIZES):
        if ranks % (tensor * data) == 0:
            yield from (RunLayout(tensor, data, options) for options in OPTIONS)


def measure(world: Communicator, given: Namespace) -> dict[str, Any]:
    """Run everything. Collective over ``world``."""
    torch.set_num_threads(1)
    layouts = list(grid(world.size))
    cases = [(model, precision) for model in given.models for precision in given.precisions]
    rows, began = [], time.perf_counter()
    with progress(world, len(cases) * (len(layouts) + 2)) as bar:
        for model, precision in cases:
            right = _alone(world, model, precision, given.steps)
            for layout in layouts:
                found = run(world.mpi, model, layout, precision=precision, steps=given.steps)
                rows.append(_row(world, model, precision, str(layout), unlike(right, found), right))
                bar.update()
            rows.append(_resumed(world, model, precision, given.steps, right))
            bar.update()
            rows.append(_control(world, model, precision, given.steps))
            bar.update()
    return {"ranks": world.size, "steps": given.steps, "seconds": time.perf_counter() - began, "rows": rows}


def _alone(world: Communicator, model: str, precision: str, steps: int, **options: Any) -> Digests:
    """The run on one rank: rank 0 trains, and the others learn its digests."""
    found = None
    if world.rank == 0:
        found = run(load_mpi().COMM_SELF, model, ALONE, precision=precision, steps=steps, **options)
    return dict(world.mpi.bcast(found))


def _resumed(world: Communicator, model: str, precision: str, steps: int, right: Digests) -> dict[str, Any]:
    """A run that stops in the middle of an epoch and goes on at another layout."""
    size = min(world.size, 4)
    first = RunLayout(1, size, {"use_distributed_optimizer": True})
    second = RunLayout(size, 1, {"sequence_parallel": size > 1})
    folder = Path(world.mpi.bcast(tempfile.mkdtemp() if world.rank == 0 else None))
    begun = max(steps // 2, 1)
    found = run(world.mpi, model, second, precision=precision, steps=steps, resumed=(first, begun, folder))
    name = f"{first}; from step {begun} on {second}"
    return _row(world, model, precision, name, unlike(right, found), right)


def _control(world: Communicator, model: str, precision: str, steps: int) -> dict[str, Any]:
    """The same comparison without ``--deterministic``."""
    right = _alone(world, model, precision, steps, deterministic=False)
    layout = RunLayout(2, 1) if world.size % 2 == 0 else RunLayout(1, 1, {"micro_batch_size": 4})
    found = run(world.mpi, model, layout, precision=precision, steps=steps, deterministic=False)
    return _row(world, model, precision, f"{layout}", unlike(right, found), right) | {"control": True}


def _row(
    world: Communicator, model: str, precision: str, layout: str, differing: Sequence[str], right: Digests
) -> dict[str, Any]:
    """A row of the result: the number of digests that differ on any rank."""
    number = torch.tensor(len(differing))
    world.all_reduce(number, "max")
    digest = right["steps"][-1][3]
    return {
        "model": model, "precision": precision, "layout": layout, "digests": len(right), "differ": int(number),
        "weights": digest, "control": False,
    }  # fmt: skip


def failed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that are not as they must be: runs that differ, and controls that do not."""
    return [row for row in result["rows"] if bool(row["differ"]) != row["control"]]


def markdown(result: dict[str, Any]) -> str:
    """The result in markdown."""
    runs = [row for row in result["rows"] if not row["control"]]
    same = sum(not row["differ"] for row in runs)
    lines = [
        *heading("The same bits at every layout", result),
        f"- {result['ranks']} ranks, {result['steps']} steps a run, {result['seconds']:.0f} s in all",
        f"- {same} of {len(runs)} runs have all digests of the run on one rank",
        "- The last column has the runs whose every digest is that of the run on one rank. A control is a run without "
        "`--deterministic`",
        "",
        "| model | precision | digests of a run | of the last weights | layouts alike | control: digests that differ |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for (model, precision), group in itertools.groupby(result["rows"], lambda row: (row["model"], row["precision"])):
        every = list(group)
        mine, control = [row for row in every if not row["control"]], [row for row in every if row["control"]]
        alike = sum(not row["differ"] for row in mine)
        lines.append(
            f"| {model} | {precision} | {mine[0]['digests']} | {mine[0]['weights']:x} | {alike} of {len(mine)} | "
            f"{control[0]['differ']} of {control[0]['digests']} |"
        )
    lines += ["", "The layouts of each row:", ""]
    first = (result["rows"][0]["model"], result["rows"][0]["precision"])
    lines += [f"- {row['layout']}" for row in runs if (row["model"], row["precision"]) == first]
    for row in failed(result):
        lines.append(f"- WRONG: {row['model']}, {row['precision']}, {row['layout']}: {row['differ']} digests differ")
    return "\n".join([*lines, ""])


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="(default: all)")
    add("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS), help="(default: all)")
    add("--steps", type=int, valid=COUNT, default=20, help="steps of a run (default: %(default)s)")
    add_files(options)
    return options


def read(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The options. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    check_writable(output=given.output, json=given.json)
    return {**vars(given)}


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Compare; rank 0 prints and writes. Returns the status. Collective over ``world``."""
    fix_products()
    surroundings = environment(COMMAND, argv)
    given = Namespace(**on_rank_zero(world, lambda: read(argv)))
    result = surroundings | measure(world, given)
    files = {"output": given.output, "json_file": given.json}
    on_rank_zero(world, lambda: publish(markdown(result), result, **files))
    return int(bool(failed(result)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_on_ranks(COMMAND, main, parser)
