"""Linear layers split by columns and by rows (paper, section 3, equations 2 and 3, Figure 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from commengine import Communicator

from .placement import Constant, Normal, Placement, new_parameter, require_divisible
from .regions import (
    gather_from_tensor_parallel_region,
    reduce_own_from_tensor_parallel_region,
    scatter_to_tensor_parallel_region,
)

DEFAULT_INIT = Normal(0.02)


class ColumnParallelLinear(nn.Module):
    """Y = X A^T + b with A split by output features: A = [A_1; ...; A_p], rank i computes Y_i = X A_i^T + b_i.

    in_features, out_features: of the whole layer; ``comm.size`` must divide out_features (else ValueError).
    comm: the tensor group. gather_output: return Y whole instead of this rank's part.
    blocks: the output features are this many equal blocks, each split over the ranks (3 for a fused QKV).
    init: of the weight; the bias starts at 0. Call `tplayers.initialize` on the root module.

    forward: x [..., in_features], equal on all ranks -> [..., out_features / comm.size] (or [..., out_features]).
    One all-reduce of x's gradient backward (f).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        gather_output: bool = False,
        *,
        blocks: int = 1,
        init: Normal | Constant = DEFAULT_INIT,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_divisible(comm.size, out_features=out_features // blocks)
        if gather_output and blocks > 1:
            raise ValueError("gather_output needs blocks=1: the gathered parts would interleave the blocks")
        self.comm = comm
        self.gather_output = gather_output
        block = out_features // blocks
        split: dict[str, Any] = {"dim": 1, "index": comm.rank, "count": comm.size}
        weight = Placement((out_features, in_features), init, view=(blocks, block, in_features), **split)
        self.weight = new_parameter(weight, dtype)
        self.bias = new_parameter(Placement((out_features,), view=(blocks, block), **split), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = column_parallel_linear(x, self.weight, self.bias, self.comm)
        return gather_from_tensor_parallel_region(y, self.comm) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """Y = X A^T + b with A split by input features: rank i computes X_i A_i^T, g sums, then b is added once.

    in_features, out_features: of the whole layer; ``comm.size`` must divide in_features (else ValueError).
    input_is_parallel: x is already this rank's part; else it is equal on all ranks and split here.

    forward: x [..., in_features / comm.size] (or [..., in_features]) -> [..., out_features], equal on all ranks.
    One all-reduce of the output forward (g).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        input_is_parallel: bool = True,
        *,
        init: Normal | Constant = DEFAULT_INIT,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_divisible(comm.size, in_features=in_features)
        self.comm = comm
        self.input_is_parallel = input_is_parallel
        weight = Placement((out_features, in_features), init, dim=1, index=comm.rank, count=comm.size)
        self.weight = new_parameter(weight, dtype)
        # Replicated, added after the sum: every rank then has its whole gradient, without communication.
        self.bias = new_parameter(Placement((out_features,)), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_tensor_parallel_region(x, self.comm)
        y = reduce_own_from_tensor_parallel_region(F.linear(x, self.weight), self.comm)
        return y if self.bias is None else y.add_(self.bias)


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator) -> Tensor:
    """f, then x A_i^T + b_i, as one autograd Function: the gradient of x is reduced where the product left it.

    x [..., in], equal on all ranks of ``comm``; weight [out / comm.size, in], bias [out / comm.size], this rank's
    rows. One all-reduce of x's gradient backward, which every rank must run.
    """
    if comm.size == 1:
        return F.linear(x, weight, bias)
    return _ColumnParallelLinear.apply(x, weight, bias, comm)  # type: ignore[no-untyped-call, no-any-return]


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ weight).view_as(x)
            ctx.comm.all_reduce(grad_x)  # this product is ours alone: no copy, unlike f's
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(dim=0)
        return grad_x, grad_weight, grad_bias, None
