"""Record a training step: open its trainer, make the folder of the recording, and save each rank's trace there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.step_study.traced_step import trace_steps
from commengine import Communicator, Trace, UsageError
from commengine.rank_zero import on_every_rank
from trainers.data.corpus import open_corpus
from trainers.options import make_writable
from trainers.run.startup import read_config
from trainers.tasks.gpt import GPTTrainConfig, gpt_trainer
from trainers.training.trainer import Trainer


def read_traceable(rest: Sequence[str], command: str, ranks: int) -> GPTTrainConfig:
    """The settings of pretrain_gpt's options, if `trace_steps` can trace such steps. Rank 0 alone calls it.

    Raises UsageError or ValueError that names the option at fault.
    """
    config = read_config(GPTTrainConfig, rest, command, ranks)
    if config.compile:
        raise UsageError(
            "--compile: a compiled graph runs no hooks, so its collectives belong to no layer; leave it out"
        )
    return config


def open_trainer(config: GPTTrainConfig, comm: Communicator) -> Trainer:
    """The trainer of a study's steps. Collective over ``comm``; the caller closes it."""
    return gpt_trainer(config, comm, on_every_rank(comm, lambda: open_corpus(config)))


def make_folder(folder: Path, option: str, *, overwrite: bool) -> None:
    """Make the folder of a recording, on one rank.

    An older recording is deleted with ``overwrite``, so that no file of it is left among the new ones. Without it,
    the folder must not hold a recording. option: the option that names the folder, for the UsageError.
    """
    make_writable(option, folder)
    older = sorted(folder.glob("rank-*.jsonl"))
    if older and not overwrite:
        raise UsageError(
            f"{option} {folder}: holds a recording of {len(older)} ranks; give another folder, or --overwrite"
        )
    for file in older:
        file.unlink()


def save(world: Communicator, folder: Path, trace: Trace) -> None:
    """Write this rank's trace to the recording's folder. Collective: an error on one rank is one on every rank."""
    on_every_rank(world, lambda: trace.save(folder / f"rank-{world.rank}.jsonl"))


def record(world: Communicator, config: GPTTrainConfig, folder: Path, warmup: int) -> Trace:
    """Trace one step after ``warmup`` others, and save it in a folder that `make_folder` made. Collective."""
    trainer = open_trainer(config, world)
    (trace,) = trace_steps(trainer, warmup, 1, lambda: None).recordings
    save(world, folder, trace)
    trainer.close()
    return trace
