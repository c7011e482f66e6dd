"""Cross-entropy over logits whose vocabulary is split over the ranks (paper, section 3).

It communicates O(b * s) elements instead of b * s * v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import Communicator
from commengine.compiled_ops import all_reduced

from .checks import require_within
from .functions import PlainForm, differentiable
from .regions import reduce_from_tensor_parallel_region

#: a target that does not count
IGNORED = -100


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    comm: Communicator,
    *,
    vocab_size: int | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Per-token losses in nats, in float32 (float64 for float64 logits), equal on all ranks of ``comm``.

    logits_shard: [..., padded vocabulary / comm.size], this rank's columns. It is not changed, unless ``overwrite``.
    target: int64 [...], global token numbers, equal on all ranks. `IGNORED` gives loss 0 and gradient 0.
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
    overwrite = overwrite and not torch.compiler.is_compiling()  # a compiled graph plans its buffers itself
    return cross_entropy_of_shards(logits_shard[None], target, comm, vocab_size, overwrite, Arithmetic())


class Arithmetic(NamedTuple):
    """How a cross-entropy computes exponentials, in place, and logarithms; and how it adds up what shards give."""

    exp_: Callable[[Tensor], Tensor] = torch.exp_
    log: Callable[[Tensor], Tensor] = torch.log
    add: Callable[[Iterator[Tensor]], Tensor] = next  # there is one shard


def cross_entropy_of_shards(
    logits: Tensor,
    target: Tensor,
    comm: Communicator,
    vocab_size: int,
    overwrite: bool,
    arithmetic: Arithmetic,
) -> Tensor:
    """`vocab_parallel_cross_entropy` of ``logits`` [shards, ..., columns of a shard]: this rank's shards, in order."""
    require_within(target, vocab_size, "a target", IGNORED)
    losses: Tensor = _CrossEntropy.apply(logits, target, comm, vocab_size, overwrite, arithmetic)[0]  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        comm: Communicator,
        vocab_size: int,
        overwrite: bool,
        arithmetic: Arithmetic,
    ) -> tuple[Tensor, Tensor]:
        shards, width = logits.shape[0], logits.shape[-1]
        start = comm.rank * shards * width
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # The detached tensor shares the version counter of logits, so autograd sees the change.
        values = logits.detach().to(precision, copy=not overwrite)
        for first, shard in zip(range(start, start + shards * width, width), values.unbind(), strict=True):
            if vocab_size < first + width:
                shard[..., max(vocab_size - first, 0) :] = -torch.inf

        # Subtracting the global maximum keeps exp() finite. A rank that holds only padding contributes -inf.
        peak = values.amax(dim=-1).amax(dim=0)
        peak, _ = all_reduced(peak, comm, "max")
        values.sub_(peak.unsqueeze(-1))
        mine = (target >= start) & (target < min(start + shards * width, vocab_size))
        column = torch.where(mine, target - start, 0)
        # One index for each dimension: the logits may lie in memory in another order, and a view would copy them.
        at = [
            torch.arange(size, dtype=torch.int64, device=target.device).view(-1, *[1] * (target.dim() - 1 - axis))
            for axis, size in enumerate(target.shape)
        ]
        places = (column // width, *at, column % width)
        sums = peak.new_empty((2, *target.shape))
        sums[1] = torch.where(mine, values[places], 0.0)
        values = arithmetic.exp_(values)
        sums[0] = arithmetic.add(shard.sum(dim=-1) for shard in values.unbind())
        sums, _ = all_reduced(sums, comm)

        counted = target != IGNORED
        # It stands for the logits, which are not kept, where a gradient is differentiated: zeros in no memory.
        tie = logits.new_zeros(()).expand(logits.shape)
        ctx.save_for_backward(values, sums[0], mine, counted, *places, tie)
        ctx.dtype, ctx.overwrite, ctx.comm = logits.dtype, overwrite, comm
        ctx.set_materialize_grads(False)
        return torch.where(counted, arithmetic.log(sums[0]) - sums[1], 0.0), tie

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        of_losses, of_tie = grads
        found = None if of_losses is None else _of_losses(ctx, of_losses)[0]
        if of_tie is not None:
            found = of_tie if found is None else found + of_tie
        return found, None, None, None, None, None


def _plain_cross_entropy(ctx: Any) -> PlainForm:
    values, _, mine, counted, *places, tie = ctx.saved_tensors
    comm, shifted = ctx.comm, values.log()

    def plain(tie: Tensor) -> tuple[Tensor]:
        logits = shifted + tie
        sums = torch.stack((logits.exp().sum(dim=-1).sum(dim=0), torch.where(mine, logits[tuple(places)], 0.0)))
        total, of_target = reduce_from_tensor_parallel_region(sums, comm)
        return (torch.where(counted, total.log() - of_target, 0.0),)

    return plain, [tie]


@differentiable(_plain_cross_entropy)
def _of_losses(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
    values, total, mine, counted, *places, _ = ctx.saved_tensors
    scale = torch.where(counted, grads[0], 0.0)
    factor = (scale / total).unsqueeze(-1)
    found = values.mul_(factor) if ctx.overwrite else values * factor
    found[tuple(places)] -= torch.where(mine, scale, 0.0)
    return (found.to(ctx.dtype),)


def class_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses in nats, in float32 (float64 for float64 logits), of logits that every rank has whole.

    logits: [..., classes]. labels: int64 [...], 0 to classes - 1; `IGNORED` gives loss 0 and gradient 0.
    Communicates nothing.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(labels.shape)
