"""Collectives on tensors in windows: each rank reads and writes the others' memory.

No message, no copy in or out; each element is reduced once, by one rank, in the order of the ranks. So the result has
the same bits on every rank and in every run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from commengine.dtypes import reduce_unseen

from .flags import Lane
from .windows import Place

#: bytes of all operands up to which a row is reduced at once: a node's large cache has them
CACHED_BYTES = 8 << 20

#: bytes of each operand that are reduced at a time else: a core's own cache still has the result when it is copied
BLOCK_BYTES = 256 << 10


class InWindow:
    """The collectives of one lane. A row is a stretch of the flat tensor, the same on all ranks of the node."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._rank = lane, lane.rank

    def all_reduce(self, place: Place, row: slice, op: str) -> None:
        """Reduce this rank's row of everybody's tensor, and write it to all."""
        with self._together("all_reduce", place, op):
            for operands in _blocks([part[row] for part in place.parts()]):
                result = reduce_unseen(operands, op, operands[0])
                for other in operands[1:]:
                    other.copy_(result)

    def reduce_scatter(self, output: Tensor, place: Place, row: slice, op: str) -> None:
        """Reduce this rank's row of everybody's tensor into ``output``, of halves perhaps float32; it may be the row.

        Of float32 ``output`` it is the sum that has not been rounded yet.
        """
        with self._together("reduce_scatter", place, op):
            for block, *operands in _blocks([output.data.view(-1), *(part[row] for part in place.parts())]):
                reduce_unseen(operands, op, block)

    def all_gather(self, output: Tensor, place: Place) -> None:
        """Copy everybody's tensor into ``output``."""
        with self._together("all_gather", place):
            rows = output.view(self._lane.size, -1)
            for row, part in zip(rows, place.parts(), strict=True):
                if row.data_ptr() != part.data_ptr():
                    row.copy_(part)

    def gather_into(self, place: Place, row: slice, input: Tensor) -> None:
        """Copy ``input`` into this rank's row of everybody's tensor."""
        with self._together("gather_into", place):
            flat = input.reshape(-1)
            for part in place.parts():
                if part[row].data_ptr() != flat.data_ptr():
                    part[row].copy_(flat)

    def broadcast(self, place: Place, root: int) -> None:
        """Copy ``root``'s tensor."""
        with self._together("broadcast", place, f"{root}"):
            if self._rank != root:
                parts = place.parts()
                parts[self._rank].copy_(parts[root])

    @contextlib.contextmanager
    def _together(self, operation: str, place: Place, how: str = "") -> Iterator[None]:
        """Around reading and writing each other's memory: all ranks are here before, and done afterwards.

        Behind autograd's back, whatever the calling thread's modes, as MPI writes.
        """
        self._lane.begin(operation, place.number, place.nbytes, f"{place.dtype} {how}")
        try:
            with torch.inference_mode():
                yield
        finally:
            self._lane.meet()


def _blocks(rows: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Rows of one length, block by block."""
    if sum(row.nbytes for row in rows) <= CACHED_BYTES:
        return iter([tuple(rows)])
    return zip(*(torch.split(row, BLOCK_BYTES // rows[0].itemsize) for row in rows), strict=True)
