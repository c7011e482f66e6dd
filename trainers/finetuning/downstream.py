"""The four tasks of the paper's section 5.3: files, model, measures and predictions of each."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream
from tplayers import BERTConfig, BERTMultipleChoice, BERTSequenceClassifier, BERTSpans
from trainers.data.tokenizer import Tokenizer

from .answers import AnswerRules, QuestionAnswers, answer_all
from .config import FinetuneConfig
from .encoding import ChoiceSamples, EncodedSamples, PairSamples
from .pairs import MNLI, NO_LABEL, QQP, Columns, left_out_text, read_pairs
from .race import LETTERS, LEVELS, read_level
from .squad import file_of, read_squad
from .squad_metrics import best_threshold, exact_match, f1, scored, thresholded
from .windows import WindowRules, WindowSamples

#: the logits of the samples of each part, float32 [n, ...]
Logits = Mapping[str, Tensor]


class Part(NamedTuple):
    """Samples that are measured apart, such as those of mnli's dev_matched.tsv."""

    name: str
    samples: EncodedSamples


class DownstreamTask(ABC):
    """A task: what its files hold, which model learns it, and how its predictions are measured and written.

    kept_by: the measure of which the run keeps the checkpoint with the largest value. unit: of the loss.
    softmax_dim: the dimension of the logits of all samples over which probabilities sum to 1.
    fixed_length: as in `TaskBatches`.

    config: complete but for the schedule (`FinetuneConfig.opened`). tokenizer: the model's.
    """

    kept_by: str = "accuracy"
    unit: ClassVar[str] = "nats/sample"
    softmax_dim: ClassVar[int] = -1
    fixed_length: ClassVar[bool] = False
    #: the parameters that the pretrained model lacks
    head: ClassVar[str] = "classifier"

    def __init__(self, config: FinetuneConfig, tokenizer: Tokenizer) -> None:
        assert config.data is not None and config.seq_length is not None
        self.config, self.tokenizer = config, tokenizer
        self.folder, self.seq_length = Path(config.data), config.seq_length
        #: sentences for the user about the files
        self.remarks: list[str] = []

    @abstractmethod
    def read(self, split: str) -> list[Part]:
        """The parts of a split: "train" (one part), "dev" or "test". It reads files; not collective.

        Raises InputFileError that names the file.
        """

    @abstractmethod
    def model(
        self, shape: BERTConfig, comm: Communicator, dtype: torch.dtype, stream: Stream | None = None
    ) -> BERTSequenceClassifier | BERTSpans:
        """A new model, without values. stream: as ``overlap_stream`` of `tplayers.BERT`."""

    @abstractmethod
    def measures(self, parts: Sequence[Part], logits: Logits) -> dict[str, float]:
        """The measures by name; none if the samples have no labels."""

    @abstractmethod
    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        """The texts of the files of a submission, by name. threshold: of SQuAD 2.0; see `FinetuneConfig`."""

    def averaged(self, every: Sequence[Logits]) -> dict[str, Tensor]:
        """The logarithm of the mean of the models' probabilities (an ensemble), in the place of one model's logits."""
        found = {}
        for name in every[0]:
            logs = torch.stack([logits[name].double().log_softmax(self.softmax_dim) for logits in every])
            found[name] = (logs.logsumexp(0) - torch.tensor(float(len(every))).log()).float()
        return found


class PairTask(DownstreamTask):
    """MNLI or QQP. splits: for each split the file of each part, and the name of its submission in GLUE."""

    columns: ClassVar[Columns]
    splits: ClassVar[Mapping[str, Mapping[str, tuple[str, str]]]]

    def read(self, split: str) -> list[Part]:
        return [Part(name, self._samples(self.folder / file, split)) for name, (file, _) in self.splits[split].items()]

    def _samples(self, path: Path, split: str) -> PairSamples:
        rows, left_out = read_pairs(
            path, self.columns, labelled=split != "test", skip=self.config.skip_damaged_rows
        )  # fmt: skip
        if left_out:
            self.remarks.append(left_out_text(path, left_out))
        return PairSamples(rows, self.tokenizer, self.seq_length, len(self.columns.labels))

    def model(
        self, shape: BERTConfig, comm: Communicator, dtype: torch.dtype, stream: Stream | None = None
    ) -> BERTSequenceClassifier:
        classes = len(self.columns.labels)
        return BERTSequenceClassifier(shape, comm, classes=classes, overlap_stream=stream, dtype=dtype)

    def measures(self, parts: Sequence[Part], logits: Logits) -> dict[str, float]:
        return _accuracies(parts, logits, [pair.label for part in parts for pair in _of(part, PairSamples).pairs])

    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        del threshold
        words = {number: word for word, number in self.columns.labels.items()}
        files = {name: file for of_split in self.splits.values() for name, (_, file) in of_split.items()}
        found = {}
        for part in parts:
            best = logits[part.name].argmax(dim=1).tolist()
            rows = [f"{pair.identity}\t{words[b]}" for pair, b in zip(_of(part, PairSamples).pairs, best, strict=True)]
            found[files[part.name]] = "\n".join(["index\tprediction", *rows, ""])
        return found


class MNLITask(PairTask):
    """Multi-genre natural language inference: three classes (Williams et al. 2018)."""

    columns = MNLI
    splits: ClassVar[Mapping[str, Mapping[str, tuple[str, str]]]] = {
        "train": {"train": ("train.tsv", "")},
        **{
            split: {
                "matched": (f"{split}_matched.tsv", "MNLI-m.tsv"),
                "mismatched": (f"{split}_mismatched.tsv", "MNLI-mm.tsv"),
            }
            for split in ("dev", "test")
        },
    }

    def read(self, split: str) -> list[Part]:
        """The parts of a split; of the dev split, the one whose file is there if the other one is missing."""
        parts = self.splits[split]
        there = {name: files for name, files in parts.items() if (self.folder / files[0]).exists()}
        return [Part(name, self._samples(self.folder / file, split)) for name, (file, _) in (there or parts).items()]


class QQPTask(PairTask):
    """Quora question pairs: are two questions the same (paper, section 5.3)?"""

    columns = QQP
    splits: ClassVar[Mapping[str, Mapping[str, tuple[str, str]]]] = {
        split: {split: (f"{split}.tsv", "QQP.tsv")} for split in ("train", "dev", "test")
    }


class RACETask(DownstreamTask):
    """Reading comprehension from examinations: one of four answers to a question about an article (Lai et al. 2017)."""

    unit: ClassVar[str] = "nats/question"

    def read(self, split: str) -> list[Part]:
        wanted = LEVELS if self.config.race_level == "both" else (self.config.race_level,)
        every = {level: read_level(self.folder / split, level, labelled=split != "test") for level in wanted}
        if split == "train":
            every = {"train": [question for level in wanted for question in every[level]]}
        longest = self.config.max_qa_length
        return [
            Part(name, ChoiceSamples(questions, self.tokenizer, self.seq_length, longest))
            for name, questions in every.items()
        ]

    def model(
        self, shape: BERTConfig, comm: Communicator, dtype: torch.dtype, stream: Stream | None = None
    ) -> BERTMultipleChoice:
        return BERTMultipleChoice(shape, comm, overlap_stream=stream, dtype=dtype)

    def measures(self, parts: Sequence[Part], logits: Logits) -> dict[str, float]:
        return _accuracies(parts, logits, [one.label for part in parts for one in _of(part, ChoiceSamples).questions])

    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        """RACE.json: for each article, by its file, the letters of the answers to its questions in order."""
        del threshold
        found: dict[str, list[str]] = {}
        for part in parts:
            best = logits[part.name].argmax(dim=1).tolist()
            for question, number in zip(_of(part, ChoiceSamples).questions, best, strict=True):
                found.setdefault(question.file, []).append(LETTERS[number])
        return {"RACE.json": json.dumps(found, indent=1) + "\n"}


class SQuADTask(DownstreamTask):
    """Answers to questions as spans of a text, in version 2.0 also none (Rajpurkar et al. 2016, 2018).

    Measures are in percent.
    """

    unit: ClassVar[str] = "nats/window"
    softmax_dim: ClassVar[int] = 1
    fixed_length: ClassVar[bool] = True
    head: ClassVar[str] = "span_head"

    def __init__(self, config: FinetuneConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        assert config.squad_version is not None
        self.version = config.squad_version
        self.kept_by = "best_f1" if self.version == "2.0" else "f1"
        self._windows = WindowRules(self.seq_length, config.doc_stride, config.max_query_length)
        self._answers = AnswerRules(config.n_best_size, config.max_answer_length)

    def read(self, split: str) -> list[Part]:
        path = file_of(self.folder, split, self.version)
        file = read_squad(path, self.version, labelled=split != "test", located=split == "train")
        return [Part(split, WindowSamples(file, self.tokenizer, self._windows))]

    def model(
        self, shape: BERTConfig, comm: Communicator, dtype: torch.dtype, stream: Stream | None = None
    ) -> BERTSpans:
        return BERTSpans(shape, comm, overlap_stream=stream, dtype=dtype)

    def measures(self, parts: Sequence[Part], logits: Logits) -> dict[str, float]:
        ((name, samples),) = parts
        questions = _of(parts[0], WindowSamples).questions
        if not all(one.labelled for one in questions):
            return {}
        found = answer_all(_of(parts[0], WindowSamples), logits[name].numpy(), self._answers)
        of = {one.identity: answers for one, answers in zip(questions, found, strict=True)}
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
            "best_exact_match": 100 * best_exact,
            "best_exact_match_threshold": exact_at,
            "best_f1": 100 * best_f1,
            "best_f1_threshold": f1_at,
        } | {
            f"{group}_f1": _percent([final["f1"][identity] for identity, one in has.items() if one is answerable])
            for group, answerable in groups.items()
            if answerable in has.values()
        }

    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        """The files of run_squad.py: predictions.json, nbest_predictions.json and, in version 2.0, null_odds.json."""
        ((name, _),) = parts
        samples = _of(parts[0], WindowSamples)
        found = answer_all(samples, logits[name].numpy(), self._answers)
        of = {one.identity: answers for one, answers in zip(samples.questions, found, strict=True)}
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


_TASKS: dict[str, type[DownstreamTask]] = {"mnli": MNLITask, "qqp": QQPTask, "squad": SQuADTask, "race": RACETask}


def downstream_task(config: FinetuneConfig, tokenizer: Tokenizer) -> DownstreamTask:
    """The task of ``config``; see `DownstreamTask`."""
    assert config.task is not None
    return _TASKS[config.task](config, tokenizer)


def _of(part: Part, kind: type[Any]) -> Any:
    assert isinstance(part.samples, kind)
    return part.samples


def _ranked(answers: QuestionAnswers, null: bool) -> list[dict[str, Any]]:
    rows = sorted(answers.probabilities(with_null=null), key=lambda row: -row[1])
    return [{"text": text, "probability": share, "score": score} for text, score, share in rows]


def _percent(values: Any) -> float:
    every = list(values)
    return 100 * sum(every) / max(len(every), 1)


def _accuracies(parts: Sequence[Part], logits: Logits, labels: Sequence[int]) -> dict[str, float]:
    """``accuracy`` over all samples that have a label, and ``accuracy/NAME`` for each of several parts."""
    right, counted, start = [], [], 0
    for part in parts:
        wanted = torch.tensor(labels[start : start + len(part.samples)])
        start += len(part.samples)
        right.append(int((logits[part.name].argmax(dim=1) == wanted).sum()))
        counted.append(int((wanted != NO_LABEL).sum()))
    if not sum(counted):
        return {}
    found = {"accuracy": sum(right) / sum(counted)}
    if len(parts) > 1:
        shares = zip(parts, right, counted, strict=True)
        found |= {f"accuracy/{part.name}": one / count for part, one, count in shares if count}
    return found
