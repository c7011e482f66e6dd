"""The parts that the training of every transformer shares: its trainer and its task."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from commengine import Communicator, ProcessGrid, Stream
from commengine.options.declared import given, require
from commengine.rank_zero import on_every_rank
from tplayers import BERT, GPT, initialize, use_canonical_shards
from tplayers.models.bert import BERTEncoder
from trainers.config import TrainConfig, of_other_program, overlapped
from trainers.data.corpus import Corpus
from trainers.run.evaluation import HeldOut
from trainers.run.task import TrainingTask
from trainers.training.precision import parameter_dtype
from trainers.training.trainer import Trainer
from trainers.weights.configurations import TaskHead
from trainers.weights.export import SmallFiles, export, require_exportable
from trainers.weights.opening import fill_model

from .transformer import TransformerTrainConfig

Config = TypeVar("Config", bound=TransformerTrainConfig)


def transformer_trainer(config: TransformerTrainConfig, world: Communicator, corpus: Corpus) -> Trainer:
    """A trainer of a new model on training samples of ``corpus``. Collective over ``world``.

    The model has its initial values, or those of ``--load hf:FOLDER``.

    config: valid for ``world``, with its vocabulary known (`TransformerTrainConfig.completed`).
    """

    def fresh() -> Trainer:
        samples = corpus.stream(config.seed)
        grid, model = new_model(config, world, config.stage)
        if config.canonical_shards is not None:
            require(
                world.device.type == "cpu",
                "--deterministic: needs --device cpu; "
                f"on {world.device} products and reductions have orders of their own",
            )
            use_canonical_shards(model, grid.tensor, config.canonical_shards, config.canonical_parts)
        batches = config.new_batches(samples, grid.data, given(config, "data_path"))
        return Trainer(config, grid, model, config.objective(), batches)

    if config.load is None or not of_other_program(config.load):
        return fresh()
    with contextlib.closing(on_every_rank(world, config.open_other)) as other:  # before the model takes its memory
        trainer = fresh()
        model = trainer.model
        assert isinstance(model, GPT | BERT)
        fill = partial(trainer.optimizer.fill, "master")
        fill_model(config.load, other, model, model.config, world, fill)
    return trainer


def new_model(
    config: TrainConfig, world: Communicator,
    network: Callable[[ProcessGrid, torch.dtype, Stream | None], nn.Module],
) -> tuple[ProcessGrid, Any]:  # fmt: skip
    """The grid of a run's ranks, and its model with initial values. Collective over ``world``.

    network: called with the grid, the parameters' dtype, and the stream on which column-parallel layers
    communicate in the backward; None for no overlap.
    """
    grid = config.grid(world)
    overlaps = overlapped(config.async_tensor_model_parallel_allreduce, world.device) and grid.tensor.size > 1
    dtype = parameter_dtype(bf16=config.bf16, fp16=config.fp16)
    model = network(grid, dtype, grid.tensor.new_stream() if overlaps else None)
    initialize(model, config.seed)
    return grid, model


class ExportedTask(TrainingTask):
    """A task whose model transformers has, too. A subclass gives what is missing here."""

    head: TaskHead | None = None

    def require_exportable(self) -> None:
        """Raise ValueError unless transformers has a class for the model."""
        require_exportable(self._model.config)

    def export(self, folder: Path) -> None:
        """See `TrainingTask.export`."""
        export(self._model, self.trainer.grid, folder, self.small_files(), self.head)

    @abstractmethod
    def small_files(self) -> SmallFiles:
        """The files of an export besides the weights."""

    @property
    def _model(self) -> GPT | BERTEncoder:
        model = self.trainer.model
        assert isinstance(model, GPT | BERTEncoder)
        return model


class TransformerTask(ExportedTask, Generic[Config]):
    """The part of a task that all transformers share; a subclass adds ``remarks``.

    config: valid and complete. Collective over ``world``, as are its methods.
    """

    def __init__(self, config: Config, world: Communicator) -> None:
        self.config, self.corpus = config, on_every_rank(world, config.open_corpus)
        self.trainer = trainer = transformer_trainer(config, world, self.corpus)
        self.tokens_per_sample = config.seq_length
        self._evaluated = self.corpus.held_out(config.eval_iters, trainer.batches.size)
        self.held_out = []
        for part in self._evaluated:
            batches = config.new_batches(part.held_out, trainer.grid.data, f"--data-path {part.name}", "held-out ")
            self.held_out.append(HeldOut(part.name, part.weight, batches, part.iterations))

    def small_files(self) -> SmallFiles:
        return SmallFiles(self.config.hf_files, self.config.tokenizer_model)
