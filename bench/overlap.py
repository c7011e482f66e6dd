"""The gain of overlapping the reduction of gradients with backward, between this machine's ranks and on a slow link.

    mpiexec -n 2 python -m bench.overlap --output bench/results/overlap.md

Four variants of a data-parallel training step of one GPT alternate in random order within one run: with and without
--overlap-grad-reduce, each over the machine's own transport and over one slowed down to --rate
(bench/timing/slow_link.py). A ratio compares two times of one round. "Hidden" is the share of the reductions' time
during which the rank did not wait for them.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import run_on_ranks
from bench.step_study.recorder import open_trainer
from bench.timing.slow_link import slow_down
from commengine import Communicator, UsageError, trace
from commengine.rank_zero import on_rank_zero
from trainers.options import ABOVE_ZERO, between
from trainers.tasks.gpt import GPTTrainConfig
from trainers.training.trainer import Trainer

COMMAND = "bench.overlap"


@dataclasses.dataclass
class OverlapVariant:
    """One of the four variants, and its measurements of each round.

    rate: bytes per second of the slow link; None: the machine's own transport. seconds: of each step on this rank.
    hidden: the share of the reductions' time that was hidden in each step.
    """

    overlap: bool
    rate: float | None
    trainer: Trainer
    seconds: list[float] = dataclasses.field(default_factory=list)
    hidden: list[float] = dataclasses.field(default_factory=list)

    def step(self) -> None:
        """Run one step and measure it. Collective."""
        world, data = self.trainer.grid.world, self.trainer.grid.data
        with trace(data) as log:
            world.barrier()
            start = time.perf_counter()
            self.trainer.step()
            self.seconds.append(time.perf_counter() - start)
        reductions = [event for event in log.events if event.bytes > 1000]
        whole = sum(event.seconds for event in reductions)
        self.hidden.append(sum(event.hidden_seconds for event in reductions) / whole)


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add(
        "--rounds",
        type=int,
        valid=between(2, 10**6),
        default=11,
        help="rounds, each of one step of every variant (default: %(default)s)",
    )
    add(
        "--micro-batch-size",
        type=int,
        valid=between(1, 1024),
        default=2,
        help="samples of a rank in a step (default: %(default)s)",
    )
    add(
        "--rate",
        type=float,
        valid=ABOVE_ZERO,
        default=0.5e9,
        help="bytes per second of the slow link (default: %(default)s)",
    )
    add_files(options)
    return options


def parse(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The settings that the command line gives. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    check_writable(output=given.output, json=given.json)
    return {**vars(given)}


def main(world: Communicator, argv: Sequence[str] | None = None) -> None:
    """Measure; rank 0 prints and writes."""
    result: dict[str, Any] = environment(COMMAND) | {"ranks": world.size}
    chosen = on_rank_zero(world, lambda: parse(argv))
    if world.size == 1:
        raise UsageError("gradients are reduced between two ranks or more: start it with mpiexec -n 2")
    config = GPTTrainConfig(
        num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256, vocab_size=8192, mock_data=True,
        micro_batch_size=chosen["micro_batch_size"], hidden_dropout=0.0, attention_dropout=0.0, lr=1e-4,
    )  # fmt: skip
    variants = measure(world, config, chosen["rate"], chosen["rounds"])
    text = markdown(result, variants, chosen)
    result["runs"] = [{"overlap": one.overlap, "rate": one.rate, "seconds": one.seconds} for one in variants]
    on_rank_zero(world, lambda: publish(text, result, output=chosen["output"], json_file=chosen["json"]))


def measure(world: Communicator, config: GPTTrainConfig, rate: float, rounds: int) -> list[OverlapVariant]:
    """The four variants after ``rounds`` rounds: without and with overlap, on the own transport and at ``rate``.

    A round before the others warms up and is not counted. Collective over ``world``.
    """
    variants = []
    for limit in (None, rate):
        for overlap in (False, True):
            trainer = open_trainer(dataclasses.replace(config, overlap_grad_reduce=overlap), world)
            if limit is not None:
                slow_down(trainer.grid.data, limit)
            variants.append(OverlapVariant(overlap, limit, trainer))
    order = random.Random(0)  # the same on every rank
    for number in range(1 + rounds):
        for variant in order.sample(variants, len(variants)):
            variant.step()
            if number == 0:
                variant.seconds.clear()
                variant.hidden.clear()
    for variant in variants:
        variant.trainer.close()
    return variants


def markdown(result: dict[str, Any], variants: list[OverlapVariant], chosen: dict[str, Any]) -> str:
    """The table for people."""
    lines = [
        *heading("Overlapping the reduction of gradients with backward", result),
        f"- {result['ranks']} data-parallel ranks, {chosen['rounds']} rounds in random order; medians, quartiles",
        "- GPT of 4 layers, hidden 512, vocabulary 8192, sequence 256, fp32; samples a rank and step: "
        f"{chosen['micro_batch_size']}",
        "",
        "| link | s per step without | with overlap | hidden | speed-up by overlap |",
        "|---|---:|---:|---:|---|",
    ]
    for without, overlapped in zip(variants[0::2], variants[1::2], strict=True):
        link = "this machine's" if without.rate is None else f"{without.rate / 1e9:g} GB/s"
        ratios = [slow / fast for slow, fast in zip(without.seconds, overlapped.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        times = [statistics.median(one.seconds) for one in (without, overlapped)]
        lines.append(
            f"| {link} | {times[0]:.3f} | {times[1]:.3f} | {statistics.median(overlapped.hidden):.0%} "
            f"| {middle:.2f} [{low:.2f} to {high:.2f}] |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
