"""The cross-entropy of logits in canonical shards of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commengine.compiled_ops import all_reduce_
from tplayers.checks import require_targets
from tplayers.derivatives import one_derivative

from .pointwise import pointwise, pointwise_
from .shards import CanonicalShards, tree_sum


def cross_entropy(
    logits: Tensor, target: Tensor, shards: CanonicalShards, *, vocab_size: int, ignore_index: int = -100
) -> Tensor:
    """Per-token losses in nats, in float32 (float64 for float64 logits), equal on all ranks of the tensor group.

    logits: [own, ..., padded vocabulary / C], this rank's shards; they are not to be used afterwards. target: int64
    [...], within the vocabulary or ``ignore_index``, equal on all ranks. vocab_size: columns from this one on are
    padding. Two all-reduces forward, none backward. A second backward through the same graph raises an error.
    Raises ValueError, on the host if not compiled, for another target.
    """
    require_targets(target, vocab_size, ignore_index)
    losses: Tensor = _CrossEntropy.apply(logits, target, shards, vocab_size, ignore_index)[0]  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, shards: CanonicalShards, vocab_size: int, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        own, width = shards.own, logits.shape[-1]
        values = logits.detach().to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        for number, shard in enumerate(values.unbind(), shards.first):
            shard[..., max(vocab_size - number * width, 0) :] = -torch.inf
        peak = values.amax(dim=-1).amax(dim=0)
        if shards.comm.size > 1:
            all_reduce_(peak, shards.comm, "max")
        values -= peak.unsqueeze(-1)

        column = target - shards.first * width
        mine = (column >= 0) & (column < own * width) & (target < vocab_size)
        column = torch.where(mine, column, 0).reshape(-1)
        places = (
            column // width,
            torch.arange(column.numel(), dtype=torch.int64, device=column.device),
            column % width,
        )
        rows = values.view(own, -1, width)
        sums = peak.new_zeros((2, *target.shape))
        sums[1] = torch.where(mine, rows[places].view(target.shape), 0.0)
        rows = pointwise_(torch.exp, rows)
        sums[0] = tree_sum(shard.sum(dim=-1) for shard in rows.unbind()).view(target.shape)
        if shards.comm.size > 1:
            all_reduce_(sums, shards.comm)

        counted = target != ignore_index
        tie = logits.new_empty(0)  # as in `tplayers.cross_entropy`
        ctx.save_for_backward(rows, sums[0], mine, counted, *places, tie)
        ctx.dtype, ctx.shape = logits.dtype, logits.shape
        return torch.where(counted, pointwise(torch.log, sums[0]) - sums[1], 0.0), tie

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, total, mine, counted, *places, _ = ctx.saved_tensors
        scale = torch.where(counted, grads[0], 0.0)
        found = rows.mul_((scale / total).reshape(-1, 1))
        found[tuple(places)] -= torch.where(mine, scale, 0.0).reshape(-1)
        return found.to(ctx.dtype).view(ctx.shape), None, None, None, None
