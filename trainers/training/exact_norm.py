"""The norm of a gradient as an exact sum of integers, which has no order.

So it is the same however the gradient is cut: into shards of the tensor group, shares of ZeRO-1, buckets or threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from commengine import Communicator

from .reduction import GradientSegment

#: Squares are in units of 2^-BITS of the square of a power of two above the largest element. Half of BITS is a whole
#: number, because elements are scaled before they are squared.
BITS = 46

#: Elements that are added up in one 64-bit integer: 2^15 squares of at most 2^BITS. They fit a core's cache.
CHUNK = 2**15

#: The bits of the lower of two words in which a sum travels: 2^22 ranks can add them up.
LOW = 40


def exact_gradient_norm(
    segments: Sequence[GradientSegment], tensor: Communicator, data: Communicator | None = None
) -> float:
    """`trainers.training.clipping.gradient_norm`, with the same bits at every layout; infinite if it is not finite.

    Each square is cut off below 2^-46 of the square of the largest element, so the relative error of the square of a
    norm over n elements is at most n * 2^-44, and for gradients far smaller: elements are seldom that unequal.
    """
    gradients: tuple[list[Tensor], list[Tensor]] = ([], [])
    for segment in segments:
        if (grad := segment.gradient) is not None:
            gradients[segment.treatment.sharded].append(grad)
    largest = _largest(gradients[0] + gradients[1], tensor, data)
    if largest == 0 or not math.isfinite(largest):
        return largest
    _, exponent = math.frexp(largest)
    totals = [_squares(grads, exponent) for grads in gradients]
    words = torch.tensor([[total >> LOW, total & (1 << LOW) - 1] for total in totals])
    if data is not None:
        data.all_reduce(words)
    sharded = words[1].clone()
    tensor.all_reduce(sharded)
    high, low = (words[0] + sharded).tolist()
    return math.ldexp(math.sqrt((high << LOW) + low), exponent - BITS // 2)


def _largest(gradients: list[Tensor], tensor: Communicator, data: Communicator | None) -> float:
    """The largest absolute value on any rank; infinity if one is NaN."""
    norms = torch._foreach_norm(gradients, math.inf) if gradients else []
    found = [float(norm) for norm in norms]
    largest = torch.tensor(max(math.inf if math.isnan(norm) else norm for norm in [*found, 0.0]), dtype=torch.float64)
    for group in (tensor, data):
        if group is not None:
            group.all_reduce(largest, "max")
    return float(largest)


def _squares(gradients: Iterable[Tensor], exponent: int) -> int:
    """The sum of the squares of elements below 2^exponent, in units of 2^(2 * exponent - BITS)."""
    total = 0
    scale = math.ldexp(1.0, BITS // 2 - exponent)
    for grad in gradients:
        for chunk in torch.split(grad.reshape(-1), CHUNK):
            values = chunk.double().mul_(scale)
            total += int(values.mul_(values).long().sum())
    return total
