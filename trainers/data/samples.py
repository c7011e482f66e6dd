"""Samples as a function of their number, cut from a data set or drawn from a Zipf distribution.

Nothing keeps a random state. Sample n of a run follows from the seed and n alone, on any rank and after any restart.
All random numbers are raw Philox output, because NumPy promises to keep those streams and SeedSequence unchanged across
versions, and does not promise it for ``Generator.permutation`` and similar methods.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from .indexed import IndexedDataset

Sample = npt.NDArray[np.int64]
Text = npt.NDArray[np.integer[Any]]
Counts = npt.NDArray[np.int64] | npt.NDArray[np.float64]

# The use of a stream of random numbers. It keeps streams of different uses apart that have the same seed and number.
ZIPF, PERMUTATION, SHORT, MASKS, SPANS = 1, 2, 3, 4, 5
#: a label that does not count
IGNORED = -100
# Tokens that are counted at a time. bincount makes an int64 copy, so this takes 32 MB.
_COUNT_CHUNK = 1 << 22


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Training, validation and test documents for Megatron's ``--split``, for example ``"969,30,1"``.

    split: up to three weights of any scale, separated by commas; a missing weight is 0. The ranges are contiguous, in
    order, and cover every document exactly once. Borders are rounded, half to even, so a small weight may get no
    document. Raises ValueError for any other ``split``.
    """
    weights = split_weights(split)
    weights += [Fraction(0)] * (3 - len(weights))
    total = sum(weights)
    first = round(num_documents * weights[0] / total)
    second = round(num_documents * (weights[0] + weights[1]) / total)
    return range(first), range(first, second), range(second, num_documents)


def split_weights(split: str) -> list[Fraction]:
    """The weights of ``--split``. Raises ValueError as `split_documents` does."""
    try:
        weights = [weight_of(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or sum(weights) == 0:
        raise ValueError(
            f"--split {split[:100]}: want up to three weights, none negative and not all 0, "
            "for training, validation and test, such as 969,30,1"
        )
    return weights


def weight_of(word: str) -> Fraction:
    """The number that ``word`` spells, exactly. Raises ValueError unless it is finite and not negative."""
    with contextlib.suppress(ValueError):
        if 0 <= float(word) < math.inf:  # first, because Fraction("1e999999999") would take hours and all memory
            return Fraction(word) if float(word) else Fraction(0)
    raise ValueError(f"{word!r} is not a weight, which is a finite number of at least 0")


class NoSamplesError(ValueError):
    """Documents that are too few or too short to make one sample."""


class Samples(ABC):
    """The samples of one source: ``len()`` of them in an epoch, and then all of them again in the next epoch.

    A sample is whatever the task trains on; for GPT it is an array of tokens.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, n: int) -> Any:
        """Sample n, 0 <= n < len, as an evaluation reads it. Raises IndexError."""

    def draw(self, epoch: int, n: int) -> Any:
        """Sample n as training reads it in ``epoch``, from 0: ``self[n]``, unless a subclass makes it anew each epoch.

        A pure function of both numbers, on every rank and after every restart.
        """
        del epoch
        return self[n]


class TextSamples(Samples):
    """Samples of text, of which a model predicts tokens: all but the first, or the masked ones."""

    def targets(self, n: int) -> Sample:
        """The tokens that an evaluation of sample n predicts, int64. Raises IndexError."""
        targets: Sample = self[n][1:]
        return targets

    #: of the text, for messages
    name = ""

    @property
    def text(self) -> Text | None:
        """The text of all samples, mapped from a file; None for samples that are drawn."""
        return None

    def token_counts(self, vocab_size: int) -> Counts:
        """How often each id occurs in the text of all samples: [vocab_size]. It reads every token.

        Raises ValueError for an id outside the vocabulary, because the data then belongs to another tokenizer.
        """
        assert self.text is not None
        return count_tokens(self.name, self.text, vocab_size)


class TokenSamples(TextSamples):
    """A range of documents, concatenated in order and cut into samples of equal length.

    Sample n is ``tokens[n * seq_length : (n + 1) * seq_length + 1]``, int64 [seq_length + 1]. Its input is all tokens
    but the last, its labels are all tokens but the first. Neighbours share one token, so that each token but the first
    is predicted once. Tokens that are left at the end are dropped.

    documents: a range of step 1 within the data set. Raises NoSamplesError if it gives no sample.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, seq_length: int) -> None:
        start = int(dataset.document_offsets[documents.start])
        stop = int(dataset.document_offsets[documents.stop]) if documents else start
        self.name = f"{dataset.prefix}, documents {documents.start} to {documents.stop}"
        self.seq_length = seq_length
        self.tokens = dataset.tokens[start:stop]
        self._count = (len(self.tokens) - 1) // seq_length
        if self._count < 1:
            raise NoSamplesError(
                f"{self.name}: {len(self.tokens)} tokens make no sample; one of --seq-length {seq_length} "
                f"needs {seq_length + 1}. Use more data, another --split or a smaller --seq-length"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, n: int) -> Sample:
        """Sample n, 0 <= n < len: a new int64 array [seq_length + 1]. Raises IndexError."""
        if not 0 <= n < self._count:
            raise IndexError(f"{self.name}: sample {n} of {self._count}")
        start = n * self.seq_length
        return self.tokens[start : start + self.seq_length + 1].astype(np.int64)

    @property
    def text(self) -> Text:
        return self.tokens


class ZipfSamples(TextSamples):
    """Mock data: independent tokens, id k with probability p(k) proportional to 1 / (k + 1).

    Sample n is int64 [seq_length + 1], a pure function of (seed, split, n). split: a number for each use of the same
    seed, such as 0 for training, 1 for validation and 2 for test data. The samples of two splits are independent.

    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, count: int, split: int = 0) -> None:
        self.vocab_size, self.seq_length = vocab_size, seq_length
        self._seed, self._split, self._count = seed, split, count
        weights = np.arange(1, vocab_size + 1, dtype=np.float64) ** -1.0
        self.probabilities = weights / weights.sum()
        cumulative = np.cumsum(weights)
        self._cumulative = cumulative / cumulative[-1]  # it ends in exactly 1, above every draw

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, n: int) -> Sample:
        """Sample n, 0 <= n < len: a new int64 array [seq_length + 1]. Raises IndexError."""
        if not 0 <= n < self._count:
            raise IndexError(f"sample {n} of {self._count}")
        raw = philox(self._seed, ZIPF, self._split, n).random_raw(self.seq_length + 1)
        uniform = (raw >> np.uint64(11)) * 2.0**-53
        return np.searchsorted(self._cumulative, uniform, side="right").astype(np.int64)

    def token_counts(self, vocab_size: int) -> npt.NDArray[np.float64]:
        """The expected counts over all samples: float64 [vocab_size], 0 for ids above the mock vocabulary.

        vocab_size: at least that of the mock vocabulary.
        """
        counts = np.zeros(vocab_size, dtype=np.float64)
        counts[: self.vocab_size] = self.probabilities * (self._count * (self.seq_length + 1))
        return counts


def count_tokens(name: str, tokens: Text, vocab_size: int) -> npt.NDArray[np.int64]:
    """The number of times that each id occurs in ``tokens`` [N]: int64 [vocab_size].

    name: of the text. Raises ValueError for an id outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _COUNT_CHUNK):
        chunk = tokens[start : start + _COUNT_CHUNK].astype(np.int64)
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(
                f"{name}: token {bad} is outside the vocabulary of {vocab_size}; was the data made with another "
                "tokenizer?"
            )
        counts += np.bincount(chunk, minlength=vocab_size)
    return counts


def unigram_cross_entropy(train_counts: npt.ArrayLike, heldout_counts: npt.ArrayLike) -> float:
    """The loss, in nats per held-out token, of a model that knows only how often each token occurs.

    A language model with a higher loss has not even learnt frequencies. The model is
    ``p(k) = (train[k] + 1) / sum(train + 1)``, so that an unseen token has a finite loss.

    Both arguments: [vocab_size], not negative; some token was held out.
    """
    train = np.asarray(train_counts, dtype=np.float64)
    heldout = np.asarray(heldout_counts, dtype=np.float64)
    total = heldout.sum()
    log_p = np.log1p(train) - np.log((train + 1).sum())
    return float(-(heldout * log_p).sum() / total)


def mixed_counts(counts: Sequence[npt.ArrayLike], weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """The counts of a text of which each source gives its weight's part: float64 [vocab_size].

    counts: for each source, how often each token occurs in it: [vocab_size]. The sum of the result is that of all
    counts. A source without any token is left out, as its mean loss is (`trainers.run.evaluation.evaluate_sources`).
    """
    arrays = [np.asarray(of_source, dtype=np.float64) for of_source in counts]
    sums = [float(array.sum()) for array in arrays]
    drawn = sum(weight for weight, size in zip(weights, sums, strict=True) if size)
    mixed = np.zeros(arrays[0].shape)
    for weight, size, array in zip(weights, sums, arrays, strict=True):
        if size:
            mixed += weight / drawn * sum(sums) / size * array
    return mixed


def philox(seed: int, *position: int) -> np.random.Philox:
    """A counter-based generator for one position under ``seed``: ``random_raw(n)`` gives uint64 [n]."""
    return np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=position))
