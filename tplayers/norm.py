"""Normalisation over a hidden dimension: LayerNorm and RMSNorm, replicated, or LayerNorm split over the ranks."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from commengine import Communicator
from commengine.compiled_ops import all_gather_into_, all_reduce_
from commengine.dtypes import HALF_TYPES

from .autocast import widened
from .canonical import norms
from .canonical.shards import CanonicalShards
from .derivatives import one_derivative
from .placement import Constant, Placement, add_parameter, require_divisible
from .regions import new_whole

#: The norm of a model's layers.
Normalization: TypeAlias = Literal["LayerNorm", "RMSNorm"]


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm over the last dimension, with parameters that every rank holds whole.

    sequence_parallel: the input is this rank's sequence shard, so the parameters' gradients are partial (see
        `Placement`).
    """

    weight: nn.Parameter
    bias: nn.Parameter
    canonical: CanonicalShards | None = None

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
        add_parameter(self, "weight", Placement((hidden_size,), Constant(1.0), partial=sequence_parallel), dtype)
        add_parameter(self, "bias", Placement((hidden_size,), partial=sequence_parallel), dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.canonical is not None:
            split = self.sequence_parallel
            return norms.layer_norm(x, self.weight, self.bias, self.eps, self.canonical, split=split)
        if x.is_cpu and x.dtype in HALF_TYPES:
            return _HostHalfNorm.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call, no-any-return]
        return torch.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class _HostHalfNorm(torch.autograd.Function):
    """torch's layer_norm in half precision, with the sums over tokens in float32.

    On the host torch adds them up in half precision: for 8192 tokens the gradient of a bfloat16 bias is then wrong by
    half its size. This Function keeps the same tensors for the backward as torch's does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        # With parameters in float32, torch returns mean and deviation in float32, too.
        y, mean, scale = torch.native_layer_norm(x, weight.shape, weight.float(), bias.float(), eps)
        ctx.save_for_backward(x, weight, mean, scale)
        return y

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, scale = ctx.saved_tensors
        wide, like_bias = weight.float(), torch.zeros_like(weight, dtype=torch.float32)
        found = torch.ops.aten.native_layer_norm_backward(
            grads[0].float(), x.float(), list(weight.shape), mean, scale, wide, like_bias, [True, True, True]
        )
        return found[0].to(x.dtype), found[1].to(weight.dtype), found[2].to(weight.dtype), None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019). Every rank holds the weight.

    Halves are computed in float32. eps, sequence_parallel: as in `LayerNorm`.
    """

    weight: nn.Parameter
    canonical: CanonicalShards | None = None

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
        add_parameter(self, "weight", Placement((hidden_size,), Constant(1.0), partial=sequence_parallel), dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.canonical is not None:
            return norms.rms_norm(x, self.weight, self.eps, self.canonical, split=self.sequence_parallel)
        return _RootMeanSquare.apply(widened(x), self.weight, self.eps)  # type: ignore[no-untyped-call, no-any-return]


class _RootMeanSquare(torch.autograd.Function):
    """RMSNorm that keeps x, the weight and a number per token; torch's rms_norm keeps several tensors of x's size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        # A norm reads x once and writes no square of it.
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = (length.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        normalised: Tensor = (wide * scale).to(x.dtype)
        return normalised.mul_(weight)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, grad, wide_weight = _wide(x), _wide(grads[0]), _wide(weight)
        # Only two tensors of the size of x: memory that is new costs more than the arithmetic.
        product = grad * wide
        grad_weight = scale.reshape(1, -1) @ product.reshape(-1, x.shape[-1])
        along = (product @ wide_weight).unsqueeze(-1) * scale * scale * scale / -x.shape[-1]
        grad_x = torch.mul(grad, wide_weight).mul_(scale).addcmul_(wide, along)
        return grad_x.to(x.dtype), grad_weight.view(-1).to(weight.dtype), None


#: the class of each norm
NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def require_normalization(name: str) -> None:
    """Raise ValueError unless ``name`` is a `Normalization`."""
    if name not in NORMS:
        raise ValueError(f"normalization={name!r} must be one of {', '.join(NORMS)}")


class ParallelLayerNorm(nn.Module):
    """Layer normalisation over a hidden dimension that is split over ``comm``.

    hidden_size: the whole dimension, which ``comm.size`` must divide (else ValueError). Weight and bias are split like
    it.

    forward: x [..., hidden_size / comm.size], this rank's features -> the same shape. One all-gather of each rank's
    mean and squared deviation forward (merged as in Chan et al. 1979, so that no large sums cancel) and one all-reduce
    of two sums backward, each of two numbers per token. Every rank must call it and run its backward.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self, hidden_size: int, comm: Communicator, eps: float = 1e-5, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        require_divisible(comm.size, hidden_size=hidden_size)
        self.comm = comm
        self.eps = eps
        split: dict[str, Any] = {"dim": 0, "index": comm.rank, "count": comm.size}
        add_parameter(self, "weight", Placement((hidden_size,), Constant(1.0), **split), dtype)
        add_parameter(self, "bias", Placement((hidden_size,), **split), dtype)

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = _Normalise.apply(widened(x), self.comm, self.eps)  # type: ignore[no-untyped-call]
        return torch.addcmul(self.bias, normalised, self.weight)


class _Normalise(torch.autograd.Function):
    """Computes halves in float32, as torch's layer_norm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, eps: float) -> Tensor:
        wide = _wide(x)
        local_var, local_mean = torch.var_mean(wide, dim=-1, correction=0)
        mine = torch.stack((local_mean, local_var))
        ranks = new_whole(mine, comm)
        all_gather_into_(ranks, mine, comm)
        means, variances = ranks[0::2], ranks[1::2]
        mean = means.mean(dim=0)
        var = variances.mean(dim=0) + (means - mean).square().mean(dim=0)
        mean, scale = mean.unsqueeze(-1), (var + eps).rsqrt().unsqueeze(-1)
        ctx.save_for_backward(x, mean, scale)
        ctx.comm = comm
        return ((wide - mean) * scale).to(x.dtype)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, mean, scale = ctx.saved_tensors
        normalised, grad = (_wide(x) - mean) * scale, _wide(grads[0])
        sums = torch.stack((grad.sum(dim=-1), (grad * normalised).sum(dim=-1)))
        all_reduce_(sums, ctx.comm)
        sums /= grad.shape[-1] * ctx.comm.size
        result = (grad - sums[0].unsqueeze(-1) - normalised * sums[1].unsqueeze(-1)) * scale
        return result.to(x.dtype), None, None


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
