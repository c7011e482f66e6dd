"""Candidate pairs of near-duplicates: documents that share a band of their sketches, a few pairs at a time.

The documents whose keys of one band are equal are a *bucket*. Pairs of a bucket are given out in rounds, because a
cluster of m near-duplicates has m (m - 1) / 2 pairs and needs about m of them: after a round most of the cluster is
dropped. A bucket's *heads* of a round are its first members; each is paired with all members after it, and has then
done its part. Small buckets are done in one round; large ones have 1, 2, 4, ... heads in each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commengine import Communicator

from .exchange import Numbering, exchange, split_by

Array = NDArray[Any]
SMALL = 16  # members of a bucket whose pairs are all given out at once


class CandidateBuckets:
    """The buckets that this rank has: those whose keys are its share of all keys.

    budget: pairs that this rank gives out in a round, except that one head is never divided.
    """

    def __init__(self, comm: Communicator, documents: Numbering, budget: int) -> None:
        self._comm, self._documents, self._budget = comm, documents, budget
        self._members: list[Array] = []
        self._sizes: list[Array] = []
        self._heads = 1

    def add_band(self, keys: Array, numbers: Array) -> None:
        """Add the buckets of one band. Collective.

        keys, numbers: uint64 and int64; this rank's documents' keys of the band, and the documents' numbers.
        """
        size = self._comm.size
        parts = split_by(keys % np.uint64(size), size, keys, numbers)
        keys, numbers = (np.concatenate(exchange(self._comm, part)) for part in parts)
        order = np.lexsort((numbers, keys))
        keys, numbers = keys[order], numbers[order]
        begins = np.nonzero(np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)])[0]
        sizes = np.diff(begins, append=len(keys))
        shared = sizes > 1
        self._members.append(numbers[np.repeat(shared, sizes)])
        self._sizes.append(sizes[shared])

    def close_bands(self) -> NDArray[np.bool_]:
        """All bands have been added. Returns which of this rank's documents are in a bucket. Collective."""
        self._member = np.concatenate(self._members)
        self._size = np.concatenate(self._sizes)
        self._members, self._sizes = [], []
        return self._marked(self._member)

    def _marked(self, numbers: Array) -> NDArray[np.bool_]:
        """Which of this rank's documents any rank has in ``numbers``. Collective."""
        (local,) = self._documents.to_owners(np.unique(numbers))
        marks = np.zeros(self._documents.held, np.bool_)
        marks[local] = True
        return marks

    def forget(self, is_dropped: Callable[[Array], Array]) -> None:
        """Take the dropped documents out. is_dropped: collective; for numbers of documents, which are dropped."""
        kept = ~is_dropped(self._member)
        bucket = np.repeat(np.arange(len(self._size)), self._size)[kept]
        self._member = self._member[kept]
        self._size = np.bincount(bucket, minlength=len(self._size))

    def next_pairs(self) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Pairs (first, second) of documents that are to be compared, and which of this rank's documents wait.

        first, second: numbers of documents, first < second; this rank has second; each pair once. A document waits if
        a document before it in one of its buckets has not been a head. Collective.
        """
        size, begin = self._size, np.cumsum(self._size) - self._size
        bucket = np.repeat(np.arange(len(size)), size)
        place = np.arange(len(self._member)) - begin[bucket]
        after = size[bucket] - place - 1  # members after each
        heads = np.where(size <= SMALL, size, np.minimum(self._heads, size))
        is_head = place < heads[bucket]
        spent = np.cumsum(np.where(is_head, after, 0))
        if len(spent) and spent[-1] > self._budget:  # only so many heads, in the order of the buckets; at least one
            is_head &= (spent <= self._budget) | (np.cumsum(is_head) == 1)
            heads = np.bincount(bucket[is_head], minlength=len(size))
        at = np.nonzero(is_head)[0]
        counts = after[at]
        first = np.repeat(at, counts)
        second = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        waiting = self._marked(self._member[place > heads[bucket]])
        first, second = self._at_second(self._member[first], self._member[second])

        self._member = self._member[~is_head]
        self._size = size - heads
        self._heads = min(2 * self._heads, 1 << 32)
        return first, second, waiting

    def _at_second(self, first: Array, second: Array) -> tuple[Array, Array]:
        """The pairs, each once, on the rank that has its second document."""
        first, second = _distinct(first, second)
        local, first = self._documents.to_owners(second, first)
        return _distinct(first, local + self._documents.first)


def _distinct(first: Array, second: Array) -> tuple[Array, Array]:
    """The distinct pairs, sorted by first and then second."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    fresh = np.ones(len(first), np.bool_)
    fresh[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[fresh], second[fresh]
