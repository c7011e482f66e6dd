"""The U-Net of tplayers in plain torch, on the whole field in one process.

Its state dict has the names and shapes of `tplayers.UNet`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WholeUNet(nn.Module):
    """The arguments are those of `tplayers.UNet`, with the number of axes in place of a grid and a decomposition.

    level: arguments of all levels.
    """

    def __init__(
        self, in_channels: int, out_channels: int, axes: int, *, width: int = 32, depth: int = 3,
        dtype: torch.dtype | None = None, **level: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        level |= {"axes": axes, "dtype": dtype}
        self.down = nn.ModuleList([_WholeLevel(in_channels, width, **level)])
        self.pool = nn.ModuleList(getattr(nn, f"MaxPool{axes}d")(2) for _ in range(depth))
        self.up, self.merge = nn.ModuleList(), nn.ModuleList()
        for channels in (width * 2**level for level in range(1, depth + 1)):
            self.down.append(_WholeLevel(channels // 2, channels, **level))
        for channels in (width * 2**level for level in reversed(range(depth))):
            self.up.append(getattr(nn, f"ConvTranspose{axes}d")(2 * channels, channels, 2, stride=2, dtype=dtype))
            self.merge.append(_WholeLevel(2 * channels, channels, **level))
        self.last = getattr(nn, f"Conv{axes}d")(width, out_channels, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down[0](x)
        kept = [x]
        for pool, level in zip(self.pool, self.down[1:], strict=True):
            x = level(pool(x))
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            here = kept.pop()
            x = merge(torch.cat((here, up(x, output_size=here.shape[2:])), dim=1))
        return self.last(x)


class _WholeLevel(nn.Module):
    def __init__(
        self, ins: int, channels: int, *, axes: int, dtype: torch.dtype | None, kernel_size: int = 3,
        padding_mode: Any = "zeros", norm: str = "batch",
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv = nn.ModuleList(
            getattr(nn, f"Conv{axes}d")(
                one, channels, kernel_size, padding=kernel_size // 2, padding_mode=padding_mode, bias=norm == "none",
                dtype=dtype,
            )
            for one in (ins, channels)
        )  # fmt: skip
        made: dict[str, Any] = {
            "batch": lambda: getattr(nn, f"BatchNorm{axes}d")(channels, dtype=dtype),
            "group": lambda: nn.GroupNorm(max(channels // 8, 1), channels, dtype=dtype),
            "none": nn.Identity,
        }
        self.norm = nn.ModuleList(made[norm]() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.conv, self.norm, strict=True):
            x = F.relu_(norm(conv(x)))
        return x
