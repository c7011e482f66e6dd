"""Memory of a node, of which each rank has a part that all ranks see: `SharedSegment`, and `NodeMemory` makes it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commengine.mpi import load_mpi, reduced

from .files import Way

if TYPE_CHECKING:
    from mpi4py import MPI

#: parts begin, and memory is given out, at multiples of this many bytes
PAGE = 4096


class SharedSegment:
    """``nbytes`` bytes for each rank of a node: this rank's part, and the other ranks' parts. It is zero at first.

    whole: the memory of all ranks, in parts of ``stride`` bytes. The system frees it when no tensor on any rank refers
    to it any more.
    """

    def __init__(self, whole: Tensor, stride: int, nbytes: int, rank: int) -> None:
        self.nbytes = nbytes
        every = whole.numpy().data
        #: the parts of all ranks
        self.memory = [every[start : start + nbytes] for start in range(0, whole.numel(), stride)]
        self._mine = self.memory[rank]
        # These are not views of the user's tensor: autograd must not notice that a collective writes there.
        with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
            self.parts = [torch.frombuffer(part, dtype=torch.uint8) for part in self.memory]
        self.addresses: list[int] = [part.data_ptr() for part in self.parts]
        self.address = self.addresses[rank]
        self._typed: dict[torch.dtype, list[Tensor]] = {}

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


class NodeMemory:
    """Makes the memory that the ranks of each node of a group share.

    group: an MPI communicator over all ranks, which agree. node: over the ranks of this node. way: how they share.
    """

    def __init__(self, group: MPI.Intracomm, node: MPI.Intracomm, way: Way) -> None:
        self._group, self._node, self.way = group, node, way

    def make(self, nbytes: int) -> SharedSegment | None:
        """Return memory of ``nbytes`` bytes a rank; None, on all ranks, if a rank gets none. Collective.

        Everything is reserved: no rank ends because a page that it writes to is not there.
        """
        stride, rank, ranks = -(-nbytes // PAGE) * PAGE, self._node.rank, self._node.size
        file = self._open()
        if file is None:
            return None
        whole = None
        # torch raises RuntimeError where the system maps nothing; a length of 63 bits is an OverflowError.
        with contextlib.suppress(OSError, RuntimeError, OverflowError):
            os.truncate(file, stride * ranks)
            start = stride * rank
            if self.way.reserve(file, start, start + nbytes, ranks) == start + nbytes:
                with torch.inference_mode(False):
                    # This mapping keeps no descriptor; one of Python's mmap does.
                    whole = torch.from_file(
                        f"/proc/self/fd/{file}", True, stride * ranks, dtype=torch.uint8, device="cpu"
                    )
        os.close(file)
        everybody = self._all(whole is not None)
        return SharedSegment(whole, stride, nbytes, rank) if everybody and whole is not None else None

    def _open(self) -> int | None:
        """Return a new file, which the ranks of the node have open; None, on all ranks, if a rank cannot open it."""
        file = place = None
        with contextlib.suppress(OSError):
            if self._node.rank == 0:
                file, place = self.way.create()
        place = self._node.bcast(place)
        with contextlib.suppress(OSError):
            if self._node.rank and place is not None:
                file = self.way.open(*place)
        everybody = self._all(file is not None)
        if self._node.rank == 0 and place is not None:
            with contextlib.suppress(OSError):
                self.way.opened(place[0])
        if not everybody and file is not None:
            os.close(file)
        return file if everybody else None

    def _all(self, mine: bool) -> bool:
        return bool(reduced(self._group, mine, load_mpi().MIN))
