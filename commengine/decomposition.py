"""Decomposition: which block of a global array lies at which place of a grid. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import CollectiveError


def grid_coords(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the place of ``rank`` in a grid of ``shape`` whose ranks stand in row-major order, as MPI's do."""
    coords = []
    for extent in reversed(shape):
        rank, coordinate = divmod(rank, extent)
        coords.append(coordinate)
    return tuple(reversed(coords))


def grid_rank(coords: Sequence[int], shape: Sequence[int]) -> int:
    """Return the rank at the place ``coords`` of a grid of ``shape``: the inverse of `grid_coords`."""
    rank = 0
    for coordinate, extent in zip(coords, shape, strict=True):
        rank = rank * extent + coordinate
    return rank


@dataclass(frozen=True)
class Decomposition:
    """A global array that is cut into blocks along each axis; place ``coords`` of a grid holds one block.

    blocks: for each axis the sizes of the blocks, in the order of the grid's coordinate on this axis. The blocks may
        have different sizes, and a block may be empty. PETSc's ``DMDAGetOwnershipRanges`` returns such sizes.

    The block at ``coords`` = (c0, c1, ...) has ``blocks[0][c0]`` x ``blocks[1][c1]`` x ... points. Two decompositions
    are equal if their blocks are.

    Raises CollectiveError if an axis has no block, or a size is not an integer of at least 0.
    """

    blocks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        try:
            blocks = tuple(tuple(map(operator.index, sizes)) for sizes in self.blocks)
        except TypeError as error:
            raise CollectiveError(f"Decomposition: blocks={self.blocks!r} are not sizes for each axis") from error
        for axis, sizes in enumerate(blocks):
            if not sizes or min(sizes) < 0:
                raise CollectiveError(
                    f"Decomposition: the blocks {list(sizes)} of axis {axis} must be one or more sizes of at least 0"
                )
        object.__setattr__(self, "blocks", blocks)  # the class is frozen; lists and NumPy's integers become ints

    @staticmethod
    def even(shape: Sequence[int], grid_shape: Sequence[int]) -> Decomposition:
        """Cut each axis into blocks whose sizes differ by at most one: the first n % p of the p blocks are larger.

        This is the rule of ``numpy.array_split`` and the default of PETSc's DMDA. Blocks are empty where an axis has
        more blocks than points.

        shape: the points along each axis. grid_shape: the number of blocks along each axis. Raises CollectiveError if
        the two have different lengths, a number of points is negative, or a number of blocks is below one.
        """
        if len(shape) != len(grid_shape) or min(shape, default=0) < 0 or min(grid_shape, default=1) < 1:
            raise CollectiveError(
                f"a field of shape {list(shape)} cannot be cut into {list(grid_shape)} blocks: it needs one number of "
                "points (at least 0) and one number of blocks (at least 1) for each axis"
            )
        pairs = list(zip(shape, grid_shape, strict=True))
        return Decomposition(tuple((n // p + 1,) * (n % p) + (n // p,) * (p - n % p) for n, p in pairs))

    @property
    def shape(self) -> tuple[int, ...]:
        """The points of the global array along each axis."""
        return tuple(map(sum, self.blocks))

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """The number of blocks along each axis."""
        return tuple(map(len, self.blocks))

    def bounds(self, axis: int) -> tuple[int, ...]:
        """Return where the blocks of ``axis`` begin, and the axis's number of points at the end: p + 1 positions."""
        return tuple(itertools.accumulate(self.blocks[axis], initial=0))

    def halo_ranges(self, widths: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the global positions [start, stop) of blocks with ``widths`` = (low, high) more points at their ends.

        They are given for each axis and each coordinate. Positions may lie outside the array, at its borders.
        """
        return tuple(
            tuple((start - low, stop + high) for start, stop in itertools.pairwise(self.bounds(axis)))
            for axis, (low, high) in enumerate(widths)
        )

    def owner(self, axis: int, position: int) -> int:
        """Return the coordinate on ``axis`` of the block that holds the global ``position``, which is never empty.

        Raises CollectiveError if the position is outside the array.
        """
        bounds = self.bounds(axis)
        if not 0 <= position < bounds[-1]:
            raise CollectiveError(f"position {position} is not on axis {axis}, which has {bounds[-1]} points")
        return bisect_right(bounds, position) - 1

    def local_shape(self, coords: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the block at ``coords``. Raises CollectiveError if there is no such block."""
        return tuple(sizes[c] for sizes, c in zip(self.blocks, self._checked(coords), strict=True))

    def slices(self, coords: Sequence[int]) -> tuple[slice, ...]:
        """Return the part of the global array that the block at ``coords`` holds: one slice for each axis."""
        spans = [self.bounds(axis)[c : c + 2] for axis, c in enumerate(self._checked(coords))]
        return tuple(slice(start, stop) for start, stop in spans)

    def _checked(self, coords: Sequence[int]) -> Sequence[int]:
        if len(coords) == len(self.blocks) and all(0 <= c < p for c, p in zip(coords, self.grid_shape, strict=True)):
            return coords
        raise CollectiveError(f"{list(coords)} is not a place of a grid of shape {list(self.grid_shape)}")

    def points(self) -> int:
        """Return the number of points of the global array."""
        return math.prod(self.shape)
