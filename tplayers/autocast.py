"""Layers under ``torch.autocast`` compute in the dtypes in which torch's own operators would.

Autocast knows torch's operators, and neither an autograd Function nor a product that is written into a given tensor.
So a layer casts what such a product takes before its Function sees it. Autograd follows this cast, and gives a gradient
in the parameter's dtype. Nothing is cast inside a Function: autocast would keep a cast without a graph for later uses.
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
