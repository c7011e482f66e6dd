"""Pool: blocks of a window for tensors that come and go, such as the activations that a collective sums."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from .files import Way
from .segment import PAGE, SharedSegment, ThisProcess

#: a block begins, and ends, at a multiple of this many bytes
BLOCK_UNIT = PAGE

#: memory is reserved in steps of at least this many bytes
RESERVE_BYTES = 1 << 20


class _Block(weakref.ref[memoryview]):
    """A weak reference to the memory of one block, by which the pool learns that no tensor refers to it any more."""

    __slots__ = ("size", "start")
    start: int
    size: int


class Pool(SharedSegment):
    """A window of which each rank hands out blocks of its own part, without asking the other ranks.

    The ranks' histories may differ: a rank tells the others where its block lies when a collective begins
    (`commengine.shared_memory.flags`).

    A block is free again when no tensor refers to its memory: not the tensor that was handed out, not a view of it, not
    what autograd or a stream keeps. torch then drops the buffer of `torch.frombuffer`, on any thread and at any moment;
    the pool hears of it through a weak reference, and takes the block back when the next one is asked for.

    Memory is reserved when a block first needs it, so a rank's memory grows to the most that was in use at one time,
    and to the gaps between blocks of different sizes. It is given back when no tensor refers to the window any more.

    whole, stride, nbytes, rank: as for a `SharedSegment`; nbytes is the most bytes of a rank's blocks. file: the file
    of the memory, which the pool closes. way: how memory is reserved there. All methods are local, and any thread may
    call them. A forked child gets no blocks: it would write over its parent's.
    """

    def __init__(self, whole: Tensor, stride: int, nbytes: int, rank: int, file: int, way: Way) -> None:
        super().__init__(whole, stride, nbytes, rank)
        self._file, self._way, self._begin = file, way, stride * rank
        self._cut_off = 0  # bytes from the start that blocks have had: in use, or free
        self._reserved = 0  # bytes from the start that have memory
        self._in_use: dict[int, _Block] = {}
        self._dropped: deque[_Block] = deque()
        self._free: dict[int, list[int]] = {}  # size -> starts
        self._lock = threading.Lock()
        self._process = ThisProcess()
        #: give the file back; this pool hands out no memory that it has not reserved yet
        self.close = weakref.finalize(self, os.close, file)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialised flat tensor in a block of its own; None if no room is left. Not collective."""
        if self._process.forked:
            return None
        nbytes = numel * dtype.itemsize
        size = -(-nbytes // BLOCK_UNIT) * BLOCK_UNIT
        with self._lock:  # programs with several streams may have a thread for each
            while self._dropped:
                self._give_back(self._dropped.popleft())
            starts = self._free.get(size)
            start = starts.pop() if starts else self._cut(size)
            if start is None:
                return None
            memory = self._mine[start : start + nbytes]
            block = _Block(memory, self._dropped.append)
            block.start, block.size = start, size
            self._in_use[id(block)] = block
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    @property
    def touched(self) -> int:
        """The bytes of this rank's memory that blocks have had."""
        return self._cut_off

    def _give_back(self, block: _Block) -> None:
        del self._in_use[id(block)]
        self._free.setdefault(block.size, []).append(block.start)

    def _cut(self, size: int) -> int | None:
        """Return where a block of ``size`` bytes begins: in the smallest gap that holds it, or in new memory."""
        gaps = self._joined()
        fitting = [gap for gap in gaps if gap[1] >= size]
        if fitting:
            start, length = min(fitting, key=lambda gap: gap[1])
            gaps.remove((start, length))
        else:
            start, length = self._cut_off, 0
            if gaps and sum(gaps[-1]) == self._cut_off:
                start, length = gaps.pop()
            if not self._grow(size - length):
                return None
            length = size
        if length > size:
            gaps.append((start + size, length - size))
        self._free = {}
        for begin, long in gaps:
            self._free.setdefault(long, []).append(begin)
        return start

    def _joined(self) -> list[tuple[int, int]]:
        """Return the gaps, (start, length), in order; neighbours are one gap."""
        gaps: list[tuple[int, int]] = []
        for start, size in sorted((start, size) for size, starts in self._free.items() for start in starts):
            if gaps and sum(gaps[-1]) == start:
                gaps[-1] = (gaps[-1][0], gaps[-1][1] + size)
            else:
                gaps.append((start, size))
        return gaps

    def _grow(self, nbytes: int) -> bool:
        """Let blocks have ``nbytes`` more. False if the pool or the node has no more."""
        end = self._cut_off + nbytes
        if end > self.nbytes:
            return False
        begin, ahead = self._begin, min(self.nbytes, max(end, self._reserved + RESERVE_BYTES))
        for enough in (ahead, end):
            if end > self._reserved:
                self._reserved = self._way.reserve(self._file, begin + self._reserved, begin + enough) - begin
        if end > self._reserved:
            return False
        self._cut_off = end
        return True
