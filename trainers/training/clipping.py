"""The norm of a gradient that is split over ranks, and clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commengine import Communicator

from .buckets import Segment

#: elements of a flat gradient whose squares are added up in its own precision
STRETCH = 2**16


def gradient_norm(segments: Sequence[Segment], tensor: Communicator, data: Communicator | None = None) -> float:
    """The Euclidean norm of the whole model's gradient: the same at every TP size, and on every rank.

    The squares of split parameters are summed over the tensor group; replicated ones, and a tied one, count once.
    data: the data group where each of its ranks has a part of the gradient only. Collective over both.
    """
    squares = torch.zeros(2, dtype=torch.float64)
    gradients: tuple[list[Tensor], list[Tensor]] = ([], [])
    for segment in segments:
        if (grad := segment.values.grad) is not None:
            gradients[segment.kind.sharded].extend(torch.split(grad, STRETCH) if grad.dim() == 1 else (grad,))
    for kind, grads in enumerate(gradients):
        if grads:
            squares[kind] = torch.stack(torch._foreach_norm(grads)).double().square().sum()
    if data is not None:
        data.all_reduce(squares)
    squares[1] += 0.0 * squares[0]  # NaN where a replicated gradient is not finite on this rank: then so for all
    sharded = squares[1:]
    tensor.all_reduce(sharded)
    return float(squares.sum().sqrt())


def clip(segments: Sequence[Segment], norm: float, largest: float, *, scale: float = 1.0) -> None:
    """Divide all gradients by ``scale``, and where ``norm`` is larger by ``norm / largest``, in one pass if any.

    norm: of the gradients divided by ``scale``. largest: 0 turns clipping off.
    """
    factor = largest / (norm + 1e-6) if largest > 0 and norm > largest else 1.0
    factor /= scale
    if factor != 1.0:
        torch._foreach_mul_([s.values.grad for s in segments if s.values.grad is not None], factor)
