"""Which samples a rank trains on: slices of one global batch, numbered alike at every data-parallel size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from commengine import Communicator

from .samples import EpochPermutation

#: a label that counts for nothing
IGNORED = -100


class Samples(Protocol):
    """What cuts a corpus into samples of seq_length + 1 tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]: ...


@dataclass(frozen=True)
class Microbatch:
    """tokens, labels: int64 [b, s]. numbers: the global number of each sample."""

    tokens: Tensor
    labels: Tensor
    numbers: tuple[int, ...]

    @property
    def counted(self) -> int:
        """Labels that the loss counts."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Microbatch:
        """The same on ``device``."""
        return Microbatch(self.tokens.to(device), self.labels.to(device), self.numbers)

    def fits(self, vocab_size: int) -> bool:
        """Whether all tokens, and all labels that are counted, lie within the vocabulary."""
        real = torch.cat((self.tokens.flatten(), self.labels[self.labels != IGNORED]))
        return bool(((real >= 0) & (real < vocab_size)).all())


class GlobalBatches:
    """Global batch k holds samples number k * size ... k * size + size - 1; this rank's slice of it, in microbatches.

    samples: what to draw from. order: from sample number to sample index; None reads ``samples`` once, in order,
    and pads past their end with samples whose labels are all ignored, so that none counts twice.
    data: the data group; size a multiple of ``micro * data.size``.
    """

    def __init__(
        self, samples: Samples, order: EpochPermutation | None, *, size: int, micro: int, data: Communicator
    ) -> None:
        self.samples, self.order = samples, order
        self.size, self.micro = size, micro
        self._mine = size // data.size
        self._offset = data.rank * self._mine

    def __call__(self, k: int) -> Iterator[Microbatch]:
        """This rank's microbatches of global batch ``k``, in order."""
        first = k * self.size + self._offset
        for start in range(first, first + self._mine, self.micro):
            yield self._microbatch(range(start, start + self.micro))

    def _microbatch(self, numbers: range) -> Microbatch:
        past_end = [self.order is None and number >= len(self.samples) for number in numbers]
        indices = [number if self.order is None else self.order[number] for number in numbers]
        rows = [self.samples[0 if past else index] for past, index in zip(past_end, indices, strict=True)]
        data = torch.from_numpy(np.stack(rows))
        labels = data[:, 1:].clone()
        labels[torch.tensor(past_end)] = IGNORED
        return Microbatch(data[:, :-1].contiguous(), labels, tuple(numbers))
