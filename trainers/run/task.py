"""The interface between a run and its task: what is trained, and on what it is evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainers.training.interfaces import Objective
from trainers.training.trainer import Trainer

from .evaluation import HeldOut, Mean
from .report import Remarks


class TrainingTask(Protocol):
    """What `trainers.run.loop.train` runs: a trainer, what it is evaluated on, and what a report says besides losses.

    `trainers.tasks.gpt.GPTTask` is an example.
    """

    @property
    def trainer(self) -> Trainer:
        """A trainer with a new model. `train` resumes it if there is a checkpoint, and closes it."""

    @property
    def held_out(self) -> Sequence[HeldOut]:
        """The sources of the evaluation; empty for no evaluation."""

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of a sample, for the throughput."""

    @property
    def kept_by(self) -> str | None:
        """The one of `measures` of which the run keeps the checkpoint with the largest value; None to keep none."""

    def evaluation_objective(self) -> Objective[Any]:
        """What an evaluation averages: the trainer's objective, or one of the same terms that also keeps outputs.

        It is asked for at the begin of each evaluation.
        """

    def measures(self) -> Mapping[str, float]:
        """Measures of the evaluation that has just ended, besides its losses, by name. The same on all ranks.

        Collective over the trainer's world.
        """

    def require_exportable(self) -> None:
        """Raise ValueError that says why there is no class of transformers for this model. Not collective."""

    def export(self, folder: Path) -> None:
        """Write the model into ``folder`` for ``from_pretrained`` of transformers. Collective over the trainer's world.

        Raises UsageError, on all ranks, if there is no such class or if any rank cannot write.
        """

    def remarks(self, evaluated: Mapping[str, Mean] | None) -> Remarks:
        """The task's own part of the report, after training. Collective over the trainer's world.

        evaluated: the terms of the last evaluation (`Evaluation`), or None without evaluation.
        """
