"""Collectives through memory that the ranks of a node share (MPI-3 windows).

A tensor made by `Communicator.empty` lies in a window in which every rank sees every other's part. A large collective
on such a tensor reads and writes there: no message, no copy in or out, and each element is reduced once, by one rank,
in rank order. So the result has the same bits on every rank and in every run.

The ranks meet at flags in a window of the lane's own, which a stream has as well as the caller.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dtypes import reduce_in_order
from .errors import CollectiveMismatch
from .mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: from how many bytes on a tensor in a window is reduced or copied there, and not by messages
SHARED_BYTES = 32 * 1024

#: bytes of each rank's operand that are reduced at a time: all of them, and the result, stay in the caches
BLOCK_BYTES = 1 << 20

#: looks at another's flag between two calls of MPI
LOOKS_PER_PROGRESS = 256

#: shared memory that is left for MPI itself
MARGIN_BYTES = 8 << 20

#: a rank's flags have a cache line of their own
LINE_BYTES = 64

_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "gather_into", "broadcast")


class SharedTensors:
    """The windows of one communicator. Collective to make, `empty` and `close`.

    comm: an MPI intracommunicator, not owned. available: whether all its ranks share a node's memory.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._own: MPI.Intracomm | None = None  # what the windows are made from
        self.segments: list[_Segment] = []
        self._available: bool | None = None

    @property
    def available(self) -> bool:
        """Whether all ranks, more than one, share a node's memory. Collective the first time."""
        if self._available is None:
            mpi = load_mpi()
            node = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
            self._available = bool(self._comm.allreduce(1 < node.size == self._comm.size, mpi.LAND))
            node.Free()
        return self._available

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that all ranks reach, uninitialised; every rank asks for the same. Private where they cannot."""
        numel = 1
        for size in shape:
            numel *= size
        if not self.available or numel == 0 or not self._fits(numel * dtype.itemsize):
            return torch.empty(tuple(shape), dtype=dtype)
        if self._own is None:
            self._own = self._comm.Dup()
        segment = _Segment(self._own, numel * dtype.itemsize)
        self.segments.append(segment)
        return segment.tensor(numel, dtype).view(tuple(shape))

    def _fits(self, nbytes: int) -> bool:
        """Whether the node has the memory: touching a window that it has not would end the process. Collective."""
        mpi = load_mpi()
        try:
            space = os.statvfs("/dev/shm")  # where Linux keeps it; in a container often 64 MB
            room = space.f_bavail * space.f_frsize
        except OSError:
            room = sys.maxsize
        return bool(self._comm.allreduce(nbytes * self._comm.size + MARGIN_BYTES <= room, mpi.LAND))

    def reaches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in a window and is large enough for a collective there."""
        return bool(self.segments) and tensor.nbytes >= SHARED_BYTES and self.find(tensor) is not None

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
        if self._own is not None and not left:
            # MPICH numbers windows by their communicators: a number in use must not be given out again.
            self._own.Free()


class _Segment:
    """One window: this rank's part, and where the others' are."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:

        self.nbytes = nbytes
        self.window = _new_window(comm, nbytes)
        memory = [self.window.Shared_query(rank)[0] for rank in range(comm.size)]
        self._mine = memory[comm.rank]
        self.address: int = self._mine.address
        # Not views of what the user has: writing here must not look like a change that autograd has to know of.
        self.parts = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
        # Touched, or the system would count it as free, and end the process where later there is none.
        self.parts[comm.rank].zero_()
        comm.Barrier()

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """This rank's part."""
        return torch.frombuffer(self._mine, dtype=dtype, count=numel)

    def unused(self) -> bool:
        """Whether no tensor but ours refers to the memory: unmapping it then hurts nobody. Ours are gone after this."""
        self.parts.clear()
        return sys.getrefcount(self._mine) == 2  # ours, and the call's

    def free(self) -> None:
        self.window.Free()


class Place:
    """A tensor in a window, and its counterparts on the other ranks."""

    def __init__(self, segment: _Segment, index: int, offset: int, nbytes: int, dtype: torch.dtype) -> None:
        self.segment, self.index, self.offset, self.nbytes, self.dtype = segment, index, offset, nbytes, dtype

    def parts(self) -> list[Tensor]:
        """Every rank's tensor, flat, in rank order."""
        end = self.offset + self.nbytes
        return [part[self.offset : end].view(self.dtype) for part in self.segment.parts]


class SharedLane:
    """One ordered sequence of collectives on shared tensors: the caller's, or a stream's.

    comm: the lane's own MPI communicator. wait: how to wait until a function says so. Collective to make.
    """

    def __init__(self, comm: MPI.Intracomm, wait: Callable[[Callable[[], bool]], None]) -> None:

        self._rank, self._size = comm.rank, comm.size
        self._wait = wait
        self._progress = comm.Iprobe
        self._window = _new_window(comm, LINE_BYTES)
        self._window.Lock_all()  # Sync asks for it
        self._sync = self._window.Sync
        memory: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(self._size)]
        self._flags = [memoryview(part).cast("q") for part in memory]
        self._mine = self._flags[self._rank]
        self._mine[0] = 0
        self._round = 0
        comm.Barrier()  # every flag is 0 before anybody looks

    def close(self) -> None:
        """Collective."""
        for flags in self._flags:
            flags.release()
        self._flags.clear()
        self._window.Unlock_all()
        self._window.Free()

    def all_reduce(self, place: Place, op: str) -> None:
        """Rank r reduces the r-th part of everybody's tensor, and writes it to all."""
        with self._together("all_reduce", place, op):
            parts = place.parts()
            for block in self._blocks(parts[0], self._rank, self._size):
                operands = [part[block] for part in parts]
                result = reduce_in_order(operands, op, operands[0])
                for other in operands[1:]:
                    other.copy_(result)

    def reduce_scatter(self, output: Tensor, place: Place, op: str) -> None:
        """Rank r reduces the r-th part of everybody's ``place`` into its ``output``."""
        with self._together("reduce_scatter", place, op):
            parts = [part.view(self._size, -1)[self._rank] for part in place.parts()]
            flat = output.view(-1)
            for block in self._blocks(flat, 0, 1):
                reduce_in_order([part[block] for part in parts], op, flat[block])

    def all_gather(self, output: Tensor, place: Place) -> None:
        """Copy everybody's ``place`` into ``output``."""
        with self._together("all_gather", place):
            rows = output.view(self._size, -1)
            for rank, part in enumerate(place.parts()):
                if rows[rank].data_ptr() != part.data_ptr():
                    rows[rank].copy_(part)

    def gather_into(self, place: Place, input: Tensor) -> None:
        """Copy ``input`` into this rank's rows of everybody's ``place``."""
        with self._together("gather_into", place):
            flat = input.reshape(-1)
            for part in place.parts():
                row = part.view(self._size, -1)[self._rank]
                if row.data_ptr() != flat.data_ptr():
                    row.copy_(flat)

    def broadcast(self, place: Place, root: int) -> None:
        """Copy ``root``'s tensor."""
        with self._together("broadcast", place):
            if self._rank != root:
                parts = place.parts()
                parts[self._rank].copy_(parts[root])

    @contextlib.contextmanager
    def _together(self, operation: str, place: Place, op: str = "") -> Iterator[None]:
        """Around reading and writing each other's memory: all ranks are here before, and done afterwards.

        Behind autograd's back, whatever the calling thread's modes, as MPI writes.
        """
        self._meet(operation, place, op)
        try:
            with torch.inference_mode():
                yield
        finally:
            self._meet()

    def _reached(self, flags: memoryview) -> Callable[[], bool]:
        """Whether that rank is here. Now and then it lets MPI work on what another rank may wait for."""
        target, looks = self._round, 0

        def reached() -> bool:
            nonlocal looks
            looks += 1
            if looks % LOOKS_PER_PROGRESS == 0:
                self._progress()
            return bool(flags[0] >= target)

        return reached

    def _blocks(self, flat: Tensor, index: int, count: int) -> list[slice]:
        """The ``index``-th of ``count`` parts of a flat tensor, a few bytes at a time."""
        low, high = (flat.numel() * part // count for part in (index, index + 1))
        step = BLOCK_BYTES // flat.itemsize
        return [slice(start, min(start + step, high)) for start in range(low, high, step)]

    def _meet(self, operation: str | None = None, place: Place | None = None, op: str = "") -> None:
        """Wait until every rank is here, and all that it wrote can be seen.

        Where the collective begins they tell each other what they are about to do: a tensor that lies elsewhere on
        one rank would be written over, so CollectiveMismatch is raised on all of them.
        """
        self._round += 1
        if operation is not None and place is not None:
            self._mine[1] = place.index << 48 | place.offset
            self._mine[2] = place.nbytes << 8 | _OPERATIONS.index(operation)
            self._mine[3] = zlib.crc32(f"{place.dtype} {op}".encode())
        self._sync()
        self._mine[0] = self._round
        for flags in self._flags:
            if flags[0] < self._round:
                self._wait(self._reached(flags))
        self._sync()
        if operation is not None and len({tuple(flags[1:4]) for flags in self._flags}) > 1:
            asked = "; ".join(f"rank {rank}: {_described(flags)}" for rank, flags in enumerate(self._flags))
            self._meet()  # nobody goes on to overwrite what another has not read
            raise CollectiveMismatch(f"the ranks gave different shared tensors, dtypes or reductions: {asked}")


def _new_window(comm: MPI.Intracomm, nbytes: int) -> MPI.Win:
    """A window of ``nbytes`` a rank. Collective, on the ranks' main threads.

    All ranks come here first: MPICH makes a window without letting another thread of the process into MPI, and that
    one may be what another rank waits for.
    """
    comm.Barrier()
    window: MPI.Win = load_mpi().Win.Allocate_shared(nbytes, 1, comm=comm)
    return window


def _described(flags: memoryview) -> str:
    segment, offset = divmod(flags[1], 1 << 48)
    nbytes, operation = divmod(flags[2], 1 << 8)
    return f"{_OPERATIONS[operation]} of {nbytes} bytes at byte {offset} of shared tensor {segment}"


def spin(done: Callable[[], bool]) -> None:
    """Wait for what comes in microseconds, giving the core to whoever else wants it."""
    while not done():
        os.sched_yield()
