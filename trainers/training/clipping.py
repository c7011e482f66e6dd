"""The norm of a gradient that is split over ranks, and clipping by it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from commengine import Communicator
from commengine.torch_private import private

from .reduction import GradientSegment

#: On the host, squares are added up in single precision over stretches of this many elements, and in float64 beyond. A
#: kernel keeps 8 or 16 sums of a stretch, each of at most 32 squares: few enough even for equal ones, all of whose
#: additions may be rounded in one direction.
STRETCH = 2**8

#: Elements that go through one kernel, which may copy them to another precision or order.
PIECE = 2**22

#: The precision in which the squares of half precision are added up.
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

#: Squares are in units of 2^-BITS of the square of a power of two above the largest element.
BITS = 46

#: Squares that float64 adds up without rounding: 2^7 of at most 2^BITS.
ROW = 2**7

#: A number of float64 whose last bit is 1: what is added to it is rounded to an integer.
WHOLE = 1.5 * 2**52

#: Elements that are added up in one 64-bit integer: 2^16 squares of at most 2^BITS. They fit a core's cache.
CHUNK = 2**16

#: The bits of the lower of two words in which a sum travels: 2^22 ranks can add them up.
LOW = 40


def gradient_norm(
    segments: Sequence[GradientSegment], tensor: Communicator, shares: Sequence[Communicator] = (),
    experts: Communicator | None = None,
) -> float:  # fmt: skip
    """The Euclidean norm of the whole model's gradient, to 1e-6 of it at every layout: the same number on every rank.

    The squares of split parameters are summed over the tensor group. Replicated parameters, and tied ones, count once.
    It is infinite or NaN, on every rank, if a gradient is not finite.

    segments: this rank's gradients, summed over the replicas (`GradientBuckets.segments` after `finish`), of any
    floating-point or complex dtypes. tensor: the tensor group. shares: the groups of which each rank has only a share
    of the gradient: the pipeline group, and with ZeRO-1 the ranks that hold the same parameters. experts: the expert
    group, over which the squares of experts are summed; None if one of ``shares`` has its ranks. Collective over all
    groups.
    """
    squares = _summed(_sums_of_squares, segments, shares, experts)
    squares[1] += 0.0 * squares[0]  # NaN if a replicated gradient is not finite on this rank; then all ranks get NaN
    sharded = squares[1:]
    tensor.all_reduce(sharded)
    return float(squares.sum().sqrt())


def _summed(
    sums: Callable[[list[GradientSegment]], Tensor], segments: Sequence[GradientSegment],
    shares: Sequence[Communicator], experts: Communicator | None,
) -> Tensor:  # fmt: skip
    """``sums`` of the segments, added up over all ranks but the tensor group. The arguments are as for `gradient_norm`.

    Collective over ``shares`` and ``experts``.
    """
    apart = experts is not None and experts.size > 1
    found = sums([segment for segment in segments if not (apart and segment.treatment.expert)])
    if experts is not None and apart:
        of_experts = sums([segment for segment in segments if segment.treatment.expert])
        experts.all_reduce(of_experts)
        found += of_experts
    for group in shares:
        group.all_reduce(found)
    return found


def _sums_of_squares(segments: Sequence[GradientSegment]) -> Tensor:
    """The sums of squares of replicated and of split parameters: float64 [2], on the host."""
    gradients = _by_placement(segments)
    device = next((grads[0].device for grads in gradients if grads), torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = [sum_of_squares(grads) if grads else zero for grads in gradients]
    return torch.stack(sums).cpu()  # both at once: reading a device's tensor waits for the device


def _by_placement(segments: Sequence[GradientSegment]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of replicated parameters, and those of split ones."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for segment in segments:
        if segment.treatment.counted and (grad := segment.gradient) is not None:
            found[segment.treatment.sharded].append(grad)
    return found


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, to a relative error of 1e-6: float64, a scalar on the tensors' device.

    tensors: at least one, all on one device; of any shapes, orders in memory and dtypes that have a square. The squares
    of single and half precision must be numbers of single precision: elements from 1e-19 to 1e19 count.

    On CUDA a tensor is one part, because a part costs time there and the sum is accurate without: 512 threads add up a
    chunk of 65,536 elements in 4 sums each, and the chunks' sums are added up in the same way. So a square passes
    through at most about 100 additions in single precision, also in a gradient of a billion elements (PyTorch's
    ``ForeachReduceOp.cu``).
    """
    norms: list[Tensor] = []
    short: list[Tensor] = []  # tensors and ends of tensors that need no stretches
    for tensor in tensors:
        for piece in torch.split(_in_memory_order(tensor), PIECE) if tensor.is_cpu else (tensor,):
            whole = piece.numel() // STRETCH * STRETCH if tensor.is_cpu else 0
            if whole:
                stretches = piece[:whole].view(-1, STRETCH)
                norms.append(torch.linalg.vector_norm(stretches, dim=1, dtype=WIDER.get(piece.dtype)))
            if whole < piece.numel():
                short.append(piece[whole:] if whole else piece)
    for dtype in dict.fromkeys(one.dtype for one in short):
        alike = [one for one in short if one.dtype == dtype]
        norms.append(torch.stack(private("_foreach_norm")(alike, dtype=WIDER.get(dtype))))
    if not norms:  # of tensors without an element
        return torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    return torch.cat([one.double() for one in norms]).square_().sum()


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements, without a copy where they lie side by side in any order; those of a complex tensor as two each."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1)


def exact_gradient_norm(
    segments: Sequence[GradientSegment], tensor: Communicator, shares: Sequence[Communicator] = (),
    experts: Communicator | None = None,
) -> float:  # fmt: skip
    """`gradient_norm` with the same bits at every layout; infinite if it is not finite.

    It is an exact sum of integers, which has no order. So shards, shares of ZeRO-1, buckets and threads
    may cut the gradient in any way.

    Each square is rounded to a multiple of 2^-46 of the square of a power of two above the largest element. So the
    relative error of the square of a norm over n elements is at most n * 2^-44, and for gradients far smaller: elements
    are seldom that unequal.
    """
    groups = (tensor, *shares, *([] if experts is None else [experts]))
    largest = _largest(list(itertools.chain(*_by_placement(segments))), groups)
    if largest == 0 or not math.isfinite(largest):
        return largest
    _, exponent = math.frexp(largest)
    words = _summed(lambda some: _words(some, exponent), segments, shares, experts)
    sharded = words[1].clone()
    tensor.all_reduce(sharded)
    high, low = (words[0] + sharded).tolist()
    return math.ldexp(math.sqrt((high << LOW) + low), exponent - BITS // 2)


def _words(segments: Sequence[GradientSegment], exponent: int) -> Tensor:
    """The sums of `_squares` of replicated and of split parameters, each in two words: int64 [2, 2]."""
    totals = [_squares(grads, exponent) for grads in _by_placement(segments)]
    return torch.tensor([[total >> LOW, total & (1 << LOW) - 1] for total in totals], dtype=torch.int64, device="cpu")


def _largest(gradients: list[Tensor], groups: Sequence[Communicator]) -> float:
    """The largest absolute value on any rank; infinity if one is NaN."""
    ends = [float(end) for gradient in gradients if gradient.numel() for end in torch.aminmax(gradient)]
    found = max((math.inf if math.isnan(end) else abs(end) for end in ends), default=0.0)
    largest = torch.tensor(found, dtype=torch.float64, device="cpu")
    for group in groups:
        group.all_reduce(largest, "max")
    return float(largest)


def _squares(gradients: Iterable[Tensor], exponent: int) -> int:
    """The sum of the squares of elements below 2^exponent, in units of 2^(2 * exponent - BITS)."""
    unit = math.ldexp(1.0, BITS - 2 * exponent)
    values = torch.empty(CHUNK, dtype=torch.float64, device="cpu")
    squares = torch.empty_like(values)
    whole = torch.tensor(WHOLE, dtype=torch.float64, device="cpu")
    total = 0
    for grad in gradients:
        for chunk in torch.split(grad.reshape(-1), CHUNK):
            filled = -(-chunk.numel() // ROW) * ROW
            mine, found = values[:filled], squares[:filled]
            mine[: chunk.numel()].copy_(chunk)
            mine[chunk.numel() :].zero_()
            # It takes less time than a conversion to integers, which then is of the rows' sums alone.
            torch.addcmul(whole, mine, mine, value=unit, out=found).sub_(whole)
            total += int(found.view(-1, ROW).sum(dim=1).long().sum())
    return total


def clip(segments: Sequence[GradientSegment], norm: float, largest: float, *, scale: float = 1.0) -> None:
    """Divide all gradients by ``scale``, and if ``norm`` exceeds ``largest``, by ``norm / largest`` too.

    norm: of the gradients divided by ``scale``. largest: 0 turns clipping off. It takes one pass over the gradients, or
    none if nothing changes.
    """
    factor = largest / (norm + 1e-6) if largest > 0 and norm > largest else 1.0
    factor /= scale
    if factor != 1.0:
        private("_foreach_mul_")([grad for segment in segments if (grad := segment.gradient) is not None], factor)
