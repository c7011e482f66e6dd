"""The statistics of split fields, and normalisation by them, with derivatives.

Each rank computes the mean of its points and their squared deviations from it, and they are merged as in Chan et al.
1979, so that no large sums cancel: after one all-gather of the two, or on many ranks by two all-reduces. The backward
has one all-reduce of two sums. The statistics are sums in torch's cascaded order: ``torch.var_mean`` is as exact, and
many times slower on a host.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from commengine import Communicator
from commengine.dtypes import wide
from tplayers.adjoint_pair import followed, linked, with_tie, zeros_for_none
from tplayers.functions import PlainForm, differentiable, in_forward_dtypes
from tplayers.movement.operators import all_reduce

from .layer import replicated

#: on more ranks statistics are reduced, and not gathered: a rank then gets as much whatever their number
GATHERED = 16


def moments(x: Tensor, dims: tuple[int, ...], comm: Communicator, points: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance (not corrected) over ``dims`` and all ranks, without ``dims``. Collective over ``comm``.

    points: the number of values, of all ranks, that each mean is of.
    """
    mine = math.prod(x.shape[dim] for dim in dims)
    mean = x.sum(dims, keepdim=True) / mine
    squares = _squared_deviations(x, mean.flatten(), mine) if 0 in dims and x.is_cpu else None
    if squares is None:
        deviation = x - mean
        squares = deviation.mul_(deviation).sum(dims)
    mean = mean.view_as(squares)
    if comm.size == 1:
        return mean, squares / points
    if comm.size > GATHERED:
        factor = mine / points
        total = mean * factor
        comm.all_reduce(total)
        var = squares / points + (mean - total).square() * factor
        comm.all_reduce(var)
        return total, var
    share = torch.full((1,), mine / points, dtype=x.dtype, device=x.device)  # not from the host: that would wait
    part = torch.cat([mean.reshape(-1), squares.reshape(-1), share])
    ranks = part.new_empty(comm.size, part.numel())
    comm.all_gather(ranks.view(-1), part)
    means, squared, shares = ranks.split_with_sizes([mean.numel(), mean.numel(), 1], 1)
    total = (means * shares).sum(0)
    var = (means - total).square_().mul_(shares).add_(squared, alpha=1 / points).sum(0)
    return total.view_as(mean), var.view_as(mean)


def _squared_deviations(x: Tensor, mean: Tensor, points: int) -> Tensor | None:
    """The sum of (x - mean)^2 for each channel of a host tensor, or None if large numbers would cancel.

    torch's kernel for the backward of batch normalisation sums g and g (x - mean) in one pass, without a tensor in
    between; here g is x, and the sum of x (x - mean) is the wanted one and mean * (the sum of x - mean).
    """
    found = torch.ops.aten.native_batch_norm_backward(
        x, x, None, mean, torch.ones_like(mean), None, None, False, 0.0, [False, True, True]
    )
    squares = found[1] - mean * (found[2] - points * mean)
    cancels = mean.square().mul_(points) > 100 * squares
    return None if bool(cancels.any()) else squares


def _again(x: Tensor, dims: tuple[int, ...], ctx: Any) -> Tensor:
    """``x`` with mean 0 and variance 1 over ``dims``, by operators that differentiate any number of times."""

    def mean(values: Tensor) -> Tensor:
        total = values.sum(dims, keepdim=True)
        if ctx.comm.size > 1:
            total = all_reduce(total, ctx.comm)
        return total / int(ctx.points)

    deviation = wide(x) - mean(wide(x))
    return deviation * (mean(deviation.square()) + float(ctx.eps)).rsqrt()


def _plain_batch_norm(ctx: Any) -> PlainForm:
    x, weight, bias, *_, tie = ctx.saved_tensors
    comm, shape = ctx.comm, (-1, *(1,) * (x.dim() - 2))

    def plain(x: Tensor, *parameters: Tensor) -> tuple[Tensor]:
        y = _again(x, (0, *range(2, x.dim())), ctx)
        if parameters:
            factor, addend = (one.view(shape) for one in replicated(comm, *parameters))
            y = torch.addcmul(addend, y, factor)
        return (y.to(x.dtype),)

    return plain, [x, weight, bias, None, None, None], tie


class BatchNormalise(torch.autograd.Function):
    """Batch normalisation by torch's own kernels, with statistics and sums of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, comm: Communicator, eps: float, points: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = (0, *range(2, x.dim()))
        mean, var = moments(wide(x), dims, comm, points)
        scale, shift = (None if p is None else wide(p) for p in (weight, bias))
        y = torch.native_batch_norm(x, scale, shift, mean, var, False, 0.0, eps)[0]
        ctx.comm, ctx.eps, ctx.points = comm, eps, points
        ctx.mark_non_differentiable(mean, var)
        y, tie = with_tie(ctx, y, saved=(x, weight, bias, mean, var))
        return y, mean, var, tie

    @staticmethod
    @zeros_for_none
    @differentiable(_plain_batch_norm)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, _, mean, var, _ = ctx.saved_tensors
        grad = grads[0]
        scale = None if weight is None else wide(weight)
        ones = torch.ones_like(mean) if scale is None else scale
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, ones, mean, var, None, None, False, ctx.eps, [False, True, True]
        )
        sums = torch.stack((of_weight, of_bias)).to(mean.dtype)
        if ctx.comm.size > 1:
            ctx.comm.all_reduce(sums)
        grad_x = None
        if ctx.needs_input_grad[0]:
            # weight / deviation * (grad - mean of grad - normalised * mean of (grad * normalised)), as a*grad + b*x + c
            inverse = (var + ctx.eps).rsqrt_()
            a = ones * inverse
            per_point = a / -ctx.points
            b = inverse.mul_(per_point).mul_(sums[0])
            c = per_point.mul_(sums[1]).addcmul_(b, mean, value=-1)
            shape = (-1, *(1,) * (x.dim() - 2))
            grad_x = torch.addcmul(c.view(shape), wide(x), b.view(shape))
            grad_x = grad_x.addcmul_(wide(grad), a.view(shape)).to(x.dtype)
        of_parameters = (None, None) if weight is None else (sums[0].to(weight.dtype), sums[1].to(weight.dtype))
        return grad_x, *of_parameters, None, None, None


class Normalise(torch.autograd.Function):
    """Normalisation of [batch, groups, values]. statistics: a list that gets mean and variance, [batch, groups]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, eps: float, points: int, statistics: list[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        of_x = wide(x)
        mean, var = moments(of_x, (2,), comm, points)
        if statistics is not None:
            statistics += mean, var
        mean, scale = mean.unsqueeze(-1), (var + eps).rsqrt().unsqueeze(-1)
        ctx.comm, ctx.eps, ctx.points = comm, eps, points
        y = (of_x - mean).mul_(scale)  # not x * scale - mean * scale, where large numbers cancel
        return with_tie(ctx, y.to(x.dtype), saved=(x, mean, scale))

    @staticmethod
    @zeros_for_none
    @in_forward_dtypes
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, mean, scale, tie = ctx.saved_tensors
        if followed():
            with torch.enable_grad():
                y = _again(x, (2,), ctx).to(x.dtype)
            found = torch.autograd.grad(y, x, linked(grads[0], tie, grads[1]), create_graph=torch.is_grad_enabled())
            return *found, None, None, None, None
        normalised, grad = (wide(x) - mean).mul_(scale), wide(grads[0])
        sums = torch.stack((grad.sum(2), (grad * normalised).sum(2)))
        if ctx.comm.size > 1:
            ctx.comm.all_reduce(sums)
        of_mean, of_scale = (sums / ctx.points).unsqueeze(-1).unbind()
        result = (grad - of_mean).addcmul_(normalised, of_scale, value=-1).mul_(scale)
        return result.to(x.dtype), None, None, None, None
