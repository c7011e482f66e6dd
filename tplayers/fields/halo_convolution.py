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
import torch.nn.functional as F
from torch import Tensor

from commengine import Communicator, Stream
from tplayers.autocast import in_forward_dtypes
from tplayers.movement.plan import BlockPart
from tplayers.movement.transfer import Messages, folded, new_block, unfolded

from .geometry import Sliding, Span
from .halo_regions import Slices, common, frame, reads_of
from .layer import LocalInput, narrowed


class Slab(NamedTuple):
    """A box of outputs that read the halo.

    outputs: its place in the rank's outputs. taps: of each axis, the (first, number) of the kernel's points that meet
    the halo; the others would meet zeros. shape: of the inputs that these read, in space. parts: for each piece of the
    halo among them: the piece's number, its part of the inputs, and which part of the piece that is.
    """

    outputs: Slices
    taps: list[Span]
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
        for box, taps, regions in frame(rules, whole, [(part.start, part.stop) for part in block], reads, native):
            spans = [reads[a] if native[a] else reads_of(rules[a], box[a], taps[a]) for a in axes]
            parts = [
                (number, *shared)
                for region in regions
                for number, piece in enumerate([*self.received, *self.kept])
                if (shared := common(spans, region, piece.target[1:], [low for low, _ in reads])) is not None
            ]
            if parts:
                at = tuple(slice(low - whole[a][0], high - whole[a][0]) for a, (low, high) in enumerate(box))
                self.slabs.append(Slab((..., *at), taps, tuple(high - low for low, high in spans), parts))

    def of_block(self, x: Tensor) -> Tensor:
        """The part of the block that torch convolves."""
        return narrowed(x, self.inputs)

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
    """The same by one convolution of the block with its halo. It differentiates any number of times, and autocasts."""
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.stride) - 1]
    return convolve(
        geometry.local(x), weight, bias, geometry.stride, geometry.native, geometry.dilation, geometry.groups
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
        whole, y = y, narrowed(y, geometry.results)
        if y is not whole:
            y = y.clone()  # not a view, because the caller may change what it gets in place
        halo = [_spread(part, piece) for piece, part in messages.wait()]
        halo += [_spread(x[piece.source], piece) for piece in geometry.kept]
        inputs = []
        for slab in geometry.slabs:
            number, at, of = slab.parts[0]
            read = halo[number][of]
            if tuple(read.shape[2:]) != slab.shape:
                read = new_block(x, slab.shape).zero_()
                for number, at, of in slab.parts:
                    read[at] = halo[number][of]
            met = narrowed(weight, slab.taps)
            y[slab.outputs] += torch.convolution(read, met, None, stride, geometry.native, dilation, False, no, groups)
            inputs.append(read)
        ctx.save_for_backward(x, weight, *inputs)
        ctx.geometry, ctx.stream, ctx.biased = geometry, stream, bias is not None
        return y

    @staticmethod
    @in_forward_dtypes
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
        halo: dict[int, Tensor] = {}
        pieces = [*geometry.received, *geometry.kept]
        of_slabs: list[Tensor] = []
        for slab, read in zip(geometry.slabs, inputs, strict=True):
            of_read, of_weight, _ = _adjoint(
                grad[slab.outputs],
                read,
                narrowed(weight, slab.taps),
                geometry,
                geometry.native,
                (need_x, need_weight, False),
            )
            for number, at, of in slab.parts if need_x else ():
                shape = tuple(place.stop - place.start for place in pieces[number].target[1:])
                if number not in halo and of_read[at].shape[2:] == shape:
                    halo[number] = of_read[at]  # most often: one slab reads all of the piece
                    continue
                if number not in halo:
                    halo[number] = new_block(x, shape).zero_()
                halo[number][of] += of_read[at]
            of_slabs.append(of_weight)
        messages = None
        if need_x:
            for number, piece in enumerate(pieces):
                if number not in halo:  # a stride leaves it out
                    halo[number] = new_block(x, tuple(at.stop - at.start for at in piece.target[1:])).zero_()
            sent = {id(piece): halo[number] for number, piece in enumerate(pieces)}
            messages = Messages(
                lambda piece: folded(sent[id(piece)], piece), x, geometry.plan, True, geometry.comm, ctx.stream
            )
        block = geometry.of_block(x)
        mask = (need_x, need_weight, need_bias and ctx.biased)
        whole = geometry.spread(grad, weight)
        grad_x, grad_weight, grad_bias = _adjoint(whole, block, weight, geometry, geometry.padding, mask)
        for slab, of_weight in zip(geometry.slabs, of_slabs if need_weight else (), strict=need_weight):
            narrowed(grad_weight, slab.taps).add_(of_weight)
        if messages is not None:
            if geometry.cut:
                part, grad_x = grad_x, new_block(x, tuple(x.shape[2:])).zero_()
                geometry.of_block(grad_x).copy_(part)
            for piece in geometry.kept:
                grad_x[piece.source] += folded(sent[id(piece)], piece)
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
