"""The convolution of a block and of its halo, apart: the block does not wait for the halo, and nothing is copied.

A convolution is linear. Its input is the sum of two: the rank's block with zeros around it, and the halo around zeros.
torch convolves the block where it lies and pads it with zeros itself. The halo reaches only a frame of outputs at the
edges of the block. The frame is cut into slabs, and what the halo adds to a slab is the convolution of the few points
that the slab reads. A layer that put block and halo together would copy every block twice in a step. With a stream, the
halo travels while the block is convolved, forward and backward.

==========  ==========================================================================================
forward     send strips of the block; y = conv(block); receive the halo; y += conv(halo), in the slabs
backward    conv's adjoint in the slabs; send the halo's gradients; conv's adjoint of the block; receive and add
==========  ==========================================================================================

It is so for convolutions that keep the field's shape: of stride 1, and with the same padding at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import CartesianGrid, Decomposition, Stream
from tplayers.adjoint_pair import with_tie, zeros_for_none
from tplayers.functions import PlainForm, differentiable
from tplayers.movement.plan import BlockPart
from tplayers.movement.transfer import Messages, folded, new_block, unfolded

from .geometry import Sliding, Span
from .layer import LocalInput

#: values that one call sets to zero in less time than several calls set a part of them
_ZEROED_AT_ONCE = 1 << 14


class HaloConvolution:
    """The geometry of one rank's convolution.

    rules: of each axis. local: what the rank reads of the field ``input``. groups: of the channels.
    ``apart`` says whether block and halo can be convolved apart.
    """

    def __init__(
        self, rules: Sequence[Sliding], grid: CartesianGrid, input: Decomposition, local: LocalInput, groups: int
    ) -> None:
        self.local, self.plan, self.comm, self.groups = local, local.plan, grid.comm, groups
        self.stride, self.dilation = [rule.stride for rule in rules], [rule.dilation for rule in rules]
        self.padding, self.native = [rule.before for rule in rules], list(local.native)
        #: the pieces of the halo that this rank has itself, and all pieces
        self.kept: list[BlockPart] = []
        self.pieces: list[BlockPart] = []
        #: of each slab that reads some of the halo: its place in the rank's outputs, and that of what it reads
        self.slabs: list[tuple[Any, Any]] = []
        kind = (set(self.stride), local.output, [rule.after for rule in rules])
        self.apart = kind == ({1}, input, self.padding) and not local.is_block
        if not self.apart:
            return
        block = [(part.start, part.stop) for part in input.slices(grid.coords)]
        starts, origin = [start for start, _ in block], [low for low, _ in local.span]
        own = _slices(block, origin)
        self.kept = [piece for piece in local.plan.kept if piece.target != own]
        self.pieces = [*self.kept, *(piece for _, pieces in local.plan.receives for piece in pieces)]
        for box in frame(rules, block, self.native):
            spans = [
                ends if native else rule.reads(*side)
                for rule, side, ends, native in zip(rules, box, local.span, self.native, strict=True)
            ]
            read = _slices(spans, origin)
            if any(_overlap(read[1:], piece.target[1:]) for piece in self.pieces):
                self.slabs.append((_slices(box, starts), read))

    def convolved(self, local: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's outputs, by one convolution of the block with its halo. It differentiates any number of times."""
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        return convolve(local, weight, bias, self.stride, self.native, self.dilation, self.groups)

    def empty_halo(self, x: Tensor) -> Tensor:
        """A tensor for all that the rank reads: zeros where slabs and pieces are, and any values elsewhere."""
        halo = new_block(x, self.plan.target_shape)
        if halo.numel() <= _ZEROED_AT_ONCE:
            return halo.zero_()
        for place in (*(read for _, read in self.slabs), *(piece.target for piece in self.pieces)):
            halo[place] = 0
        return halo


def _plain_convolution(ctx: Any) -> PlainForm:
    x, weight, *_, tie = ctx.saved_tensors
    bias = weight.new_zeros(len(weight)) if ctx.biased else None  # no gradient depends on its values

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor]:
        return (ctx.geometry.convolved(ctx.geometry.local(x), weight, bias),)

    return plain, [x, weight, bias, None, None], tie


class ConvolveApart(torch.autograd.Function):
    """`HaloConvolution.convolved` in two convolutions; on ``stream`` the halo travels while the block is convolved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: HaloConvolution, stream: Stream | None
    ) -> tuple[Tensor, ...]:
        messages = Messages(lambda piece: x[piece.source], x, geometry.plan, False, geometry.comm, stream)
        stride, dilation, groups = geometry.stride, geometry.dilation, geometry.groups
        no = [0] * len(stride)
        y = torch.convolution(x, weight, bias, stride, geometry.padding, dilation, False, no, groups)
        halo = geometry.empty_halo(x)

        def put(piece: BlockPart, part: Tensor) -> None:
            halo[piece.target] = unfolded(part, piece)

        messages.wait(put)
        for piece in geometry.kept:
            put(piece, x[piece.source])
        reads = [halo[place].clone() for _, place in geometry.slabs]
        for (outputs, _), read in zip(geometry.slabs, reads, strict=True):
            y[outputs] += torch.convolution(read, weight, None, stride, geometry.native, dilation, False, no, groups)
        ctx.geometry, ctx.stream, ctx.biased = geometry, stream, bias is not None
        return with_tie(ctx, y, saved=(x, weight, *reads))

    @staticmethod
    @zeros_for_none
    @differentiable(_plain_convolution)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        geometry, grad = ctx.geometry, grads[0]
        x, weight, *reads, _ = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        halo, of_slabs = geometry.empty_halo(x), []
        for (outputs, place), read in zip(geometry.slabs, reads, strict=True):
            mask = (need_x, need_weight, False)
            of_read, of_weight, _ = _adjoint(grad[outputs], read, weight, geometry, geometry.native, mask)
            of_slabs.append(of_weight)
            if need_x:
                halo[place] += of_read

        def of_piece(piece: BlockPart) -> Tensor:
            return folded(halo[piece.target], piece)

        messages = Messages(of_piece, x, geometry.plan, True, geometry.comm, ctx.stream) if need_x else None
        mask = (need_x, need_weight, need_bias and ctx.biased)
        grad_x, grad_weight, grad_bias = _adjoint(grad, x, weight, geometry, geometry.padding, mask)
        for of_weight in of_slabs if need_weight else ():
            grad_weight += of_weight
        if messages is not None:

            def add(piece: BlockPart, part: Tensor) -> None:
                grad_x[piece.source] += part

            for piece in geometry.kept:
                add(piece, of_piece(piece))
            messages.wait(add)
        return grad_x, grad_weight, grad_bias, None, None


def _adjoint(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: HaloConvolution, padding: Sequence[int], mask: tuple[bool, ...]
) -> tuple[Any, Any, Any]:
    """The gradients of input, weight and bias, as far as ``mask`` asks for them."""
    sizes = [weight.shape[0]] if mask[2] else None
    found: tuple[Any, Any, Any] = torch.ops.aten.convolution_backward(
        grad, x, weight, sizes, geometry.stride, padding, geometry.dilation, False, [0] * len(geometry.stride),
        geometry.groups, mask,
    )  # fmt: skip
    return found


def frame(rules: Sequence[Sliding], block: Sequence[Span], native: Sequence[int]) -> list[list[Span]]:
    """Cut the outputs of ``block`` that read more than it into boxes that do not overlap, at most two for each axis.

    native: axes of which it is not 0 have no halo.
    """
    boxes, rest = [], list(block)
    for axis, rule in enumerate(rules):
        if native[axis]:
            continue
        start, stop = block[axis]
        low, high = start + rule.before, stop - rule.after
        sides = [(start, low), (high, stop)] if low < high else [(start, stop)]
        boxes += [[*rest[:axis], side, *rest[axis + 1 :]] for side in sides if side[0] < side[1]]
        if low >= high:
            break
        rest[axis] = low, high
    return boxes


def _slices(spans: Sequence[Span], origin: Sequence[int]) -> tuple[Any, ...]:
    return (..., *(slice(low - start, high - start) for (low, high), start in zip(spans, origin, strict=True)))


def _overlap(one: Sequence[slice], other: Sequence[slice]) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True))
