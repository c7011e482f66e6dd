"""Pool: blocks of a window for tensors that come and go, such as the activations that a collective sums."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .flags import room
from .segment import SharedSegment

if TYPE_CHECKING:
    from mpi4py import MPI

#: a block begins, and ends, at a multiple of this many bytes: a page
BLOCK_UNIT = 4096


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

    Memory is taken from the node when a block is first used, so a rank's memory grows to the most that was in use at
    one time, and to the gaps between blocks of different sizes. It is given back when the window is freed.

    nbytes: the most bytes of a rank's blocks. Collective to make, as a `SharedSegment` is. Everything else is local,
    and any thread may call it.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        self._ranks = comm.size
        self._touched = 0  # bytes from the start that have memory: blocks in use, or free
        self._in_use: dict[int, _Block] = {}
        self._dropped: deque[_Block] = deque()
        self._free: dict[int, list[int]] = {}  # size -> starts
        self._lock = threading.Lock()
        super().__init__(comm, nbytes)
        self._memory = memoryview(self._mine)
        self._own = self.parts[comm.rank]

    def _touch_first(self, part: Tensor) -> None:
        """Touch nothing: `take` does."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialised flat tensor in a block of its own; None if no room is left. Not collective."""
        nbytes = numel * dtype.itemsize
        size = -(-nbytes // BLOCK_UNIT) * BLOCK_UNIT
        with self._lock:  # programs with several streams may have a thread for each
            while self._dropped:
                self._give_back(self._dropped.popleft())
            starts = self._free.get(size)
            start = starts.pop() if starts else self._cut(size)
            if start is None:
                return None
            memory = self._memory[start : start + nbytes]
            block = _Block(memory, self._dropped.append)
            block.start, block.size = start, size
            self._in_use[id(block)] = block
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    @property
    def touched(self) -> int:
        """The bytes of this rank's memory that the pool has taken from the node."""
        return self._touched

    def unused(self) -> bool:
        """Whether no tensor refers to a block. Drops our own tensors."""
        self.parts.clear()
        self._typed.clear()
        while self._dropped:
            self._give_back(self._dropped.popleft())
        return not self._in_use

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
            start, length = self._touched, 0
            if gaps and sum(gaps[-1]) == self._touched:
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
        """Take ``nbytes`` more of the node's memory. False if that is more than there is for every rank to do so."""
        end = self._touched + nbytes
        if end > self.nbytes or nbytes * self._ranks > room():
            return False
        self._own[self._touched : end].zero_()  # as in `SharedSegment._touch_first`
        self._touched = end
        return True
