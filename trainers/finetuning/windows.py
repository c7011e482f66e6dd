"""SQuAD's samples: a question and a window of its paragraph, which is too long for one (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainers.data.tokenizer import Tokenizer
from trainers.data.wordpiece import WordPieces

from .encoding import FRAME, EncodedSamples, TaskSample, framed
from .formats.pairs import NO_LABEL
from .formats.squad import SpanQuestion, SpanQuestions


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
        self.shape = (rules.seq_length, 2)

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
        labels = np.full(2, 0 if one.labelled else NO_LABEL)
        if one.answers:
            first, last = tokens_of(self.offsets[one.context], *one.answers[0])
            if window.first <= first <= last < window.stop:
                labels[:] = first, last
                labels += self.begin(window) - window.first
        return labels

    def described(self) -> str:
        return repr((self.rules, self.questions, self.contexts))


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
