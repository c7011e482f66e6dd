"""Tensors in memory that the ranks of a node share (MPI-3 windows).

A tensor made by `Communicator.empty` lies in a window in which every rank of the node sees every other's part.
What collectives do with it is in `commengine.shared_memory.window_collectives`.
"""

from __future__ import annotations

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


class SharedTensors:
    """The windows of one communicator. Collective to make, `empty` and `close`. comm: not owned."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._node: Node | None = None
        self._looked = comm.size == 1
        self.segments: list[_Segment] = []

    @property
    def node(self) -> Node | None:
        """This rank's node, where every node has as many ranks of the group, and more than one; on all ranks alike.

        None where one has nothing left to share, not even for flags. Collective the first time.
        """
        if not self._looked:
            self._node, self._looked = find_node(self._comm), True
            if self._node is not None and not fits(self._comm, 0):
                self._node.comm.Free()
                self._node = None
        return self._node

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that all ranks of the node reach, uninitialised; every rank asks for the same. Or a private one."""
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")  # or torch's error, for a negative size say
        node = self.node
        if node is None or like.numel() == 0 or not fits(self._comm, like.nbytes * node.size):
            return torch.empty_like(like, device="cpu")
        segment = _Segment(node.comm, like.nbytes)
        self.segments.append(segment)
        return segment.tensor(like.numel(), dtype).view(like.shape)

    def reaches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in a window."""
        return bool(self.segments) and self.find(tensor) is not None

    def find(self, tensor: Tensor) -> Place | None:
        """Where ``tensor`` lies, or None if that is no window."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        for index, segment in enumerate(self.segments):
            offset = address - segment.address
            if offset >= 0 and offset + nbytes <= segment.nbytes:
                return Place(segment, index, offset, nbytes, tensor.dtype)
        return None

    def close(self) -> None:
        """Free the windows in which no tensor lies any more on any rank. The others live as long as the process."""
        mpi = load_mpi()
        left = False
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
    """One window: this rank's part, and where the others' are."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        self.nbytes = nbytes
        self.window = new_window(comm, nbytes)
        memory = [self.window.Shared_query(rank)[0] for rank in range(comm.size)]
        self._mine = memory[comm.rank]
        self.address: int = self._mine.address
        # Not views of what the user has: writing here must not look like a change that autograd has to know of.
        self.parts = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
        self._typed: dict[torch.dtype, list[Tensor]] = {}
        # Touched, or the system would count it as free, and end the process where later there is none.
        self.parts[comm.rank].zero_()
        comm.Barrier()

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """This rank's part."""
        return torch.frombuffer(self._mine, dtype=dtype, count=numel)

    def typed(self, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's part, for us."""
        if dtype not in self._typed:
            whole = self.nbytes // dtype.itemsize * dtype.itemsize
            self._typed[dtype] = [part[:whole].view(dtype) for part in self.parts]
        return self._typed[dtype]

    def unused(self) -> bool:
        """Whether no tensor but ours refers to the memory: unmapping it then hurts nobody. Ours are gone after this."""
        self.parts.clear()
        self._typed.clear()
        return sys.getrefcount(self._mine) == 2  # ours, and the call's

    def free(self) -> None:
        self.window.Free()


class Place:
    """A tensor in a window, and its counterparts on the other ranks."""

    def __init__(self, segment: _Segment, index: int, offset: int, nbytes: int, dtype: torch.dtype) -> None:
        self.segment, self.index, self.offset, self.nbytes, self.dtype = segment, index, offset, nbytes, dtype

    @property
    def number(self) -> int:
        """The same number for the same place on all ranks."""
        return self.index << 48 | self.offset

    def parts(self) -> list[Tensor]:
        """Every rank's tensor, flat, in the order of the node's ranks."""
        itemsize = self.dtype.itemsize
        here = slice(self.offset // itemsize, (self.offset + self.nbytes) // itemsize)
        return [part[here] for part in self.segment.typed(self.dtype)]
