"""The layers of a sharded module that are no layers of fields: on each point, or of tensors that every rank has."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from commengine import CartesianGrid
from tplayers.fields.dropout import FieldDropout
from tplayers.fields.layer import replicated


class PointLayer(nn.Module):
    """A layer of torch on each point by itself, or on a tensor that every rank has; its gradients are summed.

    It has the parameters and buffers of ``layer`` as its own, so that the state dict is that of ``layer``.
    """

    def __init__(self, layer: nn.Module, grid: CartesianGrid) -> None:
        super().__init__()
        self.grid = grid
        self._layer: nn.Module
        # It is not a child: the state dict has the names of the layer's own parameters.
        self.__dict__.update(_layer=layer, _parameters=layer._parameters, _buffers=layer._buffers)
        self._non_persistent_buffers_set = layer._non_persistent_buffers_set
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        present = {name: one for name, one in self._parameters.items() if one is not None}
        tensors = dict(zip(present, replicated(self.grid.comm, *present.values()), strict=True))
        tensors |= {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        self._layer.training = self.training
        return functional_call(self._layer, tensors, (x,))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return str(self._layer)


class SharedDropout(FieldDropout):
    """Dropout of [batch, features] that every rank has: every rank drops the same values."""

    def _problem(self, x: Any) -> str | None:
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
            return "dropout of a tensor that every rank has needs [batch, features]"
        return super()._problem(x.view(*x.shape, *[1] * self.axes).expand(-1, -1, *self._local_shape))

    def _mask(self, keys: Tensor) -> Tensor:
        return super()._mask(keys).flatten(1)
