"""A linear operator and the transposed one as a pair, each of which is the other's backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

#: an operator of which autograd sees nothing
Operator = Callable[[Tensor], Tensor]
#: an operator and the transposed one
Pair = tuple[Operator, Operator]


def apply_pair(
    x: Tensor, forward: Operator, back: Operator, tie: Tensor | None = None, *, again: Operator | None = None
) -> Tensor:
    """Return ``forward(x)``, whose backward is ``back``. Every rank that takes part must run the backward.

    It may be differentiated any number of times, in forward mode, and under ``torch.func``. tie: see `_Linear`. again:
    the backward of ``back``, where that is not ``forward``.
    """
    operators = forward, back, again or forward
    try:
        out: Tensor = _Linear.apply(x, tie, *operators)[0]  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not refused_by_torch_func(error):
            raise
        out = _Transformed.apply(x, tie, *operators)[0]  # type: ignore[no-untyped-call]
    return out


def refused_by_torch_func(error: RuntimeError) -> bool:
    """Whether ``torch.func`` refused a Function, of which nothing has run then: it takes none with a ctx in forward."""
    return "setup_context" in str(error)


def followed() -> bool:
    """Whether anything follows what is computed: autograd, forward mode or ``torch.func``."""
    return (
        torch.is_grad_enabled() or forward_ad._current_level >= 0 or bool(torch._C._are_functorch_transforms_active())
    )


class _Linear(torch.autograd.Function):
    """Applies one operator of a pair; the backward applies the other one, in a way that differentiates again.

    The second output is the *tie*: an empty tensor whose graph leads here. A backward that will be differentiated
    (``create_graph=True``) gives it to the transposed operator as an input. So that one's result requires grad on every
    rank, and a second backward runs both operators on every rank, also where the loss is linear and the gradient has
    no graph of its own. Otherwise the ranks whose loss is not linear would wait for the others. It costs no message.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tie: Tensor | None, *operators: Operator) -> tuple[Tensor, Tensor]:
        ctx.operators, own_tie, out = operators, x.new_empty(0), operators[0](x)
        ctx.set_materialize_grads(False)  # zeros for the tie would be made in each backward
        ctx.save_for_backward(own_tie)
        ctx.shapes = x.shape, out.shape
        return out, own_tie

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, back, again = ctx.operators
        grad = grads[0]
        if grad is None:  # of the tie alone
            grad = ctx.saved_tensors[0].new_zeros(ctx.shapes[1])
        if not followed():
            return back(grad), None, None, None, None
        return apply_pair(grad, back, again, ctx.saved_tensors[0], again=back), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        tangent, tied, *_ = tangents
        if tangent is None:
            assert tied is not None
            tangent = tied.new_zeros(ctx.shapes[0])
        return apply_pair(tangent, *ctx.operators[:2], again=ctx.operators[2]), tangent.new_empty(0)


class _Transformed(torch.autograd.Function):
    """`_Linear` in the form that ``torch.func`` takes, of which each call costs 20 us more."""

    @staticmethod
    def forward(x: Tensor, tie: Tensor | None, *operators: Operator) -> tuple[Tensor, Tensor]:
        return operators[0](x), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.operators = inputs[2:]
        ctx.save_for_backward(output[1])

    backward, jvp = _Linear.backward, _Linear.jvp

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        """Apply the operator to one element of the batch after the other: each has its own messages."""

        def element(n: int) -> tuple[Any, ...]:
            return tuple(x if dim is None else x.select(dim, n) for x, dim in zip(inputs, in_dims, strict=True))

        found = [_Transformed.apply(*element(n)) for n in range(info.batch_size)]  # type: ignore[no-untyped-call]
        return tuple(torch.stack(one) for one in zip(*found, strict=True)), (0, 0)
