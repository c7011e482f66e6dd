"""Dropping near-duplicates: a document is dropped if one that was taken before it, and kept, is similar enough.

Documents are numbered in the order in which they are taken, over all ranks (`Numbering`), so which ones are kept
depends on the documents alone. The rule is the greedy maximal independent set of the graph of similar documents, found
in rounds (Blelloch, Fineman, Shun 2012).

Candidates are documents that share a band of their sketches. The documents whose keys of one band are equal are a
*bucket*. A document that comes first in all of its buckets is kept; it is compared, exactly, with those after it in its
buckets, and the similar ones are dropped. The next round does so with the documents that are left. A round has fewer
pairs than the buckets have members, and a cluster of m near-duplicates needs about m of its m (m - 1) / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commengine import Communicator

from .exchange import Numbering, exchange, reduced, split_by
from .grams import gram_sets, jaccard
from .owned_documents import chunks

Array = NDArray[Any]
BINS = 20  # of the histogram of similarities


class NearDuplicates:
    """Which of this rank's documents are dropped, after `find`.

    texts: collective; the texts of documents that any rank holds, by their numbers. sizes: the bytes of this rank's
    documents. threshold: the Jaccard similarity from which on a document is dropped. buffer: about the bytes of text
    that are compared at a time.

    kept_one, similarity: for each dropped document, the number of the first kept one that it is similar to, and how
    similar; -1 and 0 for a kept document. histogram: of the similarities that this rank computed, over [0, 1].
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
        #: the buckets whose keys are this rank's share of all keys, by band: bucket and number of each member
        self._members: list[Array] = []
        self.kept_one = np.full(documents.held, -1, np.int64)
        self.similarity = np.zeros(documents.held, np.float32)
        self.similar, self.histogram = 0, np.zeros(BINS, np.int64)

    def add_band(self, keys: Array, numbers: Array) -> None:
        """Add the buckets of one band. Collective.

        keys, numbers: uint64 and int64; this rank's documents' keys of the band, and the documents' numbers.
        """
        size = self._comm.size
        parts = split_by(keys % np.uint64(size), size, keys, numbers)
        keys, numbers = (np.concatenate(exchange(self._comm, part)) for part in parts)
        _, bucket, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        shared = sizes[bucket] > 1
        band = len(self._members)
        self._members.append(np.stack((bucket[shared] + (band << 40), numbers[shared])))

    def find(self, progress: Callable[[int], object]) -> None:
        """Decide every document. Collective. progress: called with how many more pairs this rank has compared."""
        bucket, member = np.concatenate(self._members, axis=1)
        self._members.clear()
        order = np.lexsort((member, bucket))
        bucket, member = bucket[order], member[order]
        while reduced(self._comm, len(member)):
            is_first = np.diff(bucket, prepend=-1) > 0
            first = member[is_first]
            waits = np.zeros(self._documents.held, np.bool_)
            (local,) = self._documents.to_owners(np.unique(member[~is_first]))
            waits[local] = True
            at = np.cumsum(is_first) - 1
            settled = ~self._documents.lookup(waits, first)[at]  # the bucket's first member is kept
            pairs = settled & ~is_first
            self._compare(first[at][pairs], member[pairs], progress)
            gone = (settled & is_first) | (self._documents.lookup(self.kept_one, member) >= 0)
            bucket, member = bucket[~gone], member[~gone]

    def _compare(self, first: Array, second: Array, progress: Callable[[int], object]) -> None:
        """Drop the second documents of pairs that are similar to the first, which are kept. Collective."""
        second, first = self._documents.to_owners(second, first)
        held = self._documents.held
        # Each pair once, sorted by the first document.
        first, second = np.divmod(np.unique(first * held + second), held)
        sizes = self._documents.lookup(self._sizes, first) + self._sizes[second]
        runs = list(chunks(sizes, self._buffer))
        most = reduced(self._comm, len(runs), "max")
        found = np.zeros(len(first), np.float32)
        for begin, end in runs + [(0, 0)] * (most - len(runs)):
            pairs = np.stack((first[begin:end], second[begin:end] + self._documents.first), axis=1)
            numbers, at = np.unique(pairs, return_inverse=True)
            sets = gram_sets(self._texts(numbers))
            values = np.array([jaccard(sets[one], sets[other]) for one, other in at.reshape(-1, 2).tolist()])
            similar = np.nonzero(values >= self._threshold)[0] + begin
            found[begin:end] = values
            self.similar += len(similar)
            self.histogram += np.histogram(values, BINS, (0.0, 1.0))[0]
            similar = similar[self.kept_one[second[similar]] < 0][::-1]  # of several kept ones the first is named
            self.kept_one[second[similar]], self.similarity[second[similar]] = first[similar], found[similar]
            progress(end - begin)
