"""The geometry of layers on split fields: the outputs of each rank, and the inputs that they need.

Pure arithmetic on one axis at a time. Every rank computes the plan of all ranks, so that errors of geometry are raised
on every rank, at construction, and nothing is sent.

Each *rule* says for one axis how a layer reads its input: how many outputs n inputs give, at which place of the input
an output is centred, and which inputs the outputs [start, stop) read. An output belongs to the rank that owns the input
next to its centre; between two inputs it is the first one. A centre outside the field counts as the border. Inputs may
be outside the field: the layer's padding fills them.

=================  ==================================================  =============================================
rule               output o reads the inputs                           the centre of output o
=================  ==================================================  =============================================
Sliding            o * stride - before + t * dilation, 0 <= t < kernel  their mean
Transposed         i with o = i * stride - padding + t * dilation      (o + padding - reach / 2) / stride
Adaptive           from o * n / outputs to (o + 1) * n / outputs       (o + 1/2) * n / outputs - 1/2
Scaled             those next to its centre                            (o + 1/2) / scale - 1/2; with corners
                                                                       o * (n - 1) / (n * scale - 1)
=================  ==================================================  =============================================
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

#: where a part of an axis begins and ends, in global positions
Span = tuple[int, int]


@dataclass(frozen=True)
class _Kernel:
    kernel: int
    stride: int = 1
    dilation: int = 1

    @functools.cached_property
    def reach(self) -> int:
        """The distance from the first to the last input of an output, or if transposed output of an input."""
        return self.dilation * (self.kernel - 1)


@dataclass(frozen=True)
class Sliding(_Kernel):
    """Convolution and pooling. before, after: the padding on both sides.

    ceil: inputs that are left over at the end have an output, too, if it begins before the padding at the end does.
    """

    before: int = 0
    after: int = 0
    ceil: bool = False

    def outputs(self, points: int) -> int:
        """Return the number of outputs of ``points`` inputs; less than one if there are too few."""
        room = points + self.before + self.after - self.reach - 1
        if not self.ceil:
            return room // self.stride + 1
        last = -(-room // self.stride)
        return last + (last * self.stride < points + self.before)

    def centre(self) -> tuple[int, int, int]:
        """Return (a, b, c): output o is centred at the place (a * o + b) / c of the input; a and c are positive."""
        return 2 * self.stride, self.reach - 2 * self.before, 2

    def reads(self, start: int, stop: int) -> Span:
        """Return the span of inputs that the outputs [start, stop) read; at least one output."""
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.reach + 1


@dataclass(frozen=True)
class Transposed(_Kernel):
    """Transposed convolution: the adjoint of `Sliding`, with ``output_padding`` more outputs at the end.

    `crop` says which of the outputs of the inputs that were read are the wanted ones, and how many no input reaches.
    """

    padding: int = 0
    output_padding: int = 0

    def outputs(self, points: int) -> int:
        return (points - 1) * self.stride - 2 * self.padding + self.reach + self.output_padding + 1

    def centre(self) -> tuple[int, int, int]:
        return 2, 2 * self.padding - self.reach, 2 * self.stride

    def reads(self, start: int, stop: int) -> Span:
        first = -(-(start + self.padding - self.reach) // self.stride)
        # Where the stride leaves gaps, no input may reach the first output: then from the input before it.
        return min(first, (start + self.padding) // self.stride), (stop - 1 + self.padding) // self.stride + 1

    def crop(self, start: int, stop: int) -> tuple[int, int]:
        """Return (skip, missing) for the outputs [start, stop) in the outputs of the inputs that `reads` names.

        skip: the number of outputs before ``start``. missing: of outputs beyond the last one that an input reaches.
        """
        first, last = self.reads(start, stop)
        reached = (last - 1) * self.stride - self.padding + self.reach + 1
        return start - (first * self.stride - self.padding), max(stop - reached, 0)


@dataclass(frozen=True)
class Adaptive:
    """Pooling of ``points`` inputs to ``size`` outputs, whose windows are as equal as whole numbers can be."""

    size: int
    points: int

    def outputs(self, points: int) -> int:
        return self.size

    def centre(self) -> tuple[int, int, int]:
        return 2 * self.points, self.points - self.size, 2 * self.size

    def reads(self, start: int, stop: int) -> Span:
        return start * self.points // self.size, -(-stop * self.points // self.size)


@dataclass(frozen=True)
class Scaled:
    """Upsampling by a whole number.

    around: how many inputs on each side of its centre an output reads; 0: the one in whose cell it lies.
    corners: the number of inputs, if the first and the last output lie on the first and the last input; otherwise 0.
    """

    scale: int
    around: int = 0
    corners: int = 0

    def outputs(self, points: int) -> int:
        return points * self.scale

    def centre(self) -> tuple[int, int, int]:
        if self.corners > 1:  # all outputs of one input are its copies
            return self.corners - 1, 0, self.corners * self.scale - 1
        return 2, 1 - self.scale, 2 * self.scale

    def reads(self, start: int, stop: int) -> Span:
        if not self.around:
            return start // self.scale, (stop - 1) // self.scale + 1
        a, b, c = self.centre()
        return (a * start + b) // c - self.around + 1, (a * (stop - 1) + b) // c + self.around + 1


#: how a layer reads one axis of its input
Rule: TypeAlias = Sliding | Transposed | Adaptive | Scaled


def output_bounds(rule: Rule, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where the outputs of each rank begin, and the number of outputs at the end.

    sizes: of the input's blocks on this axis. The result has one more number.
    """
    outputs = max(rule.outputs(sum(sizes)), 0)
    a, b, c = rule.centre()
    starts = np.cumsum((0, *sizes[:-1]))
    # The nearest input of output o is s or later if (a * o + b) / c > s - 1/2.
    bounds = np.clip(((2 * starts - 1) * c - 2 * b) // (2 * a) + 1, 0, outputs) * (starts > 0)
    return (*bounds.tolist(), outputs)


def read_spans(rule: Rule, bounds: Sequence[int]) -> tuple[Span, ...]:
    """Return the span of inputs that each rank reads for its outputs; (0, 0) for a rank without outputs.

    bounds: where the outputs of each rank begin, and the number of outputs at the end.
    """
    return tuple(rule.reads(low, high) if low < high else (0, 0) for low, high in itertools.pairwise(bounds))
