"""The parts that the training of every transformer shares: its trainer and its task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from commengine import Communicator, ProcessGrid, Stream
from commengine.rank_zero import on_every_rank
from tplayers import BERT, GPT, initialize, use_canonical_shards
from trainers.config import TrainConfig, of_other_program, overlapped
from trainers.data.corpus import Corpus
from trainers.data.samples import Samples
from trainers.data.stream import SampleStream
from trainers.options import given, require
from trainers.run.evaluation import HeldOut
from trainers.training.interfaces import FiniteBatchSource, Objective
from trainers.training.precision import parameter_dtype
from trainers.training.trainer import Trainer
from trainers.weights.export import SmallFiles, export, require_exportable
from trainers.weights.opening import fill_model

from .transformer import TransformerTrainConfig


class NewBatches(Protocol):
    """Makes the batches of ``samples`` for one rank of ``data``, the data group.

    unusable: the error message about a batch with tokens outside of the vocabulary.
    """

    def __call__(
        self, samples: Samples | SampleStream, data: Communicator, unusable: str
    ) -> FiniteBatchSource[Any]: ...


def transformer_trainer(
    config: TransformerTrainConfig,
    world: Communicator,
    corpus: Corpus,
    new_model: Callable[[Communicator, torch.dtype, Stream | None], nn.Module],
    objective: Objective[Any],
    new_batches: NewBatches,
) -> Trainer:
    """A trainer of a new model on training samples of ``corpus``. Collective over ``world``.

    The model has its initial values, or those of ``--load hf:FOLDER``.

    config: valid for ``world``, with its vocabulary known (`TransformerTrainConfig.completed`).
    new_model: called with the tensor group, the parameters' dtype, and the stream on which the backward communicates.
    """

    def fresh() -> Trainer:
        samples = corpus.stream(config.seed)
        grid = ProcessGrid(world, tensor=config.tensor_model_parallel_size)
        dtype = parameter_dtype(bf16=config.bf16, fp16=config.fp16)
        model = new_model(grid.tensor, dtype, overlap_stream(config, grid))
        initialize(model, config.seed)
        if config.canonical_shards is not None:
            require(
                world.device.type == "cpu",
                "--deterministic: needs --device cpu; "
                f"on {world.device} products and reductions have orders of their own",
            )
            use_canonical_shards(model, grid.tensor, config.canonical_shards)
        unusable = outside_vocabulary(config, "", given(config, "data_path"))
        return Trainer(config, grid, model, objective, new_batches(samples, grid.data, unusable))

    if config.load is None or not of_other_program(config.load):
        return fresh()
    with contextlib.closing(on_every_rank(world, config.open_other)) as other:  # before the model takes its memory
        trainer = fresh()
        model = trainer.model
        assert isinstance(model, GPT | BERT)
        fill = partial(trainer.optimizer.fill, "master")
        fill_model(config.load, other, model, model.config, world, fill, tell_not_finite=True)
    return trainer


def overlap_stream(config: TrainConfig, grid: ProcessGrid) -> Stream | None:
    """The stream on which column-parallel layers communicate in the backward; None for no overlap. Collective."""
    asked = config.async_tensor_model_parallel_allreduce
    return grid.tensor.new_stream() if overlapped(asked, grid.world.device) and grid.tensor.size > 1 else None


class TransformerTask:
    """The part of a `trainers.run.loop.TrainingTask` that all transformers share; a subclass adds ``remarks``.

    config: valid and complete. corpus: its sources. trainer: on the corpus's training samples. new_batches: as for
    `transformer_trainer`.
    """

    def __init__(
        self, config: TransformerTrainConfig, corpus: Corpus, trainer: Trainer, new_batches: NewBatches
    ) -> None:
        self.corpus, self.trainer, self._config = corpus, trainer, config
        self.tokens_per_sample = config.seq_length
        self._evaluated = corpus.held_out(config.eval_iters, trainer.batches.size)
        self.held_out = [
            HeldOut(
                part.name, part.weight,
                new_batches(
                    part.held_out, trainer.grid.data,
                    outside_vocabulary(config, "held-out ", f"--data-path {part.name}"),
                ),
                part.iterations,
            )
            for part in self._evaluated
        ]  # fmt: skip

    @property
    def kept_by(self) -> str | None:
        """No measure: the run keeps its newest checkpoints."""
        return None

    def evaluation_objective(self) -> Objective[Any]:
        """The trainer's."""
        return self.trainer.objective

    def require_exportable(self) -> None:
        """Raise ValueError unless transformers has a class for the model."""
        require_exportable(self._model.config)

    def export(self, folder: Path) -> None:
        """See `TrainingTask.export`."""
        config = self._config
        export(self._model, self.trainer.grid, folder, SmallFiles(config.hf_files, config.tokenizer_model))

    @property
    def _model(self) -> GPT | BERT:
        model = self.trainer.model
        assert isinstance(model, GPT | BERT)
        return model

    def measures(self) -> Mapping[str, float]:
        """None: the losses say all, until the report."""
        return {}


def outside_vocabulary(config: TransformerTrainConfig, kind: str, data_path: str) -> str:
    """The error message about a token of ``data_path`` that is outside of the vocabulary."""
    return (
        f"a {kind}token lies outside the vocabulary of {config.vocab_size}: was {data_path} made with another "
        "tokenizer, or is --vocab-size too small?"
    )
