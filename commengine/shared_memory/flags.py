"""Where the ranks of a node meet without a message: flags in a window that all of them see.

A lane is one ordered sequence of collectives through memory: the caller's, or a stream's. Its ranks come together at
the beginning of each and tell each other what they are about to do.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from commengine.errors import CollectiveMismatch
from commengine.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: looks at another's flag between two calls of MPI
LOOKS_PER_PROGRESS = 256

#: a rank's flags have a cache line of their own: round; where, what and how; progress in a pipeline of three stages
LINE_BYTES = 64
_ROUND, _ASKED, _STAGES = 0, slice(1, 4), 4

#: shared memory that is left for MPI itself
MARGIN_BYTES = 8 << 20

#: the place of a tensor that lies in no window
PRIVATE = -1

_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "gather_into", "broadcast")


class Lane:
    """The flags of the ranks of one node. Collective to make, on the main threads, and to close.

    comm: the lane's own MPI communicator. wait: how to wait until a function says so.
    """

    def __init__(self, comm: MPI.Intracomm, wait: Callable[[Callable[[], bool]], None]) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.comm = comm
        self._wait = wait
        self._progress = comm.Iprobe
        self._window = new_window(comm, LINE_BYTES)
        self._window.Lock_all()  # Sync asks for it
        self._sync = self._window.Sync
        memory: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(self.size)]
        self._flags = [memoryview(part).cast("q") for part in memory]
        self._mine = self._flags[self.rank]
        for word in range(len(self._mine)):
            self._mine[word] = 0
        self._round = 0
        comm.Barrier()  # every flag is 0 before anybody looks

    def close(self) -> None:
        """Collective."""
        for flags in self._flags:
            flags.release()
        self._flags.clear()
        self._window.Unlock_all()
        self._window.Free()

    def begin(self, operation: str, place: int, nbytes: int, how: str) -> None:
        """Wait until every rank is at the beginning of a collective; it must be the same one.

        place: where the tensor lies, as a number that is the same on all ranks. how: dtype and reduction or root.
        A tensor that lies elsewhere on one rank would be written over: CollectiveMismatch on all of them.
        """
        self._mine[1] = place
        self._mine[2] = nbytes << 8 | _OPERATIONS.index(operation)
        self._mine[3] = zlib.crc32(how.encode())
        self.meet()
        first = self._flags[0][_ASKED]
        if any(flags[_ASKED] != first for flags in self._flags):
            asked = "; ".join(f"rank {rank}: {_described(flags)}" for rank, flags in enumerate(self._flags))
            self.meet()  # nobody goes on to overwrite what another has not read
            raise CollectiveMismatch(
                f"the ranks gave different operations, tensors, dtypes, reductions or roots: {asked}"
            )

    def check(self, operation: str, place: int, nbytes: int, how: str) -> None:
        """`begin`, for who goes on without the lane: CollectiveMismatch on all ranks where one would stay in it."""
        self.begin(operation, place, nbytes, how)
        self.meet()  # everybody has read what the next `begin` overwrites

    def meet(self) -> None:
        """Wait until every rank is here, and all that it wrote can be seen."""
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
        """Tell all that this rank has done ``count`` of a pipeline's ``stage``; what it wrote can be seen."""
        self._sync()
        self._mine[_STAGES + stage] = count

    def reached(self, stage: int, count: int) -> bool:
        """Whether every rank has posted as much."""
        word = _STAGES + stage
        for flags in self._flags:
            if flags[word] < count:
                return False
        self._sync()
        return True

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait for the others until ``done``."""
        if not done():
            self._wait(self._progressing(done))

    def _progressing(self, done: Callable[[], bool]) -> Callable[[], bool]:
        """``done``, and now and then it lets MPI work on what another rank may wait for."""
        looks = 0

        def looked() -> bool:
            nonlocal looks
            looks += 1
            if looks % LOOKS_PER_PROGRESS == 0:
                self._progress()
            return done()

        return looked


def new_window(comm: MPI.Intracomm, nbytes: int) -> MPI.Win:
    """A window of ``nbytes`` a rank. Collective, on the ranks' main threads.

    All ranks come here first: MPICH makes a window without letting another thread of the process into MPI, and that
    one may be what another rank waits for.
    """
    comm.Barrier()
    window: MPI.Win = load_mpi().Win.Allocate_shared(nbytes, 1, comm=comm)
    return window


def fits(comm: MPI.Intracomm, nbytes: int) -> bool:
    """Whether every node has ``nbytes`` to share: touching a window that it has not would end the process.

    Collective, the same on all ranks.
    """
    try:
        space = os.statvfs("/dev/shm")  # where Linux keeps it; in a container often 64 MB
        room = space.f_bavail * space.f_frsize
    except OSError:
        room = sys.maxsize
    return bool(comm.allreduce(nbytes + MARGIN_BYTES <= room, load_mpi().LAND))


def _described(flags: memoryview) -> str:
    nbytes, operation = divmod(flags[2], 1 << 8)
    where = "of a private tensor"
    if flags[1] != PRIVATE:
        segment, offset = divmod(flags[1], 1 << 48)
        where = f"at byte {offset} of shared tensor {segment}"
    return f"{_OPERATIONS[operation]} of {nbytes} bytes {where}"


def spin(done: Callable[[], bool]) -> None:
    """Wait for what comes in microseconds, giving the core to whoever else wants it."""
    while not done():
        os.sched_yield()
