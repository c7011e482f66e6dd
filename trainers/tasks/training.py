"""The model of a run, and tasks whose model transformers has, too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from commengine import Communicator, ProcessGrid, Stream
from tplayers import Transformer, initialize
from trainers.run.startup import grid_of
from trainers.run.task import TrainingTask
from trainers.settings import derived
from trainers.settings.commands import TrainSettings
from trainers.training.precision import parameter_dtype
from trainers.weights.configurations import TaskHead
from trainers.weights.export import SmallFiles, export, require_exportable


def new_model(
    config: TrainSettings, world: Communicator,
    network: Callable[[ProcessGrid, torch.dtype, Stream | None], nn.Module],
) -> tuple[ProcessGrid, Any]:  # fmt: skip
    """The grid of a run's ranks, and its model with initial values. Collective over ``world``.

    network: called with the grid, the parameters' dtype, and the stream on which column-parallel layers
    communicate in the backward; None for no overlap.
    """
    grid = grid_of(config, world)
    overlaps = derived.overlapped(config.async_tensor_model_parallel_allreduce, world.device) and grid.tensor.size > 1
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
    def _model(self) -> Transformer:
        model = self.trainer.model
        assert isinstance(model, Transformer)
        return model
