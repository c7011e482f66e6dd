"""Collectives on tensors in windows: each rank reads and writes the other ranks' memory.

A tensor of `Communicator.empty` lies at the same place of the window on every rank. A block of a pool does not: the
ranks tell each other in the flags where it lies. There is no message and no copy in or out. One rank reduces each
element, once, in the order of the ranks. So the result has the same bits on every rank and in every run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from commengine.dtypes import reduce_unseen

from .flags import Flags
from .windows import WindowTensor


class PrivateElsewhereError(Exception):
    """Another rank's tensor is private, because its pool is full. Raised on every rank that has a block."""


#: up to this many bytes of all operands, a row is reduced at once, because a node's shared cache holds them
CACHED_BYTES = 8 << 20

#: a longer row is reduced in blocks of this many bytes, so that the result is still in the core's own cache when it is
#: copied to the other ranks
BLOCK_BYTES = 256 << 10


class InWindow:
    """The collectives on windows of one sequence of collectives. All are collective over the ranks of the node.

    A row is a stretch of the flat tensor. Rank r of the node works on row r; all ranks cut the tensor in the same way.

    Each raises `PrivateElsewhereError` for a block of a pool, if another rank has none. Nothing has been done then, but
    `Flags.begin`.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags, self._rank = flags, flags.rank

    def all_reduce(self, place: WindowTensor, row: slice, op: str) -> None:
        """Reduce this rank's row of all ranks' tensors, and write the result to all of them."""
        with self._together("all_reduce", place, op, row) as parts:
            for operands in _blocks(parts):
                result = reduce_unseen(operands, op, operands[0])
                for other in operands[1:]:
                    other.copy_(result)

    def reduce_scatter(self, output: Tensor, place: WindowTensor, row: slice, op: str) -> None:
        """Reduce this rank's row of all ranks' tensors into ``output``.

        output: of the row's length; it may be the row itself. For a float16 or bfloat16 tensor it may be float32, and
        then it gets the sum before rounding.
        """
        with self._together("reduce_scatter", place, op, row) as parts:
            for block, *operands in _blocks([output.data.view(-1), *parts]):
                reduce_unseen(operands, op, block)

    def all_gather(self, output: Tensor, place: WindowTensor) -> None:
        """Copy all ranks' tensors into ``output``."""
        with self._together("all_gather", place) as parts:
            rows = output.view(self._flags.size, -1)
            for row, part in zip(rows, parts, strict=True):
                if row.data_ptr() != part.data_ptr():
                    row.copy_(part)

    def gather_into(self, place: WindowTensor, row: slice, input: Tensor) -> None:
        """Copy ``input`` into this rank's row of all ranks' tensors."""
        # A rank without a block compares an all-gather.
        with self._together("all_gather" if place.block else "gather_into", place, row=row) as parts:
            flat = input.reshape(-1)
            for part in parts:
                if part.data_ptr() != flat.data_ptr():
                    part.copy_(flat)

    def broadcast(self, place: WindowTensor, root: int) -> None:
        """Copy the tensor of rank ``root`` of the node."""
        with self._together("broadcast", place, f"{root}") as parts:
            if self._rank != root:
                parts[self._rank].copy_(parts[root])

    @contextlib.contextmanager
    def _together(
        self, operation: str, place: WindowTensor, how: str = "", row: slice | None = None
    ) -> Iterator[list[Tensor]]:
        """Wait for all ranks before the block and after it, because the block touches the other ranks' memory.

        Yields every rank's tensor, flat, or its ``row``, in the order of the node's ranks. Autograd and the thread's
        modes do not see the writes of the block, as they do not see the writes of MPI.
        """
        self._flags.begin(operation, place.number, place.nbytes, f"{place.dtype} {how}")
        if place.block and self._flags.private_somewhere():
            raise PrivateElsewhereError
        try:
            with torch.inference_mode():
                yield place.parts(self._flags.places(), row)
        finally:
            self._flags.meet()


def _blocks(rows: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Cut rows of one length into blocks, and yield the blocks of all rows together."""
    if sum(row.nbytes for row in rows) <= CACHED_BYTES:
        return iter([tuple(rows)])
    return zip(*(torch.split(row, BLOCK_BYTES // rows[0].itemsize) for row in rows), strict=True)
