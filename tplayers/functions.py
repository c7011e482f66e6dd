"""What the autograd Functions of layers need: dtypes under ``torch.autocast``, and first derivatives alone.

**Autocast.** Layers under ``torch.autocast`` compute in the dtypes in which torch's own operators would. Autocast knows
torch's operators, and neither an autograd Function nor a product that is written into a given tensor. So a layer casts
what such a product takes before its Function sees it. Autograd follows this cast, and gives a gradient in the
parameter's dtype. Nothing is cast inside a Function: autocast would keep a cast without a graph for later uses.

**Derivatives.** Most Functions compute their gradients by collectives and kernels that autograd does not see.
torch's own ``once_differentiable`` is not enough for them: its error stands in a node that leads nowhere, so
``torch.autograd.grad(penalty, parameters)`` leaves the node out and returns a wrong number. Here the node that raises
lies on every path from a gradient to the tensors that it depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def lowered(x: Tensor, *more: Tensor | None) -> tuple[Any, ...]:
    """``x`` and ``more`` as autocast casts the operands of a product: to its dtype, but for float64. Differentiable.

    Outside of autocast they are returned as they are.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return (x, *more)
    dtype = torch.get_autocast_dtype(kind)
    return tuple(one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in (x, *more))


def widened(x: Tensor) -> Tensor:
    """``x`` as autocast casts the input of a norm: to float32 on a device. torch's norms of the host keep its dtype."""
    kind = x.device.type
    cast = kind != "cpu" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return x.float() if cast else x


def finished(result: Tensor) -> Tensor:
    """The result of an operation in place, as the forward of a Function returns it.

    The compiler of torch 2.11 loses the gradient of such a result, without an error. A copy keeps it, and the compiler
    fuses the copy with the operation. Outside of `torch.compile` nothing is copied.
    """
    return result.clone() if torch.compiler.is_compiling() else result


def in_forward_dtypes(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a Function: within autocast, too, it computes in the dtypes of the forward."""

    @functools.wraps(backward)
    def uncast(ctx: Any, *grads: Tensor) -> Any:
        kind = grads[0].device.type
        if not torch.is_autocast_enabled(kind):
            return backward(ctx, *grads)
        with torch.autocast(kind, enabled=False):
            return backward(ctx, *grads)

    return uncast


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
        tied = iter(_NoDerivative.apply(name, len(some), *some, *grads, *unpacked.saved_tensors))  # type: ignore[no-untyped-call]
        result = tuple(None if one is None else next(tied) for one in several)
        return result if isinstance(found, tuple) else result[0]

    return once


class _Unpacked:
    """The ctx of a backward, with saved tensors that are unpacked: a recomputation can be asked for them once only."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _NoDerivative(torch.autograd.Function):
    """Returns the first ``count`` of ``tensors``, computed from the others where autograd does not see it."""

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
