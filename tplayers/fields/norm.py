"""Batch, instance, group and layer normalisation of split fields.

Each rank computes the mean of its points and their squared deviations from it, and they are merged as in Chan et al.
1979, so that no large sums cancel: after one all-gather of the two, or on many ranks by two all-reduces. The backward
has one all-reduce of two sums. The statistics are sums in torch's cascaded order: ``torch.var_mean`` is as exact, and
many times slower on a host.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import CartesianGrid, Communicator, Decomposition
from commengine.dtypes import wide
from tplayers.functions import PlainForm, differentiable, in_forward_dtypes, widened
from tplayers.movement.operators import all_reduce
from tplayers.placement import Constant, Placement, add_parameter

from .layer import FieldLayer, replicated

#: on more ranks statistics are reduced, and not gathered: a rank then gets as much whatever their number
GATHERED = 16


class _FieldNorm(FieldLayer):
    """A normalisation with a weight, initially 1, and a bias, initially 0, of one shape; or without both."""

    def __init__(
        self,
        grid: CartesianGrid,
        input: Decomposition,
        channels: int,
        eps: float,
        affine: bool,
        dtype: torch.dtype | None,
        *,
        of_points: bool = False,
    ) -> None:
        """of_points: weight and bias have a value for each channel and point, otherwise for each channel."""
        super().__init__(grid, input, channels)
        self.eps, shape = eps, (channels, *(input.shape if of_points else ()))
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            add_parameter(self, name, Placement(shape, Constant(value)) if affine else None, dtype)

    def _normalised(self, x: Tensor, groups: int, part: Any) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` with mean 0 and variance 1 in each sample and group of channels, times the weight, plus the bias.

        Also returns mean and variance [batch, groups], which have no gradient.

        part: the place in weight and bias of what this rank's points take, or their shape beside the points.
        """
        self.check(x)
        x = widened(x)
        points = self.input.points() * x.shape[1] // groups
        values = x.reshape(x.shape[0], groups, -1)
        y, mean, var = _Normalise.apply(values, self.grid.comm, self.eps, points)  # type: ignore[no-untyped-call]
        y = y.view(x.shape)
        weight, bias = self.summed_parameters()
        return y if weight is None else torch.addcmul(bias[part], y, weight[part]).to(x.dtype), mean, var


class _RunningNorm(_FieldNorm):
    """A normalisation that may keep running statistics of the channels."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def _keep_statistics(self, channels: int, momentum: float | None, keep: bool, dtype: torch.dtype | None) -> None:
        self.momentum, self.track_running_stats = momentum, keep
        self.register_buffer("running_mean", torch.zeros(channels, dtype=dtype) if keep else None)
        self.register_buffer("running_var", torch.ones(channels, dtype=dtype) if keep else None)
        self.register_buffer("num_batches_tracked", torch.tensor(0) if keep else None)

    def _by_running_statistics(self, x: Tensor) -> Tensor:
        weight, bias = self.summed_parameters()
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.eps)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, factor: float) -> None:
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(var.to(self.running_var.dtype), factor)


class FieldBatchNorm(_RunningNorm):
    """torch.nn.BatchNorm1d, 2d or 3d of a field that is split over ``grid``: the statistics are of the whole field.

    num_features, eps, momentum (None: the mean of all batches), affine, track_running_stats: as torch's. The state dict
    has the names of torch's layer. Ranks that hold other samples (data parallelism) have their own statistics, as with
    torch.nn.BatchNorm2d under DistributedDataParallel.
    grid, input: as of `FieldConv`.

    forward: x [batch, num_features, *local block] -> the same shape. In training one all-gather forward, of two
    numbers a channel, and one all-reduce backward, of two, which also sums the parameters' gradients. Collective.
    """

    def __init__(
        self,
        num_features: int,
        grid: CartesianGrid,
        input: Decomposition,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(grid, input, num_features, eps, affine, dtype)
        self._keep_statistics(num_features, momentum, track_running_stats, dtype)
        self._share = self.input.points() / math.prod(self._local_shape)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if not self.training and self.running_mean is not None:
            return self._by_running_statistics(x)
        points = round(x.shape[0] * math.prod(x.shape[2:]) * self._share)
        if points < 2:
            raise ValueError(f"FieldBatchNorm needs more than one value a channel in training, not {points}")
        y, mean, var = _BatchNormalise.apply(x, self.weight, self.bias, self.grid.comm, self.eps, points)  # type: ignore[no-untyped-call]
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self._track(mean, var * (points / (points - 1)), factor)
        return y  # type: ignore[no-any-return]


class FieldInstanceNorm(_RunningNorm):
    """torch.nn.InstanceNorm1d, 2d or 3d of a field that is split over ``grid``: each sample and channel has one mean.

    num_features, eps, momentum (None: running statistics stay as they are), affine, track_running_stats: as torch's.
    The state dict has the names of torch's layer. grid, input: as of `FieldConv`.

    forward: x [batch, num_features, *local block] -> the same shape. Communication: as of `FieldGroupNorm`; in ``eval``
    with running statistics none. Collective. Raises ValueError for a field of one point, unless these are used.
    """

    def __init__(
        self,
        num_features: int,
        grid: CartesianGrid,
        input: Decomposition,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(grid, input, num_features, eps, affine, dtype)
        self._keep_statistics(num_features, momentum, track_running_stats, dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if not self.training and self.running_mean is not None:
            return self._by_running_statistics(x)
        points = self.input.points()
        if points < 2:
            raise ValueError("FieldInstanceNorm needs a field of more than one point")
        y, mean, var = self._normalised(x, x.shape[1], (slice(None), *(None,) * self.axes))
        if self.training:
            self._track(mean.mean(0), var.mean(0) * (points / (points - 1)), self.momentum or 0.0)
        return y


class FieldGroupNorm(_FieldNorm):
    """torch.nn.GroupNorm of a field that is split over ``grid``.

    num_groups, num_channels, eps, affine: as torch's. grid, input: as of `FieldConv`.

    forward: x [batch, num_channels, *local block] -> the same shape. One all-gather of two numbers for each sample and
    group forward, one all-reduce of as many backward. Collective.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        grid: CartesianGrid,
        input: Decomposition,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(grid, input, num_channels, eps, affine, dtype)
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"num_groups={num_groups} must divide num_channels={num_channels}")
        self.num_groups = num_groups

    def forward(self, x: Tensor) -> Tensor:
        return self._normalised(x, self.num_groups, (slice(None), *(None,) * self.axes))[0]


class FieldLayerNorm(_FieldNorm):
    """torch.nn.LayerNorm([channels, *space]) of a field that is split over ``grid``: each sample has one mean.

    channels, eps, elementwise_affine: as torch's. Weight and bias have a value for each channel and point of the whole
    field, and every rank holds all of them, as of every layer here; a layer with one value a channel is
    ``FieldGroupNorm(1, channels)``. grid, input: as of `FieldConv`.

    forward: x [batch, channels, *local block] -> the same shape. Communication: as of `FieldGroupNorm`. Collective.
    """

    def __init__(
        self,
        channels: int,
        grid: CartesianGrid,
        input: Decomposition,
        *,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(grid, input, channels, eps, elementwise_affine, dtype, of_points=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._normalised(x, 1, (slice(None), *self.input.slices(self.grid.coords)))[0]


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
    means, squared, shares = torch.split(ranks, [mean.numel(), mean.numel(), 1], dim=1)
    total = (means * shares).sum(0)
    var = squared.sum(0) / points + ((means - total).square() * shares).sum(0)
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
    x, weight, bias, *_ = ctx.saved_tensors
    comm, shape = ctx.comm, (-1, *(1,) * (x.dim() - 2))

    def plain(x: Tensor, *parameters: Tensor) -> tuple[Tensor]:
        y = _again(x, (0, *range(2, x.dim())), ctx)
        if parameters:
            factor, addend = (one.view(shape) for one in replicated(comm, *parameters))
            y = torch.addcmul(addend, y, factor)
        return (y.to(x.dtype),)

    return plain, [x, weight, bias, None, None, None]


class _BatchNormalise(torch.autograd.Function):
    """Batch normalisation by torch's own kernels, with statistics and sums of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, comm: Communicator, eps: float, points: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = (0, *range(2, x.dim()))
        mean, var = moments(wide(x), dims, comm, points)
        scale, shift = (None if p is None else wide(p) for p in (weight, bias))
        y = torch.native_batch_norm(x, scale, shift, mean, var, False, 0.0, eps)[0]
        ctx.save_for_backward(x, weight, bias, mean, var)
        ctx.comm, ctx.eps, ctx.points = comm, eps, points
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    @differentiable(_plain_batch_norm)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, _, mean, var = ctx.saved_tensors
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


class _Normalise(torch.autograd.Function):
    """Normalisation of [batch, groups, values]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, eps: float, points: int) -> tuple[Tensor, Tensor, Tensor]:
        of_x = wide(x)
        means, var = moments(of_x, (2,), comm, points)
        mean, scale = means.unsqueeze(-1), (var + eps).rsqrt().unsqueeze(-1)
        ctx.save_for_backward(x, mean, scale)
        ctx.comm, ctx.eps, ctx.points = comm, eps, points
        ctx.mark_non_differentiable(means, var)
        y = (of_x - mean).mul_(scale).to(x.dtype)  # not x * scale - mean * scale, where large numbers cancel
        return y, means, var

    @staticmethod
    @in_forward_dtypes
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            y = _again(x, (2,), ctx).to(x.dtype)
            return *torch.autograd.grad(y, x, grads[0], create_graph=True), None, None, None
        normalised, grad = (wide(x) - mean) * scale, wide(grads[0])
        sums = torch.stack((grad.sum(2), (grad * normalised).sum(2)))
        if ctx.comm.size > 1:
            ctx.comm.all_reduce(sums)
        sums = (sums / ctx.points).unsqueeze(-1)
        result = (grad - sums[0]).addcmul_(normalised, sums[1], value=-1).mul_(scale)
        return result.to(x.dtype), None, None, None
