"""VocabParallelEmbedding: a token embedding that is split by vocabulary (paper, section 3)."""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import Communicator
from commengine.dtypes import HALF_TYPES

from .checks import require_within
from .functions import PlainForm, differentiable
from .linear import LinearOptions, SplitLayer, column_parallel_linear
from .placement import Placement, require_divisible
from .regions import (
    communicates,
    reduce_own_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class VocabParallelEmbedding(SplitLayer):
    """An embedding table of which rank i holds rows i * v/p to (i+1) * v/p; g sums the rows that the ranks found.

    num_embeddings: rows of the whole table, which ``comm.size`` must divide (else ValueError).
    sequence_parallel: return this rank's sequence shard along dim 0, by one reduce-scatter instead of the all-reduce.
        ``comm.size`` must divide that dimension (else ValueError). `logits` then takes such a shard.
    overlap_stream: for `logits`, as in `column_parallel_linear`.

    forward: tokens int64 [...], equal on all ranks -> [..., embedding_dim], equal on all ranks. Raises ValueError for a
    token outside the table, on the host if not compiled. `logits` is the output layer, tied to the same table.
    With sequence_parallel: tokens [s, ...] -> [s / comm.size, ..., embedding_dim].
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, comm: Communicator, **options: Unpack[LinearOptions]
    ) -> None:
        require_divisible(comm.size, num_embeddings=num_embeddings)
        rows = Placement((num_embeddings, embedding_dim), dim=0, index=comm.rank, count=comm.size)
        super().__init__(comm, rows, None, **options)
        self.num_embeddings = num_embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows_of(tokens, self.weight)

    def rows_of(self, tokens: Tensor, table: Tensor) -> Tensor:
        """The result of `forward`. table: the weight, or a view of all of it, which then gets this use's gradient."""
        require_within(tokens, self.num_embeddings, "a token")
        if not communicates(self.comm):
            return looked_up(tokens, table)
        rows = table.shape[0]
        local = tokens - self.comm.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = looked_up(local.masked_fill(elsewhere, 0), table)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(found, self.comm)
        return reduce_own_from_tensor_parallel_region(found, self.comm)

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """This rank's logits [..., num_embeddings / comm.size] of x [..., embedding_dim], equal on all ranks.

        bias: [num_embeddings / comm.size], this rank's part of a bias of the output layer.

        With sequence_parallel x [s / comm.size, ..., embedding_dim] is this rank's shard, and the logits are of all s
        positions.
        """
        return column_parallel_linear(x, self, bias)


def looked_up(rows: Tensor, table: Tensor) -> Tensor:
    """Rows number ``rows``, int64 [...], of ``table`` [n, d]: [..., d]. In half precision the gradient is accurate."""
    if table.is_cpu and table.dtype in HALF_TYPES:
        return _HostHalfLookup.apply(rows, table)  # type: ignore[no-untyped-call, no-any-return]
    return F.embedding(rows, table)


def _plain_lookup(ctx: Any) -> PlainForm:
    rows, table = ctx.saved_tensors
    return lambda table: (F.embedding(rows, table.float()).to(table.dtype),), [None, table]


class _HostHalfLookup(torch.autograd.Function):
    """torch's embedding in half precision, with the gradient of a row added up in float32.

    On the host torch adds it up in half precision: a number that is added to a bfloat16 sum is lost once the sum is 256
    times as large, which happens to rows that many tokens read.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(rows, table)
        ctx.shape = table.shape
        return F.embedding(rows, table)

    @staticmethod
    @differentiable(_plain_lookup)
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        rows, _ = ctx.saved_tensors
        sums = grads[0].new_zeros(ctx.shape, dtype=torch.float32)
        sums.index_add_(0, rows.reshape(-1), grads[0].reshape(-1, ctx.shape[1]).float())
        return None, sums.to(grads[0].dtype)
