"""SQuAD, the task whose answers are spans of a text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from commengine import Communicator, Stream
from tplayers import BERTConfig, BERTSpans
from trainers.data.tokenizer import Tokenizer

from .answers import AnswerRules, QuestionAnswers, answer_all
from .config import FinetuneConfig
from .downstream import DownstreamTask, Logits, Part
from .formats.squad import file_of, read_squad
from .squad_metrics import best_threshold, exact_match, f1, scored, thresholded
from .windows import WindowRules, WindowSamples


class SQuADTask(DownstreamTask):
    """Answers to questions as spans of a text, in version 2.0 also none (Rajpurkar et al. 2016, 2018).

    Measures are in percent.
    """

    kept_by: ClassVar[str] = "f1"
    unit: ClassVar[str] = "nats/window"
    softmax_dim: ClassVar[int] = 1
    fixed_length: ClassVar[bool] = True
    head: ClassVar[str] = "span_head"
    exported = "ForQuestionAnswering"

    def __init__(self, config: FinetuneConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        assert config.squad_version is not None
        self.version = config.squad_version
        self._windows = WindowRules(self.seq_length, config.doc_stride, config.max_query_length)
        self._rules = AnswerRules(config.n_best_size, config.max_answer_length)
        self._last: tuple[WindowSamples, Tensor, dict[str, QuestionAnswers]] | None = None

    def read(self, split: str) -> list[Part]:
        path = file_of(self.folder, split, self.version)
        file = read_squad(path, self.version, labelled=split != "test", located=split == "train")
        return [Part(split, WindowSamples(file, self.tokenizer, self._windows))]

    def model(
        self, shape: BERTConfig, comm: Communicator, dtype: torch.dtype, stream: Stream | None = None
    ) -> BERTSpans:
        return BERTSpans(shape, comm, overlap_stream=stream, dtype=dtype)

    def measures(self, parts: Sequence[Part], logits: Logits) -> dict[str, float]:
        name, samples = _windows(parts)
        questions = samples.questions
        if not all(one.labelled for one in questions):
            return {}
        of = self._answers(samples, logits[name])
        texts = {identity: answers.text for identity, answers in of.items()}
        exact, overlap = (
            {
                one.identity: scored(score, texts[one.identity], [text for text, _ in one.answers], self.version)
                for one in questions
            }
            for score in (exact_match, f1)
        )
        if self.version != "2.0":
            return {"exact_match": _percent(exact.values()), "f1": _percent(overlap.values())}
        odds = {identity: answers.odds for identity, answers in of.items()}
        has = {one.identity: bool(one.answers) for one in questions}
        best_exact, exact_at = best_threshold(texts, exact, odds, has)
        best_f1, f1_at = best_threshold(texts, overlap, odds, has)
        at = f1_at if self.config.null_score_diff_threshold is None else self.config.null_score_diff_threshold
        final = {name: thresholded(values, odds, has, at) for name, values in (("exact", exact), ("f1", overlap))}
        groups = {"has_answer": True, "no_answer": False}
        return {
            "exact_match": _percent(final["exact"].values()),
            "f1": _percent(final["f1"].values()),
            "threshold": at,
            "best_exact": 100 * best_exact,
            "best_exact_threshold": exact_at,
            "best_f1": 100 * best_f1,
            "best_f1_threshold": f1_at,
        } | {
            f"{group}_f1": _percent([final["f1"][identity] for identity, one in has.items() if one is answerable])
            for group, answerable in groups.items()
            if answerable in has.values()
        }

    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        """The files of run_squad.py: predictions.json, nbest_predictions.json and, in version 2.0, null_odds.json."""
        name, samples = _windows(parts)
        of = self._answers(samples, logits[name])
        null = self.version == "2.0"
        written: dict[str, Any] = {
            "predictions.json": {
                one: "" if null and answers.odds > (threshold or 0.0) else answers.text for one, answers in of.items()
            },
            "nbest_predictions.json": {one: _ranked(answers, null) for one, answers in of.items()},
        }
        if null:
            written["null_odds.json"] = {one: answers.odds for one, answers in of.items()}
        return {file: json.dumps(value, indent=1) + "\n" for file, value in written.items()}

    def _answers(self, samples: WindowSamples, logits: Tensor) -> dict[str, QuestionAnswers]:
        """The answers by the question's identity. The last ones are kept: predictions follow measures of the same."""
        if self._last is None or self._last[0] is not samples or self._last[1] is not logits:
            found = answer_all(samples, logits.numpy(), self._rules)
            by_question = {one.identity: answers for one, answers in zip(samples.questions, found, strict=True)}
            self._last = samples, logits, by_question
        return self._last[2]


def _windows(parts: Sequence[Part]) -> tuple[str, WindowSamples]:
    ((name, samples),) = parts
    assert isinstance(samples, WindowSamples)
    return name, samples


def _ranked(answers: QuestionAnswers, null: bool) -> list[dict[str, Any]]:
    rows = sorted(answers.probabilities(with_null=null), key=lambda row: -row[1])
    return [{"text": text, "probability": share, "score": score} for text, score, share in rows]


def _percent(values: Iterable[float]) -> float:
    every = list(values)
    return 100 * sum(every) / max(len(every), 1)
