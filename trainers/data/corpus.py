"""The corpus of a run: its settings, and the samples of a data set or of mock data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from commengine import UsageError
from trainers.config import TrainConfig
from trainers.options import AT_LEAST_ONE, given, option, require

from .batches import Samples
from .indexed import IndexedDataset
from .samples import TokenSamples, ZipfSamples, split_documents, unigram_cross_entropy
from .tokenizer import Tokenizer

#: samples of mock data: of an epoch, and of the held-out split
MOCK_SAMPLES, MOCK_HELD_OUT = 1_000_000, 1_000


@dataclass(frozen=True)
class TextConfig(TrainConfig):
    """A training run on text: the shared settings, and those of the corpus."""

    seq_length: int = option(1024, "tokens of a sample", valid=AT_LEAST_ONE, fixed=True)
    data_path: str | None = option(None, "PREFIX of PREFIX.bin and PREFIX.idx, as preprocess_data writes them")
    split: str = option("969,30,1", "weights of the training, validation and test documents", fixed=True)
    mock_data: bool = option(False, "train on tokens drawn from a Zipf distribution, without files", fixed=True)
    vocab_size: int | None = option(
        None, "tokens of the vocabulary (default: the tokenizer's)", valid=AT_LEAST_ONE, fixed=True
    )
    tokenizer_model: str | None = option(None, "a tokenizer.json (default PREFIX-tokenizer.json if it exists)")

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        require(
            not self.sequence_parallel or self.seq_length % self.tensor_model_parallel_size == 0,
            f"{given(self, 'seq_length')}: with --sequence-parallel it must be a multiple of "
            f"{given(self, 'tensor_model_parallel_size')}",
        )
        if self.mock_data:
            require(self.data_path is None, "--mock-data: cannot go with --data-path; leave one of them out")
            require(self.vocab_size is not None, "--mock-data: needs --vocab-size V")
            return
        require(self.data_path is not None, "--data-path: needed: PREFIX of a data set, or --mock-data --vocab-size V")
        prefix = Path(self.data_path or "")
        for suffix in (".bin", ".idx"):
            path = Path(f"{self.data_path}{suffix}")
            hint = f"; give the prefix alone: {prefix.with_suffix('')}" if prefix.suffix in (".bin", ".idx") else ""
            require(path.is_file(), f"--data-path {prefix}: {path} does not exist{hint}")

    def completed(self, ranks: int) -> Self:
        """The settings with the tokenizer's path and its vocabulary. Raises UsageError if there is no vocabulary."""
        config = super().completed(ranks)
        path = config.tokenizer_model
        if path is None and config.data_path is not None:
            beside = Path(f"{config.data_path}-tokenizer.json")
            path = str(beside) if beside.exists() else None
        if path is None:
            if config.vocab_size is None:
                raise UsageError("--vocab-size V: needed, as there is no --tokenizer-model and none beside --data-path")
            return config
        try:
            size = Tokenizer.from_file(path).vocab_size
        except (OSError, ValueError) as error:
            raise UsageError(f"--tokenizer-model: {error}") from error
        if config.vocab_size is not None and config.vocab_size < size:
            raise UsageError(f"--vocab-size {config.vocab_size}: the tokenizer {path} has {size} tokens")
        return replace(config, tokenizer_model=path, vocab_size=config.vocab_size or size)


@dataclass(frozen=True)
class Corpus:
    """The training samples, the held-out samples (None if their split has too few tokens), and the tokenizer."""

    training: Samples
    held_out: Samples | None
    tokenizer: Tokenizer | None

    def unigram_entropy(self, vocab_size: int, samples: int) -> float:
        """The loss of a unigram model of the training split on the first held-out samples, in nats per token."""
        assert self.held_out is not None
        counts = np.zeros(vocab_size, dtype=np.int64)
        for n in range(min(samples, len(self.held_out))):
            counts += np.bincount(self.held_out[n][1:], minlength=vocab_size)
        assert isinstance(self.training, TokenSamples | ZipfSamples)
        return unigram_cross_entropy(self.training.token_counts(vocab_size), counts)

    def decode(self, tokens: list[int]) -> str:
        """The tokens as text, or as numbers if there is no tokenizer."""
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(tokens)


def open_corpus(config: TextConfig) -> Corpus:
    """The corpus of ``config``, whose vocabulary is known. Raises ValueError, naming what does not fit."""
    assert config.vocab_size is not None
    if config.mock_data:
        zipf = [
            ZipfSamples(config.vocab_size, config.seq_length, config.seed, count, split=part)
            for part, count in enumerate((MOCK_SAMPLES, MOCK_HELD_OUT))
        ]
        return Corpus(zipf[0], zipf[1], None)
    assert config.data_path is not None
    dataset = IndexedDataset(config.data_path)
    training, held_out, _ = split_documents(len(dataset), config.split)
    tokens = dataset.document_offsets[held_out.stop] - dataset.document_offsets[held_out.start]
    enough = int(tokens) > config.seq_length
    if not enough and config.eval_iters > 0:
        raise UsageError(
            f"--split {config.split}: the validation documents have {int(tokens)} tokens, too few for --seq-length "
            f"{config.seq_length}; give them more, or turn evaluation off with --eval-iters 0"
        )
    return Corpus(
        TokenSamples(dataset, training, config.seq_length),
        TokenSamples(dataset, held_out, config.seq_length) if enough else None,
        Tokenizer.from_file(config.tokenizer_model) if config.tokenizer_model else None,
    )
