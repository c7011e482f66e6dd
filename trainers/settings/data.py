"""The text of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commengine.options.declared import option
from commengine.options.ranges import Length, Vocabulary


@dataclass(frozen=True)
class CorpusOptions:
    """The corpus, and its vocabulary."""

    seq_length: Length = option(1024, "tokens of a sample", fixed=True)
    data_path: str | Sequence[str] | None = option(
        None,
        "PREFIX of PREFIX.bin and PREFIX.idx, as preprocess_data writes them; or a blend, WEIGHT PREFIX WEIGHT PREFIX "
        "..., in which a sample comes from a data set with the probability of its weight (of any scale). The held-out "
        "loss of a blend is the mean over the held-out parts of its data sets by the same weights",
        words=True,
    )
    split: str = option("969,30,1", "weights of the training, validation and test documents", fixed=True)
    mock_data: bool = option(False, "train on tokens drawn from a Zipf distribution, without files", fixed=True)
    verify_data: bool = option(
        False, "before training, compare all files of --data-path with their checksums, which preprocess_data wrote"
    )
    vocab_size: Vocabulary | None = option(None, "tokens of the vocabulary (default: the tokenizer's)", fixed=True)
    tokenizer_model: str | None = option(None, "a tokenizer.json (default PREFIX-tokenizer.json if it exists)")
