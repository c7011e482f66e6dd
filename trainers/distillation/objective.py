"""The losses of a student: those of the text, and those of the teacher's logits, of the same tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from commengine import Communicator, UsageError
from commengine.options.declared import given
from commengine.rank_zero import on_every_rank
from tplayers import (
    Randomness,
    class_cross_entropy,
    cosine_distillation_loss,
    gather_from_tensor_parallel_region,
    kept_output,
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
    """For each token (1 - alpha) times its own loss, alpha times that of the teacher's logits, and that of the angle.

    The angle is between the last hidden states of both models (``distill_cosine``). config: of the run. teacher: on the
    last stage. A BERT's loss of sentence order is as without a teacher.
    """

    unit = "nats/token"

    def __init__(self, config: GPTSettings | BERTSettings, teacher: Teacher, *, binary_head: bool) -> None:
        self.alpha, self.temperature, self.teacher = config.distill_alpha, config.distill_temperature, teacher
        self.cosine = config.distill_cosine
        self.call: Callable[..., tuple[Tensor, Tensor | None]] = _of_gpt
        #: what the model takes of a micro-batch
        self.inputs: tuple[str, ...] = ("tokens",)
        if config.kind == BERTSettings.kind:
            self.call, self.inputs = _of_bert, ("tokens", "token_types", "padding", "positions")
        self.names = ("distillation_loss", "sop_loss") if binary_head else ("distillation_loss",)

    def __call__(self, model: Any, batch: Any, randomness: Randomness | None) -> tuple[Tensor, ...]:
        inputs = [getattr(batch, name) for name in self.inputs]
        with contextlib.ExitStack() as block:
            hidden = block.enter_context(kept_output(model.last_module)) if self.cosine and model.part.last else []
            own, order = self.call(model, randomness, *inputs)  # first: a stage without logits goes no further
        logits, theirs = self.teacher.outputs(lambda model, *inputs: self.call(model, None, *inputs)[0], inputs)
        size = model.config.vocab_size
        hard = vocab_parallel_cross_entropy(own, batch.labels, model.comm, vocab_size=size)
        soft = vocab_parallel_distillation_loss(own, logits, model.comm, temperature=self.temperature, vocab_size=size)
        of_teacher = self.alpha * soft
        if theirs is not None:
            of_teacher = of_teacher + self.cosine * _apart(model, hidden[0], theirs, getattr(batch, "positions", None))
        losses = (1 - self.alpha) * hard + torch.where(batch.labels != IGNORED, of_teacher, 0.0)
        return (losses,) if order is None else (losses, class_cross_entropy(order, batch.order_labels))

    def close(self) -> None:
        """Close the teacher. Collective, as its construction."""
        self.teacher.close()


def _of_gpt(model: Any, randomness: Randomness | None, tokens: Tensor) -> tuple[Tensor, None]:
    return model(tokens, None, randomness), None


def _of_bert(
    model: Any, randomness: Randomness | None, tokens: Tensor, types: Tensor | None, padding: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    found: tuple[Tensor, Tensor | None] = model(tokens, types, padding, positions=positions, randomness=randomness)
    return found


def _apart(model: Any, own: Tensor, theirs: Tensor, positions: Tensor | None) -> Tensor:
    """The cosine losses [b, n] of the tokens with labels. own: with sequence_parallel this rank's shard [s / p, b, h].

    theirs: [s, b, h]. positions: of the tokens [b, n]; None for all.
    """
    if model.sequence_parallel:
        mine = cosine_distillation_loss(own, theirs.chunk(model.comm.size)[model.comm.rank])
        found = gather_from_tensor_parallel_region(mine, model.comm, dim=0)
    else:
        found = cosine_distillation_loss(own, theirs)
    return found.t() if positions is None else found.gather(0, positions.t()).t()


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
