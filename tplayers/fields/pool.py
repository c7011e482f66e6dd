"""Pooling of split fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import CartesianGrid, Decomposition

from .geometry import Sliding
from .layer import FieldLayer, natural

_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class _FieldPool(FieldLayer):
    """Pooling over ``kernel_size`` points. fill: what stands in the padding."""

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        grid: CartesianGrid,
        input: Decomposition,
        *,
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        output: Decomposition | None = None,
        fill: float = -math.inf,
    ) -> None:
        super().__init__(grid, input)
        self.kernel = natural(kernel_size, self.axes, "kernel_size", 1)
        self.stride = self.kernel if stride is None else natural(stride, self.axes, "stride", 1)
        self.dilation = natural(dilation, self.axes, "dilation", 1)
        self.padding, self.ceil_mode = natural(padding, self.axes, "padding", 0), ceil_mode
        each = zip(self.kernel, self.stride, self.dilation, self.padding, self.padding, strict=True)
        self._rules = [Sliding(*numbers, ceil=ceil_mode) for numbers in each]
        if any(2 * rule.before > rule.reach + 1 for rule in self._rules):  # as torch
            raise ValueError(f"padding={padding} must be at most half of kernel_size={kernel_size}")
        self.reads(self._rules, ["zeros"] * self.axes, output, fill=fill)


class FieldMaxPool(_FieldPool):
    """torch.nn.MaxPool1d, 2d or 3d of a field that is split over ``grid``.

    kernel_size, stride (None: the kernel), padding, dilation, ceil_mode: as torch's. grid, input, output, errors: as of
    `FieldConv`.

    forward: x [batch, channels, *local block] -> [batch, channels, *local block of ``output``]. Collective.
    """

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return _MAX_POOL[self.axes](self.local(x), self.kernel, self.stride, self.local.native, self.dilation)


class FieldAvgPool(_FieldPool):
    """torch.nn.AvgPool1d, 2d or 3d of a field that is split over ``grid``.

    kernel_size, stride (None: the kernel), padding, ceil_mode, count_include_pad: as torch's. grid, input, output,
    errors: as of `FieldConv`.

    forward: x [batch, channels, *local block] -> [batch, channels, *local block of ``output``]. Collective.
    """

    counts: Tensor | None

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        grid: CartesianGrid,
        input: Decomposition,
        *,
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        output: Decomposition | None = None,
    ) -> None:
        options: dict[str, Any] = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode, "output": output}
        super().__init__(kernel_size, grid, input, **options, fill=0.0)
        self.count_include_pad, counts = count_include_pad, None
        if ceil_mode or (not count_include_pad and any(rule.before for rule in self._rules)):
            slices = self.output.slices(grid.coords)
            counts = inputs_counted(self._rules, input.shape, slices, count_include_pad) / math.prod(self.kernel)
        self.register_buffer("counts", counts, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        y: Tensor = _AVG_POOL[self.axes](self.local(x), self.kernel, self.stride, self.local.native)
        return y if self.counts is None else y / self.counts.to(y.dtype)


def inputs_counted(
    rules: Sequence[Sliding], points: Sequence[int], outputs: Sequence[slice], with_padding: bool
) -> Tensor:
    """Return how many inputs each of ``outputs`` is the mean of: a float64 tensor of their shape.

    with_padding: the padding counts as inputs. A window of ceil_mode may reach beyond it, and that never counts.
    """
    counts = torch.ones((), dtype=torch.float64, device="cpu")
    for rule, n, part in zip(rules, points, outputs, strict=True):
        first, last = (-rule.before, n + rule.after) if with_padding else (0, n)
        spans = [rule.reads(o, o + 1) for o in range(part.start, part.stop)]
        inside = [min(stop, last) - max(start, first) for start, stop in spans]
        counts = counts.unsqueeze(-1) * torch.tensor(inside, dtype=torch.float64, device="cpu")
    return counts
