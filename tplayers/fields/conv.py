"""Convolutions of split fields (Dryden et al. 2019), and their transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import CartesianGrid, Decomposition, Stream
from tplayers.adjoint_pair import apply_or
from tplayers.placement import Normal, Placement, add_parameter

from .geometry import Sliding, Transposed
from .halo_convolution import ConvolveApart, HaloConvolution
from .layer import FieldLayer, narrowed, natural, per_axis

_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _Convolution(FieldLayer):
    """What a convolution and a transposed one have in common: their numbers and parameters."""

    takes_own_dtype = True

    def __init__(
        self, grid: CartesianGrid, input: Decomposition, channels: Sequence[int], groups: int, **numbers: Any
    ) -> None:
        """channels: in and out. numbers: kernel_size, stride and dilation as the caller gave them."""
        super().__init__(grid, input, channels[0])
        if groups < 1 or any(number % groups for number in channels):
            given = "in_channels={} and out_channels={}".format(*channels)
            raise ValueError(f"groups={groups} must divide {given}")
        self.kernel, self.stride, self.dilation = (natural(numbers[n], self.axes, n, 1) for n in numbers)
        self.groups = groups

    def add_filter(self, channels: tuple[int, int], bias: int, dtype: torch.dtype | None) -> None:
        """Add the parameters, replicated. channels: of the weight. bias: its numbers, or 0 for none."""
        shape = (*channels, *self.kernel)
        # torch: uniform between -s and s, s = 1 / sqrt(inputs), which are all dimensions of the weight but the first
        init = Normal(1 / math.sqrt(3 * math.prod(shape[1:])))
        add_parameter(self, "weight", Placement(shape, init), dtype)
        add_parameter(self, "bias", Placement((bias,), init) if bias else None, dtype)


class FieldConv(_Convolution):
    """torch.nn.Conv1d, Conv2d or Conv3d of a field that is split over ``grid``.

    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as torch's; kernel, stride,
        padding and dilation are one number or one for each axis. padding="same" keeps the field's shape (stride 1),
        also with an even kernel.
    grid, input: the ranks, and the input's decomposition. ``output`` is the result's: an output belongs to the rank of
        its centre.
    padding_mode: "zeros", "reflect", "replicate" or "circular" at the borders of the whole field; one for all axes, or
        one for each. Circular padding wraps around whether ``grid`` is periodic or not.
    output: the result's decomposition where it must be another one.
    overlap_stream: a stream of the grid's communicator on which the halo travels while the block is convolved, in
        the forward and in the backward, if the layer keeps the field's shape (`halo_convolution`). Every rank gives
        one, or none (docs/fields.md says when it pays).

    The state dict has the names and shapes of torch's layer. Every rank holds all of the parameters; their gradients
    are summed over the grid in the backward, by one all-reduce, and have the same bits on all ranks. The initial values
    have the standard deviation of torch's.

    forward: x [batch, in_channels, *local block] -> [batch, out_channels, *local block of ``output``]. Collective over
    the grid; every rank must run the backward. Raises errors as `FieldLayer.check` does.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        grid: CartesianGrid,
        input: Decomposition,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str | Sequence[str] = "zeros",
        output: Decomposition | None = None,
        overlap_stream: Stream | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        numbers = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        super().__init__(grid, input, (in_channels, out_channels), groups, **numbers)
        self.overlap_stream = overlap_stream
        reach = [d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True)]
        if isinstance(padding, str):
            if padding not in ("same", "valid") or (padding == "same" and max(self.stride) > 1):
                raise ValueError(f"padding={padding!r} must be numbers, 'valid', or 'same' with stride 1")
            pads = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach]
        else:
            pads = [(p, p) for p in natural(padding, self.axes, "padding", 0)]
        each = zip(self.kernel, self.stride, self.dilation, pads, strict=True)
        rules = [Sliding(k, s, d, before, after) for k, s, d, (before, after) in each]
        self.padding_mode = per_axis(padding_mode, self.axes, "padding_mode")
        self.reads(rules, self.padding_mode, output)
        self._halo = HaloConvolution(rules, grid, input, self.local, groups)
        self.add_filter((out_channels, in_channels // groups), out_channels * bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if not self._halo.apart or torch.is_autocast_enabled(x.device.type):
            return self._together(x)
        apart = (ConvolveApart, x, *self.summed_parameters(), self._halo, self.overlap_stream)
        return apply_or(lambda: (self._together(x),), *apart)[0]  # type: ignore[no-any-return]

    def _together(self, x: Tensor) -> Tensor:
        """By one convolution of the block with its halo, which differentiates any number of times."""
        local = self.local(x)
        return self._halo.convolved(local, *self.summed_parameters())


class FieldConvTranspose(_Convolution):
    """torch.nn.ConvTranspose1d, 2d or 3d of a field that is split over ``grid``.

    in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups, bias: as torch's; grid,
    input, output, parameters and errors: as of `FieldConv`. torch has no other padding than zeros here.

    forward: x [batch, in_channels, *local block] -> [batch, out_channels, *local block of ``output``]. Collective.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        grid: CartesianGrid,
        input: Decomposition,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        output: Decomposition | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        numbers = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        super().__init__(grid, input, (in_channels, out_channels), groups, **numbers)
        padding = natural(padding, self.axes, "padding", 0)
        more = natural(output_padding, self.axes, "output_padding", 0)
        if any(m >= max(s, d) for m, s, d in zip(more, self.stride, self.dilation, strict=True)):
            raise ValueError(f"output_padding={output_padding} must be smaller than the stride or the dilation")
        rules = list(map(Transposed, self.kernel, self.stride, self.dilation, padding, more))
        self.reads(rules, ["zeros"] * self.axes, output)
        ends = [self.output.bounds(axis)[c : c + 2] for axis, c in enumerate(grid.coords)]
        crops = [rule.crop(*span) for rule, span in zip(rules, ends, strict=True)]
        self._wanted = [(skip, stop - start) for (skip, _), (start, stop) in zip(crops, ends, strict=True)]
        self._missing = tuple(missing for _, missing in crops)
        self.add_filter((in_channels, out_channels // groups), out_channels * bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        local = self.local(x)
        weight, bias = self.summed_parameters()
        y = _CONV_TRANSPOSE[self.axes](local, weight, bias, self.stride, 0, self._missing, self.groups, self.dilation)
        return narrowed(y, self._wanted)
