"""A linear operator and the transposed one as a pair, each of which is the other's backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from commengine.torch_private import private

_UNDER_TORCH_FUNC = private("_are_functorch_transforms_active")

#: an operator of which autograd sees nothing
Operator = Callable[[Tensor], Tensor]
#: an operator and the transposed one
Pair = tuple[Operator, Operator]


def apply_pair(
    x: Tensor, forward: Operator, back: Operator, tie: Tensor | None = None, *, again: Operator | None = None
) -> Tensor:
    """Return ``forward(x)``, whose backward is ``back``. Every rank that takes part must run the backward.

    It may be differentiated any number of times, in forward mode, and under ``torch.func``. tie: an empty tensor, see
    `_Linear`. again: the backward of ``back``, where that is not ``forward``.
    """
    if not followed():
        return forward(_stored(x))
    return _tied(x, tie, (forward, back, again or forward))[0]


def _tied(x: Tensor, tie: Tensor | None, operators: tuple[Operator, Operator, Operator]) -> tuple[Tensor, Tensor]:
    """The result of the first of ``operators``, and its tie."""
    try:
        return _Linear.apply(x, tie, *operators)  # type: ignore[no-untyped-call, no-any-return]
    except RuntimeError as error:
        if not _refused_by_torch_func(error):
            raise
    return _Transformed.apply(x, tie, *operators)  # type: ignore[no-untyped-call, no-any-return]


def apply_or(plain: Callable[[], Any], function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function`` of ``args``; ``plain()`` where it would be refused: in forward mode, and under ``torch.func``.

    function: without a jvp and a setup_context. plain: computes the same by operators that have them.
    """
    if in_forward_mode():  # on all ranks, also on those whose tensors have no tangent
        return plain()
    try:
        return function.apply(*args)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not _refused_by_torch_func(error):
            raise
    return plain()


def _refused_by_torch_func(error: RuntimeError) -> bool:
    """Whether ``torch.func`` refused a Function, of which nothing has run then: it takes none with a ctx in forward."""
    return "setup_context" in str(error)


def in_forward_mode() -> bool:
    """Whether there may be dual numbers."""
    return forward_ad._current_level >= 0


def followed() -> bool:
    """Whether anything follows what is computed: autograd, forward mode or ``torch.func``."""
    return torch.is_grad_enabled() or in_forward_mode() or under_torch_func()


def under_torch_func() -> bool:
    """Whether a transform of ``torch.func`` runs."""
    return bool(_UNDER_TORCH_FUNC())


#: empty tensors of the host: a new one costs several times what a detached one costs
_EMPTY = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64, torch.bfloat16)}


def with_tie(ctx: Any, *outputs: Tensor, saved: Sequence[Tensor | None] = ()) -> tuple[Tensor, ...]:
    """What the forward of a Function with a tie (`_Linear`) returns: ``outputs`` and the tie.

    It saves ``saved`` and, as the last one, the tie. The backward must have `zeros_for_none`.
    """
    like = outputs[0]
    empty = _EMPTY.get(like.dtype) if like.is_cpu else None
    tie = like.new_empty(0) if empty is None else empty.detach()
    ctx.set_materialize_grads(False)  # torch would make zeros for the tie in each backward
    _keep(ctx, len(outputs), *saved, tie)
    return *outputs, tie


def _keep(ctx: Any, outputs: int, *saved: Tensor | None) -> None:
    ctx.outputs = outputs
    ctx.save_for_backward(*saved)
    if in_forward_mode():
        ctx.save_for_forward(*saved)


def zeros_for_none(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a Function with a tie: an output without a gradient has zeros; its tie may have None."""

    @functools.wraps(backward)
    def filled(ctx: Any, *grads: Tensor | None) -> Any:
        for place, grad in enumerate(grads[: ctx.outputs]):
            if grad is None:
                like = ctx._input_metadata[place]
                zeros = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
                grads = *grads[:place], zeros, *grads[place + 1 :]
        return backward(ctx, *grads)

    return filled


class _Linear(torch.autograd.Function):
    """Applies one operator of a pair; the backward applies the other one, in a way that differentiates again.

    The second output is the *tie*: an empty tensor whose graph leads here. What is computed for a derivative of this
    operator, its transpose on a gradient or itself on a tangent, gets as an input the tie of this operator and the
    derivative of the tie. So its result requires grad on every rank, and a further derivative runs all operators on
    every rank in the same order, also where the loss is linear and a gradient has no graph of its own. Otherwise the
    ranks whose loss is not linear would wait for the others. It costs no message.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tie: Tensor | None, *operators: Operator) -> tuple[Tensor, ...]:
        ctx.operators, ctx.shape = operators, x.shape
        return with_tie(ctx, operators[0](_stored(x)))

    @staticmethod
    @zeros_for_none
    def backward(ctx: Any, grad: Tensor, of_tie: Tensor | None) -> tuple[Tensor | None, ...]:
        _, back, again = ctx.operators
        if not followed():
            return back(_stored(grad)), None, None, None, None
        (tie,) = ctx.saved_tensors
        out, out_tie = _tied(grad, both(tie, of_tie), (back, again, back))
        return out, out_tie if ctx.needs_input_grad[1] else None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        (tangent, of_tie, *_), (tie,) = tangents, ctx.saved_tensors
        if tangent is None:
            tangent = tie.new_zeros(ctx.shape)
        return _tied(tangent, both(tie, of_tie), ctx.operators)


def _stored(x: Tensor) -> Tensor:
    """``x`` with memory of its own: autograd has zeros without any, which stand for derivatives of constants."""
    return x.clone() if x._is_zerotensor() else x


def both(tie: Tensor, other: Tensor | None) -> Tensor:
    """An empty tensor whose graph leads where those of both lead."""
    return tie if other is None else tie + other


def linked(grad: Tensor, tie: Tensor, of_tie: Tensor | None) -> Tensor:
    """``grad``, with a graph that leads to ``tie`` on every rank: the gradient that a Function differentiates again.

    For Functions of which the backward has messages and is differentiated by autograd. tie: an empty output of the
    Function, as of `_Linear`, which it saved. of_tie: the derivative of the tie.
    """
    return apply_pair(grad, _seen, _seen, both(tie, of_tie))


def end_of(x: Tensor) -> Tensor:
    """A tie that leads where ``x`` leads."""
    return x[..., :0].reshape(-1)


def _seen(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Transformed(torch.autograd.Function):
    """`_Linear` in the form that ``torch.func`` takes, of which each call costs 20 us more."""

    @staticmethod
    def forward(x: Tensor, tie: Tensor | None, *operators: Operator) -> tuple[Tensor, Tensor]:
        return operators[0](_stored(x)), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.operators, ctx.shape = inputs[2:], inputs[0].shape
        _keep(ctx, 1, output[1])

    backward, jvp = _Linear.backward, _Linear.jvp

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        """Apply the operator to one element of the batch after the other: each has its own messages."""

        def element(n: int) -> tuple[Any, ...]:
            return tuple(x if dim is None else x.select(dim, n) for x, dim in zip(inputs, in_dims, strict=True))

        found = [_Transformed.apply(*element(n)) for n in range(info.batch_size)]  # type: ignore[no-untyped-call]
        return tuple(torch.stack(one) for one in zip(*found, strict=True)), (0, 0)
