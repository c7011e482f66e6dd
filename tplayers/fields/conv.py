"""Convolutions of split fields (Dryden et al. 2019), and their transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import CartesianGrid, Decomposition, Stream
from tplayers.placement import Normal, Placement, add_parameter

from .geometry import Sliding, Transposed
from .halo_convolution import HaloConvolution, convolve_apart, convolve_together
from .layer import FieldLayer, LocalInput, narrowed, natural, per_axis, replicated

_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class FieldConv(FieldLayer):
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
        the forward and in the backward. Every rank gives one, or none (docs/fields.md says when it pays).

    The state dict has the names and shapes of torch's layer. Every rank holds all of the parameters; their gradients
    are summed over the grid in the backward, by one all-reduce, and have the same bits on all ranks. The initial values
    have the standard deviation of torch's.

    forward: x [batch, in_channels, *local block] -> [batch, out_channels, *local block of ``output``]. Collective over
    the grid; every rank must run the backward. Raises errors as `FieldLayer.check` does.
    """

    takes_own_dtype = True

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
        super().__init__(grid, input, in_channels)
        kernel = natural(kernel_size, self.axes, "kernel_size", 1)
        self.stride = natural(stride, self.axes, "stride", 1)
        self.dilation = natural(dilation, self.axes, "dilation", 1)
        self.groups, self.overlap_stream = groups, overlap_stream
        _check_groups(in_channels, out_channels, groups)
        reach = [d * (k - 1) for k, d in zip(kernel, self.dilation, strict=True)]
        if isinstance(padding, str):
            if padding not in ("same", "valid") or (padding == "same" and max(self.stride) > 1):
                raise ValueError(f"padding={padding!r} must be numbers, 'valid', or 'same' with stride 1")
            pads = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach]
        else:
            pads = [(p, p) for p in natural(padding, self.axes, "padding", 0)]
        numbers = zip(kernel, self.stride, self.dilation, pads, strict=True)
        rules = [Sliding(k, s, d, before, after) for k, s, d, (before, after) in numbers]
        modes = per_axis(padding_mode, self.axes, "padding_mode")
        self.padding_mode = modes
        self.local = LocalInput(grid, input, rules, modes, output=output, layer="FieldConv")
        self.output = self.local.output
        self._apart = HaloConvolution(
            rules, self.output.slices(grid.coords), input.slices(grid.coords), self.local, grid.comm, groups
        )
        add_filter(self, (out_channels, in_channels // groups, *kernel), out_channels, bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        weight, bias = filter_of(self)
        apart = self.local.meets_block and not self.local.is_block
        if not apart or torch.is_autocast_enabled(x.device.type):
            return convolve_together(x, weight, bias, self._apart)
        return convolve_apart(x, weight, bias, self._apart, self.overlap_stream)


class FieldConvTranspose(FieldLayer):
    """torch.nn.ConvTranspose1d, 2d or 3d of a field that is split over ``grid``.

    in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups, bias: as torch's; grid,
    input, output, parameters and errors: as of `FieldConv`. torch has no other padding than zeros here.

    forward: x [batch, in_channels, *local block] -> [batch, out_channels, *local block of ``output``]. Collective.
    """

    takes_own_dtype = True

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
        super().__init__(grid, input, in_channels)
        kernel = natural(kernel_size, self.axes, "kernel_size", 1)
        self.stride = natural(stride, self.axes, "stride", 1)
        self.dilation = natural(dilation, self.axes, "dilation", 1)
        padding = natural(padding, self.axes, "padding", 0)
        more = natural(output_padding, self.axes, "output_padding", 0)
        if any(m >= max(s, d) for m, s, d in zip(more, self.stride, self.dilation, strict=True)):
            raise ValueError(f"output_padding={output_padding} must be smaller than the stride or the dilation")
        self.groups = groups
        _check_groups(in_channels, out_channels, groups)
        numbers = zip(kernel, self.stride, self.dilation, padding, more, strict=True)
        rules = [Transposed(k, s, d, p, m) for k, s, d, p, m in numbers]
        self.local = LocalInput(grid, input, rules, ["zeros"] * self.axes, output=output, layer="FieldConvTranspose")
        self.output = self.local.output
        ends = [self.output.bounds(axis)[c : c + 2] for axis, c in enumerate(grid.coords)]
        crops = [rule.crop(*span) for rule, span in zip(rules, ends, strict=True)]
        self._wanted = [(skip, stop - start) for (skip, _), (start, stop) in zip(crops, ends, strict=True)]
        self._missing = tuple(missing for _, missing in crops)
        add_filter(self, (in_channels, out_channels // groups, *kernel), out_channels, bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        weight, bias = filter_of(self)
        y = _CONV_TRANSPOSE[self.axes](
            self.local(x), weight, bias, self.stride, 0, self._missing, self.groups, self.dilation
        )
        return narrowed(y, self._wanted)


def add_filter(
    layer: FieldLayer, shape: tuple[int, ...], out_channels: int, bias: bool, dtype: torch.dtype | None
) -> None:
    """Give ``layer`` the parameters of a convolution, replicated; their standard deviation is that of torch's.

    shape: of the weight; torch counts all of its dimensions but the first as the inputs of an output.
    """
    init = Normal(1 / math.sqrt(3 * math.prod(shape[1:])))  # torch: uniform between -s and s, s = 1 / sqrt(inputs)
    add_parameter(layer, "weight", Placement(shape, init), dtype)
    if bias:
        add_parameter(layer, "bias", Placement((out_channels,), init), dtype)
    else:
        layer.register_parameter("bias", None)


def filter_of(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of ``layer``, with gradients that are summed over its grid."""
    if layer.bias is None:
        return replicated(layer.grid.comm, layer.weight)[0], None
    weight, bias = replicated(layer.grid.comm, layer.weight, layer.bias)
    return weight, bias


def _check_groups(in_channels: int, out_channels: int, groups: int) -> None:
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise ValueError(f"groups={groups} must divide in_channels={in_channels} and out_channels={out_channels}")
