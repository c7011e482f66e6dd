"""SpectralConv: the convolution of a Fourier neural operator (Li et al. 2021) on a split field.

A Fourier transform needs whole lines of the field along an axis. Ranks that differ in their place on this axis alone
share the lines through their blocks: each of them gets some of these lines as a whole, transforms them, keeps their
modes, and gives each of the others its share of the modes. So the field becomes the spectrum one axis after another,
as *pencils*, and a rank exchanges messages with the ranks of its own row in each direction only. In the end a rank has
all channels of some modes, and the product mixes them. The way back is the same in the opposite order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from commengine import CartesianGrid, Decomposition
from tplayers.movement.plan import PartsByRank, TransferPlan, repartition_plan
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
        shape = tuple(kept if axis == last else 2 * kept for axis, kept in enumerate(self.modes))
        self._spectrum = Decomposition.even(shape, grid.shape)
        # Real data needs the half spectrum of the last axis first. Then axes that no rank splits, to have less to send.
        self._order = [last, *sorted(range(last), key=lambda axis: (grid.shape[axis] > 1, -axis))]
        self._there = self._stages(in_channels)
        self._back = self._there if out_channels == in_channels else self._stages(out_channels)
        scale = 1 / math.sqrt(2 * in_channels)  # the sum over the channels keeps the variance of a mode
        add_parameter(self, "weight", Placement((in_channels, out_channels, *shape, 2), Normal(scale)), dtype)

    def _stages(self, channels: int) -> list[_Lines]:
        """The lines of each axis, in order, of a field of ``channels`` channels: those before it are a spectrum."""
        block, stages = list(self.input.local_shape(self.grid.coords)), []
        for axis in self._order:
            lines = channels * math.prod(size for other, size in enumerate(block) if other != axis)
            stages.append(_Lines(self.grid, axis, lines, self.input.blocks[axis], self._spectrum.blocks[axis]))
            block[axis] = self._spectrum.blocks[axis][self.grid.coords[axis]]
        return stages

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        (weight,) = replicated(self.grid.comm, self.weight)
        for lines in self._there:
            x = lines.transformed(x, self._modes_of)
        mine = weight[(slice(None), slice(None), *self._spectrum.slices(self.grid.coords))]
        x = torch.einsum("bi...,io...->bo...", x, torch.view_as_complex(mine.contiguous()))
        for lines in reversed(self._back):
            x = lines.transformed(x, self._points_of, back=True)
        return x

    def _modes_of(self, x: Tensor, axis: int, dim: int) -> Tensor:
        """The modes of whole lines along dimension ``dim``."""
        kept = self.modes[axis]
        if axis == self.axes - 1:
            return _fft(torch.fft.rfft, x, dim).narrow(dim, 0, kept)
        x = _fft(torch.fft.fft, x, dim)
        return torch.cat((x.narrow(dim, 0, kept), x.narrow(dim, x.shape[dim] - kept, kept)), dim)

    def _points_of(self, x: Tensor, axis: int, dim: int) -> Tensor:
        """The inverse of `_modes_of`, with zeros for the other modes."""
        kept, points = self.modes[axis], self.input.shape[axis]
        if axis == self.axes - 1:
            return _fft(torch.fft.irfft, x, dim, n=points)  # fills up with zeros
        size = list(x.shape)
        size[dim] = points - 2 * kept
        x = torch.cat((x.narrow(dim, 0, kept), x.new_zeros(size), x.narrow(dim, kept, kept)), dim)
        return _fft(torch.fft.ifft, x, dim)


class _Lines:
    """The lines of a field along ``axis`` that pass through this rank's block, which the ranks of its row share.

    lines: their number. points, modes: those of an axis that the ranks of the row have, in blocks.
    """

    def __init__(self, grid: CartesianGrid, axis: int, lines: int, points: Sequence[int], modes: Sequence[int]) -> None:
        self._axis, self._comm = axis, grid.comm
        ranks, me = grid.shape[axis], grid.coords[axis]
        step = math.prod(grid.shape[axis + 1 :])  # from one rank of the row to the next one
        first = grid.rank - me * step

        def plan(blocks: Sequence[int], *, back: bool) -> TransferPlan:
            parts = Decomposition(((lines,), tuple(blocks)))
            whole = Decomposition.even(parts.shape, (ranks, 1))
            source, target = (whole, parts) if back else (parts, whole)
            made = repartition_plan(source, target, me)

            def of_grid(messages: PartsByRank) -> PartsByRank:
                return tuple((first + peer * step, pieces) for peer, pieces in messages)

            return made._replace(sends=of_grid(made.sends), receives=of_grid(made.receives))

        #: from points to modes, and back: what makes lines whole, and what shares them again
        self._plans: list[tuple[TransferPlan, TransferPlan]] = []
        if ranks > 1:
            ways = (points, modes), (modes, points)
            self._plans = [(plan(given, back=False), plan(made, back=True)) for given, made in ways]

    def transformed(self, x: Tensor, transform: Callable[[Tensor, int, int], Tensor], *, back: bool = False) -> Tensor:
        """Return the block ``x`` after ``transform`` of whole lines along the axis. Collective.

        transform: gets lines, the axis, and the dimension that they lie along. back: from modes to points.
        """
        dim = 2 + self._axis
        if not self._plans:
            return transform(x, self._axis, dim)
        whole, parts = self._plans[back]
        x = x.movedim(dim, -1)
        lines = transform(transfer(x.flatten(1, -2), whole, self._comm), self._axis, 2)
        lines = transfer(lines, parts, self._comm)
        return lines.reshape(*x.shape[:-1], lines.shape[-1]).movedim(-1, dim)


def _fft(transform: Callable[..., Tensor], x: Tensor, dim: int, **options: int) -> Tensor:
    """``transform`` of ``x``, which on a rank without lines is empty: MKL refuses to transform nothing.

    The result depends on ``x`` for autograd on this rank, too, because every rank must run the backward.
    """
    if x.numel():
        return transform(x, dim=dim, **options)
    line = x.new_ones(x.shape[dim]) + x.sum()
    size = [1] * x.dim()
    size[dim] = -1
    return transform(line, **options).view(size).expand([-1 if d == dim else n for d, n in enumerate(x.shape)])
