"""Linear layers that are split by columns, by rows, or not (paper, section 3, equations 2 and 3, Figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import Communicator, Stream
from commengine.compiled_ops import all_gathered

from .adjoint_pair import with_tie, zeros_for_none
from .functions import PlainForm, differentiable, lowered
from .placement import Constant, Normal, PaddedFeatures, Placement, add_parameter, require_divisible
from .regions import (
    communicates,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_own_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    reduced_rows,
)

DEFAULT_INIT = Normal(0.02)


class LinearOptions(TypedDict, total=False):
    """The options of a `SplitLayer`, and of layers that are made of them and hand them on."""

    sequence_parallel: bool
    overlap_stream: Stream | None
    init: Normal | Constant
    dtype: torch.dtype | None


class SplitLayer(nn.Module):
    """A layer with a weight of which each rank of the tensor group ``comm`` holds a part.

    bias: None for a layer without one. init: the initial values of the weight. The other options are those of
    `ColumnParallelLinear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        comm: Communicator,
        weight: Placement,
        bias: Placement | None,
        *,
        sequence_parallel: bool = False,
        overlap_stream: Stream | None = None,
        init: Normal | Constant = DEFAULT_INIT,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.sequence_parallel = sequence_parallel
        self.overlap_stream = overlap_stream
        add_parameter(self, "weight", replace(weight, init=init), dtype)
        add_parameter(self, "bias", bias, dtype)


class ColumnParallelLinear(SplitLayer):
    """Y = X A^T + b with A split by output features: A = [A_1; ...; A_p], rank i computes Y_i = X A_i^T + b_i.

    in_features, out_features: of the whole layer.
    comm: the tensor group.
    blocks: the output features are this many equal blocks, and each block is split over the ranks (3 for a fused QKV).
        ``comm.size`` must divide the features of a block, padding included (else ValueError).
    padding: of each block; its zeros are in the parts, not in the global tensors.
    init: initial values of the weight; the bias starts at 0. Call `tplayers.initialize` on the root module.
    dtype: of the parameters, which x has, too, outside of autocast; None for torch's default.
    sequence_parallel: x is this rank's sequence shard along dim 0 (Korthikanti et al. 2022, section 4.2.2).
    overlap_stream: a stream of ``comm`` on which the backward communicates while it computes
        (`column_parallel_linear`).

    forward: x [..., in_features], equal on all ranks -> [..., out_features / comm.size]. Every rank calls it, and runs
    its backward. One all-reduce of x's gradient backward (f).
    With sequence_parallel: x [s / comm.size, ..., in_features] -> [s, ..., out_features / comm.size]. One all-gather of
    x forward; backward one more all-gather of x, and one reduce-scatter of its gradient.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        *,
        blocks: int = 1,
        padding: PaddedFeatures | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        block = out_features // blocks
        filled = PaddedFeatures((block,), (block,)) if padding is None else padding
        require_divisible(comm.size, **{"out_features" if blocks == 1 else f"out_features / {blocks}": filled.total})
        split: dict[str, Any] = {"dim": 1, "index": comm.rank, "count": comm.size}
        view, more = (blocks, *filled.sizes), (blocks, *filled.padded)
        weight = Placement((out_features, in_features), view=(*view, in_features), padded=(*more, in_features), **split)
        of_bias = Placement((out_features,), view=view, padded=more, **split)
        super().__init__(comm, weight, of_bias if bias else None, **options)
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel_linear(x, self, self.bias)


class RowParallelLinear(SplitLayer):
    """Y = X A^T + b with A split by input features: rank i computes X_i A_i^T, g sums, then b is added once.

    in_features, out_features: of the whole layer. ``comm.size`` must divide in_features (else ValueError).
    padding: of the input features; as in `ColumnParallelLinear`, and x has them, too.
    sequence_parallel: return this rank's sequence shard along dim 0, which ``comm.size`` must divide (else
        ValueError). The bias is added to the shard, so its gradient is partial (`Placement`).
    overlap_stream: not used, because this layer computes nothing while it communicates.

    forward: x [..., in_features / comm.size], this rank's part -> [..., out_features], equal on all ranks.
    One all-reduce of the output forward (g).
    With sequence_parallel: x [s, ..., in_features / comm.size] -> [s / comm.size, ..., out_features]. One
    reduce-scatter of the output forward, one all-gather of its gradient backward.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        *,
        padding: PaddedFeatures | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        filled = PaddedFeatures((in_features,), (in_features,)) if padding is None else padding
        require_divisible(comm.size, in_features=filled.total)
        view, more = (out_features, *filled.sizes), (out_features, *filled.padded)
        weight = Placement((out_features, in_features), view=view, padded=more, dim=1, index=comm.rank, count=comm.size)
        # The bias is replicated and added after the sum. Every rank therefore computes its whole gradient without
        # communication, or with sequence_parallel the part of its sequence shard.
        of_bias = Placement((out_features,), partial=options.get("sequence_parallel", False))
        super().__init__(comm, weight, of_bias if bias else None, **options)

    def forward(self, x: Tensor) -> Tensor:
        # The product and its sum are two Functions: a recomputation then ends before the sum.
        y = F.linear(x, self.weight)
        if self.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(y, self.comm)
        else:
            y = reduce_own_from_tensor_parallel_region(y, self.comm)
        return y if self.bias is None else y.add_(self.bias)


class ReplicatedLinear(nn.Module):
    """Y = X A^T + b, of which every rank holds the whole weight. It communicates nothing.

    sequence_parallel: x is this rank's sequence shard, so the parameters' gradients are partial (`Placement`).

    forward: x [..., in_features] -> [..., out_features].
    """

    weight: nn.Parameter
    bias: nn.Parameter

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
        return F.linear(x, self.weight, self.bias)


def column_parallel_linear(x: Tensor, layer: Any, bias: Tensor | None) -> Tensor:
    """The region f and then x A_i^T + b_i, as one autograd Function that reduces the gradient of x in place.

    x [..., in], equal on all ranks of ``layer.comm``; ``layer.weight`` [out / comm.size, in], bias [out / comm.size],
    this rank's rows. One all-reduce of x's gradient backward. Every rank must run the backward.

    With ``layer.sequence_parallel`` x [s / comm.size, ..., in] is this rank's shard along dim 0. It is gathered for the
    product and gathered again in the backward, so that only the shard is kept in between.
    ``layer.overlap_stream`` is a stream of the group, or None. On it x's gradient is reduced while the gradients of
    weight and bias are computed, and the shard is gathered while x's gradient is computed. Without it the same
    collectives run in the same order, and the computation waits for each of them. A compiled backward does not use it.
    """
    if _needs_no_function(layer):
        return F.linear(x, layer.weight, bias)
    (y,) = column_parallel_products(
        x, layer.comm, layer.sequence_parallel, layer.overlap_stream, Products(), layer.weight, bias
    )
    return y


def columns_together(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """The outputs of ``layers``, which are alike but for their weights, for one x. The layers communicate as one.

    x is gathered once, and the layers' gradients of x are added up before the one all-reduce.
    """
    first = layers[0]
    if _needs_no_function(first):
        return tuple(layer.forward(x) for layer in layers)
    tensors = (tensor for layer in layers for tensor in (layer.weight, layer.bias))
    return column_parallel_products(x, first.comm, first.sequence_parallel, first.overlap_stream, Products(), *tensors)


def _needs_no_function(layer: Any) -> bool:
    """Whether ``layer`` communicates nothing, because there is no backward. A Function costs 20 us."""
    return not communicates(layer.comm) or not (layer.sequence_parallel or torch.is_grad_enabled())


class Products:
    """The products of column-parallel layers: of rows x [n, in] with weights [out, in]."""

    def rows(self, grad: Tensor) -> Tensor:
        """The gradient of an output in the form in which the methods below take it: [n, out]."""
        return _as_rows(grad)

    def outputs(self, x: Tensor, weights: Sequence[Any], biases: Sequence[Any]) -> tuple[Tensor, ...]:
        """The output of each layer, for x [..., in]."""
        return tuple(map(F.linear, [x] * len(weights), weights, biases))

    def of_input(self, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """The gradient of x [n, in], from those of the outputs of all layers."""
        total = torch.mm(grads[0], weights[0])
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            total.addmm_(grad, weight)
        return total

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of a weight."""
        return torch.mm(grad.t(), x)

    def of_bias(self, grad: Tensor) -> Tensor:
        """The gradient of a bias."""
        return grad.sum(dim=0)


def _as_rows(x: Tensor) -> Tensor:
    """``x`` [..., n] as rows [rows, n]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # a view of a small tensor takes 1 us


def column_parallel_products(
    x: Tensor, comm: Communicator, split: bool, stream: Stream | None, products: Products, *layers: Tensor | None
) -> tuple[Tensor, ...]:
    """`column_parallel_linear` for several layers, by these ``products``. layers: the weight and the bias of each."""
    x, *tensors = lowered(x, *layers)
    x = x.contiguous() if split else x  # here, where autograd sees it
    how = comm, split, stream, products
    return _ColumnParallelLinears.apply(x, how, *tensors)[:-1]  # type: ignore[no-untyped-call, no-any-return]


def _plain_columns(ctx: Any) -> PlainForm | None:
    comm, split, _, products = ctx.how
    if type(products) is not Products:
        return None
    x, *weights, tie = ctx.saved_tensors
    enter = gather_from_sequence_parallel_region if split else copy_to_tensor_parallel_region
    # A gradient does not depend on the values of a bias.
    biases = [one.new_zeros(len(one)) if given else None for one, given in zip(weights, ctx.with_bias, strict=True)]
    layers = [one for layer in zip(weights, biases, strict=True) for one in layer]

    def plain(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        whole, tensors = enter(x, comm), iter(given)
        return tuple(
            F.linear(whole, next(tensors), next(tensors) if with_bias else None) for with_bias in ctx.with_bias
        )

    return plain, [x, None, *layers], tie


class _ColumnParallelLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        how: tuple[Communicator, bool, Stream | None, Products],
        *layers: Tensor | None,
    ) -> tuple[Tensor, ...]:
        (comm, split, _, products), weights, biases = how, layers[::2], layers[1::2]
        ctx.how = how
        ctx.with_bias = [bias is not None for bias in biases]
        outputs = products.outputs(all_gathered(x, comm)[0] if split else x, weights, biases)
        return with_tie(ctx, *outputs, saved=(x, *weights))

    @staticmethod
    @zeros_for_none
    @differentiable(_plain_columns)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights, _ = ctx.saved_tensors
        comm, split, stream, products = ctx.how
        need_x, _, *need_layers = ctx.needs_input_grad
        grad_x = gathering = reducing = None
        rows, whole = list(map(products.rows, grads[:-1])), x
        if split and any(need_layers[::2]):
            whole, gathering = all_gathered(x, comm, stream, after=rows)
        if need_x:
            total = products.of_input(rows, weights)
            if x.dim() != 2:
                total = total.view(comm.size * x.shape[0] if split else x.shape[0], *x.shape[1:])
            # In place: nothing else holds this product.
            grad_x, reducing = reduced_rows(total, comm, split, stream, after=(whole,))
        found: list[Tensor | None] = []
        for mine, need_weight, need_bias in zip(rows, need_layers[::2], need_layers[1::2], strict=True):
            if need_weight and gathering is not None:
                gathering.wait()
                gathering = None
            found.append(products.of_weight(mine, _as_rows(whole)) if need_weight else None)
            found.append(products.of_bias(mine) if need_bias else None)
        if reducing is not None:
            reducing.wait()
        return grad_x, None, *found
