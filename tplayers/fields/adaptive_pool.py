"""Adaptive and global pooling of split fields."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from commengine import CartesianGrid, Decomposition
from commengine.dtypes import wide
from tplayers.adjoint_pair import apply_pair
from tplayers.movement.transfer import memory_format
from tplayers.placement import require_one_of

from .geometry import Adaptive
from .layer import FieldLayer, per_axis, summed_over_ranks
from .taps import Taps


def _cast(x: Tensor) -> Tensor:
    """``x`` as autocast casts the input of torch's adaptive pooling: 3 axes on the host to float32."""
    cast = x.is_cpu and x.dim() == 5 and x.dtype != torch.float64 and torch.is_autocast_enabled("cpu")
    return x.float() if cast else x


class _FieldAdaptivePool(FieldLayer):
    """Pooling to ``output_size`` points."""

    def __init__(
        self,
        output_size: int | Sequence[int | None] | None,
        grid: CartesianGrid,
        input: Decomposition,
        *,
        output: Decomposition | None = None,
    ) -> None:
        super().__init__(grid, input)
        given = per_axis(output_size, self.axes, "output_size")
        if not all(size is None or (isinstance(size, int) and size >= 1) for size in given):
            raise ValueError(f"output_size={output_size!r} must be whole numbers of at least 1, or None")
        self.size = tuple(n if size is None else size for size, n in zip(given, input.shape, strict=True))
        if any(size < ranks for size, ranks in zip(self.size, grid.shape, strict=True)):
            raise ValueError(
                f"output_size={output_size!r}: each axis needs at least one output a rank, and the grid has "
                f"{list(grid.shape)} ranks; FieldGlobalPool pools a whole field to one point, which all ranks get"
            )
        rules = list(map(Adaptive, self.size, input.shape))
        self.reads(rules, ["clipped"] * self.axes, output)
        self._taps = []
        for rule, part, (low, _) in zip(rules, self.output.slices(grid.coords), self.local.span, strict=True):
            spans = [rule.reads(o, o + 1) for o in range(part.start, part.stop)]
            most = max(stop - start for start, stop in spans)
            places, weights = [], []
            for start, stop in spans:
                # A shorter window takes its last input several times, which then share its weight.
                each, again = 1 / (stop - start), most - (stop - start) + 1
                places.append([*range(start - low, stop - 1 - low), *[stop - 1 - low] * again])
                weights.append([each] * (most - again) + [each / again] * again)
            self._taps.append(Taps(places, weights))


class FieldAdaptiveAvgPool(_FieldAdaptivePool):
    """torch.nn.AdaptiveAvgPool1d, 2d or 3d of a field that is split over ``grid``.

    output_size: the points of the result, one number or one for each axis; None keeps an axis as it is. Each axis needs
    at least one output a rank, else ValueError: `FieldGlobalPool` pools to one point. grid, input, output, errors: as
    of `FieldConv`.

    forward: x [batch, channels, *local block] -> [batch, channels, *local block of ``output``], of any floating-point
    dtype; halves are added up in float32. Collective over the grid; every rank must run the backward.
    """

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        x = _cast(x)
        y = wide(self.local(x))
        for dim, taps in enumerate(self._taps, start=2):
            y = taps.sums(y, dim)
        return y.to(x.dtype).contiguous(memory_format=memory_format(x))


class FieldAdaptiveMaxPool(_FieldAdaptivePool):
    """torch.nn.AdaptiveMaxPool1d, 2d or 3d of a field that is split over ``grid``.

    The arguments and forward are those of `FieldAdaptiveAvgPool`. Of equal values the first has the gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        x = _cast(x)
        y = self.local(x)
        # From the last axis on, so that of equal values the first one in memory wins, as of torch.
        for dim, taps in reversed(list(enumerate(self._taps, start=2))):
            y = taps.windows(y, dim).max(dim + 1).values
        return y.contiguous(memory_format=memory_format(x))


class FieldGlobalPool(FieldLayer):
    """The mean or the maximum of a whole field, on every rank: torch.nn.AdaptiveAvgPool2d(1) or AdaptiveMaxPool2d(1).

    grid, input: as of `FieldConv`. mode: "avg" or "max".

    forward: x [batch, channels, *local block] -> [batch, channels, 1, ...], with the same bits on every rank.
    Collective; every rank must run the backward. Communication: an all-reduce of the result, forward and backward, and
    for the maximum an all-gather of two numbers for each value.

    The function that is differentiated is the sum of the ranks' losses, as of all operators here: the gradient is that
    of the sum of all ranks' gradients of the result. So ranks that compute one loss from it, each the same, divide it
    by ``grid.size``; parameters that follow come from `tplayers.fields.replicated`. Of equal values the first of the
    whole field has the gradient.
    """

    def __init__(self, grid: CartesianGrid, input: Decomposition, *, mode: str = "avg") -> None:
        super().__init__(grid, input)
        require_one_of(("avg", "max"), mode=mode)
        self.mode = mode
        self.output = Decomposition(((1,),) * self.axes)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        x = _cast(x)
        if self.mode == "avg":
            y = summed_over_ranks(self.grid.comm, wide(x).flatten(2).sum(2) / self.input.points()).to(x.dtype)
        else:
            y = self._maximum(x)
        return y.view(*y.shape, *(1,) * self.axes)

    def _maximum(self, x: Tensor) -> Tensor:
        comm = self.grid.comm
        values, at = x.flatten(2).max(2)
        if comm.size == 1:
            return values
        # Every rank tells its maxima and their places in the whole field; float64 holds both exactly.
        places = at.new_zeros(at.shape)
        block, strides = list(self._local_shape), [math.prod(self.input.shape[axis + 1 :]) for axis in range(self.axes)]
        for axis, part in enumerate(self.input.slices(self.grid.coords)):
            inner = math.prod(block[axis + 1 :])
            places += (at // inner % block[axis] + part.start) * strides[axis]
        mine = torch.stack((values.detach().double(), places.double()))
        chosen = apply_pair(mine, self._first_of_all, torch.zeros_like)  # it shows torch.func's tensors as plain ones
        return summed_over_ranks(comm, values.masked_fill(chosen == 0, 0))

    def _first_of_all(self, mine: Tensor) -> Tensor:
        """1 where this rank's of all ranks' [values, places] is the maximum at the first place, 0 elsewhere."""
        comm = self.grid.comm
        ranks = mine.new_empty(comm.size, *mine.shape)
        comm.all_gather(ranks.view(-1), mine.view(-1))
        values, places = ranks.unbind(1)
        best = (values == values.max(0).values) | values.isnan()
        first = places.masked_fill(~best, math.inf).min(0).values
        return (best[comm.rank] & (places[comm.rank] == first)).to(mine.dtype)
