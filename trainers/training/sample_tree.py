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
    """The sums of the gradients of ``samples`` neighbouring samples."""

    samples: int
    sums: dict[nn.Parameter, Tensor]


class SampleTree:
    """The gradients of one bucket: one sample after the other, added up in the tree.

    layout: of the bucket. result: its buffer, which has the sum of this rank's samples after the last one. run: the
    samples of a leaf.

    A step is: `begin` and a `put` for every parameter for each sample, the last one with ``last=True``; `end` after
    each sample. Besides ``result`` it keeps the gradients of one sample, and sums for each level of the tree.
    """

    def __init__(self, layout: BucketLayout, result: Tensor, run: int) -> None:
        self._run, self._dtype = run, result.dtype
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
        # In the first sample -0 becomes +0. So a sum of zeros is +0, whichever of the others are -0.
        self._sample[parameter] = gradient if self._waiting else gradient.add_(0.0)

    def end(self) -> None:
        """Add the sample, of which every gradient has been put, to the tree."""
        node = _Node(1, self._sample)
        self._sample = {}
        while self._waiting and self._fits(self._waiting[-1], node):
            left = self._waiting.pop()
            node = _Node(left.samples + node.samples, self._joined(left.sums, node.sums))
        if not self._last:
            self._waiting.append(node)
            return
        for parameter, view in self._views.items():
            if node.sums[parameter] is not view:
                view.copy_(node.sums[parameter])

    def _fits(self, left: _Node, right: _Node) -> bool:
        return left.samples < self._run or left.samples == right.samples

    def _joined(
        self, left: dict[nn.Parameter, Tensor], right: dict[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """The sums of both, in the memory of ``left``, or after the last sample in the buffer of the result."""
        found = {}
        for parameter, view in self._views.items():
            # Half gradients of a sample are added in float32.
            one, other = left[parameter].to(self._dtype), right[parameter]
            found[parameter] = torch.add(one, other, out=view if self._last else one)
        return found
