"""Measure the seconds per training step of this project, DTensor, DistributedDataParallel and plain PyTorch.

    python -m bench.step_contest --rounds 7 --steps 2 --output step_contest.md --json step_contest.json
    python -m bench.step_contest --model bert --rounds 7 --steps 2
    python -m bench.step_contest --only ddp --only dtensor        # some contestants; --list prints all names

All contestants train the same GPT or BERT on the same tokens from the same weights (bench/contests/step_task.py). They
alternate within one run (bench/contests/driver.py) and must report the same losses; if they do not, the exit status is
1.
"""

from __future__ import annotations

import importlib.util
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
from bench.command.values import listed
from bench.contests.comparison import ALLOCATOR, COMPARED_STEPS, measured, settings_line
from bench.contests.driver import Contestant, ContestError, Running, Spread, rounds, started
from bench.contests.step_task import MODELS, StepTask
from bench.peers.plain import reference_state
from trainers.options import BATCH, COUNT, HEADS, LAYERS, LENGTH, NOT_NEGATIVE, SEED, VOCABULARY, WIDTH, between

COMMAND = "bench.step_contest"

#: tokens of the shortest sample of BERT that has a masked token
SHORTEST_BERT = 8
#: by StepTask.masked_positions_only: where BERT's head of masked tokens runs
POSITIONS = {False: "the head of masked tokens runs at all positions", True: "it runs at the masked positions only"}


def contestants(task_file: str) -> list[Contestant]:
    """All contestants. Each has two processes with one thread, unless its name says otherwise."""

    def one(name: str, ranks: int, module: str, *options: str, threads: int = 1, mpi: bool = False) -> Contestant:
        argv = ("-m", module, "--task", task_file, *options)
        return Contestant(name, ranks, argv, {"OMP_NUM_THREADS": str(threads), **ALLOCATOR}, mpi)

    ours = "bench.contests.training_step"
    return [
        one("ours-tp2", 2, ours, "--tensor-model-parallel-size", "2", mpi=True),
        one("ours-dp2", 2, ours, "--tensor-model-parallel-size", "1", mpi=True),
        one("dtensor", 2, "bench.peers.dtensor"),
        one("dtensor-loss-parallel", 2, "bench.peers.dtensor", "--loss-parallel"),
        one("ddp", 2, "bench.peers.ddp"),
        one("torch-1-thread", 1, "bench.peers.plain"),
        one("torch-2-threads", 1, "bench.peers.plain", threads=2),
    ]


def exists(contestant: Contestant) -> bool:
    """Whether the contestant's program is there."""
    try:
        return importlib.util.find_spec(contestant.argv[1]) is not None
    except ModuleNotFoundError:
        return False


def report(
    task: StepTask, running: Sequence[Running], seconds: dict[str, list[float]], baseline: str
) -> dict[str, Any]:
    """All that was measured, as --json has it, without `environment`."""
    result = measured(running, seconds, baseline, task.global_batch_size * task.seq_length)
    for row in result["contestants"]:
        row["tokens_per_second"] = row.pop("items_per_second")
    return {"task": asdict(task) | {"weights": ""}, **result}


def markdown(result: dict[str, Any], count: int, steps: int) -> str:
    """The result in markdown."""
    task = result["task"]
    steps_text = f"{count} alternating rounds of {steps} steps: median [min to max] over the rounds"
    lines = [
        *heading("Training step", result),
        settings_line(),
        f"- task: {task['model'].upper()}, {task['num_layers']} layers, hidden {task['hidden_size']}, "
        f"{task['num_attention_heads']} heads, vocabulary {task['vocab_size']}, "
        f"sequence {task['seq_length']}, global batch {task['global_batch_size']}, "
        f"fp32, AdamW, gradient clipping {task['clip_grad'] or 'off'}"
        + (f"; {POSITIONS[task['masked_positions_only']]}" if task["model"] == "bert" else ""),
        f"- {steps_text}; ratios are to the time of {result['baseline']} in the same round",
        f"- largest difference of the losses of the first {COMPARED_STEPS} steps: "
        f"{result['largest_loss_difference']:.1e}",
        *[f"- **ERROR: {error}**" for error in result["errors"]],
        "",
        f"| contestant | ranks x threads | s per step | time over {result['baseline']} | tokens/s "
        f"| peak RSS, MB | loss after {COMPARED_STEPS - 1} steps |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['ranks']} x {row['threads_per_rank']} "
        f"| {Spread(**row['step']).text(3)} | {Spread(**row['ratio_to_baseline']).text()} "
        f"| {row['tokens_per_second']:.0f} | {row['peak_rss_bytes'] / 1e6:.0f} "
        f"| {row['loss'][COMPARED_STEPS - 1]:.6f} |"
        for row in result["contestants"]
    ]
    lines.append("")
    lines += [f"- {row['name']}: `{row['command']}`; {row['note']}" for row in result["contestants"]]
    return "\n".join([*lines, ""])


def parser() -> CommandParser:
    """The command line."""
    default = StepTask()
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--rounds", type=int, valid=COUNT, default=7, help="rounds (default: %(default)s)")
    add("--steps", type=int, valid=COUNT, default=2, help="steps of each contestant in a round (default: %(default)s)")
    add(
        "--warmup", type=int, valid=between(COMPARED_STEPS, 10**6), default=4,
        help=f"steps before the first round, at least {COMPARED_STEPS}",
    )  # fmt: skip
    add("--only", action="append", metavar="NAME", help="measure this contestant; may be repeated")
    add("--baseline", metavar="NAME", help="contestant to which the ratios are (default: the first that is measured)")
    add("--list", action="store_true", help="print the names of all contestants, and exit")
    add_files(options)
    add("--model", choices=MODELS, default=default.model, help="(default: %(default)s)")
    add("--masked-positions-only", action="store_true", help="BERT's head runs at the masked positions, not at all")
    add("--vocab-size", type=int, valid=VOCABULARY, default=default.vocab_size)
    add("--hidden-size", type=int, valid=WIDTH, default=default.hidden_size)
    add("--num-layers", type=int, valid=LAYERS, default=default.num_layers)
    add("--num-attention-heads", type=int, valid=HEADS, default=default.num_attention_heads)
    add("--seq-length", type=int, valid=LENGTH, default=default.seq_length)
    add("--global-batch-size", type=int, valid=BATCH, default=default.global_batch_size)
    add("--lr", type=float, valid=between(0, 1000), default=default.lr)
    add("--weight-decay", type=float, valid=between(0, 1000), default=default.weight_decay)
    add("--clip-grad", type=float, valid=NOT_NEGATIVE, default=default.clip_grad,
        help="largest norm of the gradient; 0: no clipping")  # fmt: skip
    add("--seed", type=int, valid=SEED, default=default.seed)
    return options


def choose(arguments: Any, everyone: Sequence[Contestant]) -> list[Contestant]:
    """The contestants that --only names and whose program exists. Raises ValueError where none is left."""
    names = [contestant.name for contestant in everyone]
    for option, given in (("--only", arguments.only or []), ("--baseline", [arguments.baseline or names[0]])):
        if given:
            listed(given, names, option)
    chosen = [one for one in everyone if not arguments.only or one.name in arguments.only]
    for missing in [one for one in chosen if not exists(one)]:
        print(f"left out, no module {missing.argv[1]}: {missing.name}", file=sys.stderr)
    chosen = [one for one in chosen if exists(one)]
    if not chosen:
        raise ValueError("nothing to measure: no program of the contestants is there")
    measured = [one.name for one in chosen]
    if arguments.baseline and arguments.baseline not in measured:
        raise ValueError(f"--baseline {arguments.baseline}: is not measured; valid: {', '.join(measured)}")
    return chosen


def read(argv: Sequence[str] | None = None) -> Namespace:
    """The options. Raises ValueError that names the option at fault."""
    arguments = parser().parse_args(argv)
    check_writable(output=arguments.output, json=arguments.json)
    if arguments.masked_positions_only and arguments.model != "bert":
        raise ValueError("--masked-positions-only: needs --model bert")
    hidden, heads = arguments.hidden_size, arguments.num_attention_heads
    if hidden % heads:
        raise ValueError(f"--hidden-size {hidden}: must be a multiple of --num-attention-heads {heads}")
    if arguments.model == "bert" and arguments.seq_length < SHORTEST_BERT:
        raise ValueError(f"--seq-length {arguments.seq_length}: must be at least {SHORTEST_BERT} with --model bert")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report. Returns the exit status.

    It is 1 if losses differ, if a contestant used the cores of another, or if one failed.
    """
    with user_errors(COMMAND):
        arguments = read(argv)
    if arguments.list:
        print("\n".join(one.name for one in contestants("task.json")))
        return 0
    surroundings = environment(COMMAND)  # before measuring: the load average is that of other programs
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        task_file, weights = f"{folder}/task.json", f"{folder}/weights.safetensors"
        with user_errors(COMMAND):
            everyone = choose(arguments, contestants(task_file))
        sizes = {name: getattr(arguments, name) for name in asdict(StepTask()) if name != "weights"}
        task = StepTask(**sizes, weights=weights)
        save_file(reference_state(task), weights)
        task.save(task_file)
        try:
            with started(everyone) as running:
                for one in running:
                    print(f"{one.name}: warming up ({one.note})", file=sys.stderr)
                    one.run(arguments.warmup)
                seconds = rounds(running, arguments.rounds, arguments.steps)
                result = surroundings | report(task, running, seconds, arguments.baseline or running[0].name)
        except ContestError as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    text = markdown(result, arguments.rounds, arguments.steps)
    publish(text, result, output=arguments.output, json_file=arguments.json)
    for error in result["errors"]:
        print(f"error: {error}", file=sys.stderr)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    run_alone(main)
