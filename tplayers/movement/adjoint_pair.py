"""A linear operator and the transposed one as a pair, each of which is the other's backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: an operator and the transposed one, of which autograd sees nothing
Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def apply_pair(
    x: Tensor, forward: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], tie: Tensor | None = None
) -> Tensor:
    """Return ``forward(x)``, whose backward is ``back``. Every rank that takes part must run the backward.

    It may be differentiated any number of times, and in forward mode. tie: see `_Linear`.
    """
    out: Tensor = _Linear.apply(x, tie, forward, back)[0]  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """Applies one operator of a pair; the backward applies the other one, in a way that differentiates again.

    The second output is the *tie*: an empty tensor whose graph leads here. A backward that will be differentiated
    (``create_graph=True``) gives it to the transposed operator as an input. So that one's result requires grad on every
    rank, and a second backward runs both operators on every rank, also where the loss is linear and the gradient has
    no graph of its own. Otherwise the ranks whose loss is not linear would wait for the others. It costs no message.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tie: Tensor | None, *pair: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        ctx.pair, own_tie = pair, x.new_empty(0)
        ctx.save_for_backward(own_tie)
        return pair[0](x), own_tie

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        forward, back = ctx.pair
        tie = ctx.saved_tensors[0] if torch.is_grad_enabled() else None
        return apply_pair(grads[0], back, forward, tie), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, Tensor]:
        return apply_pair(tangents[0], *ctx.pair), tangents[0].new_empty(0)
