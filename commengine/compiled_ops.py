"""The collectives under f and g, called eagerly or recorded as operators by `torch.compile`.

`torch.library` operators take no Python objects, so a compiled graph names a communicator by its handle, an integer.
The table from handles to the live communicators is the one table at module level; it holds them weakly, loses them
when they are closed, and answers no other question. The operators change their output in place and return nothing:
the compiler keeps such operators in the order of the program, which must be the same on every rank.

Compiled, a collective whose result nobody uses is removed: all ranks of a group must compile, or none. Its errors are
those of the `Communicator`, raised where the graph runs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import CollectiveError

if TYPE_CHECKING:
    from .communicator import Communicator
    from .stream import Stream, Work

_live: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register(comm: Communicator) -> int:
    """A handle for ``comm``, never given before in this process; it need not be the same on all ranks."""
    handle = next(_handles)
    _live[handle] = comm
    return handle


def unregister(handle: int) -> None:
    """Forget a communicator that was closed. May be called again."""
    _live.pop(handle, None)


def _communicator(handle: int) -> Communicator:
    comm = _live.get(handle)
    if comm is None:
        raise CollectiveError(f"a compiled graph uses communicator {handle}, which is closed")
    return comm


# As the layers call them -------------------------------------------------------------------------------------------


def all_reduce_(x: Tensor, comm: Communicator, op: str = "sum", stream: Stream | None = None) -> Work | None:
    """`Communicator.all_reduce`; compiled, an operator in the graph, which knows no ``stream`` and returns None."""
    if torch.compiler.is_compiling():
        torch.ops.commengine.all_reduce_(x, comm.handle, op)
        return None
    return comm.all_reduce(x, op, stream=stream)


def all_gather_into_(output: Tensor, input: Tensor, comm: Communicator, stream: Stream | None = None) -> Work | None:
    """`Communicator.all_gather`, as `all_reduce_` does it."""
    if torch.compiler.is_compiling():
        torch.ops.commengine.all_gather_into_(output, input, comm.handle)
        return None
    return comm.all_gather(output, input, stream=stream)


def reduce_scatter_into_(
    output: Tensor, input: Tensor, comm: Communicator, stream: Stream | None = None
) -> Work | None:
    """`Communicator.reduce_scatter`, as `all_reduce_` does it."""
    if torch.compiler.is_compiling():
        torch.ops.commengine.reduce_scatter_into_(output, input, comm.handle)
        return None
    return comm.reduce_scatter(output, input, stream=stream)


# The operators -----------------------------------------------------------------------------------------------------


def _all_reduce(x: Tensor, comm: int, op: str) -> None:
    _communicator(comm).all_reduce(x, op)


def _all_gather(output: Tensor, input: Tensor, comm: int) -> None:
    _communicator(comm).all_gather(output, input)


def _reduce_scatter(output: Tensor, input: Tensor, comm: int) -> None:
    _communicator(comm).reduce_scatter(output, input)


def _fake(*args: object) -> None:
    """Nothing happens to shapes and dtypes."""


_library: Any = torch.library.Library("commengine", "DEF")  # type: ignore[no-untyped-call]
for _schema, _implementation in (
    ("all_reduce_(Tensor(a!) x, int comm, str op) -> ()", _all_reduce),
    ("all_gather_into_(Tensor(a!) output, Tensor input, int comm) -> ()", _all_gather),
    ("reduce_scatter_into_(Tensor(a!) output, Tensor input, int comm) -> ()", _reduce_scatter),
):
    # What MPI and NCCL are given is contiguous: the compiler must keep the strides that the program gave.
    _name = _library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"commengine::{_name}", _fake, lib=_library)
