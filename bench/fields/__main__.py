"""Measure a U-Net's training step on a field that two ranks split in space, against plain torch on the whole field.

    python -m bench.fields --rounds 9 --steps 1 --output fields.md --json fields.json
    python -m bench.fields --points 128 --width 32 --width 64 --layout channels-last

The contestants have the same weights, field, optimizer and memory layout: this project on two ranks of one thread,
torch in one process of one thread, and torch in one process of two threads. They alternate within one run
(bench/contests/driver.py) and must report the same losses; if they do not, the exit status is 1.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from safetensors.torch import save_file

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import run_alone, user_errors
from bench.contests.comparison import ALLOCATOR, COMPARED_STEPS, measured, settings_line
from bench.contests.driver import Contestant, ContestError, Running, Spread, rounds, started
from bench.contests.field_task import LAYOUTS, FieldTask
from bench.peers.unet import reference_state
from trainers.options import BATCH, COUNT, between

COMMAND = "bench.fields"
WIDTHS = (16, 32)  # narrow, where torch's kernels are short and the halos cost most; and a common width
OURS, ONE_THREAD, TWO_THREADS = "ours-space2", "torch-1-thread", "torch-2-threads"


def contestants(task_file: str) -> list[Contestant]:
    """The three contestants; ratios are to the first."""

    def one(name: str, ranks: int, module: str, threads: int) -> Contestant:
        argv = ("-m", module, "--task", task_file)
        return Contestant(name, ranks, argv, {"OMP_NUM_THREADS": str(threads), **ALLOCATOR}, mpi=ranks > 1)

    return [
        one(OURS, 2, "bench.contests.field_step", 1),
        one(ONE_THREAD, 1, "bench.peers.unet", 1),
        one(TWO_THREADS, 1, "bench.peers.unet", 2),
    ]


def contest(task: FieldTask, arguments: Namespace) -> dict[str, Any]:
    """The result of one task: a row for each contestant, and errors. Raises ContestError where one failed."""
    with tempfile.TemporaryDirectory(prefix="fields-") as folder:
        weights, task_file = f"{folder}/weights.safetensors", f"{folder}/task.json"
        save_file(reference_state(task), weights)
        FieldTask(**asdict(task) | {"weights": weights}).save(task_file)
        with started(contestants(task_file)) as running:
            for one in running:
                print(f"width {task.width}, {task.layout}, {one.name}: warming up ({one.note})", file=sys.stderr)
                one.run(max(arguments.warmup, COMPARED_STEPS))
            seconds = rounds(running, arguments.rounds, arguments.steps)
            return result_of(task, running, seconds)


def result_of(task: FieldTask, running: Sequence[Running], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """What was measured of one task, with losses compared relatively, because they depend on the field's size."""
    result = measured(running, seconds, OURS, task.batch * task.points**2, relative=True)
    for row in result["contestants"]:
        row["points_per_second"] = row.pop("items_per_second")
    where = f"width {task.width}, {task.layout}"
    errors = [f"{where}: {error}" for error in result["errors"]]
    return {"task": asdict(task) | {"weights": ""}, **result, "errors": errors}


def markdown(result: dict[str, Any], arguments: Namespace) -> str:
    """The result in markdown."""
    task = result["contests"][0]["task"]
    first = (task["points"] // 2, task["points"])
    lines = [
        *heading("U-Net on a split field", result),
        settings_line(),
        f"- task: U-Net of depth {task['depth']} with batch normalisation, field of {task['points']} x "
        f"{task['points']} points, {task['channels']} channels, batch {task['batch']}, fp32, AdamW",
        f"- {OURS}: blocks of {first[0]} x {first[1]} points",
        f"- {arguments.rounds} alternating rounds of {arguments.steps} steps: median [min to max] over the rounds; the "
        f"last column is the time over that of {OURS} in the same round",
        *[f"- **ERROR: {error}**" for one in result["contests"] for error in one["errors"]],
        "",
        f"| width | memory layout | contestant | ranks x threads | s per step | peak RSS, MB | time over {OURS} |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in result["contests"]:
        lines += [
            f"| {one['task']['width']} | {one['task']['layout']} | {row['name']} "
            f"| {row['ranks']} x {row['threads_per_rank']} | {Spread(**row['step']).text(3)} "
            f"| {row['peak_rss_bytes'] / 1e6:.0f} | {Spread(**row['ratio_to_baseline']).text()} |"
            for row in one["contestants"]
        ]
    return "\n".join([*lines, ""])


def parser() -> CommandParser:
    """The command line."""
    default = FieldTask()
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--rounds", type=int, valid=COUNT, default=9, help="rounds (default: %(default)s)")
    add("--steps", type=int, valid=COUNT, default=2, help="steps of each contestant in a round (default: %(default)s)")
    add("--warmup", type=int, valid=COUNT, default=4, help="steps before the first round, at least 4")
    add("--layout", action="append", choices=list(LAYOUTS), help="a memory layout; may be repeated (default: both)")
    add("--points", type=int, valid=between(8, 1 << 14), default=default.points, help="of each axis of the field")
    add("--batch", type=int, valid=BATCH, default=default.batch)
    add("--width", action="append", type=int, valid=COUNT,
        help="channels of the first level; may be repeated (default: 16 and 32)")  # fmt: skip
    add("--depth", type=int, valid=between(1, 8), default=default.depth, help="halvings of the field")
    add_files(options)
    return options


def read(argv: Sequence[str] | None = None) -> Namespace:
    """The options. Raises ValueError that names the option at fault."""
    arguments = parser().parse_args(argv)
    check_writable(output=arguments.output, json=arguments.json)
    if arguments.points % 2**arguments.depth or arguments.points < 2 ** (arguments.depth + 1):
        raise ValueError(f"--points {arguments.points}: must be a multiple of 2^depth, and at least 2^(depth + 1)")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 if losses differ or a contestant failed or used others' cores."""
    with user_errors(COMMAND):
        arguments = read(argv)
    result = environment(COMMAND)  # before measuring: the load average is that of other programs
    sizes = {name: getattr(arguments, name) for name in ("points", "batch", "depth")}
    tasks = [
        FieldTask(**sizes, width=width, layout=layout)
        for width in arguments.width or WIDTHS
        for layout in arguments.layout or LAYOUTS
    ]
    try:
        result["contests"] = [contest(task, arguments) for task in tasks]
    except ContestError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    publish(markdown(result, arguments), result, output=arguments.output, json_file=arguments.json)
    errors = [error for one in result["contests"] for error in one["errors"]]
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    run_alone(main)
