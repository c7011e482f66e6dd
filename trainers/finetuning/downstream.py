"""DownstreamTask: the files, the model, the measures and the predictions of a task (paper, section 5.3).

MNLI, QQP and RACE, whose samples have one of a few answers, are here, too.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from commengine import Communicator, Stream
from tplayers import BERTConfig, BERTMultipleChoice, BERTSequenceClassifier, BERTSpans
from trainers.data.samples import IGNORED
from trainers.data.tokenizer import Tokenizer
from trainers.run.metrics import left_out_text
from trainers.weights.configurations import TaskHead

from .formats import LETTERS, MNLI, QQP, PairColumns, read_level, read_pairs
from .samples import ChoiceSamples, EncodedSamples, PairSamples, RowSamples
from .settings import LEVELS, FinetuneSettings

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
    fixed_length: as in `LabelledBatches`.

    config: complete but for the schedule (`completing.opened`). tokenizer: the model's.
    """

    kept_by: ClassVar[str] = "accuracy"
    unit: ClassVar[str] = "nats/sample"
    softmax_dim: ClassVar[int] = -1
    fixed_length: ClassVar[bool] = False
    #: the class of the model
    network: Callable[..., BERTSequenceClassifier | BERTSpans]
    #: the head as transformers knows it
    task_head: TaskHead

    def __init__(self, config: FinetuneSettings, tokenizer: Tokenizer) -> None:
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

    def model(
        self, shape: BERTConfig, comm: Communicator, dtype: torch.dtype, stream: Stream | None = None
    ) -> BERTSequenceClassifier | BERTSpans:
        """A new model, without values. stream: as ``overlap_stream`` of `tplayers.BERT`."""
        return self.network(shape, comm, overlap_stream=stream, dtype=dtype)

    @abstractmethod
    def measures(self, parts: Sequence[Part], logits: Logits) -> dict[str, float]:
        """The measures by name; none if the samples have no labels."""

    @abstractmethod
    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        """The texts of the files of a submission, by name. threshold: of SQuAD 2.0; see `FinetuneSettings`."""

    def averaged(self, every: Sequence[Logits]) -> dict[str, Tensor]:
        """The logarithm of the mean of the models' probabilities (an ensemble), in the place of one model's logits."""
        found = {}
        for name in every[0]:
            logs = torch.stack([logits[name].double().log_softmax(self.softmax_dim) for logits in every])
            found[name] = (logs.logsumexp(0) - torch.tensor(float(len(every))).log()).float()
        return found


class ClassTask(DownstreamTask):
    """A task whose samples are `RowSamples`: its measure is the share of labels that the model finds."""

    def measures(self, parts: Sequence[Part], logits: Logits) -> dict[str, float]:
        """``accuracy`` over all samples that have a label, and ``accuracy/NAME`` for each of several parts."""
        right, counted = [], []
        for part in parts:
            pairs = [(row.label, best) for row, best in _predicted(part, logits)]
            right.append(sum(label == best for label, best in pairs))
            counted.append(sum(label != IGNORED for label, _ in pairs))
        if not sum(counted):
            return {}
        found = {"accuracy": sum(right) / sum(counted)}
        if len(parts) > 1:
            shares = zip(parts, right, counted, strict=True)
            found |= {f"accuracy/{part.name}": one / count for part, one, count in shares if count}
        return found


def _predicted(part: Part, logits: Logits) -> Iterator[tuple[Any, int]]:
    """Each row of the part with the number of its most likely class."""
    assert isinstance(part.samples, RowSamples)
    return zip(part.samples.rows, logits[part.name].argmax(dim=1).tolist(), strict=True)


#: by ``--task``: multi-genre natural language inference (Williams et al. 2018); are two questions the same?
#: The columns; and for each split the file of each part, and the name of its submission in GLUE.
PAIRS: dict[str, tuple[PairColumns, Mapping[str, Mapping[str, tuple[str, str]]]]] = {
    "mnli": (MNLI, {"train": {"train": ("train.tsv", "")}} | {
        split: {
            "matched": (f"{split}_matched.tsv", "MNLI-m.tsv"), "mismatched": (f"{split}_mismatched.tsv", "MNLI-mm.tsv"),
        }
        for split in ("dev", "test")
    }),
    "qqp": (QQP, {split: {split: (f"{split}.tsv", "QQP.tsv")} for split in ("train", "dev", "test")}),
}  # fmt: skip


class PairTask(ClassTask):
    """A task of `PAIRS`: a pair of texts has one of a few classes."""

    def __init__(self, config: FinetuneSettings, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.columns, self.splits = PAIRS[str(config.task)]
        labels = self.columns.labels
        self.network = partial(BERTSequenceClassifier, classes=len(labels))
        self.task_head = TaskHead(
            "classifier", "ForSequenceClassification", tuple(sorted(labels, key=labels.__getitem__))
        )

    def read(self, split: str) -> list[Part]:
        """The parts of a split; where several belong to it, those whose files are there."""
        parts = {name: self.folder / file for name, (file, _) in self.splits[split].items()}
        there = {name: path for name, path in parts.items() if path.exists()}
        found = []
        for name, path in (there or parts).items():
            skip = self.config.skip_damaged_rows
            rows, left_out = read_pairs(path, self.columns, labelled=split != "test", skip=skip)
            if left_out:
                self.remarks.append(left_out_text(path, left_out))
            found.append(Part(name, PairSamples(rows, self.tokenizer, self.seq_length, len(self.columns.labels))))
        return found

    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        del threshold
        files = {name: file for of_split in self.splits.values() for name, (_, file) in of_split.items()}
        found = {}
        for part in parts:
            rows = [f"{pair.identity}\t{self.task_head.labels[best]}" for pair, best in _predicted(part, logits)]
            found[files[part.name]] = "\n".join(["index\tprediction", *rows, ""])
        return found


class RACETask(ClassTask):
    """Reading comprehension from examinations: one of four answers to a question about an article (Lai et al. 2017)."""

    network = BERTMultipleChoice
    task_head = TaskHead("classifier", "ForMultipleChoice")
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

    def predictions(self, parts: Sequence[Part], logits: Logits, threshold: float | None) -> dict[str, str]:
        """RACE.json: for each article, by its file, the letters of the answers to its questions in order."""
        del threshold
        found: dict[str, list[str]] = {}
        for part in parts:
            for question, number in _predicted(part, logits):
                found.setdefault(question.file, []).append(LETTERS[number])
        return {"RACE.json": json.dumps(found, indent=1) + "\n"}
