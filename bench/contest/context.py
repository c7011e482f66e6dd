"""Seconds per training step on two ranks that share one sequence, by the three methods, and on one rank.

    python -m bench.contest context --output context.md --json context.json
    python -m bench.contest context --rates 0 50e6 --seq-lengths 2048 4096 8192

A step is that of pretrain_gpt for a Llama of two layers (bench/programs/context_step.py). --rates: bytes per second of
the link between the two ranks, which a sleep emulates (bench/timing/slow_link.py); 0: shared memory as it is. On a link
the messages have threads. The column "predicted" has the step's time in shared memory and the seconds for which the
formulas say that the step waits for the link: an all-to-all is never hidden, and a message of the ring is as far as the
block of scores takes, which is computed meanwhile. The blocks are timed alone, before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench.contest.parts.base import Case, add_fields, task_of
from bench.contest.parts.programs import GivenTask, ProgramContest
from bench.programs.context_step import ContextTask
from bench.programs.driver import Contestant
from commengine import UsageError, cost
from tplayers.context.blocks import BlockMask, attend, attend_backward
from trainers.options import COUNT, NOT_NEGATIVE
from trainers.tasks.context import METHODS

RANKS = 2
#: the shortest of so many runs of a block counts: only other programs make it longer
BLOCK_RUNS = 3
#: the share of a rank's own block that the backward computes before the others: one triangle of four
OWN_FIRST = 0.25


class ContextContest(ProgramContest):
    """Sequences that two ranks share."""

    title = "A step on a sequence that two ranks share"
    rounds = 3
    steps = 0
    relative = True

    def contestants(self, file: str, given: Any) -> list[Contestant]:
        """One rank, and the methods."""
        ours = "bench.programs.context_step"
        return [
            Contestant.of("one rank", 1, ours, file, mpi=True),
            *(Contestant.of(method, RANKS, ours, file, way, mpi=True) for way, method in METHODS.items()),
        ]

    def add_options(self, add: Callable[..., Any]) -> None:
        """The sizes of the model, the sequences and the links."""
        super().add_options(add)
        add_fields(
            add, ContextTask, hidden_size=COUNT, num_layers=COUNT, num_attention_heads=COUNT, num_query_groups=COUNT
        )
        add("--seq-lengths", type=int, nargs="+", valid=COUNT, default=[1024, 2048, 4096, 8192, 16384])
        add("--rates", type=float, nargs="+", valid=NOT_NEGATIVE, default=[0.0, 100e6],
            help="bytes per second; 0: shared memory as it is")  # fmt: skip

    def check(self, given: Any) -> None:
        """The model can be cut so."""
        super().check(given)
        for task in self.tasks(given):
            for way in METHODS:
                try:
                    task.task.config(RANKS, way)
                except UsageError as error:
                    raise ValueError(str(error)) from None

    def tasks(self, given: Any) -> Iterator[GivenTask]:
        """Yield a task for each length and link."""
        for length in given.seq_lengths:
            for rate in given.rates:
                task = task_of(ContextTask, given, seq_length=length, rate=rate)
                link = f"{rate / 1e6:g} MB/s, threads" if rate else "memory"
                yield GivenTask({"sequence": length, "link": link}, task, length)

    def measure(self, given: Any, world: Any) -> Sequence[Case]:
        """A case for each task, and what was predicted of it where there is one in shared memory to begin from."""
        cases: list[Case] = []
        in_memory: dict[int, Case] = {}
        for task in self.tasks(given):
            length, slow = task.task.seq_length, task.task.rate > 0
            blocks = block_times(task.task) if slow else (0.0, 0.0)
            case = self.case(given, task)
            if not slow:
                in_memory[length] = case
            for name in case.sides:
                predicted = ""
                if slow and length in in_memory:
                    seconds = in_memory[length].spread(name).median + waited(task.task, name, blocks)
                    predicted = f"{seconds:.3g}"
                case.facts[name]["predicted, s"] = predicted
            cases.append(case)
        return cases


def block_times(task: ContextTask) -> tuple[float, float]:
    """The seconds of a rank's own block of scores in one layer, forward and backward, by one thread of this process."""
    rows, width = task.seq_length // RANKS, task.hidden_size // task.num_attention_heads
    q = torch.randn(1, task.num_attention_heads, rows, width)
    k = torch.randn(1, task.num_query_groups, rows, width)
    forward, backward = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(BLOCK_RUNS):
        start = time.perf_counter()
        out, lse = attend(q, k, k, BlockMask(causal=True))
        middle = time.perf_counter()
        attend_backward(q, q, k, k, out, lse, BlockMask(causal=True))
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    torch.set_num_threads(threads)
    return min(forward), min(backward)


def waited(task: ContextTask, method: str, block: tuple[float, float]) -> float:
    """The seconds for which a step waits for a link of ``task.rate``, by formula. block: of `block_times`."""
    if method not in METHODS.values():
        return 0.0
    run = cost.context_collectives(task.config(RANKS, "a2a").cost_shape(), 1, 1, RANKS, method, element_bytes=4)
    forward, backward = block
    # In the order of the formulas: blocks forward, blocks backward, and the gradients of their keys and values.
    beside = (forward, OWN_FIRST * backward, (1 - OWN_FIRST) * backward) if method != "ulysses" else (0.0,) * len(run)
    found = 0.0
    for one, computing in zip(run, beside, strict=True):
        sent = one.size * (1.0 if method == "ring" else cost.bus_factor(one.operation, RANKS))
        found += one.count * max(0.0, sent / task.rate - computing)
    return found


CONTEST = ContextContest()
