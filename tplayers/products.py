"""Products of linear layers: with packed weights, and those that are written where a collective takes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import Communicator

from .autocast import lowered
from .derivatives import one_derivative
from .regions import (
    communicates,
    in_shared_memory,
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


def columns_first(weight: Tensor) -> Tensor:
    """``weight`` [out, in] transposed in its memory: the numbers of a column side by side, one column after another."""
    return weight.t().contiguous().t()


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """``F.linear``; from ``packed``, a copy of the weight, if there is one, rows enough, no backward, no autocast."""
    few = x.numel() < PACKED_ROWS * x.shape[-1]
    if packed is None or few or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
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
    if communicates(comm):
        x, weight = lowered(x, weight)
    operation = "reduce_scatter" if sequence_parallel else "all_reduce"
    numel = x.numel() // x.shape[-1] * weight.shape[0]
    plain = x.dim() > 1 and (packed is None or torch.is_grad_enabled())
    if plain and in_shared_memory(operation, numel, x, comm):
        partial = _Product.apply(x, weight, comm, operation)  # type: ignore[no-untyped-call]
    else:
        partial = linear_product(x, weight, None, packed)
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(partial, comm)
    return reduce_own_from_tensor_parallel_region(partial, comm)


class _Product(torch.autograd.Function):
    """The product x weight^T, written where ``operation`` takes it.

    Its sum is a Function of its own: a recomputation then ends before the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: Communicator, operation: str) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.shape = x.shape
        return product_for(operation, x, weight.t(), comm)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        grad_x = None if weight is None else (rows @ weight).view(ctx.shape)
        grad_weight = None if x is None else rows.t() @ x.reshape(-1, x.shape[-1])
        return grad_x, grad_weight, None, None
