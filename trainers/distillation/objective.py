"""The losses of a student: those of the text, and those of the teacher's logits, of the same tokens."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from commengine import Communicator, UsageError
from commengine.options.declared import given
from commengine.rank_zero import on_every_rank
from tplayers import (
    Randomness,
    class_cross_entropy,
    vocab_parallel_cross_entropy,
    vocab_parallel_distillation_loss,
)
from trainers.data.samples import IGNORED
from trainers.settings import derived
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.tasks.bert import BERTTask
from trainers.tasks.gpt import GPTTask

from .teacher import Teacher, start_from

Task = TypeVar("Task", GPTTask, BERTTask)


class Distilled:
    """(1 - alpha) times the loss of each token, and alpha times that of the teacher's logits for it.

    config: of the run. teacher: on the last stage. A BERT's loss of sentence order is as without a teacher.
    """

    unit = "nats/token"

    def __init__(self, config: GPTSettings | BERTSettings, teacher: Teacher, *, binary_head: bool) -> None:
        self.alpha, self.temperature, self.teacher = config.distill_alpha, config.distill_temperature, teacher
        self.decoder = config.kind == GPTSettings.kind
        self.names = ("distillation_loss", "sop_loss") if binary_head else ("distillation_loss",)

    def __call__(self, model: Any, batch: Any, randomness: Randomness | None) -> tuple[Tensor, ...]:
        if self.decoder:
            own = model(batch.tokens, None, randomness)  # first: a stage without logits goes no further
            of_teacher = self.teacher.logits(lambda model, tokens: model(tokens), [batch.tokens])
            return (self._losses(model, own, of_teacher, batch.labels),)
        inputs = batch.tokens, batch.token_types, batch.padding, batch.positions
        own, order = model(*inputs[:3], positions=batch.positions, randomness=randomness)

        def call(model: Any, *of_all: Tensor | None) -> Tensor:
            found: Tensor = model(*of_all[:3], positions=of_all[3])[0]
            return found

        masked = self._losses(model, own, self.teacher.logits(call, inputs), batch.labels)
        if order is None:
            return (masked,)
        return masked, class_cross_entropy(order, batch.order_labels)

    def close(self) -> None:
        """Close the teacher. Collective, as its construction."""
        self.teacher.close()

    def _losses(self, model: Any, own: Tensor, of_teacher: Tensor, labels: Tensor) -> Tensor:
        comm, size = model.comm, model.config.vocab_size
        hard = vocab_parallel_cross_entropy(own, labels, comm, vocab_size=size)
        soft = vocab_parallel_distillation_loss(own, of_teacher, comm, temperature=self.temperature, vocab_size=size)
        return (1 - self.alpha) * hard + self.alpha * torch.where(labels != IGNORED, soft, 0.0)


def distilled_gpt(config: GPTSettings, world: Communicator) -> GPTTask:
    """The started task of a GPT, with its teacher if it has one. Collective over ``world``."""
    return _with_teacher(GPTTask.started(config, world), binary_head=False)


def distilled_bert(config: BERTSettings, world: Communicator) -> BERTTask:
    """The started task of a BERT, with its teacher if it has one. Collective over ``world``."""
    return _with_teacher(BERTTask.started(config, world), binary_head=not config.bert_no_binary_head)


def _with_teacher(task: Task, *, binary_head: bool) -> Task:
    config, trainer = task.config, task.trainer
    model: Any = trainer.model
    if config.teacher is None:
        return task
    teacher = Teacher(config, trainer.grid, model.config)
    if (asked := derived.student_layers(config)) is not None:
        words = given(config, "student_layers")

        def start() -> None:
            try:
                layers = [int(word) for word in asked.split(",")]
            except ValueError:
                raise UsageError(f"{words}: want numbers of layers, such as 0,2,4") from None
            start_from(teacher.model, model, layers, lambda name, one: trainer.optimizer.fill("master", name, one))

        on_every_rank(trainer.grid.world, start)
    task.plain, trainer.objective = trainer.objective, Distilled(config, teacher, binary_head=binary_head)
    return task
