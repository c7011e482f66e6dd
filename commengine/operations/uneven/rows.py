"""Operations in which each rank gives another number of rows: what `all_to_all_v` and `all_gather_v` have in common.

A program says the numbers of rows as integers. They change from call to call, so nothing is kept by them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from torch import Tensor

from commengine.errors import call_error
from commengine.operations.checks import Caller, TensorLike, check_alike, checked_tensor
from commengine.operations.operation import Operation, Run
from commengine.shared_memory.sequence import SequenceMemory


class Counts(list[int]):
    """The numbers of rows from each rank that a call fills in: empty before, so that nobody's list is taken for it."""


#: the numbers of rows to each rank, or of each rank
Rows: TypeAlias = tuple[int, ...]
#: the numbers of rows from each rank; `Counts` are filled by the call
Received: TypeAlias = Rows | Counts


class UnevenOperation(Operation):
    """An operation with numbers of rows. It has a way through windows: each rank copies its rows from the inputs."""

    uneven = True
    #: whether it goes by MPI in a group without windows
    needs_windows = False

    def form(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        output: Tensor = args[0]
        return self.name, output.dtype, output.shape[1:]

    def in_node(self, memory: SequenceMemory, by_mpi: Run, *args: Any) -> Run:
        """Return what runs calls on ranks that share memory: through windows or slots, and by MPI else."""
        raise NotImplementedError

    def common(self, *args: Any) -> str:
        """Return what is equal on all ranks of the numbers of rows, in words."""
        return self.name

    def unmatched(self, wire: Any, *args: Any) -> str | None:
        """Compare the numbers of rows with those of the other ranks. Collective. Returns what does not fit, or None."""
        return None


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Return where each of some parts begins that lie one after the other."""
    return [0, *accumulate(sizes[:-1])]


def in_bytes(rows: Sequence[int], row_bytes: int) -> list[int]:
    """Return the bytes of so many rows each."""
    return [count * row_bytes for count in rows]


def row_bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a row."""
    return tensor.itemsize if tensor.dim() == 1 else tensor.itemsize * math.prod(tensor.shape[1:])


def too_many(counts: Sequence[int], output: Tensor) -> str | None:
    """Return why ``output`` cannot hold the rows that come, or None."""
    come = sum(counts)
    if come <= output.shape[0]:
        return None
    return f"{come} rows come ({list(counts)}), and output is {list(output.shape)}"


def in_place_of(output: Tensor, counts: Sequence[int]) -> Tensor:
    """Return memory for the rows that come where they do not fit ``output``: the others must not wait for this rank."""
    return output.new_empty((sum(counts), *output.shape[1:]))


def checked_rows(group: Caller, operation: str, argument: str, rows: Sequence[int], tensor: Tensor) -> tuple[int, ...]:
    """Return ``rows`` as a tuple of an integer for each rank; they must add up to the rows of ``tensor``."""
    try:
        found = tuple(map(operator.index, rows))
    except TypeError:
        found = ()
    if len(found) != group.size or min(found) < 0:
        said = list(found) if found else repr(rows)
        raise call_error(
            group, operation, f"{argument}={said} must be {group.size} numbers of rows, one for each rank, 0 or more"
        )
    if sum(found) != tensor.shape[0]:
        of = {"input_rows": "input", "output_rows": "output", "rows": "output"}[argument]
        raise call_error(
            group, operation, f"{argument}={list(found)} adds up to {sum(found)} rows, and {of} is {list(tensor.shape)}"
        )
    return found


def checked_uneven(group: Caller, operation: str, output: TensorLike, input: TensorLike) -> tuple[Tensor, Tensor]:
    """Return the tensors of a call; they must have rows of one shape, and share no memory."""
    output = checked_tensor(group, operation, output, "output")
    input = checked_tensor(group, operation, input, "input")
    check_alike(group, operation, output, input)
    if output.dim() == 0 or input.dim() == 0 or output.shape[1:] != input.shape[1:]:
        raise call_error(
            group, operation, f"output {list(output.shape)} and input {list(input.shape)} must have rows of one shape"
        )
    return output, input
