"""First derivatives that raise an error where a program asks for the second one.

Most Functions here compute their gradients by collectives and kernels that autograd does not see. torch's own
``once_differentiable`` is not enough for them: its error stands in a node that leads nowhere, so
``torch.autograd.grad(penalty, parameters)`` leaves the node out and returns a wrong number. Here the node that raises
lies on every path from a gradient to the tensors that it depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autocast import in_forward_dtypes


def one_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a Function whose gradients cannot be differentiated.

    With ``create_graph=True`` it returns the same gradients. Differentiating through them raises RuntimeError. The
    Function saves each input, or something in the graph of it, that its gradients depend on (`save_for_backward`).
    """
    backward = in_forward_dtypes(backward)
    name = backward.__qualname__.split(".")[-2].lstrip("_")

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, *grads)
        unpacked = _Unpacked(ctx)
        with torch.no_grad():
            found = backward(unpacked, *grads)
        several = found if isinstance(found, tuple) else (found,)
        some = [one for one in several if one is not None]
        tied = iter(without_derivative(name, some, [*grads, *unpacked.saved_tensors]))
        result = tuple(None if one is None else next(tied) for one in several)
        return result if isinstance(found, tuple) else result[0]

    return once


def without_derivative(name: str, found: Sequence[Tensor], sources: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Return ``found``, computed from ``sources`` where autograd does not see it. Differentiating it raises an error.

    name: what computed it, for the error.
    """
    if not torch.is_grad_enabled():
        return found
    tied: tuple[Tensor, ...] = _NoDerivative.apply(name, len(found), *found, *sources)  # type: ignore[no-untyped-call]
    return tied


class _Unpacked:
    """The ctx of a backward, with saved tensors that are unpacked: a recomputation can be asked for them once only."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"tplayers has no second derivative of {ctx.name}: autograd does not see how its gradients are computed, "
            "so what was computed from them cannot be differentiated"
        )
