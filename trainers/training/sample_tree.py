"""Sums over the samples of a global batch in one binary tree, whichever rank has which sample.

The tree's leaves are runs of neighbouring samples, as many as the largest odd factor of the global batch's size; a run
is added up from its first sample to its last. Above that the tree is binary. Each rank of a data group whose size is a
power of two has neighbouring samples that are a whole subtree, and the reduction over the group, of a
`commengine.Communicator` with ``order="tree"``, is the rest of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layout import BucketLayout

#: elements that are added up at once: several pieces of them fit a core's cache
PIECE = 1 << 16


def run_length(samples: int) -> int:
    """The samples of a leaf for a global batch of ``samples``: the largest odd factor."""
    return samples // (samples & -samples)


def tree_of_samples(values: Sequence[Tensor], run: int) -> Tensor:
    """The sum of one tensor for each of this rank's samples, in their order. run: the samples of a leaf."""
    nodes = []
    for start in range(0, len(values), run):
        total = values[start]
        for value in values[start + 1 : start + run]:
            total = total + value
        nodes.append(total)
    while len(nodes) > 1:
        nodes = [one + other for one, other in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]


@dataclass(frozen=True)
class _Node:
    """The sums of the gradients of ``samples`` neighbouring samples; None: they are in the buffer of the result."""

    samples: int
    sums: dict[nn.Parameter, Tensor] | None


class SampleTree:
    """The gradients of one bucket: one sample after the other, added up in the tree.

    layout: of the bucket. result: its buffer, which has the sum of this rank's samples after the last one. run: the
    samples of a leaf.

    A step is: `begin` and a `put` for every parameter for each sample, the last one with ``last=True``; `end` after
    each sample. The sum of the first samples is in ``result``, from the second one on. Besides that it keeps the
    gradients of one sample, and a sum for each further level of the tree.
    """

    def __init__(self, layout: BucketLayout, result: Tensor, run: int) -> None:
        self._layout, self._run, self._dtype = layout, run, result.dtype
        self._views = {parameter: layout.view(result, parameter) for parameter in layout.names}
        self._waiting: list[_Node] = []
        self._sample: dict[nn.Parameter, Tensor] = {}
        self._last = False

    def clear(self) -> None:
        """Start a step."""
        self._waiting.clear()

    def begin(self, *, last: bool) -> None:
        """Start a sample. last: it is this rank's last one of the step."""
        self._sample, self._last = {}, last

    def put(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Set the sample's gradient of ``parameter``, which nobody else may change or need."""
        self._sample[parameter] = gradient

    def end(self) -> None:
        """Add the sample, of which every gradient has been put, to the tree."""
        sample, self._sample = self._sample, {}
        count, neighbours = 1, []
        while self._waiting and self._fits(self._waiting[-1].samples, count):
            neighbours.append(self._waiting.pop())
            count += neighbours[-1].samples
        assert not (self._last and self._waiting), "the samples of a rank are a whole subtree"
        sums = sample
        if not self._waiting and (neighbours or self._last):
            sums = self._views
        elif neighbours and neighbours[-1].samples > 1:
            sums = self._of(neighbours[-1])
        elif neighbours:
            sums = {p: torch.empty_like(one, dtype=self._dtype) for p, one in self._of(neighbours[-1]).items()}
        if sums is not sample:
            begins = sums is self._views and all(one.sums is not None for one in neighbours)
            for parameter, right in sample.items():
                every = (sums[parameter], right, *(self._of(one)[parameter] for one in neighbours))
                total, *terms = (self._layout.elements(parameter, one) for one in every)
                assert total.data_ptr() == every[0].data_ptr(), "autograd lays a gradient out as its parameter"
                _add_up(total, *terms, positive=begins)
        self._waiting.append(_Node(count, None if sums is self._views else sums))

    def _fits(self, left: int, right: int) -> bool:
        return left < self._run or left == right

    def _of(self, node: _Node) -> dict[nn.Parameter, Tensor]:
        return self._views if node.sums is None else node.sums


def _add_up(total: Tensor, right: Tensor, *lefts: Tensor, positive: bool) -> None:
    """Set ``total`` to ``lefts[-1] + (... + (lefts[0] + right))``; it may be ``lefts[-1]``. All of them are [elements].

    positive: -0 becomes +0. Then all sums that begin with this one have +0, whichever of the others are -0.

    It goes through memory once, in pieces that stay in a core's cache. torch would convert a whole half gradient into
    new memory before it adds it.
    """
    at_once = len(lefts) + positive <= 1 and all(one.dtype == total.dtype for one in (right, *lefts))
    size = max(total.numel(), 1) if at_once else PIECE
    for out, term, *others in zip(*(torch.split(one, size) for one in (total, right, *lefts)), strict=True):
        for left in others[:-1]:
            term = torch.add(_as(left, out), _as(term, out))
        if others:
            term = torch.add(_as(others[-1], out), _as(term, out), out=out)
        if positive:
            torch.add(_as(term, out), 0.0, out=out)


def _as(term: Tensor, like: Tensor) -> Tensor:
    return term if term.dtype == like.dtype else term.to(like.dtype)
