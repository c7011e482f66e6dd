"""The corpus of a BERT: the samples of data sets of sentences, or of mock data."""

from __future__ import annotations

import numpy as np

from commengine import UsageError

from .corpus import Corpus, TextConfig, open_corpus
from .indexed import IndexedDataset
from .samples import Samples
from .sentence_samples import SampleRules, SentenceSamples, ZipfSentences
from .wordpiece import WordPieces


def open_masked_corpus(config: TextConfig, pieces: WordPieces, rules: SampleRules) -> Corpus:
    """The corpus of ``config``, whose vocabulary is known. Raises ValueError, naming what does not fit.

    pieces: of the vocabulary. rules: how samples are made.
    """

    def cut(dataset: IndexedDataset, documents: range) -> Samples:
        _require_sentences(dataset, rules)
        return SentenceSamples(dataset, documents, pieces, rules)

    return open_corpus(config, cut, lambda count, part: ZipfSentences(pieces, rules, count, part))


def _require_sentences(dataset: IndexedDataset, rules: SampleRules) -> None:
    """Raise UsageError if no document has two sentences, and samples need them or would leave most of the text out."""
    if np.diff(dataset.document_sequences).max(initial=0) > 1:
        return
    how = "was it made with preprocess_data --split-sentences?"
    if rules.pairs:
        raise UsageError(
            f"--data-path {dataset.prefix}: no document has two sentences; {how} (--bert-no-binary-head trains on "
            "documents of one sentence)"
        )
    longest = int(dataset.sequence_lengths.max(initial=0))
    if longest > rules.target:
        raise UsageError(
            f"--data-path {dataset.prefix}: no document has two sentences, and one has {longest} tokens, of which a "
            f"sample would hold {rules.target}; {how}"
        )
