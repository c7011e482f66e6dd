"""Products with weights that are split by columns, by rows, or not, one for each canonical shard.

All operands and results are contiguous and have the shape that they have on a rank of the largest group. MKL may add up
in another order otherwise: of shapes drawn at random one in ten gave other bits in a strided view than in a copy.
Products of one shape are one batch where the batch changes no bit (`one_batch`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import Stream
from commengine.compiled_ops import all_gathered, all_reduced
from tplayers.functions import finished, lowered, one_derivative
from tplayers.linear import Products, column_parallel_products
from tplayers.regions import reduced_rows

from .shards import CanonicalShards, tree_sum

#: A batch is of matrices of which every side is longer than this. oneDNN has a way of its own for a single matrix with
#: a shorter side.
SHORT = 32


def one_batch(x: Tensor, count: int, *sides: int) -> bool:
    """Whether ``count`` products of matrices like ``x`` have the bits in one batch that they have one by one.

    sides: m, k and n of [m, k] @ [k, n]. In bfloat16 on one thread oneDNN (3.12) cuts the sums of a product by the
    sides, and from k = 1025 on also by whether the left matrix lies transposed. One batch saves the time in which it
    finds the kernel of a product, about 20 us. Each shape is tried once, because another processor or version may do
    otherwise. MKL, which has the other dtypes, promises nothing.
    """
    return _batched(x, *sides) and (count == 1 or _tried(count, *sides))


def _batched(x: Tensor, *sides: int) -> bool:
    """Whether products of these sides are batches, be it of one product: on every rank alike."""
    return x.is_cpu and x.dtype == torch.bfloat16 and torch.get_num_threads() == 1 and min(sides) > SHORT


@cache
def _tried(count: int, m: int, k: int, n: int) -> bool:
    """Whether a batch of random matrices has the same bits at once and one by one."""
    drawn = torch.Generator("cpu").manual_seed(0)
    left, right = (
        torch.randn(count, *sides, generator=drawn, dtype=torch.float32, device="cpu").bfloat16()
        for sides in ((m, k), (k, n))
    )
    alone = [torch.bmm(*both) for both in zip(torch.split(left, 1), torch.split(right, 1), strict=True)]
    return torch.equal(torch.bmm(left, right), torch.cat(alone))


def _products(left: Tensor, right: Tensor) -> Iterator[Tensor]:
    """The product of each shard, of contiguous tensors: left [k, m, n], right [k, n, o] -> k times [m, o]."""
    own, sides = left.shape[0], (*left.shape[1:], right.shape[2])
    if not _batched(left, *sides):
        yield from (one @ other for one, other in zip(left.unbind(), right.unbind(), strict=True))
        return
    at_once = own if one_batch(left, own, *sides) else 1
    for one, other in zip(torch.split(left, at_once), torch.split(right, at_once), strict=True):
        yield from torch.bmm(one, other).unbind()


class ColumnWeight(NamedTuple):
    """The weight of a column-parallel layer on this rank.

    weight: [n, in]. bias: [n] or None. blocks: its rows are this many blocks, each split over the ranks (3 for QKV).
    """

    weight: Tensor
    bias: Tensor | None
    blocks: int = 1


def columns(
    x: Tensor, layers: Sequence[ColumnWeight], shards: CanonicalShards, *, split: bool, stream: Stream | None = None
) -> tuple[Tensor, ...]:
    """The fan-out: x A_j^T + b_j for each of this rank's shards j, for each of ``layers``.

    x [s, b, in], equal on all ranks; with ``split`` this rank's rows of the sequence, which are gathered. Returns
    [blocks * own, s, b, n / (blocks * own)] for each layer: its blocks, each in shards.

    Backward: the gradient of x is a sum over all shards, in the tree: one all-reduce, or with ``split`` one more
    gather of x and one reduce-scatter. stream: of the tensor group. On it they run while the weights' gradients are
    computed.
    """
    tensors = (tensor for layer in layers for tensor in layer[:2])
    products = _ShardProducts(shards.own, [one.blocks for one in layers])
    return column_parallel_products(
        x.contiguous(), shards.comm, split and shards.comm.size > 1, stream, products, *tensors
    )


def rows(x: Tensor, weight: Tensor, bias: Tensor | None, shards: CanonicalShards, *, split: bool) -> Tensor:
    """The tree: the sum over all shards j of x_j A_j^T, and then the bias.

    x: [own, s, b, in / C], x_j of each of this rank's shards. weight: [out, own * in / C]. It should lie transposed in
    its memory, because its shards are then contiguous. Its gradient lies so in any case. Returns [s, b, out], equal on
    all ranks; with ``split`` this rank's rows of the sequence. One all-reduce forward, or with ``split`` one
    reduce-scatter forward and one all-gather backward. The gradient of the bias is whole on every rank.
    """
    x, weight = lowered(x, weight)
    return _Rows.apply(x, shards, split, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


def replicated(x: Tensor, weight: Tensor, bias: Tensor | None, shards: CanonicalShards, *, split: bool) -> Tensor:
    """X A^T + b with a whole weight, in blocks of rows of x [s, b, in], because each rank may have some of the rows.

    split: x is this rank's rows of the sequence. The gradients of weight and bias are then summed over the ranks.
    """
    return _Replicated.apply(*lowered(x, weight, bias), shards, split)  # type: ignore[no-untyped-call, no-any-return]


class _ShardProducts(Products):
    """Products that are computed one for each of ``own`` shards. blocks: of each layer."""

    def __init__(self, own: int, blocks: Sequence[int]) -> None:
        self.own, self.blocks = own, blocks

    def rows(self, grad: Tensor) -> Tensor:
        """[blocks * own, n, out / (blocks * own)]."""
        return grad.contiguous().view(grad.shape[0], -1, grad.shape[-1])

    def outputs(self, x: Tensor, weights: Sequence[Any], biases: Sequence[Any]) -> tuple[Tensor, ...]:
        flat, found = x.reshape(-1, x.shape[-1]), []
        for weight, bias, number in zip(weights, biases, self.blocks, strict=True):
            pieces = number * self.own
            size = weight.shape[0] // pieces
            y = flat.new_empty(pieces, flat.shape[0], size)
            of_biases = [None] * pieces if bias is None else torch.split(bias, size)
            for out, rows_, of_bias in zip(y.unbind(), torch.split(weight, size), of_biases, strict=True):
                if of_bias is None:
                    torch.mm(flat, rows_.t(), out=out)
                else:
                    torch.addmm(of_bias, flat, rows_.t(), out=out)
            found.append(y.view(pieces, *x.shape[:-1], size))
        return tuple(found)

    def of_input(self, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        # One product for each shard, of all its blocks and layers side by side.
        of_shards = _joined([part for mine in grads for part in torch.split(mine, self.own)], dim=2)
        shares = [weight.view(-1, mine.shape[-1], weight.shape[1]) for mine, weight in zip(grads, weights, strict=True)]
        weight_shards = _joined([part for share in shares for part in torch.split(share, self.own)], dim=1)
        return tree_sum(_products(of_shards, weight_shards))

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        found = x.new_empty(*grad.shape[::2], x.shape[1])
        for piece, out in zip(grad.unbind(), found.unbind(), strict=True):
            torch.mm(piece.t(), x, out=out)
        return found.flatten(0, 1)

    def of_bias(self, grad: Tensor) -> Tensor:
        # Not one sum of all: the order of its additions would depend on the number of pieces.
        return torch.cat([piece.sum(dim=0) for piece in grad.unbind()])


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shards: CanonicalShards, split: bool, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(weight, x)
        comm = ctx.comm = shards.comm
        ctx.split = split and comm.size > 1
        own, *shape, _ = x.shape
        y = tree_sum(_products(x.view(own, -1, x.shape[-1]), _of_shards(weight, own))).view(*shape, weight.shape[0])
        y, _ = reduced_rows(y, comm, ctx.split)
        return y if bias is None else finished(y.add_(bias))

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weight, x = ctx.saved_tensors
        comm, grad = ctx.comm, grads[0].contiguous()
        need_x, _, _, need_weight, need_bias = ctx.needs_input_grad
        if ctx.split:
            grad, _ = all_gathered(grad, comm)
        flat = grad.view(-1, grad.shape[-1])
        parts = x.view(x.shape[0], -1, x.shape[-1])
        grad_x = grad_weight = None
        if need_x:
            grad_x = torch.empty_like(x)
            for piece, out in zip(_of_shards(weight, x.shape[0]).unbind(), grad_x.view_as(parts).unbind(), strict=True):
                torch.mm(flat, piece.t(), out=out)
        if need_weight:
            turned = weight.new_empty(weight.shape[1], weight.shape[0])
            for part, out in zip(parts.unbind(), turned.tensor_split(len(parts)), strict=True):
                torch.mm(part.t(), flat, out=out)
            grad_weight = turned.t()
        return grad_x, None, None, grad_weight, flat.sum(dim=0) if need_bias else None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shards: CanonicalShards, split: bool
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.shards, ctx.split = shards, split
        blocks = x.chunk(shards.blocks(x.shape[0], split=split))
        return torch.cat([F.linear(block, weight, bias) for block in blocks])

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        shards, split, grad = ctx.shards, ctx.split, grads[0].contiguous()
        number = shards.blocks(x.shape[0], split=split)
        pairs = [
            (of_grad.reshape(-1, grad.shape[-1]), of_x.reshape(-1, x.shape[-1]))
            for of_grad, of_x in zip(grad.chunk(number), x.chunk(number), strict=True)
        ]
        grad_x = torch.cat([mine @ weight for mine, _ in pairs]).view(x.shape)
        grad_weight = tree_sum(mine.t() @ rows_ for mine, rows_ in pairs)
        grad_bias = tree_sum(mine.sum(dim=0) for mine, _ in pairs) if ctx.needs_input_grad[2] else None
        if split and shards.comm.size > 1:
            grad_weight, _ = all_reduced(grad_weight, shards.comm)
            grad_bias = None if grad_bias is None else all_reduced(grad_bias, shards.comm)[0]
        return grad_x, grad_weight, grad_bias, None, None


def _of_shards(weight: Tensor, own: int) -> Tensor:
    """The columns of ``weight`` [out, own * n] of each shard, transposed and contiguous: [own, n, out]."""
    return weight.t().contiguous().view(own, -1, weight.shape[0])


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
