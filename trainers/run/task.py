"""The interface between a run and its task: what is trained, and on what it is evaluated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.training.interfaces import Objective
from trainers.training.trainer import Trainer

from .evaluation import HeldOut, Mean


@dataclass(frozen=True)
class Remarks:
    """The part of a report that only the task can tell; a field that means nothing for a task keeps its default.

    unigram_entropy: the loss of a unigram model on the held-out tokens of the first term, in nats per token.
    sample_prompt, sample: a text, and the model's continuation of it, or the same text as the model completes it.
    measures: other numbers of the last evaluation, by name; each is a key of report.json.
    completes: the sample is the whole text, and not only what follows the prompt.
    """

    unigram_entropy: float | None = None
    sample_prompt: str = ""
    sample: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)
    completes: bool = False


class TrainingTask(ABC):
    """What `trainers.run.loop.train` runs: a trainer, what it is evaluated on, and what a report says besides losses.

    trainer: has a new model. `train` resumes it if there is a checkpoint, and closes it. held_out: the sources of the
    evaluation; empty for no evaluation. tokens_per_sample: for the throughput. kept_by: the one of `measures` of which
    the run keeps the checkpoint with the largest value; None to keep none.

    `trainers.tasks.gpt.GPTTask` is an example.
    """

    trainer: Trainer
    held_out: Sequence[HeldOut]
    tokens_per_sample: int
    kept_by: str | None = None

    def evaluation_objective(self) -> Objective[Any]:
        """What an evaluation averages: the trainer's objective, or one of the same terms that also keeps outputs.

        It is asked for at the begin of each evaluation.
        """
        return self.trainer.objective

    def measures(self) -> Mapping[str, float]:
        """Measures of the evaluation that has just ended, besides its losses, by name. The same on all ranks.

        Collective over the trainer's world.
        """
        return {}

    @abstractmethod
    def require_exportable(self) -> None:
        """Raise ValueError that says why there is no class of transformers for this model. Not collective."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the model into ``folder`` for ``from_pretrained`` of transformers. Collective over the trainer's world.

        Raises UsageError, on all ranks, if there is no such class or if any rank cannot write.
        """

    @abstractmethod
    def remarks(self, evaluated: Mapping[str, Mean] | None) -> Remarks:
        """The task's own part of the report, after training. Collective over the trainer's world.

        evaluated: the terms of the last evaluation (`Evaluation`), or None without evaluation.
        """
