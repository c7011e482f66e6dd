"""Save a trainer into its run's ``--save`` folder, and resume one from ``--load``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from commengine import UsageError
from commengine.rank_zero import on_rank_zero
from trainers.config import TrainConfig
from trainers.training.interfaces import ResumableBatchSource
from trainers.training.trainer import Trainer

from . import checkpoint, run_folder


def save(trainer: Trainer) -> None:
    """Write a checkpoint of the trainer's iteration into ``--save``, which must be given. Collective over its world."""
    assert trainer.config.save is not None
    scaler = None if trainer.scaler is None else trainer.scaler.to_json()
    optimizer = trainer.optimizer
    batches = trainer.batches
    data = batches.record(trainer.iteration) if isinstance(batches, ResumableBatchSource) else None
    progress = checkpoint.Progress(trainer.iteration, optimizer.updates, scaler, optimizer.masters, data)
    settings = _settings(trainer).to_json()
    checkpoint.save(Path(trainer.config.save), progress, trainer.model, optimizer, settings, trainer.grid)


def resume(trainer: Trainer) -> list[str] | None:
    """Load the checkpoint that ``--load`` names. None if there is none to load (`run_folder.checkpoint_to_load`).

    Returns lines for the user: where the run goes on, and what changed in its data. Collective over the trainer's
    world. Raises UsageError, on all ranks, where the checkpoint is of another run or cannot be read.
    """
    if trainer.config.load is None:
        return None
    settings = _settings(trainer)

    def find() -> list[Any]:
        found = run_folder.checkpoint_to_load(settings)
        return [None, None] if found is None else [str(found), asdict(checkpoint.read_state(found, settings))]

    found, state = on_rank_zero(trainer.grid.world, find)
    if found is None:
        return None
    progress = checkpoint.Progress(**state)
    checkpoint.load(Path(found), progress, trainer.model, trainer.optimizer, trainer.grid)
    trainer.continue_from(progress.iteration, progress.loss_scaler)
    lines = [f"starting from iteration {progress.iteration} of {trainer.config.load}"]
    if progress.data is not None and isinstance(trainer.batches, ResumableBatchSource):
        try:
            lines += trainer.batches.continue_from(progress.iteration, progress.data)
        except ValueError as error:  # on all ranks, because all have the same record
            raise UsageError(f"--load: {Path(found) / 'state.json'}: {error}") from error
    return lines


def _settings(trainer: Trainer) -> TrainConfig:
    """The trainer's settings, with the size of the global batch if that was left open."""
    return replace(trainer.config, global_batch_size=trainer.batches.size)
