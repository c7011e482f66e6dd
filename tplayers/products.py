"""Products of linear layers: with packed weights, and the row-parallel product with its sum as one Function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from commengine import Communicator
from commengine.compiled_ops import all_gather_into_

from .regions import (
    communicates,
    new_whole,
    product_for,
    reduce_own_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

#: the fewest rows for which a product with a packed weight is faster
PACKED_ROWS = 4


def pack(weight: Tensor) -> Tensor:
    """A copy of ``weight`` [out, in] in the order in which oneDNN's product with a few rows reads it.

    ``weight`` is in float32 on the host. Of 8 rows the product needs half as long as MKL's of the weight itself.
    """
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return copy


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """``F.linear``; from ``packed``, a copy of the weight, if there is one, no backward and rows enough."""
    if packed is None or torch.is_grad_enabled() or x.numel() < PACKED_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def row_parallel_product(
    x: Tensor, weight: Tensor, comm: Communicator, sequence_parallel: bool, packed: Tensor | None
) -> Tensor:
    """The product x A_i^T of a row-parallel layer, summed over the ranks (g).

    x [..., in / comm.size], weight [out, in / comm.size] -> [..., out], equal on all ranks. With ``sequence_parallel``:
    -> this rank's shard of the sum along dim 0. packed: a copy of ``weight`` by `pack`, which a product without a
    backward may use. Every rank of ``comm`` must call it, and with ``sequence_parallel`` run its backward.
    """
    if communicates(comm) and x.is_cpu and x.dim() > 1 and not torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            return _RowParallelProduct.apply(x, weight, comm, sequence_parallel)  # type: ignore[no-untyped-call, no-any-return]
        if packed is None:
            return _summed_product(x, weight, comm, sequence_parallel)
    return _summed(linear_product(x, weight, None, packed), comm, sequence_parallel)


def _summed_product(x: Tensor, weight: Tensor, comm: Communicator, sequence_parallel: bool) -> Tensor:
    """`row_parallel_product` without a backward, on the host."""
    operation = "reduce_scatter" if sequence_parallel else "all_reduce"
    if x.numel() // x.shape[-1] * weight.shape[0] * x.itemsize < comm.operands_from(operation, x.dtype):
        return _summed(F.linear(x, weight), comm, sequence_parallel)
    return _summed(product_for(operation, x, weight.t(), comm), comm, sequence_parallel)


def _summed(partial: Tensor, comm: Communicator, sequence_parallel: bool) -> Tensor:
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(partial, comm)
    return reduce_own_from_tensor_parallel_region(partial, comm)


class _RowParallelProduct(torch.autograd.Function):
    """The product and its sum as one Function, so that the product is written where the collective takes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: Communicator, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.comm, ctx.sequence_parallel, ctx.shape = comm, sequence_parallel, x.shape
        return _summed_product(x, weight, comm, sequence_parallel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        if ctx.sequence_parallel:
            part = grad.contiguous()
            grad = new_whole(part, ctx.comm)
            all_gather_into_(grad, part, ctx.comm)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = (rows @ weight).view(ctx.shape) if ctx.needs_input_grad[0] else None
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None
