"""Save a trainer into its run's ``--save`` folder, and resume one from ``--load``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from commengine.errors import usage_errors
from commengine.rank_zero import on_rank_zero
from trainers.settings.commands import TrainSettings
from trainers.training.interfaces import ResumableBatchSource
from trainers.training.trainer import Trainer

from . import checkpoint, history, pointer
from .checkpoint_writer import DONE, WRITING, CheckpointWriter


class CheckpointSaver:
    """Writes the checkpoints of a run, one after the other, and removes those that ``--keep-last`` does not keep.

    With ``--async-save`` a checkpoint is written in the background. After each step the ranks agree on the largest
    `state` of them all and give it to `settle`; at the end of the run they call `finish`.

    lost: as for `CheckpointWriter`.
    """

    def __init__(self, trainer: Trainer, lost: Callable[[], str | None] = lambda: None) -> None:
        self._trainer, self._lost = trainer, lost
        self._writer: CheckpointWriter | None = None

    def start(self, *, background: bool | None = None) -> None:
        """Save the trainer's iteration into ``--save``, which must be given. Collective over the trainer's world.

        background: None for what ``--async-save`` says; then the checkpoint before is finished first, so that there is
        one copy in memory at most. Raises UsageError, on all ranks, if any rank cannot write.
        """
        self.finish()
        trainer, config = self._trainer, self._trainer.config
        assert config.save is not None
        scaler = None if trainer.scaler is None else trainer.scaler.to_json()
        optimizer, batches = trainer.optimizer, trainer.batches
        data = batches.record(trainer.iteration) if isinstance(batches, ResumableBatchSource) else None
        progress = checkpoint.Progress(trainer.iteration, optimizer.updates, scaler, optimizer.masters, data)
        later = config.async_save if background is None else background
        self._writer = CheckpointWriter(
            Path(config.save), progress, trainer.model, optimizer, asdict(_settings(trainer)), trainer.grid,
            kind=config.kind, background=later, lost=self._lost,
        )  # fmt: skip
        if not later:
            self.finish()

    def state(self) -> int:
        """This rank's flag of the ranks' agreement: `CheckpointWriter.state`, or DONE. Not collective."""
        return DONE if self._writer is None else self._writer.state

    def settle(self, agreed: int) -> None:
        """Finish the checkpoint if all ranks have written their shares, or one has failed; otherwise do nothing.

        agreed: the largest `state` of all ranks, the same on all. Collective. Raises UsageError as `start` does.
        """
        if agreed != WRITING:
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written has its name. Collective. Raises UsageError as `start`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.finish()
            self._keep()

    def point_to_best(self) -> None:
        """Make the checkpoint of the trainer's iteration, which is complete, the best one of ``--save``. Collective.

        The best one stays whatever ``--keep-last`` says. Raises UsageError as `start` does.
        """
        folder, name = Path(self._trainer.config.save or ""), pointer.name_of(self._trainer.iteration)
        on_rank_zero(self._trainer.grid.world, lambda: pointer.point_to(folder, name, pointer.BEST))
        self._keep()

    def _keep(self) -> None:
        """Remove the checkpoints that ``--keep-last`` does not keep."""
        config = self._trainer.config
        if config.keep_last is not None:
            folder, last, every = Path(config.save or ""), config.keep_last, config.keep_every
            on_rank_zero(self._trainer.grid.world, lambda: pointer.keep(folder, last, every))


def begin(trainer: Trainer) -> history.Beginning:
    """What the trainer's run begins with (`history.begin`). Collective over its world; raises UsageError on all."""
    settings = _settings(trainer)
    return history.Beginning(**on_rank_zero(trainer.grid.world, lambda: asdict(history.begin(settings))))


def resume(trainer: Trainer, beginning: history.Beginning | None = None) -> list[str] | None:
    """Load the checkpoint with which the run begins. None if there is none to load (`history.begin`).

    beginning: None to decide it here. Returns lines for the user: where the run goes on, and what changed in its data.
    Collective over the trainer's world. Raises UsageError, on all ranks, where the checkpoint is of another run or
    cannot be read.
    """
    if trainer.config.load is None:
        return None
    settings = _settings(trainer)
    beginning = beginning or begin(trainer)
    found = beginning.found
    if found is None:
        return None
    read = lambda: asdict(checkpoint.read_state(Path(found), settings))  # noqa: E731
    progress = checkpoint.Progress(**on_rank_zero(trainer.grid.world, read))
    checkpoint.load(
        Path(found), progress, trainer.model, trainer.optimizer, trainer.grid, verify=settings.verify_checkpoints
    )
    trainer.continue_from(progress.iteration, progress.loss_scaler)
    of = trainer.config.load if beginning.repeats is None else trainer.config.save
    lines = [f"starting from iteration {progress.iteration} of {of}"]
    if progress.data is not None and isinstance(trainer.batches, ResumableBatchSource):
        with usage_errors(f"--load: {Path(found) / 'state.json'}: "):  # on all ranks: all have the same record
            lines += trainer.batches.continue_from(progress.iteration, progress.data)
    return lines


def _settings(trainer: Trainer) -> TrainSettings:
    """The trainer's settings, with the size of the global batch if that was left open."""
    return replace(trainer.config, global_batch_size=trainer.batches.size)
