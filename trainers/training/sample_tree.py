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
    """The sum of the gradients of ``samples`` neighbouring samples."""

    samples: int
    sums: Tensor
    views: dict[nn.Parameter, Tensor]


class SampleTree:
    """The gradients of one bucket: one sample after the other, added up in the tree.

    layout: of the bucket. result: its buffer, which has the sum of this rank's samples after the last one. run: the
    samples of a leaf.

    A step is: `begin` and a `put` for every parameter for each sample, the last one with ``last=True``; `end` after
    each sample. Besides ``result`` it keeps a buffer for each level of the tree below it.
    """

    def __init__(self, layout: BucketLayout, result: Tensor, run: int) -> None:
        self._layout, self._run = layout, run
        self._result = self._node(result)
        self._free: list[_Node] = []
        self._waiting: list[_Node] = []
        self._sample: _Node | None = None  # made with the sample's first gradient

    def clear(self) -> None:
        """Start a step."""
        for node in self._waiting:  # of a step that failed there may be several
            if node.sums is not self._result.sums:
                self._free.append(_Node(1, node.sums, node.views))
        self._waiting.clear()

    def begin(self, *, last: bool) -> None:
        """Start a sample. last: it is this rank's last one of the step."""
        self._sample = self._result if last else None

    def put(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Set the sample's gradient of ``parameter``."""
        if self._sample is None:
            self._sample = self._free.pop() if self._free else self._node(torch.zeros_like(self._result.sums))
        view = self._sample.views[parameter]
        view.copy_(gradient)
        if not self._waiting:
            # In the first sample -0 becomes +0. So a sum of zeros is +0, whichever of the others are -0.
            view.add_(0.0)

    def end(self) -> None:
        """Add the sample, of which every gradient has been put, to the tree."""
        node, self._sample = self._sample, None
        assert node is not None
        while self._waiting and self._fits(self._waiting[-1], node):
            node = self._joined(self._waiting.pop(), node)
        self._waiting.append(node)

    def _fits(self, left: _Node, right: _Node) -> bool:
        return left.samples < self._run or left.samples == right.samples

    def _joined(self, left: _Node, right: _Node) -> _Node:
        kept, other = (right, left) if right.sums is self._result.sums else (left, right)
        kept.sums.add_(other.sums)
        self._free.append(_Node(1, other.sums, other.views))
        return _Node(left.samples + right.samples, kept.sums, kept.views)

    def _node(self, sums: Tensor) -> _Node:
        return _Node(1, sums, {parameter: self._layout.view(sums, parameter) for parameter in self._layout.names})
