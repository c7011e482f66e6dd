"""The points and bytes that halo exchanges and repartitions of split fields move.

A block of n1 x n2 points with a halo of width w receives (n1 + 2w)(n2 + 2w) - n1 n2 points away from the borders, for
each channel and sample; less at a border that is not periodic. A block's work grows with its volume and its halo with
its surface, so the ratio of the two says how much of a convolution's time is communication (Dryden et al. 2019,
section 3). Positions that a rank takes from itself, around a periodic axis with one rank, are not sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from commengine.decomposition import Decomposition, grid_coords

from .collectives import Cost


@dataclass(frozen=True)
class BlockHalo:
    """The halo exchange of one rank, in points of one channel of one sample.

    points: of its block. received, sent: what it gets from other ranks and gives to them. messages: the ranks that it
    receives from.
    """

    points: int
    received: int
    sent: int
    messages: int

    @property
    def surface_to_volume(self) -> float:
        """Received points per point of the block; infinite for an empty block that receives some."""
        return self.received / self.points if self.points else math.inf if self.received else 0.0


def block_halo(
    decomposition: Decomposition,
    coords: Sequence[int],
    ranges: Sequence[Sequence[tuple[int, int]]],
    periodic: Sequence[bool] | None = None,
) -> BlockHalo:
    """Return the halo exchange of the rank at ``coords``.

    ranges: for each axis and each coordinate the global positions [start, stop) that the ranks there need, such as
    `Decomposition.halo_ranges` gives for a halo of one width. periodic: for each axis, whether positions outside the
    array wrap around; otherwise nothing is sent for them. None: no axis is periodic.
    """
    mine = decomposition.local_shape(coords)
    wraps = [False] * len(mine) if periodic is None else list(periodic)
    needed, own, given, sources = [], [], [], []
    for axis, c in enumerate(coords):
        shares = [_shares(decomposition, axis, span, wraps[axis]) for span in ranges[axis]]
        needed.append(sum(shares[c]))
        own.append(shares[c][c])
        given.append(sum(of_one[c] for of_one in shares))
        sources.append(sum(1 for share in shares[c] if share))
    kept, messages = math.prod(own), math.prod(sources)
    return BlockHalo(
        math.prod(mine), math.prod(needed) - kept, math.prod(given) - kept, messages - 1 if kept else messages
    )


def _shares(decomposition: Decomposition, axis: int, span: tuple[int, int], wraps: bool) -> list[int]:
    """Return how many positions of ``span`` each block of an axis holds."""
    bounds = decomposition.bounds(axis)
    extent, (start, stop) = bounds[-1], span
    if not wraps or not extent:
        return [max(0, min(last, stop) - max(first, start)) for first, last in itertools.pairwise(bounds)]

    def below(position: int, first: int, last: int) -> int:
        """The block's positions, and their repetitions, from ``first`` on and below ``position``."""
        rounds, rest = divmod(position - first, extent)
        return rounds * (last - first) + min(rest, last - first)

    return [below(stop, first, last) - below(start, first, last) for first, last in itertools.pairwise(bounds)]


def halo_exchange_cost(
    decomposition: Decomposition,
    widths: Sequence[tuple[int, int]],
    point_bytes: float,
    periodic: Sequence[bool] | None = None,
) -> Cost:
    """Return the cost of exchanging halos of ``widths`` = (low, high) at the ends of each axis, corners included.

    point_bytes: of all channels and samples at one point. A rank's messages follow one another, and it sends while it
    receives; so the critical path is that of the rank with the most bytes in one direction.
    """
    ranges = decomposition.halo_ranges(widths)
    ranks = [
        block_halo(decomposition, coords, ranges, periodic)
        for coords in itertools.product(*map(range, decomposition.grid_shape))
    ]
    return Cost(
        max(rank.messages for rank in ranks),
        point_bytes * max(max(rank.received, rank.sent) for rank in ranks),
        0.0,
        point_bytes * max(rank.sent for rank in ranks),
        point_bytes * sum(rank.sent for rank in ranks),
    )


def repartition_cost(source: Decomposition, target: Decomposition, point_bytes: float) -> Cost:
    """Return the cost of turning the blocks of ``source`` into those of ``target``, on ranks in row-major order."""
    ranks = range(math.prod(source.grid_shape))
    boxes = [
        [decomposition.slices(grid_coords(rank, decomposition.grid_shape)) for rank in ranks]
        for decomposition in (source, target)
    ]
    shared = [[_overlap(own, theirs) for theirs in boxes[1]] for own in boxes[0]]  # from rank, to rank
    sent = [sum(row) - row[rank] for rank, row in enumerate(shared)]
    received = [sum(row[rank] for row in shared) - shared[rank][rank] for rank in ranks]
    messages = [sum(1 for other, row in enumerate(shared) if row[rank] and other != rank) for rank in ranks]
    return Cost(
        max(messages),
        point_bytes * max(*sent, *received),
        0.0,
        point_bytes * max(sent),
        point_bytes * sum(sent),
    )


def _overlap(one: Sequence[slice], other: Sequence[slice]) -> int:
    """Return the number of points that two boxes have in common."""
    return math.prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in zip(one, other, strict=True))


def least_halo_grid(shape: Sequence[int], ranks: int, widths: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the shape of the grid of ``ranks`` ranks whose halos have the fewest points in all.

    shape: of the field. widths: (low, high) of the halo on each axis. Among equals it is the grid that cuts the first
    axes most, whose strips are contiguous in memory.
    """

    def cost(grid: tuple[int, ...]) -> float:
        return halo_exchange_cost(Decomposition.even(shape, grid), widths, 1.0).total_bytes

    return min(_grids(ranks, len(shape)), key=cost)


def _grids(ranks: int, axes: int) -> list[tuple[int, ...]]:
    """Return all grids of ``ranks`` places, those that cut the first axes most before the others."""
    if axes == 1:
        return [(ranks,)]
    firsts = [p for p in range(ranks, 0, -1) if ranks % p == 0]
    return [(first, *rest) for first in firsts for rest in _grids(ranks // first, axes - 1)]
