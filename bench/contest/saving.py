"""The seconds that a checkpoint costs a training run: at once, in the background, and loaded again.

    mpiexec -n 2 python -m bench.contest saving --save runs --output saving.md --json saving.json
    mpiexec -n 2 python -m bench.contest saving --save /scratch --num-layers 24 --hidden-size 1024 --rounds 3

The ranks are one tensor group that trains a GPT in fp32. In each round they save the same state in three ways, and load
it in two, in random order:

- at once, as pretrain_gpt does, with checksums and with fsync;
- in the background (--async-save). Its cost is the copy, the time by which the steps are longer while the disk writes,
  and the time to give the checkpoint its name;
- by torch.save, each rank its own tensors into its own file, with fsync. Such files have no checksums, and only as many
  ranks can load them.

A load reads a checkpoint that was saved just before, with and without comparing its checksums. All files are in a new
folder inside --save, which the command removes. The loads read from the page cache; where a cold disk is slower, its
rate is the limit. All other options are pretrain_gpt's.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.command.start import progress
from bench.contest.parts.base import Case, Contest
from bench.contest.parts.on_ranks import new_folder
from bench.step_study.recorder import open_trainer
from bench.timing.turns import slowest, take_turns
from commengine import Communicator
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.checkpoints import checkpoint, pointer
from trainers.checkpoints.checkpoint_writer import WRITING
from trainers.checkpoints.run_state import CheckpointSaver
from trainers.run.startup import read_config
from trainers.run.step_agreement import agree
from trainers.tasks.gpt import GPTTrainConfig
from trainers.training.trainer import Trainer

AT_ONCE, BACKGROUND, TORCH_SAVE = "at once", "--async-save", "torch.save, one file a rank"
VERIFIED, UNVERIFIED = "load, checksums compared", "load, --no-verify-checkpoints"
#: pretrain_gpt's options, of which others win
SMALL = (
    "--num-layers", "8", "--hidden-size", "640", "--num-attention-heads", "8", "--seq-length", "128", "--vocab-size",
    "8000", "--mock-data", "--micro-batch-size", "2", "--global-batch-size", "2", "--train-iters", "1000000",
    "--eval-iters", "0",
)  # fmt: skip
PLAIN_STEPS = 3  # before each background save, to know how long a step takes when the disk rests


class Saves:
    """One trainer, and the ways of saving and loading its state. Collective over its world, as are all methods."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder, self.world = trainer, folder, trainer.grid.world
        self.saver = CheckpointSaver(trainer)
        self.timed = partial(slowest, self.world)
        #: of each save in the background: seconds of the copy, steps meanwhile, by which share these are longer, and
        #: seconds until the checkpoint has its name
        self.details: list[tuple[float, ...]] = []

    def at_once(self) -> float:
        """The seconds of a save that training waits for."""
        return self.timed(lambda: self.saver.start(background=False))

    def background(self) -> float:
        """The seconds by which a save in the background delays training."""
        step = self.trainer.step
        plain = statistics.median([self.timed(step) for _ in range(PLAIN_STEPS)])
        copy = self.timed(lambda: self.saver.start(background=True))
        busy = [self.timed(step)]
        while (agreed := agree(self.world, None, self.saver.state())[0]) == WRITING:
            busy.append(self.timed(step))
        settle = self.timed(lambda: self.saver.settle(agreed))
        longer = sum(busy) - len(busy) * plain
        self.details.append((copy, len(busy), longer / (len(busy) * plain), settle))
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

    def bytes(self) -> int:
        """The size of a checkpoint's tensors."""
        found = self.folder / pointer.name_of(self.trainer.iteration)
        return sum((found / name).stat().st_size for name in (checkpoint.MODEL, checkpoint.OPTIMIZER))


@contextmanager
def prepared(world: Communicator, given: Any, folder: Path) -> Iterator[Saves]:
    """A trainer that saves into ``folder``. Collective."""
    config = replace(GPTTrainConfig(**given.gpt), save=str(folder), keep_last=1)
    with closing(open_trainer(config, world)) as trainer:
        yield Saves(trainer, folder)


class SavingContest(Contest):
    """Saving and loading a checkpoint."""

    title = "Saving and loading a checkpoint"
    on_ranks = True
    passes_on = True

    def add_options(self, add: Callable[..., Any]) -> None:
        """The folder."""
        add("--save", metavar="DIR", required=True, help="an existing folder on the disk to measure")

    def check(self, given: Any) -> None:
        """The model's options are pretrain_gpt's."""
        ranks = given.world_size
        words = [*SMALL, *given.rest, "--tensor-model-parallel-size", str(ranks)]
        given.gpt = read_config(GPTTrainConfig, words, "python -m bench.contest saving", ranks).to_json()

    def measure(self, given: Any, world: Communicator) -> Sequence[Case]:
        """All ways of saving and loading. Collective over ``world``."""
        with new_folder(world, given.save) as folder, prepared(world, given, folder) as saves:
            saves.trainer.step()

            def load(*, verify: bool) -> float:
                saves.at_once()  # the newest checkpoint is of this iteration, whatever came before
                return saves.load(verify=verify)

            turns: dict[str, Callable[[], float]] = {
                AT_ONCE: saves.at_once, BACKGROUND: saves.background, TORCH_SAVE: saves.torch_save,
                VERIFIED: partial(load, verify=True), UNVERIFIED: partial(load, verify=False),
            }  # fmt: skip
            with progress(world, given.rounds + 1) as bar:  # the first save makes what later ones have
                seconds = take_turns(turns, given.rounds, warmup=1, after=bar.update)
            saves.at_once()
            size = on_rank_zero(world, saves.bytes)
            background = [statistics.median(values) for values in zip(*saves.details[1:], strict=True)]
            numbers = {"bytes": size, "parameters": saves.trainer.parameters(), "background": background}
        case = Case({}, seconds, numbers=numbers)
        for name in seconds:
            case.facts[name] = {"GB/s": "" if name == BACKGROUND else size / 1e9 / case.spread(name).median}
        return [case]

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The model, and the parts of a save in the background."""
        (case,) = cases
        copy, steps, slower, settle = case.numbers["background"]
        return [
            f"- GPT of {case.numbers['parameters'] / 1e6:.1f} million parameters in fp32 with AdamW's moments: "
            f"{case.numbers['bytes'] / 1e6:.0f} MB; one tensor group",
            f"- {BACKGROUND}: the copy takes {copy:.2f} s. While the threads write, {steps:.0f} steps take "
            f"{slower:.0%} longer. The checkpoint then gets its name in {settle:.2f} s. The table has the sum, by "
            "which training ends later",
        ]


CONTEST = SavingContest()
