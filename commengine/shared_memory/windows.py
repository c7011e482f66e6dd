"""Tensors in windows: memory that the ranks of a node share.

A tensor made by `Communicator.empty` lies in a window in which every rank of the node sees every other rank's part.
A collective on it needs no message and no copy in or out. One rank reduces each element, once, in the order of the
ranks, so the result has the same bits on every rank and in every run.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commengine.agreement import raise_together

from .files import WAYS
from .flags import PRIVATE
from .nodes import Node, find_node
from .peer_memory import PeerMemory
from .segment import NodeMemory, SharedSegment

if TYPE_CHECKING:
    from mpi4py import MPI

#: places of tensors that are kept, because finding one takes a microsecond
MOST_PLACES = 256

#: the bits of `WindowTensor.number` that are the place in a window
OFFSETS = (1 << 48) - 1
#: the number is one of 64 bits with a sign
MOST_WINDOWS = 1 << 15

#: up to this many bytes of all operands, a row is reduced at once, because a node's shared cache holds them
CACHED_BYTES = 8 << 20

#: a longer row is reduced in blocks of this many bytes, so that the result is still in the core's own cache when it is
#: copied to the other ranks
BLOCK_BYTES = 256 << 10


class SharedTensors:
    """The windows of one communicator, which the caller owns. `empty` and `close` are collective.

    name: the group's, for errors.
    """

    def __init__(self, comm: MPI.Intracomm, name: str) -> None:
        self._comm, self.name = comm, name
        self.rank, self.size = comm.rank, comm.size
        self._node: Node | None = None
        #: whether the ranks have looked for `node`
        self.looked = comm.size == 1
        self._memory: NodeMemory | None = None
        #: the windows by their numbers
        self.segments: dict[int, SharedSegment] = {}
        #: where each segment begins and ends, ascending, and the numbers of the segments in that order. The two are
        #: swapped as one, because the worker of a stream reads them while the caller makes a window
        self._where: tuple[Sequence[int], Sequence[int]] = ((), ())
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

    @functools.cached_property
    def peers(self) -> PeerMemory | None:
        """The private memory of this node's ranks; None, on all of them, if one cannot read another's.

        Collective over the node the first time.
        """
        return None if self.node is None else PeerMemory.find(self.node.comm)

    def share(self, nbytes: int) -> SharedSegment | None:
        """Return memory of ``nbytes`` bytes a rank, 1 or more; None, on all ranks, if a rank gets none. Collective."""
        return None if self.node is None or self._memory is None else self._memory.make(nbytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that all ranks of the node can reach, or a private one if that is impossible.

        Collective; the same shape and dtype on every rank. Raises torch's errors, for a negative size for example, and
        CollectiveError on every rank if one has no private memory either.
        """
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        segment = self.share(like.nbytes) if like.numel() and len(self.segments) < MOST_WINDOWS else None
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

    def _add(self, segment: SharedSegment) -> None:
        bounds, numbers = map(list, self._where)
        at = bisect.bisect(bounds, segment.address)
        bounds[at:at] = segment.address, segment.address + segment.nbytes
        number = next(number for number in itertools.count() if number not in self.segments)
        numbers.insert(at // 2, number)
        self.segments[number] = segment
        self._where = bounds, numbers

    def window_of(self, tensor: Tensor) -> int | None:
        """Return the number of the window in which ``tensor`` lies, or None."""
        bounds, numbers = self._where
        before = bisect.bisect(bounds, tensor.data_ptr())
        return numbers[before // 2] if before % 2 else None

    def free(self, number: int) -> None:
        """Let go of a window: its tensors are private from now on. No collective may be under way."""
        bounds, numbers = map(list, self._where)
        at = numbers.index(number)
        del numbers[at], bounds[2 * at : 2 * at + 2]
        self._where = bounds, numbers
        self._found = {key: place for key, place in self._found.items() if place.number >> 48 != number}
        del self.segments[number]

    def reaches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in a window."""
        return bool(self.segments) and self.find(tensor) is not None

    def find(self, tensor: Tensor) -> WindowTensor | None:
        """Return where in a window ``tensor`` lies; None if it lies in no window, or at no multiple of its itemsize."""
        address = tensor.data_ptr()
        bounds, numbers = self._where
        before = bisect.bisect(bounds, address)
        if before % 2 == 0:  # tested first: private tensors must not become slower
            return None
        nbytes, dtype = tensor.nbytes, tensor.dtype
        found = self._found.get((address, nbytes, dtype))
        if found is not None:
            return found
        index = numbers[before // 2]
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

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of the place of a collective's input, or PRIVATE.

        An empty one is read by nobody, so it may lie anywhere: its place is one in a window, where there are windows.
        """
        if not self.segments:
            return PRIVATE
        window = self.find(tensor)
        return window.number if window is not None else PRIVATE if tensor.numel() else next(iter(self.segments)) << 48

    def address_of(self, number: int, rank: int) -> int:
        """Return the address, in this process, of place ``number`` (`WindowTensor.number`) of a rank of the node."""
        return self.segments[number >> 48].addresses[rank] + (number & OFFSETS)

    def close(self) -> None:
        """Let go of the windows. Memory that a tensor refers to stays as long as the tensor. Collective."""
        self.abandon()
        if self._node is not None:
            self._node.comm.Free()

    def abandon(self) -> None:
        """Let go of the windows, and leave the MPI communicator to the end of MPI. Not collective."""
        self._found.clear()
        self._where = ((), ())
        self.segments.clear()


class WindowTensor:
    """A tensor in a window, and its counterparts on the other ranks of the node.

    segment, index: the window and its number. offset, nbytes: the tensor's place there, in bytes.
    """

    def __init__(self, segment: SharedSegment, index: int, offset: int, nbytes: int, dtype: torch.dtype) -> None:
        self.segment, self.offset, self.nbytes, self.dtype = segment, offset, nbytes, dtype
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


def blocks(rows: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Cut rows of one length into blocks, and yield the blocks of all rows together."""
    if sum(row.nbytes for row in rows) <= CACHED_BYTES:
        return iter([rows])
    return zip(*(torch.split(row, BLOCK_BYTES // rows[0].itemsize) for row in rows), strict=True)
