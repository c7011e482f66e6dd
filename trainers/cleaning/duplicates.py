"""Dropping near-duplicates: a document is dropped if one that was taken before it, and kept, is similar enough.

Documents are numbered in the order in which they are taken, over all ranks (`Numbering`), so which ones are kept
depends on the documents alone. Candidates come from `CandidateBuckets` in rounds; each is compared exactly. The rule is
the greedy maximal independent set of the graph of similar documents; its rounds are those of Blelloch, Fineman, Shun
(2012): a document is decided as soon as those before it that are similar to it are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commengine import Communicator

from .candidates import CandidateBuckets
from .exchange import Numbering, largest, total
from .grams import gram_sets, jaccard
from .spill import chunks

Array = NDArray[Any]
UNDECIDED, KEPT, DROPPED = 0, 1, 2
BINS = 20  # of the histogram of similarities


@dataclass
class Similarities:
    """The candidates that this rank compared: how many, how many reached the threshold, a histogram over [0, 1]."""

    pairs: int = 0
    similar: int = 0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def count(self, values: Array, threshold: float) -> None:
        """Add some similarities."""
        self.pairs += len(values)
        self.similar += int((values >= threshold).sum())
        self.histogram += np.histogram(values, BINS, (0.0, 1.0))[0]


class Duplicates:
    """Which of this rank's documents are kept.

    texts: collective; the texts of documents that any rank holds, by their numbers. sizes: the bytes of this rank's
    documents. threshold: the Jaccard similarity from which on a document is dropped. buffer: about the bytes of text
    that are compared at a time.
    """

    def __init__(
        self,
        comm: Communicator,
        documents: Numbering,
        texts: Callable[[Array], Sequence[str]],
        sizes: Array,
        threshold: float,
        buffer: int,
    ) -> None:
        self._comm, self._documents, self._texts, self._sizes = comm, documents, texts, sizes
        self._threshold, self._buffer = threshold, buffer
        self.state = np.full(documents.held, UNDECIDED, np.int8)
        #: for each dropped document: the number of the kept one that it is similar to, and how similar
        self.kept_one = np.full(documents.held, -1, np.int64)
        self.similarity = np.zeros(documents.held, np.float32)
        self.compared = Similarities()
        # Edges of the graph that are not yet used up: a document of this rank (local) and a similar one before it.
        self._second = np.empty(0, np.int64)
        self._first = np.empty(0, np.int64)
        self._value = np.empty(0, np.float32)

    def resolve(self, buckets: CandidateBuckets, progress: Callable[[int], object]) -> None:
        """Decide every document. Collective. progress: called with how many more of this rank's are decided."""
        self.state[~buckets.close_bands()] = KEPT
        progress(int((self.state != UNDECIDED).sum()))
        # The first of the undecided documents waits only for heads of its buckets, so every round comes closer.
        while total(self._comm, here := int((self.state == UNDECIDED).sum())):
            buckets.forget(lambda numbers: self._documents.lookup(self.state, numbers) == DROPPED)
            first, second, waiting = buckets.next_pairs()
            open_pairs = self.state[second - self._documents.first] != DROPPED
            self._compare(first[open_pairs], second[open_pairs])
            self._decide(waiting)
            progress(here - int((self.state == UNDECIDED).sum()))

    def _compare(self, first: Array, second: Array) -> None:
        """Find the edges among pairs that are sorted by ``first``. Collective."""
        sizes = self._documents.lookup(self._sizes, first) + self._sizes[second - self._documents.first]
        runs = list(chunks(sizes, self._buffer))
        most = largest(self._comm, len(runs))
        for begin, end in runs + [(0, 0)] * (most - len(runs)):
            numbers = np.unique(np.concatenate((first[begin:end], second[begin:end])))
            sets = gram_sets(self._texts(numbers))
            one, other = np.searchsorted(numbers, first[begin:end]), np.searchsorted(numbers, second[begin:end])
            values = np.array([jaccard(sets[i], sets[j]) for i, j in zip(one.tolist(), other.tolist(), strict=True)])
            self.compared.count(values, self._threshold)
            similar = values >= self._threshold
            self._first = np.concatenate((self._first, first[begin:end][similar]))
            self._second = np.concatenate((self._second, second[begin:end][similar] - self._documents.first))
            self._value = np.concatenate((self._value, values[similar].astype(np.float32)))

    def _decide(self, waiting: NDArray[np.bool_]) -> None:
        """Decide as many documents as the edges allow. waiting: of which not every earlier candidate is known."""
        decided = 1
        while total(self._comm, decided):
            states = self._documents.lookup(self.state, self._first)
            fatal = np.nonzero((states == KEPT) & (self.state[self._second] == UNDECIDED))[0]
            fatal = fatal[np.argsort(-self._first[fatal])]  # of several kept ones the first is named: it comes last
            dropped = self._second[fatal]
            self.state[dropped] = DROPPED
            self.kept_one[dropped], self.similarity[dropped] = self._first[fatal], self._value[fatal]
            useful = (states == UNDECIDED) & (self.state[self._second] == UNDECIDED)
            self._first, self._second, self._value = self._first[useful], self._second[useful], self._value[useful]
            free = (self.state == UNDECIDED) & ~waiting
            free[self._second] = False
            self.state[free] = KEPT
            decided = int(free.sum()) + int((states != UNDECIDED).sum())
