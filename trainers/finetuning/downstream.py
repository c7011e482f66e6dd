"""DownstreamTask: the files, the model, the measures and the predictions of a task (paper, section 5.3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from commengine import Communicator, Stream
from tplayers import BERTConfig, BERTSequenceClassifier, BERTSpans
from trainers.data.tokenizer import Tokenizer
from trainers.weights.configuration_writer import TaskHead

from .config import FinetuneConfig
from .encoding import EncodedSamples

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

    config: complete but for the schedule (`FinetuneConfig.opened`). tokenizer: the model's.
    """

    kept_by: ClassVar[str] = "accuracy"
    unit: ClassVar[str] = "nats/sample"
    softmax_dim: ClassVar[int] = -1
    fixed_length: ClassVar[bool] = False
    #: the parameters that the pretrained model lacks
    head: ClassVar[str] = "classifier"
    #: the end of the name of transformers' class of the model
    exported: ClassVar[str] = "ForSequenceClassification"

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

    def task_head(self) -> TaskHead:
        """The head as transformers knows it."""
        return TaskHead(self.head, self.exported)

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
