"""Batch, instance, group and layer normalisation of split fields."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import CartesianGrid, Decomposition
from tplayers.functions import widened
from tplayers.placement import Constant, Placement, add_parameter

from .layer import FieldLayer
from .normalise import BatchNormalise, Normalise


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

    def _normalised(self, x: Tensor, groups: int | None, part: Any, statistics: list[Tensor] | None = None) -> Tensor:
        """``x`` with mean 0 and variance 1 in each sample and group of channels, times the weight, plus the bias.

        groups: their number. None: each channel is one, as of instance normalisation, which autocast leaves alone.
        part: the place in weight and bias of what this rank's points take, or their shape beside the points.
        statistics: a list that gets mean and variance [batch, groups].
        """
        self.check(x)
        x, groups = (widened(x), groups) if groups else (x, x.shape[1])
        points = self.input.points() * x.shape[1] // groups
        values = x.reshape(x.shape[0], groups, -1)
        y = Normalise.apply(values, self.grid.comm, self.eps, points, statistics)[0].view(x.shape)  # type: ignore[no-untyped-call]
        weight, bias = self.summed_parameters()
        return y if weight is None else torch.addcmul(bias[part], y, weight[part]).to(x.dtype)


class _RunningNorm(_FieldNorm):
    """A normalisation that may keep running statistics of the channels, under the names of torch's layer."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

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
        self.momentum, self.track_running_stats = momentum, track_running_stats
        self.register_buffer("running_mean", torch.zeros(num_features, dtype=dtype) if track_running_stats else None)
        self.register_buffer("running_var", torch.ones(num_features, dtype=dtype) if track_running_stats else None)
        self.register_buffer("num_batches_tracked", torch.tensor(0) if track_running_stats else None)

    def _by_running_statistics(self, x: Tensor) -> Tensor:
        self.check(x)
        weight, bias = self.summed_parameters()
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.eps)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, points: int, factor: float) -> None:
        """Move the running statistics by ``factor`` towards these, which are of ``points`` values each."""
        if self.training and self.running_mean is not None and self.running_var is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_((var * (points / (points - 1))).to(self.running_var.dtype), factor)


class FieldBatchNorm(_RunningNorm):
    """torch.nn.BatchNorm1d, 2d or 3d of a field that is split over ``grid``: the statistics are of the whole field.

    num_features, eps, momentum (None: the mean of all batches), affine, track_running_stats: as torch's. The state dict
    has the names of torch's layer. Ranks that hold other samples (data parallelism) have their own statistics, as with
    torch.nn.BatchNorm2d under DistributedDataParallel.
    grid, input: as of `FieldConv`.

    forward: x [batch, num_features, *local block] -> the same shape. In training one all-gather forward, of two
    numbers a channel, and one all-reduce backward, of two, which also sums the parameters' gradients. Collective.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return self._by_running_statistics(x)
        self.check(x)
        points = x.shape[0] * self.input.points()
        if points < 2:
            raise ValueError(f"FieldBatchNorm needs more than one value a channel in training, not {points}")
        y, mean, var, _ = BatchNormalise.apply(x, self.weight, self.bias, self.grid.comm, self.eps, points)  # type: ignore[no-untyped-call]
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self._track(mean, var, points, factor)
        return y  # type: ignore[no-any-return]


class FieldInstanceNorm(_RunningNorm):
    """torch.nn.InstanceNorm1d, 2d or 3d of a field that is split over ``grid``: each sample and channel has one mean.

    num_features, eps, momentum (None: running statistics stay as they are), affine, track_running_stats: as torch's;
    the last two are False unless given. The state dict has the names of torch's layer. grid, input: as of `FieldConv`.

    forward: x [batch, num_features, *local block] -> the same shape. Communication: as of `FieldGroupNorm`; in ``eval``
    with running statistics one all-reduce backward, of the parameters' gradients. Collective. Raises ValueError for a
    field of one point, unless these are used.
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
        options: dict[str, Any] = {"eps": eps, "momentum": momentum, "affine": affine, "dtype": dtype}
        super().__init__(num_features, grid, input, track_running_stats=track_running_stats, **options)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return self._by_running_statistics(x)
        points = self.input.points()
        if points < 2:
            raise ValueError("FieldInstanceNorm needs a field of more than one point")
        statistics: list[Tensor] = []
        y = self._normalised(x, None, (slice(None), *(None,) * self.axes), statistics)
        mean, var = statistics
        self._track(mean.mean(0), var.mean(0), points, self.momentum or 0.0)
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
        return self._normalised(x, self.num_groups, (slice(None), *(None,) * self.axes))


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
        return self._normalised(x, 1, (slice(None), *self.input.slices(self.grid.coords)))
