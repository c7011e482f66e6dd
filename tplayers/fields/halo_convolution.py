"""The convolution of a block and of its halo, apart: the interior does not wait for the halo, and nothing is copied.

A convolution is linear. Its input is the sum of two: the rank's block with zeros around it, and the halo around zeros.
torch convolves the block where it lies and pads it with zeros itself. The halo reaches only a frame of outputs at the
edges of the block; the frame is cut into slabs, and what the halo adds to them is computed from small tensors. A layer
that put block and halo together would copy every block twice in a step. With a stream, the halo travels while the block
is convolved, forward and backward.

==========  ==========================================================================================
forward     send strips of the block; y = conv(block); receive the halo; y += conv(halo), in the slabs
backward    conv's adjoint in the slabs; send the halo's gradients; conv's adjoint of the block; receive and add
==========  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commengine import Communicator, Stream
from tplayers.movement.plan import BlockPart
from tplayers.movement.transfer import Messages, folded, new_block, unfolded

from .geometry import Sliding, Span
from .layer import LocalInput

Slices = tuple[Any, ...]


class Slab(NamedTuple):
    """A box of outputs that read the halo.

    outputs: its place in the rank's outputs. shape: of the inputs that it reads, in space. parts: for each piece of the
    halo that it reads: the piece's number, its part of the inputs, and which part of the piece that is.
    """

    outputs: Slices
    shape: tuple[int, ...]
    parts: list[tuple[int, Slices, Slices]]


class HaloConvolution:
    """The geometry of one rank's convolution.

    rules: of each axis. outputs, block: the rank's part of the whole output and of the whole input. local: what it
    reads. groups: of the channels.
    """

    def __init__(
        self,
        rules: Sequence[Sliding],
        outputs: Sequence[slice],
        block: Sequence[slice],
        local: LocalInput,
        comm: Communicator,
        groups: int,
    ) -> None:
        self.local, self.plan, self.comm, self.groups = local, local.plan, comm, groups
        self.stride, self.dilation = [rule.stride for rule in rules], [rule.dilation for rule in rules]
        self.native, reads, plan = list(local.native), local.span, local.plan
        native = self.native
        axes = range(len(rules))
        offset = [part.start - low for part, (low, _) in zip(block, reads, strict=True)]  # of the block in what is read
        # The block without points that no output reads, and the zeros that torch puts around it. The padding is the
        # same at both ends; where that makes outputs in front of the wanted ones, they are left out.
        self.inputs, self.padding, self.results = [], [], []
        for axis, rule in enumerate(rules):
            start, stop = max(0, -offset[axis]), min(block[axis].stop, reads[axis][1]) - block[axis].start
            before = max(offset[axis], 0)
            pad = max(before, reads[axis][1] - block[axis].stop)
            pad = before + -(-(pad - before) // rule.stride) * rule.stride
            skip = (pad - before) // rule.stride
            self.inputs.append((start, stop - start))
            self.padding.append(native[axis] or pad)
            self.results.append((skip, outputs[axis].stop - outputs[axis].start))
        self._block = [part.stop - part.start for part in block]
        self.cut = any(length != n for (_, length), n in zip(self.inputs, self._block, strict=True))
        own = next((p for p in plan.kept if _in_place(p, offset)), None)
        #: the pieces of the halo: those that other ranks send, in the order of the messages, then those of this rank
        self.received = [piece for _, pieces in plan.receives for piece in pieces]
        self.kept = [piece for piece in plan.kept if piece is not own]
        self.slabs = []
        whole = [(part.start, part.stop) for part in outputs]
        for box in _frame(rules, whole, [(part.start, part.stop) for part in block], native):
            spans = [reads[a] if native[a] else rules[a].reads(*box[a]) for a in axes]  # what the box reads
            box_at = [(low - reads[a][0], high - reads[a][0]) for a, (low, high) in enumerate(spans)]
            parts = [
                (number, *common)
                for number, piece in enumerate([*self.received, *self.kept])
                if (common := _common(box_at, piece.target[1:])) is not None
            ]
            if parts:
                at = tuple(slice(low - whole[a][0], high - whole[a][0]) for a, (low, high) in enumerate(box))
                self.slabs.append(Slab((..., *at), tuple(high - low for low, high in box_at), parts))

    def of_block(self, x: Tensor) -> Tensor:
        """The part of the block that torch convolves."""
        for axis, (start, length) in enumerate(self.inputs):
            x = x.narrow(2 + axis, start, length) if self.cut else x
        return x

    def spread(self, grad: Tensor, block: Tensor) -> Tensor:
        """The gradient of all that torch computes for the block, from that of the rank's outputs: zeros elsewhere."""
        sizes = [
            (length + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for (_, length), pad, dilation, kernel, stride in zip(
                self.inputs, self.padding, self.dilation, block.shape[2:], self.stride, strict=True
            )
        ]
        if list(grad.shape[2:]) == sizes:
            return grad
        result = new_block(grad, tuple(sizes)).zero_()
        wanted: Slices = (..., *(slice(skip, skip + count) for skip, count in self.results))
        result[wanted] = grad
        return result


def convolve_apart(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: HaloConvolution, stream: Stream | None
) -> Tensor:
    """Return this rank's outputs. Collective; on ``stream`` the halo travels while the block is convolved."""
    return _Convolve.apply(x, weight, bias, geometry, stream)  # type: ignore[no-untyped-call, no-any-return]


def convolve_together(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: HaloConvolution) -> Tensor:
    """The same by one convolution of the block with its halo, which differentiates any number of times."""
    no = [0] * len(geometry.stride)
    return torch.convolution(
        geometry.local(x), weight, bias, geometry.stride, geometry.native, geometry.dilation, False, no, geometry.groups
    )


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: HaloConvolution, stream: Stream | None
    ) -> Tensor:
        messages = Messages(lambda piece: x[piece.source], x, geometry.plan, False, geometry.comm, stream)
        stride, dilation, groups = geometry.stride, geometry.dilation, geometry.groups
        no = [0] * len(stride)
        y = torch.convolution(geometry.of_block(x), weight, bias, stride, geometry.padding, dilation, False, no, groups)
        for axis, (skip, count) in enumerate(geometry.results):
            y = y.narrow(2 + axis, skip, count) if y.shape[2 + axis] != count else y
        halo = [_spread(part, piece) for piece, part in messages.wait()]
        halo += [_spread(x[piece.source], piece) for piece in geometry.kept]
        inputs = []
        for slab in geometry.slabs:
            read = new_block(x, slab.shape).zero_()
            for number, at, of in slab.parts:
                read[at] = halo[number][of]
            y[slab.outputs] += torch.convolution(
                read, weight, None, stride, geometry.native, dilation, False, no, groups
            )
            inputs.append(read)
        ctx.save_for_backward(x, weight, *inputs)
        ctx.geometry, ctx.stream, ctx.biased = geometry, stream, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        geometry, grad = ctx.geometry, grads[0]
        x, weight, *inputs = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated
            y = convolve_together(x, weight, None, geometry)
            wanted = [one for one, need in ((x, need_x), (weight, need_weight)) if need]
            found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True) if wanted else ())
            of_x, of_weight = (next(found) if need else None for need in (need_x, need_weight))
            return of_x, of_weight, grad.sum((0, *range(2, x.dim()))) if need_bias else None, None, None
        halo: list[Tensor] = []
        pieces = [*geometry.received, *geometry.kept]
        if need_x:
            halo = [new_block(x, tuple(s.stop - s.start for s in piece.target[1:])).zero_() for piece in pieces]
        grad_weight = None
        for slab, read in zip(geometry.slabs, inputs, strict=True):
            of_read, of_weight, _ = _adjoint(
                grad[slab.outputs], read, weight, geometry, geometry.native, (need_x, need_weight, False)
            )
            for number, at, of in slab.parts if need_x else ():
                halo[number][of] += of_read[at]
            if need_weight:
                grad_weight = of_weight if grad_weight is None else grad_weight.add_(of_weight)
        messages = None
        if need_x:
            sent = {id(piece): of for piece, of in zip(pieces, halo, strict=True)}
            messages = Messages(
                lambda piece: folded(sent[id(piece)], piece), x, geometry.plan, True, geometry.comm, ctx.stream
            )
        block = geometry.of_block(x)
        mask = (need_x, need_weight, need_bias and ctx.biased)
        whole = geometry.spread(grad, weight)
        grad_x, of_weight, grad_bias = _adjoint(whole, block, weight, geometry, geometry.padding, mask)
        if need_weight:
            grad_weight = of_weight if grad_weight is None else grad_weight.add_(of_weight)
        if messages is not None:
            if geometry.cut:
                part, grad_x = grad_x, new_block(x, tuple(x.shape[2:])).zero_()
                geometry.of_block(grad_x).copy_(part)
            for piece, of in zip(geometry.kept, halo[len(geometry.received) :], strict=True):
                grad_x[piece.source] += folded(of, piece)
            for piece, of in messages.wait():
                grad_x[piece.source] += of
        return grad_x, grad_weight, grad_bias, None, None


def _spread(part: Tensor, piece: BlockPart) -> Tensor:
    """The source's part of a piece as the new block has it."""
    sizes = (at.stop - at.start for at in piece.target[1:])
    return unfolded(part, piece).expand(*part.shape[: part.dim() - len(piece.shape)], *sizes)


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


def _in_place(piece: BlockPart, offset: Sequence[int]) -> bool:
    """Whether a kept piece is the rank's own block where it belongs, and not a part of its padding."""
    starts = [at.start - of.start for at, of in zip(piece.target[1:], piece.source[1:], strict=True)]
    return not piece.flipped and not piece.repeated and starts == list(offset)


def _frame(
    rules: Sequence[Sliding], outputs: Sequence[Span], block: Sequence[Span], native: Sequence[int]
) -> list[list[Span]]:
    """Cut the outputs that read positions outside ``block`` into boxes, two for each axis that has a halo.

    A box has all outputs along the axes after its own, and those that need no halo along the axes before it.
    """
    boxes, rest = [], list(outputs)
    for axis, rule in enumerate(rules):
        if native[axis]:
            continue
        start, stop = outputs[axis]
        low, high = interior(rule, outputs[axis], block[axis])
        boxes += [[*rest[:axis], ends, *rest[axis + 1 :]] for ends in ((start, low), (high, stop)) if ends[0] < ends[1]]
        rest[axis] = (low, high)
    return [box for box in boxes if all(low < high for low, high in box)]


def interior(rule: Sliding, outputs: Span, block: Span) -> Span:
    """Return the span of ``outputs`` that read nothing outside ``block``; empty if there is none."""
    low = max(outputs[0], -(-(block[0] + rule.before) // rule.stride))
    high = min(outputs[1], (block[1] - 1 - rule.reach + rule.before) // rule.stride + 1)
    return (low, high) if low < high else (outputs[0], outputs[0])


def _common(box: Sequence[Span], piece: Sequence[slice]) -> tuple[Slices, Slices] | None:
    """Where ``box`` and a piece overlap, as slices of the box and of the piece; None if they do not."""
    at, of = [], []
    for (low, high), part in zip(box, piece, strict=True):
        first, last = max(low, part.start), min(high, part.stop)
        if first >= last:
            return None
        at.append(slice(first - low, last - low))
        of.append(slice(first - part.start, last - part.start))
    return (..., *at), (..., *of)
