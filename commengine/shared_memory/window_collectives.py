"""Collectives on tensors in windows: each rank reads and writes the other ranks' memory.

A tensor of `Communicator.empty` lies at the same place of the window on every rank. A block of a pool does not; the
ranks tell each other in the flags where it lies. There is no message and no copy in or out. One rank reduces each
element, once, in the order of the ranks. So the result has the same bits on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from commengine.dtypes import reduce_unseen, unseen

from .flags import PRIVATE, Flags
from .windows import WindowTensor

#: up to this many bytes of all operands, a row is reduced at once, because a node's shared cache holds them
CACHED_BYTES = 8 << 20

#: a longer row is reduced in blocks of this many bytes, so that the result is still in the core's own cache when it is
#: copied to the other ranks
BLOCK_BYTES = 256 << 10


class PrivateElsewhereError(Exception):
    """Another rank's tensor is private, because its pool is full. Raised on every rank that has a block."""


class InWindow:
    """The collectives on windows of one sequence of collectives. All are collective over the ranks of the node.

    low, high: the bounds of this rank's row, a stretch of the flat tensor, in elements. Rank r of the node works on
    row r; all ranks cut the tensor in the same way.

    Each raises `PrivateElsewhereError` for a block of a pool if another rank has none. The ranks have then compared
    their calls, and done nothing else.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags, self._rank = flags, flags.rank

    def all_reduce(self, place: WindowTensor, low: int, high: int, op: str) -> None:
        """Reduce this rank's row of all ranks' tensors, and write the result to all of them."""
        places = self._begin("all_reduce", place, op)
        try:
            for operands in _blocks(place.rows(low, high, places)):
                result = reduce_unseen(operands, op, operands[0])
                for other in operands[1:]:
                    other.copy_(result)
        finally:
            self._flags.meet()

    def reduce_scatter(self, output: Tensor, place: WindowTensor, low: int, high: int, op: str) -> None:
        """Reduce this rank's row of all ranks' tensors into ``output``.

        output: of the row's length; it may be the row itself. For a float16 or bfloat16 tensor it may be float32, and
        then it gets the sum before rounding.
        """
        places = self._begin("reduce_scatter", place, op)
        try:
            with unseen(output):
                for block, *operands in _blocks([output.data.view(-1), *place.rows(low, high, places)]):
                    reduce_unseen(operands, op, block)
        finally:
            self._flags.meet()

    def all_gather(self, output: Tensor, place: WindowTensor) -> None:
        """Copy all ranks' tensors into ``output``."""
        places = self._begin("all_gather", place)
        try:
            with unseen(output):
                rows = output.data.view(self._flags.size, -1).unbind()
                for row, part in zip(rows, place.parts(places), strict=True):
                    if row.data_ptr() != part.data_ptr():
                        row.copy_(part)
        finally:
            self._flags.meet()

    def gather_into(self, place: WindowTensor, low: int, high: int, input: Tensor) -> None:
        """Copy ``input`` into this rank's row of all ranks' tensors."""
        # A rank without a block compares an all-gather.
        places = self._begin("all_gather" if place.block else "gather_into", place)
        try:
            flat = input.data.view(-1)
            for part in place.rows(low, high, places):
                if part.data_ptr() != flat.data_ptr():
                    part.copy_(flat)
        finally:
            self._flags.meet()

    def broadcast(self, place: WindowTensor, root: int) -> None:
        """Copy the tensor of rank ``root`` of the node."""
        places = self._begin("broadcast", place, root)
        try:
            if self._rank != root:
                parts = place.parts(places)
                parts[self._rank].copy_(parts[root])
        finally:
            self._flags.meet()

    def _begin(self, operation: str, place: WindowTensor, how: object = "") -> list[int] | None:
        """Wait for all ranks, because the collective touches their memory; they wait for each other at its end, too.

        Returns the ranks' places if they differ.
        """
        places = self._flags.begin(operation, place.number, place.nbytes, (place.dtype, how))
        if places is not None and PRIVATE in places:
            raise PrivateElsewhereError
        return places


def _blocks(rows: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Cut rows of one length into blocks, and yield the blocks of all rows together."""
    if sum(row.nbytes for row in rows) <= CACHED_BYTES:
        return iter([rows])
    return zip(*(torch.split(row, BLOCK_BYTES // rows[0].itemsize) for row in rows), strict=True)
