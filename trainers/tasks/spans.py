"""T5's samples: text of which spans are replaced, and the spans as what a decoder has to write (Raffel et al. 2020).

Section 3.1.4 of the paper, with the counts of its code: of n tokens ``round(density * n)`` are noise, in
``round(noise / mean)`` spans. Text and spans are cut at random, and the text begins. Each span is one token in the
input, a sentinel; the target has each sentinel with the tokens of its span. Both end in an end token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainers.data.samples import IGNORED, SPANS, Counts, Sample, Text, TextSamples, philox

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpanRules:
    """How samples are made.

    seq_length, decoder_seq_length: of the input and the target, with sentinels and the end. density, mean: the share of
    the text that is noise, and the mean length of a span. end: the last token of input and target. sentinel: of the
    first span; those of the others descend from it. fill: fills the rest of an input. seed: of the run.
    """

    seq_length: int
    decoder_seq_length: int
    density: float
    mean: float
    end: int
    sentinel: int
    fill: int
    seed: int

    def counts(self, tokens: int) -> tuple[int, int]:
        """(Tokens of noise, spans) of so many tokens of text, at least 2."""
        noise = min(max(round(tokens * self.density), 1), tokens - 1)
        return noise, min(max(round(noise / self.mean), 1), noise, tokens - noise)

    def lengths(self, tokens: int) -> tuple[int, int]:
        """The lengths of input and target of so many tokens of text."""
        noise, spans = self.counts(tokens)
        return tokens - noise + spans + 1, noise + spans + 1

    @property
    def text(self) -> int:
        """The most tokens of text that give an input and a target that fit. 0 if not even two do."""
        most = 0
        for tokens in range(2, self.seq_length + self.decoder_seq_length):
            given, target = self.lengths(tokens)
            if given <= self.seq_length and target <= self.decoder_seq_length:
                most = tokens
        return most


class SpanSample(NamedTuple):
    """One sample. tokens: int64 [seq_length], filled up. length: the tokens that are not filled up.

    labels: int64 [decoder_seq_length], -100 after the end.
    """

    tokens: Sample
    length: int
    labels: Sample


class SpanSamples(TextSamples):
    """Samples of `SpanRules`, each a pure function of (seed, epoch, index).

    An epoch always has the same text; its spans are drawn anew in each epoch. An evaluation reads epoch 0 of its own
    samples. inner: samples of ``rules.text`` tokens and one more, which is left out.
    """

    def __init__(self, inner: TextSamples, rules: SpanRules) -> None:
        self.inner, self.rules, self.name = inner, rules, inner.name

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, n: int) -> SpanSample:
        return self.draw(0, n)

    def draw(self, epoch: int, n: int) -> SpanSample:
        rules = self.rules
        given, target = corrupted(self.inner[n][:-1], rules, philox(rules.seed, SPANS, epoch, n))
        tokens = np.full(rules.seq_length, rules.fill, dtype=np.int64)
        labels = np.full(rules.decoder_seq_length, IGNORED, dtype=np.int64)
        tokens[: len(given)], labels[: len(target)] = given, target
        return SpanSample(tokens, len(given), labels)

    def targets(self, n: int) -> Sample:
        labels = self[n].labels
        found: Sample = labels[labels != IGNORED]
        return found

    @property
    def text(self) -> Text | None:
        return self.inner.text

    def token_counts(self, vocab_size: int) -> Counts:
        return self.inner.token_counts(vocab_size)


def corrupted(tokens: Sample, rules: SpanRules, random: np.random.Philox) -> tuple[Sample, Sample]:
    """The input and the target of a text. tokens: int64 [n], at least 2."""
    noise, spans = rules.counts(len(tokens))
    of_text, of_spans = _cut(len(tokens) - noise, spans, random), _cut(noise, spans, random)
    masked = np.repeat([False, True] * spans, np.column_stack((of_text, of_spans)).ravel())
    sentinels = rules.sentinel - np.arange(spans)
    given = np.insert(tokens[~masked], np.cumsum(of_text), sentinels)
    target = np.insert(tokens[masked], np.cumsum(of_spans) - of_spans, sentinels)
    return np.append(given, rules.end), np.append(target, rules.end)


def _cut(items: int, parts: int, random: np.random.Philox) -> Lengths:
    """The lengths of ``parts`` parts of ``items``, each at least 1; every cut is as likely as every other."""
    borders = np.sort(np.argsort(random.random_raw(items - 1), kind="stable")[: parts - 1]) + 1
    found: Lengths = np.diff(np.concatenate(([0], borders, [items])))
    return found
