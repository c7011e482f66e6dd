"""The tasks whose samples have one of a few answers: MNLI, QQP and RACE."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from commengine import Communicator, Stream
from tplayers import BERTConfig, BERTMultipleChoice, BERTSequenceClassifier
from trainers.weights.configuration_writer import TaskHead

from .downstream import DownstreamTask, Logits, Part
from .encoding import ChoiceSamples, PairSamples
from .formats.pairs import MNLI, NO_LABEL, QQP, Pair, PairColumns, left_out_text, read_pairs
from .formats.race import LETTERS, LEVELS, ChoiceQuestion, read_level


class PairTask(DownstreamTask):
    """MNLI or QQP. splits: for each split the file of each part, and the name of its submission in GLUE."""

    columns: ClassVar[PairColumns]
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

    def task_head(self) -> TaskHead:
        """See `DownstreamTask`: with the words of the classes."""
        words = {number: word for word, number in self.columns.labels.items()}
        return TaskHead(self.head, self.exported, tuple(words[number] for number in range(len(words))))

    def measures(self, parts: Sequence[Part], logits: Logits) -> dict[str, float]:
        return _accuracies(parts, logits, [pair.label for part in parts for pair in _pairs(part)])

    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        del threshold
        words = {number: word for word, number in self.columns.labels.items()}
        files = {name: file for of_split in self.splits.values() for name, (_, file) in of_split.items()}
        found = {}
        for part in parts:
            best = logits[part.name].argmax(dim=1).tolist()
            rows = [f"{pair.identity}\t{words[b]}" for pair, b in zip(_pairs(part), best, strict=True)]
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

    exported = "ForMultipleChoice"
    unit: ClassVar[str] = "nats/question"
    fixed_length: ClassVar[bool] = True  # nearly every batch has an article that fills its sample

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
        return _accuracies(parts, logits, [one.label for part in parts for one in _questions(part)])

    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        """RACE.json: for each article, by its file, the letters of the answers to its questions in order."""
        del threshold
        found: dict[str, list[str]] = {}
        for part in parts:
            best = logits[part.name].argmax(dim=1).tolist()
            for question, number in zip(_questions(part), best, strict=True):
                found.setdefault(question.file, []).append(LETTERS[number])
        return {"RACE.json": json.dumps(found, indent=1) + "\n"}


def _pairs(part: Part) -> Sequence[Pair]:
    assert isinstance(part.samples, PairSamples)
    return part.samples.pairs


def _questions(part: Part) -> Sequence[ChoiceQuestion]:
    assert isinstance(part.samples, ChoiceSamples)
    return part.samples.questions


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
