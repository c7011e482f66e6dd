"""Answers to SQuAD's questions from the logits of their windows: the n best spans, and the odds of having no answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .windows import Window, WindowSamples, most_context

Logits = npt.NDArray[np.float32]


class AnswerRules(NamedTuple):
    """best: how many answers are kept, and how many begins and ends of a window are combined. longest: tokens."""

    best: int
    longest: int


class RankedAnswer(NamedTuple):
    """A text of the paragraph. score: the sum of its first and last token's logits."""

    text: str
    score: float


class QuestionAnswers(NamedTuple):
    """answers: the best ones, by score, without repetitions; empty for a paragraph without tokens.

    null: the score of having no answer: the smallest sum of both logits of [CLS] over the windows.
    """

    answers: list[RankedAnswer]
    null: float

    @property
    def text(self) -> str:
        """The best answer."""
        return self.answers[0].text if self.answers else ""

    @property
    def odds(self) -> float:
        """By how much having no answer is better than the best answer, in nats; 0 if there is none to compare."""
        return self.null - self.answers[0].score if self.answers else 0.0

    def probabilities(self, *, with_null: bool) -> list[tuple[str, float, float]]:
        """(text, score, probability) of each answer, and of "" too if asked for: a softmax over their scores."""
        every = [*self.answers, *([RankedAnswer("", self.null)] if with_null else [])]
        scores = np.array([one.score for one in every])
        weights = np.exp(scores - scores.max()) if len(scores) else scores
        return [(*one, float(weight / weights.sum())) for one, weight in zip(every, weights, strict=True)]


def answer_all(samples: WindowSamples, logits: Logits, rules: AnswerRules) -> list[QuestionAnswers]:
    """The answers to each question. logits: float32 [windows, s, 2], of begins and of ends, as `BERTSpans` gives them.

    A span begins and ends in the paragraph, has at most ``rules.longest`` tokens, and begins in the window where its
    first token has most context, so that a span counts once.
    """
    found = []
    for number, rows in itertools.groupby(range(len(samples)), key=lambda n: samples.windows[n].question):
        of_question = list(rows)
        found.append(_answer(samples, number, of_question, logits[of_question], rules))
    return found


def _answer(
    samples: WindowSamples, number: int, rows: Sequence[int], logits: Logits, rules: AnswerRules
) -> QuestionAnswers:
    question = samples.questions[number]
    text, offsets = samples.contexts[question.context], samples.offsets[question.context]
    spans = [samples.windows[row] for row in rows]
    owner = most_context([(one.first, one.stop) for one in spans], len(offsets))
    null = float(logits[:, 0].sum(axis=1, dtype=np.float64).min())
    every = [
        found
        for place, window in enumerate(spans)
        for found in _spans(window, samples.begin(window), logits[place], owner == place, rules)
    ]
    answers: dict[str, RankedAnswer] = {}
    for score, first, last in sorted(every, key=lambda one: (-one[0], one[1], one[2])):
        words = text[offsets[first, 0] : offsets[last, 1]]
        if words and words not in answers:
            answers[words] = RankedAnswer(words, score)
        if len(answers) == rules.best:
            break
    return QuestionAnswers(list(answers.values()), null)


def _spans(
    window: Window, begin: int, logits: Logits, owned: npt.NDArray[np.bool_], rules: AnswerRules
) -> Iterator[tuple[float, int, int]]:
    """(score, first token, last token) of the spans of a window, by the tokens' numbers in the paragraph."""
    count = window.stop - window.first
    starts, ends = logits[begin : begin + count].astype(np.float64).T
    usable = np.where(owned[window.first : window.stop], starts, -np.inf)
    for first in _largest(usable, rules.best):
        if usable[first] == -np.inf:
            continue
        for last in _largest(ends, rules.best):
            if first <= last < first + rules.longest:
                yield float(starts[first] + ends[last]), window.first + int(first), window.first + int(last)


def _largest(values: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """The places of the ``count`` largest values; of equal ones, the first."""
    return np.argsort(-values, kind="stable")[:count]
