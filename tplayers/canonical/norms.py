"""LayerNorm and RMSNorm whose gradients of weight and bias are sums over blocks of rows, in the tree."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from commengine.dtypes import wide
from tplayers.functions import finished, one_derivative, widened
from tplayers.norm import WideLayerNorm

from .pointwise import pointwise
from .shards import CanonicalShards


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, shards: CanonicalShards, *, split: bool) -> Tensor:
    """``torch.nn.functional.layer_norm`` over the last dimension of x [s, b, h]; sums over tokens are in float32.

    split: x is this rank's rows of the sequence. The parameters' gradients are then summed over the tensor group.
    """
    sums = partial(shards.sum_of_rows, split=split)
    return WideLayerNorm.apply(widened(x).contiguous(), weight, bias, eps, sums)  # type: ignore[no-untyped-call, no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float, shards: CanonicalShards, *, split: bool) -> Tensor:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension of x [s, b, h]; as `layer_norm`."""
    return _RootMeanSquare.apply(widened(x), weight, eps, shards, split)  # type: ignore[no-untyped-call, no-any-return]


class _RootMeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, shards: CanonicalShards, split: bool) -> Tensor:
        x = x.contiguous()
        of_x = wide(x)
        squares = of_x.square().sum(dim=-1, keepdim=True)
        scale = pointwise(torch.rsqrt, squares / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.shards, ctx.split = shards, split
        normalised: Tensor = (of_x * scale).to(x.dtype)
        return finished(normalised.mul_(weight))

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        of_x, grad, of_weight = wide(x), wide(grads[0].contiguous()), wide(weight)
        product = grad * of_x
        # Not a product with the weight as a matrix: its order of additions may depend on the number of rows.
        along = (product * of_weight).sum(dim=-1, keepdim=True) * scale * scale * scale / -x.shape[-1]
        grad_weight = ctx.shards.sum_of_rows(product.mul_(scale), split=ctx.split)
        grad_x = torch.mul(grad, of_weight).mul_(scale).add_(of_x * along)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None, None
