"""Normalisation over a hidden dimension: LayerNorm and RMSNorm, with parameters that every rank holds whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from commengine.dtypes import HALF_TYPES, wide

from .functions import PlainForm, differentiable, finished, widened
from .placement import Constant, Placement, add_parameter

#: The norm of a model's layers.
Normalization: TypeAlias = Literal["LayerNorm", "RMSNorm"]


class _Norm(nn.Module):
    """A norm over the last dimension, with parameters that every rank holds whole."""

    weight: nn.Parameter
    #: the parameters and their initial values
    _initial: ClassVar = {"weight": 1.0}

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.sequence_parallel = sequence_parallel
        for name, value in self._initial.items():
            add_parameter(self, name, Placement((hidden_size,), Constant(value), partial=sequence_parallel), dtype)


class LayerNorm(_Norm):
    """torch.nn.LayerNorm over the last dimension, with parameters that every rank holds whole.

    sequence_parallel: the input is this rank's sequence shard, so the parameters' gradients are partial (see
        `Placement`).
    """

    bias: nn.Parameter
    _initial: ClassVar = {"weight": 1.0, "bias": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu and x.dtype in HALF_TYPES:
            return WideLayerNorm.apply(x, self.weight, self.bias, self.eps, None)  # type: ignore[no-untyped-call, no-any-return]
        return torch.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def _plain_layer_norm(ctx: Any) -> PlainForm | None:
    if ctx.sum_of_rows is not None:
        return None
    x, weight, *_ = ctx.saved_tensors

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
        y = torch.layer_norm(wide(x), weight.shape, wide(weight), wide(bias), ctx.eps)
        return (y.to(x.dtype),)

    return plain, [x, weight, torch.zeros_like(weight), None, None]  # no gradient depends on the bias


class WideLayerNorm(torch.autograd.Function):
    """torch's layer_norm, with the sums over tokens in float32, or float64 for float64.

    On the host torch adds up halves in half precision: for 8192 tokens the gradient of a bfloat16 bias is then wrong by
    half its size. This Function keeps the same tensors for the backward as torch's does.

    sum_of_rows: returns the sums over the tokens of two tensors of the shape of x, side by side; None for torch's sums.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, sum_of_rows: Callable[..., Tensor] | None
    ) -> Tensor:
        # With parameters in float32, torch returns mean and deviation in float32, too.
        kind = torch.promote_types(x.dtype, torch.float32)
        y, mean, scale = torch.native_layer_norm(x, weight.shape, weight.to(kind), bias.to(kind), eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.sum_of_rows, ctx.eps = sum_of_rows, eps
        return y

    @staticmethod
    @differentiable(_plain_layer_norm)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mean, scale = ctx.saved_tensors
        of_x, grad, by_torch = wide(x), wide(grads[0].contiguous()), ctx.sum_of_rows is None
        of_weight = weight.to(of_x.dtype)
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, of_x, list(weight.shape), mean, scale, of_weight, of_weight, [True, by_torch, by_torch]
        )
        if not by_torch:
            grad_weight, grad_bias = ctx.sum_of_rows((of_x - mean).mul_(scale).mul_(grad), grad).chunk(2)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019). Every rank holds the weight.

    Halves are computed in float32. eps, sequence_parallel: as in `LayerNorm`.
    """

    def forward(self, x: Tensor) -> Tensor:
        return _RootMeanSquare.apply(widened(x), self.weight, self.eps)  # type: ignore[no-untyped-call, no-any-return]


def _plain_root_mean_square(ctx: Any) -> PlainForm:
    x, weight, _ = ctx.saved_tensors

    def plain(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        of_x = wide(x)
        scale = (of_x.square().mean(dim=-1, keepdim=True) + ctx.eps).rsqrt()
        return ((of_x * scale).to(x.dtype) * weight,)

    return plain, [x, weight, None]


class _RootMeanSquare(torch.autograd.Function):
    """RMSNorm that keeps x, the weight and a number per token; torch's rms_norm keeps several tensors of x's size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        of_x = wide(x)
        # A norm reads x once and writes no square of it.
        length = torch.linalg.vector_norm(of_x, dim=-1, keepdim=True)
        scale = (length.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        normalised: Tensor = (of_x * scale).to(x.dtype)
        return finished(normalised.mul_(weight))

    @staticmethod
    @differentiable(_plain_root_mean_square)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        of_x, grad, of_weight = wide(x), wide(grads[0]), wide(weight)
        # Only two tensors of the size of x: memory that is new costs more than the arithmetic.
        product = grad * of_x
        grad_weight = scale.reshape(1, -1) @ product.reshape(-1, x.shape[-1])
        along = (product @ of_weight).unsqueeze(-1) * scale * scale * scale / -x.shape[-1]
        grad_x = torch.mul(grad, of_weight).mul_(scale).addcmul_(of_x, along)
        return grad_x.to(x.dtype), grad_weight.view(-1).to(weight.dtype), None


#: the class of each norm
NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
