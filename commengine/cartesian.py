"""CartesianGrid: the ranks of a communicator as a Cartesian grid, or a solver's own ``MPI.Cartcomm``."""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Sequence
from typing import Any

from .communicator import Communicator
from .decomposition import Decomposition, grid_coords, grid_rank
from .errors import CollectiveError
from .mpi import OwnsCommunicators, load_mpi


class CartesianGrid(OwnsCommunicators):
    """The ranks of ``comm`` as a Cartesian grid, in row-major order as ``MPI_Cart_create`` without reordering.

    comm: the Communicator whose ranks form the grid; it stays the caller's. Any group does: the world, the ``tensor``
        group of a `ProcessGrid`, the result of a split.
    shape: the number of ranks along each axis; their product is ``comm.size``.
    periodic: whether the neighbour of the last rank of an axis is the first; one bool, or one for each axis.

    Attributes: ``comm``, ``shape``, ``periodic`` (a tuple), ``coords`` (this rank's place), ``size``, ``rank``.

    Construction is collective over ``comm``. Raises CollectiveMismatch on every rank if the ranks gave different
    shapes or periods, and CollectiveError on every rank if the shape does not fit the communicator.
    """

    def __init__(self, comm: Communicator, shape: Sequence[int], periodic: bool | Sequence[bool] = False) -> None:
        self.comm, self._owned = comm, False
        problem: str | None = None
        try:
            self.shape = tuple(map(operator.index, shape))
            many = hasattr(periodic, "__len__")
            self.periodic = tuple(map(bool, periodic)) if many else (bool(periodic),) * len(self.shape)  # type: ignore[arg-type]
        except TypeError:
            self.shape = self.periodic = ()
            problem = f"shape={shape!r} and periodic={periodic!r} of a grid must be numbers of ranks and bools"
        comm.compare(repr(self), problem)
        if min(self.shape, default=1) < 1 or math.prod(self.shape) != comm.size:
            raise CollectiveError(
                f"a grid of shape {list(self.shape)} does not fit the group {comm.name!r} of {comm.size} ranks: "
                "the numbers of ranks along the axes must be positive, and their product the size of the group"
            )
        if len(self.periodic) != len(self.shape):
            raise CollectiveError(
                f"periodic={list(self.periodic)} has {len(self.periodic)} values for the {len(self.shape)} axes of "
                f"a grid of shape {list(self.shape)}"
            )
        self.rank, self.size = comm.rank, comm.size
        self.coords = self.coords_at(comm.rank)

    @classmethod
    def from_mpi(cls, cartcomm: Any, **options: Any) -> CartesianGrid:
        """Return the grid of a solver's own communicator: its shape, its periods, its ranks.

        cartcomm: an ``MPI.Cartcomm``, or any mpi4py communicator with a Cartesian topology. The grid makes its own
        `Communicator` on a duplicate of it, and `close` closes this Communicator. options: the keyword arguments of
        `Communicator`.

        Collective over ``cartcomm``. Raises CollectiveError if it has no Cartesian topology.
        """
        mpi = load_mpi()
        if not isinstance(cartcomm, mpi.Comm) or cartcomm == mpi.COMM_NULL or cartcomm.Get_topology() != mpi.CART:
            raise CollectiveError(f"{cartcomm!r} is not an MPI communicator with a Cartesian topology")
        dims, periods, _ = mpi.Cartcomm(cartcomm).Get_topo()
        grid = cls(Communicator(cartcomm, **options), dims, [bool(period) for period in periods])
        grid._owned = True
        return grid

    def coords_at(self, rank: int) -> tuple[int, ...]:
        """Return the place of ``rank``: the inverse of `rank_at`."""
        return grid_coords(rank, self.shape)

    def rank_at(self, coords: Sequence[int]) -> int | None:
        """Return the rank at ``coords``, or None outside the grid. Coordinates on a periodic axis wrap around."""
        if len(coords) != len(self.shape):
            raise CollectiveError(f"{list(coords)} is not a place of a grid of shape {list(self.shape)}")
        if any(not wraps and not 0 <= c < p for c, p, wraps in zip(coords, self.shape, self.periodic, strict=True)):
            return None
        return grid_rank([c % p for c, p in zip(coords, self.shape, strict=True)], self.shape)

    def neighbour(self, axis: int, step: int) -> int | None:
        """Return the rank that is ``step`` places (of either sign) from this one along ``axis``; None: outside."""
        coords = list(self.coords)
        coords[self.check_axis(axis)] += step
        return self.rank_at(coords)

    def check_axis(self, axis: int) -> int:
        """Return ``axis`` as an index from 0. Raises CollectiveError if the grid has no such axis."""
        if not -len(self.shape) <= axis < len(self.shape):
            raise CollectiveError(f"axis {axis} is not an axis of a grid of shape {list(self.shape)}")
        return axis % len(self.shape)

    def sub(self, axes: Sequence[int]) -> CartesianGrid:
        """Return the grid of the ranks that differ from this one along ``axes`` only, as ``MPI_Cart_sub`` does.

        axes: the axes to keep, in ascending order. The result has its own Communicator, which its `close` closes.
        Collective over this grid; the same axes on every rank.
        """
        self.comm.compare(f"CartesianGrid.sub({list(axes)})")
        kept = [self.check_axis(axis) for axis in axes]
        if kept != sorted(set(kept)):
            raise CollectiveError(f"axes={list(axes)} must be different axes in ascending order")
        colour = 0
        for axis, (coordinate, extent) in enumerate(zip(self.coords, self.shape, strict=True)):
            if axis not in kept:
                colour = colour * extent + coordinate
        comm = self.comm.split(colour, self.rank, name=f"axes {kept}")
        assert comm is not None  # because a colour was given
        grid = CartesianGrid(comm, [self.shape[axis] for axis in kept], [self.periodic[axis] for axis in kept])
        grid._owned = True
        return grid

    def decompose(self, shape: Sequence[int]) -> Decomposition:
        """Return the even decomposition of a global array of ``shape``, one axis for each axis of the grid."""
        return Decomposition.even(shape, self.shape)

    def decomposition_of(self, local_shape: Sequence[int]) -> Decomposition:
        """Return the decomposition of which every rank gives its own block: the solver's, however it made it.

        local_shape: the points of this rank's block along each axis of the grid. Collective over the grid. Raises
        CollectiveError on every rank if a rank gives no such numbers, or if the blocks do not fit together: ranks with
        one coordinate on an axis must have equally many points on this axis.
        """
        try:
            mine = [operator.index(points) for points in local_shape]
            told = str(mine)
        except TypeError:
            mine, told = [], repr(local_shape)
        unfit = len(mine) != len(self.shape) or not all(0 <= points < 2**62 for points in mine)
        mine = [0] * len(mine) if unfit else mine
        # For each axis and each of its coordinates the most and, negated, the fewest points of a rank there.
        starts = list(itertools.accumulate(self.shape, initial=0))
        most, fewest = [-1] * starts[-1], [-(2**62)] * starts[-1]
        for start, c, points in zip(starts, self.coords, mine, strict=False):
            most[start + c], fewest[start + c] = points, -points
        ends = array("q", (*most, *fewest, unfit))
        with self.comm._making("decomposition_of") as comm:
            comm.Allreduce(load_mpi().IN_PLACE, (ends, load_mpi().INT64_T), load_mpi().MAX)
            most, fewest = ends[: starts[-1]].tolist(), [-end for end in ends[starts[-1] : -1]]
            shapes = comm.allgather(told) if ends[-1] or most != fewest else []
        if shapes:
            told = ", ".join(f"{shape} at {list(self.coords_at(rank))}" for rank, shape in enumerate(shapes[:16]))
            raise CollectiveError(
                f"the blocks of the ranks are not those of one field on a grid of shape {list(self.shape)}: {told}. "
                "Ranks with the same coordinate on an axis must have equally many points on this axis"
            )
        return Decomposition(tuple(tuple(most[start:stop]) for start, stop in itertools.pairwise(starts)))

    def close(self) -> None:
        """Close the Communicator that `from_mpi` or `sub` made; otherwise do nothing. Collective; may be repeated."""
        if self._owned:
            self.comm.close()

    def __repr__(self) -> str:
        return f"CartesianGrid(shape={list(self.shape)}, periodic={list(self.periodic)})"
