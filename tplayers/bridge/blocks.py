"""Which points two programs exchange, from the blocks of the ranks of both: arithmetic, without communication."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from commengine import Decomposition
from commengine.decomposition import grid_coords

#: the words with which a rank describes its block of a field; the axes that it has not are 0
MOST_AXES = 4
WORDS = 3 + 3 * MOST_AXES
DTYPES = (torch.float32, torch.float64)

#: the places [start, stop) of a block, along each axis
Box = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class BridgeField:
    """A field that crosses a `Bridge`: its points, the blocks of this program's ranks, and the numbers at each point.

    decomposition: of 1 to 4 axes; a block may be empty. The ranks stand at the places of its grid in row-major order.
    leading: the sizes before the axes, such as (batch, channels). dtype: float32 or float64. Raises ValueError if it
    is another one, or if there are more axes.
    """

    decomposition: Decomposition
    leading: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        axes = len(self.decomposition.blocks)
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(f"BridgeField: a field has 1 to {MOST_AXES} axes, not {axes}")
        if self.dtype not in DTYPES:
            raise ValueError(f"BridgeField: dtype={self.dtype} must be float32 or float64")

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's tensor: ``leading``, and its block."""
        return (*self.leading, *self.decomposition.local_shape(self._place(rank)))

    def words(self, rank: int) -> list[int]:
        """The description of a rank's block, for the other program."""
        at = self.decomposition.slices(self._place(rank))
        numbers = self.decomposition.shape, [one.start for one in at], [one.stop for one in at]
        padded = [(*several, *[0] * (MOST_AXES - len(several))) for several in numbers]
        return [len(at), math.prod(self.leading), self.dtype.itemsize, *itertools.chain(*padded)]

    def problem(self, x: Any, rank: int) -> str | None:
        """Why ``x`` is not this rank's block of the field, in words; None if it is. Not collective; raises nothing.

        x: what a program gives; the block is a tensor of `local_shape` and of the field's dtype, on any device. rank:
        this rank among those of its program.
        """
        shape = self.local_shape(rank)
        if not isinstance(x, Tensor) or x.dtype != self.dtype or tuple(x.shape) != shape:
            given = f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            return f"rank {rank} must give a tensor {list(shape)} of {self.dtype}, not {given}"
        return None

    def _place(self, rank: int) -> tuple[int, ...]:
        return grid_coords(rank, self.decomposition.grid_shape)


class SharedPart(NamedTuple):
    """The points that a rank shares with one rank of the other program: slices of its block's last dimensions."""

    peer: int
    at: tuple[Any, ...]


def shared_parts(field: BridgeField, rank: int, theirs: np.ndarray) -> list[SharedPart]:
    """Return what this rank exchanges with each rank of the other program.

    theirs: [ranks of the other program, WORDS], their descriptions of the same field. Raises ValueError if they
    describe another field, or if their blocks have not each of its points exactly once.
    """
    mine = field.words(rank)
    axes, points = mine[0], field.decomposition.shape
    same = 3 + axes
    if unlike := next((words for words in theirs.tolist() if words[:same] != mine[:same]), None):
        raise ValueError(f"here it is {_named(mine)}, in the other program {_named(unlike)}")
    start, stop = (theirs[:, 3 + place * MOST_AXES :][:, :axes] for place in (1, 2))
    if not _each_point_once(points, zip(start.tolist(), stop.tolist(), strict=True)):
        first = ", ".join(f"{a} to {b}" for a, b in zip(start[:8].tolist(), stop[:8].tolist(), strict=True))
        raise ValueError(
            f"the blocks of the other program's {len(theirs)} ranks do not have each of the {list(points)} points "
            f"once; the first are from {first}"
        )
    low = np.array(mine[3 + MOST_AXES :][:axes])
    high = np.array(mine[3 + 2 * MOST_AXES :][:axes])
    begin, end = np.maximum(start, low) - low, np.minimum(stop, high) - low
    return [
        SharedPart(peer, (..., *(slice(a, b) for a, b in zip(begin[peer].tolist(), end[peer].tolist(), strict=True))))
        for peer in np.flatnonzero((begin < end).all(axis=1)).tolist()
    ]


def _named(words: Sequence[int]) -> str:
    return f"{words[1]} channels of {words[2]} bytes at {words[3 : 3 + words[0]]} points"


def _each_point_once(points: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether the boxes tile the field. They do if and only if their corners, with signs, add up to the field's.

    A set of points is known from the signed corners of its boxes, as a function is from its mixed differences.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for (start, stop), weight in [(([0] * len(points), points), -1), *((box, 1) for box in boxes)]:
        if all(a < b for a, b in zip(start, stop, strict=True)):
            for ends in itertools.product((0, 1), repeat=len(points)):
                corner = tuple(stop[axis] if end else start[axis] for axis, end in enumerate(ends))
                corners[corner] += weight * (-1) ** sum(ends)
    return not any(corners.values())
