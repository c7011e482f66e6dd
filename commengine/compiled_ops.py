"""The collectives under f and g, called directly or recorded as operators by `torch.compile`.

`torch.library` operators take no Python objects, so a compiled graph names a communicator by its handle, an integer.
The table from handles to live communicators is the only one at module level that changes at run time.
It holds them weakly, and a communicator that closes leaves it.

The operators change no tensor and return a new one. Inductor loses the order between an operator that writes a tensor
and the kernels that read it afterwards: with torch 2.11 and 2.13 such a kernel read memory that nothing had written.
The compiler knows no order but that of inputs and results. So a column-parallel layer's backward, where a collective
does not need the result of the one before it, names that result (``after``). The two heads of a BERT, and the replay of
a recomputed layer, are not tied: their order is the compiler's, which is the same for graphs that differ in constants
only. The compiler removes a collective whose result nobody uses. Therefore all ranks of a group must compile, or none
of them. The errors are those of the `Communicator`, raised when the graph runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import CollectiveError
from .stream import Stream, Work


class Collectives(Protocol):
    """The collectives of a `commengine.communicator.Communicator` that have operators."""

    handle: int
    size: int

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


def all_reduced(
    x: Tensor, comm: Collectives, op: str = "sum", stream: Stream | None = None
) -> tuple[Tensor, Work | None]:
    """Call `Communicator.all_reduce`. Returns ``x``, which it changes, and the Work.

    Inside `torch.compile`, record an operator: the result is a new tensor, ``stream`` is ignored, and the Work is None.
    """
    if torch.compiler.is_compiling():
        return torch.ops.commengine.all_reduce(x, comm.handle, op), None
    return x, comm.all_reduce(x, op, stream=stream)


def all_gathered(
    part: Tensor, comm: Collectives, stream: Stream | None = None, *, after: Sequence[Tensor] = ()
) -> tuple[Tensor, Work | None]:
    """Call `Communicator.all_gather` with a new tensor of every rank's ``part`` along dim 0. Returns it and the Work.

    Inside `torch.compile`, record an operator, as `all_reduced` does. after: tensors that are computed before it.
    """
    if torch.compiler.is_compiling():
        return torch.ops.commengine.all_gather(part, comm.handle, comm.size, list(after)), None
    whole = part.new_empty((comm.size * part.shape[0], *part.shape[1:]))
    return whole, comm.all_gather(whole, part, stream=stream)


def reduce_scattered(
    total: Tensor, comm: Collectives, stream: Stream | None = None, *, after: Sequence[Tensor] = ()
) -> tuple[Tensor, Work | None]:
    """Call `Communicator.reduce_scatter` with a new tensor for this rank's rows. Returns it and the Work.

    Inside `torch.compile`, record an operator, as `all_gathered` does.
    """
    if torch.compiler.is_compiling():
        return torch.ops.commengine.reduce_scatter(total, comm.handle, comm.size, list(after)), None
    part = total.new_empty((total.shape[0] // comm.size, *total.shape[1:]))
    return part, comm.reduce_scatter(part, total, stream=stream)


# The operators -----------------------------------------------------------------------------------------------------


def _named(handle: int) -> Any:
    comm = _live.get(handle)
    if comm is None:
        raise CollectiveError(f"a compiled graph uses communicator {handle}, which is closed")
    return comm


def _all_reduce(x: Tensor, comm: int, op: str) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    _named(comm).all_reduce(result, op)
    return result


def _all_gather(input: Tensor, comm: int, size: int, after: list[Tensor]) -> Tensor:
    return all_gathered(input.contiguous(), _named(comm))[0]


def _reduce_scatter(input: Tensor, comm: int, size: int, after: list[Tensor]) -> Tensor:
    return reduce_scattered(input.contiguous(), _named(comm))[0]


def _like(input: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=input.dtype, device=input.device)


_library: Any = torch.library.Library("commengine", "DEF")  # type: ignore[no-untyped-call]
# An operator's arguments keep their order: torch's cache on disk may hold graphs that an earlier version compiled.
for _schema, _run, _fake in (
    ("all_reduce(Tensor x, int comm, str op) -> Tensor", _all_reduce, lambda x, comm, op: _like(x, x.shape)),
    (
        "all_gather(Tensor input, int comm, int size, Tensor[] after) -> Tensor",
        _all_gather,
        lambda input, comm, size, after: _like(input, (input.shape[0] * size, *input.shape[1:])),
    ),
    (
        "reduce_scatter(Tensor input, int comm, int size, Tensor[] after) -> Tensor",
        _reduce_scatter,
        lambda input, comm, size, after: _like(input, (input.shape[0] // size, *input.shape[1:])),
    ),
):
    _name = _library.define(_schema)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"commengine::{_name}", _fake, lib=_library)
