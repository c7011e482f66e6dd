"""The cost of the same bits at every layout: of a training step, and of the reduction itself.

    mpiexec -n 2 python -m bench.contest deterministic --output deterministic.md --json deterministic.json
    mpiexec -n 2 python -m bench.contest deterministic --hidden-sizes 512 --rounds 3

The step is that of a GPT of four layers with one sample a backward, at one tensor-parallel rank and at as many as the
job has, with and without --deterministic. The two take turns. Rank 0 alone runs the step of one rank, while the others
wait without using a core. The reduction is an all-reduce over all ranks of a tensor in shared memory, of a private
tensor, and by MPI, in a binary tree and in the default order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.contest.parts.base import Case, Contest
from bench.contest.parts.on_ranks import on_some
from bench.step_study.recorder import open_trainer
from bench.timing.sampling import mean_seconds
from bench.timing.turns import Spread, slowest, take_turns
from commengine import Communicator
from commengine.host.switch_points import SwitchPoints
from trainers.checks.digests import weights_digest
from trainers.options import WIDTH
from trainers.run.startup import fix_products, read_config
from trainers.tasks.gpt import GPTTrainConfig
from trainers.training.trainer import Trainer

PLAIN, SAME, DIGESTS = "plain", "--deterministic", "digests"
#: pretrain_gpt's options of the step, of which others win
SMALL = (
    "--num-layers", "4", "--num-attention-heads", "8", "--seq-length", "256", "--vocab-size", "8000", "--mock-data",
    "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "1000000", "--device", "cpu",
)  # fmt: skip
#: where the tensor of a reduction lies, and its bytes
PLACES = ("window", "private", "MPI")
SIZES = (8 << 10, 256 << 10, 4 << 20, 32 << 20)
#: a step may take this many times as long
LIMIT = 1.25


def steps(mpi: Any, hidden: int, precision: str, given: Any) -> dict[str, list[float]]:
    """The seconds of the two steps on the ranks of ``mpi``, one tensor group, in turns. Collective over ``mpi``."""
    with ExitStack() as stack:
        trainers: dict[str, Trainer] = {}
        for name in (PLAIN, SAME):
            config = replace(
                GPTTrainConfig(**given.gpt), hidden_size=hidden, tensor_model_parallel_size=mpi.size,
                bf16=precision == "bf16", deterministic=name == SAME,
            )  # fmt: skip
            config.validate(mpi.size)
            world = stack.enter_context(Communicator(mpi, order=config.order, device="cpu"))
            config = replace(config, deterministic_shards=config.canonical_shards)
            trainers[name] = stack.enter_context(closing(open_trainer(config, world)))
        ways: dict[str, Callable[[], object]] = {name: trainer.step for name, trainer in trainers.items()}
        ways[DIGESTS] = partial(weights_digest, trainers[SAME])
        turns = {name: partial(slowest, world, way) for name, way in ways.items()}
        return take_turns(turns, given.rounds, warmup=1)


def reductions(world: Communicator, rounds: int) -> Iterator[Case]:
    """Yield cases of all-reduces in both orders. Collective over ``world``."""
    with ExitStack() as stack:
        groups = {
            (order, memory): stack.enter_context(
                Communicator(
                    world.mpi, order=order, device="cpu", switch_points=None if memory else SwitchPoints({})
                )
            )
            for order in (None, "tree")
            for memory in (True, False)
        }  # fmt: skip
        for dtype, nbytes, place in itertools.product((torch.float32, torch.bfloat16), SIZES, PLACES):
            turns, calls = {}, max(1, (1 << 20) // nbytes)
            for name, order in (("default", None), ("tree", "tree")):
                comm = groups[order, place != "MPI"]
                shape = (nbytes // dtype.itemsize,)
                tensor = comm.empty(shape, dtype) if place == "window" else torch.empty(shape, dtype=dtype)
                turns[name] = partial(mean_seconds, partial(comm.all_reduce, tensor.zero_()), calls, world)
            found = take_turns(turns, 3 * rounds, seed=1, warmup=1)
            yield Case({"dtype": str(dtype).removeprefix("torch."), "KB": nbytes // 1024, "tensor": place}, found)


class DeterministicContest(Contest):
    """A step and a reduction with the same bits at every layout, and without."""

    title = "What the same bits at every layout cost"
    on_ranks = True
    passes_on = True

    def add_options(self, add: Callable[..., Any]) -> None:
        """The widths of the model."""
        add("--hidden-sizes", type=int, nargs="+", valid=WIDTH, default=[512, 1024], help="(default: 512 1024)")

    def check(self, given: Any) -> None:
        """Heads and shards divide the hidden size; the other options are pretrain_gpt's."""
        if bad := [size for size in given.hidden_sizes if size % 32]:
            raise ValueError(f"--hidden-sizes {bad[0]}: must be a multiple of 32, for 8 heads in 4 shards")
        words = [*SMALL, *given.rest]
        given.gpt = read_config(GPTTrainConfig, words, "python -m bench.contest deterministic", 1).to_json()

    def measure(self, given: Any, world: Communicator) -> Sequence[Case]:
        """The steps on one rank and on all, and then the reductions. Collective over ``world``."""
        fix_products()
        cases = []
        for hidden, precision in itertools.product(given.hidden_sizes, ("fp32", "bf16")):
            for ranks in dict.fromkeys((1, world.size)):  # the ranks that wait sleep: rank 0 has their caches
                found = on_some(world, ranks, partial(steps, hidden=hidden, precision=precision, given=given))
                digests = Spread.of(found.pop(DIGESTS)).text(3)
                labels = {"hidden": hidden, "precision": precision, "tensor-parallel ranks": ranks}
                cases.append(Case(labels, found, {SAME: {"digests: s": digests}}))
        return [*cases, *(reductions(world, given.rounds) if world.size > 1 else [])]

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The model, and whether the limit is kept."""
        within = all(case.over(SAME).median <= LIMIT for case in cases if SAME in case.seconds)
        return [
            f"- GPT of {given.gpt['num_layers']} layers, {given.gpt['num_attention_heads']} heads, "
            f"{given.gpt['seq_length']} tokens a sample, {given.gpt['global_batch_size']} samples a step, one sample a "
            f"backward, {torch.get_num_threads()} threads a rank",
            f"- every step takes at most {LIMIT} times as long: {'yes' if within else 'no'}",
            "- the digests of the weights, which metrics.jsonl has for every step, come on top",
            "- all-reduces in a binary tree and in the default order: a window is memory that the ranks share; a "
            "private tensor goes by the default route, and MPI is used without shared memory",
        ]


CONTEST = DeterministicContest()
