"""Measure the seconds that a checkpoint costs a training run: at once, in the background, and loaded again.

    mpiexec -n 2 python -m bench.saving --save runs --output saving.md --json saving.json
    mpiexec -n 2 python -m bench.saving --save /scratch --num-layers 24 --hidden-size 1024 --rounds 3

The ranks are one tensor group that trains a GPT in fp32. In each round they save the same state in three ways, in
random order:

- at once, as pretrain_gpt does, with checksums and with fsync;
- in the background (--async-save). Its cost is the copy, the time by which the steps are longer while the disk writes,
  and the time to give the checkpoint its name;
- by torch.save, each rank its own tensors into its own file, with fsync. Such files have no checksums, and only as many
  ranks can load them.

Then they load the checkpoint with and without comparing its checksums. All files are in a new folder inside --save,
which the command removes. The loads read from the page cache; where a cold disk is slower, its rate is the limit.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import progress, run_on_ranks
from bench.contests.driver import Spread, ratio
from commengine import Communicator, UsageError
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.checkpoints import checkpoint, pointer
from trainers.checkpoints.checkpoint_writer import WRITING
from trainers.checkpoints.run_state import CheckpointSaver
from trainers.data.corpus import open_corpus
from trainers.options import COUNT, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH
from trainers.run.step_agreement import StepAgreement
from trainers.tasks.gpt import GPTTrainConfig, gpt_trainer
from trainers.training.trainer import Trainer

COMMAND = "bench.saving"
AT_ONCE, BACKGROUND, TORCH_SAVE = "at once", "--async-save", "torch.save, one file a rank"
VERIFIED, UNVERIFIED = "load, checksums compared", "load, --no-verify-checkpoints"
WAYS = (AT_ONCE, BACKGROUND, TORCH_SAVE, VERIFIED, UNVERIFIED)
PLAIN_STEPS = 3  # before each background save, to know how long a step takes when the disk rests


class Saves:
    """One trainer, and the ways of saving and loading its state. Collective over its world, as are all methods."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder, self.world = trainer, folder, trainer.grid.world
        self.saver = CheckpointSaver(trainer)
        self.agreement = StepAgreement(self.world)
        self.agreement.add("writing", self.saver.state)
        self.details: dict[str, list[float]] = {"copy": [], "steps meanwhile": [], "slower by": [], "settle": []}

    def timed(self, work: Callable[[], object]) -> float:
        """The seconds of ``work`` from when all ranks begin to when all have ended."""
        self.world.barrier()
        start = time.perf_counter()
        work()
        self.world.barrier()
        return time.perf_counter() - start

    def at_once(self) -> float:
        """The seconds of a save that training waits for."""
        return self.timed(lambda: self.saver.start(background=False))

    def background(self) -> float:
        """The seconds by which a save in the background delays training."""
        step = self.trainer.step
        plain = statistics.median([self.timed(step) for _ in range(PLAIN_STEPS)])
        copy = self.timed(lambda: self.saver.start(background=True))
        busy = [self.timed(step)]
        while (agreed := self.agreement.exchange()["writing"]) == WRITING:
            busy.append(self.timed(step))
        settle = self.timed(lambda: self.saver.settle(agreed))
        longer = sum(busy) - len(busy) * plain
        for name, value in zip(self.details, (copy, len(busy), longer / (len(busy) * plain), settle), strict=True):
            self.details[name].append(value)
        return copy + longer + settle

    def torch_save(self) -> float:
        """The seconds that torch.save takes to put this rank's tensors safely on the disk."""

        def save() -> None:
            tensors = dict(checkpoint.named_values(self.trainer.model)) | dict(self.trainer.optimizer.tensors())
            with (self.folder / f"rank-{self.world.rank}.pt").open("wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())

        return self.timed(lambda: on_every_rank(self.world, save))

    def load(self, *, verify: bool) -> float:
        """The seconds until every rank has its parts of the newest checkpoint."""
        trainer = self.trainer
        found = self.folder / pointer.name_of(trainer.iteration)
        settings = replace(trainer.config, global_batch_size=trainer.batches.size)
        state = on_rank_zero(self.world, lambda: asdict(checkpoint.read_state(found, settings)))
        known = checkpoint.Progress(**state)
        return self.timed(
            lambda: checkpoint.load(found, known, trainer.model, trainer.optimizer, trainer.grid, verify=verify)
        )

    def round(self, order: random.Random) -> dict[str, float]:
        """The seconds of each way, in random order; the order must be the same on every rank."""
        ways: dict[str, Callable[[], float]] = {
            AT_ONCE: self.at_once,
            BACKGROUND: self.background,
            TORCH_SAVE: self.torch_save,
        }
        seconds = {name: ways[name]() for name in order.sample(list(ways), len(ways))}
        self.at_once()  # the newest checkpoint is of this iteration, whatever came last
        loads = {VERIFIED: True, UNVERIFIED: False}
        return seconds | {name: self.load(verify=loads[name]) for name in order.sample(list(loads), 2)}

    def bytes(self) -> int:
        """The size of a checkpoint's tensors."""
        found = self.folder / pointer.name_of(self.trainer.iteration)
        return sum((found / name).stat().st_size for name in (checkpoint.MODEL, checkpoint.OPTIMIZER))


@contextmanager
def prepared(world: Communicator, given: Namespace, folder: Path) -> Iterator[Saves]:
    """A trainer that saves into ``folder``: the options ``given``, all ranks in one tensor group. Collective."""
    config = GPTTrainConfig(
        num_layers=given.num_layers, hidden_size=given.hidden_size, num_attention_heads=given.num_attention_heads,
        seq_length=given.seq_length, vocab_size=given.vocab_size, mock_data=True, micro_batch_size=2,
        global_batch_size=2, train_iters=10**6, eval_iters=0, tensor_model_parallel_size=world.size, save=str(folder),
        keep_last=1,
    )  # fmt: skip
    config.validate(world.size)
    with closing(gpt_trainer(config, world, open_corpus(config))) as trainer:
        yield Saves(trainer, folder)


def measure(world: Communicator, given: Namespace, folder: Path) -> dict[str, Any]:
    """All that was measured, in ``folder``. Collective."""
    with prepared(world, given, folder) as saves:
        order = random.Random(0)  # the same on every rank
        saves.trainer.step()
        saves.round(order)  # the first save makes what later ones have
        for values in saves.details.values():
            values.clear()
        rounds = []
        with progress(world, given.rounds) as bar:
            for _ in range(given.rounds):
                rounds.append(saves.round(order))
                bar.update()
        size = on_rank_zero(world, saves.bytes)
        parameters = saves.trainer.parameters()
    seconds = {name: [one[name] for one in rounds] for name in WAYS}
    return {
        "ranks": world.size,
        "parameters": parameters,
        "bytes": size,
        "rows": [
            {
                "name": name,
                "seconds": values,
                "spread": asdict(Spread.of(values)),
                "ratio_to_at_once": asdict(ratio(values, seconds[AT_ONCE])),
            }
            for name, values in seconds.items()
        ],
        "background": {name: statistics.median(values) for name, values in saves.details.items()},
    }


def markdown(result: dict[str, Any], given: Namespace) -> str:
    """The result in markdown."""
    background = result["background"]
    lines = [
        *heading("Saving and loading a checkpoint", result),
        f"- GPT of {result['parameters'] / 1e6:.1f} million parameters in fp32 with AdamW's moments: "
        f"{result['bytes'] / 1e6:.0f} MB; {result['ranks']} ranks, one tensor group",
        f"- {given.rounds} alternating rounds: median [min to max]; ratios are of the same round",
        f"- {BACKGROUND}: the copy takes {background['copy']:.2f} s. While the threads write, "
        f"{background['steps meanwhile']:.0f} steps take {background['slower by']:.0%} longer. The checkpoint then "
        f"gets its name in {background['settle']:.2f} s. The table has the sum, by which training ends later",
        "",
        f"| way | s | GB/s | time over {AT_ONCE} |",
        "|---|---|---:|---|",
    ]
    for row in result["rows"]:
        spread = Spread(**row["spread"])
        rate = "" if row["name"] == BACKGROUND else f"{result['bytes'] / 1e9 / spread.median:.2f}"
        lines.append(f"| {row['name']} | {spread.text()} | {rate} | {Spread(**row['ratio_to_at_once']).text()} |")
    return "\n".join([*lines, ""])


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--save", metavar="DIR", required=True, help="an existing folder on the disk to measure")
    add("--rounds", type=int, valid=COUNT, default=7, help="rounds (default: %(default)s)")
    add("--num-layers", type=int, valid=LAYERS, default=8, help="(default: %(default)s)")
    add("--hidden-size", type=int, valid=WIDTH, default=640, help="(default: %(default)s)")
    add("--num-attention-heads", type=int, valid=HEADS, default=8, help="(default: %(default)s)")
    add("--seq-length", type=int, valid=LENGTH, default=128, help="(default: %(default)s)")
    add("--vocab-size", type=int, valid=VOCABULARY, default=8000, help="(default: %(default)s)")
    add_files(options)
    return options


def read(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The options. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    check_writable(output=given.output, json=given.json)
    if not Path(given.save).is_dir():
        raise ValueError(f"--save {given.save}: there is no such folder")
    return {**vars(given)}


def main(world: Communicator, argv: Sequence[str] | None = None) -> None:
    """Measure; rank 0 prints and writes. Collective over ``world``."""
    surroundings = environment(COMMAND)  # before measuring: the load average is that of other programs
    given = Namespace(**on_rank_zero(world, lambda: read(argv)))
    folder = Path(on_rank_zero(world, lambda: _new_folder(given.save)))
    try:
        result = surroundings | measure(world, given, folder)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    files = {"output": given.output, "json_file": given.json}
    on_rank_zero(world, lambda: publish(markdown(result, given), result, **files))


def _new_folder(save: str) -> str:
    try:
        return tempfile.mkdtemp(prefix="saving-", dir=save)
    except OSError as error:
        raise UsageError(f"--save {save}: {error.strerror}") from error


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
