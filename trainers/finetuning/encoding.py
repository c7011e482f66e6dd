"""Samples of fine-tuning: [CLS] A [SEP] B [SEP], as BERT has read them before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from trainers.data.samples import Samples
from trainers.data.sentence_samples import kept
from trainers.data.tokenizer import Tokenizer
from trainers.data.wordpiece import WordPieces

from .formats.pairs import Pair
from .formats.race import CHOICES, ChoiceQuestion

Tokens = npt.NDArray[np.int64]
#: tokens of a sample that are no text: [CLS] A [SEP] B [SEP]
FRAME = 3
#: articles of RACE whose tokens are kept, because the questions of one stand together in an evaluation
_KEPT_ARTICLES = 64


class TaskSample(NamedTuple):
    """One sample: a pair of texts, or a question with a text for each of c choices.

    tokens, types: int64 [s] or [c, s], filled up with [PAD]; the type is 1 in B and the [SEP] after it. length: int64
    [] or [c], the tokens that are not padding. labels: int64, [] for a class or a choice, [2] for a span; -100 for
    none.
    """

    tokens: Tokens
    types: Tokens
    length: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


class EncodedSamples(Samples):
    """The samples of one file or part of a task. shape: of the logits of one sample."""

    shape: tuple[int, ...]

    @abstractmethod
    def __getitem__(self, n: int) -> TaskSample:
        """Sample n, 0 <= n < len. Raises IndexError."""

    @abstractmethod
    def described(self) -> str:
        """All that the samples follow from."""

    def identity(self) -> str:
        """Tells these samples from all others: a digest of what they are made of."""
        return xxhash.xxh3_64_hexdigest(self.described().encode(errors="surrogatepass"))


class PairSamples(EncodedSamples):
    """Pairs of texts with a class each. The longer text loses tokens at its end until both fit."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer, seq_length: int, classes: int) -> None:
        self.pairs, self._tokenizer, self._seq_length = pairs, tokenizer, seq_length
        self._pieces = tokenizer.wordpieces()
        self.shape = (classes,)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, n: int) -> TaskSample:
        pair = self.pairs[n]
        first, second = self._tokenizer.encode(pair.first), self._tokenizer.encode(pair.second)
        a, b = kept(len(first), len(second), self._seq_length - FRAME)
        tokens, types, length = framed(first[:a], second[:b], self._pieces, self._seq_length)
        return TaskSample(tokens, types, np.array(length), np.array(pair.label))

    def described(self) -> str:
        return repr((self._seq_length, self.pairs))


class ChoiceSamples(EncodedSamples):
    """Questions with CHOICES options: A is the question with an option, B is the article, cut where the sample ends.

    longest: the most tokens of A; what is longer is cut off at its end.
    """

    def __init__(
        self, questions: Sequence[ChoiceQuestion], tokenizer: Tokenizer, seq_length: int, longest: int
    ) -> None:
        self.questions, self._tokenizer = questions, tokenizer
        self._seq_length, self._longest = seq_length, longest
        self._pieces = tokenizer.wordpieces()
        self._article = lru_cache(_KEPT_ARTICLES)(tokenizer.encode)
        self.shape = (CHOICES,)

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, n: int) -> TaskSample:
        one = self.questions[n]
        article = self._article(one.article)
        rows = []
        for number in range(CHOICES):
            asked = self._tokenizer.encode(one.with_option(number))[: min(self._longest, self._seq_length - FRAME)]
            rows.append(framed(asked, article[: self._seq_length - FRAME - len(asked)], self._pieces, self._seq_length))
        tokens, types, lengths = zip(*rows, strict=True)
        return TaskSample(np.stack(tokens), np.stack(types), np.array(lengths), np.array(one.label))

    def described(self) -> str:
        return repr((self._seq_length, self._longest, self.questions))


def framed(
    first: Sequence[int] | Tokens, second: Sequence[int] | Tokens, pieces: WordPieces, seq_length: int
) -> tuple[Tokens, Tokens, int]:
    """(tokens, types, length) of [CLS] first [SEP] second [SEP], filled up with [PAD] to int64 [seq_length]."""
    tokens = np.full(seq_length, pieces.pad, dtype=np.int64)
    types = np.zeros(seq_length, dtype=np.int64)
    end, length = len(first) + 1, len(first) + len(second) + FRAME
    tokens[0], tokens[end], tokens[length - 1] = pieces.cls, pieces.sep, pieces.sep
    tokens[1:end] = first
    tokens[end + 1 : length - 1] = second
    types[end + 1 : length] = 1
    return tokens, types, length
