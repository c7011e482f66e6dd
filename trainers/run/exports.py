"""The folders that a run writes for transformers, beside its checkpoints."""

from __future__ import annotations

from pathlib import Path

from commengine import UsageError
from commengine.rank_zero import on_rank_zero
from trainers.checkpoints import pointer
from trainers.checkpoints.run_state import CheckpointSaver

from .metrics import Metrics
from .task import TrainingTask

#: the folder in a checkpoint's that transformers reads
FOLDER = "hf"


class Exports:
    """Writes the last checkpoint of a run for transformers, or each with ``--save-hf``. Collective, as its methods are.

    A run whose model transformers does not have says why. Raises UsageError, on all ranks, if it was asked for.
    """

    def __init__(self, task: TrainingTask, metrics: Metrics, saver: CheckpointSaver) -> None:
        self._task, self._saver = task, saver
        config = task.trainer.config
        self._save, self._every = Path(config.save or ""), bool(config.save_hf)

        def possible() -> bool:
            if config.save is None or config.save_hf is False:
                return False
            try:
                task.require_exportable()
            except ValueError as error:
                if config.save_hf:
                    raise UsageError(f"--save-hf: {error}") from error
                metrics.say(f"the run ends without a folder {FOLDER} for transformers: {error}")
                return False
            return True

        self._possible = bool(on_rank_zero(task.trainer.grid.world, possible))

    def after_save(self) -> None:
        """Write the checkpoint that has just been saved, if each is written."""
        if self._possible and self._every:
            self._write()

    def at_end(self) -> None:
        """Write the last checkpoint, if `after_save` has not."""
        if self._possible and not self._every:
            self._write()

    def _write(self) -> None:
        trainer = self._task.trainer
        self._saver.finish()  # the checkpoint has its name then
        trainer.optimizer.wait_for_parameters()
        self._task.export(self._save / pointer.name_of(trainer.iteration) / FOLDER)
