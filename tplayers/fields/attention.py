"""Attention over a split field: in windows (Liu et al. 2021, Swin), or of every point to every point.

In windows, a window belongs to the rank that owns its centre, as an output of a convolution does. One transfer brings
whole windows to their ranks, and another one brings the results back. Over the whole field, each rank has its own
queries, and one all-gather brings it the keys and values of all points: blocks may have any sizes, and the methods of
`tplayers.context` need equal parts.

A fused kernel has no second derivative. So a Function computes with the kernel, and gradients that are to be
differentiated come from the formula softmax(q k^T / sqrt(d)) v (`tplayers.functions.differentiable`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import CartesianGrid, Decomposition
from tplayers.adjoint_pair import apply_or
from tplayers.context.blocks import BlockMask, attend, attend_backward
from tplayers.functions import PlainForm, differentiable
from tplayers.movement.operators import all_gather
from tplayers.movement.plan import halo_plan
from tplayers.movement.transfer import memory_format, transfer
from tplayers.placement import Constant, Normal, Placement, add_parameter, require_one_of

from .geometry import Sliding, output_bounds, read_spans
from .layer import FieldLayer, natural, per_axis, replicated

#: of a shifted window that crosses the border: it ends there, or goes on at the other end of the field
SHIFT_MODES = ("masked", "circular")


class FieldAttention(FieldLayer):
    """Multi-head self-attention of a field that is split over ``grid``: torch.nn.MultiheadAttention of its points.

    channels, heads, bias: embed_dim, num_heads and bias of torch's. heads must divide channels.
    grid, input: as of `FieldConv`; the result has the decomposition ``input``.
    window_size: None: every point attends to every point. Numbers, one or one for each axis: the field is cut into
        windows of so many points, and a point attends to those of its window. A field that the windows do not divide is
        padded with zeros at the end of the axis, as in Swin.
    mask_padding: True: no point attends to those zeros. False: they have keys and values, of the bias, as in Swin.
    shift: the windows begin at this point; one number or one for each axis, smaller than the window. An axis that
        one window covers has no shift, as in Swin.
    shift_mode: of each axis, or one for all. "masked": a window that crosses the border ends there (Swin's mask).
        "circular": it goes on at the other end of the field; the window must then divide the axis.
    relative_position_bias: add a number for each distance within the window, and for each head, to the scores (Swin).

    The state dict has the names and shapes of torch's layer: in_proj_weight [3 * channels, channels] (queries, keys,
    values), in_proj_bias [3 * channels], out_proj.weight [channels, channels] and out_proj.bias [channels]. Swin's
    qkv.weight, qkv.bias, proj.weight and proj.bias hold the same, and relative_position_bias_table [product of
    (2 * window - 1), heads] has Swin's name and order; Swin's relative_position_index is not in the state dict. Every
    rank holds all parameters; their gradients are summed over the grid in the backward, by one all-reduce.

    forward: x [batch, channels, *local block] -> the same shape. In windows two exchanges, unless every rank's block is
    made of whole windows; over the whole field one all-gather of keys and values, so a rank must have memory for them.
    Second derivatives, and a position bias, need memory for all scores of the rank's queries. Collective over the grid;
    every rank must run the backward. A rank that owns no centre of a window computes nothing, and takes part.

    Raises ValueError on every rank if the arguments do not fit.
    """

    takes_own_dtype = True
    in_proj_weight: nn.Parameter
    _exists: Tensor | None
    relative_position_index: Tensor

    def __init__(
        self,
        channels: int,
        heads: int,
        grid: CartesianGrid,
        input: Decomposition,
        *,
        window_size: int | Sequence[int] | None = None,
        mask_padding: bool = False,
        shift: int | Sequence[int] = 0,
        shift_mode: str | Sequence[str] = "masked",
        relative_position_bias: bool = False,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(grid, input, channels)
        if heads < 1 or channels % heads:
            raise ValueError(f"heads={heads} must divide channels={channels}")
        self.heads, self.shift_mode = heads, per_axis(shift_mode, self.axes, "shift_mode")
        self.shift, self.mask_padding = natural(shift, self.axes, "shift", 0), mask_padding
        for mode in self.shift_mode:
            require_one_of(SHIFT_MODES, shift_mode=mode)
        self.window_size: tuple[int, ...] | None = None
        if window_size is not None:
            self.window_size = natural(window_size, self.axes, "window_size", 1)
            if any(s >= w for s, w in zip(self.shift, self.window_size, strict=True)):
                raise ValueError(f"shift={shift} must be smaller than window_size={window_size}")
            self._windows = _Windows(self.window_size, self.shift, self.shift_mode, mask_padding, grid, input)
        elif any(self.shift) or relative_position_bias:
            raise ValueError("shift and relative_position_bias need a window_size")
        exists = None if self.window_size is None else self._windows.exists
        self.register_buffer("_exists", None if exists is None else self._tokens(exists)[0, :, :, 0], persistent=False)
        # torch: in_proj_weight is uniform of variance 2 / (4 * channels), out_proj.weight of 1 / (3 * channels)
        std, outer = math.sqrt(1 / (2 * channels)), math.sqrt(1 / (3 * channels))
        add_parameter(self, "in_proj_weight", Placement((3 * channels, channels), Normal(std)), dtype)
        add_parameter(self, "in_proj_bias", Placement((3 * channels,), Constant(0.0)) if bias else None, dtype)
        table = None
        if relative_position_bias and self.window_size is not None:
            table = Placement((math.prod(2 * w - 1 for w in self.window_size), heads), Normal(0.02))
            self.register_buffer("relative_position_index", _distances(self.window_size), persistent=False)
        add_parameter(self, "relative_position_bias_table", table, dtype)
        self.out_proj = nn.Module()
        add_parameter(self.out_proj, "weight", Placement((channels, channels), Normal(outer)), dtype)
        add_parameter(self.out_proj, "bias", Placement((channels,), Constant(0.0)) if bias else None, dtype)

    @property
    def weight(self) -> Tensor:
        """The parameter whose dtype the field must have."""
        return self.in_proj_weight

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        names, parameters = zip(*self.named_parameters(), strict=True)
        summed = dict(zip(names, replicated(self.grid.comm, *parameters), strict=True))
        travels = self.window_size is not None and self._windows.travel
        field = transfer(x, self._windows.there, self.grid.comm) if travels else x
        tokens = F.linear(self._tokens(field), summed["in_proj_weight"], summed.get("in_proj_bias"))
        q, kv = tokens[..., : x.shape[1]], tokens[..., x.shape[1] :]
        if self.window_size is None and self.grid.size > 1:
            kv = all_gather(kv, self.grid.comm, dim=2)
        width = x.shape[1] // self.heads
        q, k, v = (one.view(*one.shape[:3], self.heads, width).transpose(2, 3) for one in (q, *kv.chunk(2, -1)))
        found = attention(q, k, v, self._bias(summed.get("relative_position_bias_table"), q))
        found = F.linear(found.transpose(2, 3).flatten(3), summed["out_proj.weight"], summed.get("out_proj.bias"))
        y = self._field(found, field.shape)
        y = transfer(y, self._windows.back, self.grid.comm) if travels else y
        return y.contiguous(memory_format=memory_format(x))

    def _cut(self, space: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """The numbers of windows in ``space``, and their size; without windows the rank's block is one."""
        size = self.window_size or self._local_shape
        return [n // w for n, w in zip(space, size, strict=True)], size

    def _tokens(self, x: Tensor) -> Tensor:
        """[batch, channels, *space] -> [batch, windows, points, channels]."""
        number, size = self._cut(x.shape[2:])
        cut = x.reshape(*x.shape[:2], *(n for pair in zip(number, size, strict=True) for n in pair))
        cut = cut.permute(0, *range(2, cut.dim(), 2), *range(3, cut.dim(), 2), 1)
        return cut.reshape(x.shape[0], math.prod(number), math.prod(size), x.shape[1])

    def _field(self, tokens: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `_tokens`, to ``shape``."""
        number, size = self._cut(shape[2:])
        cut = tokens.reshape(shape[0], *number, *size, shape[1])
        places = (place for axis in range(self.axes) for place in (1 + axis, 1 + self.axes + axis))
        return cut.permute(0, cut.dim() - 1, *places).reshape(shape)

    def _bias(self, table: Tensor | None, q: Tensor) -> Tensor | None:
        """What is added to the scores: [windows or 1, heads or 1, points, points]."""
        bias = None
        if table is not None:
            bias = table[self.relative_position_index].permute(2, 0, 1).unsqueeze(0)
        if self._exists is not None:
            hidden = self._exists[:, None, :, None] != self._exists[:, None, None, :]
            mask = q.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(q.dtype).min / 2)
            bias = mask if bias is None else bias + mask
        return bias


class _Windows:
    """The windows of a field, each on the rank that owns its centre.

    there, back: the plans that bring whole windows to their ranks, and their results back. travel: whether there is
    anything to bring. exists: the points of this rank's windows that others may attend to, bool [1, 1, *space]; None:
    all of them.
    """

    def __init__(
        self, size: Sequence[int], shift: Sequence[int], shift_mode: Sequence[str], mask_padding: bool,
        grid: CartesianGrid, input: Decomposition,
    ) -> None:  # fmt: skip
        rules, modes, real = [], [], []
        for axis, (points, window) in enumerate(zip(input.shape, size, strict=True)):
            padded = -(-points // window) * window
            start = 0 if padded == window else shift[axis]
            circular = start > 0 and shift_mode[axis] == "circular"
            if circular and padded != points:
                raise ValueError(
                    f"shift_mode='circular' needs a window_size that divides the axis: {window} does not divide the "
                    f"{points} points of axis {axis}"
                )
            # A masked window that crosses the border is two windows, each of which has points outside of the field.
            before = -start if circular else -start % window
            rules.append(Sliding(window, window, 1, before, -(points + before) % window))
            modes.append("circular" if circular else "zeros")
            real.append((0, points + start) if circular else (0, points if mask_padding else padded))
        blocks = [list(itertools.pairwise(input.bounds(axis))) for axis in range(len(rules))]
        bounds = [output_bounds(rule, sizes) for rule, sizes in zip(rules, input.blocks, strict=True)]
        spans = [list(read_spans(rule, ends)) for rule, ends in zip(rules, bounds, strict=True)]
        self.travel = spans != blocks
        self.there = halo_plan(input, grid.rank, spans, modes)
        windows = Decomposition(tuple(tuple(high - low for low, high in ends) for ends in spans))
        places = [
            [(low + rule.before, high + rule.before) for low, high in ends]
            for rule, ends in zip(rules, blocks, strict=True)
        ]
        self.back = halo_plan(windows, grid.rank, places, modes)
        exists = torch.ones((), dtype=torch.bool)
        for ends, c, (low, high) in zip(spans, grid.coords, real, strict=True):
            positions = torch.arange(*ends[c])
            exists = exists.unsqueeze(-1) & (positions >= low) & (positions < high)
        self.exists = None if exists.all() else exists[None, None]


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v, of any order of derivatives.

    q: [batch, windows, heads, rows, d]. k, v: [batch, windows, heads, columns, d]. bias: [windows or 1, heads or 1,
    rows, columns], or None. The result has the shape of q. A fused kernel computes it, unless ``bias`` has a gradient.
    """
    if not q.numel() or (bias is not None and bias.requires_grad):
        return _formula(q, k, v, bias)
    wide = None if bias is None else bias.to(q.dtype).expand(*q.shape[:2], *bias.shape[1:]).flatten(0, 1)
    given = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), wide
    return apply_or(lambda: _formula(q, k, v, bias).flatten(0, 1), _Fused, *given).unflatten(0, q.shape[:2])  # type: ignore[no-any-return]


def _formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1).to(v.dtype) @ v


def _plain_attention(ctx: Any) -> PlainForm:
    q, k, v, _, _, bias = ctx.saved_tensors
    return lambda q, k, v: (_formula(q, k, v, bias),), [q, k, v, None]


class _Fused(torch.autograd.Function):
    """Attention of [n, heads, points, d] by torch's kernel, if it has one for the device and the sizes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        out, lse = attend(q, k, v, BlockMask(bias=bias))
        ctx.save_for_backward(q, k, v, out, lse, bias)
        return out.to(q.dtype)

    @staticmethod
    @differentiable(_plain_attention)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bias = ctx.saved_tensors
        found = attend_backward(grads[0], q, k, v, out, lse, BlockMask(bias=bias))
        return *(one.to(q.dtype) for one in found), None


def _distances(size: Sequence[int]) -> Tensor:
    """The row of the table for each pair of points of a window, int64 [points, points]: Swin's order."""
    index = torch.zeros((1, 1), dtype=torch.int64)
    for points in size:
        one = torch.arange(points)
        distance = one[:, None] - one + points - 1
        index = (index[:, None, :, None] * (2 * points - 1) + distance[None, :, None, :]).flatten(0, 1).flatten(1, 2)
    return index
