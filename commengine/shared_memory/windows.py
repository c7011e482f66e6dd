"""Tensors in memory that the ranks of a node share (MPI-3 windows).

A tensor made by `Communicator.empty` lies in a window in which every rank of the node sees every other rank's part.
`commengine.shared_memory.window_collectives` has the collectives on such tensors.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commengine.mpi import load_mpi

from .flags import fits, new_window
from .nodes import Node, find_node

if TYPE_CHECKING:
    from mpi4py import MPI

#: places of tensors that are kept, because finding one takes a microsecond
MOST_PLACES = 256


class SharedTensors:
    """The windows of one communicator, which the caller owns. `empty` and `close` are collective."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._node: Node | None = None
        self._looked = comm.size == 1
        self.segments: list[_Segment] = []
        self._starts: list[tuple[int, int]] = []  # address and number of each segment, ascending
        self._found: dict[tuple[int, int, torch.dtype], WindowTensor] = {}

    @property
    def node(self) -> Node | None:
        """This rank's node; None, on all ranks alike, if the group cannot share memory. Collective the first time.

        The group can share memory if every node has the same number of its ranks, two or more (see `find_node`), and
        has room for at least the flags.
        """
        if not self._looked:
            self._node, self._looked = find_node(self._comm), True
            if self._node is not None and not fits(self._comm, 0):
                self._node.comm.Free()
                self._node = None
        return self._node

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that all ranks of the node can reach, or a private one if that is impossible.

        Collective; the same shape and dtype on every rank. Raises torch's errors, for a negative size for example.
        """
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        node = self.node
        if node is None or like.numel() == 0 or not fits(self._comm, like.nbytes * node.size):
            return torch.empty_like(like, device="cpu")
        segment = _Segment(node.comm, like.nbytes)
        bisect.insort(self._starts, (segment.address, len(self.segments)))
        self.segments.append(segment)
        return segment.tensor(like.numel(), dtype).view(like.shape)

    def reaches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in a window."""
        return bool(self.segments) and self.find(tensor) is not None

    def find(self, tensor: Tensor) -> WindowTensor | None:
        """Return where in a window ``tensor`` lies, or None if it lies in no window."""
        address, nbytes, dtype = tensor.data_ptr(), tensor.nbytes, tensor.dtype
        found = self._found.get((address, nbytes, dtype))
        if found is not None:
            return found
        before = bisect.bisect_right(self._starts, (address, sys.maxsize)) - 1
        if before < 0:
            return None
        start, index = self._starts[before]
        segment, offset = self.segments[index], address - start
        if offset + nbytes > segment.nbytes:
            return None
        if len(self._found) >= MOST_PLACES:
            self._found.clear()
        found = WindowTensor(segment, index, offset, nbytes, dtype)
        self._found[address, nbytes, dtype] = found
        return found

    def close(self) -> None:
        """Free the windows that no tensor uses any more on any rank. The others live as long as the process."""
        mpi = load_mpi()
        left = False
        self._found.clear()
        self._starts.clear()
        for segment in self.segments:
            if self._comm.allreduce(segment.unused(), mpi.LAND):
                segment.free()
            else:
                left = True
        self.segments.clear()
        if self._node is not None and not left:
            # MPICH numbers windows by their communicators: a number in use must not be given out again.
            self._node.comm.Free()


class _Segment:
    """One window of ``nbytes`` bytes a rank: this rank's part, and the other ranks' parts. Collective to make."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        self.nbytes = nbytes
        self.window = new_window(comm, nbytes)
        memory = [self.window.Shared_query(rank)[0] for rank in range(comm.size)]
        self._mine = memory[comm.rank]
        self.address: int = self._mine.address
        # These are not views of the user's tensor: autograd must not notice that a collective writes there.
        with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
            self.parts = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
        self._typed: dict[torch.dtype, list[Tensor]] = {}
        # Every page is touched now. The system would count untouched memory as free, give it away, and end the process
        # at the first write.
        self.parts[comm.rank].zero_()
        comm.Barrier()

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


class WindowTensor:
    """A tensor in a window, and its counterparts on the other ranks of the node.

    segment, index: the window and its number. offset, nbytes: the tensor's place there, in bytes.
    """

    def __init__(self, segment: _Segment, index: int, offset: int, nbytes: int, dtype: torch.dtype) -> None:
        self.segment, self.index, self.offset, self.nbytes, self.dtype = segment, index, offset, nbytes, dtype
        #: the place as a number, which is the same on all ranks for the same place
        self.number = index << 48 | offset
        self._rows: dict[tuple[int, int], list[Tensor]] = {}

    def parts(self) -> list[Tensor]:
        """Return every rank's tensor, flat, in the order of the node's ranks."""
        return self.rows(0, self.nbytes // self.dtype.itemsize)

    def rows(self, low: int, high: int) -> list[Tensor]:
        """Return elements ``low`` to ``high`` of every rank's tensor. They are kept: making them takes microseconds."""
        rows = self._rows.get((low, high))
        if rows is None:
            first = self.offset // self.dtype.itemsize
            with torch.inference_mode(False):
                rows = [part[first + low : first + high] for part in self.segment.typed(self.dtype)]
            self._rows[low, high] = rows
        return rows
