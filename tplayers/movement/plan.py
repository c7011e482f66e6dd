"""Which parts of the ranks' blocks go where: the arithmetic of halo exchanges and repartitions, without communication.

Along each axis a rank wants a range of global positions. Each position takes the value of one point of the source, or
zero. So a rank's new block is a product of such ranges, and it is cut into pieces that each come from one rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from commengine import Decomposition
from commengine.decomposition import grid_coords, grid_rank

#: what a position outside the global array takes: PyTorch's names of ``padding_mode``
PADDINGS = ("zeros", "circular", "reflect", "replicate")

#: the wanted ranges [start, stop): for each axis, for each coordinate of the target grid
Ranges = Sequence[Sequence[tuple[int, int]]]


class BlockPart(NamedTuple):
    """A part of one rank's block that becomes a part of one rank's new block.

    source: the part of the source rank's block. target: the part of the target rank's new block. Both hold slices of
        the last dimensions, after an Ellipsis.
    shape: of the source's part, which is what a message carries.
    flipped, repeated: the dimensions (negative numbers) on which the target has the values in reverse order, or has
        one value several times.
    """

    source: tuple[Any, ...]
    target: tuple[Any, ...]
    shape: tuple[int, ...]
    flipped: tuple[int, ...]
    repeated: tuple[int, ...]


#: (rank, pieces) for each message
PartsByRank: TypeAlias = tuple[tuple[int, tuple[BlockPart, ...]], ...]


class TransferPlan(NamedTuple):
    """All that one rank sends, receives and copies, to turn its block into its new block: a linear operator.

    source_shape, target_shape: of this rank's block and of its new block.
    sends, receives: (rank, pieces) for each rank that gets one message, or sends one. kept: the pieces that stay here.
    filled: whether the pieces write every point of the new block; the others are zero.
    """

    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    sends: PartsByRank
    receives: PartsByRank
    kept: tuple[BlockPart, ...]
    filled: bool


class _Run(NamedTuple):
    """``length`` positions of a new block, from ``target`` on. They take points of the block ``owner`` of one axis.

    The points are ``source``, ``source`` + ``step`` ... of this block. step: 1, -1 (in reverse order) or 0 (one point).
    """

    owner: int
    source: int
    target: int
    length: int
    step: int


def halo_plan(source: Decomposition, rank: int, ranges: Ranges, padding: Sequence[str]) -> TransferPlan:
    """Plan that every rank gets a range of global positions, of any extent: its block, with or without more points.

    source: the blocks; ranks stand at the places of its grid in row-major order. rank: this rank.
    ranges: [start, stop) for each axis and each coordinate. Positions below 0 or from the axis's extent on lie outside
        the array. padding: for each axis what they take: "zeros", "circular" (the array repeats), "reflect" (about the
        border points, which are not repeated) or "replicate" (the border point), as in ``torch.nn.functional.pad``.

    Raises ValueError if the array is too small for its padding: "reflect" needs more points than the padding is wide,
    "circular" and "replicate" at least one.
    """
    if not len(padding) == len(ranges) == len(source.blocks):
        raise ValueError(
            f"{len(ranges)} ranges and {len(padding)} paddings for the {len(source.blocks)} axes of {source}"
        )
    if [len(ends) for ends in ranges] != list(source.grid_shape):
        raise ValueError(f"the ranges are not those of a grid of shape {list(source.grid_shape)}")
    coords = grid_coords(rank, source.grid_shape)
    return _plan(source, rank, source.grid_shape, coords, tuple(map(tuple, ranges)), tuple(padding))


def repartition_plan(source: Decomposition, target: Decomposition, rank: int) -> TransferPlan:
    """Plan that the blocks of ``source`` become those of ``target``: another grid of the same ranks, or other blocks.

    source, target: the blocks before and after; ranks stand at the places of both grids in row-major order.
    rank: this rank. Each rank makes the plan of its own number; nothing is sent, and the plan holds for every dtype.

    Raises ValueError if the two differ in their global shape or in the number of ranks.
    """
    if source.shape != target.shape or math.prod(source.grid_shape) != math.prod(target.grid_shape):
        raise ValueError(
            f"a field of shape {list(source.shape)} on a grid of shape {list(source.grid_shape)} cannot become one of "
            f"shape {list(target.shape)} on a grid of shape {list(target.grid_shape)}: the shapes and the numbers of "
            "ranks must be equal"
        )
    axes, there = range(len(source.blocks)), grid_coords(rank, target.grid_shape)
    ranges = tuple(tuple(itertools.pairwise(target.bounds(axis))) for axis in axes)
    return _plan(source, rank, target.grid_shape, there, ranges, ("zeros",) * len(axes))


@functools.lru_cache(maxsize=128)  # operators on blocks, which stand inside of steps, ask for the same plan again
def _plan(
    source: Decomposition,
    rank: int,
    target_grid: tuple[int, ...],
    there: tuple[int, ...],
    ranges: tuple[tuple[tuple[int, int], ...], ...],
    padding: tuple[str, ...],
) -> TransferPlan:
    """Plan that the place ``there`` of the target's grid, which is this rank's, gets its range of each axis."""
    here, axes = grid_coords(rank, source.grid_shape), range(len(ranges))
    beyond = [_beyond(source.bounds(axis)[-1], axis, ranges[axis], padding[axis]) for axis in axes]
    mine: list[list[tuple[int, _Run]]] = [[]]
    if math.prod(source.local_shape(here)):
        mine = [
            _reads_of(source.bounds(axis), ranges[axis], padding[axis], here[axis], beyond=beyond[axis])
            for axis in axes
        ]
    target_shape = tuple(stop - start for start, stop in (ends[c] for ends, c in zip(ranges, there, strict=True)))
    wanted: list[list[_Run]] = []
    if math.prod(target_shape):
        wanted = [_runs(source.bounds(axis), *ranges[axis][there[axis]], padding[axis]) for axis in axes]
    sends: dict[int, list[BlockPart]] = {}
    receives: dict[int, list[BlockPart]] = {}
    kept, covered = [], 0
    # Two ranks list the pieces of one message in the same order: that of the runs of the receiving rank.
    for chosen in itertools.product(*wanted) if wanted else ():
        piece, sender = _piece(chosen), grid_rank([run.owner for run in chosen], source.grid_shape)
        covered += math.prod(run.length for run in chosen)
        if sender == rank:
            kept.append(piece)
        else:
            receives.setdefault(sender, []).append(piece)
    for pairs in itertools.product(*mine):
        receiver = grid_rank([c for c, _ in pairs], target_grid)
        if receiver != rank:
            sends.setdefault(receiver, []).append(_piece([run for _, run in pairs]))
    return TransferPlan(
        source.local_shape(here),
        target_shape,
        tuple((peer, tuple(pieces)) for peer, pieces in sorted(sends.items())),
        tuple((peer, tuple(pieces)) for peer, pieces in sorted(receives.items())),
        tuple(kept),
        covered == math.prod(target_shape),
    )


def _beyond(extent: int, axis: int, ends: Sequence[tuple[int, int]], padding: str) -> bool:
    """Return whether a rank's range of ``axis`` takes values beyond the array. Raises ValueError, on every rank."""
    if padding not in PADDINGS:
        raise ValueError(f"padding={padding!r} must be one of {', '.join(PADDINGS)}")
    for start, stop in ends:
        if stop < start:
            raise ValueError(f"the range from {start} to {stop} of axis {axis} ends before it begins")
    if padding == "zeros":
        return False
    wanted = [span for span in ends if span[0] < span[1]]
    most = max(-min(wanted)[0], max(stop for _, stop in wanted) - extent) if wanted else 0
    beyond = most > 0
    if beyond and (extent < 1 or (padding == "reflect" and most >= extent)):
        raise ValueError(f"axis {axis} has {extent} points: too few for padding={padding!r} of width {most}")
    return beyond


def _reads_of(
    bounds: Sequence[int], ends: Sequence[tuple[int, int]], padding: str, here: int, *, beyond: bool
) -> list[tuple[int, _Run]]:
    """Return (coordinate, run) of all runs of one axis that take points of the block ``here``.

    Of most coordinates it looks at the ends alone, so that a plan takes hardly longer where there are many.
    """
    extent, low, high = bounds[-1], bounds[here], bounds[here + 1]
    return [
        (c, run)
        for c, (start, stop) in enumerate(ends)
        if (start < high and stop > low) or (beyond and (start < 0 or stop > extent))
        for run in _runs(bounds, start, stop, padding, range(here, here + 1))
        if run.owner == here
    ]


def _runs(bounds: Sequence[int], start: int, stop: int, padding: str, owners: range | None = None) -> list[_Run]:
    """Return the runs of one axis for the positions from ``start`` to ``stop`` - 1, in ascending order.

    owners: of the blocks whose own positions count; None: from the first that has any.
    """
    extent = bounds[-1]
    runs = _outside(bounds, range(start, min(stop, 0)), start, padding)
    for owner in owners or range(max(0, bisect_right(bounds, max(start, 0)) - 1), len(bounds) - 1):
        if bounds[owner] >= stop:
            break
        first, last = max(bounds[owner], start), min(bounds[owner + 1], stop)
        if first < last:
            runs.append(_Run(owner, first - bounds[owner], first - start, last - first, 1))
    return runs + _outside(bounds, range(max(start, extent), stop), start, padding)


def _outside(bounds: Sequence[int], positions: range, start: int, padding: str) -> list[_Run]:
    """Return the runs for ``positions`` on one side of the array. start: the first position of the whole range."""
    if padding == "zeros" or not positions:
        return []
    extent, position = bounds[-1], positions.start
    runs = []
    while position < positions.stop:
        rest = positions.stop - position
        if padding == "circular" and extent > 1:
            index, step = position % extent, 1
        elif padding == "reflect":
            index, step = (-position if position < 0 else 2 * (extent - 1) - position), -1
        else:
            index, step = min(max(position, 0), extent - 1), 0
        owner = bisect_right(bounds, index) - 1  # which is never empty
        room = {0: rest, 1: bounds[owner + 1] - index, -1: index - bounds[owner] + 1}  # until another block begins
        length = min(rest, room[step])
        runs.append(_Run(owner, index - bounds[owner], position - start, length, step if length > 1 else 1))
        position += length
    return runs


def _piece(runs: Sequence[_Run]) -> BlockPart:
    source, target, shape = [], [], []
    flipped, repeated = [], []
    for dim, run in enumerate(runs, start=-len(runs)):
        taken = 1 if run.step == 0 else run.length
        first = run.source - (run.length - 1 if run.step == -1 and run.length > 1 else 0)
        source.append(slice(first, first + taken))
        target.append(slice(run.target, run.target + run.length))
        shape.append(taken)
        if run.step == -1:
            flipped.append(dim)
        if run.step == 0:
            repeated.append(dim)
    return BlockPart((..., *source), (..., *target), tuple(shape), tuple(flipped), tuple(repeated))
