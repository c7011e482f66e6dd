"""Measure what the same bits at every layout cost: a training step, and the reduction itself.

    mpiexec -n 2 python -m bench.deterministic --output deterministic.md --json deterministic.json
    mpiexec -n 2 python -m bench.deterministic --hidden-sizes 512 --rounds 3

The step is that of a GPT of four layers with one sample a backward, at one tensor-parallel rank and at as many as the
job has, with and without --deterministic. The two take turns. Rank 0 alone runs the step of one rank, while the others
wait without using a core. The reduction is an all-reduce over all ranks of a tensor in shared memory, of a private
tensor, and by MPI, in a binary tree and in the default order.
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import progress, run_on_ranks
from bench.contests.driver import Spread, ratio
from commengine import Communicator
from commengine.host.switch_points import SwitchPoints
from commengine.rank_zero import on_rank_zero
from trainers.checks.digests import weights_digest
from trainers.data.corpus import open_corpus
from trainers.options import COUNT, LENGTH, WIDTH
from trainers.run.startup import fix_products
from trainers.tasks.gpt import GPTTrainConfig, gpt_trainer
from trainers.training.trainer import Trainer

from .layouts import on_some

COMMAND = "bench.deterministic"
PLAIN, SAME, DIGESTS = "plain", "--deterministic", "digests"
#: bytes of a reduction
SIZES = (8 << 10, 256 << 10, 4 << 20, 32 << 20)
#: a step may take this many times as long
LIMIT = 1.25


def steps(mpi: Any, tensor: int, hidden: int, precision: str, given: Namespace) -> dict[str, Any]:
    """The seconds of the two steps on the ranks of ``mpi``, in turns. Collective over ``mpi``."""
    trainers: dict[str, Trainer] = {}
    for name in (PLAIN, SAME):
        config = GPTTrainConfig(
            num_layers=given.num_layers, hidden_size=hidden, num_attention_heads=8, seq_length=given.seq_length,
            vocab_size=8000, mock_data=True, micro_batch_size=1, global_batch_size=given.samples, train_iters=10**6,
            tensor_model_parallel_size=tensor, bf16=precision == "bf16", deterministic=name == SAME, device="cpu",
        )  # fmt: skip
        config.validate(mpi.size)
        world = Communicator(mpi, order=config.order, device="cpu")
        config = replace(config, deterministic_shards=config.canonical_shards)
        trainers[name] = gpt_trainer(config, world, open_corpus(config))
    ways: dict[str, Callable[[], object]] = {name: trainer.step for name, trainer in trainers.items()}
    ways[DIGESTS] = partial(weights_digest, trainers[SAME])
    found = in_turns(ways, mpi.Barrier, given.rounds, random.Random(0))
    for trainer in trainers.values():
        with closing(trainer):
            world = trainer.grid.world
        world.close()
    digests = asdict(Spread.of(found[DIGESTS]))
    return {"hidden": hidden, "tensor": tensor, "precision": precision, "digests": digests} | _compared(
        found, PLAIN, SAME
    )


def in_turns(
    ways: Mapping[str, Callable[[], object]], barrier: Callable[[], object], rounds: int, order: random.Random
) -> dict[str, list[float]]:
    """The seconds of each way in each round, in an order that is drawn anew for each round; one round comes before."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in order.sample(list(ways), len(ways)):
            barrier()
            start = time.perf_counter()
            ways[name]()
            barrier()
            if number:
                found[name].append(time.perf_counter() - start)
    return found


def _compared(found: dict[str, list[float]], base: str, other: str) -> dict[str, Any]:
    return {
        "seconds": found,
        "base": asdict(Spread.of(found[base])),
        "other": asdict(Spread.of(found[other])),
        "ratio": asdict(ratio(found[other], found[base])),
    }


def reductions(world: Communicator, rounds: int) -> list[dict[str, Any]]:
    """The seconds of all-reduces in both orders. Collective over ``world``."""
    rows = []
    groups = {
        (order, memory): Communicator(
            world.mpi, order=order, device="cpu", switch_points=None if memory else SwitchPoints({})
        )
        for order in (None, "tree")
        for memory in (True, False)
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        for nbytes in SIZES:
            for place in ("window", "private", "MPI"):
                ways = {}
                for order in (None, "tree"):
                    comm = groups[order, place != "MPI"]
                    shape = (nbytes // dtype.itemsize,)
                    tensor = comm.empty(shape, dtype) if place == "window" else torch.empty(shape, dtype=dtype)
                    tensor.zero_()
                    ways["tree" if order else "default"] = _repeated(comm, tensor, max(1, (1 << 20) // nbytes))
                found = in_turns(ways, world.barrier, 3 * rounds, random.Random(1))
                rows.append(
                    {"dtype": str(dtype).removeprefix("torch."), "bytes": nbytes, "place": place,
                     "calls": max(1, (1 << 20) // nbytes)} | _compared(found, "default", "tree")
                )  # fmt: skip
    for comm in groups.values():
        comm.close()
    return rows


def _repeated(comm: Communicator, tensor: torch.Tensor, calls: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(calls):
            comm.all_reduce(tensor)

    return work


def measure(world: Communicator, given: Namespace) -> dict[str, Any]:
    """Everything. Collective over ``world``."""
    rows = []
    sizes = [(hidden, precision) for hidden in given.hidden_sizes for precision in ("fp32", "bf16")]
    with progress(world, 2 * len(sizes) + 1) as bar:
        for hidden, precision in sizes:
            # The ranks that wait sleep: rank 0 has their cores' caches and memory.
            rows.append(on_some(world, 1, lambda mpi, h=hidden, p=precision: steps(mpi, 1, h, p, given)))  # type: ignore[misc]
            bar.update()
            if world.size > 1:
                rows.append(steps(world.mpi, world.size, hidden, precision, given))
            bar.update()
        reduced = reductions(world, given.rounds) if world.size > 1 else []
        bar.update()
    return {"ranks": world.size, "threads": torch.get_num_threads(), "steps": rows, "reductions": reduced}


def markdown(result: dict[str, Any], given: Namespace) -> str:
    """The result in markdown."""
    within = all(row["ratio"]["median"] <= LIMIT for row in result["steps"])
    lines = [
        *heading("What the same bits at every layout cost", result),
        f"- GPT of {given.num_layers} layers, 8 heads, {given.seq_length} tokens a sample, {given.samples} samples a "
        f"step, one sample a backward, {result['threads']} threads a rank",
        f"- {given.rounds} rounds in turns: median [min to max]; ratios are of the same round",
        f"- Every step takes at most {LIMIT} times as long: {'yes' if within else 'no'}",
        "- The digests of the weights, which metrics.jsonl has for every step, come on top",
        "",
        f"| hidden | precision | tensor-parallel ranks | {PLAIN}: s | {SAME}: s | ratio | digests: s |",
        "|---:|---|---:|---|---|---|---|",
    ]
    for row in result["steps"]:
        spreads = " | ".join(Spread(**row[name]).text() for name in ("base", "other", "ratio", "digests"))
        lines.append(f"| {row['hidden']} | {row['precision']} | {row['tensor']} | {spreads} |")
    if result["reductions"]:
        lines += [
            "",
            f"All-reduce on {result['ranks']} ranks, in a binary tree and in the default order. A window is memory "
            "that the ranks share; a private tensor goes by the default route, and MPI is used without shared memory:",
            "",
            "| dtype | KB | tensor | default: us | tree: us | ratio |",
            "|---|---:|---|---:|---:|---|",
        ]
    for row in result["reductions"]:
        base, other = (1e6 * row[name]["median"] / row["calls"] for name in ("base", "other"))
        lines.append(
            f"| {row['dtype']} | {row['bytes'] // 1024} | {row['place']} | {base:.1f} | {other:.1f} | "
            f"{Spread(**row['ratio']).text()} |"
        )
    return "\n".join([*lines, ""])


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--hidden-sizes", type=int, nargs="+", valid=WIDTH, default=[512, 1024], help="(default: 512 1024)")
    add("--num-layers", type=int, valid=COUNT, default=4, help="(default: %(default)s)")
    add("--seq-length", type=int, valid=LENGTH, default=256, help="(default: %(default)s)")
    add("--samples", type=int, valid=COUNT, default=4, help="samples of a step (default: %(default)s)")
    add("--rounds", type=int, valid=COUNT, default=7, help="rounds (default: %(default)s)")
    add_files(options)
    return options


def read(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The options. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    check_writable(output=given.output, json=given.json)
    if bad := [size for size in given.hidden_sizes if size % 32]:
        raise ValueError(f"--hidden-sizes {bad[0]}: must be a multiple of 32, for 8 heads in 4 shards")
    return {**vars(given)}


def main(world: Communicator, argv: Sequence[str] | None = None) -> None:
    """Measure; rank 0 prints and writes. Collective over ``world``."""
    fix_products()
    surroundings = environment(COMMAND, argv)
    given = Namespace(**on_rank_zero(world, lambda: read(argv)))
    result = surroundings | measure(world, given)
    files = {"output": given.output, "json_file": given.json}
    on_rank_zero(world, lambda: publish(markdown(result, given), result, **files))


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
