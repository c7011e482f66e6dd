"""GlobalBatches: which samples a rank gets, numbered alike at every data-parallel size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from .samples import EpochPermutation

Batch = TypeVar("Batch")


class Samples(Protocol):
    """A corpus cut into samples; for a language model each is an array of seq_length + 1 tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]: ...


class DataGroup(Protocol):
    """The part of a `commengine.Communicator` over the data group that is needed here."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...


class GlobalBatches(ABC, Generic[Batch]):
    """Global batch k holds samples number k * size ... k * size + size - 1; a rank gets its slice, in microbatches.

    A subclass makes a microbatch of type ``Batch`` from samples (`microbatch`) and says what a sample that the model
    cannot take means (``unusable``); it is then a `trainers.training.interfaces.FiniteBatchSource`.

    samples: what to draw from. order: maps sample number to index. If it is None, samples are read once, in order, and
    the last batch is padded with samples that count nothing, so that no sample counts twice.
    size: samples of a global batch, a multiple of ``micro * data.size``. micro: samples of a microbatch.
    data: the data group.
    """

    def __init__(
        self, samples: Samples, order: EpochPermutation | None, *, size: int, micro: int, data: DataGroup
    ) -> None:
        self.samples, self.order = samples, order
        self.size, self.micro = size, micro
        self._mine = size // data.size
        self._offset = data.rank * self._mine

    def __len__(self) -> int:
        """Global batches that one pass over the samples takes."""
        return -(-len(self.samples) // self.size)

    def __call__(self, k: int) -> Iterator[Batch]:
        """This rank's microbatches of global batch ``k``, in order."""
        first = k * self.size + self._offset
        for start in range(first, first + self._mine, self.micro):
            yield self._microbatch(range(start, start + self.micro))

    def _microbatch(self, numbers: range) -> Batch:
        past_end = [self.order is None and number >= len(self.samples) for number in numbers]
        indices = [number if self.order is None else self.order[number] for number in numbers]
        rows = [self.samples[0 if past else index] for past, index in zip(past_end, indices, strict=True)]
        return self.microbatch(rows, numbers, past_end)

    @abstractmethod
    def microbatch(self, rows: Sequence[Any], numbers: range, past_end: Sequence[bool]) -> Batch:
        """A microbatch of the samples ``rows``, with their global ``numbers``.

        past_end: for each sample, whether it is only padding and must count nothing.
        """
