"""Measure the seconds per training step of `DataParallel` and of torch's DistributedDataParallel over gloo.

    python -m bench.data_parallel --output data_parallel.md --json data_parallel.json
    python -m bench.data_parallel --width 16 --global-batch-size 32     # one network only

The network is ResNet-20 of two widths, with 0.3 and 10 million parameters. All contestants have two processes of one
thread, the same weights and images, alternate within one run (bench/contests/driver.py), and must report the same
losses; if they do not, the exit status is 1.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import run_alone, user_errors
from bench.contests.comparison import ALLOCATOR, COMPARED_STEPS, measured, settings_line
from bench.contests.driver import Contestant, ContestError, Spread, rounds, started
from bench.contests.residual_net import ImageTask, build
from trainers.options import COUNT, SEED, between

COMMAND = "bench.data_parallel"

#: the networks that are measured, and the steps of a round: the paper's, and one with 36 times as many parameters
TASKS = {ImageTask(width=16, global_batch_size=8): 10, ImageTask(width=96, global_batch_size=8): 2}


def contestants(task_file: str) -> list[Contestant]:
    """All contestants. The ratios are to the first one's times."""

    def one(name: str, module: str, *options: str, mpi: bool = False) -> Contestant:
        argv = ("-m", module, "--task", task_file, *options)
        return Contestant(name, 2, argv, {"OMP_NUM_THREADS": "1", **ALLOCATOR}, mpi)

    return [
        one("ours", "bench.contests.replicated_step", mpi=True),
        one("ours-overlap", "bench.contests.replicated_step", "--overlap", mpi=True),
        one("ddp", "bench.peers.residual_ddp"),
    ]


def contest(task: ImageTask, steps: int, arguments: Namespace) -> dict[str, Any]:
    """The result of one network, with so many steps in a round. Raises ContestError."""
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        task.save(f"{folder}/task.json")
        with started(contestants(f"{folder}/task.json")) as running:
            for one in running:
                print(f"{one.name}: warming up ({one.note})", file=sys.stderr)
                one.run(arguments.warmup)
            seconds = rounds(running, arguments.rounds, steps)
            result = measured(running, seconds, running[0].name, task.global_batch_size)
    for row in result["contestants"]:
        row["command"] = row["command"].replace(f"{folder}/", "")
    parameters = sum(parameter.numel() for parameter in build(task).parameters())
    return {"task": asdict(task), "steps": steps, "parameters": parameters, **result}


def markdown(result: dict[str, Any], count: int) -> str:
    """The results in markdown."""
    lines = [
        *heading("A module on two replicas", result),
        settings_line(),
        "- ResNet-20 (He et al. 2016, section 4.2), fp32, SGD with momentum; 2 ranks of 1 thread; each rank's batch "
        "norms see this rank's images, and the running statistics become those of rank 0",
        f"- {count} alternating rounds: median [min to max] over the rounds; ratios are of the same round",
    ]
    for network in result["networks"]:
        task = network["task"]
        lines += [
            "",
            f"## {network['parameters'] / 1e6:.1f} million parameters",
            "",
            f"Width {task['width']}, images of {task['pixels']} x {task['pixels']}, {task['global_batch_size']} in the "
            f"global batch, {network['steps']} steps in a round. The losses of the first {COMPARED_STEPS} steps differ "
            f"by at most {network['largest_loss_difference']:.1e}.",
            *[f"**ERROR: {error}**" for error in network["errors"]],
            "",
            f"| contestant | ms per step | time over {network['baseline']} | images/s | peak RSS of both, MB |",
            "|---|---|---|---|---|",
        ]
        for row in network["contestants"]:
            step = Spread(*(1e3 * row["step"][key] for key in ("median", "low", "high")))
            lines.append(
                f"| {row['name']} | {step.text(1)} | {Spread(**row['ratio_to_baseline']).text()} "
                f"| {row['items_per_second']:.0f} | {row['peak_rss_bytes'] / 1e6:.0f} |"
            )
    lines.append("")
    lines += [f"- {row['name']}: `{row['command']}`; {row['note']}" for row in result["networks"][0]["contestants"]]
    return "\n".join([*lines, ""])


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--rounds", type=int, valid=COUNT, default=7, help="rounds (default: %(default)s)")
    add(
        "--steps", type=int, valid=COUNT, help="steps of each contestant in a round (default: 10, or 2 of the wide one)"
    )
    add(
        "--warmup", type=int, valid=between(COMPARED_STEPS, 10**6), default=COMPARED_STEPS,
        help=f"steps before the first round, at least {COMPARED_STEPS} (default: %(default)s)",
    )  # fmt: skip
    add("--width", type=int, valid=COUNT, help="measure one network of this width only")
    add("--pixels", type=int, valid=between(4, 4096), default=32, help="of each side (default: %(default)s)")
    add("--global-batch-size", type=int, valid=COUNT, help="images, a multiple of 2")
    add("--seed", type=int, valid=SEED, default=0)
    add_files(options)
    return options


def read(argv: Sequence[str] | None = None) -> tuple[Namespace, list[tuple[ImageTask, int]]]:
    """The options, and each task with the steps of a round. Raises ValueError that names the option at fault."""
    arguments = parser().parse_args(argv)
    check_writable(output=arguments.output, json=arguments.json)
    tasks = []
    for task, steps in TASKS.items() if arguments.width is None else [*TASKS.items()][:1]:
        batch = arguments.global_batch_size or task.global_batch_size
        if batch % 2:
            raise ValueError(f"--global-batch-size {batch}: must be a multiple of 2")
        width = arguments.width or task.width
        chosen = ImageTask(width=width, pixels=arguments.pixels, global_batch_size=batch, seed=arguments.seed)
        tasks.append((chosen, arguments.steps or steps))
    return arguments, tasks


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 if losses differ or a contestant failed or disturbed another."""
    with user_errors(COMMAND):
        arguments, tasks = read(argv)
    surroundings = environment(COMMAND)  # before measuring: the load average is that of other programs
    try:
        result = surroundings | {"networks": [contest(task, steps, arguments) for task, steps in tasks]}
    except ContestError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    text = markdown(result, arguments.rounds)
    publish(text, result, output=arguments.output, json_file=arguments.json)
    errors = [error for network in result["networks"] for error in network["errors"]]
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    run_alone(main)
