"""Flags in a shared window, by which the ranks of a node meet and compare their calls without a message.

Each sequence of collectives has flags of its own: one sequence is the caller's, and each stream has another. Each
collective through memory begins with a comparison: each rank tells the others what it is about to do.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commengine.errors import CollectiveMismatch
from commengine.mpi import check_spare, load_mpi
from commengine.operations import IN_MEMORY

if TYPE_CHECKING:
    from mpi4py import MPI

#: how often a waiting rank looks at another rank's flag between two calls of MPI
LOOKS_PER_PROGRESS = 256

#: how often a rank looks before it waits in the sequence's own way, which takes longer for each look and may sleep
FIRST_LOOKS = 30

#: the flags of a rank fill two cache lines of their own. In the first: the round, and twice three words for a call
#: (place; size and operation; checksum of the rest). In the second: the progress in each stage of a pipeline
LINES_BYTES = 128
_ROUND, _ASKED, _WORDS, _STAGES = 0, 1, 3, 8

#: the stages of a chunk that goes through slots (`commengine.shared_memory.slots`)
FILLED, REDUCED = range(2)

#: bytes of shared memory that are left for MPI itself
MARGIN_BYTES = 8 << 20

#: the communicators that MPICH makes for a window
WINDOW_COMMUNICATORS = 2

#: the place of a tensor that lies in no window
PRIVATE = -1

#: a place of at least this number is a block of a pool; its offset is in the lower bits
BLOCK = 1 << 62

#: the operations by the number that stands in the flags. "gather_into": an all-gather whose output lies in a window
_OPERATIONS = (*IN_MEMORY, "gather_into")
_NUMBERS = {name: number for number, name in enumerate(_OPERATIONS)}


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
        self._window = new_window(comm, LINES_BYTES)
        self._window.Lock_all()  # MPI_Win_sync needs a passive access epoch
        self._sync = self._window.Sync
        memory: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(self.size)]
        self._flags = [memoryview(part).cast("q") for part in memory]
        self._mine = self._flags[self.rank]
        self._others = [flags for flags in self._flags if flags is not self._mine]
        for word in range(len(self._mine)):
            self._mine[word] = 0
        self._round = 0
        self._words = _ASKED  # where the words of the present call begin
        self._asked = (PRIVATE, 0, 0)  # this rank's words
        self._checksums: dict[object, int] = {}
        comm.Barrier()  # every flag is 0 before any rank looks

    def close(self) -> None:
        """Free the window. Collective."""
        self._others.clear()
        for flags in self._flags:
            flags.release()
        self._flags.clear()
        self._window.Unlock_all()
        self._window.Free()

    # Comparing calls --------------------------------------------------------------------------------------------

    def begin(self, operation: str, place: int, nbytes: int, how: tuple[object, ...]) -> list[int] | None:
        """Wait until every rank begins a collective, and compare the calls: `ask`, then `agree`."""
        self.ask(operation, place, nbytes, how)
        return self.agree()

    def ask(self, operation: str, place: int, nbytes: int, how: tuple[object, ...]) -> None:
        """Tell the other ranks what this rank is about to do. It does not wait.

        place: where the tensor lies: a number that is the same on all ranks, a number from BLOCK on, or PRIVATE. Some
        ranks may give a block and others PRIVATE. how: dtype, and reduction or root, in a few forms only, because their
        checksums are kept. Everything that this rank wrote before can be read by a rank that has agreed.

        A rank cannot be two calls ahead of another rank, because it waits in `agree` for every rank's last call. So
        two sets of words suffice, and no rank waits until the others have read its words.
        """
        checksum = self._checksums.get(how)
        if checksum is None:
            checksum = self._checksums[how] = zlib.crc32(repr(how).encode())
        mine, word = self._mine, _ASKED + _WORDS + _ASKED - self._words
        self._words = word
        about = nbytes << 8 | _NUMBERS[operation]
        self._asked = place, about, checksum
        mine[word], mine[word + 1], mine[word + 2] = place, about, checksum
        self._round += 1
        self._sync()
        mine[_ROUND] = self._round

    def agree(self) -> list[int] | None:
        """Wait until every rank has asked, and compare the calls. Returns the places of all ranks if they differ.

        Raises CollectiveMismatch on all ranks if the calls differ, because a rank would otherwise write over a tensor
        that belongs to another collective.
        """
        word = self._words
        self._await(_ROUND, self._round)
        place, about, checksum = self._asked
        alike = True
        for flags in self._others:
            if flags[word + 1] != about or flags[word + 2] != checksum:
                break
            alike = alike and flags[word] == place
        else:
            if alike:
                return None
            places = [flags[word] for flags in self._flags]
            if _fit(places):
                return places
        asked = "; ".join(f"rank {rank}: {_described(flags, word)}" for rank, flags in enumerate(self._flags))
        raise CollectiveMismatch(f"the ranks gave different operations, tensors, dtypes, reductions or roots: {asked}")

    def meet(self) -> None:
        """Wait until every rank is here. Each rank then sees everything that the others wrote before."""
        self._round += 1
        self._sync()
        self._mine[_ROUND] = self._round
        self._await(_ROUND, self._round)

    # Stages -----------------------------------------------------------------------------------------------------

    def post(self, stage: int, count: int) -> None:
        """Tell the other ranks that this rank has done ``count`` chunks of a pipeline's ``stage``, and publish them."""
        self._sync()
        self._mine[_STAGES + stage] = count

    def wait_for(self, stage: int, count: int) -> None:
        """Wait until every other rank has posted at least ``count`` chunks of ``stage``."""
        self._await(_STAGES + stage, count)

    # Waiting ----------------------------------------------------------------------------------------------------

    def _await(self, word: int, value: int) -> None:
        """Wait until that word of every other rank's flags is at least ``value``."""
        for flags in self._others:
            if flags[word] >= value:
                continue
            for _ in range(FIRST_LOOKS):
                if flags[word] >= value:
                    break
            else:
                self._wait(self._progressing(flags, word, value))
        self._sync()

    def _progressing(self, flags: memoryview, word: int, value: int) -> Callable[[], bool]:
        """Return whether the wait is over, as a function.

        It lets MPI make progress now and then, because another rank may wait for a message.
        """
        looks = 0

        def looked() -> bool:
            nonlocal looks
            looks += 1
            if looks % LOOKS_PER_PROGRESS == 0:
                self._progress()
            return bool(flags[word] >= value)

        return looked


def _fit(places: list[int]) -> bool:
    """Whether the ranks' tensors may lie at these places in one collective.

    Each rank's blocks have offsets of their own, and a rank whose pool is full has a private tensor.
    """
    return all(place == places[0] or (_comes_and_goes(place) and _comes_and_goes(places[0])) for place in places)


def _comes_and_goes(place: int) -> bool:
    return place == PRIVATE or place >= BLOCK


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


def _described(flags: memoryview, word: int) -> str:
    place, about = flags[word : word + 2]
    nbytes, operation = divmod(about, 1 << 8)
    where = "of a private tensor"
    if place >= BLOCK:
        where = "of a block of the pool"
    elif place != PRIVATE:
        segment, offset = divmod(place, 1 << 48)
        where = f"at byte {offset} of shared tensor {segment}"
    return f"{_OPERATIONS[operation]} of {nbytes} bytes {where}"


def spin(done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns True, for microseconds; other threads may take the core in between."""
    while not done():
        os.sched_yield()
