"""VocabParallelEmbedding: a token embedding that is split by vocabulary (paper, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import Communicator, Stream
from commengine.dtypes import HALF_TYPES

from .canonical.products import ColumnWeight, columns
from .canonical.shards import CanonicalShards, unstacked
from .checks import require_within
from .derivatives import one_derivative
from .linear import DEFAULT_INIT, column_parallel_linear
from .placement import Constant, Normal, Placement, add_parameter, require_divisible
from .regions import (
    communicates,
    in_shared_memory,
    new_operand,
    reduce_own_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class VocabParallelEmbedding(nn.Module):
    """An embedding table of which rank i holds rows i * v/p to (i+1) * v/p; g sums the rows that the ranks found.

    num_embeddings: rows of the whole table, which ``comm.size`` must divide (else ValueError).
    sequence_parallel: return this rank's sequence shard along dim 0, by one reduce-scatter instead of the all-reduce.
        ``comm.size`` must divide that dimension (else ValueError). `logits` then takes such a shard.
    overlap_stream, packed: for `logits`, as in `column_parallel_linear`. canonical: as in `ColumnParallelLinear`;
        `logit_shards` then gives the logits without putting the shards side by side.

    forward: tokens int64 [...], equal on all ranks -> [..., embedding_dim], equal on all ranks. Raises ValueError for a
    token outside the table, on the host if not compiled. `logits` is the output layer, tied to the same table.
    With sequence_parallel: tokens [s, ...] -> [s / comm.size, ..., embedding_dim].
    """

    weight: nn.Parameter
    packed: Tensor | None = None
    canonical: CanonicalShards | None = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        comm: Communicator,
        *,
        sequence_parallel: bool = False,
        overlap_stream: Stream | None = None,
        init: Normal | Constant = DEFAULT_INIT,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_divisible(comm.size, num_embeddings=num_embeddings)
        self.comm = comm
        self.num_embeddings = num_embeddings
        self.sequence_parallel = sequence_parallel
        self.overlap_stream = overlap_stream
        self.canonical_sizes = {"num_embeddings": num_embeddings}
        rows = Placement((num_embeddings, embedding_dim), init, dim=0, index=comm.rank, count=comm.size)
        add_parameter(self, "weight", rows, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        require_within(tokens, self.num_embeddings, "a token")
        if not communicates(self.comm):
            found = looked_up(tokens, self.weight)
            # A sum of rows and of zeros, as on several ranks, is exact, but for the sign of a zero.
            return found if self.canonical is None else found + 0.0
        rows = self.weight.shape[0]
        local = tokens - self.comm.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = looked_up(local.masked_fill(elsewhere, 0), self.weight)
        operation = "reduce_scatter" if self.sequence_parallel else "all_reduce"
        if in_shared_memory(operation, found.numel(), found, self.comm):
            found = _Masked.apply(found, elsewhere, operation, self.comm)  # type: ignore[no-untyped-call]
        else:
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
        if self.canonical is not None:
            return unstacked(self.logit_shards(x, bias))
        return column_parallel_linear(
            x, self.weight, bias, self.comm,
            sequence_parallel=self.sequence_parallel, overlap_stream=self.overlap_stream, packed=self.packed,
        )  # fmt: skip

    def logit_shards(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The canonical shards of `logits`, [own, ..., num_embeddings / C]."""
        assert self.canonical is not None
        weight = ColumnWeight(self.weight, bias)
        (y,) = columns(x, [weight], self.canonical, split=self.sequence_parallel, stream=self.overlap_stream)
        return y


class _Masked(torch.autograd.Function):
    """The rows ``found`` [..., d], with zeros where ``elsewhere`` [...], written where ``operation`` takes them."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, elsewhere: Tensor, operation: str, comm: Communicator) -> Tensor:
        ctx.save_for_backward(elsewhere)
        return new_operand(operation, found.shape, found, comm).copy_(found).masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (elsewhere,) = ctx.saved_tensors
        return grads[0].masked_fill(elsewhere.unsqueeze(-1), 0.0), None, None, None


def looked_up(rows: Tensor, table: Tensor) -> Tensor:
    """Rows number ``rows``, int64 [...], of ``table`` [n, d]: [..., d]. In half precision the gradient is accurate."""
    if table.is_cpu and table.dtype in HALF_TYPES:
        return _HostHalfLookup.apply(rows, table)  # type: ignore[no-untyped-call, no-any-return]
    return F.embedding(rows, table)


class _HostHalfLookup(torch.autograd.Function):
    """torch's embedding in half precision, with the gradient of a row added up in float32.

    On the host torch adds it up in half precision: a number that is added to a bfloat16 sum is lost once the sum is 256
    times as large, which happens to rows that many tokens read.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return F.embedding(rows, table)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (rows,) = ctx.saved_tensors
        sums = grads[0].new_zeros(ctx.shape, dtype=torch.float32)
        sums.index_add_(0, rows.reshape(-1), grads[0].reshape(-1, ctx.shape[1]).float())
        return None, sums.to(grads[0].dtype)
