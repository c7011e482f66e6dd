"""MoE: experts in place of the feed-forward block, over the ranks of a tensor group and of an expert group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import Communicator
from commengine.compiled_ops import all_gathered
from tplayers.linear import DEFAULT_INIT
from tplayers.mlp import MLP, Gelu, SwiGLU
from tplayers.movement.operators import exchanged_rows
from tplayers.placement import Normal, Placement, add_parameter
from tplayers.regions import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from .dispatch import Dispatch, exchanged_counts
from .losses import RouterLosses
from .routing import Routing, route


@dataclass(frozen=True)
class ExpertOptions:
    """The experts of a layer. The names are those of Megatron-LM's options, without "moe".

    num_experts, router_topk: E, and the k experts of each token.
    ffn_hidden_size: the width of an expert. swiglu, gelu: its activation, as in `SwiGLU` and `MLP`. It has no biases.
    router_pre_softmax: as in `route`.
    shared_expert_size: the width of an expert that all tokens have beside the k; None for none.
    shared_expert_gate: its result is multiplied by sigmoid(x g), with a vector g that is learned.

    Raises ValueError if k is not from 1 to E.
    """

    num_experts: int
    router_topk: int
    ffn_hidden_size: int
    swiglu: bool = True
    gelu: Gelu = "tanh"
    router_pre_softmax: bool = False
    shared_expert_size: int | None = None
    shared_expert_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.router_topk <= self.num_experts:
            raise ValueError(
                f"router_topk={self.router_topk} must be from 1 to num_experts={self.num_experts}: a token has at most "
                "each expert once"
            )
        if self.shared_expert_gate and self.shared_expert_size is None:
            raise ValueError("shared_expert_gate needs a shared expert: shared_expert_size is None")

    def numbers(self, rank: int, size: int) -> range:
        """The experts of a rank of an expert group of ``size`` ranks. Raises ValueError if it does not divide them."""
        if self.num_experts % size:
            fitting = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ValueError(
                f"expert-model-parallel size {size} does not divide num_experts={self.num_experts}; sizes that would "
                f"work: {fitting}"
            )
        each = self.num_experts // size
        return range(rank * each, (rank + 1) * each)


class MoE(nn.Module):
    """A mixture of experts: y = sum over the k experts i of a token of w_i FFN_i(x), and of the shared expert.

    No token is dropped, so the result of a token depends on no other one.

    comm: the tensor group. Each of its ranks has a part of each expert, as of an `MLP`.
    expert_group: ranks with other tokens and the same place in their tensor groups, each of which has the experts
        ``options.numbers(rank, size)``. Tokens travel to their experts and back. None: this rank has all experts. The
        gradient of an expert is that of the tokens of all these ranks. So it is summed over the ranks that have the
        same experts, and the other gradients over all ranks with other tokens.
    losses: of the router (`RouterLosses`), shared by the layers of a model. None: none.
    shared: the groups of which each rank has a part of each sequence, beside ``comm`` with sequence_parallel: the
        context group. They are needed for ``losses`` alone.
    sequence_parallel, init, dtype: as in `ColumnParallelLinear`. output_init: initial values of B, as in `MLP`.
    overlap_stream: of the shared expert.

    forward: x [s, b, hidden_size], equal on all ranks of ``comm`` -> the same. With sequence_parallel: x
    [s / comm.size, b, hidden_size], this rank's sequence shard -> the same. Every rank of all groups must call it and
    run its backward, a rank without tokens (b = 0) too. It does not compile.

    After a call ``counts`` has the rows of each expert that came from this rank's tokens.
    """

    router: nn.Parameter
    shared_gate: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        options: ExpertOptions,
        comm: Communicator,
        *,
        expert_group: Communicator | None = None,
        losses: RouterLosses | None = None,
        shared: Sequence[Communicator] = (),
        output_init: Normal = DEFAULT_INIT,
        **linear: Any,
    ) -> None:
        super().__init__()
        self.comm, self.options, self.losses = comm, options, losses
        self.expert_group = None if expert_group is None or expert_group.size == 1 else expert_group
        self.sequence_parallel: bool = linear.get("sequence_parallel", False)
        self.shared = [*shared, *([comm] if self.sequence_parallel else [])]
        init, dtype = linear.get("init", DEFAULT_INIT), linear.get("dtype")
        of_router = Placement((options.num_experts, hidden_size), init, partial=self.sequence_parallel)
        add_parameter(self, "router", of_router, dtype)
        place = (0, 1) if self.expert_group is None else (self.expert_group.rank, self.expert_group.size)
        self.numbers = options.numbers(*place)

        def expert(width: int, **more: Any) -> MLP | SwiGLU:
            named = {"bias": False, "output_init": output_init, "init": init, "dtype": dtype} | more
            if options.swiglu:
                return SwiGLU(hidden_size, width, comm, **named)
            return MLP(hidden_size, width, comm, gelu=options.gelu, **named)

        # None stands for an expert of another rank, so that the names of parameters have the expert's number.
        self.experts = nn.ModuleList(
            expert(options.ffn_hidden_size) if number in self.numbers else None  # type: ignore[misc]
            for number in range(options.num_experts)
        )
        self.shared_expert: MLP | SwiGLU | None = None
        if options.shared_expert_size is not None:
            self.shared_expert = expert(options.shared_expert_size, **linear)
            if options.shared_expert_gate:
                of_gate = Placement((1, hidden_size), init, partial=self.sequence_parallel)
                add_parameter(self, "shared_gate", of_gate, dtype)
        self.counts: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise NotImplementedError("a mixture of experts does not compile: the rows of an expert depend on the data")
        y = self._of_experts(x)
        if self.shared_expert is not None:
            more: Tensor = self.shared_expert(x)
            if self.options.shared_expert_gate:
                more = self._gate(x) * more
            y = y + more
        return y

    def _gate(self, x: Tensor) -> Tensor:
        """The factor [..., 1] of the shared expert's result."""
        return F.linear(x, self.shared_gate).sigmoid()

    def _route(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Routing:
        k, before = self.options.router_topk, self.options.router_pre_softmax
        return route(x, self.router, k, pre_softmax=before, product=product)

    def _of_experts(self, x: Tensor) -> Tensor:
        """The sum of the results of each token's k experts, of x [s, b, h] or this rank's shard of it."""
        (s, b, _), k, routing = x.shape, self.options.router_topk, self._route(x)
        weights = routing.weights if self.losses is None else self.losses.attach(routing, s, b, self.shared)
        weights, experts = (one.view(s, b, k) for one in (weights, routing.experts))
        if self.sequence_parallel:
            x, weights = (gather_from_sequence_parallel_region(one, self.comm) for one in (x, weights))
            experts, _ = all_gathered(experts.contiguous(), self.comm)
        else:
            x, weights = (copy_to_tensor_parallel_region(one, self.comm) for one in (x, weights))
        y = self._combined(x, experts, weights)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(y, self.comm)
        return reduce_from_tensor_parallel_region(y, self.comm)

    def _combined(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The sums over the k results of each row of x [s, b, h]. experts, weights: [s, b, k]."""
        (s, b, h), k = x.shape, self.options.router_topk
        dispatch = Dispatch.of(experts.reshape(s * b, k), s, b, self.options.num_experts)
        self.counts = dispatch.counts
        if self.losses is not None:
            self.losses.count(dispatch.counts)
        rows = self._through_experts(dispatch.rows(x.reshape(s * b, h)), dispatch.counts)
        return dispatch.combined(rows, weights.reshape(s * b, k)).view(x.shape)

    def _through_experts(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The results of rows that are in the order of their experts, or this rank's summands of them."""
        group = self.expert_group
        if group is None:
            return torch.cat(self._results(torch.split(rows, list(counts))))
        coming = exchanged_counts(counts, group)
        each = len(self.numbers)
        sent = [sum(counts[rank * each : (rank + 1) * each]) for rank in range(group.size)]
        received = [sum(of) for of in coming]
        pieces = torch.split(exchanged_rows(rows, group, sent, received), [count for of in coming for count in of])
        return exchanged_rows(torch.cat(self._results(pieces)), group, received, sent)

    def _results(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The results of rows that come from each rank of the expert group for each of this rank's experts.

        They are in the order of the ranks, and those of a rank in the order of the experts.
        """
        found, each = list(pieces), len(self.numbers)
        for place, number in enumerate(self.numbers):
            expert, rows = self.experts[number], found[place::each]
            assert isinstance(expert, MLP | SwiGLU)
            result = expert.part(rows[0] if len(rows) == 1 else torch.cat(rows))
            found[place::each] = torch.split(result, [len(one) for one in rows])
        return found


def expert_parameters(module: nn.Module) -> frozenset[str]:
    """The names of the parameters of ``module`` of which the ranks of an expert group hold different ones."""
    return frozenset(
        f"{path}.experts.{name}".lstrip(".")
        for path, layer in module.named_modules()
        if isinstance(layer, MoE) and layer.expert_group is not None
        for name, _ in layer.experts.named_parameters()
    )
