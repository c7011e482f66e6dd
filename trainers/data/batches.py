"""GlobalBatches: which samples a rank gets, numbered alike at every data-parallel size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from commengine import Communicator
from tplayers.host_copy import to_device

from .samples import IGNORED, Samples
from .stream import SampleStream, SourceRecord

Batch = TypeVar("Batch")


class TextMicrobatch:
    """A micro-batch of text. A subclass is a dataclass that has these fields, and others.

    tokens: int64, ids. labels: int64, ids or `IGNORED`. vocab_size: without padding.
    """

    tokens: Tensor
    labels: Tensor
    vocab_size: int

    @property
    def read(self) -> tuple[Tensor, ...]:
        """The tokens that the model reads, [b, s]; of several stacks those of each."""
        return (self.tokens,)

    @property
    def usable(self) -> bool:
        """Whether all tokens, and all labels that are counted, lie within the vocabulary."""
        real = torch.cat((self.tokens.flatten(), self.labels[self.labels != IGNORED]))
        return bool(((real >= 0) & (real < self.vocab_size)).all())

    def to(self, device: torch.device) -> Self:
        """The same micro-batch with its tensors on ``device``."""
        moved = {name: to_device(one, device) for name, one in vars(self).items() if isinstance(one, Tensor)}
        return replace(self, **moved)  # type: ignore[type-var]


class GlobalBatches(ABC, Generic[Batch]):
    """Global batch k holds samples number k * size ... k * size + size - 1; a rank gets its slice, in microbatches.

    A subclass makes a microbatch of type ``Batch`` from samples (`microbatch`); it is then a
    `trainers.training.interfaces.FiniteBatchSource`.

    samples: a stream, which has no end, or the samples of an evaluation. These are read once, in order, and the last
    batch is padded with samples that count nothing, so that no sample counts twice.
    size: samples of a global batch, a multiple of ``micro * data.size``. micro: samples of a microbatch.
    data: the data group. vocab_size: a microbatch with tokens outside of it is not usable. unusable: the error message
    about such tokens.
    """

    def __init__(
        self,
        samples: Samples | SampleStream,
        *,
        size: int,
        micro: int,
        data: Communicator,
        vocab_size: int,
        unusable: str,
    ) -> None:
        self.samples = samples
        self.size, self.micro = size, micro
        self.vocab_size, self.unusable = vocab_size, unusable
        self._mine = size // data.size
        self._offset = data.rank * self._mine

    def __len__(self) -> int:
        """Global batches that one pass over the samples of an evaluation takes."""
        assert isinstance(self.samples, Samples)
        return -(-len(self.samples) // self.size)

    def __call__(self, k: int) -> Iterator[Batch]:
        """This rank's microbatches of global batch ``k``, in order."""
        for start in self.of_rank(k)[:: self.micro]:
            yield self._microbatch(range(start, start + self.micro))

    def of_rank(self, k: int) -> range:
        """The numbers of this rank's samples in global batch ``k``."""
        first = k * self.size + self._offset
        return range(first, first + self._mine)

    def _microbatch(self, numbers: range) -> Batch:
        end = len(self.samples) if isinstance(self.samples, Samples) else None
        past_end = [end is not None and number >= end for number in numbers]
        filler = numbers.start - numbers.start % self.size  # one of the same global batch, as long as these are
        rows = [self.sample(filler if past else number) for past, number in zip(past_end, numbers, strict=True)]
        return self.microbatch(rows, numbers, past_end)

    def sample(self, number: int) -> Any:
        """Sample ``number`` of the stream, or of the samples of an evaluation."""
        return self.samples[number]

    def sources(self, k: int) -> list[SourceRecord]:
        """What the first k global batches of a stream read of each source; see `SampleStream.read`."""
        assert isinstance(self.samples, SampleStream)
        return self.samples.read(k * self.size)

    def record(self, k: int) -> dict[str, Any]:
        """What `continue_from` needs to go on after k global batches of a stream, as JSON types."""
        assert isinstance(self.samples, SampleStream)
        return self.samples.record(k * self.size)

    def continue_from(self, k: int, record: Mapping[str, Any]) -> list[str]:
        """Go on after k global batches of a stream; see `SampleStream.continue_from`."""
        assert isinstance(self.samples, SampleStream)
        return self.samples.continue_from(k * self.size, record)

    @abstractmethod
    def microbatch(self, rows: Sequence[Any], numbers: range, past_end: Sequence[bool]) -> Batch:
        """A microbatch of the samples ``rows``, with their global ``numbers``.

        past_end: for each sample, whether it is only padding and must count nothing.
        """
