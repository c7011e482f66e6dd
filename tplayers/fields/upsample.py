"""Upsampling of split fields."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from commengine import CartesianGrid, Decomposition
from tplayers.placement import require_one_of

from .geometry import Scaled
from .layer import FieldLayer, narrowed, natural

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


class FieldUpsample(FieldLayer):
    """torch.nn.Upsample of a field that is split over ``grid``, by whole numbers.

    scale_factor: one whole number, or one for each axis.
    mode: "nearest", or "linear" (torch's linear, bilinear or trilinear with align_corners=False).
    padding_mode: "replicate" as torch, or "circular": linear interpolation then wraps around.
    grid, input, output, errors: as of `FieldConv`.

    forward: x [batch, channels, *local block] -> [batch, channels, *local block of ``output``]. Collective.
    """

    def __init__(
        self,
        scale_factor: int | Sequence[int],
        grid: CartesianGrid,
        input: Decomposition,
        *,
        mode: str = "nearest",
        padding_mode: str = "replicate",
        output: Decomposition | None = None,
    ) -> None:
        super().__init__(grid, input)
        require_one_of(("nearest", "linear"), mode=mode)
        require_one_of(("replicate", "circular"), padding_mode=padding_mode)
        self.scale = natural(scale_factor, self.axes, "scale_factor", 1)
        self.mode = "nearest" if mode == "nearest" else _LINEAR[self.axes]
        rules = [Scaled(scale, int(mode == "linear")) for scale in self.scale]
        # At a physical border torch's interpolation repeats the last input itself.
        modes = [padding_mode if padding_mode == "circular" and mode == "linear" else "clipped"] * self.axes
        self.reads(rules, modes, output)
        self._wanted = [
            (part.start - read * scale, part.stop - part.start)
            for part, (read, _), scale in zip(self.output.slices(grid.coords), self.local.span, self.scale, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        y = F.interpolate(self.local(x), scale_factor=[float(scale) for scale in self.scale], mode=self.mode)
        return narrowed(y, self._wanted)
