"""What a run trains and is evaluated on: samples of a data set's splits, or mock data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from commengine import UsageError
from trainers.config import TrainConfig

from .batches import Samples
from .indexed import IndexedDataset
from .samples import TokenSamples, ZipfSamples, split_documents, unigram_cross_entropy
from .tokenizer import Tokenizer

#: what mock data counts as an epoch, and as a held-out split
MOCK_SAMPLES, MOCK_HELD_OUT = 1_000_000, 1_000


@dataclass(frozen=True)
class Corpus:
    """The training samples, the held-out ones (None where the split has no tokens), and how to read tokens."""

    training: Samples
    held_out: Samples | None
    tokenizer: Tokenizer | None

    def unigram_entropy(self, vocab_size: int, samples: int) -> float:
        """Nats per token of a unigram model of the training split on the labels of the first held-out samples."""
        assert self.held_out is not None
        counts = np.zeros(vocab_size, dtype=np.int64)
        for n in range(min(samples, len(self.held_out))):
            counts += np.bincount(self.held_out[n][1:], minlength=vocab_size)
        assert isinstance(self.training, TokenSamples | ZipfSamples)
        return unigram_cross_entropy(self.training.token_counts(vocab_size), counts)

    def decode(self, tokens: list[int]) -> str:
        """The tokens as text, or as numbers where there is no tokenizer."""
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(tokens)


def with_vocabulary(config: TrainConfig) -> TrainConfig:
    """``config`` with the tokenizer's path and vocabulary filled in. Raises UsageError where there is no vocabulary."""
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


def open_corpus(config: TrainConfig) -> Corpus:
    """The corpus of ``config``, whose vocabulary is known. Raises ValueError naming what does not fit."""
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
