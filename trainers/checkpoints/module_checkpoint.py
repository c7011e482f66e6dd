"""Checkpoints of a module that a program of one's own trains: the files of a run's checkpoints, without a run.

See `trainers.checkpoints.checkpoint` for the files. They hold global tensors under the names of ``state_dict()``, so
they can be read at any number of ranks, and ``model.safetensors`` by any program that reads that format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from commengine import ProcessGrid, UsageError
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.training.optimizer_state import OptimizerState

from . import checkpoint, parallel_safetensors, pointer
from .checkpoint import OPTIMIZER, Progress
from .checkpoint_writer import CheckpointWriter
from .parallel_safetensors import lay_out

#: the keys of ``settings`` in ``state.json``
_OF_OPTIMIZER, _OF_USER = "optimizer", "extra"


def save(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, grid: ProcessGrid, *, step: int,
    extra: Mapping[str, Any], keep: int | None,
) -> None:  # fmt: skip
    """Write the checkpoint of ``step`` into ``folder``. Collective over the grid's world. See `DataParallel.save`."""
    state = OptimizerState(module, optimizer, grid.world, grid.data)
    parts = checkpoint.model_placements(module)

    def described() -> dict[str, Any]:
        refuse_extra_state(module)
        lay_out({name: (tensor.dtype, parts[name]) for name, tensor in checkpoint.named_values(module)})
        lay_out(state.described())
        return {_OF_OPTIMIZER: state.settings(), _OF_USER: as_json(extra)}

    settings = on_every_rank(grid.world, described)
    on_rank_zero(grid.world, lambda: folder.mkdir(parents=True, exist_ok=True))
    CheckpointWriter(folder, Progress(step, step), module, state, settings, grid).finish()
    if keep is not None:
        on_rank_zero(grid.world, lambda: pointer.keep(folder, keep, None))


def refuse_extra_state(module: nn.Module) -> None:
    """Raise ValueError that names the first module with ``get_extra_state``: the files hold tensors only."""
    for name, one in module.named_modules():
        if type(one).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"{name or type(one).__name__} has get_extra_state, which a checkpoint does not hold: keep its values "
                "in buffers, or in extra"
            )


def as_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` as it will be read again. Raises ValueError unless it is JSON."""
    try:
        return dict(json.loads(json.dumps(extra, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra cannot be saved as JSON: {error}") from error


def load(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, grid: ProcessGrid
) -> tuple[int, dict[str, Any]] | None:
    """Fill module and optimizer. Collective over the grid's world. See `DataParallel.load`."""
    name = on_rank_zero(grid.world, lambda: None if (at := checkpoint.find(folder)) is None else str(at))
    if name is None:
        return None
    found = Path(name)
    saved = on_every_rank(grid.world, lambda: checkpoint.saved_state(found, verify=True))
    if _OF_OPTIMIZER not in saved.settings:  # on every rank
        raise UsageError(f"{found}: is the checkpoint of a training command, not of DataParallel.save")
    of_optimizer: Any = saved.settings[_OF_OPTIMIZER]
    on_every_rank(grid.world, lambda: checkpoint.compare(found, grid.world.rank, grid.world.size))
    checkpoint.load_model(found, module, grid.world, verify=False)
    if optimizer is not None:
        state = OptimizerState(module, optimizer, grid.world, grid.data)

        def read() -> None:
            with checkpoint.named_faults(found):
                parts, wanted = state.wanted(of_optimizer)
                tensors = parallel_safetensors.read(found / OPTIMIZER, parts, wanted=wanted, any_dtype=parts)
                state.fill(of_optimizer, dict(tensors))

        on_every_rank(grid.world, read)
    extra: Any = saved.settings[_OF_USER]
    return saved.iteration, extra
