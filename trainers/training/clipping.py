"""The norm of a gradient that is split over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commengine import Communicator

from .reduction import GradientSegment

#: On the host, squares are added up in the gradient's own precision over stretches of this many elements, and in
#: float64 beyond.
STRETCH = 2**16


def gradient_norm(segments: Sequence[GradientSegment], tensor: Communicator, data: Communicator | None = None) -> float:
    """The Euclidean norm of the whole model's gradient: the same at every TP size, and on every rank.

    The squares of split parameters are summed over the tensor group. Replicated parameters, and tied ones, count once.
    data: the data group, if each of its ranks has only a share of the gradient. Collective over both groups.
    """
    gradients: tuple[list[Tensor], list[Tensor]] = ([], [])
    for segment in segments:
        if (grad := segment.gradient) is not None:
            gradients[segment.treatment.sharded].extend(summands(grad))
    device = next((grads[0].device for grads in gradients if grads), torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = [torch.stack(torch._foreach_norm(grads)).double().square().sum() if grads else zero for grads in gradients]
    squares = torch.stack(sums).cpu()  # both at once: reading a device's tensor waits for the device
    if data is not None:
        data.all_reduce(squares)
    squares[1] += 0.0 * squares[0]  # NaN if a replicated gradient is not finite on this rank; then all ranks get NaN
    sharded = squares[1:]
    tensor.all_reduce(sharded)
    return float(squares.sum().sqrt())


def summands(grad: Tensor) -> Sequence[Tensor]:
    """The parts of a gradient whose norms are added up in float64: its stretches if it is flat and on the host.

    On CUDA a gradient is one part, because a stretch costs time there and the norm is accurate without: 512 threads
    add up a chunk of 65,536 elements in 4 sums each, and the chunks' sums are added up in the same way. So a square
    passes through at most about 100 additions in single precision, also in a gradient of a billion elements
    (PyTorch's ``ForeachReduceOp.cu``).
    """
    return torch.split(grad, STRETCH) if grad.is_cpu and grad.dim() == 1 else (grad,)


def clip(segments: Sequence[GradientSegment], norm: float, largest: float, *, scale: float = 1.0) -> None:
    """Divide all gradients by ``scale``, and if ``norm`` exceeds ``largest``, by ``norm / largest`` too.

    norm: of the gradients divided by ``scale``. largest: 0 turns clipping off. It takes one pass over the gradients, or
    none if nothing changes.
    """
    factor = largest / (norm + 1e-6) if largest > 0 and norm > largest else 1.0
    factor /= scale
    if factor != 1.0:
        torch._foreach_mul_([grad for segment in segments if (grad := segment.gradient) is not None], factor)
