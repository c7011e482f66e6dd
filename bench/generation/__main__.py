"""Measure the tokens per second of `tplayers.generate`, and of `transformers` with the same weights and prompts.

    python -m bench.generation --output generation.md --json generation.json
    python -m bench.generation --num-layers 2 --hidden-size 64 --vocab-size 500 --rounds 2     # a small model

The contestants write greedy texts of the same model, alternate within one run (bench/contests/driver.py), and must
write the same tokens; if they do not, the exit status is 1. The command also measures the time of one more token after
a short and a long prompt, and compares the bytes that a token communicates with the formula.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import run_alone, user_errors
from bench.contests.comparison import ALLOCATOR, COMPARED_STEPS, idle_share, measured, settings_line
from bench.contests.driver import Contestant, ContestError, Spread, ratio, rounds, started
from bench.contests.generation_task import GenerationTask
from commengine import cost
from trainers.options import BATCH, COUNT, HEADS, LAYERS, LENGTH, SEED, VOCABULARY, WIDTH

COMMAND = "bench.generation"
OURS = "bench.contests.generated_text"
#: by which factor a token after the long prompt may take longer than one after the short prompt
LONGER = 2.0
#: tokens that a contestant chooses in a round where the time of one token is measured
TOKENS_OF_A_ROUND = 20


def contestants(folder: str) -> list[Contestant]:
    """Who writes the task's texts, each on two cores. The ratios are to the first one's times."""
    task = ("--task", f"{folder}/task.json")
    ours = Contestant(
        "ours", 2, ("-m", OURS, *task, "--trace", f"{folder}/trace.json"), {"OMP_NUM_THREADS": "1", **ALLOCATOR}, True
    )
    peer = ("-m", "bench.peers.generated_text", *task)
    return [ours, Contestant("transformers", 1, peer, {"OMP_NUM_THREADS": "2", **ALLOCATOR})]


def texts(task: GenerationTask, arguments: Namespace) -> dict[str, Any]:
    """The tokens per second of each contestant, and the bytes of a token. Raises ContestError."""
    with tempfile.TemporaryDirectory(prefix="generation-") as folder:
        task.save(f"{folder}/task.json")
        with started(contestants(folder)) as running:
            for one in running:
                print(f"{one.name}, batch {task.batch}: warming up ({one.note})", file=sys.stderr)
                one.run(COMPARED_STEPS)
            seconds = rounds(running, arguments.rounds, 1)
            result = measured(running, seconds, "ours", task.batch * task.new_tokens)
        traced = [tuple(row) for row in json.loads(Path(folder, "trace.json").read_text())]
    for row in result["contestants"]:
        row["command"] = row["command"].replace(f"{folder}/", "")
    formula = {(one.operation, int(one.size)): one.count for one in by_formula(task)}
    collectives = [
        {"operation": operation, "bytes": size, "count": count, "by_formula": formula.pop((operation, size), 0)}
        for operation, size, count in traced
    ]
    collectives += [
        {"operation": operation, "bytes": size, "count": 0, "by_formula": count}
        for (operation, size), count in formula.items()
    ]
    if any(row["count"] != row["by_formula"] for row in collectives):
        result["errors"].append("a token's collectives are not those of the formula")
    return {"task": asdict(task), "collectives": collectives, **result}


def by_formula(task: GenerationTask) -> list[cost.Collective]:
    """The collectives of one token of every text, on two ranks; those of equal sizes are one."""
    shape = task.config.cost_shape(task.prompt_tokens)
    found: dict[tuple[str, float], cost.Collective] = {}
    for one in cost.generation_collectives(shape, task.batch, 2):
        before = found.get((one.operation, one.size))
        found[one.operation, one.size] = replace(one, count=one.count + (before.count if before else 0))
    return list(found.values())


def one_token(task: GenerationTask, lengths: Sequence[int], arguments: Namespace) -> dict[str, Any]:
    """The seconds of one more token after prompts of these lengths. Raises ContestError."""
    with tempfile.TemporaryDirectory(prefix="generation-") as folder:
        programs = []
        for length in lengths:
            replace(task, prompt_tokens=length).save(f"{folder}/{length}.json")
            argv = ("-m", OURS, "--task", f"{folder}/{length}.json", "--one-token")
            programs.append(Contestant(str(length), 2, argv, {"OMP_NUM_THREADS": "1", **ALLOCATOR}, True))
        with started(programs) as running:
            for one in running:
                one.run(COMPARED_STEPS)
            seconds = rounds(running, arguments.rounds, TOKENS_OF_A_ROUND)
            idle = [one.name for one in running if idle_share(one) > 0.01]
    short, long = (seconds[str(length)] for length in lengths)
    longer = ratio(long, short)
    errors = [f"the contestant at {name} tokens used a core while the other was running" for name in idle]
    if longer.median > LONGER:
        errors.append(f"a token after {lengths[1]} tokens takes {longer.median:.2f} times as long as one after "
                      f"{lengths[0]}, more than {LONGER:g} times")  # fmt: skip
    steps = {str(length): asdict(Spread.of(seconds[str(length)])) for length in lengths}
    return {"lengths": list(lengths), "seconds": steps, "ratio": asdict(longer), "errors": errors}


def markdown(result: dict[str, Any], count: int) -> str:
    """The results in markdown."""
    task = result["texts"][0]["task"]
    lines = [
        *heading("Generation", result),
        settings_line(),
        f"- model: a GPT-2 of random weights, {task['num_layers']} layers, hidden {task['hidden_size']}, "
        f"{task['num_attention_heads']} heads, vocabulary {task['vocab_size']:,}, fp32",
        f"- greedy texts of {task['new_tokens']} tokens after prompts of {task['prompt_tokens']}; the times include "
        "the prompts' pass; all contestants write the same tokens",
        f"- {count} alternating rounds: median [min to max] over the rounds; ratios are of the same round",
        "- ours: 2 tensor-parallel ranks of 1 thread; transformers: 1 process of 2 threads",
    ]
    for text in result["texts"]:
        lines += [
            "",
            f"## Batch {text['task']['batch']}",
            "",
            *[f"**ERROR: {error}**\n" for error in text["errors"]],
            "| contestant | tokens/s | ms per token of each text | time over ours | peak RSS, MB |",
            "|---|---|---|---|---|",
        ]
        new = text["task"]["new_tokens"]
        for row in text["contestants"]:
            lines.append(
                f"| {row['name']} | {row['items_per_second']:.1f} | {_milliseconds(row['step'], new)} "
                f"| {Spread(**row['ratio_to_baseline']).text()} | {row['peak_rss_bytes'] / 1e6:.0f} |"
            )
        lines += [
            "",
            "| collectives of a token | bytes of each | traced | by formula |",
            "|---|---|---|---|",
            *(f"| {row['operation']} | {row['bytes']:,} | {row['count']} | {row['by_formula']} |"
              for row in text["collectives"]),
            f"| bytes of all | | {_bytes(text, 'count'):,} | {_bytes(text, 'by_formula'):,} |",
        ]  # fmt: skip
    more = result["one_token"]
    lines += [
        "",
        "## One more token",
        "",
        "Batch 1, ours. The tokens before it are in the cache; the time includes its choice.",
        "",
        *[f"**ERROR: {error}**\n" for error in more["errors"]],
        "| tokens before it | ms |",
        "|---|---|",
        *(f"| {length} | {_milliseconds(more['seconds'][str(length)])} |" for length in more["lengths"]),
        "",
        f"The ratio is {Spread(**more['ratio']).text()}; at most {LONGER:g} is required.",
        "",
        *(f"- {row['name']}: `{row['command']}`; {row['note']}" for row in result["texts"][0]["contestants"]),
    ]  # fmt: skip
    return "\n".join([*lines, ""])


def _milliseconds(seconds: dict[str, float], parts: int = 1) -> str:
    """A spread of seconds, of one of ``parts``."""
    return Spread(*(1e3 * seconds[key] / parts for key in ("median", "low", "high"))).text(1)


def _bytes(text: dict[str, Any], key: str) -> int:
    return sum(row["bytes"] * row[key] for row in text["collectives"])


def parser() -> CommandParser:
    """The command line."""
    default = GenerationTask()
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--rounds", type=int, valid=COUNT, default=7, help="rounds (default: %(default)s)")
    add("--batch", type=int, valid=BATCH, nargs="+", default=[1, 8], help="texts at once (default: 1 8)")
    add("--lengths", type=int, valid=LENGTH, nargs=2, default=[16, 256], metavar=("SHORT", "LONG"),
        help="tokens before the one whose time is measured (default: 16 256)")  # fmt: skip
    add("--prompt-tokens", type=int, valid=LENGTH, default=default.prompt_tokens, help="(default: %(default)s)")
    add("--new-tokens", type=int, valid=COUNT, default=default.new_tokens, help="of a text (default: %(default)s)")
    add("--num-layers", type=int, valid=LAYERS, default=default.num_layers)
    add("--hidden-size", type=int, valid=WIDTH, default=default.hidden_size)
    add("--num-attention-heads", type=int, valid=HEADS, default=default.num_attention_heads)
    add("--vocab-size", type=int, valid=VOCABULARY, default=default.vocab_size)
    add("--seed", type=int, valid=SEED, default=default.seed)
    add_files(options)
    return options


def read(argv: Sequence[str] | None = None) -> tuple[Namespace, GenerationTask]:
    """The options, and the task with a batch of 1. Raises ValueError that names the option at fault."""
    arguments = parser().parse_args(argv)
    check_writable(output=arguments.output, json=arguments.json)
    hidden, heads = arguments.hidden_size, arguments.num_attention_heads
    if hidden % heads or heads % 2:
        raise ValueError(f"--num-attention-heads {heads}: must be even and divide --hidden-size {hidden}")
    if min(arguments.lengths) < 2:
        raise ValueError(f"--lengths {min(arguments.lengths)}: must be at least 2")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("the peer is missing: install transformers, for example by pip install '.[test]'")
    longest = max(*arguments.lengths, arguments.prompt_tokens + arguments.new_tokens)
    task = GenerationTask(
        num_layers=arguments.num_layers, hidden_size=hidden, num_attention_heads=heads,
        vocab_size=arguments.vocab_size, max_position_embeddings=max(GenerationTask().max_position_embeddings, longest),
        prompt_tokens=arguments.prompt_tokens, new_tokens=arguments.new_tokens, seed=arguments.seed,
    )  # fmt: skip
    return arguments, task


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 if texts differ, or a contestant failed or disturbed another."""
    with user_errors(COMMAND):
        arguments, task = read(argv)
    surroundings = environment(COMMAND)  # before measuring: the load average is that of other programs
    try:
        found = [texts(replace(task, batch=batch), arguments) for batch in arguments.batch]
        result = surroundings | {"texts": found, "one_token": one_token(task, arguments.lengths, arguments)}
    except ContestError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    publish(markdown(result, arguments.rounds), result, output=arguments.output, json_file=arguments.json)
    errors = [error for part in (*found, result["one_token"]) for error in part["errors"]]
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    run_alone(main)
