"""SpectralConv: the convolution of a Fourier neural operator (Li et al. 2021) on a split field.

A Fourier transform needs whole axes. So the axes that no rank splits are transformed first and cut to their modes,
which makes the rest smaller; then the field changes from blocks in space to some of the channels on each rank, and the
other axes are transformed. The product mixes all channels of a mode, so for it each rank gets all channels of some
modes. The way back is the same in the opposite order: four repartitions, two of the field and two of its modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from commengine import CartesianGrid, Decomposition
from tplayers.movement.plan import repartition_plan
from tplayers.movement.transfer import transfer
from tplayers.placement import Normal, Placement, add_parameter

from .layer import FieldLayer, natural, replicated


class SpectralConv(FieldLayer):
    """Multiply the lowest Fourier modes of a real field by a matrix each, over the channels; the others become zero.

    in_channels, out_channels: of the field. modes: the number of modes to keep, one number or one for each axis: of the
        last axis the frequencies 0 ... modes - 1, of the others also the negative ones, -modes ... modes - 1.
    grid, input: as of `FieldConv`; the result has the decomposition ``input``. Raises ValueError if the field has fewer
        modes.

    The weight has the shape [in_channels, out_channels, 2 * modes, ..., modes, 2]; the last dimension is the real and
    the imaginary part. The frequencies of an axis are in the order 0 ... modes - 1, -modes ... -1. Every rank holds all
    of it; its gradients are summed over the grid.

    forward: x [batch, in_channels, *local block], float32 or float64, -> [batch, out_channels, *local
    block]. Collective.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        modes: int | Sequence[int],
        grid: CartesianGrid,
        input: Decomposition,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(grid, input, in_channels)
        self.modes = natural(modes, self.axes, "modes", 1)
        last = self.axes - 1
        for axis, (kept, points) in enumerate(zip(self.modes, input.shape, strict=True)):
            most = points // 2 + 1 if axis == last else points // 2
            if kept > most:
                raise ValueError(f"SpectralConv: axis {axis} has {points} points, so at most {most} modes, not {kept}")
        self._spectrum = tuple(kept if axis == last else 2 * kept for axis, kept in enumerate(self.modes))
        # Real data needs the half spectrum of the last axis first, so no other axis is transformed before it.
        alone = [axis for axis, ranks in enumerate(grid.shape) if ranks == 1 and grid.shape[last] == 1]
        self._early = alone[::-1]
        self._late = [axis for axis in reversed(range(self.axes)) if axis not in alone]
        block: list[tuple[int, ...]] = list(input.blocks)
        for axis in alone:
            block[axis] = (self._spectrum[axis] * (2 if axis == last else 1),)
        self._there = _Route(in_channels, block, self._spectrum, grid)
        self._back = _Route(out_channels, block, self._spectrum, grid)
        scale = 1 / math.sqrt(2 * in_channels)  # the sum over the channels keeps the variance of a mode
        shape = (in_channels, out_channels, *self._spectrum, 2)
        add_parameter(self, "weight", Placement(shape, Normal(scale)), dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        (weight,) = replicated(self.grid.comm, self.weight)
        modes = self._modes_of(x)
        low, high = self._there.mine
        matrices = torch.view_as_complex(weight.flatten(2, -2)[:, :, low:high].contiguous())
        return self._field_of(torch.einsum("bik,iok->bok", modes, matrices))

    def _modes_of(self, x: Tensor) -> Tensor:
        """All channels of this rank's modes: complex [batch, channels, modes]."""
        for axis in self._early:
            x = self._transformed(x, axis)
        x = transfer(_as_real(x) if self._early else x, self._there.to_channels, self.grid.comm)
        x = _as_complex(x) if self._early else x
        for axis in self._late:
            x = self._transformed(x, axis)
        return _as_complex(transfer(_as_real(x.flatten(2)), self._there.to_modes, self.grid.comm))

    def _field_of(self, modes: Tensor) -> Tensor:
        """This rank's block of the real field; the inverse of `_modes_of`, with zeros for the other modes."""
        x = _as_complex(transfer(_as_real(modes), self._back.from_modes, self.grid.comm))
        x = x.view(*x.shape[:2], *self._spectrum)
        for axis in reversed(self._late):
            x = self._inverse(x, axis)
        x = transfer(_as_real(x) if self._early else x, self._back.from_channels, self.grid.comm)
        x = _as_complex(x) if self._early else x
        for axis in reversed(self._early):
            x = self._inverse(x, axis)
        return x

    def _transformed(self, x: Tensor, axis: int) -> Tensor:
        dim, kept = 2 + axis, self.modes[axis]
        if axis == self.axes - 1:
            return _fft(torch.fft.rfft, x, dim=dim).narrow(dim, 0, kept)
        x = _fft(torch.fft.fft, x, dim=dim)
        return torch.cat((x.narrow(dim, 0, kept), x.narrow(dim, x.shape[dim] - kept, kept)), dim)

    def _inverse(self, x: Tensor, axis: int) -> Tensor:
        dim, kept, points = 2 + axis, self.modes[axis], self.input.shape[axis]
        if axis == self.axes - 1:
            return _fft(torch.fft.irfft, x, n=points, dim=dim)  # fills up with zeros
        between = x.new_zeros([points - 2 * kept if d == dim else size for d, size in enumerate(x.shape)])
        x = torch.cat((x.narrow(dim, 0, kept), between, x.narrow(dim, kept, kept)), dim)
        return _fft(torch.fft.ifft, x, dim=dim)


class _Route:
    """The repartitions of a field of ``channels`` channels: space, some channels on each rank, some modes on each rank.

    block: the sizes of the ranks' blocks along each axis in space. spectrum: the modes along each axis.
    """

    def __init__(
        self, channels: int, block: Sequence[tuple[int, ...]], spectrum: Sequence[int], grid: CartesianGrid
    ) -> None:
        ranks, rank = grid.size, grid.rank
        ones = (1,) * len(block)
        modes = math.prod(spectrum)
        space = Decomposition(((channels,), *block))
        split = Decomposition.even(space.shape, (ranks, *ones))
        flat = Decomposition.even((channels, 2 * modes), (ranks, 1))
        shares = Decomposition.even((modes,), (ranks,))
        of_modes = Decomposition(((channels,), tuple(2 * share for share in shares.blocks[0])))
        self.to_channels = repartition_plan(space, split, rank)
        self.from_channels = repartition_plan(split, space, rank)
        self.to_modes = repartition_plan(flat, of_modes, rank)
        self.from_modes = repartition_plan(of_modes, flat, rank)
        #: where this rank's modes begin and end
        self.mine = shares.bounds(0)[rank : rank + 2]


def _fft(transform: Callable[..., Tensor], x: Tensor, **options: int) -> Tensor:
    """``transform`` of ``x``, which on a rank without channels is empty: MKL refuses to transform nothing.

    The result depends on ``x`` for autograd on this rank, too, because every rank must run the backward.
    """
    if x.shape[1]:
        return transform(x, **options)
    one = x.new_zeros((x.shape[0], 1, *x.shape[2:]))
    return transform(torch.cat((x, one), 1), **options).narrow(1, 0, 0)


def _as_real(x: Tensor) -> Tensor:
    """[..., n] complex -> [..., 2 n] real."""
    return torch.view_as_real(x.contiguous()).flatten(-2)


def _as_complex(x: Tensor) -> Tensor:
    """[..., 2 n] real -> [..., n] complex."""
    return torch.view_as_complex(x.contiguous().view(*x.shape[:-1], x.shape[-1] // 2, 2))
