"""The corpus of a run: the samples of data sets or of mock data, and the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from commengine import UsageError
from commengine.errors import usage_errors
from trainers.settings.commands import TransformerSettings
from trainers.settings.data import CorpusOptions

from .blend import WeightedPrefix, blend_of, require_files
from .indexed import IndexedDataset, tokenizer_path
from .same_data import KnownData, same_bytes, same_data, written_after_checksums
from .samples import NoSamplesError, Samples, TokenSamples, ZipfSamples, split_documents, split_weights
from .stream import MOCK, SampleStream, Source
from .tokenizer import Tokenizer

Options = TypeVar("Options", bound=CorpusOptions)
Cut = Callable[[IndexedDataset, range], Samples]
Mock = Callable[[int, int], Samples]

#: samples of mock data: of an epoch, and of the held-out split
MOCK_SAMPLES, MOCK_HELD_OUT = 1_000_000, 1_000


def complete_corpus(config: Options) -> Options:
    """The settings with the tokenizer's path and its vocabulary.

    Raises UsageError where the files are not there, or there is no vocabulary.
    """
    with usage_errors(""):
        split_weights(config.split)
    blend = blend_of(config)
    require_files(blend)
    path = shared_tokenizer(blend, config.tokenizer_model)
    if path is None:
        if config.vocab_size is None:
            raise UsageError("--vocab-size V: needed, as there is no --tokenizer-model and none beside --data-path")
        return config
    size = read_tokenizer(path).vocab_size
    if config.vocab_size is not None and config.vocab_size < size:
        raise UsageError(f"--vocab-size {config.vocab_size}: the tokenizer {path} has {size} tokens")
    return replace(config, tokenizer_model=path, vocab_size=config.vocab_size or size)


def file_remarks(config: CorpusOptions) -> list[str]:
    """A line for each data set with a file that is newer than its checksums. It reads files; not collective."""
    every = [] if config.verify_data else [written_after_checksums(prefix) for _, prefix in blend_of(config)]
    return [line for line in every if line is not None]


def shared_tokenizer(blend: Sequence[WeightedPrefix], asked: str | None) -> str | None:
    """The tokenizer of all data sets: ``asked``, or the one beside them; None if there is none.

    Raises UsageError if the ids of a data set mean other tokens, as far as the tokenizers beside the data sets tell.
    """
    beside = {prefix: path for _, prefix in blend if (path := tokenizer_path(prefix)).exists()}
    if asked is None and not beside:
        return None
    without = [prefix for _, prefix in blend if prefix not in beside]
    if asked is None and without:
        raise UsageError(
            f"--data-path: {next(iter(beside))} has a tokenizer beside it, {without[0]} has none; if both were made "
            "with the same tokenizer, name it with --tokenizer-model"
        )
    vocabularies = {prefix: read_tokenizer(path).vocabulary() for prefix, path in beside.items()}
    shared = asked or str(beside[max(vocabularies, key=lambda prefix: len(vocabularies[prefix]))])
    ids = read_tokenizer(shared).vocabulary()
    for prefix, vocabulary in vocabularies.items():
        if not vocabulary.items() <= ids.items():
            raise UsageError(
                f"--data-path: {prefix} was not made with the tokenizer {shared}, as {beside[prefix]} shows; all data "
                "sets of a run must share one tokenizer"
            )
    return shared


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in the file of ``--tokenizer-model``. Raises UsageError where it is none."""
    with usage_errors("--tokenizer-model: "):
        return Tokenizer.from_file(path)


def require_vocabulary(tokenizer: Tokenizer, path: str, vocab_size: int | None) -> None:
    """Raise UsageError unless a model with ``vocab_size`` tokens has all those of the tokenizer in ``path``."""
    assert vocab_size is not None
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"--tokenizer-model {path}: has {tokenizer.vocab_size} tokens, and the model only {vocab_size}"
        )


@dataclass(frozen=True)
class HeldOutPart:
    """The part of one source in an evaluation.

    weight: its probability; those of all parts sum to 1. iterations: its first global batches that are read.
    samples: how many samples these have, at most all of ``held_out``.
    """

    name: str
    weight: float
    held_out: Samples
    iterations: int
    samples: int


@dataclass(frozen=True)
class Corpus:
    """The sources of a run, at least one, and the tokenizer that they share (None if there is none)."""

    sources: tuple[Source, ...]
    tokenizer: Tokenizer | None = None

    def stream(self, seed: int) -> SampleStream:
        """The training samples, by their global number."""
        return SampleStream(self.sources, seed, None if self.tokenizer is None else self.tokenizer.identity())

    def held_out(self, iterations: int, size: int) -> list[HeldOutPart]:
        """What an evaluation of ``iterations`` global batches of ``size`` samples reads of each source.

        Each source that the run draws from and that has held-out samples gets the share of its weight, in whole batches
        and at least one, but no sample twice. Empty if ``iterations`` is 0 or there are no held-out samples.
        """
        found = [(source, source.held_out) for source in self.sources if source.weight and source.held_out is not None]
        total = sum(source.weight for source, _ in found)
        parts = []
        for source, samples in found if iterations else ():
            mine = min(math.ceil(iterations * source.weight / total), -(-len(samples) // size))
            weight = float(source.weight / total)
            parts.append(HeldOutPart(source.name, weight, samples, mine, min(mine * size, len(samples))))
        return parts

    def decode(self, tokens: list[int], before: Sequence[int] = ()) -> str:
        """What the tokens add to the text of ``before``, or the tokens as numbers if there is no tokenizer."""
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode_after(before, tokens)


def open_corpus(config: TransformerSettings, cut: Cut | None = None, mock: Mock | None = None) -> Corpus:
    """The corpus of ``config``, whose vocabulary is known. Raises ValueError, naming what does not fit.

    cut: makes the samples of a range of documents, and raises NoSamplesError if there are none. mock: makes a number of
    samples of mock data, for part 0 (training) or 1 (held out). The defaults are `TokenSamples` and `ZipfSamples` of
    ``config.seq_length``.
    """
    assert config.vocab_size is not None
    vocab_size, length = config.vocab_size, config.seq_length
    if config.mock_data:
        new = mock or (lambda count, part: ZipfSamples(vocab_size, length, config.seed, count, split=part))
        return Corpus((Source(MOCK, MOCK, Fraction(1), new(MOCK_SAMPLES, 0), new(MOCK_HELD_OUT, 1)),))
    cut = cut or (lambda dataset, documents: token_samples(dataset, documents, length))
    sources, short = [], []
    for weight, prefix in blend_of(config):
        dataset = IndexedDataset(prefix)
        training, validation, _ = split_documents(len(dataset), config.split)
        held_out = None
        try:
            held_out = cut(dataset, validation)
        except NoSamplesError as error:
            short.append(str(error))
        samples = cut(dataset, training)
        known = KnownData.of(dataset)
        sources.append(Source(prefix, known.identity, weight, samples, held_out, known.checksums, known.written))
    _require_different(sources)
    tokenizer = Tokenizer.from_file(config.tokenizer_model) if config.tokenizer_model else None
    corpus = Corpus(tuple(sources), tokenizer)
    if config.eval_iters > 0 and not corpus.held_out(config.eval_iters, 1):
        raise UsageError(
            f"--split {config.split}: no validation documents to evaluate on ({short[0]}); give them more, or turn "
            "evaluation off with --eval-iters 0"
        )
    return corpus


def token_samples(dataset: IndexedDataset, documents: range, length: int) -> TokenSamples:
    """The samples of ``length`` tokens of a data set. Raises UsageError for one of sentences."""
    if len(dataset.sequence_lengths) > len(dataset):
        raise UsageError(
            f"--data-path {dataset.prefix}: its items are sentences, as pretrain_bert needs them; make a data set "
            "without --split-sentences"
        )
    return TokenSamples(dataset, documents, length)


def _require_different(sources: Sequence[Source]) -> None:
    """Raise UsageError if two sources are the same data, because their samples would repeat within an epoch."""
    for one, other in combinations(sources, 2):
        if same_data(one, other) and same_bytes(one.name, other.name):
            raise UsageError(f"--data-path: {one.name} and {other.name} hold the same data; add up the weights")
