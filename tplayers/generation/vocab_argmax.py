"""The most likely token, from logits whose vocabulary is split over the ranks.

It communicates O(b * s) numbers instead of b * s * v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commengine import Communicator


def vocab_parallel_argmax(logits_shard: Tensor, comm: Communicator, vocab_size: int) -> Tensor:
    """The token of the largest logit, int64 [...], equal on all ranks: see `vocab_parallel_max`.

    No gradient. Every rank must call it.
    """
    return vocab_parallel_max(logits_shard, comm, vocab_size)[0]


def vocab_parallel_max(logits_shard: Tensor, comm: Communicator, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The token of the largest logit, int64 [...], and this logit, float64 [...], equal on all ranks of ``comm``.

    Of equal logits, the lower token. The logit is NaN if one of the row is.

    logits_shard: [..., padded vocabulary / comm.size], this rank's columns; it is not changed. vocab_size: columns from
    this number on are padding, which is never chosen.

    One all-gather of 16 bytes for each token; no gradient. Every rank must call it.
    """
    first = comm.rank * logits_shard.shape[-1]
    real = max(min(vocab_size - first, logits_shard.shape[-1]), 0)
    best = logits_shard.new_full((2, *logits_shard.shape[:-1]), -torch.inf, dtype=torch.float64)  # the logit, its token
    if real:
        values, columns = logits_shard.detach()[..., :real].max(dim=-1)
        best[0], best[1] = values, columns + first  # a float64 holds every token's number
    if comm.size == 1:
        return best[1].long(), best[0]
    ranks = best.new_empty((comm.size, *best.shape))
    comm.all_gather(ranks.view(-1), best.view(-1))
    winner = ranks[:, :1].argmax(dim=0, keepdim=True)  # of equal ones the lowest rank
    logit, token = ranks.gather(0, winner.expand(1, *best.shape))[0]
    return token.long(), logit
