"""What overlapping the gradients' reduction with backward is worth, on this machine's ranks and on a slow link.

    mpiexec -n 2 python -m bench.overlap --output bench/results/overlap.md

Data-parallel training steps of one GPT, with and without --overlap-grad-reduce, alternating in random order within one
run: over the machine's own transport, and over one slowed to --rate (bench/timing/slow_link.py). Ratios are of one
round. "Hidden" is the share of the reductions' time that nobody waited for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from pathlib import Path

from bench.command.machine import environment, heading
from bench.timing.slow_link import slow_down
from commengine import Communicator, launch, trace
from trainers.data.corpus import open_corpus
from trainers.tasks.gpt import GPTTrainConfig, gpt_trainer
from trainers.training.trainer import Trainer


@dataclasses.dataclass
class Runner:
    """One of the four that are compared."""

    overlap: bool
    rate: float | None
    trainer: Trainer
    seconds: list[float] = dataclasses.field(default_factory=list)
    hidden: list[float] = dataclasses.field(default_factory=list)

    def step(self) -> None:
        """One step, and how much of its reductions was hidden."""
        world, data = self.trainer.grid.world, self.trainer.grid.data
        with trace(data) as log:
            world.barrier()
            start = time.perf_counter()
            self.trainer.step()
            self.seconds.append(time.perf_counter() - start)
        reductions = [event for event in log.events if event.bytes > 1000]
        whole = sum(event.seconds for event in reductions)
        self.hidden.append(sum(event.hidden_seconds for event in reductions) / whole)


def main(world: Communicator) -> None:
    """Measure; rank 0 prints and writes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--micro-batch-size", type=int, default=2, help="samples a rank and step")
    options.add_argument("--rate", type=float, default=0.5e9, help="bytes a second of the slow link")
    options.add_argument("--output", type=Path, help="write the table as markdown")
    options.add_argument("--json", type=Path, help="write every number")
    arguments = options.parse_args()
    result = environment("bench.overlap") | {"ranks": world.size}
    config = GPTTrainConfig(
        num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256, vocab_size=8192, mock_data=True,
        micro_batch_size=arguments.micro_batch_size, hidden_dropout=0.0, attention_dropout=0.0, lr=1e-4,
    )  # fmt: skip
    runners = []
    for rate in (None, arguments.rate):
        for overlap in (False, True):
            chosen = dataclasses.replace(config, overlap_grad_reduce=overlap)
            trainer = gpt_trainer(chosen, world, open_corpus(chosen))
            if rate is not None:
                slow_down(trainer.grid.data, rate)
            runners.append(Runner(overlap, rate, trainer))
    order = random.Random(0)  # the same on every rank
    for number in range(arguments.rounds + 1):
        for runner in order.sample(runners, len(runners)):
            runner.step()
            if number == 0:  # warming up
                runner.seconds.clear()
                runner.hidden.clear()
    if world.rank == 0:
        text = markdown(result, runners, arguments)
        print(text)
        if arguments.output:
            arguments.output.write_text(text)
        if arguments.json:
            measured = [{"overlap": one.overlap, "rate": one.rate, "seconds": one.seconds} for one in runners]
            arguments.json.write_text(json.dumps(result | {"runs": measured}, indent=1))
    for runner in runners:
        runner.trainer.close()


def markdown(result: dict[str, object], runners: list[Runner], arguments: argparse.Namespace) -> str:
    """The table for people."""
    lines = [
        *heading("Overlapping the reduction of gradients with backward", result),
        f"- {result['ranks']} data-parallel ranks, {arguments.rounds} rounds in random order; medians, quartiles",
        "- GPT of 4 layers, hidden 512, vocabulary 8192, sequence 256, fp32; samples a rank and step: "
        f"{arguments.micro_batch_size}",
        "",
        "| link | s per step without | with overlap | hidden | speed-up by overlap |",
        "|---|---:|---:|---:|---|",
    ]
    for without, overlapped in zip(runners[0::2], runners[1::2], strict=True):
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
    launch.run(main)
