"""The norm of a gradient that is split over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commengine import Communicator

from .reduction import GradientSegment

#: Squares are added up in the gradient's own precision over stretches of this many elements, and in float64 beyond.
STRETCH = 2**16


def gradient_norm(segments: Sequence[GradientSegment], tensor: Communicator, data: Communicator | None = None) -> float:
    """The Euclidean norm of the whole model's gradient: the same at every TP size, and on every rank.

    The squares of split parameters are summed over the tensor group. Replicated parameters, and tied ones, count once.
    data: the data group, if each of its ranks has only a share of the gradient. Collective over both groups.
    """
    squares = torch.zeros(2, dtype=torch.float64)
    gradients: tuple[list[Tensor], list[Tensor]] = ([], [])
    for segment in segments:
        if (grad := segment.gradient) is not None:
            gradients[segment.treatment.sharded].extend(torch.split(grad, STRETCH) if grad.dim() == 1 else (grad,))
    for kind, grads in enumerate(gradients):
        if grads:
            squares[kind] = torch.stack(torch._foreach_norm(grads)).double().square().sum()
    if data is not None:
        data.all_reduce(squares)
    squares[1] += 0.0 * squares[0]  # NaN if a replicated gradient is not finite on this rank; then all ranks get NaN
    sharded = squares[1:]
    tensor.all_reduce(sharded)
    return float(squares.sum().sqrt())


def clip(segments: Sequence[GradientSegment], norm: float, largest: float, *, scale: float = 1.0) -> None:
    """Divide all gradients by ``scale``, and if ``norm`` exceeds ``largest``, by ``norm / largest`` too.

    norm: of the gradients divided by ``scale``. largest: 0 turns clipping off. It takes one pass over the gradients, or
    none if nothing changes.
    """
    factor = largest / (norm + 1e-6) if largest > 0 and norm > largest else 1.0
    factor /= scale
    if factor != 1.0:
        torch._foreach_mul_([grad for segment in segments if (grad := segment.gradient) is not None], factor)
