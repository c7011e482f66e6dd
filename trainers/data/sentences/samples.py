"""BERT's samples: two parts of a document, in order or swapped, with masked words; and the corpus of such samples."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commengine import UsageError
from trainers.data.corpus import Corpus, open_corpus
from trainers.data.indexed import IndexedDataset
from trainers.data.samples import IGNORED, MASKS, NoSamplesError, Samples, Text, TextSamples, ZipfSamples, philox
from trainers.data.wordpiece import WordPieces
from trainers.settings.commands import BERTSettings

from .map import SHORTEST, sentence_map
from .masking import Masks, budget, mask_words

Tokens = npt.NDArray[np.int64]

#: [CLS] A [SEP] B [SEP]
FRAME = 3
#: the shortest sequence that has room for two parts
SHORTEST_SEQUENCE = FRAME + SHORTEST
#: tokens of a sentence of mock data
_MOCK_SENTENCE = 16


@dataclass(frozen=True)
class SampleRules:
    """How BERT's samples are made. A field has the meaning of `BERTSettings`'s of its name.

    pairs: whether a sample has two parts and a label of their order. one_sentence: whether a document of one sentence
    is a sample without that label, or is left out.
    """

    seq_length: int
    seed: int
    mask_prob: float = 0.15
    short_seq_prob: float = 0.1
    pairs: bool = True
    one_sentence: bool = True

    @property
    def target(self) -> int:
        """The tokens of text in a full sample."""
        return self.seq_length - FRAME

    @property
    def predictions(self) -> int:
        """The largest number of masked tokens of a sample, and the size of its arrays of them; at least 1."""
        return max(budget(self.seq_length, self.target, self.mask_prob), 1)


class MaskedSample(NamedTuple):
    """One sample. s is the sequence length, K is `SampleRules.predictions`.

    tokens: int64 [s], filled up with [PAD]. types: int64 [s], 1 in the second part and the [SEP] after it. length: the
    tokens that are not padding. positions, labels: int64 [K], the masked tokens; the rest is position 0, label -100.
    order: 1 if the parts are swapped, 0 if not, -100 if there is one part only.
    """

    tokens: Tokens
    types: Tokens
    length: int
    positions: Tokens
    labels: Tokens
    order: int


class Sentences(NamedTuple):
    """Text for a sample. tokens: int64, of all its sentences. lengths: of each. target: the most that it may take."""

    tokens: Tokens
    lengths: npt.NDArray[np.int64]
    target: int


class MaskedSamples(TextSamples):
    """Samples of masked words and sentence order, each a pure function of (seed, epoch, index).

    An epoch always has the same samples of the same sentences. Where they are cut in two, which parts are swapped, what
    is left out of a sample that is too long, and what is masked is drawn anew in each epoch. An evaluation reads epoch
    0 of its own samples, so its masks never change.
    """

    rules: SampleRules
    pieces: WordPieces

    @abstractmethod
    def sentences(self, n: int) -> Sentences:
        """The text of sample n, 0 <= n < len. Raises IndexError."""

    def __getitem__(self, n: int) -> MaskedSample:
        return self.draw(0, n)

    def targets(self, n: int) -> Tokens:
        labels = self[n].labels
        targets: Tokens = labels[labels != IGNORED]
        return targets

    def draw(self, epoch: int, n: int) -> MaskedSample:
        """Sample n as training reads it in ``epoch``, from 0. Raises IndexError."""
        text = self.sentences(n)
        random = philox(self.rules.seed, MASKS, epoch, n)
        a, b, order = cut_in_two(text, self.rules.pairs, self.pieces, random)
        frame = (np.array([self.pieces.cls]), a, np.array([self.pieces.sep]), b, np.array([self.pieces.sep]))
        tokens = np.concatenate(frame if len(b) else frame[:3])
        second = FRAME - 1 + len(a)
        parts = ((1, second - 1), (second, second + len(b))) if len(b) else ((1, second - 1),)
        count = budget(len(tokens), text.target, self.rules.mask_prob) if self.rules.mask_prob else 0
        return self._filled(mask_words(tokens, parts, count, self.pieces, random), second, order)

    def _filled(self, masks: Masks, second: int, order: int) -> MaskedSample:
        """The sample of one size that the masks give. second: where the second part begins."""
        rules, length, masked = self.rules, len(masks.tokens), len(masks.positions)
        tokens = np.full(rules.seq_length, self.pieces.pad, dtype=np.int64)
        types = np.zeros(rules.seq_length, dtype=np.int64)
        positions = np.zeros(rules.predictions, dtype=np.int64)
        labels = np.full(rules.predictions, IGNORED, dtype=np.int64)
        tokens[:length] = masks.tokens
        types[second:length] = 1
        positions[:masked] = masks.positions
        labels[:masked] = masks.labels
        return MaskedSample(tokens, types, length, positions, labels, order)


class SentenceSamples(MaskedSamples):
    """The samples of a run of documents whose sequences are sentences (``preprocess_data --split-sentences``).

    documents: a range of step 1 within the data set. Raises NoSamplesError if it gives no sample, and ValueError if it
    is to give pairs of sentences and no document has two.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, pieces: WordPieces, rules: SampleRules) -> None:
        self.rules, self.pieces = rules, pieces
        self.name = f"{dataset.prefix}, documents {documents.start} to {documents.stop}"
        self._dataset, self._documents = dataset, documents
        self._map = sentence_map(
            dataset, documents, target=rules.target, short_seq_prob=rules.short_seq_prob, seed=rules.seed,
            pairs=rules.pairs, one_sentence=rules.one_sentence,
        )  # fmt: skip
        if not len(self):
            raise NoSamplesError(f"{self.name}: no sentences that make a sample")

    def __len__(self) -> int:
        return len(self._map.start)

    def sentences(self, n: int) -> Sentences:
        lengths = self._dataset.sequence_lengths[self._map.first[n] : self._map.stop[n]].astype(np.int64)
        lengths = lengths[lengths > 0]
        start = int(self._map.start[n])
        tokens = self._dataset.tokens[start : start + int(lengths.sum())].astype(np.int64)
        return Sentences(tokens, lengths, int(self._map.target[n]))

    @property
    def text(self) -> Text:
        offsets, documents = self._dataset.document_offsets, self._documents
        return self._dataset.tokens[offsets[documents.start] : offsets[documents.stop]]


class ZipfSentences(MaskedSamples):
    """Mock data: samples of independent words, as `ZipfSamples` draws them, in sentences of 16 tokens.

    The words are the ids after the special tokens (`WordPieces.mock`). count, split: as for `ZipfSamples`.
    """

    def __init__(self, pieces: WordPieces, rules: SampleRules, count: int, split: int = 0) -> None:
        self.rules, self.pieces = rules, pieces
        self._words = ZipfSamples(len(pieces.ordinary), max(rules.target - 1, 1), rules.seed, count, split=split)

    def __len__(self) -> int:
        return len(self._words)

    def sentences(self, n: int) -> Sentences:
        tokens = self.pieces.ordinary[self._words[n][: self.rules.target]]
        whole, rest = divmod(len(tokens), _MOCK_SENTENCE)
        lengths = np.array([_MOCK_SENTENCE] * whole + [rest] * bool(rest), dtype=np.int64)
        if len(lengths) == 1 and self.rules.pairs:
            lengths = np.array([1, len(tokens) - 1])
        return Sentences(tokens, lengths, self.rules.target)

    def token_counts(self, vocab_size: int) -> npt.NDArray[np.float64]:
        counts = np.zeros(vocab_size)
        counts[self.pieces.ordinary] = self._words.token_counts(len(self.pieces.ordinary))
        return counts


def cut_in_two(
    text: Sentences, pairs: bool, pieces: WordPieces, random: np.random.Philox
) -> tuple[Tokens, Tokens, int]:
    """The two parts of a sample, with at most ``text.target`` tokens together, and the label of their order.

    With ``pairs`` and two sentences or more, the text is cut before a random sentence but the first, and in half of the
    cases the parts change places (label 1). Otherwise the first part is the whole text, the second is empty, and the
    label is -100. The longer part is shortened until both fit (`shortened`).
    """
    where, swap = random.random_raw(2)
    a, b, order = text.tokens, text.tokens[:0], IGNORED
    if pairs and len(text.lengths) > 1:
        cut = int(text.lengths[: 1 + int(where % np.uint64(len(text.lengths) - 1))].sum())
        a, b, order = text.tokens[:cut], text.tokens[cut:], int(swap >> np.uint64(63))
        if order:
            a, b = b, a
    keep_a, keep_b = kept(len(a), len(b), text.target)
    return shortened(a, keep_a, pieces, random), shortened(b, keep_b, pieces, random), order


def kept(a: int, b: int, target: int) -> tuple[int, int]:
    """How many tokens each part keeps: as if the longer one, or the second of equals, lost one until both fit."""
    if a + b <= target:
        return a, b
    half = target // 2
    if a <= half:
        return a, target - a
    if b <= half:
        return target - b, b
    return target - half, half


def shortened(part: Tokens, keep: int, pieces: WordPieces, random: np.random.Philox) -> Tokens:
    """``part`` with at most ``keep`` tokens, of which none belongs to a word that was cut.

    Each token that goes is taken from the front or from the back with equal probability, as Megatron-LM does; what is
    left of a word that lost a piece goes, too. A part in which no whole word fits keeps the first pieces of its first
    word.
    """
    surplus = len(part) - keep
    if surplus <= 0:
        return part
    begin = int((random.random_raw(surplus) >> np.uint64(63)).sum())
    end = begin + keep
    starts = ~pieces.continuing(part)
    starts[0] = True
    borders = np.append(np.flatnonzero(starts), len(part))
    first = int(borders[np.searchsorted(borders, begin)])
    last = int(borders[np.searchsorted(borders, end, side="right") - 1])
    return part[first:last] if first < last else part[:keep]


def open_masked_corpus(config: BERTSettings, pieces: WordPieces, rules: SampleRules) -> Corpus:
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
