"""The training samples of a run by their global number: one source, or a blend of several by their weights."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from .permutation import HELD, EpochPermutation
from .same_data import found_among, written_since
from .samples import Samples

#: name and identity of mock data
MOCK = "mock data"

#: the version of the order in which a source's samples are read; 1 held the order of any number of samples
ORDER = 2

#: the recorded weight of a source that the run does not draw from
ZERO = "0"


class _Split(NamedTuple):
    """A node of the tree: of ``denominator`` draws ``numerator`` go to ``left``, spread evenly, the rest to ``right``.

    A child is another split, or the number of a source.
    """

    numerator: int
    denominator: int
    left: _Split | int
    right: _Split | int

    def to_left(self, draws: int) -> int:
        """How many of the node's first ``draws`` draws go to the left: the nearest integer to their exact share."""
        return (2 * draws * self.numerator + self.denominator) // (2 * self.denominator)


class Apportionment:
    """An endless sequence of draws from sources, in which every prefix holds each source in proportion to its weight.

    weights: of any scale, none negative, not all 0. A source of weight 0 is never drawn from. Of the first n draws a
    source of weight w gets n * w / sum(weights), with an error of at most 1/2 if there are two sources, and of less
    than 2 for any number. Nothing is stored for a draw: each method takes a time that grows with the depth of a tree of
    the sources (about the logarithm of their number), and not with n. The arithmetic is exact.

    The sources are the leaves of a Huffman tree over the weights. At each node the draws that reach it are split
    between the two children as evenly as integers allow: a split is off by at most 1/2, and a child inherits the node's
    error times its share of the node. A child that is a node again has a share of at most 2/3: Huffman merges the
    lightest first, so neither half of this child is heavier than its sibling. The errors of the nodes on the way down
    are therefore below 1/2 * (1 + 2/3 + 4/9 + ...) = 3/2, and the last split adds at most 1/2.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self.sources = len(weights)
        # The second entry, which never repeats, settles ties: a tree must not depend on how nodes compare.
        heap: list[tuple[Fraction, int, _Split | int]] = [
            (Fraction(weight), number, number) for number, weight in enumerate(weights) if weight
        ]
        heapq.heapify(heap)
        made = self.sources
        while len(heap) > 1:
            light, _, right = heapq.heappop(heap)
            heavy, _, left = heapq.heappop(heap)
            share = heavy / (light + heavy)
            split = _Split(share.numerator, share.denominator, left, right)
            heapq.heappush(heap, (light + heavy, made, split))
            made += 1
        self._root = heap[0][2]

    def draw(self, n: int) -> tuple[int, int]:
        """(source, k): draw number n >= 0 is the k-th of this source, counted from 0."""
        node = self._root
        while not isinstance(node, int):
            left = node.to_left(n)
            if node.to_left(n + 1) > left:
                node, n = node.left, left
            else:
                node, n = node.right, n - left
        return node, n

    def counts(self, n: int) -> list[int]:
        """How many of the first n >= 0 draws come from each source; they sum to n."""
        counts = [0] * self.sources
        waiting = [(self._root, n)]
        while waiting:
            node, draws = waiting.pop()
            if isinstance(node, int):
                counts[node] = draws
            else:
                left = node.to_left(draws)
                waiting += [(node.left, left), (node.right, draws - left)]
        return counts


@dataclass(frozen=True)
class Source:
    """One data set of a run.

    name: for people, such as its prefix. identity: tells its data from all others, wherever they lie. weight: of any
    scale; see `Apportionment`. training: its samples. held_out: those of its validation split; None if there are none.
    checksums, written: what else is known of its files (`trainers.data.same_data`).
    """

    name: str
    identity: str
    weight: Fraction
    training: Samples
    held_out: Samples | None = None
    checksums: str = ""
    written: int = 0


@dataclass(frozen=True)
class SourceRecord:
    """What a checkpoint knows of a source, in the run or only in an earlier part of it.

    name, identity, checksums, written: as in `Source`. samples: of an epoch; 0 if that is not known. weight: its
    probability, as a fraction; "0" if the run does not draw from it. before: samples that the run had read from it when
    it began to draw by these weights. consumed: samples that it has read from it in all.
    """

    name: str
    identity: str
    samples: int
    weight: str
    before: int
    consumed: int
    checksums: str = ""
    written: int = 0

    @property
    def probability(self) -> Fraction:
        """The probability of its samples; 0 if the run does not draw from it."""
        return Fraction(self.weight)

    @property
    def epochs(self) -> float | None:
        """How often each of its samples was read, on average; None if their number is not known."""
        return self.consumed / self.samples if self.samples else None


class SampleStream:
    """The samples that a run trains on: sample n for every n >= 0, a pure function of n.

    Which source a sample comes from follows from the weights (`Apportionment`). Each source is read in the order of
    `EpochPermutation`: every sample once in an epoch, each epoch in an order of its own. A run that is resumed with the
    same weights goes on with the same stream. With others, or with other sources, it starts a new apportionment at that
    sample, and each source goes on where it was: so no sample is read twice before all samples of its source are.

    sources: at least one, no two with the same data, in any order. seed: of the permutations. vocabulary: tells the
    vocabulary of their tokens from others (`Tokenizer.identity`); None if it is not known.
    """

    def __init__(self, sources: Sequence[Source], seed: int, vocabulary: str | None = None) -> None:
        # The order of the sources on a command line must not change the stream.
        self.sources = tuple(sorted(sources, key=lambda source: (source.identity, source.checksums)))
        self._orders = [EpochPermutation(len(source.training), seed) for source in self.sources]
        weights = [source.weight for source in self.sources]
        self._apportionment = Apportionment(weights)
        self._probabilities = [weight / sum(weights) for weight in weights]
        self._start, self._before = 0, [0] * len(self.sources)
        self._absent: list[SourceRecord] = []
        self._vocabulary = vocabulary

    def __getitem__(self, n: int) -> Any:
        """Sample n of the run, not before the one at which the weights changed."""
        number, k = self.place(n)
        order = self._orders[number]
        return self.sources[number].training.draw(k // order.size, order[k])

    def place(self, n: int) -> tuple[int, int]:
        """(source, k): sample n is the k-th sample, from 0, that the run reads of ``sources[source]``."""
        number, k = self._apportionment.draw(n - self._start)
        return number, self._before[number] + k

    def consumed(self, n: int) -> list[int]:
        """How many of the run's first n samples are of each of ``sources``."""
        drawn = self._apportionment.counts(n - self._start)
        return [before + count for before, count in zip(self._before, drawn, strict=True)]

    def read(self, n: int) -> list[SourceRecord]:
        """What the run's first n samples read of each source, those that it no longer draws from included."""
        described = zip(self.sources, self._probabilities, self._before, self.consumed(n), strict=True)
        return [
            SourceRecord(source.name, source.identity, len(source.training), str(probability), before, consumed,
                         source.checksums, source.written)
            for source, probability, before, consumed in described
        ] + self._absent  # fmt: skip

    def record(self, n: int) -> dict[str, Any]:
        """What `continue_from` needs to go on after n samples, as JSON types."""
        sources = [asdict(source) for source in self.read(n)]
        return {"start": self._start, "sources": sources, "vocabulary": self._vocabulary, "order": ORDER}

    def continue_from(self, n: int, record: Mapping[str, Any]) -> list[str]:
        """Go on after the n samples that ``record`` (`record`, `record_of_one`) tells of.

        Returns sentences for the user: what changed, if anything did. Raises ValueError unless the record is one of n
        samples.
        """
        start, saved = _read(record, n)
        gone = list(self._identified(saved))
        ours: list[SourceRecord | None] = []
        for source in self.sources:
            old = found_among(source, (one for one in gone if one.samples == len(source.training)))
            ours.append(old)
            if old is not None:
                gone.remove(old)
        consumed = [0 if old is None else old.consumed for old in ours]
        self._absent = [replace(old, weight=ZERO, before=old.consumed) for old in gone if old.consumed]
        weights = [ZERO if old is None else old.weight for old in ours]
        found = zip(self.sources, ours, strict=True)
        lines = [line for source, old in found if old is not None and (line := written_since(source, old)) is not None]
        if record.get("order", 1) != ORDER and any(old is not None and old.samples > HELD for old in ours):
            lines.append(
                f"another order of the samples from sample {n:,} on, because an older version saved the checkpoint: "
                f"data sets of more than {HELD:,} samples may give some again before all others of the epoch"
            )
        vocabulary = record.get("vocabulary")  # older versions did not record it
        if None not in (vocabulary, self._vocabulary) and vocabulary != self._vocabulary:
            lines.append(f"another tokenizer from sample {n:,} on: its vocabulary is not that of the checkpoint's run")
        if weights == [str(p) for p in self._probabilities]:  # both sum to 1, so no source that is gone had a weight
            self._start, self._before = start, [0 if old is None else old.before for old in ours]
            return lines
        self._start, self._before = n, consumed
        return lines + self._changes(n, ours, gone)

    def _changes(self, n: int, ours: Sequence[SourceRecord | None], gone: Sequence[SourceRecord]) -> list[str]:
        lines = []
        for source, old, probability in zip(self.sources, ours, self._probabilities, strict=True):
            if old is not None:
                was = f"{float(Fraction(old.weight)):.4g} before, {old.consumed:,} samples read"
            elif any(source.name == other.name for other in gone):
                was = "not the data of that name that the checkpoint knows, so read from its first sample"
            else:
                was = "new in this run"
            lines.append(f"{source.name} {float(probability):.4g} ({was})")
        lines += [f"{old.name} no longer ({old.consumed:,} samples read)" for old in gone if old.weight != ZERO]
        return [f"other data from sample {n:,} on: {'; '.join(lines)}"]

    def _identified(self, saved: Sequence[SourceRecord]) -> Iterator[SourceRecord]:
        """``saved``, with the identity that a checkpoint of an older version left out, if its source is in this run."""
        only = len(saved) == len(self.sources) == 1  # such a checkpoint did not compare --data-path
        for old in saved:
            same = [source for source in self.sources if only or source.name == old.name]
            unknown = not old.identity and same
            yield replace(old, identity=same[0].identity, samples=len(same[0].training)) if unknown else old


def record_of_one(name: str, n: int) -> dict[str, Any]:
    """The record (`SampleStream.record`) of n samples of one source, of which only the name is known."""
    return {"start": 0, "sources": [asdict(SourceRecord(name, "", 0, "1", 0, n))], "vocabulary": None, "order": 1}


def _read(record: Mapping[str, Any], n: int) -> tuple[int, list[SourceRecord]]:
    """The record's first sample and its sources. Raises ValueError if they are not those of n samples."""
    start, sources = record["start"], [SourceRecord(**source) for source in record["sources"]]
    fits = 0 <= start <= n and sum(old.probability for old in sources) == 1
    fits = fits and all(old.before <= old.consumed for old in sources)
    fits = fits and sum(old.before for old in sources) == start and sum(old.consumed for old in sources) == n
    if not fits:
        raise ValueError(f"the record of its data is damaged: it is not one of {n} samples")
    return start, sources
