"""The losses of a small model that learns from a large one: of logits split by vocabulary, and of hidden states.

The first (Hinton et al. 2015) communicates O(b * s) elements instead of b * s * v, as the cross-entropy does (paper,
section 3). The second (Sanh et al. 2019, section 3) communicates nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import Communicator
from commengine.compiled_ops import all_reduced

from .functions import one_derivative


def vocab_parallel_distillation_loss(
    student_shard: Tensor,
    teacher_shard: Tensor,
    comm: Communicator,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Per-token T^2 KL(teacher || student) of both softmax(logits / T), in nats, equal on all ranks of ``comm``.

    The factor T^2 makes the gradient as large as that of a cross-entropy at any temperature T (Hinton et al. 2015,
    section 2). The teacher gets no gradient.

    student_shard, teacher_shard: [..., padded vocabulary / comm.size], this rank's columns of both. They are not
    changed. The result [...] is in float32 (float64 for float64 logits of the student). temperature: above 0.
    vocab_size: columns from this number on are padding, which no softmax has.

    Two all-reduces forward (the maxima; the sums), none backward. Every rank must call it. Raises ValueError for shapes
    that differ, and for a temperature or a vocabulary out of range.
    """
    if student_shard.shape != teacher_shard.shape:
        raise ValueError(f"the logits of the student, {list(student_shard.shape)}, and the teacher, "
                         f"{list(teacher_shard.shape)}, differ in shape")  # fmt: skip
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be above 0")
    padded = student_shard.shape[-1] * comm.size
    vocab_size = padded if vocab_size is None else vocab_size
    if not 0 < vocab_size <= padded:
        raise ValueError(f"vocab_size={vocab_size} is not within the {padded} columns of the logits")
    real = min(max(vocab_size - comm.rank * student_shard.shape[-1], 0), student_shard.shape[-1])
    return _Distillation.apply(student_shard, teacher_shard.detach(), comm, temperature, real)  # type: ignore[no-untyped-call, no-any-return]


def cosine_distillation_loss(student: Tensor, teacher: Tensor, *, dim: int = -1) -> Tensor:
    """1 - cos of the angle between the hidden states of both models, for each item: from 0 to 2, without a unit.

    student, teacher: of one shape; along ``dim`` are the h numbers of an item, such as a token or a point of a field.
    The result, without ``dim``, is in float32 (float64 for a float64 student). The teacher gets no gradient. Not
    collective: items that are split over ranks stay so. Raises ValueError for shapes that differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(f"the hidden states of the student, {list(student.shape)}, and the teacher, "
                         f"{list(teacher.shape)}, differ in shape")  # fmt: skip
    precision = torch.float64 if student.dtype == torch.float64 else torch.float32
    return 1 - F.cosine_similarity(student.to(precision), teacher.detach().to(precision), dim=dim)


@contextlib.contextmanager
def kept_output(module: nn.Module) -> Iterator[list[Tensor]]:
    """In this block a list gets each result of ``module``, as part of the graph: hidden states for a loss of them."""
    found: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, inputs, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, comm: Communicator, temperature: float, real: int
    ) -> Tensor:
        precision = torch.float64 if student.dtype == torch.float64 else torch.float32
        of_both = [one[..., :real].to(precision) / temperature for one in (student, teacher)]
        lowest = of_both[0].new_full((*student.shape[:-1], 1), -torch.inf)  # a rank may have padding alone
        peaks = torch.stack([torch.cat((one, lowest), dim=-1).amax(dim=-1) for one in of_both])
        peaks, _ = all_reduced(peaks, comm, "max")
        apart = of_both[1] - of_both[0]
        powers = [one.sub_(peak.unsqueeze(-1)).exp_() for one, peak in zip(of_both, peaks, strict=True)]
        sums = torch.stack([*(one.sum(dim=-1) for one in powers), apart.mul_(powers[1]).sum(dim=-1)])
        sums, _ = all_reduced(sums, comm)
        found = sums[2] / sums[1] - (sums[1].log() + peaks[1]) + sums[0].log() + peaks[0]
        mine, theirs = (one.div_(total.unsqueeze(-1)) for one, total in zip(powers, sums[:2], strict=True))
        ctx.save_for_backward(mine.sub_(theirs))
        ctx.columns, ctx.dtype, ctx.temperature = student.shape[-1], student.dtype, temperature
        return found.mul_(temperature * temperature)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (apart,) = ctx.saved_tensors
        found = apart.new_zeros((*apart.shape[:-1], ctx.columns))
        torch.mul(apart, grads[0].unsqueeze(-1) * ctx.temperature, out=found[..., : apart.shape[-1]])
        return found.to(ctx.dtype), None, None, None, None
