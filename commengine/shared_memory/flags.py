"""Flags in a shared window, by which the ranks of a node meet and compare their calls without a message.

Each sequence of collectives has flags of its own: one sequence is the caller's, and each stream has another. At the
beginning of each collective through memory the ranks meet, and each rank tells the others what it is about to do.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from commengine.errors import CollectiveMismatch
from commengine.mpi import check_spare, load_mpi
from commengine.operations import IN_MEMORY

if TYPE_CHECKING:
    from mpi4py import MPI

#: how often a waiting rank looks at another rank's flag between two calls of MPI
LOOKS_PER_PROGRESS = 256

#: the flags of a rank fill a cache line of their own: the round; three words for the call (place, size and operation,
#: checksum of the rest); then this rank's progress in each stage of a pipeline, up to three
LINE_BYTES = 64
_ROUND, _ASKED, _STAGES = 0, slice(1, 4), 4

#: bytes of shared memory that are left for MPI itself
MARGIN_BYTES = 8 << 20

#: the communicators that MPICH makes for a window
WINDOW_COMMUNICATORS = 2

#: the place of a tensor that lies in no window
PRIVATE = -1

#: a place of at least this number is a block of a pool. Its offset, in the lower bits, differs from rank to rank
BLOCK = 1 << 62

#: the operations by the number that stands in the flags. "gather_into": an all-gather whose output lies in a window
_OPERATIONS = (*IN_MEMORY, "gather_into")


class Flags:
    """The flags of one node's ranks, for one sequence of collectives.

    comm: the MPI communicator of the sequence, over the ranks of the node. wait: waits until a function returns True.
    Collective to make, on the ranks' main threads, and to close.
    """

    def __init__(self, comm: MPI.Intracomm, wait: Callable[[Callable[[], bool]], None]) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.comm = comm
        self._wait = wait
        self._progress = comm.Iprobe
        self._window = new_window(comm, LINE_BYTES)
        self._window.Lock_all()  # MPI_Win_sync needs a passive access epoch
        self._sync = self._window.Sync
        memory: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(self.size)]
        self._flags = [memoryview(part).cast("q") for part in memory]
        self._mine = self._flags[self.rank]
        for word in range(len(self._mine)):
            self._mine[word] = 0
        self._round = 0
        self._begun = False
        comm.Barrier()  # every flag is 0 before any rank looks

    def close(self) -> None:
        """Free the window. Collective."""
        for flags in self._flags:
            flags.release()
        self._flags.clear()
        self._window.Unlock_all()
        self._window.Free()

    def begin(self, operation: str, place: int, nbytes: int, how: str) -> None:
        """Wait until every rank begins a collective, and compare the calls.

        place: where the tensor lies: a number that is the same on all ranks, a number from BLOCK on, or PRIVATE. Some
        ranks may give a block and others PRIVATE, because a rank's pool may be full; `private_somewhere` then is true.
        how: dtype, and reduction or root. Raises CollectiveMismatch on all ranks if the calls differ, because a rank
        would otherwise write over a tensor that belongs to another collective.
        """
        if self._begun:
            self._begun = False
            return
        self._mine[1] = place
        self._mine[2] = nbytes << 8 | _OPERATIONS.index(operation)
        self._mine[3] = zlib.crc32(how.encode())
        self.meet()
        first = self._flags[0][_ASKED]
        if any(flags[_ASKED] != first and not _alike(flags[_ASKED], first) for flags in self._flags):
            asked = "; ".join(f"rank {rank}: {_described(flags)}" for rank, flags in enumerate(self._flags))
            self.meet()  # no rank overwrites its flags before all ranks have read them
            raise CollectiveMismatch(
                f"the ranks gave different operations, tensors, dtypes, reductions or roots: {asked}"
            )

    def begin_private(self) -> None:
        """Count the `begin` that this rank has done as that of the private way, which it goes on with."""
        self._begun = True

    def places(self) -> list[int]:
        """Every rank's place, between `begin` and the next `meet`."""
        return [flags[1] for flags in self._flags]

    def private_somewhere(self) -> bool:
        """Whether a rank began with a private tensor, between `begin` and the next `meet`."""
        return any(flags[1] == PRIVATE for flags in self._flags)

    def check(self, operation: str, place: int, nbytes: int, how: str) -> None:
        """Compare the calls before this rank falls back to MPI; the arguments are those of `begin`.

        Raises CollectiveMismatch on all ranks if one of them would stay in shared memory.
        """
        self.begin(operation, place, nbytes, how)
        self.meet()  # no rank overwrites its flags before all ranks have read them

    def meet(self) -> None:
        """Wait until every rank is here. Each rank then sees everything that the others wrote before."""
        self._round += 1
        self._sync()
        self._mine[_ROUND] = self._round
        for flags in self._flags:
            if flags[_ROUND] < self._round:
                self._wait(self._progressing(partial(self._is_here, flags)))
        self._sync()

    def _is_here(self, flags: memoryview) -> bool:
        return bool(flags[_ROUND] >= self._round)

    def post(self, stage: int, count: int) -> None:
        """Tell the other ranks that this rank has done ``count`` chunks of a pipeline's ``stage``, and publish them."""
        self._sync()
        self._mine[_STAGES + stage] = count

    def reached(self, stage: int, count: int) -> bool:
        """Whether every rank has posted at least ``count`` chunks of ``stage``."""
        word = _STAGES + stage
        for flags in self._flags:
            if flags[word] < count:
                return False
        self._sync()
        return True

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait for the other ranks until ``done`` returns True."""
        if not done():
            self._wait(self._progressing(done))

    def _progressing(self, done: Callable[[], bool]) -> Callable[[], bool]:
        """Wrap ``done`` so that MPI makes progress now and then, because another rank may wait for a message."""
        looks = 0

        def looked() -> bool:
            nonlocal looks
            looks += 1
            if looks % LOOKS_PER_PROGRESS == 0:
                self._progress()
            return done()

        return looked


def new_window(comm: MPI.Intracomm, nbytes: int) -> MPI.Win:
    """Make a window of ``nbytes`` bytes a rank. Collective, on the ranks' main threads.

    The ranks meet in a barrier first. While MPICH makes a window it lets no other thread of the process into MPI, and
    another rank may be waiting for that thread. Raises `TransferError` on all ranks if MPI has no communicator left.
    """
    check_spare(comm, WINDOW_COMMUNICATORS)
    comm.Barrier()
    window: MPI.Win = load_mpi().Win.Allocate_shared(nbytes, 1, comm=comm)
    return window


def fits(comm: MPI.Intracomm, nbytes: int) -> bool:
    """Whether every node has ``nbytes`` bytes of shared memory left. Collective over ``comm``; the same on all ranks.

    Touching a window that the node has no memory for would end the process.
    """
    return bool(comm.allreduce(nbytes <= room(), load_mpi().LAND))


def room() -> int:
    """The bytes of shared memory that this node has left, without those that are left for MPI. Not collective."""
    try:
        space = os.statvfs("/dev/shm")  # where Linux keeps shared memory; often 64 MB in a container
    except OSError:
        return sys.maxsize
    return space.f_bavail * space.f_frsize - MARGIN_BYTES


def _alike(one: memoryview, other: memoryview) -> bool:
    """Whether two calls differ in nothing but their blocks, or in that one rank has no block."""
    return one[1:] == other[1:] and all(place == PRIVATE or place >= BLOCK for place in (one[0], other[0]))


def _described(flags: memoryview) -> str:
    nbytes, operation = divmod(flags[2], 1 << 8)
    where = "of a private tensor"
    if flags[1] >= BLOCK:
        where = "of a tensor in the pool"
    elif flags[1] != PRIVATE:
        segment, offset = divmod(flags[1], 1 << 48)
        where = f"at byte {offset} of shared tensor {segment}"
    return f"{_OPERATIONS[operation]} of {nbytes} bytes {where}"


def spin(done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns True, for microseconds; other threads may take the core in between."""
    while not done():
        os.sched_yield()
