"""The collectives under f and g, called directly or recorded as operators by `torch.compile`.

`torch.library` operators take no Python objects, so a compiled graph names a communicator by its handle, an integer.
The table from handles to live communicators is the only one at module level that changes at run time.
It holds them weakly, and a communicator that closes leaves it. The operators change their output in place and return
nothing: the compiler keeps such operators in the order of the program, which must be the same on every rank.

The compiler removes a collective whose result nobody uses. Therefore all ranks of a group must compile, or none of
them. The errors are those of the `Communicator`, raised when the graph runs.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import CollectiveError
from .stream import Stream, Work


class Collectives(Protocol):
    """The collectives of a `commengine.communicator.Communicator` that have operators."""

    handle: int

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, stream: Stream | None = None) -> Work:
        """Reduce ``tensor`` over the group, in place."""

    def all_gather(self, output: Tensor, input: Tensor, *, stream: Stream | None = None) -> Work:
        """Concatenate every rank's ``input`` into ``output``."""

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str = "sum", *, stream: Stream | None = None) -> Work:
        """Reduce ``input`` over the group; each rank gets its rows in ``output``."""


_live: weakref.WeakValueDictionary[int, Collectives] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register(comm: Collectives) -> int:
    """Return a handle for ``comm``, new in this process. The ranks of a group may have different handles."""
    handle = next(_handles)
    _live[handle] = comm
    return handle


def unregister(handle: int) -> None:
    """Forget a communicator that is closed. May be called again."""
    _live.pop(handle, None)


# As the layers call them -------------------------------------------------------------------------------------------


def all_reduce_(x: Tensor, comm: Collectives, op: str = "sum", stream: Stream | None = None) -> Work | None:
    """Call `Communicator.all_reduce`. Inside `torch.compile`, record an operator, which ignores ``stream``.

    Returns the Work, or None inside `torch.compile`.
    """
    if torch.compiler.is_compiling():
        torch.ops.commengine.all_reduce_(x, comm.handle, op)
        return None
    return comm.all_reduce(x, op, stream=stream)


def all_gather_into_(output: Tensor, input: Tensor, comm: Collectives, stream: Stream | None = None) -> Work | None:
    """Call `Communicator.all_gather`, or record an operator, as `all_reduce_` does."""
    if torch.compiler.is_compiling():
        torch.ops.commengine.all_gather_into_(output, input, comm.handle)
        return None
    return comm.all_gather(output, input, stream=stream)


def reduce_scatter_into_(output: Tensor, input: Tensor, comm: Collectives, stream: Stream | None = None) -> Work | None:
    """Call `Communicator.reduce_scatter`, or record an operator, as `all_reduce_` does."""
    if torch.compiler.is_compiling():
        torch.ops.commengine.reduce_scatter_into_(output, input, comm.handle)
        return None
    return comm.reduce_scatter(output, input, stream=stream)


# The operators -----------------------------------------------------------------------------------------------------


def _run(method: str, place: int, *args: Any) -> None:
    """Call a method of the communicator that ``args[place]`` names, with the other arguments."""
    comm = _live.get(args[place])
    if comm is None:
        raise CollectiveError(f"a compiled graph uses communicator {args[place]}, which is closed")
    getattr(comm, method)(*args[:place], *args[place + 1 :])


def _fake(*args: object) -> None:
    """Do nothing: the operators change no shapes and no dtypes."""


_library: Any = torch.library.Library("commengine", "DEF")  # type: ignore[no-untyped-call]
# An operator's arguments keep their order: torch's cache on disk may hold graphs that an earlier version compiled.
for _method, _schema in {
    "all_reduce": "all_reduce_(Tensor(a!) x, int comm, str op) -> ()",
    "all_gather": "all_gather_into_(Tensor(a!) output, Tensor input, int comm) -> ()",
    "reduce_scatter": "reduce_scatter_into_(Tensor(a!) output, Tensor input, int comm) -> ()",
}.items():
    # MPI and NCCL need contiguous tensors: the compiler must keep the strides that the program gave.
    _name = _library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(_name, functools.partial(_run, _method, _schema.count("Tensor")), "CompositeExplicitAutograd")
    torch.library.register_fake(f"commengine::{_name}", _fake, lib=_library)
