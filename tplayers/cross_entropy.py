"""Cross-entropy over logits whose vocabulary is split over the ranks (paper, section 3).

It communicates O(b * s) elements instead of b * s * v.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import Communicator
from commengine.compiled_ops import all_reduce_

from .checks import require_targets
from .derivatives import one_derivative
from .regions import new_operand


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    comm: Communicator,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    overwrite: bool = False,
) -> Tensor:
    """Per-token losses in nats, in float32 (float64 for float64 logits), equal on all ranks of ``comm``.

    logits_shard: [..., padded vocabulary / comm.size], this rank's columns. It is not changed, unless ``overwrite``.
    target: int64 [...], global token numbers, equal on all ranks. ``ignore_index`` gives loss 0 and gradient 0.
    vocab_size: columns from this number on are padding, which enter neither the maximum nor the sum.
    overwrite: work in the memory of ``logits_shard``, which saves two copies of the logits. The caller must own it and
        not use it afterwards. A second backward through the same graph then raises an error.

    Two all-reduces forward (the maxima; the sums and target logits together), none backward. Every rank must call it.
    Raises ValueError for a shape that does not fit and, on the host if not compiled, for a target outside the
    vocabulary.
    """
    if logits_shard.shape[:-1] != target.shape:
        fitting = list(logits_shard.shape[:-1])
        raise ValueError(f"logits {list(logits_shard.shape)} need a target {fitting}, not {list(target.shape)}")
    padded = logits_shard.shape[-1] * comm.size
    vocab_size = padded if vocab_size is None else vocab_size
    if not 0 < vocab_size <= padded:
        raise ValueError(f"vocab_size={vocab_size} is not within the {padded} columns of the logits")
    compiling = torch.compiler.is_compiling()  # a compiled graph cannot look at values, and plans its buffers itself
    require_targets(target, vocab_size, ignore_index)
    overwrite = overwrite and not compiling
    losses: Tensor = _CrossEntropy.apply(logits_shard, target, comm, vocab_size, ignore_index, overwrite)[0]  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        comm: Communicator,
        vocab_size: int,
        ignore_index: int,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        start = comm.rank * width
        real = min(max(vocab_size - start, 0), width)
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32

        # Subtracting the global maximum keeps exp() finite. A rank that holds only padding contributes -inf.
        peak = new_operand("all_reduce", target.shape, logits.new_empty(0, dtype=precision), comm).fill_(-torch.inf)
        if real:
            peak.copy_(logits[..., :real].amax(dim=-1))
        all_reduce_(peak, comm, "max")

        ctx.overwrite = overwrite and real == width and precision == logits.dtype
        if ctx.overwrite:
            # The detached tensor shares the version counter of logits, so autograd sees the change.
            shifted = logits.detach().sub_(peak.unsqueeze(-1))
        elif real == width:
            shifted = logits.to(precision) - peak.unsqueeze(-1)
        else:
            shifted = _shift_real(logits, peak, real)
        mine = (target >= start) & (target < start + real)
        column = torch.where(mine, target - start, 0).unsqueeze(-1)
        sums = new_operand("all_reduce", (2, *target.shape), peak, comm)
        sums[1] = torch.where(mine, shifted.gather(-1, column).squeeze(-1), 0.0)
        exponentials = shifted.exp_()
        sums[0] = exponentials.sum(dim=-1)
        all_reduce_(sums, comm)

        counted = target != ignore_index
        tie = logits.new_empty(0)  # it leads from the gradient to the logits, which are not kept: see `one_derivative`
        ctx.save_for_backward(exponentials, sums[0], column, mine, counted, tie)
        ctx.dtype = logits.dtype
        return torch.where(counted, sums[0].log() - sums[1], 0.0), tie

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        exponentials, total, column, mine, counted, _ = ctx.saved_tensors
        scale = torch.where(counted, grads[0], 0.0)
        factor = (scale / total).unsqueeze(-1)
        result = exponentials.mul_(factor) if ctx.overwrite else exponentials * factor
        result.scatter_add_(-1, column, torch.where(mine, -scale, 0.0).unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None, None, None


def _shift_real(logits: Tensor, peak: Tensor, real: int) -> Tensor:
    """Logits minus the maximum, with -inf (exp 0) in the padding columns."""
    shifted = peak.new_full(logits.shape, -torch.inf)
    shifted[..., :real].copy_(logits[..., :real]).sub_(peak.unsqueeze(-1))
    return shifted


def class_cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Losses in nats, in float32 (float64 for float64 logits), of logits that every rank has whole.

    logits: [..., classes]. labels: int64 [...], 0 to classes - 1; ``ignore_index`` gives loss 0 and gradient 0.
    Communicates nothing.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=ignore_index)
    return losses.view(labels.shape)
