"""What the autograd Functions of layers need: dtypes under ``torch.autocast``, and derivatives of any order.

**Autocast.** Layers under ``torch.autocast`` compute in the dtypes in which torch's own operators would. Autocast knows
torch's operators, and neither an autograd Function nor a product that is written into a given tensor. So a layer casts
what such a product takes before its Function sees it. Autograd follows this cast, and gives a gradient in the
parameter's dtype. Nothing is cast inside a Function: autocast would keep a cast without a graph for later uses.

**Derivatives.** Most Functions compute their gradients by collectives and kernels that autograd does not see. Where a
gradient is to be differentiated (``create_graph=True``), `differentiable` computes it in another way: by autograd from
a *plain* form of the Function, of torch's operators and operators of ours that differentiate themselves. It takes more
time and memory, and its derivatives are those of the plain form, of any order.

A Function that has no plain form here has `one_derivative`, and an error in place of a second one. torch's own
``once_differentiable`` is not enough for them: its error stands in a node that leads nowhere, so
``torch.autograd.grad(penalty, parameters)`` leaves the node out and returns a wrong number. Here the node that raises
lies on every path from a gradient to the tensors that it depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .adjoint_pair import followed, linked


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
    """``x`` as autocast casts the input of a norm or an interpolation: to float32 on a device, not on the host."""
    kind = x.device.type
    cast = kind != "cpu" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return x.float() if cast else x


def finished(result: Tensor) -> Tensor:
    """The result of an operation in place, as the forward of a Function returns it.

    The compiler of torch 2.11 loses the gradient of such a result, without an error. A copy keeps it, and the compiler
    fuses the copy with the operation. Outside of `torch.compile` nothing is copied.
    """
    return result.clone() if torch.compiler.is_compiling() else result


Called = TypeVar("Called", bound=Callable[..., Any])


def outside_graphs(function: Called) -> Called:
    """Decorate what `torch.compile` runs between its graphs, because its messages have no operators of a graph."""

    @functools.wraps(function)
    def uncompiled(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **named)  # type: ignore[no-untyped-call]
        return function(*args, **named)

    return cast("Called", uncompiled)


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


#: the plain form of a Function: from its inputs that are differentiated to its outputs, or to the first of them, if no
#: other is differentiable
Plain = Callable[..., tuple[Tensor, ...]]


#: a plain form, the inputs for it, and the Function's tie, if it has one: an empty output, which was saved. With it a
#: further derivative runs the Function's backward on every rank, also where a gradient has no graph that leads there
PlainForm = tuple[Plain, Sequence[Tensor | None]] | tuple[Plain, Sequence[Tensor | None], Tensor]


def differentiable(plain_of: Callable[[Any], PlainForm | None]) -> Callable[..., Any]:
    """Decorate the backward of a Function, so that its gradients can be differentiated any number of times.

    plain_of: called with the ctx. Returns the plain form, and its inputs: in the order of the Function's inputs, with
    None for those that have no gradient or that were not given; the plain form takes those that are there. The inputs
    are tensors that the Function saved, or that stand for them if no gradient depends on their values. None: there is
    no plain form here, as with `one_derivative`.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        once = one_derivative(backward)

        @functools.wraps(backward)
        def any_order(ctx: Any, *grads: Any) -> Any:
            if not followed() or torch.compiler.is_compiling():
                return backward(ctx, *grads)
            form = plain_of(ctx)
            if form is None:
                return once(ctx, *grads)
            plain, inputs, *tie = form
            there = [one for one in inputs if one is not None]
            if tie:
                more = (one for one in grads[1:-1] if one is not None)  # outputs that are not differentiable have None
                grads = linked(grads[0], tie[0], grads[-1]), *more
            found = iter(_Plain.apply(_gradients(plain, len(there)), *there, *grads))  # type: ignore[no-untyped-call]
            several = tuple(None if one is None else next(found) for one in inputs)
            return tuple(one if wanted else None for one, wanted in zip(several, ctx.needs_input_grad, strict=False))

        return in_forward_dtypes(any_order)

    return decorate


class _Plain(torch.autograd.Function):
    """``plain(*inputs)``, where autograd sees a node and not what it computes.

    The inputs may depend on each other. So a gradient by one of them is taken with the others held fixed: of leaves.
    """

    @staticmethod
    def forward(ctx: Any, plain: Plain, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        with torch.enable_grad():
            found = plain(*(one.detach().requires_grad_() for one in inputs))
        return tuple(one.detach() for one in found)

    @staticmethod
    @in_forward_dtypes
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        return None, *_Plain.apply(_gradients(ctx.plain, len(inputs)), *inputs, *grads)  # type: ignore[no-untyped-call]


def _gradients(plain: Plain, count: int) -> Plain:
    """The gradients of ``plain`` by its ``count`` inputs: a function of these and of the gradients of its outputs."""

    def gradients(*both: Tensor) -> tuple[Tensor, ...]:
        inputs = both[:count]
        outputs = plain(*inputs)
        grads = both[count : count + len(outputs)]
        return torch.autograd.grad(outputs, inputs, grads, create_graph=True, materialize_grads=True)

    return gradients


def one_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a Function whose gradients cannot be differentiated.

    With ``create_graph=True`` it returns the same gradients. Differentiating through them raises RuntimeError. The
    Function saves each input, or something in the graph of it, that its gradients depend on (`save_for_backward`).
    """
    backward = in_forward_dtypes(backward)
    name = backward.__qualname__.split(".")[-2:][0].lstrip("_")

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> Any:
        if not followed() or torch.compiler.is_compiling():
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
