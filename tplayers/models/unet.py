"""UNet: the U-Net of Ronneberger et al. 2015 on a field that is split in space, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import CartesianGrid, Decomposition
from tplayers.fields.conv import FieldConv, FieldConvTranspose
from tplayers.fields.layer import check_geometry
from tplayers.fields.norm import FieldBatchNorm, FieldGroupNorm
from tplayers.fields.pool import FieldMaxPool
from tplayers.placement import require_one_of

#: the normalisations that a UNet can have
NORMS = ("batch", "group", "none")


class UNet(nn.Module):
    """A U-Net: ``depth`` halvings of the field, as many doublings, and a connection between equal sizes.

    in_channels, out_channels: of the field that goes in, and of the result.
    grid, input: the ranks, and the decomposition of the field. The result has the same decomposition. The field and the
        blocks may have any sizes, as long as the smallest level has a point for each rank on each axis (else
        ValueError).
    width: the channels of the first level; each level has twice as many as the one above it.
    padding_mode: of the convolutions, at the borders of the whole field (see `FieldConv`): one, or one for each axis.
    norm: "batch", "group" (8 channels a group, or all where fewer) or "none".

    Each level has two convolutions of ``kernel_size``, each followed by the normalisation and a ReLU. A maximum over
    2 x 2 ... points halves the field, and a transposed convolution doubles it. A last convolution of size 1 makes the
    result. Of an odd number of points the last one has no place in the halved field: n points become n // 2. On the way
    up the transposed convolution makes n again, as torch's does with ``output_size`` of the connection's field; nothing
    but its bias reaches the last point. Where the blocks of a level would leave a rank without a point, this axis is
    cut evenly on the levels below. Call `tplayers.initialize` on the model or a module that contains it.

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
        depth: int = 3,
        kernel_size: int = 3,
        padding_mode: str | Sequence[str] = "zeros",
        norm: str = "batch",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_one_of(NORMS, norm=norm)
        check_geometry("UNet", grid, input)
        for axis, (points, ranks) in enumerate(zip(input.shape, grid.shape, strict=True)):
            if points // 2**depth < ranks:
                raise ValueError(
                    f"UNet: depth={depth} leaves {points // 2**depth} of the {points} points of axis {axis}, which "
                    f"{ranks} ranks split: use a smaller depth, fewer ranks along this axis, or at least "
                    f"{ranks * 2**depth} points"
                )
        self.input = self.output = input

        def level_of(ins: int, channels: int, field: Decomposition) -> _Level:
            return _Level(ins, channels, kernel_size, grid, field, norm, padding_mode=padding_mode, dtype=dtype)

        self.down = nn.ModuleList([level_of(in_channels, width, input)])
        self.pool = nn.ModuleList()
        levels = [input]
        for level in range(1, depth + 1):
            self.pool.append(FieldMaxPool(2, grid, levels[-1]))
            levels.append(self.pool[-1].output)  # type: ignore[arg-type]
            channels = width * 2**level
            self.down.append(level_of(channels // 2, channels, levels[-1]))
        self.up, self.merge = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(depth)):
            channels = width * 2**level
            below, here = levels[level + 1], levels[level]
            odd = [points % 2 for points in here.shape]
            options: dict[str, Any] = {"stride": 2, "output_padding": odd, "output": here, "dtype": dtype}
            self.up.append(FieldConvTranspose(2 * channels, channels, 2, grid, below, **options))
            self.merge.append(level_of(2 * channels, channels, here))
        self.last = FieldConv(width, out_channels, 1, grid, input, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down[0](x)
        kept = [x]
        for pool, level in zip(self.pool, self.down[1:], strict=True):
            x = level(pool(x))
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((kept.pop(), up(x)), dim=1))
        return self.last(x)  # type: ignore[no-any-return]


class _Level(nn.Module):
    """Two convolutions, each with its normalisation and a ReLU."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        kernel_size: int,
        grid: CartesianGrid,
        input: Decomposition,
        norm: str,
        *,
        dtype: torch.dtype | None,
        **options: Any,
    ) -> None:
        """options: of the convolutions."""
        super().__init__()
        self.conv, self.norm = nn.ModuleList(), nn.ModuleList()
        for ins in (in_channels, channels):
            options |= {"padding": "same", "bias": norm == "none", "dtype": dtype}
            self.conv.append(FieldConv(ins, channels, kernel_size, grid, input, **options))
            if norm == "batch":
                self.norm.append(FieldBatchNorm(channels, grid, input, dtype=dtype))
            elif norm == "group":
                self.norm.append(FieldGroupNorm(max(channels // 8, 1), channels, grid, input, dtype=dtype))
            else:
                self.norm.append(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.conv, self.norm, strict=True):
            x = F.relu_(norm(conv(x)))
        return x
