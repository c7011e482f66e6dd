"""Dispatch: the rows of tokens in the order of their experts, their way to the ranks of these, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commengine import Communicator
from tplayers.functions import PlainForm, differentiable, in_forward_dtypes


@dataclass(frozen=True)
class Dispatch:
    """Where the k rows of each of n tokens stand among n k rows that are in the order of their experts.

    Rows of one expert are in the order of their samples, and these in the order of positions.

    tokens: int64 [n k], the token of each row. places: int64 [n, k], the row of each token and number of its experts.
    counts: the rows of each expert.
    """

    tokens: Tensor
    places: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, experts: Tensor, positions: int, b: int, num_experts: int) -> Dispatch:
        """experts: int64 [n, k] of [positions, b] tokens, in row-major order. On a device it waits for the device."""
        n, k = experts.shape
        samples = torch.arange(b, dtype=torch.int64, device=experts.device).repeat(positions)
        rows = (experts * b + samples.unsqueeze(1)).view(-1).argsort(stable=True)
        places = torch.empty_like(rows)
        places[rows] = torch.arange(n * k, dtype=torch.int64, device=rows.device)
        counts = torch.bincount(experts.view(-1), minlength=num_experts)
        return cls(rows // k, places.view(n, k), tuple(counts.tolist()))

    def rows(self, x: Tensor) -> Tensor:
        """The rows [n k, h] of x [n, h]."""
        found: Tensor = _Rows.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def combined(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[n, h]: the sum of each token's k rows, times its weights [n, k], in the order of k."""
        found: Tensor = _Combined.apply(rows, weights, self)  # type: ignore[no-untyped-call]
        return found


class _Rows(torch.autograd.Function):
    """`Dispatch.rows`. The gradients of a token's k rows are added up in the order of k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return x.index_select(0, dispatch.tokens)

    @staticmethod
    @in_forward_dtypes
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, *others = ctx.dispatch.places.unbind(1)
        found = grads[0].index_select(0, first)
        for places in others:
            found += grads[0].index_select(0, places)
        return found, None


def _plain_combined(ctx: Any) -> PlainForm:
    places = ctx.dispatch.places

    def plain(rows: Tensor, weights: Tensor) -> tuple[Tensor]:
        factors = weights.to(rows.dtype)
        terms = [rows[places[:, number]] * factors[:, number : number + 1] for number in range(places.shape[1])]
        return (sum(terms[1:], start=terms[0]),)

    return plain, [*ctx.saved_tensors, None]


class _Combined(torch.autograd.Function):
    """`Dispatch.combined`. It keeps the rows and the weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        ctx.save_for_backward(rows, weights)
        factors = weights.to(rows.dtype)
        found = rows.index_select(0, dispatch.places[:, 0]).mul_(factors[:, :1])
        for number in range(1, factors.shape[1]):
            found.addcmul_(rows.index_select(0, dispatch.places[:, number]), factors[:, number : number + 1])
        return found

    @staticmethod
    @differentiable(_plain_combined)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        (grad,), dispatch = grads, ctx.dispatch
        of_rows = grad.index_select(0, dispatch.tokens)
        of_weights = (of_rows * rows).sum(dim=1, dtype=weights.dtype)
        in_rows = torch.empty_like(of_weights).to(rows.dtype)
        in_rows[dispatch.places] = weights.to(rows.dtype)
        return of_rows.mul_(in_rows.unsqueeze(1)), of_weights[dispatch.places], None


def exchanged_counts(counts: Sequence[int], group: Communicator) -> list[list[int]]:
    """[rank][expert]: the rows that each rank has for this rank's experts.

    counts: this rank's rows of all experts, equally many of which each rank of ``group`` has. Collective.
    """
    sent = torch.tensor(counts, dtype=torch.int64, device="cpu")
    received = torch.empty_like(sent)
    group.all_to_all(received, sent)
    found: list[list[int]] = received.view(group.size, -1).tolist()
    return found
