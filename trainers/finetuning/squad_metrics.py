"""SQuAD's measures, as its official scripts compute them: exact match, F1, and the threshold of no answer.

``evaluate-v1.1.py`` (Rajpurkar et al. 2016) and ``evaluate-v2.0.py`` (Rajpurkar et al. 2018) differ in two things. In
version 2.0 a question without an answer has the answer "", and two texts of which one has no word left have F1 1 if
neither has one; in version 1.1 their F1 is 0.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = frozenset(string.punctuation)

Score = Callable[[str, str, str], float]
#: of the questions of a file
Scores = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, with single spaces."""
    plain = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(prediction: str, answer: str, version: str) -> float:
    """1 if both are the same when `normalized`, else 0."""
    del version
    return float(normalized(prediction) == normalized(answer))


def f1(prediction: str, answer: str, version: str) -> float:
    """The harmonic mean of precision and recall of the prediction's words, which count as often as they stand there."""
    ours, theirs = normalized(prediction).split(), normalized(answer).split()
    if version == "2.0" and not (ours and theirs):
        return float(ours == theirs)
    same = sum((Counter(ours) & Counter(theirs)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return 2 * precision * recall / (precision + recall)


def scored(score: Score, prediction: str, answers: Sequence[str], version: str) -> float:
    """The largest score over the answers of a question. In version 2.0, no answers mean the answer ""."""
    if version == "2.0":
        answers = [answer for answer in answers if normalized(answer)] or [""]
    return max((score(prediction, answer, version) for answer in answers), default=0.0)


def best_threshold(said: Flags, scores: Scores, odds: Scores, answerable: Flags) -> tuple[float, float]:
    """(the largest mean of the scores, the threshold that gives it), as the official ``find_best_thresh``.

    A question counts as answered if its odds of having no answer do not exceed the threshold. It then has its score;
    otherwise it has 1 if it has no answer, else 0. The threshold is one of the odds, or 0 if all questions are best
    left unanswered. The mean is from 0 to 1.

    All arguments are [questions]. said: whether the best answer is not "". scores: of the best answers. odds: of having
    no answer. answerable: whether the question has an answer.
    """
    order = np.argsort(odds, kind="stable")
    gains = np.where(answerable, scores, -1.0 * said)[order]
    sums = np.cumsum([np.count_nonzero(~answerable), *gains])  # entry n: the n questions of the least odds are answered
    best = int(sums.argmax())
    return float(sums[best]) / len(odds), float(odds[order[best - 1]]) if best else 0.0


def thresholded(scores: Scores, odds: Scores, answerable: Flags, threshold: float) -> Scores:
    """The score of each question when those with odds above ``threshold`` are left unanswered; see `best_threshold`."""
    return np.where(odds > threshold, ~answerable, scores)
