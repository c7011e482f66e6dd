"""Exchanges of arrays between ranks, and arrays that are spread over the ranks.

Every function is collective over the communicator that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from commengine import Communicator

Array = NDArray[Any]
#: torch has not every unsigned integer; a message is only bits
_MOVED_AS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def exchange(comm: Communicator, parts: Sequence[Array]) -> list[Array]:
    """Send ``parts[j]`` to rank j, and return what each rank has sent here, in rank order.

    parts: as many 1-D arrays as ranks, of any lengths; one dtype of 1, 2, 4 or 8 bytes, the same on every rank.
    """
    counts = [len(part) for part in parts]
    arriving = comm.exchange_counts(counts)
    received = np.empty(sum(arriving), parts[0].dtype)
    comm.all_to_all_v(_tensor(received), _tensor(np.concatenate(parts)), arriving, counts)
    return np.split(received, np.cumsum(arriving)[:-1])


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).view(_MOVED_AS[array.dtype.itemsize]))


def split_by(owners: Array, size: int, *arrays: Array) -> list[list[Array]]:
    """Each of ``arrays`` in ``size`` parts: part j has the elements whose owner is j, in their order."""
    order = np.argsort(owners, kind="stable")
    at = np.searchsorted(owners[order], np.arange(1, size))
    return [np.split(array[order], at) for array in arrays]


def reduced(comm: Communicator, value: int, op: str = "sum") -> int:
    """The sum of the ranks' values, or what another ``op`` of `Communicator.all_reduce` makes of them."""
    whole = torch.tensor([value])
    comm.all_reduce(whole, op)
    return int(whole)


class Numbering:
    """Numbers for things that the ranks hold: rank 0's come first, then rank 1's.

    held: how many this rank holds. first: the number of its first one.
    """

    def __init__(self, comm: Communicator, held: int) -> None:
        self._comm = comm
        every = torch.empty(comm.size, dtype=torch.int64)
        comm.all_gather(every, torch.tensor([held]))
        self._starts = np.concatenate(([0], np.cumsum(every.numpy())))
        self.held = held
        self.first = int(self._starts[comm.rank])
        self.count = int(self._starts[-1])

    def owners(self, numbers: Array) -> Array:
        """The rank that holds each of ``numbers``. Not collective."""
        return np.searchsorted(self._starts, numbers, side="right") - 1

    def to_owners(self, numbers: Array, *others: Array) -> list[Array]:
        """Send each of ``numbers``, and the element of each of ``others`` beside it, to the rank that holds the number.

        Returns what has arrived: the numbers, less this rank's `first`, and the others.
        """
        parts = split_by(self.owners(numbers), self._comm.size, numbers, *others)
        local, *beside = (np.concatenate(exchange(self._comm, part)) for part in parts)
        return [local - self.first, *beside]

    def lookup(self, values: Array, numbers: Array) -> Array:
        """The value of each of ``numbers``, wherever it is held. values: of those that this rank holds."""
        wanted, position = np.unique(numbers, return_inverse=True)
        (asked,) = split_by(self.owners(wanted), self._comm.size, wanted)
        questions = exchange(self._comm, asked)
        answers = exchange(self._comm, [values[question - self.first] for question in questions])
        return np.concatenate(answers)[position]
