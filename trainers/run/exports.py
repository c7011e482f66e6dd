"""The folders that a run writes for transformers, beside its checkpoints."""

from __future__ import annotations

from pathlib import Path

from commengine import UsageError
from commengine.errors import usage_errors
from commengine.rank_zero import on_rank_zero
from trainers.checkpoints import pointer
from trainers.checkpoints.run_state import CheckpointSaver
from trainers.weights.export import remove_leftovers

from .metrics import Metrics
from .task import TrainingTask

#: the folder in a checkpoint's that transformers reads
FOLDER = "hf"


def require_possible(task: TrainingTask) -> None:
    """Raise UsageError if ``--save-hf`` asks for a folder that transformers could not read. Not collective."""
    if task.trainer.config.save_hf:
        with usage_errors("--save-hf: "):
            task.require_exportable()


class Exports:
    """Writes the last checkpoint of a run for transformers, or each with ``--save-hf``. Collective, as its methods are.

    A run whose model transformers does not have, or that cannot write the folder, says why and goes on: nobody asked
    for the folder. With ``--save-hf`` it raises UsageError, on all ranks.
    """

    def __init__(self, task: TrainingTask, metrics: Metrics, saver: CheckpointSaver) -> None:
        self._task, self._saver, self._metrics = task, saver, metrics
        config = task.trainer.config
        self._save, self._every = Path(config.save or ""), bool(config.save_hf)

        def possible() -> bool:
            if config.save is None or config.save_hf is False:
                return False
            try:
                task.require_exportable()
            except ValueError as error:  # not with --save-hf: see `require_possible`
                metrics.say(f"the run ends without a folder {FOLDER} for transformers: {error}")
                return False
            return True

        self._possible = bool(on_rank_zero(task.trainer.grid.world, possible))

    def go_on(self) -> None:
        """Finish an export that a kill interrupted: of the checkpoint that the run goes on from, which is in --save."""
        folder = self._folder()

        def left_out() -> bool:
            remove_leftovers(folder)
            return not folder.is_dir()

        if on_rank_zero(self._task.trainer.grid.world, left_out):
            self.after_save()

    def after_save(self) -> None:
        """Write the checkpoint that has just been saved, if each is written."""
        if self._possible and self._every:
            self._write()

    def at_end(self) -> None:
        """Write the last checkpoint, if `after_save` has not."""
        if not self._possible or self._every:
            return
        try:
            self._write()
        except UsageError as error:  # on all ranks; the report matters more than a copy of the weights
            self._metrics.say(f"the run ends without a folder {FOLDER} for transformers: {error}")

    def _write(self) -> None:
        trainer = self._task.trainer
        self._saver.finish()  # the checkpoint has its name then
        trainer.optimizer.wait_for_parameters()
        self._task.export(self._folder())

    def _folder(self) -> Path:
        return self._save / pointer.name_of(self._task.trainer.iteration) / FOLDER
