"""The buffers into which small tensors of all ranks are gathered before this rank reduces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from commengine.dtypes import HALF_TYPES, MpiTypes
from commengine.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]

#: dtypes and shapes whose buffers are kept, because making one takes 4 us
MOST_BUFFERS = 64


class GatheredSmall(NamedTuple):
    """A buffer for tensors of one dtype and shape.

    datatype: of a tensor. received: the buffer for MPI. parts: the same memory, one tensor for each rank. pair: the
    tensors are two halves, whose sum is one call of torch.
    """

    datatype: MPI.Datatype
    received: tuple[Any, MPI.Datatype]
    parts: Sequence[Tensor]
    pair: bool


class SmallBuffers(dict[tuple[torch.dtype, torch.Size], GatheredSmall]):
    """The buffers of one transport by dtype and shape of a rank's tensor; a missing one is made.

    size: of the group. empty: makes memory where the tensors lie, from a shape and a dtype.
    """

    def __init__(self, size: int, types: MpiTypes, empty: Empty) -> None:
        super().__init__()
        self._size, self._types, self._empty = size, types, empty

    def __missing__(self, key: tuple[torch.dtype, torch.Size]) -> GatheredSmall:
        dtype, shape = key
        if len(self) >= MOST_BUFFERS:
            self.clear()
        with torch.inference_mode(False):  # a tensor of inference mode could not be used outside of it
            whole = self._empty((self._size, *shape), dtype)
            parts = whole.unbind()
        datatype = self._types.move[dtype]
        received = load_mpi().memory.fromaddress(whole.data_ptr(), whole.nbytes), datatype
        self[key] = GatheredSmall(datatype, received, parts, self._size == 2 and dtype in HALF_TYPES)
        return self[key]
