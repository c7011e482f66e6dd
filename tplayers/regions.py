"""The regions f and g and their sequence-parallel forms, by which an activation enters and leaves parallel layers.

Each is an autograd Function that is a collective in one direction and its conjugate in the other (Shoeybi et al.
2019, section 3, Figure 3; Korthikanti et al. 2022, section 4.2.2 for the sequence-parallel pair). None of them
changes its input, because autograd may share it with other branches. The backward is the region of the other
direction, so they differentiate any number of times, and in forward mode, too. A second derivative takes what the ranks
compute with a gradient as these regions take any activation: what is computed of a replicated gradient must be the same
on all ranks, and what is computed of parts must pass g. ``requires_grad`` must be the same on all ranks, because a rank
without it has no backward, and the others wait for it; with ``Communicator(..., checked=True)`` the ranks compare it.

=================================================  ====================  =====================
region                                             forward               backward
=================================================  ====================  =====================
copy_to_tensor_parallel_region (f)                 identity              all-reduce
reduce_from_tensor_parallel_region (g)             all-reduce            identity
scatter_to_tensor_parallel_region                  take my part          all-gather
gather_from_tensor_parallel_region                 all-gather            take my part
gather_from_sequence_parallel_region               all-gather            reduce-scatter
reduce_scatter_to_sequence_parallel_region         reduce-scatter        all-gather
=================================================  ====================  =====================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from commengine import Communicator, Stream, Work
from commengine.compiled_ops import all_gathered, all_reduced, reduce_scattered

from .adjoint_pair import apply_pair, in_forward_mode, under_torch_func


def copy_to_tensor_parallel_region(x: Tensor, comm: Communicator) -> Tensor:
    """The paper's f: identity forward, all-reduce of the gradient backward.

    It stands where a replicated activation enters a column-parallel region, in which each rank computes only its own
    part of dL/dx (Shoeybi et al. 2019, section 3, Figure 3).

    x: any shape, equal on all ranks of ``comm``. Every rank of ``comm`` must run the backward.
    """
    return _apply(_COPY, x, comm, 0)


def reduce_from_tensor_parallel_region(x: Tensor, comm: Communicator) -> Tensor:
    """The paper's g: all-reduce (sum) forward, identity backward.

    It stands where the partial sums of a row-parallel region become one replicated activation.

    x: any shape and dtype, the same on all ranks of ``comm``. Every rank must call it. The input is not changed; a
    group of one rank returns it. Raises the errors of `Communicator.all_reduce`. In a checked group every rank raises
    CollectiveMismatch if dtype, shape or ``requires_grad`` differ.
    """
    return _apply(_REDUCE, x, comm, 0)


def reduce_own_from_tensor_parallel_region(x: Tensor, comm: Communicator) -> Tensor:
    """All-reduce ``x`` in place (the region g). The caller must own ``x``, and must not use it afterwards.

    Autograd knows of the change: if another operation has saved ``x`` for its backward, that backward raises an error.
    """
    if torch.compiler.is_compiling() or in_forward_mode() or under_torch_func():
        return reduce_from_tensor_parallel_region(x, comm)
    if communicates(comm) and not (x.requires_grad and torch.is_grad_enabled()):
        all_reduced(x, comm)
        if not torch.is_inference_mode_enabled():
            torch.autograd.graph.increment_version(x)
        return x
    return _ReduceOwn.apply(x, comm) if communicates(comm) else x  # type: ignore[no-untyped-call]


def scatter_to_tensor_parallel_region(x: Tensor, comm: Communicator, dim: int = -1) -> Tensor:
    """Take this rank's part of replicated ``x`` along ``dim``; all-gather the gradient backward.

    x: equal on all ranks; ``x.shape[dim]`` a multiple of ``comm.size`` (else ValueError).
    """
    _require_parts(x, comm, dim)
    return _apply(_SCATTER, x, comm, dim)


def gather_from_tensor_parallel_region(x: Tensor, comm: Communicator, dim: int = -1) -> Tensor:
    """All-gather the parts along ``dim`` into a replicated tensor; take this rank's part of the gradient backward.

    Every rank must call it, and must compute the same with the result: the computation after it is replicated.
    """
    return _apply(_GATHER, x, comm, dim)


def gather_from_sequence_parallel_region(x: Tensor, comm: Communicator, dim: int = 0) -> Tensor:
    """All-gather the sequence parts along ``dim``; reduce-scatter the gradient backward.

    It takes the place of f when the activation before it is split along the sequence. The layers after it are
    tensor-parallel, so the ranks' gradients are partial sums. Every rank must call it and run its backward.
    """
    return _apply(_GATHER_SEQUENCE, x, comm, dim)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, comm: Communicator, dim: int = 0) -> Tensor:
    """Sum the partial results and keep this rank's sequence part along ``dim``; all-gather the gradient backward.

    It takes the place of g. ``x.shape[dim]`` must be a multiple of ``comm.size`` (else ValueError).
    """
    _require_parts(x, comm, dim)
    return _apply(_REDUCE_SCATTER_SEQUENCE, x, comm, dim)


def communicates(comm: Communicator) -> bool:
    """Whether layers call the collectives of ``comm``. A group of one rank has nothing to send."""
    return comm.size > 1


# The collectives, on any dimension and layout ---------------------------------------------------------------------


def reduced_rows(
    total: Tensor, comm: Communicator, split: bool, stream: Stream | None = None, *, after: Sequence[Tensor] = ()
) -> tuple[Tensor, Work | None]:
    """Begin to sum ``total`` over the ranks, in place if not compiled; the sum, and what to wait for, if any.

    split: only this rank's rows are wanted, which then lie in a tensor of their own. after: as of `all_gathered`.
    """
    if not communicates(comm):
        return total, None
    if not split:
        return all_reduced(total, comm, stream=stream)
    return reduce_scattered(total, comm, stream, after=after)


def _unchanged(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    if torch.compiler.is_compiling():  # its operator leaves x as it is
        return all_reduced(x, comm)[0]
    return all_reduced(x.clone(memory_format=torch.contiguous_format), comm)[0]


def _my_part(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    size = x.shape[dim] // comm.size
    return x.narrow(dim, comm.rank * size, size).clone(memory_format=torch.contiguous_format)


def _all_gather(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    return _from_front(all_gathered(_to_front(x, dim), comm)[0], dim)


def _reduce_scatter(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    return _from_front(reduced_rows(_to_front(x, dim), comm, split=True)[0], dim)


def _to_front(x: Tensor, dim: int) -> Tensor:
    return (x if dim in (0, -x.dim()) else x.movedim(dim, 0)).contiguous()


def _from_front(x: Tensor, dim: int) -> Tensor:
    """``x`` with its dimension 0 moved to ``dim``. If nothing moves it is ``x``, not a view: those refuse writes."""
    return x if dim in (0, -x.dim()) else x.movedim(0, dim).contiguous()


# The autograd Functions -------------------------------------------------------------------------------------------


def _apply(region: Region, x: Tensor, comm: Communicator, dim: int) -> Tensor:
    if not communicates(comm):
        return x
    if torch.compiler.is_compiling():
        return _Compiled.apply(x, comm, dim, region)  # type: ignore[no-untyped-call, no-any-return]
    if comm.checked:
        wanted = x.requires_grad and torch.is_grad_enabled()
        comm.compare(f"a region of {str(x.dtype).removeprefix('torch.')} {list(x.shape)}, requires_grad={wanted}")
    forward, back = region
    return apply_pair(x, lambda one: forward(one, comm, dim), lambda one: back(one, comm, dim))


def _require_parts(x: Tensor, comm: Communicator, dim: int) -> None:
    if x.shape[dim] % comm.size:
        raise ValueError(f"dimension {dim} of {list(x.shape)} does not divide into {comm.size} equal parts")


class _ReduceOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.mark_dirty(x)
        ctx.comm = comm
        return all_reduced(x, comm)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return copy_to_tensor_parallel_region(grads[0], ctx.comm), None
        return grads[0], None


#: a collective on any dimension, and the one of the other direction
Region: TypeAlias = tuple[Callable[[Tensor, Communicator, int], Tensor], Callable[[Tensor, Communicator, int], Tensor]]
_COPY: Region = (_unchanged, _all_reduce)
_REDUCE: Region = (_all_reduce, _unchanged)
_SCATTER: Region = (_my_part, _all_gather)
_GATHER: Region = (_all_gather, _my_part)
_GATHER_SEQUENCE: Region = (_all_gather, _reduce_scatter)
_REDUCE_SCATTER_SEQUENCE: Region = (_reduce_scatter, _all_gather)


class _Compiled(torch.autograd.Function):
    """A region in a graph of the compiler, which differentiates once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int, region: Region) -> Tensor:
        ctx.comm, ctx.dim, ctx.back = comm, dim, region[1]
        return region[0](x, comm, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.comm, ctx.dim), None, None, None
