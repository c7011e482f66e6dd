"""Dropout of a split field: a mask by global position, which no decomposition changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from commengine import CartesianGrid, Decomposition
from tplayers.rng import Randomness, dropout_mask_at, dropped, stable_hash

from .layer import FieldLayer


class FieldDropout(FieldLayer):
    """torch.nn.Dropout, or Dropout1d, 2d or 3d, of a field that is split over ``grid``: the identity in evaluation.

    p: the probability of a zero; the other values are scaled by 1 / (1 - p).
    grid, input: as of `FieldConv`; the result has the decomposition ``input``.
    whole_channels: False: each value is dropped by itself, as by torch.nn.Dropout. True: a channel of a sample is
        dropped at all points of the whole field, as by torch.nn.Dropout2d.

    The mask is a function of the `Randomness` that `set_randomness` gave, the layer's path in the model, and sample,
    channel and global position of a value. So it is the same on any number of ranks, and a recomputation
    (``torch.utils.checkpoint``) draws it again. The layer has one mask in a pass: give each place a layer of its own.

    forward: x [batch, channels, *local block] of any floating dtype -> the same shape. It sends nothing, but for the
    comparison of `FieldLayer.check`. Raises ValueError if p is not within 0 to 1; in training also if there was no
    `set_randomness`, or one with another number of samples than ``x`` has.
    """

    def __init__(self, p: float, grid: CartesianGrid, input: Decomposition, *, whole_channels: bool = False) -> None:
        super().__init__(grid, input)
        if not 0 <= p <= 1:
            raise ValueError(f"FieldDropout: p={p} must be a probability, from 0 to 1")
        self.p, self.whole_channels = p, whole_channels
        #: what the ranks compare: the layer's path, and seed, iteration and samples
        self.drawn_for: tuple[int | str, ...] = ()
        self._randomness: Randomness | None = None

    def _problem(self, x: Any) -> str | None:
        problem = super()._problem(x)
        if problem is not None or not self.training or self.p == 0:
            return problem
        if self._randomness is None:
            return "FieldDropout needs tplayers.set_randomness(model, randomness) before each pass in training"
        if len(self._randomness.base) != len(x):
            return f"FieldDropout has the randomness of {len(self._randomness.base)} samples, and x has {len(x)}"
        return None

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if not self.training or self.p == 0 or self._randomness is None:
            return x
        keys = self._randomness.keys(str(self.drawn_for[0]), range(x.shape[1])).to(x.device)
        x = _OfOnePass.apply(x, stable_hash(*self.drawn_for) % 2**31)  # type: ignore[no-untyped-call]
        return dropped(x, self.p, self._mask(keys).expand_as(x))

    def _mask(self, keys: Tensor) -> Tensor:
        """True where a value stays: [batch, channels, *local block], or [batch, channels, 1, ...] of whole channels."""
        rows = torch.zeros(1, dtype=torch.int64, device=keys.device)
        if self.whole_channels:
            return dropout_mask_at(self.p, keys, rows, rows, 1).view(*keys.shape, *[1] * self.axes)
        *others, last = [
            torch.arange(part.start, part.stop, device=keys.device) for part in self.input.slices(self.grid.coords)
        ]
        for positions, points in zip(others, self.input.shape, strict=False):
            rows = (rows[:, None] * points + positions).flatten()
        return dropout_mask_at(self.p, keys, rows, last, self.input.shape[-1]).view(*keys.shape, *self._local_shape)

    def extra_repr(self) -> str:
        return f"p={self.p}, whole_channels={self.whole_channels}, {super().extra_repr()}"


def set_randomness(model: nn.Module, randomness: Randomness) -> None:
    """Give every `FieldDropout` of ``model`` the source of its masks for the next pass. Not collective.

    randomness: ``Randomness(seed, iteration, samples)`` with a number for each sample of the batch, equal on all ranks
    that share a field. Replicas that see other samples give the numbers of theirs.

    Call it on the whole model before each forward in training, with another iteration or other samples. A recomputation
    needs the randomness of its forward: run the backward before the next call, or it raises
    ``torch.utils.checkpoint.CheckpointError``.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, FieldDropout):
            layer._randomness, layer.drawn_for = randomness, (path, *randomness.parts)


class _OfOnePass(torch.autograd.Function):
    """The identity. It saves a tensor without elements, of whose shape a number is part.

    ``torch.utils.checkpoint`` compares the shapes of what a forward saved and of what its recomputation saves. So it
    raises an error if the masks of the two would differ.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(x.new_empty((0, number)))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
