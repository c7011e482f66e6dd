"""Tensors in windows: memory that the ranks of a node share.

A tensor made by `Communicator.empty` lies in a window in which every rank of the node sees every other rank's part.
The `Pool` of a communicator is one more window, in which each rank has blocks for tensors that come and go.
`commengine.shared_memory.window_collectives` has the collectives on such tensors.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commengine.agreement import raise_together

from .files import WAYS
from .flags import BLOCK
from .nodes import Node, find_node
from .pool import BLOCK_UNIT, Pool
from .segment import NodeMemory, SharedSegment

if TYPE_CHECKING:
    from mpi4py import MPI

#: places of tensors that are kept, because finding one takes a microsecond
MOST_PLACES = 256

#: the bits of a place that are the offset in its window
OFFSET = (1 << 48) - 1


class SharedTensors:
    """The windows of one communicator, which the caller owns. `empty` and `close` are collective.

    name: the group's, for errors.
    """

    def __init__(self, comm: MPI.Intracomm, name: str) -> None:
        self._comm, self.name = comm, name
        self._node: Node | None = None
        #: whether the ranks have looked for `node`
        self.looked = comm.size == 1
        self._memory: NodeMemory | None = None
        self.segments: list[SharedSegment] = []
        #: the blocks for tensors that come and go; None until `open_pool`, and where it finds no memory for them
        self.pool: Pool | None = None
        self._bounds: list[int] = []  # where each segment begins and ends, ascending
        self._numbers: list[int] = []  # of the segments, in that order
        self._found: dict[tuple[int, int, torch.dtype], WindowTensor] = {}

    @property
    def node(self) -> Node | None:
        """This rank's node; None, on all ranks alike, if the group cannot share memory. Collective the first time.

        The group can share memory if every node has the same number of its ranks, two or more (see `find_node`), and
        if all ranks of a node can open one file.
        """
        if not self.looked:
            self._node, self.looked = find_node(self._comm), True
            if self._node is not None:
                memories = (NodeMemory(self._comm, self._node.comm, way) for way in WAYS)
                self._memory = next((memory for memory in memories if memory.make(1) is not None), None)
                if self._memory is None:
                    self._node.comm.Free()
                    self._node = None
        return self._node

    def share(self, nbytes: int) -> SharedSegment | None:
        """Return memory of ``nbytes`` bytes a rank, 1 or more; None, on all ranks, if a rank gets none. Collective."""
        return None if self.node is None or self._memory is None else self._memory.make(nbytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that all ranks of the node can reach, or a private one if that is impossible.

        Collective; the same shape and dtype on every rank. Raises torch's errors, for a negative size for example, and
        CollectiveError on every rank if one has no private memory either.
        """
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        segment = self.share(like.nbytes) if like.numel() else None
        if segment is None:
            problem, private = None, like
            try:
                private = torch.empty_like(like, device="cpu")
            except RuntimeError as error:
                problem = f"group {self.name!r}: empty: {str(error).splitlines()[0]}"
            raise_together(self._comm, problem)
            return private
        self._add(segment)
        return segment.tensor(like.numel(), dtype).view(like.shape)

    def open_pool(self, nbytes: int) -> None:
        """Make `pool`, of at most ``nbytes`` bytes a rank. Collective.

        There is none if the group spans nodes. Memory is taken from the node as blocks need it, not now.
        """
        node = self.node
        nbytes = nbytes // BLOCK_UNIT * BLOCK_UNIT
        if node is None or self._memory is None or not node.alone or nbytes <= 0:
            return
        made = self._memory.unreserved(nbytes)
        if made is not None:
            whole, stride, file = made
            self.pool = Pool(whole, stride, nbytes, node.comm.rank, file, self._memory.way)
            self._add(self.pool)

    def _add(self, segment: SharedSegment) -> None:
        at = bisect.bisect(self._bounds, segment.address)
        self._bounds[at:at] = segment.address, segment.address + segment.nbytes
        self._numbers.insert(at // 2, len(self.segments))
        self.segments.append(segment)

    def reaches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in a window."""
        return bool(self.segments) and self.find(tensor) is not None

    def find(self, tensor: Tensor) -> WindowTensor | None:
        """Return where in a window ``tensor`` lies; None if it lies in no window, or at no multiple of its itemsize."""
        address = tensor.data_ptr()
        before = bisect.bisect(self._bounds, address)
        if before % 2 == 0:  # tested first: private tensors must not become slower
            return None
        nbytes, dtype = tensor.nbytes, tensor.dtype
        found = self._found.get((address, nbytes, dtype))
        if found is not None:
            return found
        index = self._numbers[before // 2]
        segment = self.segments[index]
        offset = address - segment.address
        # An address between two elements is no place: the ranks' parts are seen as tensors of the dtype.
        if offset + nbytes > segment.nbytes or offset % dtype.itemsize:
            return None
        if len(self._found) >= MOST_PLACES:
            self._found.clear()
        found = WindowTensor(segment, index, offset, nbytes, dtype)
        self._found[address, nbytes, dtype] = found
        return found

    def close(self) -> None:
        """Let go of the windows. Memory that a tensor refers to stays as long as the tensor. Collective."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None
        self._found.clear()
        self._bounds.clear()
        self._numbers.clear()
        self.segments.clear()
        if self._node is not None:
            self._node.comm.Free()


class WindowTensor:
    """A tensor in a window, and its counterparts on the other ranks of the node.

    segment, index: the window and its number. offset, nbytes: the tensor's place there, in bytes.
    block: the tensor lies in a block of a pool, so its counterparts may have other offsets.
    """

    def __init__(self, segment: SharedSegment, index: int, offset: int, nbytes: int, dtype: torch.dtype) -> None:
        self.segment, self.index, self.offset, self.nbytes, self.dtype = segment, index, offset, nbytes, dtype
        self.block = isinstance(segment, Pool)
        #: the place as a number. It is the same on all ranks for the same place, and from BLOCK on for a block
        self.number = BLOCK | offset if self.block else index << 48 | offset
        self._rows: dict[tuple[int, int], list[Tensor]] = {}

    def parts(self, places: Sequence[int] | None = None) -> list[Tensor]:
        """Return every rank's tensor, flat, in the order of the node's ranks; ``places`` as for `rows`."""
        return self.rows(0, self.nbytes // self.dtype.itemsize, places)

    def rows(self, low: int, high: int, places: Sequence[int] | None = None) -> list[Tensor]:
        """Return elements ``low`` to ``high`` of every rank's tensor.

        places: every rank's `number`; None if all are this one. The rows are then kept: making them takes microseconds.
        """
        if places is not None:
            firsts = [(place & OFFSET) // self.dtype.itemsize for place in places]
            with torch.inference_mode(False):
                typed = self.segment.typed(self.dtype)
                return [part[first + low : first + high] for part, first in zip(typed, firsts, strict=True)]
        rows = self._rows.get((low, high))
        if rows is None:
            first = self.offset // self.dtype.itemsize
            with torch.inference_mode(False):
                rows = [part[first + low : first + high] for part in self.segment.typed(self.dtype)]
            self._rows[low, high] = rows
        return rows
