"""The step of all contestants of ``bench.contest fields``: a U-Net on a field, weights, data, optimizer; and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from commengine import CartesianGrid, Communicator
from tplayers import UNet

#: the memory layouts of a batch of fields
LAYOUTS = {"channels-first": torch.contiguous_format, "channels-last": torch.channels_last}


@dataclass(frozen=True)
class FieldTask:
    """One training step, described completely: fp32, AdamW (fused), mean squared error, the same batch at every step.

    points: of each of the two axes. width, depth: of the U-Net, with batch normalisation. layout: one of LAYOUTS.
    weights: safetensors file with the initial values. lr: small, because AdamW's first steps have this size for every
    weight, and where a gradient is near zero, rounding decides their sign.
    """

    points: int = 512
    batch: int = 1
    channels: int = 4
    width: int = 16
    depth: int = 3
    layout: str = "channels-last"
    lr: float = 1e-4
    seed: int = 0
    weights: str = ""

    def fields(self) -> tuple[Tensor, Tensor]:
        """The whole input and the whole target, float32 [batch, channels, points, points]."""
        draws = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.channels, self.points, self.points)
        data = torch.randn(shape, generator=draws)
        return data, data.roll((1, 2), (2, 3)) * 0.5


def make_step(task: FieldTask, model: Any, data: Tensor, target: Tensor, ranks: int) -> Callable[[], float]:
    """One training step on this rank's block of the batch; its loss has the whole batch's as its mean over the ranks.

    model: an nn.Module, which gets the task's memory layout, as the block does.
    """
    layout = LAYOUTS[task.layout]
    model.to(memory_format=layout).train()
    data, target = data.contiguous(memory_format=layout), target.contiguous(memory_format=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, fused=True)
    values = task.batch * task.channels * task.points**2

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(data), target, reduction="sum") / values
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.item()) * ranks

    return step


@contextmanager
def contestant_on(world: Communicator, task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """Our step of a `FieldTask` with weights: `tplayers.UNet` on a field that is split in space. Collective."""
    given = FieldTask(**task)
    grid = CartesianGrid(world, (world.size, 1))
    field = grid.decompose((given.points, given.points))
    model = UNet(given.channels, given.channels, grid, field, width=given.width, depth=given.depth)
    model.load_state_dict(load_file(given.weights))
    data, target = (whole[:, :, *field.slices(grid.coords)] for whole in given.fields())
    step = make_step(given, model, data, target, world.size)
    yield step, f"blocks of {' x '.join(map(str, field.local_shape(grid.coords)))} points"
