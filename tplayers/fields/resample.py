"""Interpolation of split fields from one mesh to another."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from commengine import CartesianGrid, Decomposition
from commengine.dtypes import wide
from tplayers.movement.plan import halo_plan
from tplayers.movement.transfer import memory_format, transfer

from .layer import FieldLayer, per_axis
from .taps import Taps

#: of one axis: where the points of both meshes lie, or their coordinates (of the input, of the output)
Points: TypeAlias = str | tuple[Sequence[float], Sequence[float]]


class FieldResample(FieldLayer):
    """Linear interpolation of a field that is split over ``grid`` from its mesh to another one of the same region.

    input, output: the decompositions of both meshes over the grid. Every rank has at least one point of each.
    points: where the points of both meshes lie, one for all axes, or a list with one for each:

    - "cells": in the middle of equal cells. Between the border and the first point the value is that of the point.
    - "corners": the first and the last point lie on the borders.
    - "periodic": point i of n lies at i / n of a region that wraps around.
    - (coordinates of the input's points, of the output's): ascending numbers. Beyond the input's points the value is
      that of the nearest one.

    Its adjoint is its transpose, as of every operator here: it gives a gradient, or the residual of a coarse mesh.

    forward: x [batch, channels, *local block] -> [batch, channels, *local block of ``output``]. Collective. Raises
    ValueError, on every rank, where it is constructed, if the points or the decompositions do not fit.
    """

    def __init__(
        self,
        grid: CartesianGrid,
        input: Decomposition,
        output: Decomposition,
        points: Points | Sequence[Points] = "cells",
    ) -> None:
        super().__init__(grid, input)
        if output.grid_shape != grid.shape or min(map(min, output.blocks)) < 1:
            raise ValueError(
                f"FieldResample: output={output.blocks} must give each of {list(grid.shape)} ranks a point"
            )
        given = [points] * self.axes if isinstance(points, str) else list(per_axis(points, self.axes, "points"))
        sizes = zip(given, input.shape, output.shape, strict=True)
        places = [_places(one, n, m, axis) for axis, (one, n, m) in enumerate(sizes)]
        self.output, self.points, self._taps = output, given, list[Taps]()
        ranges, modes = [], []
        for axis, (of_axis, n) in enumerate(zip(places, input.shape, strict=True)):
            spans = [(of_axis[a][0], of_axis[b - 1][1] + 1) for a, b in itertools.pairwise(output.bounds(axis))]
            ranges.append(spans)
            modes.append("circular" if spans[-1][1] > n else "zeros")
            part, low = output.slices(grid.coords)[axis], spans[grid.coords[axis]][0]
            mine = of_axis[part]
            self._taps.append(Taps([[a - low, b - low] for a, b, _ in mine], [[1 - t, t] for _, _, t in mine]))
        self._plan = halo_plan(input, grid.rank, ranges, modes)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        y = wide(transfer(x, self._plan, self.grid.comm))
        for dim, taps in enumerate(self._taps, start=2):
            y = taps.sums(y, dim)
        return y.to(x.dtype).contiguous(memory_format=memory_format(x))


def _places(points: Points, n: int, m: int, axis: int) -> list[tuple[int, int, float]]:
    """Return (lower input, upper input, share of the upper one) for each of ``m`` outputs of ``n`` inputs.

    Both ascend with the outputs. Of a region that wraps around, the upper input may be ``n``.
    """
    if isinstance(points, str):
        if points not in ("cells", "corners", "periodic"):
            raise ValueError(f"points={points!r} must be 'cells', 'corners', 'periodic' or coordinates")
        # exact places, as fractions a / c
        a, b, c = {"cells": (2 * n, n - m, 2 * m), "corners": (n - 1, 0, max(m - 1, 1)), "periodic": (n, 0, m)}[points]
        if points == "periodic":
            return [(i, i + 1, rest / c) for i, rest in (divmod(a * o, c) for o in range(m))]
        found = []
        for o in range(m):
            i, rest = divmod(min(max(a * o + b, 0), c * (n - 1)), c)
            found.append((i, min(i + 1, n - 1), rest / c))
        return found
    before, after = (list(map(float, one)) for one in points)
    if [len(before), len(after)] != [n, m] or not all(
        math.isfinite(one) and one < other for several in (before, after) for one, other in itertools.pairwise(several)
    ):
        raise ValueError(f"points: axis {axis} needs {n} and {m} ascending coordinates")
    found = []
    for place in after:
        i = min(max(bisect_right(before, place) - 1, 0), max(n - 2, 0))
        upper = min(i + 1, n - 1)
        share = (place - before[i]) / (before[upper] - before[i]) if upper > i else 0.0
        found.append((i, upper, min(max(share, 0.0), 1.0)))
    return found
