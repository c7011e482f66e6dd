"""Reductions that torch does in the order of the ranks, of dtypes that MPI cannot reduce or must not reorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commengine.dtypes import HALF_TYPES, reduce_in_order, reduce_unseen, unseen
from commengine.host.wire import MpiWire


def reducing_small(
    wire: MpiWire, collect: Callable[..., object], like: Tensor, op: str
) -> Callable[[Tensor, Tensor], None]:
    """Return what gets a small tensor of every rank and reduces them: into the first argument, from the second one.

    collect: the call of MPI that gets them, `Allgather` of an all-reduce or `Alltoall` of a reduce-scatter. like: a
    tensor as the first argument.
    """
    whole = wire.small(like)
    parts, address, datatype = whole.unbind(), wire.address, wire.types.move[like.dtype]
    received = address(whole.data_ptr(), whole.nbytes), datatype
    halves = op == "sum" and len(parts) == 2 and like.dtype in HALF_TYPES
    how = wire.tree + op

    def run(output: Tensor, input: Tensor) -> None:
        collect((address(input.data_ptr(), input.nbytes), datatype), received)
        written = output.data
        if halves and not written.is_inference():
            torch.add(parts[0], parts[1], out=written)  # a short cut: the code below would end in this line
            return
        with unseen(written):
            reduce_unseen(parts, how, written)

    return run


def reduce_chunks(wire: MpiWire, tensor: Tensor, op: str) -> tuple[Tensor, tuple[Any, ...]]:
    """Let each rank reduce one chunk of the flat tensor. Returns this rank's chunk, and MPI's buffer for all chunks."""
    base, extra = divmod(tensor.numel(), wire.size)
    counts = [base + (rank < extra) for rank in range(wire.size)]
    starts = [base * rank + min(rank, extra) for rank in range(wire.size)]
    mine = counts[wire.rank]
    parts = tensor.new_empty((wire.size, mine))
    (sent, datatype), (received, _) = wire.moved(tensor), wire.moved(parts)
    places = [mine * rank for rank in range(wire.size)]
    wire.calls.Alltoallv((sent, counts, starts, datatype), (received, [mine] * wire.size, places, datatype))
    chunk = reduce_in_order(parts, wire.tree + op, parts.new_empty(mine))
    return chunk, (sent, counts, starts, datatype)
