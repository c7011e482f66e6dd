"""SQuAD, the task whose answers are spans of a text.

Answers come from the logits of a question's windows: the n best spans, and the odds of having no answer.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from tplayers import BERTSpans
from trainers.data.tokenizer import Tokenizer
from trainers.weights.configurations import TaskHead

from .downstream import DownstreamTask, Logits, Part
from .formats import file_of, read_squad
from .samples import WindowRules, WindowSamples, most_context
from .settings import FinetuneSettings
from .squad_metrics import Scores, best_threshold, exact_match, f1, scored, thresholded

#: of the windows of a file: float32 [windows, s, 2]
WindowLogits = npt.NDArray[np.float32]


class Answers(NamedTuple):
    """What a model answers to a question.

    best: texts of the paragraph, each once, with the sum of its first and last token's logits, by these scores; none
    for a paragraph without tokens. null: the score of having no answer: the smallest sum of both logits of [CLS] over
    the windows.
    """

    best: list[tuple[str, float]]
    null: float

    @property
    def text(self) -> str:
        """The best answer."""
        return self.best[0][0] if self.best else ""

    @property
    def odds(self) -> float:
        """By how much having no answer is better than the best answer, in nats; 0 if there is none to compare."""
        return self.null - self.best[0][1] if self.best else 0.0

    def ranked(self, *, with_null: bool) -> list[dict[str, Any]]:
        """Each answer, and "" too if asked for, with its score and its probability: a softmax over the scores."""
        rows = [*self.best, *([("", self.null)] if with_null else [])]
        scores = np.array([score for _, score in rows])
        shares = np.exp(scores - scores.max(initial=-np.inf))
        shares /= shares.sum()
        found = zip(rows, shares.tolist(), strict=True)
        return [
            {"text": text, "probability": share, "score": score}
            for (text, score), share in sorted(found, key=lambda one: -one[1])
        ]


def answer_all(samples: WindowSamples, logits: WindowLogits, best: int, longest: int) -> list[Answers]:
    """The answers to each question. logits: float32 [windows, s, 2], of begins and of ends, as `BERTSpans` gives them.

    A span begins and ends in the paragraph, has at most ``longest`` tokens, and begins in the window where its first
    token has most context, so that a span counts once. best: how many answers are kept, and how many begins and ends of
    a window are combined.
    """
    found = []
    for number, of_question in itertools.groupby(range(len(samples)), key=lambda n: samples.windows[n].question):
        rows = list(of_question)
        context = samples.questions[number].context
        text, offsets = samples.contexts[context], samples.offsets[context]
        owner = most_context([samples.windows[row][1:] for row in rows], len(offsets))
        spans: list[tuple[float, int, int]] = []  # -score, first token, last token
        for place, row in enumerate(rows):
            _, first, stop = window = samples.windows[row]
            at = samples.begin(window)
            starts, ends = logits[row, at : at + stop - first].astype(np.float64).T
            usable = np.where(owner[first:stop] == place, starts, -np.inf)
            lasts = _largest(ends, best)
            spans += [
                (-float(starts[begin] + ends[last]), first + begin, first + last)
                for begin in _largest(usable, best)
                for last in lasts
                if usable[begin] > -np.inf and begin <= last < begin + longest
            ]
        answers: dict[str, float] = {}
        for score, begin, last in sorted(spans):
            if words := text[offsets[begin, 0] : offsets[last, 1]]:
                answers.setdefault(words, -score)
            if len(answers) == best:
                break
        found.append(Answers(list(answers.items()), float(logits[rows, 0].sum(axis=1, dtype=np.float64).min())))
    return found


def _largest(values: npt.NDArray[np.float64], count: int) -> list[int]:
    """The places of the ``count`` largest values; of equal ones, the first."""
    places: list[int] = np.argsort(-values, kind="stable")[:count].tolist()
    return places


class SQuADTask(DownstreamTask):
    """Answers to questions as spans of a text, in version 2.0 also none (Rajpurkar et al. 2016, 2018).

    Measures are in percent.
    """

    kept_by: ClassVar[str] = "f1"
    unit: ClassVar[str] = "nats/window"
    softmax_dim: ClassVar[int] = 1
    fixed_length: ClassVar[bool] = True
    network = BERTSpans
    task_head = TaskHead("span_head", "ForQuestionAnswering")

    def __init__(self, config: FinetuneSettings, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        assert config.squad_version is not None
        self.version = config.squad_version
        self._windows = WindowRules(self.seq_length, config.doc_stride, config.max_query_length)

    def read(self, split: str) -> list[Part]:
        path = file_of(self.folder, split, self.version)
        file = read_squad(path, self.version, labelled=split != "test", located=split == "train")
        return [Part(split, WindowSamples(file, self.tokenizer, self._windows))]

    def measures(self, parts: Sequence[Part], logits: Logits) -> dict[str, float]:
        questions = _windows(parts).questions
        if not all(one.labelled for one in questions):
            return {}
        found = self._answers(parts, logits)
        exact, overlap = (
            np.array([
                scored(score, answers.text, [text for text, _ in one.answers], self.version)
                for one, answers in zip(questions, found, strict=True)
            ])
            for score in (exact_match, f1)
        )  # fmt: skip
        if self.version != "2.0":
            return {"exact_match": _percent(exact), "f1": _percent(overlap)}
        odds, said = np.array([answers.odds for answers in found]), np.array([answers.text != "" for answers in found])
        has = np.array([bool(one.answers) for one in questions])
        best_exact, exact_at = best_threshold(said, exact, odds, has)
        best_f1, f1_at = best_threshold(said, overlap, odds, has)
        at = f1_at if self.config.null_score_diff_threshold is None else self.config.null_score_diff_threshold
        exact, overlap = (thresholded(values, odds, has, at) for values in (exact, overlap))
        return {
            "exact_match": _percent(exact), "f1": _percent(overlap), "threshold": at,
            "best_exact": 100 * best_exact, "best_exact_threshold": exact_at,
            "best_f1": 100 * best_f1, "best_f1_threshold": f1_at,
        } | {
            f"{group}_f1": _percent(overlap[has == answerable])
            for group, answerable in (("has_answer", True), ("no_answer", False))
            if answerable in has
        }  # fmt: skip

    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        """The files of run_squad.py: predictions.json, nbest_predictions.json and, in version 2.0, null_odds.json."""
        found = zip(_windows(parts).questions, self._answers(parts, logits), strict=True)
        of = {one.identity: answers for one, answers in found}
        null = self.version == "2.0"
        written: dict[str, Any] = {
            "predictions.json": {
                one: "" if null and answers.odds > (threshold or 0.0) else answers.text for one, answers in of.items()
            },
            "nbest_predictions.json": {one: answers.ranked(with_null=null) for one, answers in of.items()},
        }
        if null:
            written["null_odds.json"] = {one: answers.odds for one, answers in of.items()}
        return {file: json.dumps(value, indent=1) + "\n" for file, value in written.items()}

    def _answers(self, parts: Sequence[Part], logits: Logits) -> list[Answers]:
        (values,) = logits.values()
        return answer_all(_windows(parts), values.numpy(), self.config.n_best_size, self.config.max_answer_length)


def _windows(parts: Sequence[Part]) -> WindowSamples:
    ((_, samples),) = parts
    assert isinstance(samples, WindowSamples)
    return samples


def _percent(values: Scores) -> float:
    return float(100 * sum(values.tolist()) / len(values))
