"""FNO: a Fourier neural operator (Li et al. 2021) on a field that is split in space, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import CartesianGrid, Decomposition
from tplayers.fields.conv import FieldConv
from tplayers.fields.spectral import SpectralConv


class FNO(nn.Module):
    """A Fourier neural operator: ``depth`` layers of a spectral convolution beside one of size 1, with GELU between.

    in_channels, out_channels: of the field that goes in, and of the result. Where the position matters, give the
        coordinates as further channels.
    grid, input: the ranks, and the decomposition of the field, which is also the result's.
    width: the channels inside. modes: the Fourier modes of each axis that `SpectralConv` keeps.

    Call `tplayers.initialize` on the model or a module that contains it.

    forward: x [batch, in_channels, *local block] -> [batch, out_channels, *local block]. Collective over the grid;
    every rank must run the backward.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        grid: CartesianGrid,
        input: Decomposition,
        *,
        width: int = 32,
        modes: int | Sequence[int] = 12,
        depth: int = 4,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input = self.output = input

        def pointwise(ins: int, outs: int) -> FieldConv:
            return FieldConv(ins, outs, 1, grid, input, dtype=dtype)

        self.lift = pointwise(in_channels, width)
        self.spectral = nn.ModuleList(SpectralConv(width, width, modes, grid, input, dtype=dtype) for _ in range(depth))
        self.skip = nn.ModuleList(pointwise(width, width) for _ in range(depth))
        self.project = nn.ModuleList((pointwise(width, 2 * width), pointwise(2 * width, out_channels)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for number, (spectral, skip) in enumerate(zip(self.spectral, self.skip, strict=True)):
            x = spectral(x) + skip(x)
            if number < len(self.spectral) - 1:
                x = F.gelu(x)
        return self.project[1](F.gelu(self.project[0](x)))  # type: ignore[no-any-return]
