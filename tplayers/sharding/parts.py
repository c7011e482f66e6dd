"""The modules that stand between the layers of a sharded module: parameters, cuts, other blocks, rolls, flips."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from commengine import CartesianGrid, Decomposition
from tplayers.fields.dropout import FieldDropout
from tplayers.fields.layer import replicated
from tplayers.movement.halo import flip, roll
from tplayers.movement.operators import repartition


class SummedGradient(nn.Module):
    """The parameter that goes in, with a gradient that is summed over the ranks."""

    def __init__(self, grid: CartesianGrid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, parameter: Tensor) -> Tensor:
        return replicated(self.grid.comm, parameter)[0]


class PointLayer(nn.Module):
    """A layer of torch on each point by itself, or on a tensor that every rank has; its gradients are summed.

    It has the parameters and buffers of ``layer`` as its own, so that the state dict is that of ``layer``.
    """

    def __init__(self, layer: nn.Module, grid: CartesianGrid) -> None:
        super().__init__()
        self.grid = grid
        self._parameters.update(layer._parameters)
        self._buffers.update(layer._buffers)
        self._non_persistent_buffers_set = layer._non_persistent_buffers_set
        self.training = layer.training
        self._layer: nn.Module
        self.__dict__["_layer"] = layer  # not a child: the state dict has the names of the layer's own parameters

    def forward(self, x: Tensor) -> Tensor:
        present = {name: one for name, one in self._parameters.items() if one is not None}
        tensors = dict(zip(present, replicated(self.grid.comm, *present.values()), strict=True))
        tensors |= {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        self._layer.training = self.training
        return functional_call(self._layer, tensors, (x,))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return str(self._layer)


class OwnPart(nn.Module):
    """This rank's part, along ``space``, of a tensor that every rank has."""

    def __init__(self, grid: CartesianGrid, blocks: Decomposition, dims: dict[int, int]) -> None:
        """dims: the dimensions to cut, counted from the end, and the axis of each."""
        super().__init__()
        self.grid, self.blocks, self.dims = grid, blocks, dims

    def forward(self, x: Tensor) -> Tensor:
        slices = self.blocks.slices(self.grid.coords)
        for dim, axis in self.dims.items():
            x = x.narrow(dim, slices[axis].start, slices[axis].stop - slices[axis].start)
        return x

    def extra_repr(self) -> str:
        return f"{self.blocks.blocks}, {self.dims}"


class Blocks(nn.Module):
    """The same field in other blocks."""

    def __init__(self, grid: CartesianGrid, source: Decomposition, target: Decomposition) -> None:
        super().__init__()
        self.grid, self.source, self.target = grid, source, target

    def forward(self, x: Tensor) -> Tensor:
        return repartition(x, self.grid.comm, self.source, self.target)

    def extra_repr(self) -> str:
        return f"{self.source.blocks} -> {self.target.blocks}"


class Moved(nn.Module):
    """torch.roll or torch.flip along axes of space; ``shifts`` are those of a roll."""

    def __init__(
        self, grid: CartesianGrid, blocks: Decomposition, axes: tuple[int, ...], shifts: tuple[int, ...] | None
    ) -> None:
        super().__init__()
        self.grid, self.blocks, self.axes, self.shifts = grid, blocks, axes, shifts

    def forward(self, x: Tensor) -> Tensor:
        if self.shifts is None:
            return flip(x, self.grid, self.axes, decomposition=self.blocks)
        return roll(x, self.grid, self.shifts, self.axes, decomposition=self.blocks)

    def extra_repr(self) -> str:
        return f"{self.blocks.blocks}, {self.axes}, {self.shifts}"


class Reshaped(nn.Module):
    """A reshape that keeps the axes of space; of ``shape`` those are this rank's, and None is the batch."""

    def __init__(
        self, grid: CartesianGrid, blocks: Decomposition, dims: tuple[int, ...], shape: list[int | None]
    ) -> None:
        """dims: where the axes of space are in ``shape``."""
        super().__init__()
        self.grid, self.blocks, self.dims, self.shape = grid, blocks, dims, shape

    def forward(self, x: Tensor) -> Tensor:
        sizes = [x.shape[0] if size is None else size for size in self.shape]
        for dim, size in zip(self.dims, self.blocks.local_shape(self.grid.coords), strict=True):
            sizes[dim] = size
        return x.reshape(sizes)

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.blocks.blocks} at {self.dims}"


class SharedDropout(FieldDropout):
    """Dropout of [batch, features] that every rank has: every rank drops the same values."""

    def _problem(self, x: Any) -> str | None:
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
            return "dropout of a tensor that every rank has needs [batch, features]"
        return super()._problem(x.view(*x.shape, *[1] * self.axes).expand(-1, -1, *self._local_shape))

    def _mask(self, keys: Tensor) -> Tensor:
        return super()._mask(keys).flatten(1)


def meta_of(layer: nn.Module, x: Tensor) -> Tensor:
    """What ``layer`` makes of the traced tensor ``x``."""
    with torch.no_grad():
        return copy.deepcopy(layer).to("meta")(x)  # type: ignore[no-any-return]
