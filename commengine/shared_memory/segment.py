"""SharedSegment: one window that the ranks of a node share, seen as tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .flags import new_window

if TYPE_CHECKING:
    from mpi4py import MPI


class SharedSegment:
    """One window of ``nbytes`` bytes a rank: this rank's part, and the other ranks' parts. Collective to make."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        self.nbytes = nbytes
        self.window = new_window(comm, nbytes)
        memory = [self.window.Shared_query(rank)[0] for rank in range(comm.size)]
        self._mine: Any = memory[comm.rank]
        self.address: int = self._mine.address
        # These are not views of the user's tensor: autograd must not notice that a collective writes there.
        with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
            self.parts = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
        self._typed: dict[torch.dtype, list[Tensor]] = {}
        self._touch_first(self.parts[comm.rank])
        comm.Barrier()

    def _touch_first(self, part: Tensor) -> None:
        """Touch every page of this rank's part.

        The system would count untouched memory as free, give it away, and end the process at the first write.
        """
        part.zero_()

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return this rank's part, for the user."""
        return torch.frombuffer(self._mine, dtype=dtype, count=numel)

    def typed(self, dtype: torch.dtype) -> list[Tensor]:
        """Return every rank's part, for the collectives."""
        if dtype not in self._typed:
            whole = self.nbytes // dtype.itemsize * dtype.itemsize
            with torch.inference_mode(False):
                self._typed[dtype] = [part[:whole].view(dtype) for part in self.parts]
        return self._typed[dtype]

    def unused(self) -> bool:
        """Whether no tensor of the user refers to the memory, so that it can be unmapped. Drops our own tensors."""
        self.parts.clear()
        self._typed.clear()
        return sys.getrefcount(self._mine) == 2  # this object's reference and the call's

    def free(self) -> None:
        self.window.Free()
