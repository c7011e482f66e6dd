"""FinetuneTask: fine-tuning as `trainers.run.loop.train` runs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from commengine import Communicator, ProcessGrid, UsageError
from commengine.errors import usage_errors
from commengine.files.reading import InputFileError
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.checkpoints import run_folder
from trainers.data.corpus import read_tokenizer, require_vocabulary
from trainers.data.samples import Samples
from trainers.data.stream import SampleStream, Source
from trainers.finetuning.completing import shape
from trainers.run.evaluation import HeldOut, Mean
from trainers.run.task import Remarks
from trainers.tasks.training import ExportedTask, new_model
from trainers.trained import load_trained
from trainers.training.trainer import Trainer
from trainers.weights.export import SmallFiles

from .batches import KeptLogits, LabelledBatches, LabelLoss
from .downstream import DownstreamTask, PairTask, Part, RACETask
from .settings import FinetuneSettings
from .spans import SQuADTask

_TASKS: dict[str, type[DownstreamTask]] = {"mnli": PairTask, "qqp": PairTask, "squad": SQuADTask, "race": RACETask}


class TaskFiles(NamedTuple):
    """What the files of a task hold: its training samples, and the parts of its dev data."""

    task: DownstreamTask
    train: Part
    dev: list[Part]


def open_task(config: FinetuneSettings) -> DownstreamTask:
    """The task, with the model's tokenizer. config: `completing.opened`. It reads files; not collective.

    Raises UsageError if the tokenizer is not the model's.
    """
    path = config.tokenizer_model
    assert config.task is not None and path is not None
    tokenizer = read_tokenizer(path)
    with usage_errors(f"{path}: "):
        tokenizer.wordpieces()
    require_vocabulary(tokenizer, path, config.vocab_size)
    return _TASKS[config.task](config, tokenizer)


def read_files(config: FinetuneSettings, world: Communicator) -> TaskFiles:
    """The training and dev data, on every rank. Collective. Raises UsageError, on all ranks, for a damaged file."""

    def read() -> TaskFiles:
        task = open_task(config)
        (train,) = task.read("train")
        return TaskFiles(task, train, _dev(task) if config.eval_iters else [])

    return on_every_rank(world, read)


def _dev(task: DownstreamTask) -> list[Part]:
    try:
        return task.read("dev")
    except InputFileError as error:
        raise InputFileError(f"{error} (--eval-iters 0 trains without dev data)") from error


def held_out(
    config: FinetuneSettings, parts: Sequence[Part], task: DownstreamTask, data: Communicator
) -> list[HeldOut]:
    """The sources of an evaluation of ``parts``: every sample of each, once."""
    total = sum(len(part.samples) for part in parts)
    found = []
    for part in parts:
        batches = task_batches(config, part.samples, task, data, part.name, config.micro_batch_size * data.size)
        found.append(HeldOut(part.name, len(part.samples) / total, batches, len(batches)))
    return found


def task_batches(
    config: FinetuneSettings, samples: Samples | SampleStream, task: DownstreamTask, data: Communicator, name: str,
    size: int,
) -> LabelledBatches:  # fmt: skip
    """The global batches of ``size`` samples. name: of the part."""
    assert config.vocab_size is not None
    return LabelledBatches(
        samples, size=size, micro=config.micro_batch_size, data=data, part=name, vocab_size=config.vocab_size,
        unusable=f"{name}: a token is outside of the vocabulary: is --tokenizer-model of another model?",
        fixed=task.fixed_length or config.compile,
        multiple=config.tensor_model_parallel_size if config.sequence_parallel else 1,
    )  # fmt: skip


class FinetuneTask(ExportedTask):
    """The fine-tuning of a BERT. Collective over ``world``, as are its methods.

    The encoder of a new run begins with the parameters of ``--pretrained-checkpoint``, and its head with random ones.

    config: complete, with its schedule (`completing.scheduled`). files: of the task.
    """

    def __init__(self, config: FinetuneSettings, world: Communicator, files: TaskFiles) -> None:
        task, train = files.task, files.train
        self.config, self.task, self.dev, self.head = config, task, files.dev, task.task_head
        grid, model = new_model(
            config, world, lambda grid, dtype, stream: task.model(shape(config, world.size), grid.tensor, dtype, stream)
        )
        if not on_rank_zero(world, lambda: run_folder.checkpoint_to_load(config) is not None):
            assert config.pretrained_checkpoint is not None
            new = copy_pretrained(config.pretrained_checkpoint, model, grid, verify=config.verify_checkpoints)
            if world.rank == 0 and "pooler.weight" in new:
                said = "has no pooler (--bert-no-binary-head), so the one of the new model is random, as its head is"
                print(f"{config.pretrained_checkpoint}: {said}", file=sys.stderr, flush=True)
        name = str(Path(config.data or "") / train.name)
        stream = SampleStream([Source(name, train.samples.identity(), Fraction(1), train.samples)], config.seed)
        assert config.global_batch_size is not None
        batches = task_batches(config, stream, task, grid.data, train.name, config.global_batch_size)
        self.trainer = Trainer(config, grid, model, LabelLoss(task.unit), batches)
        self.held_out = held_out(config, self.dev, task, grid.data)
        self.kept_by = task.kept_by
        self.tokens_per_sample = train.samples[0].tokens.size
        self._kept: KeptLogits | None = None
        self._measured: dict[str, float] = {}

    def evaluation_objective(self) -> LabelLoss:
        """The training's loss, which also keeps the logits."""
        self._kept = KeptLogits({part.name: part.samples for part in self.dev})
        return LabelLoss(self.task.unit, self._kept)

    def measures(self) -> Mapping[str, float]:
        """The task's measures of the dev data."""
        assert self._kept is not None
        logits = self._kept.gathered(self.trainer.grid.data)
        self._measured = on_rank_zero(self.trainer.grid.world, lambda: self.task.measures(self.dev, logits))
        return self._measured

    def small_files(self) -> SmallFiles:
        return SmallFiles(tokenizer_model=self.config.tokenizer_model)

    def remarks(self, evaluated: Mapping[str, Mean] | None) -> Remarks:
        """The measures of the last evaluation."""
        return Remarks(measures={} if evaluated is None else self._measured)


def copy_pretrained(folder: str, model: nn.Module, grid: ProcessGrid, *, verify: bool) -> list[str]:
    """Give ``model`` the parameters of the BERT in ``folder``, by name. Returns the names of those that it lacks.

    Collective over the grid's world. Raises UsageError, on all ranks, if there is no BERT of this shape.
    """
    trained = load_trained(folder, grid, kind="bert", dtype=torch.float32, verify=verify)
    missing, _ = model.load_state_dict(dict(trained.model.named_parameters()), strict=False)
    if any("token_type" in name for name in missing):  # on every rank
        raise UsageError(f"{folder}: its BERT has no token types, as --bert-no-token-types says; tasks need two")
    return list(missing)
