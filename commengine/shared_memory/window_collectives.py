"""Collectives on tensors in windows: each rank reads and writes the other ranks' memory.

There is no message and no copy in or out. One rank reduces each element, once, in the order of the ranks. So the result
has the same bits on every rank and in every run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from commengine.dtypes import reduce_unseen

from .flags import Flags
from .windows import WindowTensor

#: up to this many bytes of all operands, a row is reduced at once, because a node's shared cache holds them
CACHED_BYTES = 8 << 20

#: a longer row is reduced in blocks of this many bytes, so that the result is still in the core's own cache when it is
#: copied to the other ranks
BLOCK_BYTES = 256 << 10


class InWindow:
    """The collectives on windows of one sequence of collectives. All are collective over the ranks of the node.

    A row is a stretch of the flat tensor. Rank r of the node works on row r; all ranks cut the tensor in the same way.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags, self._rank = flags, flags.rank

    def all_reduce(self, place: WindowTensor, row: slice, op: str) -> None:
        """Reduce this rank's row of all ranks' tensors, and write the result to all of them."""
        with self._together("all_reduce", place, op):
            for operands in _blocks([part[row] for part in place.parts()]):
                result = reduce_unseen(operands, op, operands[0])
                for other in operands[1:]:
                    other.copy_(result)

    def reduce_scatter(self, output: Tensor, place: WindowTensor, row: slice, op: str) -> None:
        """Reduce this rank's row of all ranks' tensors into ``output``.

        output: of the row's length; it may be the row itself. For a float16 or bfloat16 tensor it may be float32, and
        then it gets the sum before rounding.
        """
        with self._together("reduce_scatter", place, op):
            for block, *operands in _blocks([output.data.view(-1), *(part[row] for part in place.parts())]):
                reduce_unseen(operands, op, block)

    def all_gather(self, output: Tensor, place: WindowTensor) -> None:
        """Copy all ranks' tensors into ``output``."""
        with self._together("all_gather", place):
            rows = output.view(self._flags.size, -1)
            for row, part in zip(rows, place.parts(), strict=True):
                if row.data_ptr() != part.data_ptr():
                    row.copy_(part)

    def gather_into(self, place: WindowTensor, row: slice, input: Tensor) -> None:
        """Copy ``input`` into this rank's row of all ranks' tensors."""
        with self._together("gather_into", place):
            flat = input.reshape(-1)
            for part in place.parts():
                if part[row].data_ptr() != flat.data_ptr():
                    part[row].copy_(flat)

    def broadcast(self, place: WindowTensor, root: int) -> None:
        """Copy the tensor of rank ``root`` of the node."""
        with self._together("broadcast", place, f"{root}"):
            if self._rank != root:
                parts = place.parts()
                parts[self._rank].copy_(parts[root])

    @contextlib.contextmanager
    def _together(self, operation: str, place: WindowTensor, how: str = "") -> Iterator[None]:
        """Wait for all ranks before the block and after it, because the block touches the other ranks' memory.

        Autograd and the thread's modes do not see the writes of the block, as they do not see the writes of MPI.
        """
        self._flags.begin(operation, place.number, place.nbytes, f"{place.dtype} {how}")
        try:
            with torch.inference_mode():
                yield
        finally:
            self._flags.meet()


def _blocks(rows: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Cut rows of one length into blocks, and yield the blocks of all rows together."""
    if sum(row.nbytes for row in rows) <= CACHED_BYTES:
        return iter([tuple(rows)])
    return zip(*(torch.split(row, BLOCK_BYTES // rows[0].itemsize) for row in rows), strict=True)
