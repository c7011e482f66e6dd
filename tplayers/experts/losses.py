"""RouterLosses: what the routers of a model add to its loss, so that experts get tokens evenly and logits stay small.

Both are sums over sequences. A loss of a micro-batch's or a rank's tokens together would be another objective at each
layout, because a product of means is not linear in the batch (Qiu et al. 2025, arXiv 2501.11873).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commengine import Communicator

from .routing import Routing


@dataclass(frozen=True)
class Collected:
    """What the layers add in a block of `RouterLosses.collected`, one after the other.

    losses: of each layer both, [2], with their coefficients, if one of these is not 0: sums over the sequences, of this
    rank's tokens. tokens: the rows of each expert that come from this rank's tokens.
    """

    losses: list[Tensor] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)


class RouterLosses:
    """The coefficients of both losses, and how they enter a backward. All layers of a model share one.

    balance: of E / k sum_i f_i P_i, which is 1 if all is even. f_i is the share of a sequence's tokens that have expert
    i among their k, and P_i the mean of its probability over the sequence (Fedus et al. 2022, arXiv 2101.03961,
    equations 4 to 6, by sequence, and divided by k as in Megatron-LM). f has no gradient.
    z: of the mean over a sequence of logsumexp(logits)^2 (Zoph et al. 2022, arXiv 2202.08906, equation 5).

    scale: what the losses of one sequence count in a backward: the factor of the whole loss over the sequences of the
    global batch. 0, the initial value: they have no gradients, and cost nothing.
    """

    names = ("load_balancing_loss", "z_loss")

    def __init__(self, balance: float = 0.0, z: float = 0.0) -> None:
        self.balance, self.z = balance, z
        self.scale = 0.0
        self._collected: Collected | None = None

    @contextlib.contextmanager
    def counted(self, scale: float) -> Iterator[None]:
        """A block in which ``scale`` has this value. Its passes have their backwards in it, too."""
        before, self.scale = self.scale, scale
        try:
            yield
        finally:
            self.scale = before

    @contextlib.contextmanager
    def collected(self) -> Iterator[Collected]:
        """A block in which each layer adds its losses and its tokens. A recomputation outside of it adds nothing."""
        before, self._collected = self._collected, Collected()
        try:
            yield self._collected
        finally:
            self._collected = before

    def count(self, tokens: tuple[int, ...]) -> None:
        """Tell the block of `collected`, if there is one, the rows of each expert of a layer."""
        if self._collected is not None:
            self._collected.tokens.append(tokens)

    def attach(self, routing: Routing, positions: int, b: int, shared: Sequence[Communicator]) -> Tensor:
        """The weights of ``routing``. A backward through them adds the gradients of this layer's losses.

        routing: of [positions, b] tokens, in row-major order; both may be 0. shared: the groups of which each rank has
        a part of each sequence's positions; collective over them.
        """
        wanted = self._collected is not None or (self.scale != 0 and torch.is_grad_enabled())
        if not wanted or not (self.balance or self.z):
            return routing.weights
        coefficients = (self.balance, self.z)
        parts = [one(routing, positions, b, shared).sum() for one in (balance_losses, z_losses)]
        terms = torch.stack([part * factor for part, factor in zip(parts, coefficients, strict=True)])
        if self._collected is not None:
            self._collected.losses.append(terms.detach())
        if self.scale == 0 or not torch.is_grad_enabled():
            return routing.weights
        weights: Tensor = _Attached.apply(routing.weights, terms.sum(), self.scale)  # type: ignore[no-untyped-call]
        return weights


def balance_losses(routing: Routing, positions: int, b: int, shared: Sequence[Communicator] = ()) -> Tensor:
    """The share of this rank's tokens in E / k sum_i f_i P_i of each sequence: [b]. Arguments as in `attach`."""
    experts, k = routing.experts, routing.experts.shape[1]
    tokens, count = positions, routing.num_experts
    sequence = torch.arange(b, dtype=torch.int64, device=experts.device).repeat(positions)
    counts = torch.bincount((sequence.unsqueeze(1) * count + experts).view(-1), minlength=b * count)
    for group in shared:
        if group.size > 1:
            group.all_reduce(counts)
            tokens *= group.size
    sums = routing.probabilities.view(positions, b, count).sum(dim=0)
    return (counts.view(b, count).to(sums.dtype) * sums).sum(dim=1) * (count / (k * max(tokens, 1) ** 2))


def z_losses(routing: Routing, positions: int, b: int, shared: Sequence[Communicator] = ()) -> Tensor:
    """The share of this rank's tokens in the mean of logsumexp(logits)^2 of each sequence: [b]."""
    tokens = positions
    for group in shared:
        tokens *= group.size
    return routing.logits.logsumexp(dim=-1).square().view(positions, b).sum(dim=0) / max(tokens, 1)


class _Attached(torch.autograd.Function):
    """``weights``. The backward gives ``loss``, a scalar, the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.of = scale, (loss.dtype, loss.device)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype, device = ctx.of
        return grads[0], torch.full((), ctx.scale, dtype=dtype, device=device), None
