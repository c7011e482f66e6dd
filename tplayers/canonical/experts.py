"""A mixture of experts with the same bits at every layout: one product for each sample and expert.

Each rank of the tensor group routes all rows of its samples. An expert computes the rows of one sample at a time, as an
MLP in canonical shards, and its result is whole on every rank before the k results of a token are added up.

The rank that holds an expert gets its rows from all ranks of the expert group at once. The gradients of their samples
are added up apart, as they are where each of these ranks has all experts. Therefore an expert has a *twin* for every
rank but the first: a module in the same memory, of which the parameters get the gradients of that rank's samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tplayers.experts.moe import MoE
from tplayers.regions import gather_from_tensor_parallel_region, scatter_to_tensor_parallel_region

from . import pointwise
from .products import replicated
from .shards import CanonicalShards


class CanonicalMoE(MoE):
    """`MoE` in canonical shards."""

    canonical: CanonicalShards
    twins: list[dict[int, nn.Module]]  # for each rank of the expert group but the first, by the number of an expert

    def _logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """The logits of all rows of the sequence."""
        mine = replicated(x, weight, None, self.canonical, split=self.sequence_parallel)
        return gather_from_tensor_parallel_region(mine, self.comm, 0) if self.sequence_parallel else mine

    def _of_experts(self, x: Tensor) -> Tensor:
        routing, split, k = self._route(x, self._logits), self.sequence_parallel, self.options.router_topk
        whole = gather_from_tensor_parallel_region(x, self.comm, 0) if split else x
        s, b, _ = whole.shape
        weights = routing.weights if self.losses is None else self.losses.attach(routing, s, b, ())
        y = self._combined(whole, routing.experts.view(s, b, k), weights.view(s, b, k))
        return scatter_to_tensor_parallel_region(y, self.comm, 0) if split else y

    def _gate(self, x: Tensor) -> Tensor:
        return _Sigmoid.apply(replicated(x, self.shared_gate, None, self.canonical, split=self.sequence_parallel))  # type: ignore[no-untyped-call, no-any-return]

    def _results(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        of_ranks = [{number: self.experts[number] for number in self.numbers}, *self.twins]
        experts = (of_rank[number] for of_rank in of_ranks for number in self.numbers)
        return [expert(rows) for expert, rows in zip(experts, pieces, strict=False)]


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = pointwise.pointwise(torch.sigmoid, x)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        return pointwise.pointwise(torch.ops.aten.sigmoid_backward, grads[0], found)


def make_twins(moe: CanonicalMoE) -> None:
    """Give the layer its ``twins``, in the memory of its experts as it is now."""
    ranks = 1 if moe.expert_group is None else moe.expert_group.size
    # Not as modules of this one: they have no parameters of their own.
    vars(moe)["twins"] = [{number: _twin(moe.experts[number]) for number in moe.numbers} for _ in range(ranks - 1)]


def _twin(module: nn.Module) -> nn.Module:
    found = copy.copy(module)
    vars(found)["_parameters"] = {
        name: None if one is None else nn.Parameter(one.detach()) for name, one in module._parameters.items()
    }
    vars(found)["_modules"] = {name: None if one is None else _twin(one) for name, one in module._modules.items()}
    return found


def twins_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The twins of each parameter that has some, by its name, in the order of the ranks."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, twin in _twins(model):
        found.setdefault(name, []).append(twin)
    return found


def _twins(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, layer in model.named_modules():
        for of_rank in layer.twins if isinstance(layer, CanonicalMoE) else ():
            for number, twin in of_rank.items():
                for name, parameter in twin.named_parameters():
                    yield f"{path}.experts.{number}.{name}".lstrip("."), parameter
