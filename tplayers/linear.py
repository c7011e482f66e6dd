"""Linear layers that are split by columns, by rows, or not (paper, section 3, equations 2 and 3, Figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import Communicator, Stream
from commengine.compiled_ops import all_gather_into_, all_reduce_, reduce_scatter_into_

from .autocast import lowered
from .canonical.products import ColumnWeight, columns, replicated, rows
from .canonical.shards import CanonicalShards, stacked, unstacked
from .derivatives import one_derivative
from .placement import Constant, Normal, PaddedFeatures, Placement, add_parameter, require_divisible
from .products import linear_product, row_parallel_product
from .regions import (
    communicates,
    gather_from_tensor_parallel_region,
    new_whole,
    product_for,
    scatter_to_tensor_parallel_region,
)

DEFAULT_INIT = Normal(0.02)


class ColumnParallelLinear(nn.Module):
    """Y = X A^T + b with A split by output features: A = [A_1; ...; A_p], rank i computes Y_i = X A_i^T + b_i.

    in_features, out_features: of the whole layer. ``comm.size`` must divide out_features (else ValueError).
    comm: the tensor group. gather_output: return the whole Y instead of this rank's part.
    blocks: the output features are this many equal blocks, and each block is split over the ranks (3 for a fused QKV).
    padding: of each block; its zeros are in the parts, not in the global tensors.
    init: initial values of the weight; the bias starts at 0. Call `tplayers.initialize` on the root module.
    sequence_parallel: x is this rank's sequence shard along dim 0 (Korthikanti et al. 2022, section 4.2.2).
    overlap_stream: a stream of ``comm`` on which the backward communicates while it computes
        (`column_parallel_linear`).
    packed: a copy of the weight by `pack`, which products without a backward may use; None for none.
    canonical: the shards in which the layer computes, or None (`tplayers.use_canonical_shards`). `shards` then gives
        its output without putting the shards side by side.

    forward: x [..., in_features], equal on all ranks -> [..., out_features / comm.size] (or [..., out_features]).
    One all-reduce of x's gradient backward (f).
    With sequence_parallel: x [s / comm.size, ..., in_features] -> [s, ..., out_features / comm.size]. One all-gather of
    x forward; backward one more all-gather of x, and one reduce-scatter of its gradient.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    packed: Tensor | None = None
    canonical: CanonicalShards | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        gather_output: bool = False,
        *,
        blocks: int = 1,
        padding: PaddedFeatures | None = None,
        sequence_parallel: bool = False,
        overlap_stream: Stream | None = None,
        init: Normal | Constant = DEFAULT_INIT,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        block = out_features // blocks
        filled = PaddedFeatures((block,), (block,)) if padding is None else padding
        require_divisible(comm.size, out_features=filled.total)
        if gather_output and blocks > 1:
            raise ValueError("gather_output needs blocks=1: the gathered parts would interleave the blocks")
        self.comm = comm
        self.gather_output = gather_output
        self.blocks = blocks
        self.canonical_sizes = {"out_features": filled.total}
        self.sequence_parallel = sequence_parallel
        self.overlap_stream = overlap_stream
        split: dict[str, Any] = {"dim": 1, "index": comm.rank, "count": comm.size}
        view, more = (blocks, *filled.sizes), (blocks, *filled.padded)
        weight = Placement(
            (out_features, in_features), init, view=(*view, in_features), padded=(*more, in_features), **split
        )
        add_parameter(self, "weight", weight, dtype)
        if bias:
            add_parameter(self, "bias", Placement((out_features,), view=view, padded=more, **split), dtype)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        if self.canonical is not None:
            y = unstacked(self.shards(x))
            return gather_from_tensor_parallel_region(y, self.comm) if self.gather_output else y
        y = column_parallel_linear(
            x, self.weight, self.bias, self.comm,
            sequence_parallel=self.sequence_parallel, overlap_stream=self.overlap_stream, packed=self.packed,
        )  # fmt: skip
        return gather_from_tensor_parallel_region(y, self.comm) if self.gather_output else y

    def shards(self, x: Tensor) -> Tensor:
        """The canonical shards of the output, [blocks * own, ..., out_features / (blocks * C)]."""
        assert self.canonical is not None
        (y,) = canonical_columns(x, [self], self.canonical)
        return y


class RowParallelLinear(nn.Module):
    """Y = X A^T + b with A split by input features: rank i computes X_i A_i^T, g sums, then b is added once.

    in_features, out_features: of the whole layer. ``comm.size`` must divide in_features (else ValueError).
    padding: of the input features; as in `ColumnParallelLinear`, and x has them, too.
    input_is_parallel: x is already this rank's part. If False, x is equal on all ranks, and the layer splits it.
    sequence_parallel: return this rank's sequence shard along dim 0, which ``comm.size`` must divide (else
        ValueError). The bias is added to the shard, so its gradient is partial (`Placement`).
    packed: as in `ColumnParallelLinear`.
    canonical: as in `ColumnParallelLinear`; `of_shards` takes the shards of x as they are. split_by_columns: the
        weights that then lie transposed.

    forward: x [..., in_features / comm.size] (or [..., in_features]) -> [..., out_features], equal on all ranks.
    One all-reduce of the output forward (g).
    With sequence_parallel: x [s, ..., in_features / comm.size] -> [s / comm.size, ..., out_features]. One
    reduce-scatter of the output forward, one all-gather of its gradient backward.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    packed: Tensor | None = None
    canonical: CanonicalShards | None = None
    split_by_columns = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        input_is_parallel: bool = True,
        *,
        padding: PaddedFeatures | None = None,
        sequence_parallel: bool = False,
        init: Normal | Constant = DEFAULT_INIT,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        filled = PaddedFeatures((in_features,), (in_features,)) if padding is None else padding
        require_divisible(comm.size, in_features=filled.total)
        self.comm = comm
        self.input_is_parallel = input_is_parallel
        self.canonical_sizes = {"in_features": filled.total}
        self.sequence_parallel = sequence_parallel
        view, more = (out_features, *filled.sizes), (out_features, *filled.padded)
        split: dict[str, Any] = {"dim": 1, "index": comm.rank, "count": comm.size}
        add_parameter(
            self, "weight", Placement((out_features, in_features), init, view=view, padded=more, **split), dtype
        )
        if bias:
            # The bias is replicated and added after the sum. Every rank therefore computes its whole gradient without
            # communication, or with sequence_parallel the part of its sequence shard.
            add_parameter(self, "bias", Placement((out_features,), partial=sequence_parallel), dtype)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_tensor_parallel_region(x, self.comm)
        if self.canonical is not None:
            return self.of_shards(stacked(x, self.canonical.own))
        y = row_parallel_product(x, self.weight, self.comm, self.sequence_parallel, self.packed)
        return y if self.bias is None else y.add_(self.bias)

    def of_shards(self, x: Tensor) -> Tensor:
        """The output for the canonical shards of the input, [own, ..., in_features / C]."""
        assert self.canonical is not None
        return rows(x, self.weight, self.bias, self.canonical, split=self.sequence_parallel)


class ReplicatedLinear(nn.Module):
    """Y = X A^T + b, of which every rank holds the whole weight. It communicates nothing.

    sequence_parallel: x is this rank's sequence shard, so the parameters' gradients are partial (`Placement`).

    forward: x [..., in_features] -> [..., out_features].
    """

    weight: nn.Parameter
    bias: nn.Parameter
    canonical: CanonicalShards | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        init: Normal | Constant = DEFAULT_INIT,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        weight = Placement((out_features, in_features), init, partial=sequence_parallel)
        add_parameter(self, "weight", weight, dtype)
        add_parameter(self, "bias", Placement((out_features,), partial=sequence_parallel), dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.canonical is not None:
            return replicated(x, self.weight, self.bias, self.canonical, split=self.sequence_parallel)
        return F.linear(x, self.weight, self.bias)


def canonical_columns(x: Tensor, layers: Sequence[ColumnParallelLinear], shards: CanonicalShards) -> tuple[Tensor, ...]:
    """`ColumnParallelLinear.shards` of each of ``layers``, which communicate as one. They are alike but for weights."""
    first = layers[0]
    weights = [ColumnWeight(layer.weight, layer.bias, layer.blocks) for layer in layers]
    return columns(x, weights, shards, split=first.sequence_parallel, stream=first.overlap_stream)


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    comm: Communicator,
    *,
    sequence_parallel: bool = False,
    overlap_stream: Stream | None = None,
    packed: Tensor | None = None,
) -> Tensor:
    """The region f and then x A_i^T + b_i, as one autograd Function that reduces the gradient of x in place.

    x [..., in], equal on all ranks of ``comm``; weight [out / comm.size, in], bias [out / comm.size], this rank's
    rows. One all-reduce of x's gradient backward. Every rank must run the backward.

    sequence_parallel: x [s / comm.size, ..., in] is this rank's shard along dim 0. It is gathered for the product and
        gathered again in the backward, so that only the shard is kept in between.
    overlap_stream: a stream of ``comm``. On it x's gradient is reduced while the gradients of weight and bias are
        computed, and the shard is gathered while x's gradient is computed. Without it the same collectives run in the
        same order, and the computation waits for each of them. A compiled backward does not use it.
    packed: a copy of ``weight`` by `pack`, which a product without a backward may use.
    """
    if _needs_no_function(comm, sequence_parallel):
        return linear_product(x, weight, bias, packed)
    (y,) = column_parallel_linears(
        x, [(weight, bias, packed)], comm, sequence_parallel=sequence_parallel, overlap_stream=overlap_stream
    )
    return y


def column_parallel_linears(
    x: Tensor,
    layers: Sequence[tuple[Tensor, Tensor | None, Tensor | None]],
    comm: Communicator,
    *,
    sequence_parallel: bool = False,
    overlap_stream: Stream | None = None,
) -> tuple[Tensor, ...]:
    """The region f once, and then `column_parallel_linear` of x with weight, bias and packed weight of each of
    ``layers``.

    The layers communicate as one: x is gathered once, and their gradients of x are added up before the one all-reduce.
    """
    if _needs_no_function(comm, sequence_parallel):
        return tuple(linear_product(x, *layer) for layer in layers)
    x, *tensors = lowered(x, *(tensor for weight, bias, _ in layers for tensor in (weight, bias)))
    return _ColumnParallelLinears.apply(x, comm, sequence_parallel, overlap_stream, *tensors)  # type: ignore[no-untyped-call, no-any-return]


def _needs_no_function(comm: Communicator, sequence_parallel: bool) -> bool:
    """Whether column-parallel layers communicate nothing, because there is no backward. A Function costs 20 us."""
    return not communicates(comm) or not (sequence_parallel or torch.is_grad_enabled())


class _ColumnParallelLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Communicator,
        sequence_parallel: bool,
        stream: Stream | None,
        *layers: Tensor | None,  # the weight and the bias of each
    ) -> tuple[Tensor, ...]:
        weights, biases = layers[::2], layers[1::2]
        if sequence_parallel:
            x = x.contiguous()
        ctx.save_for_backward(x, *weights)
        ctx.comm, ctx.sequence_parallel, ctx.stream = comm, sequence_parallel, stream
        if sequence_parallel:
            whole = new_whole(x, comm)
            all_gather_into_(whole, x, comm)
            x = whole
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        comm, stream = ctx.comm, ctx.stream
        need_x, need_layers = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        grad_x = gathering = reducing = None
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        whole = x
        if ctx.sequence_parallel and any(need_layers[::2]):
            whole = new_whole(x, comm)
            gathering = all_gather_into_(whole, x, comm, stream)
        if need_x:
            total = product_for("reduce_scatter" if ctx.sequence_parallel else "all_reduce", grads[0], weights[0], comm)
            for more, weight in zip(rows[1:], weights[1:], strict=True):
                total.view(-1, total.shape[-1]).addmm_(more, weight)
            grad_x = total
            if ctx.sequence_parallel:
                partial, grad_x = grad_x, torch.empty_like(x)
                reducing = reduce_scatter_into_(grad_x, partial, comm, stream)
            else:
                reducing = all_reduce_(grad_x, comm, stream=stream)  # in place: nothing else holds this product
        found: list[Tensor | None] = []
        for mine, need_weight, need_bias in zip(rows, need_layers[::2], need_layers[1::2], strict=True):
            if need_weight and gathering is not None:
                gathering.wait()
                gathering = None
            found.append(mine.t() @ whole.reshape(-1, whole.shape[-1]) if need_weight else None)
            found.append(mine.sum(dim=0) if need_bias else None)
        if reducing is not None:
            reducing.wait()
        return grad_x, None, None, None, *found
