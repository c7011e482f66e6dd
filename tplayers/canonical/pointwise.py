"""Functions of single elements whose bits do not depend on where an element lies in its tensor.

torch computes whole vectors of a tensor with vector instructions, and the elements after the last whole vector one by
one, by another formula: the last bit of GELU differs. Where a tensor ends depends on the number of ranks, and where the
part of a thread ends on the number of threads. So these functions fill a tensor up until every part is whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tplayers.functions import one_derivative

#: elements of two vectors of the widest kind, 512 bits of 8-bit numbers: more than torch computes at once
VECTOR = 128

#: torch gives a thread at least this many elements (``at::internal::GRAIN_SIZE``)
GRAIN = 32768

Pointwise = Callable[..., Tensor]


def pointwise(function: Pointwise, *tensors: Tensor) -> Tensor:
    """``function(*tensors)`` of contiguous tensors of one shape, computed with vector instructions alone."""
    first = tensors[0]
    missing = whole_vectors(first.numel()) - first.numel()
    if not missing:
        return function(*(tensor.contiguous() for tensor in tensors))
    filled = [torch.cat([tensor.reshape(-1), tensor.new_ones(missing)]) for tensor in tensors]
    return function(*filled)[: first.numel()].view(first.shape)


def pointwise_(function: Pointwise, x: Tensor) -> Tensor:
    """`pointwise` that writes its result into ``x``, which is contiguous, and returns it. It has the same bits."""
    if x.numel() == whole_vectors(x.numel()):
        return function(x, out=x)
    return x.copy_(pointwise(function, x))


def whole_vectors(elements: int) -> int:
    """``elements`` or more, of which torch gives every thread the same number of whole vectors."""
    threads = min(torch.get_num_threads(), max(-(-elements // GRAIN), 1))
    while elements % (VECTOR * threads):
        elements += VECTOR * threads - elements % (VECTOR * threads)
        threads = min(torch.get_num_threads(), -(-elements // GRAIN))
    return elements


def gelu(x: Tensor, approximate: str) -> Tensor:
    """``torch.nn.functional.gelu``."""
    return _Gelu.apply(x, approximate)  # type: ignore[no-untyped-call, no-any-return]


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return pointwise(lambda x: torch.ops.aten.gelu(x, approximate=approximate), x)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        form = ctx.approximate
        found = pointwise(lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate=form), grads[0], x)
        return found, None


def gated(both: Tensor) -> Tensor:
    """SiLU(gate) * up of ``both`` [2 * own, ...], the shards of the gate and then those of up: [own, ...]."""
    return _Gated.apply(both)  # type: ignore[no-untyped-call, no-any-return]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2)
        return pointwise(torch.ops.aten.silu, gate) * up

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2)
        of_gate = pointwise(torch.ops.aten.silu_backward, grads[0] * up, gate)
        return torch.cat((of_gate, pointwise(torch.ops.aten.silu, gate) * grads[0]))
