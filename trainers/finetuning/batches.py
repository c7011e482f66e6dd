"""Micro-batches of fine-tuning, their global batches, and the objective of all four tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commengine import Communicator
from commengine.errors import UsageError
from tplayers import Randomness, class_cross_entropy
from trainers.data.batches import GlobalBatches, TextMicrobatch
from trainers.data.samples import IGNORED, Samples
from trainers.data.stream import SampleStream

from .samples import EncodedSamples, TaskSample

#: samples are filled up to a multiple of this many tokens
_MULTIPLE = 8


@dataclass(frozen=True)
class LabelledMicrobatch(TextMicrobatch):
    """A micro-batch of b samples, or of b questions with c choices each; see `TaskSample`.

    tokens, token_types: int64 [b, s] or [b, c, s]. padding: int64 [b] or [b, c], the real tokens. labels: int64 [b],
    or [b, 2] for spans. indices: the number of each sample among those of its part; -1 where it only fills the batch.
    first: the global number of the first sample. part: the name of what is evaluated. vocab_size: without padding.
    """

    tokens: Tensor
    token_types: Tensor
    padding: Tensor
    labels: Tensor
    indices: tuple[int, ...]
    first: int
    part: str
    vocab_size: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """A number for each row of the model's input: those of a question's choices differ."""
        rows = self.padding.numel()
        each = rows // len(self.indices)
        return tuple(range(self.first * each, self.first * each + rows))

    @property
    def counts(self) -> tuple[int]:
        """The samples that have a label."""
        return (int((self.labels.view(len(self.indices), -1)[:, 0] != IGNORED).sum()),)

    @property
    def usable(self) -> bool:
        """Whether all tokens lie within the vocabulary."""
        return bool(((self.tokens >= 0) & (self.tokens < self.vocab_size)).all())


class LabelledBatches(GlobalBatches[LabelledMicrobatch]):
    """Global batches of `TaskSample`.

    part: the name of the samples. fixed: all samples keep their full length, as spans need, whose loss has a softmax
    over all positions. Otherwise the samples of a global batch are cut after the longest of them, at every number of
    ranks alike, so that no masks of dropout depend on the layout. multiple: the length is a multiple of this number.
    The other arguments are `GlobalBatches`'s.
    """

    def __init__(
        self, samples: Samples | SampleStream, *, part: str, fixed: bool, multiple: int = 1, **arguments: Any
    ) -> None:
        super().__init__(samples, **arguments)
        self.part, self._fixed, self._multiple = part, fixed, math.lcm(multiple, _MULTIPLE)
        self._longest: int | None = None
        #: this rank's samples of the global batch, where its longest one had to be found
        self._read: dict[int, TaskSample] = {}

    def __call__(self, k: int) -> Iterator[LabelledMicrobatch]:
        """This rank's microbatches of global batch ``k``, in order."""
        if not self._fixed:
            self._longest = self._longest_of(k)
        yield from super().__call__(k)

    def _longest_of(self, k: int) -> int:
        """The length of global batch ``k``. Every rank reads all of it, and keeps its own samples for `sample`."""
        numbers = range(k * self.size, (k + 1) * self.size)
        if isinstance(self.samples, Samples):
            numbers = range(numbers.start, min(numbers.stop, len(self.samples)))
        mine, self._read, longest = self.of_rank(k), {}, 0
        for number in numbers:
            one = self.samples[number]
            longest = max(longest, int(one.length.max()))
            if number in mine:
                self._read[number] = one
        return -(-longest // self._multiple) * self._multiple

    def sample(self, number: int) -> TaskSample:
        """Sample ``number``, which is encoded once: what `_longest_of` has read is not read again."""
        found: TaskSample = self._read[number] if number in self._read else self.samples[number]
        return found

    def microbatch(self, rows: Sequence[TaskSample], numbers: range, past_end: Sequence[bool]) -> LabelledMicrobatch:
        tokens, types, lengths, labels = (
            torch.from_numpy(np.stack(column)) for column in zip(*(tuple(row) for row in rows), strict=True)
        )
        labels[torch.tensor(past_end)] = IGNORED
        if self._longest is not None:
            tokens, types = (x[..., : self._longest].contiguous() for x in (tokens, types))
        indices = tuple(-1 if past else number for past, number in zip(past_end, numbers, strict=True))
        return LabelledMicrobatch(tokens, types, lengths, labels, indices, numbers.start, self.part, self.vocab_size)


class LabelLoss:
    """The objective: the cross-entropy of the label, or of a span's begin and end, the mean of both.

    keeper: called with each micro-batch and the logits that the model has for it, in evaluation.
    """

    names = ("label_loss",)

    def __init__(self, unit: str, keeper: KeptLogits | None = None) -> None:
        self.unit, self._keeper = unit, keeper

    def __call__(self, model: Any, batch: LabelledMicrobatch, randomness: Randomness | None) -> tuple[Tensor]:
        logits: Tensor = model(batch.tokens, batch.token_types, batch.padding, randomness=randomness)
        if self._keeper is not None:
            self._keeper.keep(batch, logits)
        if batch.labels.dim() == 1:
            return (class_cross_entropy(logits, batch.labels),)
        return (class_cross_entropy(logits.transpose(1, 2), batch.labels).mean(dim=1),)


class KeptLogits:
    """The logits of each sample of an evaluation, by part. parts: the samples of each part."""

    def __init__(self, parts: dict[str, EncodedSamples]) -> None:
        self._kept = {name: torch.zeros(len(samples), *samples.shape) for name, samples in parts.items()}

    def keep(self, batch: LabelledMicrobatch, logits: Tensor) -> None:
        """Keep this rank's logits of a micro-batch."""
        wide, whole = logits.detach().float().cpu(), self._kept[batch.part]
        for row, index in zip(wide, batch.indices, strict=True):
            if index >= 0:
                whole[index, : row.shape[0]] = row

    def gathered(self, data: Communicator) -> dict[str, Tensor]:
        """All samples' logits by part, float32 [n, ...], on every rank. Collective over the data group, once.

        Raises UsageError, on all ranks, where the model gives a logit that is not finite.
        """
        for name, whole in self._kept.items():
            data.all_reduce(whole)  # each sample is on one rank, and 0 on the others
            if not bool(whole.isfinite().all()):
                raise UsageError(f"{name}: the model gives logits that are not finite; it has diverged")
        return self._kept
