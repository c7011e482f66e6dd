"""Which of several sources each draw comes from, in proportion to their weights, as a function of the draw's number."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


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

    Raises ValueError for other weights.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        if min(weights, default=-1) < 0 or sum(weights) == 0:
            raise ValueError(
                f"weights must not be negative and not all be 0, got {[str(weight) for weight in weights]}"
            )
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
        """(source, k): draw number n >= 0 is the k-th of this source, counted from 0. Raises IndexError if n < 0."""
        if n < 0:
            raise IndexError(f"draw {n} is negative")
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
        if n < 0:
            raise IndexError(f"{n} draws: must not be negative")
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


def normalized(weights: Sequence[Fraction]) -> list[Fraction]:
    """The weights as probabilities, which sum to 1."""
    total = sum(weights, Fraction(0))
    return [weight / total for weight in weights]
