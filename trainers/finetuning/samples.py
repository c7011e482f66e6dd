"""Samples of fine-tuning: [CLS] A [SEP] B [SEP], as BERT has read them before.

A sample of SQuAD is a question and a window of its paragraph, which is too long for one sample (Devlin et al. 2019).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from trainers.data.samples import IGNORED, Samples
from trainers.data.sentences.samples import FRAME, kept
from trainers.data.tokenizer import Tokenizer
from trainers.data.wordpiece import WordPieces

from .formats import CHOICES, ChoiceQuestion, Pair, SpanQuestion, SpanQuestions

Tokens = npt.NDArray[np.int64]
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
    """The samples of one file or part of a task.

    shape: of the logits of one sample. made_of: all that the samples follow from.
    """

    shape: tuple[int, ...]
    made_of: tuple[Any, ...]

    @abstractmethod
    def __getitem__(self, n: int) -> TaskSample:
        """Sample n, 0 <= n < len. Raises IndexError."""

    def identity(self) -> str:
        """Tells these samples from all others: a digest of what they are made of."""
        return xxhash.xxh3_64_hexdigest(repr(self.made_of).encode(errors="surrogatepass"))


class RowSamples(EncodedSamples):
    """Samples of rows of a file, of which each has a label: the number of the right one of ``classes``."""

    def __init__(self, rows: Sequence[Any], tokenizer: Tokenizer, seq_length: int, classes: int) -> None:
        self.rows, self._tokenizer, self._seq_length = rows, tokenizer, seq_length
        self._pieces = tokenizer.wordpieces()
        self.shape, self.made_of = (classes,), (seq_length, rows)

    def __len__(self) -> int:
        return len(self.rows)


class PairSamples(RowSamples):
    """Pairs of texts with a class each. The longer text loses tokens at its end until both fit."""

    rows: Sequence[Pair]

    def __getitem__(self, n: int) -> TaskSample:
        pair = self.rows[n]
        first, second = self._tokenizer.encode(pair.first), self._tokenizer.encode(pair.second)
        a, b = kept(len(first), len(second), self._seq_length - FRAME)
        tokens, types, length = framed(first[:a], second[:b], self._pieces, self._seq_length)
        return TaskSample(tokens, types, np.array(length), np.array(pair.label))


class ChoiceSamples(RowSamples):
    """Questions with CHOICES options: A is the question with an option, B is the article, cut where the sample ends.

    longest: the most tokens of A; what is longer is cut off at its end.
    """

    rows: Sequence[ChoiceQuestion]

    def __init__(
        self, questions: Sequence[ChoiceQuestion], tokenizer: Tokenizer, seq_length: int, longest: int
    ) -> None:
        super().__init__(questions, tokenizer, seq_length, CHOICES)
        self._longest, self.made_of = longest, (seq_length, longest, questions)
        self._article = lru_cache(_KEPT_ARTICLES)(tokenizer.encode)

    def __getitem__(self, n: int) -> TaskSample:
        one = self.rows[n]
        article = self._article(one.article)
        rows = []
        for number in range(CHOICES):
            asked = self._tokenizer.encode(one.with_option(number))[: min(self._longest, self._seq_length - FRAME)]
            rows.append(framed(asked, article[: self._seq_length - FRAME - len(asked)], self._pieces, self._seq_length))
        tokens, types, lengths = zip(*rows, strict=True)
        return TaskSample(np.stack(tokens), np.stack(types), np.array(lengths), np.array(one.label))


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


class WindowRules(NamedTuple):
    """How paragraphs are cut. seq_length: tokens of a sample. stride: tokens from one window's first to the next one's.

    query: the most tokens of a question; what is longer is cut off.
    """

    seq_length: int
    stride: int
    query: int


class Window(NamedTuple):
    """Tokens ``first`` to ``stop`` (excluded) of the paragraph of question number ``question``."""

    question: int
    first: int
    stop: int


class WindowSamples(EncodedSamples):
    """The windows of all questions of a file, those of a question in a row.

    A window's labels are the positions of the answer's first and last token in the sample; both are 0, that of [CLS],
    if the window does not hold the whole first answer, and -100 if the file does not say what the answers are.
    """

    def __init__(self, file: SpanQuestions, tokenizer: Tokenizer, rules: WindowRules) -> None:
        self.questions, self.contexts, self.rules = file.questions, file.contexts, rules
        self.pieces: WordPieces = tokenizer.wordpieces()
        self._asked = [ids[: rules.query] for ids in tokenizer.encode_batch([one.question for one in file.questions])]
        encoded = tokenizer.encode_with_offsets(file.contexts)
        self._context = [np.array(ids, dtype=np.int64) for ids, _ in encoded]
        #: for each paragraph the first character and the end of each token, int64 [n, 2]
        self.offsets = [np.array(offsets, dtype=np.int64).reshape(-1, 2) for _, offsets in encoded]
        self.windows = [
            Window(number, first, stop)
            for number, (one, asked) in enumerate(zip(file.questions, self._asked, strict=True))
            for first, stop in windows(len(self._context[one.context]), self._room(asked), rules.stride)
        ]
        self.shape, self.made_of = (rules.seq_length, 2), (rules, file.questions, file.contexts)

    def _room(self, asked: Sequence[int]) -> int:
        return self.rules.seq_length - len(asked) - FRAME

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, n: int) -> TaskSample:
        window = self.windows[n]
        one = self.questions[window.question]
        text = self._context[one.context][window.first : window.stop]
        tokens, types, length = framed(self._asked[window.question], text, self.pieces, self.rules.seq_length)
        return TaskSample(tokens, types, np.array(length), self._labels(window, one))

    def begin(self, window: Window) -> int:
        """The position in the sample of the window's first token."""
        return len(self._asked[window.question]) + FRAME - 1

    def _labels(self, window: Window, one: SpanQuestion) -> npt.NDArray[np.int64]:
        labels = np.full(2, 0 if one.labelled else IGNORED)
        if one.answers:
            first, last = tokens_of(self.offsets[one.context], *one.answers[0])
            if window.first <= first <= last < window.stop:
                labels[:] = first, last
                labels += self.begin(window) - window.first
        return labels


def windows(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """The first token and the end of each window of ``room`` tokens, every ``stride`` tokens; no token is left out."""
    found, first = [], 0
    while True:
        stop = min(first + room, tokens)
        found.append((first, stop))
        if stop == tokens:
            return found
        first += min(stop - first, stride)


def tokens_of(offsets: npt.NDArray[np.int64], text: str, start: int) -> tuple[int, int]:
    """The first and the last token that share a character with ``text``, which begins at character ``start``.

    The first is after the last if there is none: the text is empty, or white space.
    """
    touched = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < start + len(text)))
    return (int(touched[0]), int(touched[-1])) if len(touched) else (0, -1)


def most_context(spans: Sequence[tuple[int, int]], tokens: int) -> npt.NDArray[np.int64]:
    """For each token of a paragraph, the number of the window in which most of its neighbours are seen: int64 [n].

    spans: of the windows, as `windows` gives them. As in BERT's run_squad.py, it is the window where the smaller of the
    two numbers of tokens to its left and right is the largest; a longer window wins where these are equal.
    """
    best, found = np.full(tokens, -np.inf), np.zeros(tokens, dtype=np.int64)
    for number, (first, stop) in enumerate(spans):
        places = np.arange(first, stop)
        score = np.minimum(places - first, stop - 1 - places) + 0.01 * (stop - first)
        better = score > best[first:stop]
        best[first:stop][better] = score[better]
        found[first:stop][better] = number
    return found
